"""What the server or the embedded engine said of its KV cache and queue, over one interval, beside what the answers said."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvbench.core import Record, Sample, Seconds
from kvbench.report.intervals import Floats

GAUGES = ("kv_usage", "cached_share", "running", "waiting")
COUNTERS = (
    "preemptions_total", "hit_tokens_total", "query_tokens_total", "recompute_tokens_total", "oom_total", "admitted_total",
)  # fmt: skip
FULL = (0.90, 0.95)  # shares of the pool above which time is counted
APART = ("kvbench", "node")  # sources of readings that this tool takes of itself, and of parts whose sum is read too


def engine(samples: Sequence[Sample], start: Seconds, end: Seconds) -> dict[str, Any]:
    """Gauges and counters of the target in [start, end]; null with a reason where it does not expose one."""
    found: dict[str, Any] = {name: gauge(samples, name, start, end) for name in GAUGES}
    found |= {name: counter(samples, name, start, end) for name in COUNTERS}
    hits, queries = (found[name]["value"] for name in ("hit_tokens_total", "query_tokens_total"))
    if hits is None or not queries:
        reason = found["query_tokens_total"].get("reason") or "no prompt token was looked up"
        found["hit_rate"] = {"value": None, "reason": reason, "n": 0}
    else:
        found["hit_rate"] = {"value": hits / queries, "n": int(queries), "reason": None}
    failed, taken = (found[name]["value"] for name in ("oom_total", "admitted_total"))
    if failed is None or not taken:
        reason = found["oom_total"].get("reason") or "no request was taken"
        found["oom_rate"] = {"value": None, "reason": reason, "n": 0}
    else:
        found["oom_rate"] = {"value": min(1.0, failed / taken), "n": int(taken), "reason": None}
    return found


def second(sample: Sample) -> bool:
    """Of the whole target like the readings without labels, by another collector that also tells it (crew.py)."""
    return sample.labels.keys() == {"collector"}


Series = dict[str, tuple[Floats, Floats]]


def series(samples: Sequence[Sample], name: str) -> Series:
    """(times, values) of one name per source and labels, in order of time. Where a source tells of all its engines together, that
    series stands for them."""
    return _series(samples, name)[0]


def _series(samples: Sequence[Sample], name: str) -> tuple[Series, Series]:
    """The same, and beside it the engines that such a series stands for."""
    rows: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for sample in samples:
        if sample.name == name and sample.value is not None and sample.source not in APART and not second(sample):
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            rows.setdefault((sample.source, labels), []).append((sample.t, sample.value))
    whole: Series = {}
    parts: Series = {}
    for (source, labels), row in rows.items():
        told = np.array([t for t, _ in row]), np.array([v for _, v in row])
        (parts if labels and (source, "") in rows else whole)[f"{source},{labels}" if labels else source] = told
    return whole, parts


def gauge(samples: Sequence[Sample], name: str, start: Seconds, end: Seconds) -> dict[str, Any]:
    """Each reading holds until the next. Several series are listed, never mixed into one number; the engines of one that was told
    for all of them stand apart, where they are several."""
    whole, parts = _series(samples, name)
    rows = {label: _gauge(times, values, start, end) for label, (times, values) in whole.items()}
    rows = {label: row for label, row in rows.items() if row}
    if len(rows) == 1:
        engines = {label: _gauge(times, values, start, end) for label, (times, values) in parts.items()}
        engines = {label: row for label, row in engines.items() if row}
        return next(iter(rows.values())) | ({"engines": engines} if len(engines) > 1 else {})
    if not rows:
        return {"mean": None, "max": None, "n": 0, "reason": "not exposed by the target"}
    return {"mean": None, "max": None, "n": 0, "reason": f"{len(rows)} series: see `series`", "series": rows}


def _gauge(times: Floats, values: Floats, start: Seconds, end: Seconds) -> dict[str, Any]:
    inside = (times >= start) & (times <= end)
    times, values = times[inside], values[inside]
    if not len(times):
        return {}
    weights = np.diff(np.append(times, max(end, times[-1])))
    if not weights.sum():
        weights = np.ones(len(times))
    row: dict[str, Any] = {
        "mean": float(np.average(values, weights=weights)),
        "min": float(values.min()),
        "max": float(values.max()),
        "last": float(values[-1]),
        "n": len(values),
        "reason": None,
    }
    if values.max() <= 1.0:
        row["time_above"] = {f"{share:.0%}": float(weights[values > share].sum() / weights.sum()) for share in FULL}
    return row


def counter(samples: Sequence[Sample], name: str, start: Seconds, end: Seconds) -> dict[str, Any]:
    """Increase in [start, end], summed over series; a fall is a reset, after which the counter began at 0. Null where a series
    that was told of all engines had no value any more at the end."""
    total, resets, n = 0.0, 0, 0
    last = {s.source: s.value for s in samples if s.name == name and not s.labels and s.source not in APART and s.t <= end}
    if any(value is None for value in last.values()) and series(samples, name):
        return {"value": None, "n": 0, "resets": 0, "reason": "it left the server's page before the end"}
    for times, values in series(samples, name).values():
        before = int(np.searchsorted(times, start, side="right")) - 1  # the last reading at or before the start
        inside = values[max(0, before) : int(np.searchsorted(times, end, side="right"))]
        if len(inside) < 2:
            continue
        steps = np.diff(inside)
        total += float(np.where(steps >= 0, steps, inside[1:]).sum())
        resets += int((steps < 0).sum())
        n += len(inside)
    if not n:
        return {"value": None, "n": 0, "resets": 0, "reason": "not exposed by the target"}
    return {"value": total, "n": n, "resets": resets, "reason": None}


def told(records: Sequence[Record]) -> dict[str, Any]:
    """Hit rate by the answers' own counts of cached prompt tokens; requests that do not tell are left out and counted."""
    ok = [r for r in records if r.outcome == "ok"]
    known = [r for r in ok if r.cached is not None and r.n_in]
    prompts = sum(r.n_in or 0 for r in known)
    row: dict[str, Any] = {"requests": len(known), "untold": len(ok) - len(known)}
    row["preempted_requests"] = sum(r.preempted > 0 for r in ok)
    if not prompts:
        none = dict.fromkeys(("hit_rate", "cached_tokens", "prompt_tokens"))
        return row | none | {"reason": "no answer told its cached tokens"}
    cached = sum(r.cached or 0 for r in known)
    return row | {"hit_rate": cached / prompts, "cached_tokens": cached, "prompt_tokens": prompts, "reason": None}
