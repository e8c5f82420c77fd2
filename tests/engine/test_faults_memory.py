"""Faults of KV memory, by hand on a device where every step takes one second: leaks, double frees, contiguous reservations,
storms of resets, oversized requests, failing allocations; and collectors that stop the world. Then all of them at once."""

import math
import random
import re
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvbench.engine import Job
from kvbench.engine.engine import Engine
from kvbench.engine.extent import FITS
from kvbench.engine.faults import FAULTS, Fault, by_node
from kvbench.engine.harm import Contiguous
from kvbench.scenario import ScenarioError
from tests.engine.test_engine import Log, job
from tests.engine.test_faults import TEXT, by_second, drive, engine, fault, some_faults, submissions
from tests.whole import simulated


def one_by_one(built: Engine, *jobs: tuple[float, Job]) -> Log:
    """Submit each at its time and run to the end of the last."""
    log = Log()
    for at, each in jobs:
        log.take(built.advance(at))
        assert built.submit(each, at) is None
    return log.run(built)


def told(built: Engine) -> list[tuple[float, str]]:
    return [(edge.at / 1e9, edge.edge) for edge in built.passed]


# ---- leak


def test_every_request_that_ends_leaves_its_blocks_behind() -> None:
    # 8 + 4 tokens: 11 are cached, in 3 blocks, of which 2 are full.
    built = by_second(fault("leak", at=0, for_=50, share=1))
    for number in range(5):
        one_by_one(built, (10.0 * number, job(number, 8, 4)))
        gauges = built.gauges()
        assert gauges["kv_usage"] == pytest.approx(0.03 * (number + 1))
        assert gauges["leaked_blocks"] == 3 * (number + 1)
        assert gauges["cached_share"] == pytest.approx(0.02 * (number + 1))
    assert one_by_one(built, (60.0, job(9, 8, 4))).done[9].n_out == 4  # the hook is back
    assert not built.reset(70.0)  # as vLLM's: some blocks are in use
    assert built.gauges()["kv_usage"] == pytest.approx(0.15)


def test_what_two_requests_share_leaks_once() -> None:
    # The prompt's two blocks are the same; what follows them is each request's own, in one block that is not full.
    built = by_second(fault("leak", at=0, share=1))
    same = ((1, 8),)
    one_by_one(built, (0.0, Job(0, same, 4)), (10.0, Job(1, same, 4)))
    assert (built.gauges()["leaked_blocks"], built.pool.referenced) == (4, 4)


def test_a_preempted_or_waiting_request_leaks_nothing_and_a_cancelled_one_does() -> None:
    built = by_second(fault("leak", at=0, share=1), blocks=5, max_num_seqs=2)
    for number in range(3):
        built.submit(job(number, 7, 6), 0.0)  # 12 tokens come to be cached: 3 of 4 blocks
    built.advance(2.5)  # in the step from 2 the first needs a third block: the second goes, and leaves what it held
    assert (built.gauges()["preemptions"], built.gauges()["leaked_blocks"]) == (1, 0)
    built.cancel(2, 2.5)
    assert built.gauges()["leaked_blocks"] == 0
    built.cancel(0, 2.5)
    assert built.gauges()["leaked_blocks"] == 3
    built.check()


@pytest.mark.parametrize("beside", [(), (fault("reset_storm", at=15, every=2.5),)])
def test_a_server_that_has_leaked_everything_never_wakes(beside: tuple[Fault, ...]) -> None:
    built = by_second(fault("leak", at=0, share=1), *beside, blocks=8)  # 7 usable, 3 a request
    one_by_one(built, (0.0, job(0, 8, 4)), (10.0, job(1, 8, 4)))
    built.submit(job(2, 8, 4), 20.0)
    built.advance(31.0)  # a reset at 30 has had it look at the queue once more
    assert built.wake() == math.inf
    gauges = built.gauges()
    assert (gauges["running"], gauges["waiting"], gauges["leaked_blocks"]) == (0, 1, 6)
    built.cancel(2, 31.0)
    built.check()


def test_who_leaks_follows_from_the_seed_and_from_nothing_else() -> None:
    def leaked(seed: int, *beside: Fault) -> float:
        built = by_second(fault("leak", at=0, share=0.3), *beside, blocks=1001, seed=seed)
        for number in range(200):
            built.submit(job(number, 4, 1), 0.0)
        Log().run(built)
        return built.gauges()["leaked_blocks"]

    assert leaked(1) == leaked(1, fault("alloc_retry", at=0, share=0.5, pause=0.1)) != leaked(2)
    assert 40 <= leaked(1) <= 80  # mean 60, sigma 6.5


