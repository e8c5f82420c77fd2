"""Moves of quota, by hand: three groups of 100 usable blocks of 1,000, 500 and 2,000 bytes; and in an engine, with tiers and
faults."""

import pytest

from kvbench.engine import Job
from kvbench.engine.cache import Group
from kvbench.engine.engine import Engine
from kvbench.engine.evict.policies import POLICIES
from kvbench.engine.faults import FAULTS
from kvbench.engine.groups import LayersSpec
from kvbench.engine.partition import Partition
from kvbench.engine.pool import Pool
from kvbench.engine.tiers import TiersSpec, build_below
from kvbench.profile import load_engine, load_hardware, load_model

SPEC = LayersSpec.model_validate({"groups": [{"layers": "1+"}], "partition": "dynamic"})
SECOND = 10**9


def groups() -> list[Group]:
    return [Group(str(at), Pool(101, 4, POLICIES["lru"](100, 0)), 1, 1, size) for at, size in enumerate((1000, 500, 2000))]


def saw(group: Group, lookups: int, hits: int) -> None:
    group.lookups += lookups
    group.hits += hits
    group.device += hits


def usable(found: list[Group]) -> list[int]:
    return [group.pool.usable for group in found]


def test_fifteen_per_cent_move_from_the_group_that_hits_most() -> None:
    found = groups()
    partition = Partition(found, SPEC)
    for group, hits in zip(found, (50, 90, 99), strict=True):
        saw(group, 100, hits)
    partition.look(10 * SECOND - 1)
    assert usable(found) == [100, 100, 100]
    partition.look(10 * SECOND)  # 15 blocks of 1,000 bytes are 7.5 of 2,000: 8 leave
    assert (usable(found), partition.moves) == ([115, 100, 92], 1)
    partition.look(20 * SECOND)  # nobody was looked up
    assert partition.moves == 1


def test_nothing_moves_above_the_floor_or_between_groups_that_are_alike() -> None:
    for rates in ((85, 90, 99), (50, 54, 52)):
        found = groups()
        partition = Partition(found, SPEC)
        for group, hits in zip(found, rates, strict=True):
            saw(group, 100, hits)
        partition.look(10 * SECOND)
        assert partition.moves == 0


@pytest.mark.parametrize(("held", "longest", "left"), [(95, 0, 95), (0, 388, 97), (0, 0, 92)])
def test_a_giver_keeps_what_is_held_and_room_for_the_longest_job(held: int, longest: int, left: int) -> None:
    found = groups()
    partition = Partition(found, SPEC)
    partition.longest = longest
    found[2].pool.allocate(held)
    for group, hits in zip(found, (50, 90, 99), strict=True):
        saw(group, 100, hits)
    partition.look(10 * SECOND)
    assert found[2].pool.usable == left
    assert found[0].pool.usable == min(115, 100 + 2 * (100 - left))


def test_a_pool_that_shrank_and_grew_again_has_every_block_once() -> None:
    pool = Pool(11, 4, POLICIES["lru"](10, 0))
    held = pool.allocate(4)
    pool.publish(held[0], 7, 0, 0)
    pool.release(held[:1])
    pool.resize(3)
    pool.check([held[1:]])
    assert (pool.free, pool.index) == (0, {})
    with pytest.raises(RuntimeError, match="3 are referenced"):
        pool.resize(2)
    pool.resize(15)
    pool.check([held[1:]])
    assert len(set(pool.allocate(12)) | set(held[1:])) == 15


PARTS = load_model("llama-3.1-8b"), load_hardware("rtx-4090"), load_engine("vllm", block=4, blocks=201)


def narrow(quota: float) -> LayersSpec:
    """Half of the layers in each of two groups, the first with `quota` of the bytes."""
    groups = [{"layers": "1-16", "quota": quota}, {"layers": "17+", "quota": 1 - quota}]
    return LayersSpec.model_validate({"groups": groups, "partition": "dynamic", "every": 1.0})


def repeat(built: Engine, until: int) -> None:
    """Four prompts of 60 tokens, again and again: 60 blocks that the second group holds and the first one may not."""
    for number in range(until):
        built.advance(float(number))
        built.check()
        assert built.submit(Job(number, ((1 + number % 4, 60),), 1), float(number)) is None
    built.advance(float(until))
    built.check()


@pytest.mark.parametrize("tiers", [False, True])
def test_what_comes_up_from_a_tier_is_no_hit_of_the_partition(tiers: bool) -> None:
    spec = TiersSpec.model_validate({"host": {"capacity": 1e9}})
    built = Engine(*PARTS, below=build_below(spec, *PARTS, lambda: 0) if tiers else None, layers=narrow(0.1))
    first = built.cache.groups[0].pool
    assert first.usable == 39
    repeat(built, 40)
    gauges = built.gauges()
    assert gauges["partition_moves"] >= 3
    assert first.usable > 60
    below = 2 * gauges["hit_tokens_host"] if tiers else 0  # each by half: one group of two has it there
    assert built.cache.groups[0].device == built.cache.groups[0].hits - below


def test_a_pin_gives_back_what_it_took_whatever_the_quota_has_become() -> None:
    fault = FAULTS["pinned"].model_validate({"at": 0.5, "for": 30, "share": 0.25})
    built = Engine(*PARTS, faults=(fault, fault), layers=narrow(0.1))
    pools = built.cache.pools
    first = [round(0.25 * pool.usable) for pool in pools]
    repeat(built, 20)
    assert [pool.pinned for pool in pools] == [2 * count for count in first]
    assert pools[0].usable > 45
    repeat_after = Job(99, ((9, 60),), 1)
    built.advance(31.0)
    assert [pool.pinned for pool in pools] == [0, 0]
    assert built.submit(repeat_after, 31.0) is None
    built.advance(40.0)
    built.check()
    assert not any(pool.referenced for pool in pools)
