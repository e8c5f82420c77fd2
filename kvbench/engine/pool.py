"""The paged block pool: reference counts, and an index from content hash to block. Block 0 is the null block, never handed out.

A block is *referenced* (a live sequence holds it, or a fault pins it), *cached* (nobody does, but its content is in the index) or
*empty*. Blocks without content are taken before any cached one leaves; blocks are returned tail first (both as vLLM does). One
difference from vLLM: when a sequence computes content that is already resident, it adopts the resident block and returns its own.
"""

from collections.abc import Iterable, Sequence

from kvbench.core import Segment
from kvbench.engine import BlockInfo, Key, Policy

ROOT: Key = 0x9E3779B97F4A7C15  # parent of a first block


class Chain:
    """Block hashes of one sequence, computed on demand: hash(parent, the (key, offset, tokens) slices inside the block).

    Tuples of integers hash alike in every process, so runs are reproducible; 64 bits make a collision among 10^7 blocks a
    one-in-a-million event. Costs about 0.2 us per block inside a segment.
    """

    __slots__ = ("_at", "_block", "_offset", "_segments", "keys")

    def __init__(self, segments: Iterable[Segment], block: int) -> None:
        self.keys: list[Key] = []
        self._segments = [segment for segment in segments if segment[1] > 0]
        self._block = block
        self._at = self._offset = 0  # the first token not yet hashed: segment and offset inside it

    def upto(self, count: int) -> list[Key]:
        """The list of keys, at least `count` of them known (the content must be that long)."""
        keys, block = self.keys, self._block
        while len(keys) < count:
            content, tokens = self._segments[self._at]
            whole = min((tokens - self._offset) // block, count - len(keys))
            if whole == 0:
                self._seam()
                continue
            parent = keys[-1] if keys else ROOT
            end = self._offset + whole * block
            for offset in range(self._offset, end, block):
                parent = hash((parent, content, offset, block))
                keys.append(parent)
            self._offset = end
        return keys

    def _seam(self) -> None:
        """Append the block that begins in the present segment and ends in a later one."""
        slices: list[int] = []
        left = self._block
        while left:
            content, tokens = self._segments[self._at]
            taken = min(left, tokens - self._offset)
            if taken:
                slices += (content, self._offset, taken)
            left -= taken
            self._offset += taken
            if left:
                self._at, self._offset = self._at + 1, 0
        self.keys.append(hash((self.keys[-1] if self.keys else ROOT, *slices)))


class Pool:
    """`blocks` blocks of `tokens` tokens, the null block included, under an eviction policy."""

    def __init__(self, blocks: int, tokens: int, policy: Policy) -> None:
        if blocks < 2:
            raise ValueError(f"blocks is {blocks}: a pool has at least 2 (one of them is the null block)")
        self.usable = blocks - 1
        self.tokens = tokens
        self.policy = policy
        self.index: dict[Key, int] = {}
        self.evicted = 0
        self._key: list[Key | None] = [None] * blocks
        self._refs = [0] * blocks
        self._empty = list(range(blocks - 1, 0, -1))  # a stack: what was freed last is taken first
        self._referenced = 0
        self._claimed = 0  # blocks that faults want
        self._held: list[int] = []  # of those, what they have: fewer only while nothing is free

    @property
    def free(self) -> int:
        """Blocks that can be handed out: empty ones and cached ones that nobody references."""
        return self.usable - self._referenced

    @property
    def referenced(self) -> int:
        return self._referenced

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

    def take(self, keys: Iterable[Key]) -> list[int]:
        """Reference the blocks of resident keys."""
        taken = []
        for key in keys:
            block = self.index[key]
            if not self._refs[block]:
                self._referenced += 1
            self._refs[block] += 1
            self.policy.hit(key)
            taken.append(block)
        return taken

    def allocate(self, count: int) -> list[int]:
        """`count` blocks without content, referenced once. The caller has checked `free`; RuntimeError otherwise."""
        if count > self.free:
            raise RuntimeError(f"{count} blocks asked for, {self.free} free")
        taken = []
        for _ in range(count):
            block = self._empty.pop() if self._empty else self._evict()
            self._refs[block] = 1
            taken.append(block)
        self._referenced += count
        return taken

    def _evict(self) -> int:
        key = self.policy.evict(self._pinned, None)
        block = self.index.pop(key)  # the hash leaves the index before the block is used again: no stale hits
        self._key[block] = None
        self.evicted += 1
        return block

    def _pinned(self, key: Key) -> bool:
        return self._refs[self.index[key]] > 0

    def publish(self, block: int, key: Key, parent: Key, position: int) -> int:
        """The referenced `block` now holds `key`. Returns the block to keep: the resident one, where there is one already."""
        resident = self.index.get(key)
        if resident is None:
            self.index[key] = block
            self._key[block] = key
            self.policy.insert(key, BlockInfo(parent, position, self.tokens))
            return block
        if resident != block:
            self.release([block])
            self.take([key])
        return resident

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each, tail first. RuntimeError for a block that has none (a double free)."""
        for block in reversed(blocks):
            refs = self._refs[block]
            if refs <= 0:
                raise RuntimeError(f"block {block} freed twice")
            self._refs[block] = refs - 1
            if refs == 1:
                self._referenced -= 1
                key = self._key[block]
                if key is None:
                    self._empty.append(block)
                else:
                    self.policy.free(key)

        if self._claimed > len(self._held):
            self._collect()

    def pin(self, count: int) -> None:
        """Take `count` blocks away until `unpin(count)`: free ones now, the others as they are released, before anyone else."""
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

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Assert every invariant, given the blocks each live sequence holds. Slow: for tests."""
        counts = [0] * len(self._refs)
        for blocks in (*held, self._held):
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
        assert len(set(self._empty)) == len(self._empty), "a block is empty twice"
        assert all(not self._refs[block] and self._key[block] is None for block in self._empty), "an empty block is in use"
        assert len(self._empty) + cached + self._referenced == self.usable, "empty + cached + referenced differ from the total"