# ---- double free


def test_a_double_free_is_refused_counted_and_told_and_nothing_else_breaks() -> None:
    built = by_second(fault("double_free", at=0.5, for_=5, every=2))
    log = one_by_one(built, (0.0, job(0, 8, 8)), (20.0, job(1, 8, 8)))
    assert told(built) == [(0.5, "begin"), (0.5, "refusal"), (2.5, "refusal"), (4.5, "refusal"), (5.5, "end")]
    assert built.passed[1].told() == {"kind": "double_free", "at": 0.5, "for": 5, "every": 2, "edge": "refusal"}
    assert built.gauges()["double_frees"] == 3
    assert log.times == one_by_one(by_second(), (0.0, job(0, 8, 8)), (20.0, job(1, 8, 8))).times


def test_what_is_freed_again_is_empty_cached_or_the_null_block() -> None:
    built = by_second(fault("double_free", at=1.5, every=100), blocks=4)
    built.submit(job(0, 10, 2), 0.0)  # all 3 blocks, the last not full
    built.advance(1.5)
    assert (built.pool.free, built.pool.spare(), built.gauges()["double_frees"]) == (0, 0, 1)
    Log().run(built)
    assert built.pool.spare() not in (0, *built.pool.index.values())
    one_by_one(built, (10.0, Job(1, ((5, 12),), 1)))  # 3 full blocks: nothing is empty
    assert built.pool.spare() in built.pool.index.values()
    with pytest.raises(RuntimeError, match="freed twice"):
        built.pool.release([built.pool.spare()])
    built.check()


def test_a_release_hook_that_runs_twice_takes_nobody_elses_blocks() -> None:
    built = by_second()
    built.submit(Job(0, ((1, 9),), 8), 0.0)
    built.submit(Job(1, ((1, 9),), 2), 0.0)
    holding = built.batch.waiting[1].holding
    built.advance(3.5)  # the second has ended; they shared two blocks
    built.cache.release(holding, 0)
    built.check()


# ---- fragmentation


def reserved(fit: str, at: float | None, for_: float | None = None) -> Log:
    """100 tokens: A has 40 of them until 4, B the next 30 until 20, C the last 30 until 4. At 5 D wants 50."""
    faults = [] if at is None else [FAULTS["fragmentation"].model_validate({"at": at, "for": for_, "fit": fit})]
    built, log = by_second(*faults, blocks=26), Log()
    built.advance(0.0)
    for number, (prompt, answer) in enumerate([(37, 4), (11, 20), (27, 4)]):
        built.submit(job(number, prompt, answer), 0.0)
    log.take(built.advance(5.0))
    built.submit(job(3, 46, 5), 5.0)
    log.take(built.advance(9.0))
    built.check()
    if at is not None and fit != "bin":  # bin rounding gives B 30 and C 30, which are bins, and A 40, which is one too
        gauges = built.gauges()
        assert gauges["fragmentation"] == pytest.approx(1 - 40 / 70)
        assert (gauges["extent_waits"], gauges["waiting"], built.pool.free) == (1, 1, 25 - 5)  # 19 tokens of B: 5 blocks
    log.run(built)
    assert built.batch.conditions == [] or len(_extents(built)) == 0
    return log


def _extents(built: Engine) -> list[int]:
    return [offset for each in built.batch.conditions if isinstance(each, Contiguous) for offset in each.extents]


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("at", [0.0, 2.5])
def test_a_request_waits_for_one_extent_though_enough_tokens_are_free(fit: str, at: float) -> None:
    assert reserved(fit, None).seconds(3)[0] == 6
    log = reserved(fit, at)
    assert log.seconds(3) == [21, 22, 23, 24, 25]  # B's end joins the holes
    assert [log.seconds(number)[-1] for number in range(3)] == [4, 20, 4]


def test_the_end_of_fragmentation_lets_in_who_waited() -> None:
    assert reserved("first", 0.0, 10.0).seconds(3)[0] == 11


