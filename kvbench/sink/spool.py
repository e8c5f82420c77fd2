"""Lines on their way to a database, on disk until it has acknowledged them: segments, the acknowledged offset, dead letters.

A database may acknowledge what it has in memory alone (VictoriaMetrics: 5 s), and lose that when it is killed. So an
acknowledgement counts for good after SETTLED seconds, and after an outage what was acknowledged just before is sent again, which
overwrites it. The settled offset is replaced by a rename, so that a reader finds the old or the new one. Segments stay until
everything is delivered, since they say what the database has.
"""

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvbench.clock import stopwatch
from kvbench.core import Nanos, Seconds

SEGMENT = 32 << 20  # bytes after which a new segment is begun
SETTLED: Seconds = 10.0
_BLOCK = 1 << 20


class Mark(NamedTuple):
    """A state of acknowledgement, and when it was reached."""

    when: Nanos
    segment: int
    offset: int
    acked: int
    dead: int


class Spool:
    """Lines in `directory`, first in, first out. One thread uses it; `lines` and `acked` count what it held and what left it."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.lines = self.acked = self.dead = 0
        self._segment, self._offset = self._acknowledged()
        self._marks = deque([Mark(0, self._segment, self._offset, 0, 0)])  # the first of them is settled
        self._last = max(self._numbers(), default=self._segment)
        self._fd = -1  # of the last segment; opened when there is something to append
        self._size = 0  # of it, whole lines

    def append(self, data: bytes) -> None:
        """Whole lines, each with its line feed. OSError where the disk refuses; then none of them is kept."""
        if self._fd >= 0 and self._size >= SEGMENT:
            self.close()
            self._last += 1
        if self._fd < 0:
            self._fd = os.open(self._path(self._last), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._size = os.fstat(self._fd).st_size
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)
        self.lines += data.count(b"\n")

    def read(self, most: int) -> bytes:
        """The oldest lines that are not acknowledged, about `most` bytes of them and at least one; b"" where there are none."""
        while True:
            data = self._lines_at(self._segment, self._offset, most)
            if data or self._segment >= self._last:
                return data
            self._segment, self._offset = self._segment + 1, 0

    def ack(self, data: bytes) -> None:
        """What `read` gave, or its beginning up to a line feed, is delivered."""
        self._offset += len(data)
        self.acked += data.count(b"\n")
        marks, now = self._marks, stopwatch()
        marks.append(Mark(now, self._segment, self._offset, self.acked, self.dead))
        before = marks[0]
        while len(marks) > 1 and marks[1].when <= now - SETTLED * 1e9:
            marks.popleft()
        if marks[0] is not before:
            self._settle(marks[0])

    def rewind(self) -> None:
        """The database was away: what it acknowledged and may have lost is to be read again."""
        settled = self._marks[0]
        self._marks = deque([settled])
        self._segment, self._offset, self.acked, self.dead = settled[1:]

    def _settle(self, mark: Mark) -> None:
        part = self.directory / "ack.part"
        try:
            part.write_text(f"{mark.segment} {mark.offset}\n")
            os.replace(part, self.directory / "ack")
        except OSError:
            pass  # a full disk: what is sent again for that is overwritten

    def bury(self, data: bytes, why: str) -> None:
        """Lines that the database will not take, with its reason, into dead.lp."""
        self.dead += data.count(b"\n")
        try:
            with open(self.directory / "dead.lp", "ab") as file:
                file.write(b"# " + " ".join(why.split()).encode("utf-8", "replace") + b"\n" + data)
        except OSError:
            pass  # a full disk: they are counted all the same

    def unbury(self) -> list[bytes]:
        """The lines of dead.lp, which is then empty: they are to be tried again."""
        dead = self.directory / "dead.lp"
        try:
            lines = [line for line in dead.read_bytes().split(b"\n") if line and not line.startswith(b"# ")]
            dead.unlink()
        except OSError:
            return []
        return lines

    def delivered(self) -> Iterator[bytes]:
        """The lines up to what `ack` or the file of that name says, without their line feeds."""
        for number in self._numbers():
            if number > self._segment:
                return
            data = self._path(number).read_bytes()
            yield from (data if number < self._segment else data[: self._offset]).split(b"\n")[:-1]

    def cut(self) -> None:
        """Drop every line that is not acknowledged."""
        self.close()
        for number in self._numbers():
            if number > self._segment:
                self._path(number).unlink()
            elif number == self._segment:
                self._offset = min(self._offset, self._path(number).stat().st_size)
                os.truncate(self._path(number), self._offset)
        self._last = self._segment
        self._marks = deque([Mark(0, self._segment, self._offset, self.acked, self.dead)])

    def clear(self) -> None:
        """Drop every line, and what is known of them."""
        self.close()
        for number in self._numbers():
            self._path(number).unlink(missing_ok=True)
        (self.directory / "ack").unlink(missing_ok=True)
        self._segment, self._offset, self._last = 1, 0, 1
        self._marks = deque([Mark(0, 1, 0, self.acked, self.dead)])

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _lines_at(self, segment: int, offset: int, most: int) -> bytes:
        """About `most` bytes of a segment from `offset`, ended at a line feed."""
        try:
            fd = os.open(self._path(segment), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        try:
            data = os.pread(fd, most, offset)
            while data and b"\n" not in data:  # a line longer than a batch
                more = os.pread(fd, _BLOCK, offset + len(data))
                if not more:
                    return b""
                data += more
        finally:
            os.close(fd)
        return data[: data.rfind(b"\n") + 1]

    def _acknowledged(self) -> tuple[int, int]:
        """(segment, offset) by the file `ack`; the beginning where there is none, it is damaged, or it names no end of a line."""
        begin = min(self._numbers(), default=1), 0
        try:
            segment, offset = (int(part) for part in (self.directory / "ack").read_text().split())
            if segment < 1 or offset < 0:
                return begin
            with self._path(segment).open("rb") as file:
                file.seek(max(0, offset - 1))
                return (segment, offset) if not offset or file.read(1) == b"\n" else begin
        except (OSError, ValueError, OverflowError):
            return begin

    def _numbers(self) -> list[int]:
        return sorted(int(path.stem) for path in self.directory.glob("*.lp") if path.stem.isdigit())

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:06d}.lp"
