"""A cache partition that moves: quota goes to the layer group whose hit rate is below a floor, from the one that hits most."""

import math
from collections.abc import Sequence

from kvbench.core import Nanos
from kvbench.engine.groups import LayersSpec
from kvbench.engine.holding import Group

LEAST = 0.1  # share of its first quota that a group always keeps
APART = 0.05  # a giver that is below the floor itself hits at least so much more often


class Partition:
    """Looks every `every` seconds, at the first scheduling decision after. `longest`: tokens of the longest job so far, for which
    every group keeps room. A hit is one on the device: what has to come up from a tier had no room here."""

    def __init__(self, groups: Sequence[Group], spec: LayersSpec) -> None:
        self.groups, self.floor, self.step = groups, spec.floor, spec.step
        self.moves = 0
        self.longest = 0
        self._every = round(spec.every * 1e9)
        self._due: Nanos = self._every
        self._first = [group.pool.usable for group in groups]
        self._before = [(0, 0)] * len(groups)

    def look(self, now: Nanos) -> None:
        """Move quota if a period is over and a group hit too rarely in it."""
        if now < self._due:
            return
        self._due = now - now % self._every + self._every
        counts = [(group.lookups, group.device) for group in self.groups]
        rates = [(hit - h) / (seen - s) if seen > s else None for (seen, hit), (s, h) in zip(counts, self._before, strict=True)]
        self._before = counts
        known = {at: rate for at, rate in enumerate(rates) if rate is not None}
        if len(known) > 1:
            self._move(known)

    def _move(self, rates: dict[int, float]) -> None:
        low = min(rates, key=lambda at: (rates[at], at))
        high = max(rates, key=lambda at: (rates[at], self.groups[at].pool.free * self.groups[at].bytes, -at))
        if rates[low] >= self.floor or (rates[high] < self.floor and rates[high] - rates[low] < APART):
            return
        taker, giver = self.groups[low], self.groups[high]
        spare = min(giver.pool.free, giver.pool.usable - self._least(high))
        wanted = self.step * taker.pool.usable * taker.bytes
        gained = int(min(wanted, max(0, spare) * giver.bytes) // taker.bytes)
        if gained:
            giver.pool.resize(giver.pool.usable - math.ceil(gained * taker.bytes / giver.bytes))
            taker.pool.resize(taker.pool.usable + gained)
            self.moves += 1

    def _least(self, at: int) -> int:
        return max(round(LEAST * self._first[at]), self.groups[at].wanted(self.longest, 0, 0), 1)
