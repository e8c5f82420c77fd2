"""The paged block pool: reference counts, and an index from content hash to block. Block 0 is the null block, never handed out.

A block is *referenced* (a live sequence holds it, or a fault pins it), *cached* (nobody does, but its content is in the index) or
*empty*. Blocks without content are taken before any cached one leaves; blocks are returned tail first (both as vLLM does). One
difference from vLLM: when a sequence computes content that is already resident, it adopts the resident block and returns its own.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from types import MappingProxyType

from kvbench.core import Nanos
from kvbench.engine import BlockInfo, Key, Policy
from kvbench.engine.tape import Op, Tape

NOTHING: Mapping[int, int] = MappingProxyType({})


def _nowhere(key: Key) -> None:
    """What the pool gives up is gone."""


class Pool:
    """`blocks` blocks of `tokens` tokens, the null block included, under an eviction policy.

    `retain`: a block whose content is younger than that stays while another can go; one that was spared so leaves first once it
    is older, if nobody used it since. `tape` is told of every change, `evicted_to` of every key given up.
    """

    def __init__(
        self, blocks: int, tokens: int, policy: Policy, group: int = 0, retain: Nanos = 0, tape: Tape | None = None,
        evicted_to: Callable[[Key], None] = _nowhere,
    ) -> None:  # fmt: skip
        if blocks < 2:
            raise ValueError(f"blocks is {blocks}: a pool has at least 2 (one of them is the null block)")
        self.usable = blocks - 1
        self.tokens = tokens
        self.policy = policy
        self.group, self.retain, self.tape, self.evicted_to = group, retain, tape, evicted_to
        self.now: Nanos = 0
        self.index: dict[Key, int] = {}
        self.evicted = 0
        self._born: list[Nanos] = [0] * blocks  # when a block got its content
        self._key: list[Key | None] = [None] * blocks
        self._refs = [0] * blocks
        self._empty = list(range(blocks - 1, 0, -1))  # a stack: what was freed last is taken first
        self._gone: list[int] = []  # blocks that `resize` took away
        self._referenced = 0
        self._claimed = 0  # blocks that faults want
        self._held: list[int] = []  # of those, what they have: fewer only while nothing is free
        self._spared: dict[Key, int] = {}  # the policy's victims that were too young, and their numbers: it has set them aside
        self._ripe: list[tuple[Nanos, int, Key]] = []  # a heap of these by when they are old enough; some have been used since
        self._spares = 0
        self._lost: Counter[int] = Counter()  # references that nobody will drop, by block
        self._whose: dict[int, tuple[int, int]] = {}  # (group, tokens) of blocks in use, where a tape hears; else of none
        self.doubts: list[Callable[[], None]] = []  # of faults: each is called before a block is taken

    @property
    def free(self) -> int:
        """Blocks that can be handed out: empty ones and cached ones that nobody references."""
        return self.usable - self._referenced

    @property
    def referenced(self) -> int:
        return self._referenced

    @property
    def empty(self) -> int:
        """Blocks that hold no content and that nobody references."""
        return len(self._empty)

    @property
    def pinned(self) -> int:
        """Blocks that faults hold; they count as referenced."""
        return len(self._held)

    def found(self, keys: Sequence[Key], most: int) -> int:
        """How many of the first `most` keys are resident, up to the first that is not. Counts nothing: admission may fail."""
        index = self.index
        for at in range(most):
            if keys[at] not in index:
                return at
        return most

    def unreferenced(self, keys: Iterable[Key]) -> int:
        """How many of these resident keys nobody references: taking them uses up free blocks."""
        return sum(not self._refs[self.index[key]] for key in keys)

    def take(self, keys: Iterable[Key], job: int = -1, again: bool = False) -> list[int]:
        """Reference the blocks of resident keys."""
        taken = []
        for key in keys:
            block = self.index[key]
            if not self._refs[block]:
                self._referenced += 1
                self._spared.pop(key, None)
            self._refs[block] += 1
            self.policy.hit(key)
            if self.tape is not None:
                self.tape.note("hit", key, self._whose[block][0], job, block, again=again)
            taken.append(block)
        return taken

    def allocate(self, count: int, job: int = -1, group: tuple[int, int] | None = None) -> list[int]:
        """`count` blocks without content, referenced once. The caller has checked `free`; RuntimeError otherwise.

        group: (number, tokens of a block), for the tape, where groups of layers share the pool.
        """
        if count > self.free:
            raise RuntimeError(f"{count} blocks asked for, {self.free} free")
        taken = []
        for _ in range(count):
            for doubt in self.doubts:
                doubt()
            block = self._empty.pop() if self._empty else self._evict()
            self._refs[block] = 1
            if self.tape is not None:
                self._whose[block] = group or (self.group, self.tokens)
                self.tape.note("alloc", None, self._whose[block][0], job, block)
            taken.append(block)
        self._referenced += count
        return taken

    def _evict(self) -> int:
        block = self._drop(key := self._victim())
        self.evicted += 1
        if self.tape is not None:
            self.tape.note("evict", key, self._whose[block][0], -1, block)
        self.evicted_to(key)
        return block

    def _victim(self) -> Key:
        if not self.retain:
            return self.policy.evict(self._pinned, None)
        while self._ripe and self._ripe[0][0] <= self.now:
            _, number, key = heappop(self._ripe)
            if self._spared.get(key) == number:
                self.policy.remove(key)
                return key
        try:
            return self.policy.evict(self._kept, None)
        except KeyError:
            return self.policy.evict(self._pinned, None)  # everything is young: room comes first

    def _drop(self, key: Key) -> int:
        """The hash leaves the index before the block is used again: no stale hits."""
        block = self.index.pop(key)
        self._spared.pop(key, None)
        self._key[block] = None
        return block

    def _pinned(self, key: Key) -> bool:
        return self._refs[self.index[key]] > 0

    def _kept(self, key: Key) -> bool:
        block = self.index[key]
        if self._refs[block]:
            return True
        ripe = self._born[block] + self.retain
        if ripe > self.now and key not in self._spared:
            self._spares += 1
            self._spared[key] = self._spares
            heappush(self._ripe, (ripe, self._spares, key))
        return ripe > self.now

    def publish(self, block: int, key: Key, parent: Key, position: int, job: int = -1) -> int:
        """The referenced `block` now holds `key`. Returns the block to keep: the resident one, where there is one already."""
        resident = self.index.get(key)
        if resident is None:
            self.index[key] = block
            self._key[block] = key
            self._born[block] = self.now
            self.policy.insert(key, BlockInfo(parent, position, self.tokens))
            if self.tape is not None:
                group, tokens = self._whose[block]
                self.tape.note("store", key, group, job, block, parent=parent, tokens=tokens)
            return block
        if resident != block:
            self.release([block])
            if not self._refs[resident]:
                self._referenced += 1
                self._spared.pop(key, None)
            self._refs[resident] += 1
            self.policy.hit(key)
        return resident

    def discard(self, keys: Iterable[Key]) -> None:
        """Give up those of these keys that are resident and that nobody references."""
        self._forget(list(keys), "evict")

    def clear(self) -> None:
        """Forget all content that nobody references."""
        self._forget(list(self.index), "reset")

    def _forget(self, keys: Sequence[Key], op: Op) -> None:
        for key in keys:
            block = self.index.get(key)
            if block is not None and not self._refs[block]:
                self._drop(key)
                self.policy.remove(key)
                self._empty.append(block)
                if self.tape is not None:
                    self.tape.note(op, key, self._whose[block][0], -1, block)

    def release(self, blocks: Sequence[int], valid: Mapping[int, int] = NOTHING) -> None:
        """Drop one reference to each, tail first. RuntimeError for a block that has none (a double free).

        valid: tokens in those blocks that are not full, for the tape.
        """
        for block in reversed(blocks):
            refs = self._refs[block]
            if refs <= 0:
                raise RuntimeError(f"block {block} freed twice")
            self._refs[block] = refs - 1
            if refs == 1:
                self._referenced -= 1
                key = self._key[block]
                if self.tape is not None:
                    group, full = self._whose[block]
                    self.tape.note("free", key, group, -1, block, tokens=full if key is not None else valid.get(block, 0))
                if key is None:
                    self._empty.append(block)
                else:
                    self.policy.free(key)
        if self._claimed > len(self._held):
            self._collect()

    def resize(self, usable: int) -> None:
        """Have `usable` blocks from now on. Empty blocks leave first, then cached ones. RuntimeError where too few are free."""
        if usable < self.usable - self.free:
            raise RuntimeError(f"{usable} usable blocks asked for, {self._referenced} are referenced")
        while self.usable > usable:
            self._gone.append(self._empty.pop() if self._empty else self._evict())
            self.usable -= 1
        while self.usable < usable:
            if self._gone:
                self._empty.append(self._gone.pop())
            else:
                self._empty.append(len(self._refs))
                self._refs.append(0)
                self._key.append(None)
                self._born.append(0)
            self.usable += 1
        if self._claimed > len(self._held):
            self._collect()

    def pin(self, count: int) -> None:
        """Take `count` blocks away until `unpin(count)`: free ones now, others as they are released, before anyone else."""
        self._claimed += count
        self._collect()

    def unpin(self, count: int) -> None:
        """Give back what a `pin(count)` took. The blocks come back empty."""
        self._claimed -= count
        back = self._held[self._claimed :]
        del self._held[self._claimed :]
        self.release(back)

    def _collect(self) -> None:
        self._held += self.allocate(min(self._claimed - len(self._held), self.free))

    def leak(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these, which somebody holds, and that is never dropped."""
        for block in blocks:
            self._refs[block] += 1
            self._lost[block] += 1

    def lose(self) -> None:
        """The device is gone, no sequence holds anything any more: faults let go of theirs, and all content is forgotten."""
        gone = [*self._held, *self._lost.elements()]
        self._claimed, self._held, self._lost = 0, [], Counter()
        self.release(gone)
        self.clear()

    @property
    def leaked(self) -> int:
        """Blocks with a reference that is never dropped."""
        return len(self._lost)

    def spare(self) -> int:
        """A block that nobody references: the empty one freed last, else a cached one; the null block where all are in use."""
        if self._empty:
            return self._empty[-1]
        return next((block for block in self.index.values() if not self._refs[block]), 0)

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Assert every invariant, given the blocks each live sequence holds. Slow: for tests."""
        counts = [0] * len(self._refs)
        for blocks in (*held, self._held, self._lost.elements()):
            for block in blocks:
                counts[block] += 1
        assert counts == self._refs, "reference counts differ from what sequences and faults hold"
        assert len(self._held) == self._claimed or (len(self._held) < self._claimed and not self.free), "free blocks not pinned"
        assert all(self._key[block] is None for block in self._held), "a pinned block has content"
        assert self._refs[0] == 0, "the null block was handed out"
        assert self._key[0] is None, "the null block has content"
        assert self._referenced == sum(refs > 0 for refs in self._refs), "referenced is miscounted"
        assert {key: block for block, key in enumerate(self._key) if key is not None} == self.index, "index and blocks disagree"
        cached = sum(self._refs[block] == 0 for block in self.index.values())
        assert all(key in self.index and not self._refs[self.index[key]] for key in self._spared), (
            "a spared block is gone or in use"
        )
        assert len(set(self._empty)) == len(self._empty), "a block is empty twice"
        assert all(not self._refs[block] and self._key[block] is None for block in self._empty), "an empty block is in use"
        assert len(self._empty) + cached + self._referenced == self.usable, "empty + cached + referenced differ from the total"
