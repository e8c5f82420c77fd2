"""What the server or the embedded engine said of its KV cache and queue, over one interval, beside what the answers said."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvbench.core import Record, Sample, Seconds
from kvbench.metrics.names import METRICS
from kvbench.report.intervals import Floats

GAUGES = tuple(name for name, metric in METRICS.items() if metric.kind == "gauge")
COUNTERS = tuple(name for name, metric in METRICS.items() if metric.kind == "counter")
FULL = (0.90, 0.95)  # shares of the pool above which time is counted
APART = ("kvbench", "node")  # sources of readings that this tool takes of itself, and of parts whose sum is read too
ORDER = ("nvml", "agent", "prometheus")  # of sources that tell the same equally long, which is taken: the nearest to the device
NEAR = 0.1  # of the interval: sources whose readings cover it to within so much tell equally long

Series = dict[str, tuple[Floats, Floats]]


class Teller(NamedTuple):
    """What one source tells of a name. whole: its series (times, values), by source and labels; parts: the engines or devices
    that a series of all together stands for. left: that series has no value any more at the end of the interval."""

    source: str
    whole: Series
    parts: Series
    left: bool


def engine(samples: Sequence[Sample], start: Seconds, end: Seconds) -> dict[str, Any]:
    """Gauges and counters of the target in [start, end]; null with a reason where it does not expose one."""
    known: dict[str, list[Sample]] = {name: [] for name in (*GAUGES, *COUNTERS)}
    for sample in samples:
        if sample.name in known:
            known[sample.name].append(sample)
    found: dict[str, Any] = {name: gauge(known[name], name, start, end) for name in GAUGES}
    found |= {name: counter(known[name], name, start, end) for name in COUNTERS}
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


def series(samples: Sequence[Sample], name: str, start: Seconds = 0.0, end: Seconds = math.inf) -> Series:
    """(times, values) of one name per source and labels, in order of time, as the source tells them that is the one to take in
    [start, end]. Where it tells of all its engines together, that series stands for them."""
    tellers = _tellers(samples, name, start, end)
    return tellers[0].whole if tellers else {}


def rank(source: str, times: Iterable[Seconds], start: Seconds, end: Seconds, most: float = 1.0) -> tuple[bool, int]:
    """By which sources of the same are sorted, best first: those that cover less of [start, end] than `most` come later."""
    at = ORDER.index(source) if source in ORDER else len(ORDER)
    return coverage(times, start, end) < most - NEAR, at


def coverage(times: Iterable[Seconds], start: Seconds, end: Seconds) -> float:
    """Share of [start, end] from the first to the last of these instants; 1 of an interval without length or end."""
    known = sorted(times)
    if not known or end <= start or math.isinf(end):
        return float(bool(known))
    return max(0.0, min(end, known[-1]) - max(start, known[0])) / (end - start)


def _tellers(samples: Sequence[Sample], name: str, start: Seconds, end: Seconds) -> list[Teller]:
    """Those who tell a name, the one to take first. Collectors that share a source, or tell what another told first, have their
    place in the label `collector` (crew.py)."""
    rows: dict[tuple[str, str], dict[str, list[tuple[float, float | None]]]] = {}
    for sample in samples:
        if sample.name == name and sample.source not in APART:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()) if key != "collector")
            own = rows.setdefault((sample.source, sample.labels.get("collector", "")), {})
            own.setdefault(labels, []).append((sample.t, sample.value))
    for source, place in list(rows):
        alone = rows.get((source, ""), {})
        if place and alone and "" not in alone:  # its parts, whose sum another collector told first and this one with `place`
            rows[source, ""] = alone | rows.pop((source, place))
    times = {key: [t for row in own.values() for t, value in row if value is not None] for key, own in rows.items()}
    most = max((coverage(told, start, end) for told in times.values()), default=0.0)
    known = [key for key in rows if times[key]]
    known.sort(key=lambda key: rank(key[0], times[key], start, end, most))
    return [_teller(key[0], rows[key], end) for key in known]


def _teller(source: str, own: dict[str, list[tuple[float, float | None]]], end: Seconds) -> Teller:
    found = Teller(source, {}, {}, bool(left := [value for t, value in own.get("", ()) if t <= end]) and left[-1] is None)
    for labels, row in own.items():
        told = np.array([t for t, v in row if v is not None]), np.array([v for _, v in row if v is not None])
        if len(told[0]):
            (found.parts if labels and "" in own else found.whole)[f"{source},{labels}" if labels else source] = told
    return found


def _beside(tellers: Sequence[Teller]) -> dict[str, Any]:
    """Whose number it is, where others tell one too."""
    others = [one.source for one in tellers[1:]]
    return {"source": tellers[0].source, "beside": others} if others else {}


def gauge(samples: Sequence[Sample], name: str, start: Seconds, end: Seconds) -> dict[str, Any]:
    """Each reading holds until the next. Of several sources one is taken (`source`, the others are `beside`). Several series of
    it are listed, never mixed into one number; the engines of one that was told for all of them stand apart, where they are
    several."""
    tellers = [one for one in _tellers(samples, name, start, end) if one.whole]
    if not tellers:
        return {"mean": None, "max": None, "n": 0, "reason": "not exposed by the target"}
    rows = {label: _gauge(times, values, start, end) for label, (times, values) in tellers[0].whole.items()}
    rows = {label: row for label, row in rows.items() if row}
    if len(rows) == 1:
        engines = {label: _gauge(times, values, start, end) for label, (times, values) in tellers[0].parts.items()}
        engines = {label: row for label, row in engines.items() if row}
        return next(iter(rows.values())) | ({"engines": engines} if len(engines) > 1 else {}) | _beside(tellers)
    if not rows:
        return {"mean": None, "max": None, "n": 0, "reason": "not exposed by the target"}
    return {"mean": None, "max": None, "n": 0, "reason": f"{len(rows)} series: see `series`", "series": rows} | _beside(tellers)


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
    """Increase in [start, end], summed over the series of one source; a fall is a reset, after which the counter began at 0. Null
    where a series that was told of all engines had no value any more at the end. last: what it stood at."""
    tellers = [one for one in _tellers(samples, name, start, end) if one.whole]
    none = {"value": None, "n": 0, "resets": 0, "last": None}
    if not tellers:
        return none | {"reason": "not exposed by the target"}
    if tellers[0].left:
        return none | {"reason": "it left the server's page before the end"}
    total, last, resets, n = 0.0, 0.0, 0, 0
    for times, values in tellers[0].whole.values():
        before = int(np.searchsorted(times, start, side="right")) - 1  # the last reading at or before the start
        inside = values[max(0, before) : int(np.searchsorted(times, end, side="right"))]
        if len(inside) < 2:
            continue
        steps = np.diff(inside)
        total += float(np.where(steps >= 0, steps, inside[1:]).sum())
        last += float(inside[-1])
        resets += int((steps < 0).sum())
        n += len(inside)
    if not n:
        return none | {"reason": "not exposed by the target"}
    return {"value": total, "n": n, "resets": resets, "last": last, "reason": None} | _beside(tellers)


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
