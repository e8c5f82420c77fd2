"""Faults of the engine: by hand on a device where every step takes one second, at their own times however one looks, and under
random loads with every invariant checked."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvbench.engine import Job
from kvbench.engine.chain import ROOT
from kvbench.engine.engine import Engine
from kvbench.engine.evict.order import Lru
from kvbench.engine.faults import FAULTS, Fault, edges
from kvbench.engine.pool import Pool
from kvbench.profile import load_engine, load_hardware, load_model
from tests.engine.test_engine import Log, Second, job

TEXT = {"text": True}


def fault(kind: str, at: float, for_: float | None = None, **numbers: float) -> Fault:
    return FAULTS[kind].model_validate({"at": at, "for": for_, **numbers})


def engine(*faults: Fault, blocks: int = 101, block: int = 4, seed: int = 0, **overrides: object) -> Engine:
    profile = load_engine("vllm", block=block, blocks=blocks, **overrides)
    return Engine(load_model("llama-3.1-8b"), load_hardware("rtx-4090"), profile, seed, faults)


def by_second(*faults: Fault, blocks: int = 101, **overrides: object) -> Engine:
    built = engine(*faults, blocks=blocks, **overrides)
    built.cost = Second()
    return built


def test_slow_stretches_the_steps_that_begin_while_it_lasts() -> None:
    built = by_second(
        fault("slow", at=3.5, for_=4, factor=2)
    )  # the step from 3 goes on as planned; those from 4 and 6 are slow; 8 is over
    built.submit(job(0, 8, 8), 0.0)
    assert Log().run(built).seconds(0) == [1, 2, 3, 4, 6, 8, 9, 10]


def test_two_slow_faults_multiply_and_each_ends_by_itself() -> None:
    built = by_second(fault("slow", at=0.5, for_=4, factor=2), fault("slow", at=0.5, factor=3))
    built.submit(job(0, 8, 4), 0.0)
    assert Log().run(built).seconds(0) == [1, 7, 10, 13]  # 6 from 1; 3 from 7 on


def test_a_stall_stretches_the_step_in_progress_and_everything_waits() -> None:
    built, log = by_second(fault("stall", at=3.25, for_=10)), Log()
    built.submit(job(0, 8, 5), 0.0)
    log.take(built.advance(5.0))
    assert log.seconds(0) == [1, 2, 3]
    assert built.wake() == 13.25
    built.submit(job(1, 4, 1), 5.0)
    assert (built.gauges()["running"], built.gauges()["waiting"]) == (1, 1)
    log.run(built)
    assert log.seconds(0) == [1, 2, 3, 14, 15]
    assert log.seconds(1) == [15]
    assert [(span.start / 1e9, span.times[0] / 1e9) for span in log.spans if span.times[0] == 14e9] == [(3, 14)]


def test_a_step_that_ends_as_the_stall_begins_has_ended_and_none_begins() -> None:
    built = by_second(fault("stall", at=2, for_=5))
    built.submit(job(0, 8, 4), 0.0)
    assert Log().run(built).seconds(0) == [1, 2, 8, 9]


def test_an_idle_server_that_hangs_takes_nothing_up() -> None:
    built = by_second(fault("stall", at=2, for_=5))
    built.submit(job(0, 8, 1), 3.0)
    built.advance(3.0)
    assert Log().run(built).seconds(0) == [8]


def test_stalls_that_overlap_are_one() -> None:
    built = by_second(fault("stall", at=2.5, for_=4), fault("stall", at=4.5, for_=4))
    built.submit(job(0, 8, 4), 0.0)
    assert Log().run(built).seconds(0) == [1, 2, 9, 10]  # hung from 2.5 to 8.5


def test_a_server_that_hangs_for_good_never_wakes() -> None:
    built = by_second(fault("stall", at=2.5))
    built.submit(job(0, 8, 4), 0.0)
    assert built.advance(2.0)
    assert built.wake() == 2.5
    assert built.advance(1e6) == []
    assert built.wake() == float("inf")
    assert built.progress(0).n_out == 2
    built.cancel(0, 1e6)
    built.check()


def test_pinned_blocks_by_hand() -> None:
    # 4 usable blocks of 4; A and B: 7 + 6 tokens, two blocks each. From 1.5 two blocks are wanted and none is free. In the step
    # from 2 A needs a third: B goes, and the fault takes both its blocks; A has to go as well, and with 2 free neither can
    # come back (9 known tokens: 3 blocks). At 10 the two are given back, empty: A finds its own two and runs until 14; B's are
    # gone.
    built, log = by_second(fault("pinned", at=1.5, for_=8.5, share=0.5), blocks=5), Log()
    built.submit(job(0, 7, 6), 0.0)
    built.submit(job(1, 7, 6), 0.0)
    log.take(built.advance(1.5))
    assert built.gauges()["kv_usage"] == 1
    log.take(built.advance(5.0))
    built.check()
    gauges = built.gauges()
    assert (gauges["kv_usage"], gauges["running"], gauges["waiting"], gauges["preemptions"]) == (0.5, 0, 2, 2)
    assert built.wake() == 10
    log.run(built)
    assert log.seconds(0) == [1, 2, 11, 12, 13, 14]
    assert log.seconds(1) == [1, 2, 15, 16, 17, 18]
    assert (log.done[0].preempted, log.done[1].preempted, built.gauges()["recompute_tokens"]) == (1, 1, 8)


def test_the_last_one_running_comes_back_where_a_smaller_chunk_fits() -> None:
    # 2 of 4 blocks are left, and 3 tokens go into a step. At 2 the prompt has 6 tokens and needs a third block for 9: it gives up
    # its two. One is full and found again, so that a chunk up to 7 fits; the next, up to 10, does not, and so on until 5.5.
    small = {"admission": "chunk", "max_num_batched_tokens": 3, "max_num_seqs": 1}
    built = by_second(fault("pinned", at=0, for_=5.5, share=0.5), blocks=5, **small)
    built.advance(0.0)
    built.submit(job(0, 10, 1), 0.0)
    log = Log().run(built)
    assert log.seconds(0) == [7]
    assert log.done[0].preempted == 4  # at 2, 3, 4 and 5


def test_what_arrives_while_no_block_is_free_waits_for_the_fault_to_end() -> None:
    built = by_second(fault("pinned", at=1, for_=4, share=1), blocks=5)
    built.advance(2.0)
    built.submit(job(0, 4, 1), 2.0)
    built.advance(3.0)
    assert built.gauges()["waiting"] == 1
    built.submit(job(1, 4, 1), 3.5)
    log = Log().run(built)
    assert (log.seconds(0), log.seconds(1)) == ([6], [6])


def test_a_cancelled_request_makes_room_at_that_very_time() -> None:
    # 3 of 4 blocks are gone. A needs two, B behind it one; nothing begins until A gives up at 7.
    built, log = by_second(fault("pinned", at=0, share=0.75), blocks=5), Log()
    built.advance(0.0)
    built.submit(job(0, 7, 1), 1.0)
    built.submit(job(1, 3, 1), 2.0)
    log.take(built.advance(7.0))
    built.cancel(0, 7.0)
    log.run(built)
    assert log.seconds(1) == [8]


def test_pinning_evicts_cached_content_and_gives_back_empty_blocks() -> None:
    built, log = by_second(fault("pinned", at=20, for_=5, share=0.5), fault("pinned", at=22, for_=1, share=0.5), blocks=11), Log()
    built.submit(job(0, 32, 1), 0.0)  # 8 full blocks stay cached, 2 of 10 are empty
    log.run(built)
    seen = []
    for now in (10.0, 20.0, 22.0, 23.0, 25.0):
        built.advance(now)
        built.check()
        seen.append((built.gauges()["kv_usage"], built.gauges()["cached_share"]))
    assert seen == [(0, 0.8), (0.5, 0.5), (1, 0), (0.5, 0), (0, 0)]


def test_running_requests_give_way_to_a_pin_only_as_they_free_their_blocks() -> None:
    built, log = by_second(fault("pinned", at=0.5, share=0.9), blocks=11), Log()
    built.submit(job(0, 8, 4), 0.0)  # 11 computed tokens: 3 blocks, 2 of them before the pin, which leaves it the others
    built.submit(job(1, 7, 1), 0.0)  # 2 blocks until 1
    log.take(built.advance(0.75))
    assert built.gauges()["kv_usage"] == 1
    log.take(built.advance(1.25))  # the second's blocks went to the fault: A needs its third now and does not get it
    assert built.gauges()["preemptions"] == 1
    assert built.gauges()["kv_usage"] == 0.9
    built.check()


def test_who_is_refused_follows_from_the_seed() -> None:
    def refused(seed: int) -> list[int]:
        built = engine(fault("refuse", at=0, share=0.2), blocks=10_001, seed=seed)
        built.advance(0.0)
        return [number for number in range(1000) if built.submit(job(number, 4, 1), 0.0) == "refused"]

    assert refused(1) == refused(1) != refused(2)
    assert 160 <= len(refused(1)) <= 240  # mean 200, sigma 12.6


def test_all_or_none_are_refused_and_only_while_it_lasts() -> None:
    built = by_second(fault("refuse", at=1, for_=1, share=1))
    answers = []
    for number, now in enumerate((0.5, 1.0, 1.99, 2.0)):
        built.advance(now)
        answers.append(built.submit(job(number, 4, 1), now))
    assert answers == [None, "refused", "refused", None]


def test_edges_are_told_once_in_order_with_their_numbers() -> None:
    built = by_second(fault("slow", at=5, for_=1, factor=4), fault("stall", at=2, for_=3))
    built.advance(1.0)
    assert built.passed == []
    built.advance(100.0)
    assert [(edge.at / 1e9, edge.told()) for edge in built.passed] == [
        (2, {"kind": "stall", "at": 2, "for": 3, "edge": "begin"}),
        (5, {"kind": "stall", "at": 2, "for": 3, "edge": "end"}),  # what ends goes before what begins
        (5, {"kind": "slow", "at": 5, "for": 1, "factor": 4, "edge": "begin"}),
        (6, {"kind": "slow", "at": 5, "for": 1, "factor": 4, "edge": "end"}),
    ]
    assert [edge.edge for edge in edges([fault("stall", at=1, for_=1e-12)])] == ["begin", "end"]


@pytest.mark.parametrize(
    ("kind", "keys", "hint"),
    [
        ("slow", {"at": "1s"}, "factor"),
        ("slow", {"at": "1s", "factor": 0.5}, "greater than or equal to 1"),
        ("pinned", {"at": "1s", "share": "120%"}, "less than or equal to 1"),
        ("refuse", {"at": "1s", "share": "0%"}, "greater than 0"),
        ("stall", {"at": 1}, "no unit"),
        ("stall", {"at": "1s", "for": "0s"}, "more than 0"),
        ("stall", {}, "at"),
    ],
)
def test_faults_are_read_strictly(kind: str, keys: dict[str, object], hint: str) -> None:
    with pytest.raises(ValidationError, match=hint):
        FAULTS[kind].model_validate(keys, context=TEXT)


# ---- however one looks, and under random loads


def some_faults(rng: random.Random, until: float) -> list[Fault]:
    """A handful of every kind, overlapping, over by `until`."""

    def when() -> dict[str, float]:
        at = rng.uniform(0, 0.7 * until)
        return {"at": at, "for_": rng.uniform(0.001, until - at)}

    made = [fault("slow", **when(), factor=rng.choice([1.5, 4])), fault("refuse", **when(), share=rng.random() or 1)]
    made += [fault("pinned", **when(), share=rng.choice([0.3, 0.6, 1])) for _ in range(2)]
    return made + [fault("stall", **when()) for _ in range(2)]


def submissions(rng: random.Random, count: int, rate: float) -> list[tuple[float, Job]]:
    at, jobs = 0.0, []
    for number in range(count):
        at += rng.expovariate(rate)
        segments = ((rng.randrange(3), rng.randrange(60)), (1000 + number, rng.randrange(1, 120)))
        jobs.append((at, Job(number, segments, rng.randrange(1, 60), rng.choice([1, 1, 1, 2]))))
    return jobs


class Seen(Log):
    """With what was refused, and the gauges at some times. Driven by wake alone, first tokens and ends come when it says."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[int] = []
        self.gauges: list[dict[str, float]] = []

    def run(self, built: Engine) -> "Seen":
        while built._jobs:
            wake, before = built.wake(), set(self.times)
            spans = built.advance(wake)
            self.take(spans)
            for span in spans:
                assert not span.done or span.times[-1] == round(wake * 1e9)
                assert set(span.tokens) <= before or span.times == [round(wake * 1e9)]
        return self


