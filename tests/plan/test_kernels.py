"""Cache policies as array kernels: against libcachesim, against the engine's own objects, against the interpreter."""

import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.engine.evict.policies import POLICIES
from kvbench.plan.replay import compiled as module
from kvbench.plan.replay.compiled import Ids, compiled
from kvbench.plan.replay.kernels import KERNELS
from kvbench.plan.replay.objects import replay
from kvbench.plan.replay.offline import next_use
from kvbench.plan.replay.references import References
from kvbench.plan.replay.stack import stack_distances
from tests.plan.peers import PEERS, misses, oracle

EXACT = ("fifo", "lru", "lfu", "clock", "sieve", "arc", "2q", "s3fifo", "belady")  # the same block leaves every time
NEAR = {  # hit rate, absolute
    "lirs": 0.005,  # libcachesim trims its ghosts at another moment of the access
    "gdsf": 0.01,  # equal priorities leave in another order
}
APART = {"lecar"}  # theirs learns more slowly from few references; held to the published table of a whole trace in test_curve.py

OBJECTS_NEAR = {  # where the engine's object need not lose the same block; hit rate, absolute
    "lecar": 0.03,  # another generator draws, and ghosts are trimmed together
    "lirs": 0.01,  # the whole stack is bounded, not the ghosts
    "2q": 0.005,  # a ghost asked for again makes no room for another before its block is in
    "s3fifo": 0.005,  # the same
}


def zipf(n: int, most: int, seed: int) -> tuple[Ids, int]:
    """n references to at most `most` blocks, numbered in order of first use, and how many there are."""
    raw = np.minimum(np.random.default_rng(seed).zipf(1.2, n), most)
    ids: dict[int, int] = {}
    return np.array([ids.setdefault(key, len(ids)) for key in raw.tolist()], np.int32), len(ids)


def body(kernel: Any) -> Any:
    """The kernel as the interpreter runs it: nothing to compile but what it calls."""
    return getattr(kernel, "py_func", kernel)


def hits(kernel: Callable[..., None], keys: Ids, unique: int, blocks: int) -> Any:
    found = np.zeros(len(keys), np.bool_)
    kernel(keys, unique, blocks, found)
    return found


def single(keys: Ids, unique: int) -> References:
    """One prompt of one full block per reference."""
    ones = np.ones(len(keys), np.int64)
    return References(keys, unique, np.arange(len(keys) + 1), ones.astype(np.int32), ones, ones, ones, None)


def test_every_kernel_is_compared() -> None:
    assert set(EXACT) | set(NEAR) | APART == set(KERNELS) == set(PEERS)


@pytest.mark.parametrize("blocks", [12, 70, 300])
@pytest.mark.parametrize("name", [*EXACT, *NEAR])
def test_a_kernel_misses_as_libcachesim_does(name: str, blocks: int, tmp_path: Path) -> None:
    if name == "s3fifo" and blocks < 20:
        blocks = 20  # libcachesim refuses every block where its small queue has one place
    keys, unique = zipf(4000, 3000, seed=blocks)
    ours = len(keys) - int(hits(body(KERNELS[name]), keys, unique, blocks).sum())
    theirs = misses(name, oracle(keys, unique, tmp_path), blocks, len(keys))
    assert abs(ours - theirs) <= NEAR.get(name, 0) * len(keys), (ours, theirs)


@pytest.mark.parametrize("blocks", [1, 2, 50, 300])
@pytest.mark.parametrize("name", [name for name in KERNELS if name in POLICIES])
def test_kernel_and_object_give_the_same_misses(name: str, blocks: int) -> None:
    keys, unique = zipf(3000, 2000, seed=blocks)
    kernel = hits(body(KERNELS[name]), keys, unique, blocks)
    by_object = np.zeros(len(keys), np.bool_)
    replay(POLICIES[name](blocks, 0), single(keys, unique), blocks, by_object)
    if name in OBJECTS_NEAR:
        assert abs(kernel.mean() - by_object.mean()) <= OBJECTS_NEAR[name] + 3 / blocks**2, (kernel.sum(), by_object.sum())
    else:
        assert (kernel == by_object).all(), int((kernel != by_object).sum())


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("blocks", [1, 2, 3, 9, 40])
def test_no_kernel_holds_more_than_its_capacity_or_beats_belady(name: str, blocks: int) -> None:
    """The hits of k references in a row to distinct blocks are at most the capacity; first references always miss."""
    keys, unique = zipf(600, 100, seed=7)
    found = hits(body(KERNELS[name]), keys, unique, blocks)
    assert not found[np.unique(keys, return_index=True)[1]].any()
    assert found.sum() <= hits(body(KERNELS["belady"]), keys, unique, blocks).sum()
    round_robin = np.tile(np.arange(blocks + 1, dtype=np.int32), 2)  # one more than fits, then all again
    assert hits(body(KERNELS[name]), round_robin, blocks + 1, blocks).sum() <= blocks


@given(st.lists(st.integers(0, 12), min_size=1, max_size=60))
def test_one_pass_gives_lru_at_every_capacity(raw: list[int]) -> None:
    ids: dict[int, int] = {}
    keys = np.array([ids.setdefault(key, len(ids)) for key in raw], np.int32)
    distances = stack_distances(keys, len(ids))
    for blocks in range(1, len(ids) + 1):
        cache: OrderedDict[int, None] = OrderedDict()
        for key, distance in zip(keys.tolist(), distances.tolist(), strict=True):
            assert (distance < blocks) == (key in cache)
            cache[key] = None
            cache.move_to_end(key)
            if len(cache) > blocks:
                cache.popitem(last=False)


def test_next_use() -> None:
    assert next_use(np.array([0, 1, 0, 2, 1], np.int32), 3).tolist() == [2, 4, 5, 5, 5]


def test_where_no_cache_can_be_written_kernels_are_compiled_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def njit(cache: bool = False) -> Callable[[Any], Any]:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(module, "_njit", njit)
    assert compiled(len) is len
    assert asked == [True, False]


def test_without_numba_the_same_functions_run() -> None:
    """In a process that cannot import it, every kernel gives what it gives here."""
    script = """
import sys
sys.modules["numba"] = None
import numpy as np
from kvbench.plan.replay.compiled import COMPILES
from kvbench.plan.replay.kernels import KERNELS
from kvbench.plan.replay.stack import stack_distances
keys = np.array([int(key) for key in sys.argv[1].split()], np.int32)
print(COMPILES, stack_distances(keys, int(keys.max()) + 1).sum())
for name, kernel in KERNELS.items():
    hits = np.zeros(len(keys), np.bool_)
    kernel(keys, int(keys.max()) + 1, 20, hits)
    print(name, hits.sum())
"""
    keys, unique = zipf(1500, 400, seed=3)
    command = [sys.executable, "-W", "error", "-c", script, " ".join(map(str, keys.tolist()))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    expected = [f"False {stack_distances(keys, unique).sum()}"]
    expected += [f"{name} {hits(body(kernel), keys, unique, 20).sum()}" for name, kernel in KERNELS.items()]
    assert done.stdout.split("\n")[:-1] == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_compiled_and_interpreted_agree(name: str) -> None:
    keys, unique = zipf(20_000, 5000, seed=11)
    for blocks in (1, 64, 900):
        assert (hits(KERNELS[name], keys, unique, blocks) == hits(body(KERNELS[name]), keys, unique, blocks)).all()
