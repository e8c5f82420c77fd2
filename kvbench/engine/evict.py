"""Who leaves a full pool. Contract in the door (Policy); one class and one line in POLICIES per policy."""

from collections import OrderedDict
from collections.abc import Callable

from kvbench.engine import BlockInfo, Key, Policy


class Lru:
    """Least recently used, in vLLM's order: by the time the last reference went, tail of a sequence before its head.

    Referenced keys found at the old end are set aside until they are freed, so that an eviction costs O(1) amortised.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()  # oldest first
        self._aside: dict[Key, None] = {}

    def insert(self, key: Key, block: BlockInfo) -> None:
        self._order[key] = None

    def hit(self, key: Key) -> None:
        self._latest(key)

    def miss(self, key: Key) -> None:
        """Nothing to learn: no ghosts."""

    def free(self, key: Key) -> None:
        self._latest(key)

    def _latest(self, key: Key) -> None:
        self._aside.pop(key, None)
        self._order[key] = None
        self._order.move_to_end(key)

    def evict(self, pinned: Callable[[Key], bool], incoming: Key | None) -> Key:
        while self._order:
            key, _ = self._order.popitem(last=False)
            if not pinned(key):
                return key
            self._aside[key] = None
        for key in self._aside:
            if not pinned(key):
                del self._aside[key]
                return key
        raise KeyError("every resident block is pinned")

    def remove(self, key: Key) -> None:
        self._aside.pop(key, None)
        self._order.pop(key, None)


POLICIES: dict[str, Callable[[int, int], Policy]] = {"lru": Lru}