def drive(built: Engine, jobs: list[tuple[float, Job]], probes: set[float], looks: set[float]) -> Seen:
    """Advance to every arrival and `probe`, where gauges are read, and to `looks`; then to the end by wake."""
    seen, arrivals = Seen(), dict(jobs)
    for at in sorted(probes | looks | set(arrivals)):
        seen.take(built.advance(at))
        built.check()
        if at in arrivals and built.submit(arrivals[at], at):
            seen.refused.append(arrivals[at].id)
        if at in probes:
            seen.gauges.append(built.gauges())
    return seen.run(built)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_advancing_in_any_slices_gives_the_same_spans(seed: int) -> None:
    rng = random.Random(seed)
    jobs, faults = submissions(rng, 40, 20), some_faults(rng, 3.0)
    probes = {rng.uniform(0, 5) for _ in range(20)}
    looks = {rng.uniform(0, 5) for _ in range(300)} | {each.at for each in faults}
    few, many = (
        drive(engine(*faults, blocks=61, max_num_batched_tokens=256, seed=seed), jobs, probes, times) for times in (set(), looks)
    )
    assert few.times == many.times
    assert few.done == many.done
    assert few.refused == many.refused
    assert few.gauges == [pytest.approx(gauges, rel=1e-9) for gauges in many.gauges]  # joules are summed up in other portions


