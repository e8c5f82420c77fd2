"""Each eviction policy: its order by hand, its hit rates against libCacheSim's, and what `learned` promises."""

import gzip
import json
import random
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import libcachesim
import pytest

from kvbench.engine import BlockInfo, Policy
from kvbench.engine.evict.offline import belady
from kvbench.engine.evict.policies import POLICIES, unknown

TRACE = Path(__file__).parents[2] / "scenarios" / "traces" / "mooncake_conversation.jsonl.gz"
Access = tuple[int, BlockInfo]


@cache
def conversation(requests: int) -> tuple[Access, ...]:
    """Every block of every request, in order: the independent-object model."""
    accesses: list[Access] = []
    with gzip.open(TRACE, "rt") as lines:
        for _, line in zip(range(requests), lines, strict=False):
            parent = -1
            for position, key in enumerate(json.loads(line)["hash_ids"]):
                accesses.append((key, BlockInfo(parent, position, 512)))
                parent = key
    return tuple(accesses)


def plain(keys: Iterable[int]) -> list[Access]:
    return [(key, BlockInfo(-1, 0, 16)) for key in keys]


def hits(policy: Policy, accesses: Iterable[Access], capacity: int) -> int:
    """Nothing is pinned, and a block is freed as soon as it is found or computed."""
    resident: set[int] = set()
    found = 0
    for key, block in accesses:
        if key in resident:
            found += 1
            policy.hit(key)
        else:
            policy.miss(key)
            if len(resident) == capacity:
                resident.remove(policy.evict(lambda _: False, key))
            policy.insert(key, block)
            resident.add(key)
        policy.free(key)
    return found


# ---- orders by hand


def leaving(policy: Policy) -> list[int]:
    left = []
    while True:
        try:
            left.append(policy.evict(lambda _: False, None))
        except KeyError:
            return left


def filled(name: str, keys: Iterable[int], capacity: int = 8) -> Policy:
    policy = POLICIES[name](capacity, 0)
    for position, key in enumerate(keys):
        policy.insert(key, BlockInfo(key - 1, position, 16))
        policy.free(key)
    return policy


def use(policy: Policy, *keys: int) -> None:
    for key in keys:
        policy.hit(key)
        policy.free(key)


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("fifo", [1, 2, 3, 4]),
        ("lru", [2, 4, 3, 1]),
        ("clock", [2, 4, 1, 3]),  # 1 and 3 get a second chance, in their order
        ("sieve", [2, 4, 1, 3]),
        ("lfu", [2, 4, 3, 1]),  # uses: 1 three times, 3 twice
        ("gdsf", [2, 4, 3, 1]),
        ("length_aware", [2, 4, 3, 1]),
        ("arc", [2, 4, 3, 1]),  # 1 and 3 were used twice
    ],
)
def test_who_leaves_first(name: str, order: list[int]) -> None:
    policy = filled(name, [1, 2, 3, 4])
    use(policy, 1, 3, 1)
    assert leaving(policy) == order


def test_lru_takes_the_longest_unreferenced() -> None:
    policy = POLICIES["lru"](8, 0)
    for key in (1, 2, 3):
        policy.insert(key, BlockInfo(key - 1, 0, 16))
    for key in (3, 1, 2):
        policy.free(key)
    use(policy, 3)
    assert leaving(policy) == [1, 2, 3]


def test_a_referenced_block_keeps_its_place_in_fifo() -> None:
    policy = filled("fifo", [1, 2, 3, 4])
    policy.hit(1)
    policy.hit(2)
    assert policy.evict(lambda key: key in (1, 2), None) == 3
    policy.free(2)
    policy.free(1)
    assert leaving(policy) == [1, 2, 4]


