"""The contract of eviction policies, held against every one of POLICIES and against Belady's bound."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvbench.engine import BlockInfo, Policy
from kvbench.engine.evict.offline import belady
from kvbench.engine.evict.policies import POLICIES

CAPACITY = 8
ALL: dict[str, Callable[[int, int], Policy]] = {**POLICIES, "belady": belady(range(100))}


@pytest.fixture(params=sorted(ALL))
def policy(request: pytest.FixtureRequest) -> Policy:
    return ALL[request.param](CAPACITY, 0)


def insert(policy: Policy, *keys: int) -> None:
    for key in keys:
        policy.insert(key, BlockInfo(key - 1, 0, 16))


def nobody(_: int) -> bool:
    return False


def test_everything_inserted_leaves_exactly_once(policy: Policy) -> None:
    insert(policy, *range(CAPACITY))
    for key in range(CAPACITY):
        policy.free(key)
    assert sorted(policy.evict(nobody, None) for _ in range(CAPACITY)) == list(range(CAPACITY))
    with pytest.raises(KeyError):
        policy.evict(nobody, None)


def test_pinned_keys_stay_until_they_are_not(policy: Policy) -> None:
    insert(policy, 1, 2, 3)
    policy.free(2)
    assert policy.evict(lambda key: key != 2, 9) == 2
    with pytest.raises(KeyError):
        policy.evict(lambda _: True, 9)
    # The others are still resident, whether or not anybody said that they were freed.
    assert {policy.evict(nobody, None) for _ in range(2)} == {1, 3}


def test_removed_keys_are_never_evicted(policy: Policy) -> None:
    insert(policy, 1, 2)
    policy.remove(1)
    policy.remove(1)
    assert policy.evict(nobody, None) == 2


def test_a_removed_key_may_come_back(policy: Policy) -> None:
    insert(policy, 1, 2)
    policy.hit(1)
    policy.remove(1)
    insert(policy, 1)
    for key in (1, 2):
        policy.free(key)
    assert sorted(policy.evict(nobody, None) for _ in range(2)) == [1, 2]


def test_hits_and_misses_do_not_change_who_is_resident(policy: Policy) -> None:
    insert(policy, 1, 2, 3)
    for key in (1, 3, 1):
        policy.hit(key)
    policy.miss(7)
    assert {policy.evict(nobody, None) for _ in range(3)} == {1, 2, 3}


@pytest.mark.parametrize("name", sorted(ALL))
def test_same_seed_same_victims(name: str) -> None:
    def run() -> list[int]:
        policy, rng = ALL[name](CAPACITY, 5), random.Random(1)
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


def entries(thing: Any) -> int:
    """How many entries all containers inside `thing` have."""
    if isinstance(thing, dict):
        return len(thing) + sum(entries(value) for value in thing.values())
    if isinstance(thing, (set, frozenset)):
        return len(thing)
    if isinstance(thing, (list, tuple)):
        return len(thing) + sum(entries(value) for value in thing if not isinstance(value, (int, float)))
    inside = {name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())} | set(
        getattr(thing, "__dict__", ())
    )
    ours = type(thing).__module__.startswith("kvbench")
    return sum(entries(getattr(thing, name)) for name in inside) if ours else 0


@pytest.mark.parametrize("distinct", [5000, pytest.param(50_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_state_is_bounded_by_the_capacity(name: str, distinct: int) -> None:
    capacity, rng = 128, random.Random(2)
    policy = POLICIES[name](capacity, 0)
    resident: list[int] = []
    sizes = []
    for key in range(distinct):
        policy.miss(key)
        policy.miss(max(0, key - capacity - rng.randrange(capacity)))  # ghosts come back, or do not
        if len(resident) == capacity:
            resident.remove(policy.evict(nobody, key))
        policy.insert(key, BlockInfo(key - 1, key % 7, 16))
        policy.free(key)
        resident.append(key)
        if key % 3 == 0:
            used = resident[-1 - rng.randrange(min(9, len(resident)))]
            policy.hit(used)
            policy.free(used)
        if key % 500 == 499:
            policy.remove(resident.pop())
            sizes.append(entries(policy))
    experts = 4 if name == "learned" else 1
    assert max(sizes) < 24 * experts * capacity
    assert max(sizes[len(sizes) // 2 :]) < 1.5 * max(sizes[: len(sizes) // 2])


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_an_eviction_does_not_walk_over_all_that_is_pinned(name: str) -> None:
    """900 of 1,000 blocks are referenced for long; 5,000 blocks pass through the rest."""
    policy = POLICIES[name](1000, 0)
    pinned = set(range(900))
    asked = 0

    def held(key: int) -> bool:
        nonlocal asked
        asked += 1
        return key in pinned

    passing = 5000
    resident: set[int] = set()
    for key in range(passing):
        policy.miss(key)
        if len(resident) == 1000:
            resident.remove(policy.evict(held, None))
        policy.insert(key, BlockInfo(-1, 0, 16))
        resident.add(key)
        if key not in pinned:
            policy.free(key)
        if key % 50 == 0 and key > 1000:  # one lets go, another takes its place
            freed = min(pinned)
            pinned.remove(freed)
            policy.free(freed)
            policy.hit(key)
            pinned.add(key)
    assert pinned <= resident
    assert asked < 4 * passing  # a walk over the pinned ones would be 900 x passing


class Use(RuleBasedStateMachine):
    """Any order of operations that a pool may do, under `name`."""

    name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.policy = ALL[self.name](CAPACITY, 3)
        self.refs: dict[int, int] = {}

    def unreferenced(self) -> set[int]:
        return {key for key, refs in self.refs.items() if not refs}

    @rule(key=st.integers(0, 24), known=st.booleans())
    def access(self, key: int, known: bool) -> None:
        if key in self.refs:
            self.refs[key] += 1
            self.policy.hit(key)
            return
        self.policy.miss(key)
        if len(self.refs) == CAPACITY:
            if not self.unreferenced():
                with pytest.raises(KeyError):
                    self.policy.evict(self.pinned, key if known else None)
                return
            self.evict(key if known else None)
        self.policy.insert(key, BlockInfo(key - 1, key, 16))
        self.refs[key] = 1

    def pinned(self, key: int) -> bool:
        return self.refs[key] > 0  # as the pool: KeyError for one that is not resident

    def evict(self, incoming: int | None) -> None:
        victim = self.policy.evict(self.pinned, incoming)
        assert self.refs.pop(victim) == 0

    @precondition(lambda self: self.unreferenced())
    @rule()
    def shrink(self) -> None:
        self.evict(None)

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        if held := sorted(set(self.refs) - self.unreferenced()):
            key = data.draw(st.sampled_from(held))
            self.refs[key] -= 1
            if not self.refs[key]:
                self.policy.free(key)

    @precondition(lambda self: self.unreferenced())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.unreferenced())))
        self.policy.remove(key)
        del self.refs[key]

    @rule(keys=st.lists(st.integers(0, 24), max_size=6))
    def look_up(self, keys: Iterable[int]) -> None:
        """An admission that fails after its lookups."""
        for key in keys:
            if key not in self.refs:
                self.policy.miss(key)

    def teardown(self) -> None:
        """Everybody lets go, and each leaves once."""
        for key, refs in self.refs.items():
            if refs:
                self.policy.free(key)
        left = [self.policy.evict(nobody, None) for _ in self.refs]
        assert sorted(left) == sorted(self.refs)
        with pytest.raises(KeyError):
            self.policy.evict(nobody, None)


@pytest.mark.parametrize("name", sorted(ALL))
def test_any_order_of_operations(name: str) -> None:
    machine = type(f"Use_{name}", (Use,), {"name": name})
    machine.TestCase.settings = settings(max_examples=12, stateful_step_count=50, deadline=None)
    machine.TestCase("runTest").runTest()
