"""Intervals of the live history in numbers: `window` for a row of windows.jsonl, `statistic` for one number of a rule.

An interval is [start, end) in whole seconds, and everything is as of `end`: a live request whose first token came later is still
waiting for it. Latency quantiles take requests in flight as right-censored at their age (Kaplan-Meier), so that a hung server
shows at once and young requests do not drag a quantile down; where too much is in flight to reach q, the largest age is the value
and `lower_bound` says so. Means are of ended requests alone.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbench.core import Record, Seconds, Window
from kvbench.metrics import Stat, histogram, names
from kvbench.metrics.names import METRICS, Name
from kvbench.metrics.request import FORMULAS
from kvbench.metrics.ring import CENSORED, COUNTERS, LATENCIES, SECOND, Floats, Gauge
from kvbench.metrics.slots import Slots

SHOWN = ("gate_wait", "lag", "ttft", "response_ttft", "ttfc", "e2e", "response", "tpot", "icl", "itl")
_BARE = [Name(name) for name, metric in METRICS.items() if metric.kind in ("ratio", "rate")]
_LATENCY = [names.parse(f"{name}_{way}") for name in SHOWN for way in ("p50", "p90", "p99", "max")]
_SHOWN_COUNTS = COUNTERS[: COUNTERS.index("tokens_out") + 1]
_RATES = {
    "offered_rate": "offered", "admitted_rate": "admitted", "sent_rate": "sent", "ok_rate": "ok", "goodput_rate": "good",
    "input_tokens_rate": "tokens_in", "output_tokens_rate": "tokens_out",
}  # fmt: skip


def window(slots: Slots, start: Seconds, end: Seconds, live: Sequence[Record], now: Seconds) -> Window:
    """One row: counts, the ratios and rates of METRICS, p50 p90 p99 max of SHOWN, and mean, max, last of each gauge."""
    part = Interval(slots, math.floor(start), math.floor(end), live)
    stats = {str(name): part.stat(name) for name in (*_BARE, *_LATENCY)}
    for gauge in dict.fromkeys([*(g for g, m in METRICS.items() if m.kind in ("gauge", "counter")), *slots.gauges]):
        ways = ("", "rate") if gauge.endswith("_total") else ("mean", "max", "last")
        stats |= {str(Name(gauge, way)): part.gauge(gauge, way) for way in ways}
    return Window(
        start=float(part.start),
        end=float(part.end),
        counts={name: part.counts[name] for name in _SHOWN_COUNTS} | {"inflight": part.inflight, "held": part.held},
        values={name: stat.value for name, stat in stats.items()},
        n={name: stat.n for name, stat in stats.items() if stat.n},
        age={name: now - gauge.at for name, gauge in slots.gauges.items()},
    )


def statistic(slots: Slots, name: str | Name, over: Seconds, live: Sequence[Record]) -> Stat:
    """One statistic over the last `over` seconds (whole ones, rounded up) of closed slots. Raises ValueError on unknown names."""
    name = names.parse(name) if isinstance(name, str) else name
    return Interval(slots, max(0, slots.closed - math.ceil(over)), slots.closed, live).stat(name)


class Interval:
    """[start, end) of the closed slots, summed as it is asked for."""

    def __init__(self, slots: Slots, start: int, end: int, live: Sequence[Record]) -> None:
        self.slots, self.live = slots, live
        self.end = max(0, end)
        self.start = min(max(0, start), self.end)
        self._where = slots.span(self.start, self.end)
        self._populations: dict[str, _Population] = {}

    @cached_property
    def counts(self) -> dict[str, int]:
        total = sum((self.slots.counts[:, part].sum(axis=1) for part in self._where), np.zeros(len(COUNTERS), np.int64))
        return dict(zip(COUNTERS, total.tolist(), strict=True))

    @cached_property
    def inflight(self) -> int:
        """Sent before the end and not over."""
        return sum(1 for record in self.live if record.sent_ns is not None and record.sent_ns < self.end * SECOND)

    @cached_property
    def held(self) -> int:
        """Due before the end and waiting at our gate."""
        return sum(1 for record in self.live if record.release_ns is None and record.due_ns < self.end * SECOND)

    @property
    def finished(self) -> int:
        counts = self.counts
        return counts["ok"] + counts["failed"] + counts["timeout"] + counts["rejected"]

    def stat(self, name: Name) -> Stat:
        kind = name.of.kind
        if kind == "latency":
            return self._latency(name)
        if kind in ("gauge", "counter"):
            return self.gauge(name.metric, name.statistic)
        if kind == "rate":
            return self._rate(name.metric)
        if kind == "count":
            return Stat(self.held if name.metric == "held" else self.inflight, 1)
        return self._ratio(name.metric)

    def gauge(self, name: str, statistic: str) -> Stat:
        """A gauge's mean ("" too; each second with readings weighs alike), min, max, last; a counter's increase, rate, last."""
        gauge = self.slots.gauges.get(name)
        if gauge is None:
            return Stat(None, reason="not exposed")
        read = np.concatenate([np.arange(part.start, part.stop) for part in self._where] or [np.zeros(0, np.intp)])
        read = read[gauge.n[read] > 0]
        if not len(read):
            return Stat(None, reason="not read in this interval")
        return Stat(_gauge(gauge, read, name, statistic, self.end - self.start), int(gauge.n[read].sum()))

    def _rate(self, metric: str) -> Stat:
        if self.end == self.start:
            return Stat(None, reason="no second has passed")
        if metric == "goodput_rate" and not self.slots.slos:
            return Stat(None, reason="no class has limits (slo)")
        n = self.counts[_RATES[metric]]
        return Stat(n / (self.end - self.start), n)

    def _ratio(self, metric: str) -> Stat:
        c, finished = self.counts, self.finished
        if metric == "hit_rate":
            if c["cached_unknown"]:
                return Stat(None, reason=f"the server did not tell the cached tokens of {c['cached_unknown']} requests")
            return _share(c["cached_tokens"], c["cached_of"], "no prompt tokens counted")
        if metric == "goodput" and not self.slots.slos:
            return Stat(None, reason="no class has limits (slo)")
        if metric == "oom_rate":
            return self._oom_rate()
        part, whole = {
            "success_rate": (c["ok"], finished),
            "error_rate": (finished - c["ok"], finished),
            "rejection_rate": (c["rejected"], finished),
            "shed_rate": (c["shed"], finished + c["shed"] + c["dropped"]),
            "drop_rate": (c["dropped"], finished + c["shed"] + c["dropped"]),
            "goodput": (c["good"], finished + c["shed"] + c["dropped"]),
        }[metric]
        return _share(part, whole, "no request ended")

    def _oom_rate(self) -> Stat:
        """By the engine's counters. Who fails may have been taken in an earlier interval: at most all."""
        failed, taken = (self.gauge(name, "") for name in ("oom_total", "admitted_total"))
        if failed.value is None or taken.value is None:
            return Stat(None, reason=failed.reason or taken.reason)
        return _share(round(failed.value), round(max(failed.value, taken.value)), "no request was taken")

    def _latency(self, name: Name) -> Stat:
        them = self._population(name.metric)
        n = them.n if name.statistic in ("mean", "min") else them.n + them.ages
        if n == 0:
            return Stat(None, reason="no request got that far")
        if name.quantile is not None:
            found = them.curve.quantile(name.quantile)
            return Stat(found.value / 1e9, n, histogram.supported(name.quantile, n), found.lower_bound)
        if name.statistic == "max":
            return Stat(max(them.curve.high, them.curve.oldest) / 1e9, n, lower_bound=them.curve.oldest > them.curve.high)
        return Stat((them.curve.low if name.statistic == "min" else them.total / them.n) / 1e9, n)

    def _population(self, metric: str) -> "_Population":
        if metric not in self._populations:
            self._populations[metric] = self._gather(metric)
        return self._populations[metric]

    def _gather(self, metric: str) -> "_Population":
        row, slots = LATENCIES.index(metric), self.slots
        low = min((slots.low[row, part].min() for part in self._where), default=np.inf)
        high = max((slots.high[row, part].max() for part in self._where), default=-np.inf)
        observed, censored = np.zeros(histogram.BUCKETS, np.int64), np.zeros(histogram.BUCKETS, np.int64)
        oldest, total = -np.inf, 0.0
        if high >= low:
            a, b = histogram.buckets(np.array([low, high]))
            for part in self._where:
                observed[a : b + 1] += slots.buckets[row, part, a : b + 1].sum(axis=0)
                total += slots.sums[row, part].sum()
        if metric in CENSORED:
            row = CENSORED.index(metric)
            for part in self._where:
                if (eldest := slots.oldest[row, part].max()) >= 0:
                    censored += slots.ages[row, part].sum(axis=0)
                    oldest = max(oldest, eldest)
            seen, ages = self._in_flight(metric) if len(self.live) else (np.zeros(0), np.zeros(0))
            if len(seen):
                observed += np.bincount(histogram.buckets(seen), minlength=histogram.BUCKETS)
                low, high, total = min(low, seen.min()), max(high, seen.max()), total + seen.sum()
            if len(ages):
                censored += np.bincount(histogram.buckets(ages), minlength=histogram.BUCKETS)
                oldest = max(oldest, ages.max())
        curve = histogram.Curve(observed, censored, float(low), float(high), float(oldest))
        return _Population(metric, curve, int(observed.sum()), int(censored.sum()), float(total))

    def _in_flight(self, metric: str) -> tuple[Floats, Floats]:
        """(values that live requests reached within the interval, ages of those that have not reached it by the end), ns."""
        formula, end = FORMULAS[metric], float(self.end * SECOND)
        since = self._stamps[formula.since or "sent"]
        born = since < end
        if formula.at == "done":
            return np.zeros(0), (end - since)[born]
        reached = self._stamps[formula.at]
        born &= self._stamps["streamed"] > 0
        known = born & (reached < end)
        inside = known & (reached >= self.start * SECOND) & (reached >= since)
        return (reached - since)[inside], (end - since)[born & ~known]

    @cached_property
    def _stamps(self) -> dict[str, Floats]:
        """Of the live requests: float64 [live] in ns by the names of request.Stamps, NaN where not reached."""
        live = self.live
        return {
            "due": np.array([float(r.due_ns) for r in live]),
            "sent": np.array([math.nan if r.sent_ns is None else r.sent_ns for r in live]),
            "written": np.array([math.nan if r.written_ns is None else r.written_ns for r in live]),
            "first": np.array([math.nan if r.first_ns is None else r.first_ns for r in live]),
            "content": np.array([math.nan if r.content_ns is None else r.content_ns for r in live]),
            "streamed": np.array([float(r.streamed) for r in live]),
        }


class _Population(NamedTuple):
    metric: str
    curve: histogram.Curve
    n: int
    ages: int
    total: float


def _share(part: int, whole: int, none: str) -> Stat:
    return Stat(part / whole, whole) if whole else Stat(None, reason=none)


def _gauge(gauge: Gauge, read: NDArray[np.intp], name: str, statistic: str, seconds: int) -> float:
    if statistic == "last":
        return float(gauge.final[read[-1]])
    if name.endswith("_total"):
        rise = float(gauge.rise[read].sum())
        return rise / seconds if statistic == "rate" else rise
    if statistic == "max":
        return float(gauge.high[read].max())
    return float(gauge.low[read].min()) if statistic == "min" else float((gauge.sum[read] / gauge.n[read]).mean())
