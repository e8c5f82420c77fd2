"""Policies that keep an order and at most one bit or count beside it: FIFO, LRU, Clock, SIEVE."""

from collections.abc import Callable
from itertools import count

from kvbench.engine import BlockInfo, Key
from kvbench.engine.evict.line import Line, Ranks, last_resort


class Fifo:
    """First in, first out. Hits count for nothing, and a referenced block keeps its place."""

    def __init__(self, capacity: int, seed: int) -> None:
        self._ranks = Ranks()
        self._number = count()

    def insert(self, key: Key, block: BlockInfo) -> None:
        self._ranks.put(key, (next(self._number),))

    def hit(self, key: Key) -> None:
        """Nothing to learn."""

    def miss(self, key: Key) -> None:
        """Nothing to learn: no ghosts."""

    def free(self, key: Key) -> None:
        self._ranks.release(key)

    def evict(self, pinned: Callable[[Key], bool], incoming: Key | None) -> Key:
        return self._ranks.evict(pinned)

    def remove(self, key: Key) -> None:
        self._ranks.discard(key)


class Lru:
    """Least recently used, in vLLM's order: by the time the last reference went, tail of a sequence before its head."""

    def __init__(self, capacity: int, seed: int) -> None:
        self._line = Line()

    def insert(self, key: Key, block: BlockInfo) -> None:
        self._line.push(key)

    def hit(self, key: Key) -> None:
        self._line.push(key)

    def miss(self, key: Key) -> None:
        """Nothing to learn: no ghosts."""

    def free(self, key: Key) -> None:
        self._line.push(key)

    def evict(self, pinned: Callable[[Key], bool], incoming: Key | None) -> Key:
        key = self._line.pop(pinned)
        return last_resort([self._line], pinned) if key is None else key

    def remove(self, key: Key) -> None:
        self._line.discard(key)


class Clock:
    """Second chance (Corbato, "A Paging Experiment with the Multics System", 1968), one bit per block, set by a hit.

    The hand clears set bits and takes the first block whose bit is clear. A referenced block that it meets goes round once more.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self._line = Line()  # the hand stands at the old end
        self._used: set[Key] = set()

    def insert(self, key: Key, block: BlockInfo) -> None:
        self._line.push(key)

    def hit(self, key: Key) -> None:
        self._used.add(key)

    def miss(self, key: Key) -> None:
        """Nothing to learn: no ghosts."""

    def free(self, key: Key) -> None:
        self._line.release(key)

    def evict(self, pinned: Callable[[Key], bool], incoming: Key | None) -> Key:
        while (key := self._line.pop(pinned)) is not None:
            if key not in self._used:
                return key
            self._used.remove(key)
            self._line.push(key)
        key = last_resort([self._line], pinned)
        self._used.discard(key)
        return key

    def remove(self, key: Key) -> None:
        self._line.discard(key)
        self._used.discard(key)


class Sieve:
    """SIEVE (Zhang et al., NSDI 2024): Clock whose survivors keep their place, so that new blocks are sieved soon.

    The hand goes from old to new and starts again at the oldest. A referenced block that it meets is behind it once released.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self._ahead = Line()  # all younger than any in _behind; the hand stands at the old end
        self._behind = Line()
        self._behind.aside = self._ahead.aside  # whoever is set aside belongs to neither
        self._used: set[Key] = set()

    def insert(self, key: Key, block: BlockInfo) -> None:
        self._ahead.push(key)

    def hit(self, key: Key) -> None:
        self._used.add(key)

    def miss(self, key: Key) -> None:
        """Nothing to learn: no ghosts."""

    def free(self, key: Key) -> None:
        self._behind.release(key)

    def evict(self, pinned: Callable[[Key], bool], incoming: Key | None) -> Key:
        for _ in range(3):  # the rest of this round, a whole one, and one in which no bit is set
            while (key := self._ahead.pop(pinned)) is not None:
                if key not in self._used:
                    self._turn()
                    return key
                self._used.remove(key)
                self._behind.push(key)
            self._turn()
        key = last_resort([self._ahead], pinned)
        self._used.discard(key)
        return key

    def _turn(self) -> None:
        """Once the hand has passed the newest block, it stands at the oldest."""
        if not self._ahead:
            self._ahead, self._behind = self._behind, self._ahead

    def remove(self, key: Key) -> None:
        self._used.discard(key)
        if self._ahead.discard(key):
            self._turn()
        else:
            self._behind.discard(key)