@pytest.mark.parametrize("fit", FITS)
def test_the_longest_request_there_can_be_gets_in_when_nothing_else_is_there(fit: str) -> None:
    built = by_second(FAULTS["fragmentation"].model_validate({"at": 0, "fit": fit}), blocks=26)
    assert one_by_one(built, (0.0, job(0, 98, 3)), (10.0, job(1, 90, 3))).done.keys() == {0, 1}


def test_the_fits_are_the_allocators() -> None:
    assert get_args(FAULTS["fragmentation"].model_fields["fit"].annotation) == tuple(FITS)


# ---- storm of resets


def test_after_each_reset_nothing_is_found() -> None:
    # The same 32 tokens again and again: 7 blocks of 4 can be found. Resets at 5 and 15.
    built = by_second(fault("reset_storm", at=5, every=10))
    log = one_by_one(built, *((at, Job(number, ((1, 32),), 2)) for number, at in enumerate((0.0, 2.5, 6.0, 9.0, 16.0))))
    assert [log.done[number].cached for number in range(5)] == [0, 28, 0, 28, 0]
    assert (built.gauges()["resets"], built.gauges()["resets_failed"], built.gauges()["preemptions"]) == (2, 0, 0)
    assert built.gauges()["hit_tokens"] == 56


@pytest.mark.parametrize(("at", "times"), [(5.0, [4, 5, 6, 7, 8, 9]), (5.5, [4, 5, 7, 8, 9, 10])])
def test_a_reset_preempts_who_runs_and_what_its_step_computes_is_lost(at: float, times: list[float]) -> None:
    # 8 prompt tokens and one generated are cached at 5; a step computes them all again, and the one that is known since 5.
    built = by_second(fault("reset_storm", at=at, every=100))
    log = one_by_one(built, (3.0, job(0, 8, 6)))
    assert log.seconds(0) == times
    gauges = built.gauges()
    assert (log.done[0].preempted, gauges["recompute_tokens"], gauges["resets"]) == (1, 9, 1)


def test_a_reset_that_may_be_refused_is_while_blocks_are_in_use() -> None:
    storm = FAULTS["reset_storm"].model_validate({"at": 4, "every": 4, "running": "refuse"})
    built = by_second(storm)
    log = one_by_one(built, (3.0, Job(0, ((1, 8),), 6)), (9.5, Job(1, ((1, 8),), 2)), (12.5, Job(2, ((1, 8),), 2)))
    assert log.seconds(0) == [4, 5, 6, 7, 8, 9]
    assert [log.done[number].cached for number in range(3)] == [0, 4, 0]  # at 4 and 8 refused, at 12 not
    assert (built.gauges()["resets"], built.gauges()["resets_failed"]) == (1, 2)


# ---- oversized requests


def test_what_is_larger_than_the_pool_is_refused() -> None:
    built = by_second(fault("oversized", at=1, share=2), blocks=26)
    log = one_by_one(built, (0.0, job(0, 8, 4)))
    assert log.seconds(0) == [1, 2, 3, 4]
    assert told(built) == [(1, "begin"), (1, "refusal")]
    assert built.gauges()["oversized_refused"] == 1


def test_one_that_just_fits_keeps_everyone_out_for_its_step() -> None:
    built = by_second(fault("oversized", at=0, share=1), blocks=26)
    built.advance(0.5)
    assert built.gauges()["kv_usage"] == 1
    assert one_by_one(built, (0.5, job(0, 4, 1))).seconds(0) == [2]
    assert built.gauges()["oversized_refused"] == 0


def test_a_long_one_holds_its_blocks_until_it_is_cancelled_and_no_span_tells_of_it() -> None:
    # 90 of 100 tokens: a prompt of 41 and 50 generated, of which the last is never cached.
    built, log = by_second(fault("oversized", at=0, for_=20.5, share=0.9, answer=50), blocks=26), Log()
    log.take(built.advance(0.0))
    built.submit(job(0, 8, 4), 0.0)
    log.take(built.advance(19.5))
    assert (log.seconds(0), set(log.times)) == ([1, 2, 3, 4], {(0, 0)})
    assert (built.gauges()["running"], built.pool.referenced) == (1, 15)  # 41 + 19 tokens
    built.advance(20.5)
    assert (built.gauges()["running"], built.pool.referenced) == (0, 0)
    built.check()
    assert built.wake() == math.inf


# ---- pauses


