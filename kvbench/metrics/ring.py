"""The storage behind `Slots`: a ring of one-second slots as arrays [rows, slots] and [rows, slots, buckets].

Arrays, so that a batch of events is one NumPy call and an interval is one sum. A slot ahead of the present is an ordinary slot.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbench.core import Nanos, Seconds
from kvbench.metrics import histogram
from kvbench.metrics.names import METRICS
from kvbench.metrics.request import FORMULAS

AHEAD = 120  # slots kept for events stamped later than the present: an engine's span of steps is taken whole
COUNTERS = (
    "offered", "admitted", "sent", "ok", "failed", "rejected", "timeout", "cancelled", "shed", "dropped", "withdrawn",
    "tokens_in", "tokens_out", "good", "cached_tokens", "cached_of", "cached_unknown",
)  # fmt: skip
ROW: Final = {name: row for row, name in enumerate(COUNTERS)}
LATENCIES = (*FORMULAS, "icl", "itl")
CENSORED = tuple(name for name, formula in FORMULAS.items() if formula.since)  # those with an age while unknown
SECOND = 1_000_000_000

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Gauge:
    """Readings of one gauge, per slot: sum, count, extremes, last. `at`, `last`: the latest reading of all."""

    def __init__(self, size: int) -> None:
        self.sum, self.n = np.zeros(size), np.zeros(size, np.int64)
        self.low, self.high, self.final = np.full(size, np.inf), np.full(size, -np.inf), np.full(size, np.nan)
        self.rise = np.zeros(size)  # counters: growth since the reading before; after a reset, the new value itself
        self.at, self.last = -math.inf, math.nan

    def add(self, place: int, at: Seconds, value: float) -> None:
        if not math.isnan(self.last):
            self.rise[place] += value - self.last if value >= self.last else value
        self.sum[place] += value
        self.n[place] += 1
        self.low[place], self.high[place] = min(self.low[place], value), max(self.high[place], value)
        self.final[place] = self.last = value
        self.at = at

    def clear(self, place: int) -> None:
        self.sum[place] = self.n[place] = self.rise[place] = 0
        self.low[place], self.high[place], self.final[place] = np.inf, -np.inf, np.nan


class Ring:
    """`seconds`: how far back intervals may reach. `late`, `early`: events outside the ring, lost to it; `out_of_range`: gauge
    readings refused."""

    def __init__(self, seconds: int = 600) -> None:
        if not 1 <= seconds <= 86_400:
            raise ValueError(f"seconds={seconds}: the ring holds 1 to 86400 slots of one second")
        self.size: Final = seconds + AHEAD
        self.closed = 0  # the slots before this second are closed
        self.late = self.early = self.out_of_range = 0
        self.counts = np.zeros((len(COUNTERS), self.size), np.int64)
        shape = (len(LATENCIES), self.size)
        self.buckets = np.zeros((*shape, histogram.BUCKETS), np.int32)
        self.sums, self.low, self.high = np.zeros(shape), np.full(shape, np.inf), np.full(shape, -np.inf)  # ns
        self.ages = np.zeros((len(CENSORED), self.size, histogram.BUCKETS), np.int32)  # right-censored
        self.oldest = np.full((len(CENSORED), self.size), -np.inf)
        self.gauges: dict[str, Gauge] = {}
        self._head = -1  # the latest second that has a slot

    def close(self, until: Seconds) -> None:
        """Time has reached `until`: the slots before its second are closed; those older than the ring holds are given up."""
        self.closed = max(self.closed, math.floor(until))
        self._advance(self.closed)

    def count(self, name: str, at_ns: Nanos, k: int = 1) -> None:
        """Add k to one of COUNTERS, for what no record tells. Records are counted by `Slots.fold` and `Slots.peek`."""
        self.add_counts(np.array([ROW[name]]), np.array([at_ns]), np.array([k]))

    def gauge(self, name: str, at: Seconds, value: float | None) -> None:
        """One reading, in order of time. None and NaN are no reading; nor is a share outside [0, 1], which is counted."""
        if value is None or math.isnan(value):
            return
        if name in METRICS and METRICS[name].unit == "share" and not 0 <= value <= 1 + 1e-9:
            self.out_of_range += 1
            return
        place = int(self.place(np.array([math.floor(at)]))[0])
        if place >= 0:
            self.gauges.setdefault(name, Gauge(self.size)).add(place, at, value)

    def span(self, start: int, end: int) -> list[slice]:
        """Where the seconds [start, end) lie in the arrays; seconds the ring does not hold are left out."""
        start, end = max(start, self._head - self.size + 1, 0), min(end, self._head + 1)
        if start >= end:
            return []
        a, b = start % self.size, (end - 1) % self.size + 1
        return [slice(a, b)] if a < b else [slice(a, self.size), slice(0, b)]

    def add_counts(self, rows: NDArray[np.intp] | int, times: Ints, k: Ints | int) -> None:
        """Add k to counters `rows` at `times` (ns), [events] each; one row or one k may stand for all."""
        place = self.place(times // SECOND)
        flat, keep = rows * self.size + place, place >= 0
        if not keep.all():
            flat, k = flat[keep], k if isinstance(k, int) else k[keep]
        np.add.at(self.counts.reshape(-1), flat, k)

    def add_values(self, rows: NDArray[np.intp], times: Ints, nanos: Floats) -> None:
        """Add durations [events] (ns, >= 0) to latencies `rows` [events] at `times` [events] (ns)."""
        place = self.place(times // SECOND)
        keep = place >= 0
        flat, nanos = (rows * self.size + place)[keep], nanos[keep]
        one = np.int32(1)  # the type of the buckets: `add.at` is 40 times slower when it has to convert
        np.add.at(self.buckets.reshape(-1), flat * histogram.BUCKETS + histogram.buckets(nanos), one)
        np.add.at(self.sums.reshape(-1), flat, nanos)
        np.minimum.at(self.low.reshape(-1), flat, nanos)
        np.maximum.at(self.high.reshape(-1), flat, nanos)

    def add_series(self, rows: Sequence[int], times: Ints, nanos: Floats, weights: Ints | int = 1) -> None:
        """`add_values` of many events to each of a few rows, cheap where neighbours mostly share a slot (tokens of a stream)."""
        place = self.place(times // SECOND)
        keep = place >= 0
        if not keep.all():
            place, nanos = place[keep], nanos[keep]
            weights = weights if isinstance(weights, int) else weights[keep]
        if not len(place):
            return
        starts = np.concatenate([[0], np.flatnonzero(np.diff(place)) + 1])  # where a stretch within one slot begins
        where, exact = place[starts], np.asarray(weights, np.int32)
        flat = place * histogram.BUCKETS + histogram.buckets(nanos)
        for row in rows:
            np.add.at(self.buckets[row].reshape(-1), flat, exact)
            np.add.at(self.sums[row], where, np.add.reduceat(nanos * weights, starts))
            np.minimum.at(self.low[row], where, np.minimum.reduceat(nanos, starts))
            np.maximum.at(self.high[row], where, np.maximum.reduceat(nanos, starts))

    def add_ages(self, row: int, times: Ints, ages: Floats) -> None:
        """Add right-censored durations [events] (ns, >= 0) of CENSORED[row] at `times` [events] (ns)."""
        place = self.place(times // SECOND)
        keep = place >= 0
        flat, ages = row * self.size + place[keep], ages[keep]
        np.add.at(self.ages.reshape(-1), flat * histogram.BUCKETS + histogram.buckets(ages), np.int32(1))
        np.maximum.at(self.oldest.reshape(-1), flat, ages)

    def place(self, seconds: Ints) -> Ints:
        """Index of each second in the ring; -1 for those it cannot hold, which are counted as late or early."""
        if not len(seconds):
            return seconds
        first, last = int(seconds.min()), int(seconds.max())
        if last > self._head:
            self._advance(min(last, self.closed + AHEAD))
        place = seconds % self.size
        if last > self._head:
            early = seconds > self._head
            place[early] = -1
            self.early += int(early.sum())
        if first < max(self._head - self.size + 1, 0):
            late = seconds < max(self._head - self.size + 1, 0)
            place[late] = -1
            self.late += int(late.sum())
        return place

    def _advance(self, second: int) -> None:
        """Make slots up to `second`, clearing what they held a lap ago."""
        for fresh in range(max(self._head + 1, second - self.size + 1), second + 1):
            if fresh >= self.size:  # the first lap is clear, and clearing would touch memory never used
                self._clear(fresh % self.size)
        self._head = max(self._head, second)

    def _clear(self, place: int) -> None:
        self.counts[:, place] = 0
        self.buckets[self.high[:, place] >= 0, place] = 0  # rows never used keep their memory untouched
        self.sums[:, place], self.low[:, place], self.high[:, place] = 0, np.inf, -np.inf
        if (self.oldest[:, place] >= 0).any():
            self.ages[:, place] = 0
            self.oldest[:, place] = -np.inf
        for gauge in self.gauges.values():
            gauge.clear(place)
