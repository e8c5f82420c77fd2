"""The bound that no policy can pass: Belady's, which knows the future. Not a name of a scenario; for plan/curve and tests."""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import count

from kvbench.engine import BlockInfo, Key, Policy
from kvbench.engine.evict.line import Ranks


def belady(future: Iterable[Key]) -> Callable[[int, int], Policy]:
    """What makes policies for `future`: the keys of all accesses to come, in order, each of which is a hit or an insertion.

    Belady, "A study of replacement algorithms for a virtual-storage computer" (IBM Systems Journal, 1966): the block whose next
    use is farthest away leaves. Takes what is computed in any case: no policy here may decline a block.
    """
    keys = list(future)
    return lambda capacity, seed: Belady(keys)


class Belady:
    def __init__(self, future: Iterable[Key]) -> None:
        self._uses: dict[Key, deque[int]] = {}
        for at, key in enumerate(future):
            self._uses.setdefault(key, deque()).append(at)
        self._ranks = Ranks()
        self._never = count(1)

    def insert(self, key: Key, block: BlockInfo) -> None:
        self._used(key)

    def hit(self, key: Key) -> None:
        self._used(key)

    def _used(self, key: Key) -> None:
        """One use of `key` is no longer to come."""
        uses = self._uses.get(key, deque())
        if uses:
            uses.popleft()
        self._ranks.put(key, (0, -uses[0]) if uses else (-1, next(self._never)))

    def miss(self, key: Key) -> None:
        """The future is known."""

    def free(self, key: Key) -> None:
        self._ranks.release(key)

    def evict(self, pinned: Callable[[Key], bool], incoming: Key | None) -> Key:
        return self._ranks.evict(pinned)

    def remove(self, key: Key) -> None:
        self._ranks.discard(key)