@pytest.mark.parametrize(
    ("lasts", "times", "pauses"),
    [
        (None, [1, 2, 4, 5, 6, 7, 9, 10, 11, 12], 2),  # from 2.5 to 3.5 and from 7.5 to 8.5
        (6, [1, 2, 4, 5, 6, 7, 9, 10, 11, 12], 2),  # the fault and the pause end together
        (5.5, [1, 2, 4, 5, 6, 7, 8.5, 9.5, 10.5, 11.5], 2),  # the fault ends in the second pause
        (5, [1, 2, 4, 5, 6, 7, 8, 9, 10, 11], 1),  # or as it would begin
    ],
)
def test_pauses_stretch_the_steps_they_fall_into(lasts: float | None, times: list[float], pauses: int) -> None:
    built = by_second(fault("gc_pause", at=2.5, for_=lasts, every=5, pause=1))
    assert one_by_one(built, (0.0, job(0, 8, 10))).seconds(0) == times
    assert built.gauges()["gc_pauses"] == pauses


def test_a_pause_within_a_stall_changes_nothing_and_a_hung_server_never_wakes() -> None:
    built = by_second(fault("gc_pause", at=2.5, every=5, pause=1), fault("stall", at=2.25, for_=4))
    assert one_by_one(built, (0.0, job(0, 8, 4))).seconds(0) == [1, 2, 7, 9]  # hung from 2.25 to 6.25, then from 7.5 to 8.5
    hung = by_second(fault("gc_pause", at=2.5, every=5, pause=1), fault("stall", at=2.25))
    hung.submit(job(0, 8, 4), 0.0)
    hung.advance(3.0)
    assert hung.wake() == math.inf


# ---- allocations that fail at first


def test_each_failing_allocation_adds_its_pause_to_its_own_step() -> None:
    # Blocks are taken with the prompt (2), the 9th and the 13th token: in the steps of the answer's tokens 1, 2 and 6.
    built = by_second(fault("alloc_retry", at=0, share=1, pause=0.5))
    built.advance(0.0)
    assert one_by_one(built, (0.0, job(0, 8, 6))).seconds(0) == [2, 3.5, 4.5, 5.5, 6.5, 8]
    assert built.gauges()["alloc_retries"] == 4


def test_a_retry_flushes_what_nobody_uses() -> None:
    built = by_second(fault("alloc_retry", at=5, share=1, pause=0.5))
    one_by_one(built, (0.0, Job(0, ((1, 8),), 1)), (2.0, Job(1, ((2, 8),), 1)))
    assert built.gauges()["cached_share"] == 0.04
    log = one_by_one(built, (6.0, Job(2, ((1, 9),), 1)))  # finds the first's two blocks and needs a third
    assert (log.done[2].cached, built.gauges()["cached_share"]) == (8, 0.02)


# ---- what cannot be


@pytest.mark.parametrize(
    ("kind", "keys", "hint"),
    [
        ("leak", {"at": "1s", "share": "0%"}, "greater than 0"),
        ("double_free", {"at": "1s"}, "every"),
        ("double_free", {"at": "1s", "every": "0.5ms"}, "greater than or equal to 0.001"),
        ("fragmentation", {"at": "1s", "fit": "worst"}, "'first', 'best', 'good' or 'bin'"),
        ("reset_storm", {"at": "1s", "every": "1s", "running": "ask"}, "'preempt' or 'refuse'"),
        ("oversized", {"at": "1s", "share": "0%"}, "greater than 0"),
        ("oversized", {"at": "1s", "share": "90%", "answer": 0}, "greater than or equal to 1"),
        ("gc_pause", {"at": "1s", "every": "1s", "pause": "1s"}, "nothing would ever run. Set a shorter pause"),
        ("alloc_retry", {"at": "1s", "share": "5%"}, "pause"),
        ("slow_tier", {"at": "1s", "tier": "ssd", "factor": 0.5}, "greater than or equal to 1"),
        ("slow", {"at": "1s", "factor": 2, "node": -1}, "greater than or equal to 0"),
        ("node_loss", {"at": "1s"}, "node"),
    ],
)
def test_faults_are_read_strictly(kind: str, keys: dict[str, object], hint: str) -> None:
    with pytest.raises(ValidationError, match=hint):
        FAULTS[kind].model_validate(keys, context=TEXT)


def test_every_kind_tells_its_own_name() -> None:
    given = {"at": 1, "factor": 2, "share": 0.5, "tier": "host", "every": 2, "pause": 1, "node": 0}
    for name, kind in FAULTS.items():
        built = kind.model_validate({key: value for key, value in given.items() if key in kind.model_fields})
        assert built.told()["kind"] == name


