"""A trace row, and trace files as records: plain or gzipped, JSON lines, one JSON document, CSV, or a directory of them.

Every error names file:line (file:record where a file is one JSON document) and what would have been right.
"""

import csv
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from kvbench.core import Seconds

Stamp = int | float | str | None
"""A time as the file has it: a number in a unit still to be settled, an ISO-8601 text, or nothing."""

_ISO = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace.

    due: seconds since the start of the replay; None where the file has no time, and for a session's later turn of known think
    time: it follows its predecessor's end by `think`. at: when the recording had it, on the same axis. hashes: ids of the
    prompt's blocks of `block` tokens, each id naming the whole prefix up to its end; () is a prompt nobody shares (block is 0
    then). They cover ceil(n_in / block) blocks, or only the full ones. think: seconds between the end of the previous turn
    and this one; None where the file does not say, and for a first turn. extra: what else the file said. ordinal: place in
    the file, the identity of what is unique to this row.
    """

    due: Seconds | None
    n_in: int
    n_out: int
    hashes: tuple[int, ...] = ()
    block: int = 0
    session: str | None = None
    turn: int = 0
    think: Seconds | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    at: Seconds | None = None
    ordinal: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Fields:
    """One record of a file and where it is ("trace.jsonl:12"). The readers take what they need by name."""

    where: str
    data: dict[str, Any]

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number of at least 0. Raises ValueError if it is something else, or absent without a default."""
        value = self.data.get(name, default)
        if isinstance(value, str):
            value = _numeric(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise ValueError(f"{self.where}: {name} is {_shown(self.data, name)}: it must be a finite number of at least 0")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 0 (tokens). Raises ValueError if it is something else, or absent without a default."""
        value = self.number(name, default)
        if value != int(value):
            raise ValueError(f"{self.where}: {name} is {_shown(self.data, name)}: it must be a whole number of at least 0")
        return int(value)

    def stamp(self, name: str) -> Stamp:
        """A time: a finite number of at least 0 as it stands, or ISO-8601 text. Raises ValueError otherwise."""
        value = self.data.get(name)
        if isinstance(value, str) and not isinstance(_numeric(value), (int, float)):
            nanoseconds(value, self.where)
            return value
        return self.number(name)

    def text(self, name: str) -> str | None:
        """The field as text; None where it is absent, null or empty."""
        value = self.data.get(name)
        return None if value is None or value == "" else str(value)

    def ids(self, name: str) -> tuple[int, ...]:
        """Block ids, whole whatever their width: integers, or decimal or 0x texts. () where absent, null or empty."""
        value = self.data.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise ValueError(f"{self.where}: {name} is {_shown(self.data, name)}: it must be a list of ids")
        return tuple(i if type(i) is int and i >= 0 else self._id(name, i) for i in value)

    def _id(self, name: str, value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"[0-9]+|0[xX][0-9a-fA-F]+", value):
            return int(value, 16 if value[:2] in ("0x", "0X") else 10)
        raise ValueError(f"{self.where}: {name} holds {value!r}: an id is a whole number of at least 0, or a text of one")


def _numeric(text: str) -> int | float | str:
    """A number if the text is one (exact where it is whole), else the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _shown(data: dict[str, Any], name: str) -> str:
    if name not in data:
        return f"missing (the record has {', '.join(map(str, data)) or 'nothing'})"[:200]
    return repr(data[name])[:60]


def nanoseconds(text: str, where: str) -> int:
    """ISO-8601 text as nanoseconds since 1970, all digits of the fraction kept; without a zone it is taken as UTC."""
    match = _ISO.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{where}: {text[:40]!r} is no time: a number or ISO-8601 such as 2023-11-16 18:17:03.9799600 is")
    day, clock, fraction, zone = match.groups()
    try:
        whole = datetime.fromisoformat(f"{day}T{clock}{zone or '+00:00'}") - _EPOCH
    except ValueError as error:
        raise ValueError(f"{where}: {text[:40]!r} is no time: {error}") from None
    return (whole.days * 86400 + whole.seconds) * 10**9 + int((fraction or "0").ljust(9, "0"))


class Source:
    """A trace file, or a directory of them in name order, as records. `salt` names its text once all of it was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest = hashlib.blake2b(digest_size=8)

    @property
    def salt(self) -> int:
        """A 64-bit number that is the same for the same text, gzipped or not."""
        return int.from_bytes(self._digest.digest(), "big")

    def records(self) -> Iterator[Fields]:
        """Every record, in order. Raises ValueError on what is not readable, FileNotFoundError where there is no such file."""
        if not self.path.is_dir():
            yield from self._file(self.path)
            return
        files = sorted(f for f in self.path.iterdir() if re.search(r"\.(jsonl?|csv)(\.gz)?$", f.name))
        if not files:
            raise ValueError(f"{self.path}: no .json, .jsonl or .csv file (or .gz of one) in this directory")
        for file in files:
            yield from self._file(file)

    def _file(self, path: Path) -> Iterator[Fields]:
        lines = self._lines(path)
        first = next(((number, line) for number, line in lines if line.strip()), None)
        if first is None:
            raise ValueError(f"{path}: the file is empty: a trace needs at least one row")
        if first[1].lstrip()[0] not in "{[":
            yield from _table(path, first, lines)
            return
        try:
            json.loads(first[1])
        except ValueError:  # not a record a line; perhaps one document over many
            yield _document(path, first, lines)
            return
        yield _record(path, *first)
        for number, line in lines:
            if line.strip():
                yield _record(path, number, line)

    def _lines(self, path: Path) -> Iterator[tuple[int, str]]:
        number = 0
        with path.open("rb") as plain:
            zipped = plain.read(2) == b"\x1f\x8b"
            plain.seek(0)
            stream: IO[bytes] = gzip.GzipFile(fileobj=plain) if zipped else plain  # type: ignore[assignment]  # reads as IO[bytes]
            try:
                for number, line in enumerate(stream, 1):
                    self._digest.update(line)
                    if b"\0" in line:
                        raise ValueError(f"{path}:{number}: binary data: a trace is text (JSON lines or CSV), or gzip of it")
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise ValueError(f"{path}:{number}: not UTF-8: a trace is text (JSON lines or CSV), or gzip of it") from None
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(f"{path}:{number + 1}: the gzip is damaged or cut short ({error})") from None


def _record(path: Path, number: int, line: str) -> Fields:
    where = f"{path}:{number}"
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not a JSON object ({str(error)[:80]})") from None
    if not isinstance(data, dict):
        raise ValueError(f"{where}: {line.strip()[:40]!r} is not a JSON object: a trace has one object per line")
    return Fields(where, data)


def _document(path: Path, first: tuple[int, str], lines: Iterator[tuple[int, str]]) -> Fields:
    """A file that is one JSON object over several lines. What was on its first line is the error if it is none."""
    text = first[1] + "".join(line for _, line in lines)
    try:
        return _record(path, first[0], text)
    except ValueError:
        return _record(path, *first)


def _table(path: Path, first: tuple[int, str], lines: Iterator[tuple[int, str]]) -> Iterator[Fields]:
    names = next(csv.reader([first[1]]))
    names = [name.strip() for name in names]
    if len(names) < 2:
        raise ValueError(f"{path}:{first[0]}: {first[1].strip()[:40]!r} is neither a JSON object nor a CSV header")
    for number, line in lines:
        if not line.strip():
            continue
        try:
            cells = next(csv.reader([line], strict=True))
        except csv.Error as error:
            raise ValueError(f"{path}:{number}: not a CSV row ({error})") from None
        if len(cells) != len(names):
            raise ValueError(f"{path}:{number}: {len(cells)} fields, the header has {len(names)}: {', '.join(names)}"[:300])
        yield Fields(f"{path}:{number}", dict(zip(names, cells, strict=True)))
