"""Chains and the pool: identity of content, free order, and every invariant under random operations."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.engine.chain import ROOT, Chain
from kvbench.engine.evict.order import Lru
from kvbench.engine.evict.policies import POLICIES
from kvbench.engine.pool import Pool


def pool(blocks: int, tokens: int = 4) -> Pool:
    return Pool(blocks + 1, tokens, Lru(blocks, 0))


def fill(p: Pool, keys: list[int]) -> list[int]:
    """What a sequence does: reference what is resident, allocate and publish the rest."""
    found = p.found(keys, len(keys))
    blocks = p.take(keys[:found])
    blocks += p.allocate(len(keys) - found)
    for at in range(found, len(keys)):
        blocks[at] = p.publish(blocks[at], keys[at], keys[at - 1] if at else ROOT, at)
    return blocks


def test_chain_keys_depend_on_content_not_on_how_it_was_asked_for() -> None:
    at_once = Chain(((1, 10), (2, 100)), 4).upto(20)
    stepwise = Chain(((1, 10), (0, 0), (2, 100)), 4)
    assert [stepwise.upto(i)[i - 1] for i in range(1, 21)] == at_once


def test_chain_prefixes_are_shared_and_nothing_else() -> None:
    a, b = Chain(((1, 10), (2, 100)), 4).upto(20), Chain(((1, 10), (3, 100)), 4).upto(20)
    assert a[:2] == b[:2]  # tokens 0..7 are content 1; block 2 holds tokens 8..11, of which 10 and 11 differ
    assert not set(a[2:]) & set(b[2:])
    # The same slice after another parent is another block, and a longer segment continues a shorter one.
    assert Chain(((1, 8),), 4).upto(2) == Chain(((1, 80),), 4).upto(2)
    assert Chain(((9, 4), (1, 8)), 4).upto(3)[1:] != Chain(((1, 8),), 4).upto(2)


def test_chain_spans_many_segments_in_one_block() -> None:
    assert len(Chain(tuple((key, 1) for key in range(64)), 16).upto(4)) == 4
    assert len(set(Chain(((7, 3),) * 16, 16).upto(3))) == 3


@pytest.mark.alone
def test_chain_costs_less_than_two_microseconds_per_block() -> None:
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        Chain(((5, 120_000),), 16).upto(7500)
        best = min(best, time.perf_counter() - start)
    assert best / 7500 < 2e-6


def test_blocks_without_content_leave_first_then_the_tail_of_the_oldest() -> None:
    p = pool(4)
    old, new = fill(p, [1, 2]), fill(p, [3])
    partial = p.allocate(1)
    p.release([*old])
    p.release([*new, *partial])
    assert p.allocate(1) == partial
    p.allocate(1)
    assert set(p.index) == {1, 3}  # 2 is the tail of the older chain
    p.allocate(1)
    assert set(p.index) == {3}


def test_a_referenced_block_is_never_evicted() -> None:
    p = pool(3)
    held = fill(p, [1])
    p.release(fill(p, [2, 3]))
    p.allocate(2)
    assert set(p.index) == {1}
    assert p.free == 0
    with pytest.raises(RuntimeError, match="1 blocks asked for, 0 free"):
        p.allocate(1)
    assert p.index[1] == held[0]


def test_content_computed_twice_is_kept_once() -> None:
    p = pool(3)
    first = fill(p, [1])
    second = p.allocate(1)
    assert p.publish(second[0], 1, ROOT, 0) == first[0]
    assert p.referenced == 1
    p.check([first, first])


def test_a_double_free_is_refused() -> None:
    p = pool(2)
    blocks = p.allocate(1)
    p.release(blocks)
    with pytest.raises(RuntimeError, match=f"block {blocks[0]} freed twice"):
        p.release(blocks)


def test_a_block_spared_for_its_youth_leaves_in_its_turn_once_it_is_older() -> None:
    p = Pool(6, 4, Lru(5, 0), retain=5)
    for now, key in ((0, 1), (5, 2), (5, 3), (6, 1)):
        p.now = now
        p.release(fill(p, [key]))
    p.now = 8
    held = p.allocate(3)  # two are empty; 2 and 3 have their turn and are too young, so 1 goes
    assert set(p.index) == {2, 3}
    p.now = 9
    p.release(held[:1])
    p.release(fill(p, [4]))
    p.now = 14
    p.release(p.take([2]))  # used since: no longer in front
    held += p.allocate(1)
    assert set(p.index) == {2, 4}
    held += p.allocate(1)
    assert set(p.index) == {2}
    p.check([held[1:]])


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_no_young_block_leaves_while_an_older_one_can(name: str) -> None:
    rng, p = random.Random(1), Pool(17, 4, POLICIES[name](16, 0), retain=20)
    held: list[list[int]] = []
    born: dict[int, int] = {}
    left = 0

    def gone(key: int) -> None:
        nonlocal left
        left += 1
        older = [other for other, block in p.index.items() if p.now - born[other] >= 20 and not p._refs[block]]
        assert p.now - born[key] >= 20 or not older

    p.evicted_to = gone
    for p.now in range(400):
        head, length = 10 * rng.randrange(8), rng.randrange(1, 4)
        keys = [head + at for at in range(length)]
        found = p.found(keys, length)
        if length - found + p.unreferenced(keys[:found]) <= p.free:
            before = set(p.index)
            held.append(fill(p, keys))
            born |= {key: p.now for key in keys if p._born[p.index[key]] == p.now or key not in before}
        if len(held) > rng.randrange(4):
            p.release(held.pop(rng.randrange(len(held))))
        p.check(held)
    assert left > 100


def test_a_pool_full_of_young_blocks_gives_up_one_all_the_same() -> None:
    p = Pool(3, 4, Lru(2, 0), retain=100)
    p.release(fill(p, [1]))
    p.release(fill(p, [2]))
    p.allocate(1)
    assert set(p.index) == {2}
    p.now = 100
    p.allocate(1)
    assert not p.index


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(1, 5)), max_size=80))
def test_invariants_hold_after_every_operation(operations: list[tuple[int, int, int]]) -> None:
    p = pool(8)
    held: list[list[int]] = []
    for operation, which, length in operations:
        keys = [100 * (which if at else which % 3) + at for at in range(length)]  # chains share some heads
        found = p.found(keys, length)
        if operation <= 3 and length - found + p.unreferenced(keys[:found]) <= p.free:
            held.append(fill(p, keys))
        elif operation == 4 and p.free:
            held.append(p.allocate(1))
        elif held:
            p.release(held.pop(which % len(held)))
        p.check(held)
    for blocks in held:
        p.release(blocks)
    p.check([])
    assert p.free == p.usable
