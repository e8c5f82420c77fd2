"""Bytes of an event stream into events (WHATWG HTML, section 9.2.6), wherever the network cuts them. No I/O."""

import msgspec

BOM = b"\xef\xbb\xbf"
DONE = b"[DONE]"
LONGEST = 1 << 24  # bytes of an event that has not ended; more of them are dropped


class SseParser:
    """Incremental: the events of a byte stream are the same for every way to cut it.

    `rest` is what follows the last blank line, with its line ends already LF. A CR that ends a read is an LF at once; the
    LF that may follow it in the next read is then dropped, so no event waits for a byte it does not need. It is kept in the
    pieces in which it came: a long event costs what its length costs, not the square of it. `overlong`: events dropped as such.
    `names`: of the events that the last `feed` returned, by position, where they have one; empty for nearly every read.
    """

    def __init__(self) -> None:
        self.names: dict[int, bytes] = {}
        self.overlong = 0
        self._pieces: list[bytes] = []  # none of them empty
        self._held = 0  # bytes in them
        self._after_cr = False
        self._opening: bytes | None = b""  # bytes held while they may still be a byte order mark; None: that is decided

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that `chunk` completes, `data` lines joined by LF. Comments, `id` and `retry` vanish."""
        if self._opening is not None:
            chunk = self._without_bom(chunk)
        if self._after_cr or b"\r" in chunk:
            chunk = self._with_lf(chunk)
        if self.names:
            self.names = {}
        text = chunk
        if self._pieces:
            if b"\n\n" not in chunk and not (chunk[:1] == b"\n" and self._pieces[-1][-1:] == b"\n"):
                self._hold(chunk)
                return []
            text = self.rest + chunk
            self._pieces, self._held = [], 0
        if text.endswith(b"\n\n") and text.startswith(b"data: "):
            # The usual read holds whole events of one line each, and one split takes it apart. The count of LFs is the proof:
            # two after each event and none inside one.
            events = text[6:-2].split(b"\n\ndata: ")
            if text.count(b"\n") == 2 * len(events):
                return events
        blocks = text.split(b"\n\n")
        self._hold(blocks.pop())
        events = []
        for block in blocks:
            data, name = _event(block)
            if data is not None:
                if name:
                    self.names[len(events)] = name
                events.append(data)
        return events

    @property
    def rest(self) -> bytes:
        return b"".join(self._pieces)

    def _hold(self, piece: bytes) -> None:
        """Keep part of an event that has not ended; of one that is too long to be an event, nothing."""
        if piece:
            self._pieces.append(piece)
            self._held += len(piece)
        if self._held > LONGEST:
            self.overlong += 1
            self._pieces, self._held = [], 0

    def end(self) -> bytes | None:
        """At the end of the stream: the last event's data where it lacks its blank line but is complete all the same, i.e. is
        [DONE] or whole JSON (its name is then in `names`). Anything else unterminated is dropped, as the standard says."""
        (data, name), self._pieces = _event(self.rest), []
        if data is None:
            return None
        self.names = {0: name} if name else {}
        try:
            if data != DONE:
                msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError):
            return None
        return data

    def _without_bom(self, chunk: bytes) -> bytes:
        opening = (self._opening or b"") + chunk
        if len(opening) < len(BOM) and BOM.startswith(opening):
            self._opening = opening
            return b""
        self._opening = None
        return opening.removeprefix(BOM)

    def _with_lf(self, chunk: bytes) -> bytes:
        if not chunk:
            return chunk
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
        self._after_cr = chunk.endswith(b"\r")
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _event(block: bytes) -> tuple[bytes | None, bytes]:
    """The lines between two blank lines as (data, name); data is None where there is no `data` line."""
    name, data = b"", []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return (b"\n".join(data) if data else None), name
