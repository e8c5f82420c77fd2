"""A run directory as tables, for notebooks and other tools: windows, samples, events and requests, as CSV or Parquet.

Every table begins with `time`, nanoseconds since 1970; the other times are seconds on the run's clock, stamps (`_ns`) nanoseconds
on it. What was not measured is empty.
"""

import csv
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from kvbench.core import Event, Record, Sample, Seconds, Window
from kvbench.metrics import request
from kvbench.report.files import RunFiles
from kvbench.sink.lines import nanos

_STAMPS = ("due_ns", "release_ns", "sent_ns", "written_ns", "first_ns", "content_ns", "done_ns", "end_ns", "connect_ns")
_COUNTS = (
    "session", "turn", "group", "status", "asked_in", "asked_out", "n_in", "n_out", "cached", "reasoning", "attempts",
    "throttled", "reads", "malformed", "ignored", "replaced", "preempted",
)  # fmt: skip
_TEXTS = ("cls", "phase", "url", "outcome", "cause", "error", "finish", "source")


class Column(NamedTuple):
    """values: one for each row, None where there is none; of kind list they are lists of integers."""

    name: str
    kind: Literal["int", "float", "text", "list"]
    values: Sequence[Any]


def tables(files: RunFiles, zero: Seconds) -> dict[str, list[Column]]:
    """By name. zero: seconds since 1970 at which the run's clock was 0."""
    return {
        "windows": _windows(files.windows, zero),
        "samples": _samples(files.samples, zero),
        "events": _events(files.events, zero),
        "requests": _requests(files.records, zero),
    }


def write_csv(table: Sequence[Column], path: Path) -> None:
    """RFC 4180 with a header; lists as JSON. OSError where the disk refuses."""
    written = [[_json(v) for v in column.values] if column.kind == "list" else column.values for column in table]
    with open(path, "w", newline="", encoding="utf-8", errors="replace") as file:
        out = csv.writer(file)
        out.writerow([column.name for column in table])
        out.writerows(zip(*written, strict=True))


def write_parquet(table: Sequence[Column], path: Path) -> None:
    """Zstandard-compressed; types are int64, double, string, list<int64>. ValueError where pyarrow is not installed."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise ValueError(
            "Parquet is written by the package pyarrow, which is not installed: pip install -e '.[parquet]', or take --csv"
        ) from None
    types = {"int": pa.int64(), "float": pa.float64(), "text": pa.string(), "list": pa.list_(pa.int64())}
    arrays = {column.name: pa.array(column.values, types[column.kind]) for column in table}
    parquet.write_table(pa.table(arrays), path, compression="zstd")


def write_all(found: dict[str, list[Column]], out: Path, suffix: str, progress: Callable[[Path, int], None]) -> None:
    """Each table into a file of `out`, whole or not at all; `progress` is told the file and its rows."""
    out.mkdir(parents=True, exist_ok=True)
    for name, table in found.items():
        path = out / f"{name}.{suffix}"
        part = path.with_name(f"{path.name}.part")
        try:
            WRITERS[suffix](table, part)
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        progress(path, len(table[0].values))


def _windows(windows: Sequence[Window], zero: Seconds) -> list[Column]:
    counts = _names(window.counts for window in windows)
    values = [name for name in _names(window.values for window in windows) if name not in counts]
    return [
        _time([window.end for window in windows], zero),
        Column("start", "float", [window.start for window in windows]),
        Column("end", "float", [window.end for window in windows]),
        *(Column(name, "int", [window.counts.get(name) for window in windows]) for name in counts),
        *(Column(name, "float", [window.values.get(name) for window in windows]) for name in values),
    ]


def _samples(samples: Sequence[Sample], zero: Seconds) -> list[Column]:
    return [
        _time([sample.t for sample in samples], zero),
        Column("t", "float", [sample.t for sample in samples]),
        Column("source", "text", [sample.source for sample in samples]),
        Column("name", "text", [sample.name for sample in samples]),
        Column("value", "float", [sample.value for sample in samples]),
        Column("labels", "text", [_json(sample.labels) if sample.labels else None for sample in samples]),
    ]


def _events(events: Sequence[Event], zero: Seconds) -> list[Column]:
    return [
        _time([event.t for event in events], zero),
        Column("t", "float", [event.t for event in events]),
        Column("kind", "text", [event.kind for event in events]),
        Column("data", "text", [_json(event.data) for event in events]),
    ]


def _requests(records: Sequence[Record], zero: Seconds) -> list[Column]:
    def each(name: str) -> list[Any]:
        return [getattr(record, name) for record in records]

    over = [(record.end_ns if record.end_ns is not None else record.due_ns) / 1e9 for record in records]
    measured = request.columns(records) if records else dict.fromkeys(request.FORMULAS, ())
    return [
        _time(over, zero),
        Column("id", "int", each("id")),
        *(Column(name, "text", each(name)) for name in _TEXTS),
        Column("measured", "int", [int(record.measured) for record in records]),
        *(Column(name, "int", each(name)) for name in (*_STAMPS, *_COUNTS)),
        *(Column(name, "float", [None if v != v else float(v) for v in values]) for name, values in measured.items()),
        Column("token_ns", "list", each("token_ns")),
    ]


def _time(at: Iterable[Seconds], zero: Seconds) -> Column:
    first = nanos(zero)
    return Column("time", "int", [first + round(t * 1e9) for t in at])


def _names(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Every key, in the order in which they first came."""
    return list(dict.fromkeys(name for row in rows for name in row))


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


WRITERS: dict[str, Callable[[Sequence[Column], Path], None]] = {"csv": write_csv, "parquet": write_parquet}
