"""What faults are doing to one engine at the moment, and what they have done: the state behind faults.py.

A *condition* is asked before a sequence enters the batch, and told when it leaves (batch.Condition).
"""

import random
from collections import Counter
from typing import TYPE_CHECKING, Protocol

from kvbench.engine.extent import Extents
from kvbench.engine.sequence import Sequence

if TYPE_CHECKING:
    from kvbench.engine.engine import Engine
    from kvbench.engine.fault import Fault

FOREIGN = 1 << 61  # content keys of foreign jobs: above those of workloads and of replies


class Harm:
    """slowed: factors on step times; refusals: shares of new jobs; pauses: of the engine's stalls those that end by themselves;
    single: faults for which every step is planned by itself; pinned: faults that hold blocks, with how many of each pool;
    tally: running totals by name, for the gauges.

    `seed` reaches one stream of draws per purpose, so that one fault does not move another's.
    """

    def __init__(self, seed: int) -> None:
        self.slowed: list[float] = []
        self.refusals: list[float] = []
        self.pauses = self.single = 0
        self.pinned: list[tuple[Fault, list[int]]] = []
        self.tally: Counter[str] = Counter()
        self._seed = seed
        self._draws = {"refuse": random.Random(seed)}
        self._jobs: dict[Fault, list[int]] = {}
        self._foreign = 0

    def draws(self, purpose: str) -> random.Random:
        if purpose not in self._draws:
            self._draws[purpose] = random.Random(f"{self._seed} {purpose}")
        return self._draws[purpose]

    def refuses(self) -> bool:
        """Whether the job that arrives now is refused."""
        if not self.refusals:
            return False
        served = 1.0
        for share in self.refusals:
            served *= 1 - share
        return self.draws("refuse").random() >= served

    def foreign(self, fault: "Fault") -> tuple[int, int]:
        """(id, content key) of a new job that is nobody's but the fault's: ids below 0, which no span tells."""
        self._foreign += 1
        self._jobs.setdefault(fault, []).append(-self._foreign)
        return -self._foreign, FOREIGN + self._foreign

    def over(self, fault: "Fault") -> list[int]:
        """Ids of all jobs that `foreign` gave the fault; some may have ended."""
        return self._jobs.pop(fault, [])


class Leaking:
    """A lost release hook: of the sequences that end, a share keeps its blocks, each drawn by itself."""

    def __init__(self, fault: "Fault", share: float, engine: "Engine") -> None:
        self.fault, self.share = fault, share
        self._cache, self._draws = engine.cache, engine.harm.draws("leak")

    def admit(self, sequence: Sequence) -> bool:
        return True

    def release(self, sequence: Sequence, ended: bool) -> None:
        tables = sequence.holding.tables
        if ended and any(table.blocks for table in tables) and self._draws.random() < self.share:
            for group, table in zip(self._cache.groups, tables, strict=True):
                group.pool.leak(table.blocks[table.passed :])


class Contiguous:
    """KV memory as it was before pages: a sequence enters only with one extent as long as it may become. In tokens.

    Blocks are kept beside it, so that what is shared is still computed once; an extent holds a sequence's tokens all the same.
    What was running before has extents as far as they fit, the oldest first, and goes on without one where they do not.
    """

    def __init__(self, fault: "Fault", fit: str, engine: "Engine") -> None:
        self.fault, self._tally = fault, engine.harm.tally
        self.extents = Extents(engine.cache.usable_tokens(), fit)
        self._at: dict[Sequence, int] = {}
        self._waiting: set[Sequence] = set()  # for an extent, though as many tokens are free
        for sequence in engine.batch.running:
            self._reserve(sequence)

    def admit(self, sequence: Sequence) -> bool:
        if sequence in self._at or self._reserve(sequence):
            self._waiting.discard(sequence)
            return True
        if sequence not in self._waiting and _length(sequence) <= self.extents.free_bytes:
            self._waiting.add(sequence)
            self._tally["extent_waits"] += 1
        return False

    def _reserve(self, sequence: Sequence) -> bool:
        offset = self.extents.allocate(_length(sequence))
        if offset is not None:
            self._at[sequence] = offset
        return offset is not None

    def release(self, sequence: Sequence, ended: bool) -> None:
        self._waiting.discard(sequence)
        if sequence in self._at:
            self.extents.free(self._at.pop(sequence))


def _length(sequence: Sequence) -> int:
    """Tokens that the sequence may come to hold: all but the last, which is sampled and never cached."""
    return sequence.end - 1


class Doubt:
    """An allocation may fail, as CUDA's caching allocator does: then everything that nobody uses is flushed, and it is tried
    again."""

    def __init__(self, fault: "Fault", share: float, pause: float, engine: "Engine") -> None:
        self.fault, self.share, self.pause = fault, share, pause
        self._cache, self._tally, self._draws = engine.cache, engine.harm.tally, engine.harm.draws("alloc_retry")

    def __call__(self) -> None:
        if self._draws.random() >= self.share:
            return
        self._tally["alloc_retries"] += 1
        self._cache.debt += self.pause
        for pool in self._cache.pools:
            pool.clear()


class Slowable(Protocol):
    """Tiers whose bandwidth can fall."""

    def slow(self, tier: str, factor: float) -> None:
        """`tier` moves bytes at 1 / factor of the rate it had, until as many `fast`. What is on its way arrives as planned."""

    def fast(self, tier: str, factor: float) -> None:
        """Undo one `slow`."""
