"""Time that does not count, and an axis without it: what is measured on that axis is as if the cut time had not been."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbench.core import Record, Seconds

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cuts:
    """Intervals [start, end) in seconds, ascending and disjoint."""

    spans: tuple[tuple[Seconds, Seconds], ...] = ()

    @classmethod
    def of(cls, spans: Sequence[tuple[Seconds, Seconds]]) -> "Cuts":
        """Of intervals in any order, joined where they touch."""
        joined: list[tuple[Seconds, Seconds]] = []
        for start, end in sorted(span for span in spans if span[1] > span[0]):
            if joined and start <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((start, end))
        return cls(tuple(joined))

    def at(self, t: Seconds) -> Seconds:
        """Where `t` lies on the axis without the cuts; what is cut out lies where its cut begins."""
        return t - sum(min(t, end) - start for start, end in self.spans if t > start)

    def kept(self, times: Floats) -> NDArray[np.bool_]:
        """Which instants (seconds) count."""
        keep = np.ones(len(times), bool)
        for start, end in self.spans:
            keep &= (times < start) | (times >= end)
        return keep

    def squeezed(self, times: Floats) -> Floats:
        """Those that count, on the axis without the cuts, in their order."""
        left = times[self.kept(times)]
        gone = np.zeros(len(left))
        for start, end in self.spans:
            gone[left >= end] += end - start
        return np.asarray(left - gone)

    def caught(self, records: Sequence[Record]) -> frozenset[int]:
        """Ids of requests due, or not yet over, within a cut. What has no end on record was not over."""
        found = set()
        for record in records:
            due, over = record.due_ns / 1e9, record.end_ns / 1e9 if record.end_ns is not None else np.inf
            if any(due < end and over >= start for start, end in self.spans):
                found.add(record.id)
        return frozenset(found)


NONE = Cuts()