def test_sieve_keeps_survivors_in_their_place() -> None:
    sieve, clock = filled("sieve", [1, 2, 3]), filled("clock", [1, 2, 3])
    for policy in (sieve, clock):
        use(policy, 1)
        assert policy.evict(lambda _: False, None) == 2  # the hand passed 1, and stands at 3
        policy.insert(4, BlockInfo(-1, 0, 16))
        policy.free(4)
    assert leaving(sieve) == [3, 4, 1]  # the hand goes on to 4, then begins again
    assert leaving(clock) == [3, 1, 4]  # 1 went round before 4 came


def test_length_aware_keeps_late_blocks_among_equals() -> None:
    policy = POLICIES["length_aware"](8, 0)
    for key, position in ((1, 5), (2, 0), (3, 9)):
        policy.insert(key, BlockInfo(-1, position, 16))
        policy.free(key)
    assert leaving(policy) == [2, 1, 3]


def test_gdsf_forgets_what_was_popular() -> None:
    policy = POLICIES["gdsf"](2, 0)
    for key in (1, 2):
        policy.insert(key, BlockInfo(-1, 0, 16))
        policy.free(key)
    use(policy, 1, 1, 1)  # priority 4 x 16
    for key in range(3, 6):  # each enters at the age of the one that it drives out, plus 16
        assert policy.evict(lambda _: False, key) == key - 1
        policy.insert(key, BlockInfo(-1, 0, 16))
        policy.free(key)
    assert policy.evict(lambda _: False, None) == 1  # both at 64: 1 was used earlier


@pytest.mark.parametrize("name", ["2q", "s3fifo", "lirs", "arc"])
def test_a_ghost_that_comes_back_outlives_a_scan(name: str) -> None:
    policy = filled(name, range(20), capacity=20)
    back = policy.evict(lambda _: False, 99)
    policy.insert(99, BlockInfo(-1, 0, 16))
    policy.free(99)
    for key in (back, *range(100, 112)):
        policy.miss(key)
        assert policy.evict(lambda _: False, key) != back
        policy.insert(key, BlockInfo(-1, 0, 16))
        policy.free(key)


@pytest.mark.parametrize(
    ("name", "order"), [("leaf_lru", [3, 2, 5, 4, 1]), ("leaf_lfu", [5, 4, 3, 2, 1]), ("leaf_fifo", [3, 2, 5, 4, 1])]
)
def test_leaves_go_first(name: str, order: list[int]) -> None:
    """1 - 2 - 3, and 4 - 5 as another branch of 1. The first was used before the second, but twice."""
    policy = POLICIES[name](8, 0)
    for position, (key, parent) in enumerate([(1, -1), (2, 1), (3, 2)]):
        policy.insert(key, BlockInfo(parent, position, 16))
    use(policy, 3, 2, 1)
    for position, (key, parent) in enumerate([(4, 1), (5, 4)]):
        policy.insert(key, BlockInfo(parent, position + 1, 16))
    for key in (5, 4, 1):
        policy.free(key)
    assert leaving(policy) == order


def test_a_block_with_a_pinned_continuation_waits_for_it() -> None:
    policy = filled("leaf_lru", [1, 2, 10])  # 2 continues 1
    policy.hit(2)
    assert policy.evict(lambda key: key == 2, None) == 10
    policy.free(2)
    assert leaving(policy) == [2, 1]


# ---- against libCacheSim


# Hits of libCacheSim 0.3.5 in the first 2,000 requests (54,559 blocks) with 1,000 and 5,859 blocks.
HITS = {
    "fifo": (2154, 7102),
    "lru": (2204, 7946),
    "lfu": (2495, 7618),
    "sieve": (2495, 7618),
    "clock": (2204, 7744),
    "arc": (2501, 7641),
}


@pytest.mark.parametrize("name", HITS)
def test_hits_are_libcachesims(name: str) -> None:
    accesses = conversation(2000)
    assert len(accesses) == 54_559
    assert tuple(hits(POLICIES[name](blocks, 0), accesses, blocks) for blocks in (1000, 5859)) == HITS[name]


