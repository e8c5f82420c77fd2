"""Moves of quota, by hand: three groups of 100 usable blocks of 1,000, 500 and 2,000 bytes."""

import pytest

from kvbench.engine.cache import Group
from kvbench.engine.evict.policies import POLICIES
from kvbench.engine.groups import LayersSpec
from kvbench.engine.partition import Partition
from kvbench.engine.pool import Pool

SPEC = LayersSpec.model_validate({"groups": [{"layers": "1+"}], "partition": "dynamic"})
SECOND = 10**9


def groups() -> list[Group]:
    return [Group(str(at), Pool(101, 4, POLICIES["lru"](100, 0)), 1, 1, size) for at, size in enumerate((1000, 500, 2000))]


def saw(group: Group, lookups: int, hits: int) -> None:
    group.lookups += lookups
    group.hits += hits


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