def test_the_slices_above_met_every_fault() -> None:
    """A property that holds since nothing happens would be no test."""
    met = {"preempted": 0, "refused": 0, "blocked": 0}
    for seed in range(10):
        rng = random.Random(seed)
        jobs, faults = submissions(rng, 40, 20), some_faults(rng, 3.0)
        looks = {number / 20 for number in range(100)}
        seen = drive(engine(*faults, blocks=61, max_num_batched_tokens=256, seed=seed), jobs, looks, looks)
        met["preempted"] += sum(done.preempted for done in seen.done.values())
        met["refused"] += len(seen.refused)
        met["blocked"] += sum(gauges["waiting"] > 0 == gauges["running"] for gauges in seen.gauges)
    assert min(met.values()) > 10, met


@pytest.mark.parametrize("admission", ["prompt", "chunk"])
@pytest.mark.parametrize("seed", range(15))
def test_invariants_and_an_end_under_random_loads_and_faults(seed: int, admission: str) -> None:
    rng = random.Random(seed)
    faults = some_faults(rng, 4.0)
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
    log.run(built)
    assert set(log.done) == live
    built.advance(10.0)
    built.check()
    assert built.pool.referenced == 0
    assert len(built.passed) == 2 * len(faults)


OPERATIONS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9), st.integers(1, 5)), max_size=80)


