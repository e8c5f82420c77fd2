"""Counters over a run: how much each series has grown, whatever restarts. A fall is a restart, after which it began at 0."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}


class Track:
    """One series of a counter. base: its value at the first reading of its server (0 where it came later, for it began then)."""

    __slots__ = ("base", "grown", "here", "last", "resets")

    def __init__(self, base: float) -> None:
        self.base, self.last = base, base
        self.grown = 0.0
        self.resets = 0
        self.here = True  # on the latest page

    def read(self, value: float) -> bool:
        """Take the next reading. True: it had restarted."""
        fell = value < self.last
        self.grown += value if fell else value - self.last
        self.resets += fell
        self.last, self.here = value, True
        return fell


class Buckets:
    """One histogram of one engine: by upper edge how much each cumulative bucket has grown, and the sum of what was observed."""

    __slots__ = ("grown", "here", "last", "resets")

    def __init__(self, base: Mapping[float, float] | None) -> None:
        self.last: Mapping[float, float] = base or {}
        self.grown: dict[float, float] = dict.fromkeys(self.last, 0.0)
        self.resets = 0
        self.here = True

    def read(self, now: Mapping[float, float]) -> bool:
        """Take the next reading: cumulative counts by upper edge, and the sum under SUM, if there. True: it had restarted.

        One fall among the counts means that all of them began anew: else they would not be cumulative any more.
        """
        if SUM in self.last and SUM not in now:
            now = {SUM: self.last[SUM], **now}
        fell = any(now.get(edge, 0.0) < value for edge, value in self.last.items() if edge != SUM)
        for edge, value in now.items():
            self.grown[edge] = self.grown.get(edge, 0.0) + (value if fell else value - self.last.get(edge, 0.0))
        self.resets += fell
        self.last, self.here = now, True
        return fell


SUM = float("-inf")  # the edge under which a histogram's sum stands


INF = float("inf")
LARGEST = 1e30  # what is beyond, or not a number, is no reading: sums of such would be none either


def whole(now: Mapping[float, float], before: Mapping[float, float]) -> bool:
    """Is this all of a histogram, with nothing in it that is no count, and every bucket that it had `before`?"""
    counts = all(abs(value) < LARGEST and (value >= 0 or edge == SUM) for edge, value in now.items())
    return counts and INF in now and all(edge in now for edge in before if edge != SUM)


class Bounds(NamedTuple):
    """A quantile lies in (low, high]; high is None where it lies beyond the last edge, and low then is the least it can be."""

    low: float
    high: float | None


def quantile(edges: Sequence[float], counts: Sequence[float], q: float) -> Bounds:
    """Where the q-quantile of a histogram's observations lies. counts: cumulative, one per upper edge, the last edge +Inf;
    what is observed is never negative."""
    total = counts[-1]
    place = bisect_left(counts, q * total * (1 - 1e-12))
    low = edges[place - 1] if place else min(0.0, edges[0])
    return Bounds(low, edges[place] if edges[place] != float("inf") else None)


def described(parts: Sequence[Buckets]) -> dict[str, Any]:
    """Several engines' histograms as one: n, mean, and each quantile with its bounds; null with a reason where there is none."""
    grown: dict[float, float] = {}
    edges = sorted(edge for edge in (parts[0].grown if parts else ()) if edge != SUM)
    if any(sorted(edge for edge in part.grown if edge != SUM) != edges for part in parts):
        return {"n": None, "reason": "the engines' buckets differ"}
    for part in parts:
        for edge, value in part.grown.items():
            grown[edge] = grown.get(edge, 0.0) + value
    n = grown.get(float("inf"), 0.0)
    if n < 1:
        return {"n": 0, "reason": "nothing was observed"}
    counts = [grown[edge] for edge in edges]
    found = {name: quantile(edges, counts, q)._asdict() for name, q in QUANTILES.items()}
    mean = grown[SUM] / n if SUM in grown else None
    return {"n": round(n), "mean": mean, **found, "reason": None}