PEERS: dict[str, tuple[type, float]] = {  # and by how much of all accesses we may differ
    "fifo": (libcachesim.FIFO, 0),
    "lru": (libcachesim.LRU, 0),
    "lfu": (libcachesim.LFU, 0),
    "sieve": (libcachesim.Sieve, 0),
    "clock": (libcachesim.Clock, 0),
    "arc": (libcachesim.ARC, 0),
    "2q": (libcachesim.TwoQ, 0.01),
    "lirs": (libcachesim.LIRS, 0.01),
    "s3fifo": (libcachesim.S3FIFO, 0.01),
    "lecar": (libcachesim.LeCaR, 0.01),
    "gdsf": (libcachesim.GDSF, 0.01),
}


@pytest.mark.parametrize("name", PEERS)
def test_zipf_against_libcachesim(name: str) -> None:
    keys = zipf(8000, 2000, 0.9, random.Random(7))
    make, tolerance = PEERS[name]
    peer, request = make(200, hashpower=12), libcachesim.Request()
    request.obj_size = 1
    theirs = 0
    for key in keys:
        request.obj_id = key + 1
        theirs += peer.get(request)
    assert abs(hits(POLICIES[name](200, 0), plain(keys), 200) - theirs) <= tolerance * len(keys)


CAPACITIES = (1000, 5859, 10_000, 30_000, 50_000)
# Block hit rate on the whole conversation trace (288,500 blocks), libCacheSim 0.3.5, and by how much we may differ.
RATES: dict[str, tuple[tuple[float, ...], float]] = {
    "fifo": ((0.0435, 0.1270, 0.1865, 0.3021, 0.3400), 0.00005),
    "lru": ((0.0445, 0.1355, 0.2112, 0.3257, 0.3546), 0.00005),
    "lfu": ((0.0481, 0.0966, 0.1318, 0.2759, 0.3438), 0.00005),
    "sieve": ((0.0481, 0.0966, 0.1318, 0.2759, 0.3438), 0.00005),
    "clock": ((0.0447, 0.1379, 0.2143, 0.3291, 0.3542), 0.00005),
    "arc": ((0.0529, 0.1436, 0.2225, 0.3108, 0.3433), 0.00005),
    "belady": ((0.1906, 0.3531, 0.3664, 0.3664, 0.3664), 0.00005),
    "lirs": ((0.0545, 0.1603, 0.1946, 0.2451, 0.2639), 0.01),
    "s3fifo": ((0.0543, 0.1575, 0.1925, 0.2549, 0.2872), 0.01),
    "2q": ((0.0541, 0.1251, 0.1849, 0.3062, 0.3423), 0.01),
    "lecar": ((0.0454, 0.1364, 0.2119, 0.3260, 0.3543), 0.01),
    "gdsf": ((0.0447, 0.1437, 0.2171, 0.3284, 0.3548), 0.01),
}


def rate(make: Callable[[int, int], Policy], accesses: tuple[Access, ...], blocks: int) -> float:
    return hits(make(blocks, 0), accesses, blocks) / len(accesses)


@pytest.mark.slow
@pytest.mark.parametrize("name", RATES)
def test_the_whole_conversation_trace(name: str) -> None:
    accesses = conversation(20_000)
    make = belady([key for key, _ in accesses]) if name == "belady" else POLICIES[name]
    wanted, tolerance = RATES[name]
    found = [rate(make, accesses, blocks) for blocks in CAPACITIES]
    assert found == pytest.approx(wanted, rel=0, abs=tolerance + 1e-9)


# ---- learned, and the bound


def zipf(count: int, keys: int, exponent: float, rng: random.Random) -> list[int]:
    return rng.choices(range(keys), [rank**-exponent for rank in range(1, keys + 1)], k=count)


def loop(count: int, keys: int) -> list[int]:
    return [at % keys for at in range(count)]


def drift(count: int, width: int, step: float, rng: random.Random) -> list[int]:
    return [int(at * step) + rng.randrange(width) for at in range(count)]