def test_faults_go_to_their_nodes() -> None:
    everywhere, second, lost = fault("stall", at=1), fault("slow", at=1, factor=2, node=1), fault("node_loss", at=1, node=0)
    assert by_node([everywhere, second, lost], 2) == [(everywhere,), (everywhere, second)]
    with pytest.raises(ValueError, match="the fault slow is for node 1: there is only node 0"):
        by_node([second], 1)
    with pytest.raises(ValueError, match=r"there (is|are) nodes 0 to 1"):
        by_node([fault("stall", at=1, node=2)], 2)
    with pytest.raises(ValueError, match="node_loss needs a cluster"):
        by_node([lost], 1)


# ---- all at once


def many_faults(rng: random.Random, until: float) -> list[Fault]:
    """A few of every kind that an engine can have, overlapping, over by `until`: all of them together let nothing through."""

    def when() -> dict[str, float]:
        at = rng.uniform(0, 0.7 * until)
        return {"at": at, "for_": rng.uniform(0.001, until - at)}

    def times(low: float, high: float) -> dict[str, float]:
        return {**when(), "every": rng.uniform(low, high)}

    found = some_faults(rng, until)
    found += [fault("leak", **when(), share=rng.choice([0.1, 0.5])), fault("double_free", **times(0.05, 1))]
    found += [FAULTS["fragmentation"].model_validate({**_spelt(when()), "fit": rng.choice([*FITS])}) for _ in range(2)]
    found += [
        FAULTS["reset_storm"].model_validate({**_spelt(times(0.1, 1)), "running": running}) for running in ("preempt", "refuse")
    ]
    found += [fault("oversized", **when(), share=rng.choice([0.3, 0.9, 2]), answer=rng.choice([1, 30])) for _ in range(2)]
    found += [fault("gc_pause", **times(0.2, 1), pause=rng.uniform(0.001, 0.1))]
    found += [fault("alloc_retry", **when(), share=rng.choice([0.1, 1]), pause=rng.uniform(0.001, 0.05)) for _ in range(2)]
    return rng.sample(found, 5)


def _spelt(when: dict[str, float]) -> dict[str, float]:
    return {("for" if key == "for_" else key): value for key, value in when.items()}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_advancing_in_any_slices_gives_the_same_spans(seed: int) -> None:
    rng = random.Random(seed)
    jobs, faults = submissions(rng, 40, 20), [each for each in many_faults(rng, 3.0) if each.told()["kind"] != "leak"]
    probes = {rng.uniform(0, 5) for _ in range(20)}
    looks = {rng.uniform(0, 5) for _ in range(200)}
    few, many = (
        drive(engine(*faults, blocks=61, max_num_batched_tokens=256, seed=seed), jobs, probes, times) for times in (set(), looks)
    )
    assert few.times == many.times
    assert few.done == many.done
    assert few.refused == many.refused
    assert few.gauges == [pytest.approx(gauges, rel=1e-9) for gauges in many.gauges]


@pytest.mark.parametrize("admission", ["prompt", "chunk"])
@pytest.mark.parametrize("seed", range(12))
def test_invariants_hold_and_what_is_left_is_what_leaked(seed: int, admission: str) -> None:
    rng = random.Random(seed)
    faults = many_faults(rng, 4.0)
    built = engine(*faults, blocks=61, max_num_batched_tokens=64, max_num_seqs=8, admission=admission, seed=seed)
    log, now, live = Log(), 0.0, set()
    for number, (_, one) in enumerate(submissions(rng, 60, 1)):
        now = min(built.wake(), now + rng.expovariate(15)) if rng.random() < 0.5 else now + rng.expovariate(15)
        log.take(built.advance(now))
        built.check()
        if built.submit(one, now) is None:
            live.add(number)
        if rng.random() < 0.2 and (alive := sorted(live - set(log.done))):
            built.cancel(gone := rng.choice(alive), now)
            live.remove(gone)
        built.check()
    while built._jobs and built.wake() < math.inf:
        log.take(built.advance(built.wake()))
        built.check()
    for number in sorted(built._jobs):  # too much has leaked for them
        built.cancel(number, 100.0)
        live.discard(number)
    log.take(built.advance(100.0))
    built.check()
    assert set(log.done) == live
    assert built.pool.referenced == built.pool.leaked
    assert built.batch.conditions == built.pool.doubts == built.harm.slowed == []
    ends = [edge for edge in built.passed if edge.edge != "refusal"]
    assert len(ends) == 2 * len(faults)
    assert len(built.passed) - len(ends) == built.harm.tally["double_frees"] + built.harm.tally["oversized_refused"]


