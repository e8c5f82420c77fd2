"""Policies of several queues: a small one on probation, a main one, and ghosts (keys of blocks that left): 2Q, S3-FIFO, LIRS."""

from collections import OrderedDict
from collections.abc import Callable

from kvbench.engine import BlockInfo, Key
from kvbench.engine.evict.line import Line, last_resort


class Ghosts:
    """The last `most` keys that left. A key that is asked for again stays until it is back, or `most` others have left."""

    __slots__ = ("_keys", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def add(self, key: Key) -> None:
        self._keys[key] = None
        if len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def asked(self, key: Key) -> None:
        if key in self._keys:
            self._keys.move_to_end(key)

    def back(self, key: Key) -> bool:
        """Forget `key`. False where it was not known."""
        return self._keys.pop(key, 0) is None


class TwoQ:
    """2Q (Johnson and Shasha, VLDB 1994), in full: in = 25 % of the capacity, out (ghosts) = 50 %.

    A new block waits in a FIFO; one whose ghost is still known goes to the main LRU. The FIFO gives while it is over its share.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self._share = capacity // 4
        self._in, self._main = Line(), Line()
        self._out = Ghosts(capacity // 2)

    def insert(self, key: Key, block: BlockInfo) -> None:
        (self._main if self._out.back(key) else self._in).push(key)

    def hit(self, key: Key) -> None:
        if key in self._main:
            self._main.push(key)

    def miss(self, key: Key) -> None:
        self._out.asked(key)

    def free(self, key: Key) -> None:
        if key in self._main:
            self._main.push(key)
        else:
            self._in.release(key)

    def evict(self, pinned: Callable[[Key], bool], incoming: Key | None) -> Key:
        first, second = (self._in, self._main) if len(self._in) > self._share else (self._main, self._in)
        line, key = first, first.pop(pinned)
        if key is None:
            line, key = second, second.pop(pinned)
        if key is None:
            return last_resort([first, second], pinned)
        if line is self._in:
            self._out.add(key)
        return key

    def remove(self, key: Key) -> None:
        if not self._in.discard(key):
            self._main.discard(key)


class S3Fifo:
    """S3-FIFO (Yang et al., SOSP 2023): small = 10 % of the capacity, ghosts = 90 %, two hits to be promoted, counts up to 3.

    A new block goes to the small FIFO, or to the main one where its ghost is known or the pool is filling for the first time and
    small is full (as libCacheSim does). Main is a clock with counts.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self._share = max(1, capacity // 10)
        self._rest = capacity - self._share
        self._small, self._main = Line(), Line()
        self._ghosts = Ghosts(capacity * 9 // 10)
        self._uses: dict[Key, int] = {}
        self._filling = True

    def insert(self, key: Key, block: BlockInfo) -> None:
        self._uses[key] = 0
        promoted = self._ghosts.back(key) or (self._filling and len(self._small) >= self._share)
        (self._main if promoted else self._small).push(key)

    def hit(self, key: Key) -> None:
        self._uses[key] = min(self._uses[key] + 1, 3)

    def miss(self, key: Key) -> None:
        self._ghosts.asked(key)

    def free(self, key: Key) -> None:
        self._small.release(key)
        self._main.release(key)

    def evict(self, pinned: Callable[[Key], bool], incoming: Key | None) -> Key:
        self._filling = False
        key = None
        while key is None and (self._small or self._main):
            if self._main and (len(self._main) > self._rest or not self._small):
                key = self._from_main(pinned)
            else:
                key = self._from_small(pinned)
        if key is None:
            key = last_resort([self._small, self._main], pinned)
        del self._uses[key]
        return key

    def _from_small(self, pinned: Callable[[Key], bool]) -> Key | None:
        while (key := self._small.pop(pinned)) is not None:
            if self._uses[key] < 2:
                self._ghosts.add(key)
                return key
            self._uses[key] = 0
            self._main.push(key)
        return None

    def _from_main(self, pinned: Callable[[Key], bool]) -> Key | None:
        while (key := self._main.pop(pinned)) is not None:
            if not self._uses[key]:
                return key
            self._uses[key] -= 1
            self._main.push(key)
        return None

    def remove(self, key: Key) -> None:
        self._uses.pop(key, None)
        if not self._small.discard(key):
            self._main.discard(key)


class Lirs:
    """LIRS (Jiang and Zhang, SIGMETRICS 2002): 1 % of the capacity for blocks of high inter-reference recency (at least one).

    `_stack` holds, in order of last use, the keys of all LIR blocks and of all others that were used since the LIR block used
    longest ago, ghosts included; at most twice the capacity. A block that is used while in the stack becomes LIR,
    and the LIR block at the bottom loses its place.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self._capacity = capacity
        self._most = max(1, capacity - max(1, capacity // 100))
        self._lirs: set[Key] = set()
        self._hirs = Line()  # resident, the next to leave first
        self._stack: OrderedDict[Key, None] = OrderedDict()  # used longest ago first
        self._ghosts: OrderedDict[Key, None] = OrderedDict()  # of the stack: not resident, the first to leave first

    def insert(self, key: Key, block: BlockInfo) -> None:
        known = key in self._ghosts
        self._ghosts.pop(key, None)
        self._top(key)
        if known or len(self._lirs) < self._most:
            self._promote(key)
        else:
            self._hirs.push(key)

    def hit(self, key: Key) -> None:
        known = key in self._stack
        self._top(key)
        if key in self._lirs:
            self._prune()
        elif known:
            self._hirs.discard(key)
            self._promote(key)
        else:
            self._hirs.push(key)

    def _top(self, key: Key) -> None:
        self._stack[key] = None
        self._stack.move_to_end(key)

    def _promote(self, key: Key) -> None:
        self._lirs.add(key)
        while len(self._lirs) > self._most:
            self._demote()

    def _demote(self) -> None:
        """The LIR block at the bottom of the stack becomes the newest of the others."""
        self._prune()
        key, _ = self._stack.popitem(last=False)
        self._lirs.remove(key)
        self._hirs.push(key)
        self._prune()

    def _prune(self) -> None:
        """An LIR block is at the bottom of the stack; the stack is not too long."""
        while self._stack and (key := next(iter(self._stack))) not in self._lirs:
            del self._stack[key]
            self._ghosts.pop(key, None)
        while len(self._stack) > 2 * self._capacity and self._ghosts:
            key, _ = self._ghosts.popitem(last=False)
            del self._stack[key]

    def miss(self, key: Key) -> None:
        """Ghosts wait in the stack."""

    def free(self, key: Key) -> None:
        if key in self._stack:
            self._top(key)
        if key in self._lirs:
            self._prune()
        else:
            self._hirs.push(key)

    def evict(self, pinned: Callable[[Key], bool], incoming: Key | None) -> Key:
        while (key := self._hirs.pop(pinned)) is None and self._lirs:
            self._demote()
        if key is None:
            key = last_resort([self._hirs], pinned)
        if key in self._stack:
            self._ghosts[key] = None
        self._prune()
        return key

    def remove(self, key: Key) -> None:
        self._hirs.discard(key)
        self._lirs.discard(key)
        self._stack.pop(key, None)
        self._prune()
