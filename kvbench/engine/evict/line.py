"""What policies are made of: keys in an order, which hands out the first that is not pinned.

A pinned key met at the old end is set aside and costs nothing until it is released. Every such step is paid for by the
reference that will be released, so an eviction costs O(1) amortised (`Line`) or O(log n) (`Ranks`), however many are pinned.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from kvbench.engine import Key

Rank = tuple[float, ...]
"""The lowest leaves first. No two keys may have the same: end it with a running number."""


class Line:
    """Keys in the order in which they were last pushed."""

    __slots__ = ("_order", "aside")

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()  # oldest first
        self.aside: dict[Key, None] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to pop."""
        return bool(self._order)

    def __len__(self) -> int:
        return len(self._order) + len(self.aside)

    def __contains__(self, key: Key) -> bool:
        return key in self._order or key in self.aside

    def push(self, key: Key) -> None:
        """Put `key` at the new end, wherever it was."""
        if self.aside:
            self.aside.pop(key, None)
        self._order[key] = None
        self._order.move_to_end(key)

    def release(self, key: Key) -> None:
        """Nobody references `key` any more. One that was set aside was in use until now: it rejoins at the new end."""
        if key in self.aside:
            self.push(key)

    def pop(self, pinned: Callable[[Key], bool]) -> Key | None:
        """Take out the oldest key that is neither pinned nor set aside."""
        while self._order:
            key, _ = self._order.popitem(last=False)
            if not pinned(key):
                return key
            self.aside[key] = None
        return None

    def discard(self, key: Key) -> bool:
        """Take `key` out. False where it was not in."""
        if key in self.aside:
            del self.aside[key]
            return True
        return self._order.pop(key, 0) is None


class Ranks:
    """Keys by a rank of their own. Ranks that only rise cost nothing until the key reaches the head of the heap."""

    __slots__ = ("_entry", "_heap", "_rank", "aside")

    def __init__(self) -> None:
        self._rank: dict[Key, Rank] = {}
        self._entry: dict[Key, Rank] = {}  # the rank under which a key stands in the heap: never above its own
        self._heap: list[tuple[Rank, Key]] = []
        self.aside: dict[Key, None] = {}

    def __len__(self) -> int:
        return len(self._rank)

    def __contains__(self, key: Key) -> bool:
        return key in self._rank

    def put(self, key: Key, rank: Rank) -> None:
        """Set or change the rank of `key`. One that is set aside stays so until it is released."""
        self._rank[key] = rank
        if key not in self.aside:
            entry = self._entry.get(key)
            if entry is None or rank < entry:
                self._push(key, rank)

    def _push(self, key: Key, rank: Rank) -> None:
        self._entry[key] = rank
        heappush(self._heap, (rank, key))
        if len(self._heap) > 2 * len(self._entry) + 64:  # most of it is left over from keys that went or sank
            self._heap = [(entry, known) for known, entry in self._entry.items()]
            heapify(self._heap)

    def release(self, key: Key) -> None:
        """Nobody references `key` any more: it stands again where its rank says."""
        if key in self.aside:
            del self.aside[key]
            self._push(key, self._rank[key])

    def pop(self, pinned: Callable[[Key], bool]) -> Key | None:
        """Take out the key of the lowest rank that is neither pinned nor set aside."""
        while self._heap:
            rank, key = heappop(self._heap)
            if self._entry.get(key) != rank:
                continue
            if self._rank[key] > rank:
                self._push(key, self._rank[key])
                continue
            del self._entry[key]
            if not pinned(key):
                del self._rank[key]
                return key
            self.aside[key] = None
        return None

    def discard(self, key: Key) -> bool:
        """Take `key` out. False where it was not in."""
        self.aside.pop(key, None)
        self._entry.pop(key, None)
        return self._rank.pop(key, None) is not None

    def evict(self, pinned: Callable[[Key], bool]) -> Key:
        """Take out the key of the lowest rank that is not pinned. KeyError when all are."""
        key = self.pop(pinned)
        return last_resort([self], pinned) if key is None else key


def last_resort(lines: Iterable[Line | Ranks], pinned: Callable[[Key], bool]) -> Key:
    """A key that was set aside and that nobody released, though it is no longer pinned. KeyError when there is none.

    The pool releases every key, so it never comes here with something to evict.
    """
    for line in lines:
        for key in line.aside:
            if not pinned(key):
                line.discard(key)
                return key
    raise KeyError("every resident block is pinned")
