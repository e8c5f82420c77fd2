"""What a trace format is, and the pieces that writers share.

A reader yields drafts: where the record is, its stamp as the file has it (traces.read settles unit and origin), and the row
without a due time. What a writer cannot keep is declared in `holds`, `tick`, `covers` and `loses`, and counted by traces.write.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from kvbench.workload.rows import Fields, Row, Stamp

Draft = tuple[str, Stamp, Row]
Covers = Literal["all", "full", "either"]
"""Which blocks have ids: all ceil(n_in / block); the full ones, floor(n_in / block), the rest being unshared; or either."""


class Format(Protocol):
    """A trace format. `needs`: fields of its records, by which it is recognised. Called by traces.read and traces.write."""

    needs: frozenset[str]
    unit: Literal["s", "ms"]  # of numeric stamps
    guess: bool  # the unit is settled by looking at the stamps, not by the format
    from_zero: bool  # stamps are dues already; otherwise the earliest becomes 0
    covers: Covers
    holds: frozenset[str]  # which Row fields beyond due, n_in, n_out and hashes survive; "hashes" and "n_out" named where they do
    tick: float  # seconds; the resolution of stamps when written, 0 where exact
    loses: str  # what else is lost in writing, in words; "" for nothing

    def read(self, records: Iterable[Fields], block: int | None) -> Iterator[Draft]: ...

    def write(self, rows: Sequence[Row]) -> Iterator[str]: ...


def recorded(row: Row) -> float:
    """When the row is due, or was in the recording. Raises ValueError where it has no time at all."""
    at = row.at if row.due is None else row.due
    if at is None:
        raise ValueError(f"row {row.ordinal + 1} has no time and this format needs one: convert to kvbench instead")
    return at


def line(record: dict[str, Any]) -> str:
    """A JSON line."""
    return json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"


def cells(*values: object) -> str:
    """A CSV line."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def covered(rows: Sequence[Row], covers: Covers) -> Iterator[Row]:
    """The rows with as many ids as `covers` wants: a partial block's id is dropped, or a tail without one gets one of its own."""
    fresh = 1 + max((i for row in rows for i in row.hashes), default=-1)
    for row in rows:
        full = row.n_in // row.block if row.hashes else 0
        tail = bool(row.hashes) and row.n_in % row.block > 0
        if covers == "full" and tail:
            row = replace(row, hashes=row.hashes[:full])
        elif covers == "all" and tail and len(row.hashes) == full:
            row, fresh = replace(row, hashes=(*row.hashes, fresh)), fresh + 1
        yield row
