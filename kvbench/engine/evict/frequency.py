"""Policies that count uses: LFU, Mooncake's LengthAware, GDSF. Each begins at one use when a block is computed."""

from collections.abc import Callable
from itertools import count

from kvbench.engine import BlockInfo, Key
from kvbench.engine.evict.line import Ranks


class Lfu:
    """Least frequently used; among equals the one whose last reference went first. Forgets the count of what leaves."""

    def __init__(self, capacity: int, seed: int) -> None:
        self._ranks = Ranks()
        self._uses: dict[Key, int] = {}
        self._number = count()

    def insert(self, key: Key, block: BlockInfo) -> None:
        self._uses[key] = 1
        self._rank(key)

    def hit(self, key: Key) -> None:
        self._uses[key] += 1
        self._rank(key)

    def miss(self, key: Key) -> None:
        """Nothing to learn: no ghosts."""

    def free(self, key: Key) -> None:
        self._rank(key)
        self._ranks.release(key)

    def _rank(self, key: Key) -> None:
        self._ranks.put(key, (self._uses[key], next(self._number)))

    def evict(self, pinned: Callable[[Key], bool], incoming: Key | None) -> Key:
        key = self._ranks.evict(pinned)
        del self._uses[key]
        return key

    def remove(self, key: Key) -> None:
        self._ranks.discard(key)
        self._uses.pop(key, None)


class LengthAware:
    """LFU that, among equals, keeps the blocks that come later in their requests (Mooncake, arXiv 2407.00079, table 1).

    It is here to be compared: a late block whose head is gone is never hit.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self._ranks = Ranks()
        self._uses: dict[Key, tuple[int, int]] = {}  # uses, position
        self._number = count()

    def insert(self, key: Key, block: BlockInfo) -> None:
        self._rank(key, 1, block.position)

    def hit(self, key: Key) -> None:
        uses, position = self._uses[key]
        self._rank(key, uses + 1, position)

    def miss(self, key: Key) -> None:
        """Nothing to learn: no ghosts."""

    def free(self, key: Key) -> None:
        self._rank(key, *self._uses[key])
        self._ranks.release(key)

    def _rank(self, key: Key, uses: int, position: int) -> None:
        self._uses[key] = uses, position
        self._ranks.put(key, (uses, position, next(self._number)))

    def evict(self, pinned: Callable[[Key], bool], incoming: Key | None) -> Key:
        key = self._ranks.evict(pinned)
        del self._uses[key]
        return key

    def remove(self, key: Key) -> None:
        self._ranks.discard(key)
        self._uses.pop(key, None)


class Gdsf:
    """Greedy dual, size and frequency (Cherkasova, HPL-98-69): priority = age + uses x tokens saved per block of memory.

    The age is the priority of the block that left last, so that what was popular once is forgotten. Every block takes one
    place, so the value of a use is its tokens. Its position counts for nothing: a late block takes longer to compute, but is
    of no use without those before it.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self._ranks = Ranks()
        self._uses: dict[Key, tuple[int, int, int]] = {}  # uses, tokens, priority
        self._number = count()
        self._age = 0

    def insert(self, key: Key, block: BlockInfo) -> None:
        self._rank(key, 1, block.tokens)

    def hit(self, key: Key) -> None:
        uses, tokens, _ = self._uses[key]
        self._rank(key, uses + 1, tokens)

    def miss(self, key: Key) -> None:
        """Nothing to learn: no ghosts."""

    def free(self, key: Key) -> None:
        self._ranks.put(key, (self._uses[key][2], next(self._number)))
        self._ranks.release(key)

    def _rank(self, key: Key, uses: int, tokens: int) -> None:
        priority = self._age + uses * tokens
        self._uses[key] = uses, tokens, priority
        self._ranks.put(key, (priority, next(self._number)))

    def evict(self, pinned: Callable[[Key], bool], incoming: Key | None) -> Key:
        key = self._ranks.evict(pinned)
        self._age = max(self._age, self._uses.pop(key)[2])  # a block that was pinned for long may be older than the last
        return key

    def remove(self, key: Key) -> None:
        self._ranks.discard(key)
        self._uses.pop(key, None)
