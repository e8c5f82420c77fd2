"""Scheduling, by hand on a device where every step takes one second, and under random loads."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core import Seconds, reply_key
from kvbench.engine import Done, Job, Span, Step
from kvbench.engine.engine import Engine
from kvbench.profile import load_engine, load_hardware, load_model


class Second:
    """Every step takes a second."""

    def seconds(self, step: Step) -> Seconds:
        return 1.0


def engine(blocks: int = 101, block: int = 4, **overrides: object) -> Engine:
    profile = load_engine("vllm", block=block, blocks=blocks, **overrides)
    return Engine(load_model("llama-3.1-8b"), load_hardware("rtx-4090"), profile)


def by_second(blocks: int = 101, **overrides: object) -> Engine:
    built = engine(blocks, **overrides)
    built.cost = Second()
    return built


def job(number: int, prompt: int, answer: int, n: int = 1) -> Job:
    return Job(number, ((number + 1, prompt),), answer, n)


class Log:
    """What a driver would have seen: token times in seconds per (job, choice), and how jobs ended."""

    def __init__(self) -> None:
        self.times: dict[tuple[int, int], list[int]] = {}
        self.done: dict[int, Done] = {}
        self.spans: list[Span] = []

    def take(self, spans: list[Span]) -> None:
        for span in spans:
            self.spans.append(span)
            for name in span.tokens:
                self.times.setdefault(name, []).extend(span.times)
            for done in span.done:
                assert done.id not in self.done
                self.done[done.id] = done

    def run(self, built: Engine) -> "Log":
        while built._jobs:
            self.take(built.advance(built.wake()))
            built.check()
        return self

    def seconds(self, number: int, choice: int = 0) -> list[float]:
        return [time / 1e9 for time in self.times[number, choice]]


def test_one_request_from_its_prefill_to_its_end() -> None:
    built = by_second()
    built.submit(job(0, 8, 3), 10.0)
    log = Log().run(built)
    assert log.seconds(0) == [11, 12, 13]
    assert log.done[0] == Done(id=0, n_in=8, n_out=3, cached=0, preempted=0)
    assert [(span.start / 1e9, len(span.times)) for span in log.spans] == [(10, 1), (11, 2)]  # the decodes are one span
    assert built.wake() == float("inf")


def test_a_prompt_longer_than_the_budget_takes_several_steps() -> None:
    built = by_second(max_num_batched_tokens=4, max_num_seqs=2)
    built.submit(job(0, 10, 2), 0.0)  # 4 + 4 + 2 tokens
    assert Log().run(built).seconds(0) == [3, 4]


def test_decodes_go_before_prefill_and_an_arrival_waits_for_the_step_in_progress() -> None:
    built = by_second(max_num_batched_tokens=4, max_num_seqs=2)
    log = Log()
    built.submit(job(0, 4, 6), 0.0)
    log.take(built.advance(1.5))
    built.submit(job(1, 6, 1), 1.5)  # first served in the step from 2: 3 tokens beside one decode, then 3 more
    log.run(built)
    assert log.seconds(0) == [1, 2, 3, 4, 5, 6]
    assert log.seconds(1) == [4]


def test_a_step_that_would_begin_at_the_time_advanced_to_has_not_begun() -> None:
    built = by_second()
    built.submit(job(0, 4, 3), 0.0)
    log = Log()
    log.take(built.advance(2.0))
    built.submit(job(1, 4, 1), 2.0)
    log.run(built)
    assert log.seconds(0) == [1, 2, 3]
    assert log.seconds(1) == [3]


def test_spans_are_handed_out_only_when_they_have_ended() -> None:
    built = by_second()
    built.submit(job(0, 4, 5), 0.0)
    log = Log()
    log.take(built.advance(0.999))
    assert not log.spans
    log.take(built.advance(3.5))
    assert log.seconds(0) == [1, 2, 3]
    assert built.pool.referenced == 2  # the step in progress computes token 7 of 2 x 4


def test_at_most_max_num_seqs_run_at_once() -> None:
    built = by_second(max_num_seqs=2)
    for number in range(3):
        built.submit(job(number, 4, 2), 0.0)
    log = Log().run(built)
    assert [log.seconds(number)[-1] for number in range(3)] == [2, 2, 4]


def test_preemption_by_recompute_by_hand() -> None:
    # 4 usable blocks of 4; A and B: 7 + 6 tokens. Steps 1 and 2 fit (8 tokens, 2 blocks each). In step 3 A needs a third block:
    # B, admitted last, loses its two; its tail is evicted for A. A runs alone until 6. B comes back in step 7: 9 tokens known,
    # its first block is still resident: 4 of its 8 computed tokens are computed again.
    built = by_second(blocks=5)
    built.submit(job(0, 7, 6), 0.0)
    built.submit(job(1, 7, 6), 0.0)
    log = Log().run(built)
    assert log.seconds(0) == [1, 2, 3, 4, 5, 6]
    assert log.seconds(1) == [1, 2, 7, 8, 9, 10]
    assert log.done[1] == Done(id=1, n_in=7, n_out=6, cached=0, preempted=1)
    gauges = built.gauges()
    assert (gauges["preemptions"], gauges["recompute_tokens"], gauges["hit_tokens"], gauges["query_tokens"]) == (1, 4, 0, 14)
    assert gauges["computed_tokens"] == 2 * (7 + 6 - 1) + 4


def test_nothing_is_admitted_in_a_step_that_preempted() -> None:
    # As above with a one-block job C in the queue from 2, ahead of B as it is shorter: there is room for it in step 3, in which B
    # is preempted, but it is admitted in step 4.
    built = by_second(blocks=5, order="shortest")
    log = Log()
    built.submit(job(0, 7, 6), 0.0)
    built.submit(job(1, 7, 6), 0.0)
    log.take(built.advance(1.5))
    built.submit(job(2, 3, 1), 1.5)
    log.run(built)
    assert log.seconds(2) == [4]


def test_a_hit_never_covers_the_whole_prompt() -> None:
    built = by_second()
    log = Log()
    for number in range(2):
        built.submit(Job(number, ((5, 8),), 1), built._clock / 1e9)
        log.run(built)
    assert log.done[1].cached == 4  # two full blocks are resident, the last token must be computed


def test_hits_within_one_step() -> None:
    built = by_second()
    built.submit(Job(0, ((5, 9),), 1), 0.0)
    built.submit(Job(1, ((5, 9),), 1), 0.0)
    log = Log().run(built)
    assert (log.done[0].cached, log.done[1].cached) == (0, 8)


def test_the_next_turn_finds_the_answer_of_the_one_before() -> None:
    built = by_second()
    log = Log()
    built.submit(Job(7, ((1, 8),), 9), 0.0)
    log.run(built)
    built.submit(Job(8, ((1, 8), (reply_key(7), 9), (2, 5)), 1), 100.0)
    log.run(built)
    assert log.done[8].cached == 16  # 8 + 9 tokens, the last of which was sampled but never computed


@pytest.mark.parametrize(("least", "cached"), [(0, 8), (8, 8), (9, 0)])
def test_content_of_short_sequences_is_not_kept(least: int, cached: int) -> None:
    built = by_second(retain_tokens=least)
    built.submit(Job(0, ((1, 8),), 1), 0.0)  # 8 tokens are computed
    built.submit(Job(1, ((2, 12),), 1), 0.0)
    built.advance(10.0)
    built.submit(Job(2, ((1, 8), (3, 5)), 1), 10.0)
    built.submit(Job(3, ((2, 12), (4, 5)), 1), 10.0)
    log = Log().run(built)
    assert (log.done[2].cached, log.done[3].cached) == (cached, 12)
    built.check()


def test_choices_share_the_prompt_and_count_once() -> None:
    built = by_second()
    built.submit(job(0, 8, 3, n=2), 0.0)
    log = Log()
    log.take(built.advance(0.5))
    assert built.pool.referenced == 2
    log.take(built.advance(1.5))
    assert built.pool.referenced == 4  # each answers on its own
    log.run(built)
    assert log.seconds(0, 0) == log.seconds(0, 1) == [1, 2, 3]
    assert log.done[0] == Done(id=0, n_in=8, n_out=6, cached=0, preempted=0)
    assert (built.gauges()["query_tokens"], built.gauges()["hit_tokens"]) == (8, 0)


def test_what_can_never_be_served_is_refused() -> None:
    built = by_second(blocks=5, max_model_len=1000)
    assert built.submit(job(0, 999, 2), 0.0) == "context_too_long"
    assert built.submit(job(1, 10, 8), 0.0) == "kv_too_small"  # 17 cached tokens in 4 blocks of 4
    assert built.submit(job(2, 10, 7), 0.0) is None
    with pytest.raises(ValueError, match="job 2 is already here"):
        built.submit(job(2, 1, 1), 0.0)
    assert built.submit(job(3, 0, 1), 0.0) == built.submit(job(4, 1, 0), 0.0) == "empty"
    assert Log().run(built).done[2].n_out == 7


def test_cancelling_frees_blocks_and_keeps_the_step() -> None:
    built = by_second(blocks=5)
    log = Log()
    built.submit(job(0, 7, 5), 0.0)
    built.submit(job(1, 7, 5), 0.0)
    built.submit(job(2, 4, 1), 0.0)  # waits: 4 blocks are taken
    log.take(built.advance(1.5))
    built.cancel(0, 1.5)
    built.check()
    assert built.gauges()["waiting"] == 1
    log.run(built)
    assert log.seconds(0) == [1]
    assert log.seconds(2) == [3]  # admitted in the step after the one in progress
    assert built.pool.referenced == 0
    with pytest.raises(KeyError):
        built.cancel(0, 20.0)


def test_prompt_admission_waits_for_the_whole_prompt_and_chunk_admission_does_not() -> None:
    first = {}
    for admission in ("prompt", "chunk"):
        built = by_second(blocks=9, max_num_batched_tokens=8, max_num_seqs=2, admission=admission)
        log = Log()
        built.submit(job(0, 8, 3), 0.0)  # ends at 3 with 3 of 8 blocks
        log.take(built.advance(0.5))
        built.submit(job(1, 24, 1), 0.5)  # 6 blocks
        log.run(built)
        first[admission] = log.seconds(1)[0]
    # "prompt": in from 3, 8 tokens a step. "chunk": in from 1, 7 and 7 tokens beside the decodes, then 8 and 2.
    assert first == {"prompt": 6, "chunk": 5}


def submissions(seed: int, count: int) -> list[tuple[float, Job]]:
    rng = random.Random(seed)
    at, jobs = 0.0, []
    for number in range(count):
        at += rng.expovariate(20)
        shared = (rng.randrange(3), rng.randrange(60))
        own = (1000 + number, rng.randrange(1, 120))
        jobs.append((at, Job(number, (shared, own), rng.randrange(1, 60), rng.choice([1, 1, 1, 2]))))
    return jobs


def drive(built: Engine, jobs: list[tuple[float, Job]], tick: float = 0.0) -> Log:
    """With a tick the engine is also advanced at every multiple of it, as gauges do."""
    log, steps = Log(), 0
    for at, one in jobs:
        while tick and steps * tick < at:
            log.take(built.advance(steps * tick))
            steps += 1
        log.take(built.advance(at))
        assert built.submit(one, at) is None
    return log.run(built)


@pytest.mark.parametrize("seed", range(4))
def test_looking_more_often_changes_nothing(seed: int) -> None:
    jobs = submissions(seed, 60)
    seldom, often = (drive(engine(blocks=60, max_num_batched_tokens=256), jobs, tick) for tick in (0.0, 0.0037))
    assert seldom.times == often.times
    assert seldom.done == often.done
    assert sum(done.preempted for done in seldom.done.values()) > 0  # the pool was under pressure


def test_spans_equal_single_steps() -> None:
    jobs = submissions(9, 60)
    spans, single = engine(blocks=60, max_num_batched_tokens=256), engine(blocks=60, max_num_batched_tokens=256)
    single.batch.steps_in_room = lambda sequences, most: 1  # type: ignore[method-assign]  # plan one step at a time
    a, b = drive(spans, jobs), drive(single, jobs)
    assert a.done == b.done
    assert len(a.spans) < len(b.spans)
    assert spans.pool.evicted == single.pool.evicted
    for name, times in a.times.items():  # times may differ by a rounded nanosecond per step
        assert times == pytest.approx(b.times[name], abs=1000)


def test_same_seed_same_run() -> None:
    assert drive(engine(blocks=60), submissions(3, 80)).times == drive(engine(blocks=60), submissions(3, 80)).times


OPERATIONS = st.lists(st.tuples(st.sampled_from("ssscaw"), st.integers(0, 10**6)), max_size=60)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS)
def test_invariants_under_random_operations(operations: list[tuple[str, int]]) -> None:
    built, log, now = engine(blocks=20, max_num_batched_tokens=64, max_num_seqs=5), Log(), 0.0
    for number, (operation, value) in enumerate(operations):
        rng = random.Random(value)
        log.take(built.advance(now))
        if operation == "s":
            segments = ((rng.randrange(3), rng.randrange(20)), (50 + rng.randrange(50), rng.randrange(1, 40)))
            built.submit(Job(number, segments, rng.randrange(1, 25), rng.choice([1, 2, 3])), now)
        elif operation == "c" and built._jobs:
            built.cancel(rng.choice(sorted(built._jobs)), now)
        elif operation == "a":
            now += rng.expovariate(10)
        elif built.wake() < float("inf"):
            now = built.wake()
        built.check()
    log.run(built)
    built.check()
    assert built.pool.referenced == 0
    assert all(times == sorted(set(times)) for times in log.times.values())
    gauges = built.gauges()
    assert 0 <= gauges["hit_tokens"] <= gauges["query_tokens"]


def test_gpu_memory_is_flat_at_the_share_that_the_engine_takes() -> None:
    model, card = load_model("llama-3.1-8b"), load_hardware("rtx-4090")
    whole = Engine(model, card, load_engine("vllm")).gauges()["gpu_memory"]
    block = 16 * 131072 / card.memory  # 128 KiB a token
    assert 0.92 - block < whole <= 0.92
    half = Engine(model, card, load_engine("vllm", blocks=1000)).gauges()["gpu_memory"]
    blocks = Engine(model, card, load_engine("vllm")).blocks
    assert whole - half == pytest.approx((blocks - 1000) * block)
    assert "gpu_memory" not in Engine(model, card, load_engine("vllm", blocks=100_000)).gauges()  # more than there is
    small = load_engine("vllm-cpu")
    assert "gpu_memory" not in Engine(load_model("smollm2-135m"), load_hardware("two-core-cpu"), small).gauges()
