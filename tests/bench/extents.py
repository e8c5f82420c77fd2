"""How full an extent allocator gets before it fails, after Mooncake's allocator benchmark (docs: allocator-benchmark-result).

usage: python tests/bench/extents.py      prints utilization (bytes asked for / total) per fit and load

Both procedures go on for several turnovers of the range and count from when it has been full once. `every`: after each allocation
(Mooncake's uniform and random sizes: one random extent is evicted per failure). `failures`: as each failure finds it, before 5 %
of the extents, drawn at random, are evicted (Mooncake's pairs: N of the one size, then N of the other, N uniform on 1..128).
"""

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from kvbench.engine.extent import FITS, Extents  # noqa: E402 - after the path that makes it importable

MiB, GiB = 1 << 20, 1 << 30
KV, INDEXER = 3_274_752, 658_432  # bytes of one object each, facts of Mooncake's benchmark


class Load:
    """Allocates in `extents`, evicting at random as often as an allocation fails."""

    def __init__(self, extents: Extents, rng: random.Random, evicted: float) -> None:
        self.extents, self.evicted = extents, evicted
        self.failed: list[float] = []  # utilization at each failure
        self._rng, self._live = rng, list[int]()

    def allocate(self, size: int) -> None:
        while (offset := self.extents.allocate(size)) is None:
            self.failed.append(self.extents.utilization)
            for _ in range(max(1, int(len(self._live) * self.evicted))):
                at = self._rng.randrange(len(self._live))
                self._live[at], self._live[-1] = self._live[-1], self._live[at]
                self.extents.free(self._live.pop())
        self._live.append(offset)


def every(fit: str, total: int, sizes: Callable[[random.Random], int], count: int, seed: int = 0) -> list[float]:
    """Utilization after each of `count` allocations, once the range has been full."""
    rng = random.Random(seed)
    load, seen = Load(Extents(total, fit), rng, 0), list[float]()
    while len(seen) < count:
        load.allocate(sizes(rng))
        if load.failed:
            seen.append(load.extents.utilization)
    return seen


def failures(fit: str, total: int, sizes: tuple[int, ...], count: int, seed: int = 0) -> list[float]:
    """Utilization at `count` failures, the first ten left out."""
    rng = random.Random(seed)
    load = Load(Extents(total, fit), rng, 0.05)
    while len(load.failed) < count + 10:
        many = rng.randint(1, 128)
        for size in sizes:
            for _ in range(many):
                load.allocate(size)
    return load.failed[10 : count + 10]


def rows() -> Iterator[tuple[str, Callable[[str], list[float]]]]:
    for size in (111, 495, 2065):
        yield f"one size, {size} B, of 3,000.5", lambda fit, size=size: every(fit, size * 6001 // 2, lambda _: size, 30_000)  # type: ignore[misc]
    yield "KV objects alone, 32 GiB", lambda fit: failures(fit, 32 * GiB, (KV,), 300)
    yield "KV and indexer objects, 32 GiB", lambda fit: failures(fit, 32 * GiB, (KV, INDEXER), 300)
    yield "1 KiB to 64 MiB, uniform, 2 GiB", lambda fit: every(fit, 2 * GiB, lambda rng: rng.randint(1024, 64 * MiB), 60_000)
    yield "1 to 4,095 tokens, uniform, 41,408", lambda fit: every(fit, 41_408, lambda rng: rng.randint(1, 4095), 30_000)


if __name__ == "__main__":
    print(f"{'mean utilization':36}" + "".join(f"{fit:>8}" for fit in FITS))
    for name, measure in rows():
        print(f"{name:36}" + "".join(f"{mean(measure(fit)):8.4f}" for fit in FITS))
