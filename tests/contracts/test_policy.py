"""The contract of eviction policies, held against every one of POLICIES."""

import random

import pytest

from kvbench.engine import BlockInfo, Policy
from kvbench.engine.evict.policies import POLICIES

CAPACITY = 8


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> Policy:
    return POLICIES[request.param](CAPACITY, 0)


def insert(policy: Policy, *keys: int) -> None:
    for key in keys:
        policy.insert(key, BlockInfo(key - 1, 0, 16))


def test_everything_inserted_leaves_exactly_once(policy: Policy) -> None:
    insert(policy, *range(CAPACITY))
    for key in range(CAPACITY):
        policy.free(key)
    assert sorted(policy.evict(lambda _: False, None) for _ in range(CAPACITY)) == list(range(CAPACITY))
    with pytest.raises(KeyError):
        policy.evict(lambda _: False, None)


def test_pinned_keys_stay_until_they_are_not(policy: Policy) -> None:
    insert(policy, 1, 2, 3)
    policy.free(2)
    assert policy.evict(lambda key: key != 2, 9) == 2
    with pytest.raises(KeyError):
        policy.evict(lambda _: True, 9)
    # The others are still resident, whether or not anybody said that they were freed.
    assert {policy.evict(lambda _: False, None) for _ in range(2)} == {1, 3}


def test_removed_keys_are_never_evicted(policy: Policy) -> None:
    insert(policy, 1, 2)
    policy.remove(1)
    policy.remove(1)
    assert policy.evict(lambda _: False, None) == 2


def test_hits_and_misses_do_not_change_who_is_resident(policy: Policy) -> None:
    insert(policy, 1, 2, 3)
    for key in (1, 3, 1):
        policy.hit(key)
    policy.miss(7)
    assert {policy.evict(lambda _: False, None) for _ in range(3)} == {1, 2, 3}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_same_seed_same_victims(name: str) -> None:
    def run() -> list[int]:
        policy, rng = POLICIES[name](CAPACITY, 5), random.Random(1)
        resident: set[int] = set()
        pinned: set[int] = set()
        victims = []
        for _ in range(2000):
            key = rng.randrange(20)
            if key in resident:
                policy.hit(key)
            else:
                policy.miss(key)
                if len(resident) == CAPACITY:
                    victim = policy.evict(pinned.__contains__, key)
                    assert victim in resident - pinned
                    resident.remove(victim)
                    victims.append(victim)
                policy.insert(key, BlockInfo(0, 0, 16))
                resident.add(key)
            pinned.add(key)
            if len(pinned) > CAPACITY - 2:
                freed = min(pinned)
                pinned.remove(freed)
                policy.free(freed)
        return victims

    assert run() == run()


def test_lru_takes_the_longest_unreferenced(policy: Policy) -> None:
    if not isinstance(policy, POLICIES["lru"]):  # type: ignore[arg-type]  # the dict's values are the classes
        pytest.skip("the order of lru")
    insert(policy, 1, 2, 3)
    for key in (3, 1, 2):
        policy.free(key)
    policy.hit(3)
    policy.free(3)
    assert [policy.evict(lambda _: False, None) for _ in range(3)] == [1, 2, 3]
