"""One lock against sixteen: a block index (content hash -> block) under threads, as if several workers shared pool.index.

usage: python tests/bench/locks.py [ROUNDS]     prints, per number of threads, operations/s as ratios to one thread with one lock

Each thread has its own load: four lookups, then an insert with the eviction of the oldest key; each is one critical section.
`single` has one dict and one lock, `sharded` 16 of both (the shard is the key's low bits), `none` the dict alone: nothing breaks
there only because the GIL makes each call of a dict atomic, and an eviction and its insert are not one section any more.
Machines are noisy: only the ratios of one run mean something. Medians of ROUNDS rounds, the variants in turn.
"""

import random
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from statistics import median

SHARDS, KEYS, RESIDENT, OPERATIONS = 16, 60_000, 30_000, 200_000
Index = tuple[list[OrderedDict[int, int]], list[threading.Lock]]
Worker = Callable[[Index, list[int]], None]


def single(index: Index, keys: list[int]) -> None:
    blocks, lock = index[0][0], index[1][0]
    for number, key in enumerate(keys):
        with lock:
            if number % 5:
                blocks.get(key)
            else:
                blocks.popitem(last=False)
                blocks[key] = number


def sharded(index: Index, keys: list[int]) -> None:
    shards, locks = index
    for number, key in enumerate(keys):
        at = key % SHARDS
        blocks = shards[at]
        with locks[at]:
            if number % 5:
                blocks.get(key)
            else:
                blocks.popitem(last=False)
                blocks[key] = number


def none(index: Index, keys: list[int]) -> None:
    blocks = index[0][0]
    for number, key in enumerate(keys):
        if number % 5:
            blocks.get(key)
        else:
            blocks.popitem(last=False)
            blocks[key] = number


VARIANTS: dict[str, tuple[int, Worker]] = {"single": (1, single), "sharded": (SHARDS, sharded), "none": (1, none)}


def rate(variant: str, threads: int) -> float:
    """Operations/s of all threads together, OPERATIONS in all; their keys are drawn before the time begins."""
    shards, worker = VARIANTS[variant]
    rng = random.Random(1)
    keys = [rng.getrandbits(60) for _ in range(KEYS)]
    index: Index = [OrderedDict() for _ in range(shards)], [threading.Lock() for _ in range(shards)]
    for number, key in enumerate(keys[:RESIDENT]):
        index[0][key % shards][key] = number
    loads = [[rng.choice(keys) for _ in range(OPERATIONS // threads)] for _ in range(threads)]
    gate = threading.Barrier(threads + 1)

    def run(load: list[int]) -> None:
        gate.wait()
        worker(index, load)

    workers = [threading.Thread(target=run, args=(load,)) for load in loads]
    for each in workers:
        each.start()
    gate.wait()
    start = time.perf_counter_ns()
    for each in workers:
        each.join()
    return OPERATIONS / (time.perf_counter_ns() - start) * 1e9


def main(rounds: int) -> None:
    cases = [(variant, threads) for threads in (1, 2, 4) for variant in VARIANTS]
    seen: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            seen[case].append(rate(*case))
    base = median(seen["single", 1])
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(f"Python {sys.version.split()[0]}, GIL {'on' if gil else 'off'}; one lock, one thread: {base / 1e6:.2f} M operations/s")
    print(f"{'threads':>8}" + "".join(f"{variant:>10}" for variant in VARIANTS) + f"{'sharded/single':>17}")
    for threads in (1, 2, 4):
        middle = {variant: median(seen[variant, threads]) for variant in VARIANTS}
        ratios = "".join(f"{middle[variant] / base:10.2f}" for variant in VARIANTS)
        print(f"{threads:8}{ratios}{middle['sharded'] / middle['single']:17.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
