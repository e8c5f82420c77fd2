"""The tape's lines against an engine worked out by hand, and against the engine's own counters."""

import random

import pytest

from kvbench.core import CacheAccess, Seconds
from kvbench.engine import Job, Step
from kvbench.engine.engine import Engine
from kvbench.engine.log import Log
from kvbench.engine.tape import Tape
from kvbench.metrics import kv
from kvbench.profile import load_engine, load_hardware, load_model


class Second:
    def seconds(self, step: Step) -> Seconds:
        return 1.0


def logged(blocks: int, share: float = 1.0, block: int = 4, **overrides: object) -> tuple[Engine, Log]:
    log, tape = Log(share), Tape()
    tape.listeners.append(log)
    profile = load_engine("vllm", blocks=blocks, block=block, **overrides)
    built = Engine(load_model("llama-3.1-8b"), load_hardware("rtx-4090"), profile, tape=tape)
    built.cost = Second()
    return built, log


def finish(built: Engine) -> None:
    while built.wake() < float("inf"):
        built.advance(built.wake())


def ops(lines: list[CacheAccess]) -> list[tuple[float, str, str]]:
    return [(line.t, line.op, line.reason) for line in lines]


def test_one_job_by_hand() -> None:
    built, log = logged(blocks=4)
    built.submit(Job(7, ((1, 6),), 3), 0.0)  # 6 + 3 tokens, the last never cached: blocks of 4, 4 and nothing
    finish(built)
    lines = log.take()
    # Looked up: the one full block of the first 5 tokens. Taken: two blocks at 0; the second fills in the decode of tokens 7
    # and 8.
    assert ops(lines) == [
        (0.0, "miss", "compulsory"),
        (0.0, "alloc", ""),  # the first block, full at once: blocks are published when they are scheduled
        (0.0, "alloc", ""),  # the second, told when it is full
        (3.0, "free", ""),
        (3.0, "free", ""),
    ]
    assert [line.full for line in lines if line.op == "alloc"] == [0.0, 2.0]
    assert {line.job for line in lines if line.op in ("miss", "alloc")} == {7}
    found = kv.fold(lines, end=6.0, share=1.0, tokens=12.0)
    # 8 tokens for 3 of 6 seconds in a pool of 12; resident until the end.
    assert found["byte_efficiency"] == pytest.approx(8 * 3 / (12 * 6))
    assert found["byte_residency"] == pytest.approx(8 * 6 / (12 * 6))
    assert found["misses"] == {"reset": 0, "divergence": 0, "compulsory": 1, "evicted": 0}
    assert found["active_share"] == pytest.approx(8 / 12)


def test_every_reason_once() -> None:
    built, log = logged(blocks=4)
    at = 0.0
    for job, segments in enumerate((((1, 9),), ((1, 4), (2, 5)), ((1, 4), (2, 5)), ((3, 12),), ((1, 9),))):
        built.submit(Job(job, segments, 1), at)
        finish(built)
        at += 10.0
    assert built.reset(at)
    built.submit(Job(9, ((1, 9),), 1), at)
    finish(built)
    reasons = {(line.job, line.reason) for line in log.take() if line.op == "miss"}
    assert reasons == {
        (0, "compulsory"),
        (1, "divergence"),  # block 1 found, behind it content other than job 0's
        (3, "compulsory"),
        (4, "evicted"),
        (9, "reset"),
    }


def test_a_partial_block_has_its_valid_tokens() -> None:
    built, log = logged(blocks=4)
    built.submit(Job(0, ((1, 2),), 2), 0.0)
    finish(built)
    lines = log.take()
    assert [(line.op, line.key, line.tokens, line.t) for line in lines] == [("alloc", "", 3, 0.0), ("free", "", 3, 2.0)]
    assert kv.fold(lines, end=2.0, share=1.0, tokens=12.0)["byte_efficiency"] == pytest.approx(3 / 12)


def test_what_a_preemption_looks_up_again_is_no_hit() -> None:
    built, log = logged(blocks=20 * 8 + 1, block=16)
    for number in range(100):
        built.submit(Job(number, ((number + 1, 64),), 64), 0.0)
    finish(built)
    assert built.gauges()["preemptions"] > 0
    lines = log.take()
    found = kv.fold(lines, end=1e4, share=1.0, tokens=None)
    assert any(line.again and line.op == "hit" for line in lines)
    assert found["hits"] == 0
    assert found["lookups"] == 100 * 3  # the last token is always computed: 63 // 16 blocks
    assert found["byte_efficiency"] is None


def busy(share: float) -> tuple[Engine, list[CacheAccess]]:
    built, log = logged(blocks=400, share=share, block=16)
    rng = random.Random(3)
    for number in range(400):
        shared = ((rng.randrange(12) + 1, 16 * rng.randrange(1, 20)),)
        at = number * 3.0
        built.advance(at)
        built.submit(Job(number, (*shared, (1000 + number, rng.randrange(1, 60))), rng.randrange(1, 30)), at)
    finish(built)
    return built, log.take()


def test_hits_are_the_engines_own_and_reasons_sum_to_the_misses() -> None:
    built, lines = busy(1.0)
    found = kv.fold(lines, end=2000.0, share=1.0, tokens=399 * 16.0)
    assert found["hits"] * 16 == built.gauges()["hit_tokens"] > 0
    assert found["hits"] + sum(found["misses"].values()) == found["lookups"]
    assert found["misses"]["evicted"] > 0
    assert found["lifetime"]["n"] == built.pool.evicted
    assert found["groups"]["0"]["reuse_distance"]["n"] > 0


def test_a_sample_of_the_blocks_tells_the_same_shares() -> None:
    """Tolerance: 4 standard errors of a share over the sampled keys, taken generously at 0.1; distances within a fifth."""
    _, whole = busy(1.0)
    _, part = busy(0.25)
    assert 0.15 * len(whole) < len(part) < 0.35 * len(whole)
    every, some = (kv.fold(lines, 2000.0, share, 399 * 16.0) for lines, share in ((whole, 1.0), (part, 0.25)))
    assert some["block_hit_rate"] == pytest.approx(every["block_hit_rate"], abs=0.1)
    assert some["byte_residency"] == pytest.approx(every["byte_residency"], rel=0.15)
    distances = [found["groups"]["0"]["reuse_distance"]["p50"] for found in (every, some)]
    assert distances[1] == pytest.approx(distances[0], rel=0.2)


def test_stack_distances_by_hand_and_by_brute_force() -> None:
    assert kv.stack_distances(["a", "b", "c", "a", "a", "b"]) == [2, 0, 2]
    rng = random.Random(1)
    order = [str(rng.randrange(15)) for _ in range(300)]
    brute = []
    for at, key in enumerate(order):
        before = [i for i in range(at) if order[i] == key]
        if before:
            brute.append(len(set(order[before[-1] + 1 : at])))
    assert kv.stack_distances(order) == brute