@settings(max_examples=100, deadline=None)
@given(OPERATIONS)
def test_the_pool_keeps_its_invariants_while_blocks_are_pinned(operations: list[tuple[int, int, int]]) -> None:
    pool = Pool(9, 4, Lru(8, 0))
    held: list[list[int]] = []
    pins: list[int] = []
    for operation, which, length in operations:
        keys = [100 * (which if at else which % 3) + at for at in range(length)]
        found = pool.found(keys, length)
        if operation <= 2 and length - found + pool.unreferenced(keys[:found]) <= pool.free:
            blocks = pool.take(keys[:found]) + pool.allocate(length - found)
            for at in range(found, length):
                blocks[at] = pool.publish(blocks[at], keys[at], keys[at - 1] if at else ROOT, at)
            held.append(blocks)
        elif operation == 3:
            pins.append(which)
            pool.pin(which)
        elif operation == 4 and pins:
            pool.unpin(pins.pop(which % len(pins)))
        elif held:
            pool.release(held.pop(which % len(held)))
        pool.check(held)
        assert pool.referenced >= min(sum(pins), pool.usable - sum(map(len, held)))
    for blocks in held:
        pool.release(blocks)
    for count in pins:
        pool.unpin(count)
    pool.check([])
    assert pool.free == pool.usable
