"""The tape's lines against an engine worked out by hand, and against the engine's own counters."""

import random
from pathlib import Path

import pytest

from kvbench.core import CacheAccess, Seconds
from kvbench.engine import Job, Step
from kvbench.engine.engine import Engine
from kvbench.engine.log import Log
from kvbench.engine.tape import Tape
from kvbench.metrics import kv
from kvbench.profile import load_engine, load_hardware, load_model
from tests.whole import simulated


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


def test_ages_of_a_block_by_hand() -> None:
    """Taken at 1, full at 2, released at 3, looked up at 5 and 6, released at 8, gone at 12."""
    told = [(1, "alloc"), (3, "free"), (5, "hit"), (6, "hit"), (8, "free"), (12, "evict")]
    lines = [CacheAccess(t=float(t), op=op, key="a", tokens=4, full=2.0 if op == "alloc" else None) for t, op in told]
    found = kv.fold(lines, end=20.0, share=1.0, tokens=8.0)
    assert (found["lifetime"]["n"], found["lifetime"]["mean"], found["idle_before_evict"]["mean"]) == (1, 11, 4)
    assert (found["reuse_gap"]["n"], found["reuse_gap"]["mean"]) == (1, 1)
    assert found["byte_efficiency"] == (2 + 3) * 4 / (20 * 8)
    assert found["byte_residency"] == 11 * 4 / (20 * 8)
    assert found["active_share"] == 0


def test_quantiles_are_values_that_were_seen() -> None:
    """Gaps of 1, 2, ..., 10 s: the smallest that at least half, nine tenths and 99 % of them do not exceed."""
    lines = [CacheAccess(t=0.0, op="miss", key=str(k), reason="compulsory") for k in range(1, 11)]
    lines += [CacheAccess(t=float(k), op="hit", key=str(k)) for k in range(1, 11)]
    gap = kv.fold(lines, end=20.0, share=1.0, tokens=None)["reuse_gap"]
    assert (gap["n"], gap["p50"], gap["p90"], gap["p99"], gap["max"]) == (10, 5, 9, 10, 10)


def test_tokens_weigh_as_many_bytes_as_their_layer_group_keeps() -> None:
    """10 and 2 bytes a token in a memory of 100: 4 tokens of each, for 2 s and 1 s of 4, resident until the end."""
    lines = [CacheAccess(t=0.0, op="alloc", key=key, group=group, tokens=4, full=0.0) for group, key in enumerate("ab")]
    lines += [CacheAccess(t=1.0, op="free", key="b", group=1, tokens=4), CacheAccess(t=2.0, op="free", key="a", tokens=4)]
    found = kv.fold(lines, end=4.0, share=1.0, tokens=100.0, weights={0: 10.0, 1: 2.0})
    assert found["byte_efficiency"] == pytest.approx((2 * 40 + 1 * 8) / 400)
    assert found["byte_residency"] == pytest.approx(4 * 48 / 400)
    assert found["active_share"] == pytest.approx(48 / 100)


@pytest.mark.parametrize("more", ["", "cluster: {replicas: 2}, "])
def test_layer_groups_that_change_nothing_change_no_share_of_bytes(more: str, tmp_path: Path) -> None:
    told = []
    for name, layers in (("plain", "null"), ("groups", "{groups: [{layers: 1-6}, {layers: 7-12}, {layers: 13+}]}")):
        (tmp_path / name).mkdir()
        text = f"""
name: {name}
seed: 3
target: {{kind: sim, model: llama-3.1-8b, hardware: rtx-4090, {more}settings: {{blocks: 300}}, cache_log: 100%, layers: {layers}}}
workload: {{arrivals: {{shape: constant, rate: 6/s}}, prompt: 200, output: {{dist: fixed, value: 60, force: true}}}}
phases: {{steady: {{for: 8s}}, drain: {{for: 60s}}}}
"""
        told.append(simulated(text, tmp_path / name).summary["cache"])
    for share in ("byte_efficiency", "byte_residency", "active_share"):
        assert 0 < told[1][share] == pytest.approx(told[0][share], rel=0.02), share  # a null block in each pool
        assert told[1][share] <= 1


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


def test_nodes_and_groups_have_reuse_distances_of_their_own() -> None:
    """On node 0: a b c a, two blocks between; on node 1: a a, none; in group 1: a b a, one. Mixed, node 1's look-ups would stand
    between those of node 0."""
    order = [("a", 0, 0), ("a", 1, 0), ("b", 0, 0), ("a", 0, 1), ("a", 1, 0), ("c", 0, 0), ("b", 0, 1), ("a", 0, 0), ("a", 0, 1)]
    lines = [
        CacheAccess(t=float(at), op="miss", key=key, node=node, group=group, reason="evicted")
        for at, (key, node, group) in enumerate(order)
    ]
    found = kv.fold(lines, end=10.0, share=1.0, tokens=None)
    apart = [found["groups"][group]["reuse_distance"] for group in ("0", "1")]
    assert [(one["n"], one["mean"], one["max"]) for one in apart] == [(2, 1.0, 2.0), (1, 1.0, 1.0)]
    assert (found["reuse_gap"]["n"], found["reuse_gap"]["max"]) == (3, 7.0)


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
