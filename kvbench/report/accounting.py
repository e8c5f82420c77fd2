"""Where every request went: offered = admitted + shed + dropped + withdrawn; admitted = ok + failed + rejected + timeout +
cancelled (+ in flight, in a run that was cut off). The two sides come from two places: the driver's counts and the records.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvbench.core import LEFT, STAYED, Record
from kvbench.metrics import request
from kvbench.report.files import RunFiles
from kvbench.report.phases import Phase

EXAMPLES = 3  # error texts kept per class


class AccountingError(RuntimeError):
    """Requests do not add up: an internal error of kvbench, never a property of the server."""


def account(files: RunFiles, found: Sequence[Phase]) -> dict[str, Any]:
    """Counts per phase and in total. Raises AccountingError for a contradiction that no lost line can explain."""
    ids = Counter(record.id for record in files.records)
    twice = [key for key, count in ids.items() if count > 1]
    if twice:
        raise AccountingError(f"request {twice[0]} is on record {ids[twice[0]]} times")
    cut = files.last("run_end") is None
    rows = {phase.name: tally(phase.records) for phase in found}
    for phase in found:
        row = rows[phase.name]
        unseen = 0 if phase.offered is None else phase.offered - row["offered"]
        if unseen < 0:
            raise AccountingError(f"phase {phase.name}: {row['offered']} requests on record, only {phase.offered} offered")
        row["offered"] += unseen
        row["in_flight" if cut else "unrecorded"] = unseen
    if cut and found and found[-1].offered is None:
        _in_flight(rows, rows[found[-1].name], files)
    for row in rows.values():
        row["admitted"] += row["in_flight"]
    total = {name: sum(row[name] for row in rows.values()) for name in tally([]) if not name.endswith("_by_class")}
    total |= {name: _merge(rows, name) for name in tally([]) if name.endswith("_by_class")}
    return {"total": total, "phases": rows, "cut_off": cut, "torn_lines": files.torn, "damaged_lines": files.damaged}


def _in_flight(rows: dict[str, Any], row: dict[str, Any], files: RunFiles) -> None:
    """A phase that was cut off: what its last window saw in flight was offered too."""
    seen = files.windows[-1].counts.get("inflight", 0) if files.windows else 0
    row["in_flight"] = max(0, seen - sum(other["in_flight"] for other in rows.values()))
    row["offered"] += row["in_flight"]


def tally(records: Sequence[Record]) -> dict[str, Any]:
    """Outcomes of `records`, all of which have ended."""
    count: Counter[str] = Counter(record.outcome for record in records)
    unknown = set(count) - {*LEFT, *STAYED}
    if unknown:
        raise AccountingError(f"{count[next(iter(unknown))]} requests ended with the unknown outcome {next(iter(unknown))!r}")
    return {
        "offered": len(records),
        "admitted": sum(count[name] for name in LEFT),
        **{name: count[name] for name in (*STAYED, *LEFT)},
        "in_flight": 0,
        "unrecorded": 0,
        "failed_by_class": dict(Counter(r.cause or "unknown" for r in records if r.outcome == "failed").most_common()),
        "timeout_by_class": dict(Counter(r.cause or "unknown" for r in records if r.outcome == "timeout").most_common()),
    }


def _merge(rows: dict[str, dict[str, Any]], name: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for row in rows.values():
        found.update(row[name])
    return dict(found.most_common())


def check(accounts: dict[str, Any]) -> None:
    """The identity, asserted before a run writes its report. Raises AccountingError with the numbers."""
    for name, row in (*accounts["phases"].items(), ("total", accounts["total"])):
        stayed = sum(row[outcome] for outcome in STAYED)
        left = sum(row[outcome] for outcome in LEFT) + row["in_flight"]
        if row["unrecorded"]:
            raise AccountingError(f"{name}: {row['unrecorded']} of {row['offered']} offered requests have no record")
        if row["offered"] != row["admitted"] + stayed:
            raise AccountingError(f"{name}: offered {row['offered']} != admitted {row['admitted']} + those that stayed {stayed}")
        if row["admitted"] != left:
            raise AccountingError(f"{name}: admitted {row['admitted']} != ended and in flight {left}")


def failures(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Every way in which requests did not end ok: class, count, statuses and a few of the error texts, most frequent first."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.outcome in ("failed", "rejected", "timeout"):
            cause = record.cause or (f"http_{record.status}" if record.status else "unknown")
            groups.setdefault((record.outcome, cause), []).append(record)
    rows = [
        {
            "outcome": outcome,
            "class": cause,
            "n": len(members),
            "statuses": {str(status): n for status, n in Counter(r.status for r in members if r.status).most_common()},
            "examples": [text for text, _ in Counter(r.error[:300] for r in members if r.error).most_common(EXAMPLES)],
            "tokens": sum(r.n_out or len(r.token_ns) for r in members),
        }
        for (outcome, cause), members in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["n"])


def self_check(records: Sequence[Record]) -> dict[str, Any]:
    """Durations that cannot be: each is an error of this tool."""
    found = request.negative(records)
    return {"negative_durations": found, "ok": not found}
