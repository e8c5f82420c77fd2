"""How fast kvbench replays cache policies, beside libcachesim on the same references in the same process, in turn.

usage: python tests/bench/curve.py [ROUNDS]      prints million references/s (best of the rounds) and the ratio of each policy
kernels are kvbench curve's, over arrays; objects are the engine's own policies (engine/evict) over a set of resident keys.
libcachesim reads its binary oracleGeneral file, already in memory, and is given the hash table size that suits it best.
Times are the process's own; all run in one thread. Machines are noisy: only the ratios of one run mean something.
Exit code 1 where one falls short of its floor.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time

import libcachesim as theirs
import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from kvbench.engine import BlockInfo  # noqa: E402 - after the path that makes it importable
from kvbench.engine.evict.policies import POLICIES  # noqa: E402
from kvbench.plan.replay.kernels import KERNELS  # noqa: E402
from kvbench.plan.replay.references import References, references  # noqa: E402
from kvbench.plan.replay.stack import stack_distances  # noqa: E402
from kvbench.workload.traces import read  # noqa: E402
from tests.plan.peers import PEERS, oracle  # noqa: E402

TRACE = ROOT / "scenarios/traces/mooncake_conversation.jsonl.gz"
BLOCKS = (1000, 5859, 30_000)
FLOOR, CURVE_FLOOR = 0.5, 2.0


def best(run: Callable[[], object], rounds: int) -> float:
    """Seconds of this process in the fastest of the rounds."""
    found = []
    for _ in range(rounds):
        begin = process_time()
        run()
        found.append(process_time() - begin)
    return min(found)


def ours(name: str, refs: References, blocks: int, rounds: int) -> float:
    hits = np.zeros(len(refs.keys), np.bool_)
    KERNELS[name](refs.keys, refs.unique, blocks, hits)  # compiles
    return best(lambda: KERNELS[name](refs.keys, refs.unique, blocks, hits), rounds)


def objects(name: str, keys: list[int], blocks: int, rounds: int) -> float:
    """As the pool asks a policy, with nothing referenced: look-up, eviction, insertion, release."""
    block = BlockInfo(-1, 0, 16)

    def replay() -> None:
        policy = POLICIES[name](blocks, 0)
        resident: set[int] = set()
        for key in keys:
            if key in resident:
                policy.hit(key)
            else:
                policy.miss(key)
                if len(resident) == blocks:
                    resident.remove(policy.evict(_unpinned, key))
                policy.insert(key, block)
                resident.add(key)
            policy.free(key)

    return best(replay, rounds)


def _unpinned(key: int) -> bool:
    return False


def peer(name: str, file: Path, blocks: int, rounds: int) -> float:
    found = []
    for power in (16, 18, 20):
        for _ in range(rounds):
            cache = PEERS[name](blocks, hashpower=power)
            reader = theirs.TraceReader(str(file), theirs.TraceType.ORACLE_GENERAL_TRACE)
            found.append(best(lambda: cache.process_trace(reader), 1))  # noqa: B023 - called before the loop goes on
    return min(found)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    refs = references(read(TRACE))
    n = len(refs.keys)
    short = []
    with tempfile.TemporaryDirectory() as folder:
        file = oracle(refs.keys, refs.unique, Path(folder))
        keys = refs.keys.tolist()
        print(f"{n:,} references, million/s{'':<10}kernels  libcachesim   ratio   objects   ratio")
        for name in KERNELS:
            for blocks in BLOCKS:
                mine, other = ours(name, refs, blocks, rounds), peer(name, file, blocks, rounds)
                ratio = other / mine
                row = f"{name:<12}{blocks:>8,} blocks{'':<11}{n / mine / 1e6:>8.1f}{n / other / 1e6:>13.1f}{ratio:>8.1f}"
                if name in POLICIES:
                    slow = objects(name, keys, blocks, rounds)
                    row += f"{n / slow / 1e6:>10.2f}{other / slow:>8.2f}"
                print(row, flush=True)
                if ratio < FLOOR:
                    short.append(name)
        stack_distances(refs.keys, refs.unique)
        mine = best(lambda: stack_distances(refs.keys, refs.unique), rounds)
        other = min(peer("lru", file, blocks, rounds) for blocks in BLOCKS)
        print(f"{'lru, the whole curve':<38}{n / mine / 1e6:>8.1f}{n / other / 1e6:>13.1f}{other / mine:>8.1f}")
        if other / mine < CURVE_FLOOR:
            short.append("the LRU curve")
    if short:
        sys.exit(f"slower than promised: {', '.join(dict.fromkeys(short))}")


if __name__ == "__main__":
    main()