GAUGES = (
    "leaked_blocks", "double_frees", "fragmentation", "extent_waits", "resets", "resets_failed", "oversized_refused", "gc_pauses",
    "alloc_retries",
)  # fmt: skip


def test_the_loads_above_met_every_fault() -> None:
    """A property that holds since nothing happens would be no test."""
    met: dict[str, float] = {}
    for seed in range(30):
        rng = random.Random(seed)
        jobs, faults = submissions(rng, 40, 20), many_faults(rng, 3.0)
        built = engine(*faults, blocks=61, max_num_batched_tokens=256, seed=seed)
        for at, each in jobs:
            built.advance(at)
            built.submit(each, at)
            for name in GAUGES:
                met[name] = max(met.get(name, 0), built.gauges().get(name, 0))
    assert min(met.values()) > 0, met


# ---- whole runs

SCENARIO = """\
name: faulty
seed: 7
target:
  kind: sim
  model: smollm2-135m
  hardware: rtx-4090
  settings: {blocks: 400}
  CLUSTER
  faults: FAULTS
workload: {arrivals: {shape: constant, rate: 4/s}, prompt: 100, output: 16}
phases: {steady: {for: 20s}, drain: {for: 10s}}
"""


def test_samples_and_events_tell_what_faults_left(tmp_path: Path) -> None:
    faults = "[{kind: leak, at: 5s, for: 5s, share: 100%}, {kind: double_free, at: 2s, for: 3s, every: 2s}, " + (
        "{kind: oversized, at: 4s, share: 200%}, {kind: fragmentation, fit: bin, at: 0s}]"
    )
    whole = simulated(SCENARIO.replace("FAULTS", faults).replace("  CLUSTER\n", ""), tmp_path)
    told = {line["name"]: line["value"] for line in whole.lines("samples.jsonl")}
    blocks = -(-(100 + 16 - 1) // 16)
    assert told["leaked_blocks"] == 20 * blocks  # those that end from 5 to 10
    assert told["kv_usage"] == pytest.approx(20 * blocks / 399)
    assert (told["double_frees_total"], told["oversized_refused_total"], told["fragmentation"]) == (2, 1, 0)
    events = [(line["t"], line["data"]["kind"]) for line in whole.lines("events.jsonl") if line["data"].get("edge") == "refusal"]
    assert events == [(2, "double_free"), (4, "oversized"), (4, "double_free")]  # what begins goes before what strikes


def test_a_fault_of_one_node_is_told_by_the_cluster(tmp_path: Path) -> None:
    faults = "[{kind: double_free, node: 1, at: 2s, for: 3s, every: 2s}, {kind: leak, node: 0, at: 5s, for: 5s, share: 100%}]"
    text = SCENARIO.replace("FAULTS", faults).replace("CLUSTER", "cluster: {replicas: 2, router: round_robin}")
    whole = simulated(text, tmp_path)
    told = {line["name"]: line["value"] for line in whole.lines("samples.jsonl") if not line["labels"]}
    assert (told["double_frees_total"], told["leaked_blocks"]) == (2, 10 * 8)
    events = [line["data"] for line in whole.lines("events.jsonl") if line["data"].get("edge") == "refusal"]
    assert [data["node"] for data in events] == [1, 1]


@pytest.mark.parametrize(
    ("fault_", "said"),
    [
        ("{kind: gc_pause, at: 1s, every: 1s, pause: 2s}", "nothing would ever run"),
        ("{kind: slow, at: 1s, factor: 2, node: 3}", "for node 3: there is only node 0"),
        ("{kind: slow_tier, tier: ssd, at: 1s, factor: 2}", "is no tier of target.tiers"),
        ("{kind: leek, at: 1s, share: 5%}", "did you mean 'leak'"),
    ],
)
def test_a_fault_that_cannot_be_is_said_at_its_key(fault_: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=rf"target\.faults.*{re.escape(said)}"):
        simulated(SCENARIO.replace("FAULTS", f"[{fault_}]").replace("  CLUSTER\n", ""), tmp_path)
