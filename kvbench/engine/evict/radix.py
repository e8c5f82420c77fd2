"""Leaf first, as radix trees evict (SGLang): a block leaves only when no resident block continues it.

A prefix cache finds a block only through those before it, so a block without its head is dead weight. Which leaf goes is
LRU's, LFU's or FIFO's choice; a block that becomes a leaf stands where its own past puts it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from kvbench.engine import BlockInfo, Key
from kvbench.engine.evict.line import Rank, Ranks, last_resort


@dataclass(slots=True)
class Node:
    """What is known of a resident block. Times are running numbers."""

    parent: Key
    inserted: int
    released: int  # or last used, where that was later
    uses: int = 1


def by_release(node: Node) -> Rank:
    return (node.released,)


def by_uses(node: Node) -> Rank:
    return (node.uses, node.released)


def by_age(node: Node) -> Rank:
    return (node.inserted,)


class Leaves:
    """The leaf of the lowest `rank` leaves. A block in the middle does so only where every leaf is pinned, which no prefix
    cache does."""

    def __init__(self, rank: Callable[[Node], Rank]) -> None:
        self._rank = rank
        self._ranks = Ranks()
        self._nodes: dict[Key, Node] = {}
        self._children: dict[Key, int] = {}  # resident ones, where there are any
        self._number = count()

    def insert(self, key: Key, block: BlockInfo) -> None:
        now = next(self._number)
        self._nodes[key] = Node(block.parent, now, now)
        self._children[block.parent] = self._children.get(block.parent, 0) + 1
        self._ranks.put(key, self._rank(self._nodes[key]))

    def hit(self, key: Key) -> None:
        self._nodes[key].uses += 1
        self._used(key)

    def miss(self, key: Key) -> None:
        """Nothing to learn: no ghosts."""

    def free(self, key: Key) -> None:
        self._used(key)
        self._ranks.release(key)

    def _used(self, key: Key) -> None:
        node = self._nodes[key]
        node.released = next(self._number)
        self._ranks.put(key, self._rank(node))

    def evict(self, pinned: Callable[[Key], bool], incoming: Key | None) -> Key:
        key = self._ranks.pop(lambda key: key in self._children or pinned(key))
        if key is None:
            key = last_resort([self._ranks], pinned)
        self._gone(key)
        return key

    def _gone(self, key: Key) -> None:
        parent = self._nodes.pop(key).parent
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            self._ranks.release(parent)

    def remove(self, key: Key) -> None:
        if self._ranks.discard(key):
            self._gone(key)
