"""Recorded traffic to replay: read a trace in any of FORMATS, check it, cut and stretch it, say what is in it, write it out.

Order is the file's among equal stamps; nothing is sampled. What cannot be meant is refused with file:line, what can is repaired
and said in `Trace.warnings`.
"""

import gzip
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvbench.core import Seconds, Segment
from kvbench.units import Duration, duration
from kvbench.workload.formats import FORMATS
from kvbench.workload.layout import Draft, Format
from kvbench.workload.rows import Fields, Row, Source, nanoseconds
from kvbench.workload.tracefacts import describe

__all__ = ["FORMATS", "Row", "Trace", "TraceFile", "read", "segments", "write"]

UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
Unit = Literal["s", "ms", "us", "ns"]
Wrap = Literal["refuse", "again"]
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """A permutation of the 64-bit numbers (Stafford's variant 13 of the murmur3 finaliser), so distinct stay distinct."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def segments(row: Row, salt: int = 0) -> tuple[Segment, ...]:
    """The prompt of `row`: a segment per block id, the last as long as what is left, then what no id covers, unique to the row.

    Under one 64-bit salt keys are equal exactly where ids are: ids below 2**63 and row ordinals are permuted together, wider ids
    kept whole above 64 bits. Under another salt (another trace, lap or run) all differ but for a chance of 2**-64 a pair.
    """
    keys = (_mix(2 * h ^ salt) if h < 2**63 else h << 64 | salt for h in row.hashes)
    found = [(key, min(row.block, row.n_in - i * row.block)) for i, key in enumerate(keys)]
    rest = row.n_in - row.block * len(found)
    if rest > 0:
        found.append((_mix((2 * row.ordinal + 1) ^ salt), rest))
    return tuple(found)


@dataclass(frozen=True)
class Trace:
    """Rows in replay order and what is known of them. `salt` is made of the file's text: one file, one content."""

    rows: list[Row]
    warnings: list[str]
    facts: dict[str, Any]
    salt: int = 0

    @property
    def dues(self) -> list[Seconds]:
        """Due times, ascending, of the rows that arrive by themselves: turns that follow their predecessor have none."""
        return [row.due for row in self.rows if row.due is not None]

    def segments(self, row: Row, lap: int = 0) -> tuple[Segment, ...]:
        """The prompt of `row` on the given lap; laps share nothing with each other."""
        return segments(row, _mix(self.salt + lap * _GOLDEN & _MASK))

    def replay(self, count: int | None = None, wrap: Wrap = "refuse") -> Iterator[tuple[Seconds | None, int, Row]]:
        """(due, lap, row) in file order: each row once, or `count` of them. Raises ValueError where the file is shorter and
        wrap is "refuse"; "again" starts over, one mean gap after the last due, with contents of its own per lap."""
        count = len(self.rows) if count is None else count
        if count > len(self.rows) and wrap == "refuse":
            raise ValueError(f"{count} requests asked of {len(self.rows)} trace rows: ask for fewer, or set `wrap: again`")
        return itertools.islice(self._laps(), count)

    def _laps(self) -> Iterator[tuple[Seconds | None, int, Row]]:
        dues = self.dues
        period = dues[-1] + (dues[-1] - dues[0]) / max(1, len(dues) - 1) if dues else 0.0
        for lap in itertools.count():
            for row in self.rows:
                yield (None if row.due is None else row.due + lap * period), lap, row