def fooled() -> list[int]:
    """Four turns in which whoever led falls behind: without its bound `learned` loses 1.4 points to LRU here."""
    rng = random.Random(1)
    turns = [[10_000 + key for key in zipf(1600, 400, 0.9, rng)] + drift(400, 129, 0.02, rng) for _ in range(4)]
    return [key for turn in turns for key in turn]


def worlds() -> dict[str, list[int]]:
    rng = random.Random(3)
    return {
        "popular blocks": zipf(8000, 1000, 0.9, rng),
        "a loop larger than the pool": loop(8000, 120),
        "a window that moves": drift(8000, 140, 0.05, rng),
        "loop and window in turns": [key for _ in range(4) for key in loop(1000, 120) + drift(1000, 120, 0.3, rng)],
        "popular blocks and a window in turns": fooled(),
        "in turns too short to learn": [key for _ in range(40) for key in loop(100, 120) + drift(100, 120, 0.3, rng)],
    }


@pytest.mark.parametrize("world", worlds())
def test_learned_is_never_half_a_point_below_lru(world: str) -> None:
    accesses = plain(worlds()[world])
    lru, learned = (hits(POLICIES[name](100, 0), accesses, 100) for name in ("lru", "learned"))
    assert learned >= lru - 0.005 * len(accesses)


def short(rng: random.Random) -> list[int]:
    """2,000 accesses that turn, every few hundred at most, from one habit to another that punishes who learned the first."""
    found: list[int] = []
    while len(found) < 2000:
        habit, many, base = rng.randrange(5), rng.randrange(20, 400), rng.randrange(400)
        if habit == 0:
            found += [base + at % rng.choice([90, 110, 130]) for at in range(many)]
        elif habit == 1:
            found += [base + rng.randrange(150) for _ in range(many)]
        elif habit == 2:
            found += [1_000_000 + len(found) + at for at in range(many)]  # never again
        elif habit == 3:
            found += [found[-rng.randrange(1, min(len(found), 140) + 1)] if found else 0 for _ in range(many)]
        else:
            found += [base + int(rng.paretovariate(0.6)) % 300 for _ in range(many)]
    return found[:2000]


def test_on_short_loads_learned_loses_half_a_point_and_one_pool_at_most() -> None:
    """Half a point alone does not hold there: 10 accesses of 2,000. With one pool of misses, 100, it does."""
    lost = []
    for seed in range(50):
        accesses = plain(short(random.Random(seed)))
        lru, learned = (hits(POLICIES[name](100, 0), accesses, 100) for name in ("lru", "learned"))
        lost.append(lru - learned)
    assert 0.005 * 2000 < max(lost) <= 0.005 * 2000 + 100
    assert min(lost) < 0


def test_learned_finds_the_better_expert() -> None:
    """LRU never hits in a loop that is larger than the pool; LIRS holds on to most of it."""
    accesses = plain(loop(8000, 120))
    lru, lirs, learned = (hits(POLICIES[name](100, 0), accesses, 100) for name in ("lru", "lirs", "learned"))
    assert lru == 0
    assert lirs > 6000
    assert learned > 0.95 * lirs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "least"), [(1000, 0.0515), (5859, 0.1540), (10_000, 0.2180), (30_000, 0.3230), (50_000, 0.3535)]
)
def test_learned_on_the_conversation_trace(blocks: int, least: float) -> None:
    """Near the better of LIRS and LRU at each end; below LRU's .3257 at 30,000 by less than half a point."""
    assert rate(POLICIES["learned"], conversation(20_000), blocks) > least


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_nothing_passes_the_bound(name: str) -> None:
    keys = zipf(3000, 500, 0.8, random.Random(5))
    assert hits(POLICIES[name](50, 0), plain(keys), 50) <= hits(belady(keys)(50, 0), plain(keys), 50)


def test_belady_is_refused_by_name_with_a_reason() -> None:
    assert "must know the future" in unknown("belady")
    assert "'lrru' is unknown: one of lru, fifo" in unknown("lrru")
    assert "belady" not in POLICIES
