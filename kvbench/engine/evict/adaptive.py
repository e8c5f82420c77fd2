"""Policies that weigh recency against frequency by what their ghosts say: ARC, LeCaR."""

import math
from collections import OrderedDict
from collections.abc import Callable
from random import Random

from kvbench.engine import BlockInfo, Key
from kvbench.engine.evict.frequency import Lfu
from kvbench.engine.evict.line import Line, last_resort


class Arc:
    """Adaptive replacement (Megiddo and Modha, FAST 2003): LRU over blocks used once and LRU over the others, each with ghosts.

    A ghost that is asked for moves the target size of `_once` by the ratio of the two ghost lists (a fraction too), at least
    by one. No parameters. Ghosts are trimmed when a block enters rather than when one leaves.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self._capacity = capacity
        self._target = 0.0  # blocks of _once
        self._once, self._often = Line(), Line()
        self._once_gone: OrderedDict[Key, None] = OrderedDict()
        self._often_gone: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key, block: BlockInfo) -> None:
        known = key in self._once_gone or key in self._often_gone
        self._once_gone.pop(key, None)
        self._often_gone.pop(key, None)
        (self._often if known else self._once).push(key)
        while self._once_gone and len(self._once) + len(self._once_gone) > self._capacity:
            self._once_gone.popitem(last=False)
        resident = len(self._once) + len(self._often)
        while self._often_gone and resident + len(self._once_gone) + len(self._often_gone) > 2 * self._capacity:
            self._often_gone.popitem(last=False)

    def hit(self, key: Key) -> None:
        self._once.discard(key)
        self._often.push(key)

    def miss(self, key: Key) -> None:
        once, often = len(self._once_gone), len(self._often_gone)
        if key in self._once_gone:
            self._target = min(self._target + max(1, often / once), self._capacity)
        elif key in self._often_gone:
            self._target = max(self._target - max(1, once / often), 0)

    def free(self, key: Key) -> None:
        (self._often if key in self._often else self._once).push(key)

    def evict(self, pinned: Callable[[Key], bool], incoming: Key | None) -> Key:
        over = len(self._once) - self._target
        if over > 0 or (over == 0 and incoming in self._often_gone):
            order = [(self._once, self._once_gone), (self._often, self._often_gone)]
        else:
            order = [(self._often, self._often_gone), (self._once, self._once_gone)]
        for line, gone in order:
            key = line.pop(pinned)
            if key is not None:
                gone[key] = None
                return key
        return last_resort([self._once, self._often], pinned)

    def remove(self, key: Key) -> None:
        if not self._once.discard(key):
            self._often.discard(key)


class Lecar:
    """LeCaR (Vietri et al., HotStorage 2018): a coin between LRU and LFU, weighted by regret. Rate 0.45, discount 0.005^(1 /
    capacity).

    The expert that sent away a block which is asked for again loses weight, less so the longer ago it was. The history holds
    as many ghosts as the pool has blocks, of both experts together.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self._capacity = capacity
        self._random = Random(seed)
        self._recency = Line()
        self._frequency = Lfu(capacity, seed)
        self._share = 0.5  # of LRU
        self._gone: OrderedDict[Key, tuple[bool, int]] = OrderedDict()  # by LRU or not, when
        self._accesses = 0

    def insert(self, key: Key, block: BlockInfo) -> None:
        self._gone.pop(key, None)
        self._recency.push(key)
        self._frequency.insert(key, block)

    def hit(self, key: Key) -> None:
        self._accesses += 1
        self._recency.push(key)
        self._frequency.hit(key)

    def miss(self, key: Key) -> None:
        self._accesses += 1
        if (ghost := self._gone.pop(key, None)) is not None:
            by_recency, since = ghost
            loss = math.exp(-0.45 * 0.005 ** ((self._accesses - since) / self._capacity))
            kept, other = (self._share * loss, 1 - self._share) if by_recency else (self._share, (1 - self._share) * loss)
            self._share = min(max(kept / (kept + other), 1e-9), 1 - 1e-9)  # neither is ever given up for good

    def free(self, key: Key) -> None:
        self._recency.push(key)
        self._frequency.free(key)

    def evict(self, pinned: Callable[[Key], bool], incoming: Key | None) -> Key:
        by_recency = self._random.random() < self._share
        key = self._recency.pop(pinned) if by_recency else None
        if key is None:
            key = self._frequency.evict(pinned, incoming)
            self._recency.discard(key)
        else:
            self._frequency.remove(key)
        self._gone[key] = by_recency, self._accesses
        if len(self._gone) > self._capacity:
            self._gone.popitem(last=False)
        return key

    def remove(self, key: Key) -> None:
        self._recency.discard(key)
        self._frequency.remove(key)