class TraceFile(BaseModel):
    """A recorded trace: its due times, lengths, sessions and shared prefixes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, populate_by_name=True)

    file: str = Field(min_length=1, description="path of the trace, relative to the scenario; .gz is read as it is")
    format: str = Field(default="auto", description=f"auto (by the first record) or one of {', '.join(FORMATS)}")
    unit: Unit | None = Field(default=None, description="of numeric stamps; left out, the format's own or a printed guess")
    block: int | None = Field(default=None, ge=1, description="tokens per block id, for records that do not say")
    scale: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="multiplies due and think times: 0.5 halves them")
    start: Duration = Field(default=0.0, alias="from", description="drop what is due before this; the rest moves to 0")
    end: Duration | None = Field(default=None, alias="to", description="drop what is due at or after this")
    rows: tuple[int, int] | None = Field(default=None, description="[a, b): keep these rows, in replay order, counted from 0")
    wrap: Wrap = Field(default="refuse", description="more asked than there are rows: refuse, or again (new contents each lap)")

    @model_validator(mode="before")
    @classmethod
    def _bare_path(cls, value: Any) -> Any:
        return {"file": value} if isinstance(value, str) else value

    @field_validator("format")
    @classmethod
    def _known(cls, value: str) -> str:
        return value if value == "auto" else known_format(value)

    def read(self, base: Path = Path()) -> Trace:
        """The trace, its file sought from `base` (the scenario's directory). Raises ValueError as `read` does."""
        path = base / self.file
        return read(path, self.format, self.unit, self.block, self.scale, self.start, self.end, self.rows)


def known_format(name: str) -> str:
    """`name` if it is a format's. Raises ValueError with the nearest otherwise."""
    if name in FORMATS:
        return name
    near = "".join(f"; did you mean {match}?" for match in get_close_matches(name, FORMATS, 1))
    raise ValueError(f"unknown trace format {name!r}: one of {', '.join(FORMATS)}{near}")


def read(
    path: str | Path,
    format: str | None = None,  # noqa: A002  # as the scenario calls it
    unit: Unit | None = None,
    block: int | None = None,
    scale: float = 1.0,
    start: Seconds = 0.0,
    end: Seconds | None = None,
    rows: tuple[int, int] | None = None,
) -> Trace:
    """A trace file (or a directory of them) as rows due from 0. Slices first by rows, then by [start, end) s, then scales time.

    format: None or "auto" looks at the first record. Raises ValueError, naming file:line and what is allowed, on anything that is
    not a trace of that format; rows of no tokens are skipped and counted, unsorted ones sorted stably, both with a warning.
    """
    source = Source(Path(path))
    try:
        records = source.records()
        first = next(records, None)
        if first is None:
            raise ValueError(f"{path}: the file holds a header and no rows")
        name = _recognise(first) if format in (None, "auto") else known_format(str(format))
        layout = FORMATS[name]
        if missing := sorted(layout.needs - set(first.data)):
            needs = ", ".join(sorted(layout.needs))
            raise ValueError(f"{first.where}: not a {name} record: {missing[0]!r} is missing (it has {needs})")
        drafts = list(layout.read(itertools.chain([first], records), block))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
    used = [_checked(draft, layout) for draft in drafts if draft[2].n_in and draft[2].n_out]
    warnings: list[str] = []
    if skipped := len(drafts) - len(used):
        warnings.append(f"{skipped} of {len(drafts)} rows skipped: no prompt or no output tokens (failed requests, as a rule)")
    if not used:
        raise ValueError(f"{path}: no usable row ({skipped} skipped for having no prompt or no output tokens)")
    found = _sorted(_timed(used, layout, name, unit, warnings), warnings)
    starts = {row.session: row.due for row in found if row.turn == 0 and row.session is not None}
    if len(starts) > 1 and set(starts.values()) == {0.0}:
        warnings.append(f"all {len(starts)} sessions begin at 0: the file does not say when; shape them with `arrivals`")
    if "n_out" not in layout.holds:
        warnings.append(f"{name} has no output lengths: every row asks for 1 token")
    found = _followed(_cut(found, path, start, end, rows), scale)
    facts = {"file": str(path), "format": name, "skipped": skipped} | describe(found)
    return Trace(found, warnings, facts, source.salt)


def _recognise(first: Fields) -> str:
    for name, layout in FORMATS.items():
        if layout.needs <= set(first.data):
            return name
    known = "; ".join(f"{name}: {', '.join(sorted(layout.needs))}" for name, layout in FORMATS.items())
    raise ValueError(f"{first.where}: no known trace format has the fields {', '.join(map(str, first.data))[:120]} ({known})")


def _checked(draft: Draft, layout: Format) -> Draft:
    """The draft, if the number of its ids fits its length. Rows without ids get block 0."""
    where, stamp, row = draft
    if not row.hashes:
        return where, stamp, replace(row, block=0)
    if not row.block:
        raise ValueError(f"{where}: the block size is 0: ids stand for at least 1 token each")
    full, all_ = row.n_in // row.block, -(-row.n_in // row.block)
    allowed = {all_} if layout.covers == "all" else {full, all_}
    if len(row.hashes) not in allowed:
        want = " or ".join(map(str, sorted(allowed)))
        raise ValueError(f"{where}: {len(row.hashes)} block ids for {row.n_in} tokens in blocks of {row.block}: must be {want}")
    return draft


def _timed(drafts: list[Draft], layout: Format, name: str, unit: Unit | None, warnings: list[str]) -> list[Row]:
    """Rows with due times in seconds. The earliest stamp becomes 0 unless the format's stamps are dues."""
    dated = sum(isinstance(stamp, str) for _, stamp, _ in drafts)
    numbers = [stamp for _, stamp, _ in drafts if isinstance(stamp, (int, float))]
    if dated:
        stray = next((where for where, stamp, _ in drafts if not isinstance(stamp, str)), None)
        if stray or unit:
            fault = "dates and numbers are mixed" if stray else "dates have no unit: leave it out"
            raise ValueError(f"{stray or drafts[0][0]}: {fault}")
        numbers = [nanoseconds(str(stamp), where) for where, stamp, _ in drafts]
        drafts = [(where, number, row) for (where, _, row), number in zip(drafts, numbers, strict=True)]
        unit = "ns"
    if not numbers:
        return [row for *_, row in drafts]
    settled: Unit = unit or layout.unit
    origin = 0 if layout.from_zero else min(numbers)
    if unit is None and layout.guess:
        settled = _guess(numbers, layout.unit)
        span = (max(numbers) - origin) / UNITS[settled]
        warnings.append(f"stamps read as {settled} (a guess for {name}; `unit` settles it): the replay takes {duration(span)}")
    out = []
    for where, stamp, row in drafts:
        if stamp is None and not (row.session and row.turn):
            raise ValueError(f"{where}: no due time: all rows have one or none has, but for later turns of a session")
        out.append(row if stamp is None else replace(row, due=(stamp - origin) / UNITS[settled]))  # type: ignore[operator]  # no str is left
    return out


def _guess(numbers: Sequence[float], usual: Literal["s", "ms"]) -> Unit:
    """The unit of stamps in a format that is seen with both: the usual one, unless it would make no sense.

    Fractions a few units apart are seconds; whole numbers a hundred or more apart on average are milliseconds.
    """
    gap = (max(numbers) - min(numbers)) / max(1, len(numbers) - 1)
    whole = all(number == int(number) for number in numbers)
    if usual == "ms":
        return "s" if not whole and gap < 10 else "ms"
    return "ms" if whole and gap >= 100 else "s"


def _sorted(rows: list[Row], warnings: list[str]) -> list[Row]:
    """Rows by due, file order among equals; a row without a due keeps its place behind the row before it."""
    keys: list[float] = []
    for row in rows:
        keys.append(row.due if row.due is not None else keys[-1] if keys else 0.0)
    if late := sum(b < a for a, b in itertools.pairwise(keys)):
        warnings.append(f"{late} of {len(rows)} rows are due before the row above them: sorted, file order kept among equals")
    return [rows[i] for i in sorted(range(len(rows)), key=keys.__getitem__)]


def _cut(rows: list[Row], path: str | Path, start: Seconds, end: Seconds | None, which: tuple[int, int] | None) -> list[Row]:
    total = len(rows)
    if which is not None:
        a, b = which
        if not 0 <= a < b <= total:
            raise ValueError(f"{path}: rows [{a}, {b}) asked of {total}: it must be 0 <= a < b <= {total}")
        rows = rows[a:b]
        first = next((row.due for row in rows if row.due is not None), 0.0) if a else 0.0
        rows = [row if row.due is None else replace(row, due=row.due - first) for row in rows]
    if start or end is not None:
        stop = float("inf") if end is None else end
        if any(row.due is None for row in rows):
            raise ValueError(f"{path}: rows without due times cannot be cut by time: use `rows`")
        rows = [replace(row, due=row.due - start) for row in rows if row.due is not None and start <= row.due < stop]
        if not rows:
            raise ValueError(f"{path}: no row is due in [{start:g} s, {stop:g} s)")
    return rows


def _followed(rows: list[Row], scale: float) -> list[Row]:
    """Times stretched, and every turn of known think time left to follow the turn before it, if that is there."""
    seen: set[str | None] = {None}
    out = []
    for row in rows:
        at = None if row.due is None else row.due * scale
        think = None if row.think is None else row.think * scale
        follows = think is not None and row.session in seen and row.session is not None
        seen.add(row.session)
        out.append(replace(row, due=None if follows else at, at=at, think=think))
    return out


def write(path: str | Path, rows: Iterable[Row], format: str) -> list[str]:  # noqa: A002  # as in read
    """Write rows as `format` (gzipped where the name ends in .gz); returns what was lost, a line each. Raises ValueError where
    the format cannot have the rows at all (no due times)."""
    rows = list(rows)
    layout = FORMATS[known_format(format)]
    lines = list(layout.write(rows))  # before the file is opened: a refusal leaves nothing behind
    text = "".join(lines).encode()
    Path(path).write_bytes(gzip.compress(text, mtime=0) if str(path).endswith(".gz") else text)
    return _lost(rows, layout)


def _lost(rows: Sequence[Row], layout: Format) -> list[str]:
    gone: Counter[str] = Counter()
    for row in rows:
        has = {"hashes": row.hashes, "session": row.session, "turn": row.turn, "think": row.think is not None, "extra": row.extra}
        gone.update(f"{name} of" for name, value in has.items() if value and name not in layout.holds)
        gone["output length of"] += "n_out" not in layout.holds
        tail = bool(row.hashes) and row.n_in % row.block and len(row.hashes) * row.block > row.n_in
        gone["the partial last block's id of"] += bool(tail and layout.covers == "full" and "hashes" in layout.holds)
        ticks = (row.due or row.at or 0.0) / layout.tick if layout.tick else 0.0
        gone[f"time below {layout.tick:g} s of"] += abs(ticks - round(ticks)) > 1e-6
    lines = [f"{what} {count} rows" for what, count in gone.items() if count]
    return [*lines, layout.loses] if layout.loses and any(row.session or row.extra for row in rows) else lines
