"""Who runs, who waits and who leaves: every order, victim and kind of prefill by hand, reservations, all of them combined."""

import random
from itertools import product

import pytest

from kvbench.core import Seconds
from kvbench.engine import Done, Job, Step
from kvbench.engine.engine import Engine
from kvbench.engine.predict import LEAST, WINDOW, Lengths
from kvbench.engine.sequence import ORDERS, VICTIMS
from kvbench.profile import load_engine, load_hardware, load_model


class Second:
    """Every step takes a second. Keeps the steps with a prefill: (new tokens of each prompt), decodes."""

    def __init__(self) -> None:
        self.prefills: list[tuple[list[int], int]] = []

    def seconds(self, step: Step) -> Seconds:
        if step.prefill:
            self.prefills.append(([new for new, _ in step.prefill], step.decodes))
        return 1.0


def engine(usable: int = 100, model: str = "llama-3.1-8b", **overrides: object) -> tuple[Engine, Second]:
    profile = load_engine("vllm", **{"block": 4, "blocks": usable + 1, **overrides})
    built, cost = Engine(load_model(model), load_hardware("rtx-4090"), profile), Second()
    built.cost = cost
    return built, cost


def job(number: int, prompt: int, answer: int, **more: object) -> Job:
    return Job(number, ((number + 1, prompt),), answer, **more)  # type: ignore[arg-type]


class Log:
    """Token times in seconds per (job, choice), how often each job was preempted, and when and how it ended."""

    def __init__(self) -> None:
        self.times: dict[tuple[int, int], list[float]] = {}
        self.ends: dict[int, tuple[float, Done]] = {}
        self.preempted: dict[int, int] = {}

    def advance(self, built: Engine, until: Seconds) -> None:
        for span in built.advance(until):
            for name in span.tokens:
                self.times.setdefault(name, []).extend(time / 1e9 for time in span.times)
            self.preempted.update((done.id, done.preempted) for done in span.done)
            self.ends.update((done.id, (span.times[-1] / 1e9, done)) for done in span.done)
        built.check()

    def finish(self, built: Engine) -> "Log":
        while built.wake() < float("inf"):
            self.advance(built, built.wake())
        return self


def served(built: Engine, *jobs: Job) -> Log:
    for one in jobs:
        assert built.submit(one, 0.0) is None
    return Log().finish(built)


# --- order of admission


@pytest.mark.parametrize(
    ("order", "expected"), [("fcfs", [0, 1, 2, 3]), ("priority", [2, 0, 3, 1]), ("shortest", [1, 3, 0, 2])]
)  # fmt: skip
def test_who_is_admitted_first(order: str, expected: list[int]) -> None:
    built, _ = engine(order=order, max_num_seqs=1)
    log = served(built, job(0, 9, 1), job(1, 5, 1, priority=7), job(2, 12, 1, priority=-1), job(3, 5, 1))
    assert sorted(range(4), key=lambda number: log.times[number, 0]) == expected


def test_every_order_and_victim_has_a_test_by_hand() -> None:
    assert set(ORDERS) == {"fcfs", "priority", "shortest"}
    assert set(VICTIMS) == {"last", "least_computed", "most_blocks"}


def test_too_many_waiting() -> None:
    built, _ = engine(max_num_seqs=1, max_waiting=1)
    assert built.submit(job(0, 4, 9), 0.0) is None
    built.advance(0.5)  # the first one runs
    assert built.submit(job(1, 4, 9), 0.5) is None
    assert built.submit(job(2, 4, 9), 0.5) == "full"


# --- victims


@pytest.mark.parametrize(("victim", "loser"), [("last", 3), ("least_computed", 1), ("most_blocks", 2)])
def test_who_loses_its_blocks(victim: str, loser: int) -> None:
    """Four prompts fill 2 + 1 + 3 + 2 of 8 blocks; then the ninth token of the first needs a block more, and no other does."""
    built, _ = engine(8, victim=victim)
    log = served(built, job(0, 8, 2), job(1, 3, 2), job(2, 11, 2), job(3, 7, 2))
    assert log.preempted == {number: int(number == loser) for number in range(4)}
    assert log.times[0, 0] == [1, 2]
    assert log.times[loser, 0] == [1, 3]  # nothing is admitted in a step that preempted


# --- an engine that fails requests


def test_a_request_that_may_not_be_preempted_fails_where_its_blocks_are_wanted() -> None:
    """As in test_engine's preemption by hand: in the step from 2 the first one needs the second's blocks, and nothing waits."""
    built, _ = engine(4, max_preemptions=0)
    log = served(built, job(0, 7, 6), job(1, 7, 6))
    assert log.times == {(0, 0): [1, 2, 3, 4, 5, 6], (1, 0): [1, 2]}
    assert log.ends[1] == (2.0, Done(id=1, n_in=7, n_out=2, cached=0, preempted=0, failed="oom"))
    assert log.ends[0][1].failed == ""
    gauges = built.gauges()
    assert (gauges["oom"], gauges["oom_rate"], gauges["preemptions"], gauges["kv_usage"]) == (1, 0.5, 0, 0)
    assert built.submit(job(2, 17, 1), 9.0) == "kv_too_small"  # a failure for want of memory, too
    assert (built.gauges()["oom"], built.gauges()["oom_rate"]) == (2, 2 / 3)


def test_a_request_that_was_preempted_as_often_as_it_may_be_fails() -> None:
    """The first one's growth costs the second its blocks. Back again it holds most of them when it needs one more than there are
    beside a third, and goes for good."""
    built, _ = engine(6, max_preemptions=1, victim="most_blocks")
    log = Log()
    for one in (job(0, 11, 9), job(1, 7, 17)):
        built.submit(one, 0.0)
    log.advance(built, 12.5)
    assert log.ends[0][1].failed == ""
    assert built.progress(1).preempted == 1
    built.submit(job(2, 4, 9), 12.5)
    log.finish(built)
    assert log.ends[1][1] == Done(id=1, n_in=7, n_out=len(log.times[1, 0]), cached=0, preempted=1, failed="oom")
    assert len(log.times[2, 0]) == 9
    assert (built.gauges()["preemptions"], built.gauges()["oom"]) == (1, 1)


def test_a_killed_choice_takes_its_job_with_it() -> None:
    """Two answers to one prompt beside another request: when the last admitted goes, so does the other answer, whose place in the
    step that begins nobody takes."""
    built, _ = engine(5, max_preemptions=0)
    log = served(built, job(0, 7, 9), job(1, 4, 9, n=2))
    assert log.ends[1][1].failed == "oom"
    assert log.ends[1][1].n_out == len(log.times[1, 0]) + len(log.times[1, 1]) > 0
    assert len(log.times[0, 0]) == 9
    assert built.gauges()["oom_rate"] == 0.5


def test_who_dies_first_is_the_victims_choice() -> None:
    for victim, loser in (("last", 3), ("least_computed", 1), ("most_blocks", 2)):
        built, _ = engine(8, victim=victim, max_preemptions=0)
        log = served(built, job(0, 8, 2), job(1, 3, 2), job(2, 11, 2), job(3, 7, 2))
        assert [number for number, (_, done) in log.ends.items() if done.failed] == [loser]


# --- prefill: whole


def test_a_whole_prompt_waits_for_room_in_the_budget() -> None:
    chunked, pieces = engine(max_num_batched_tokens=8, max_num_seqs=4)
    whole, prompts = engine(max_num_batched_tokens=8, max_num_seqs=4, prefill="whole")
    for built in (chunked, whole):
        served(built, job(0, 6, 3), job(1, 6, 3))
    assert pieces.prefills == [([6, 2], 0), ([4], 1)]
    assert prompts.prefills == [([6], 0), ([6], 1)]  # beside a decode: 1 + 6 of 8


def test_a_prompt_longer_than_the_budget_has_a_step_alone() -> None:
    built, cost = engine(max_num_batched_tokens=8, max_num_seqs=4, prefill="whole")
    log = Log()
    built.submit(job(0, 4, 4), 0.0)
    log.advance(built, 1.5)
    built.submit(job(1, 20, 2), 1.5)
    built.submit(job(2, 3, 1), 1.5)
    log.finish(built)
    assert cost.prefills == [([4], 0), ([20], 0), ([3], 2)]
    assert log.times == {(0, 0): [1, 2, 4, 5], (1, 0): [3, 4], (2, 0): [4]}


def test_a_long_prompt_without_blocks_holds_up_nobody() -> None:
    built, _ = engine(8, max_num_batched_tokens=8, max_num_seqs=4, prefill="whole")
    log = served(built, job(0, 8, 6), job(1, 28, 1))
    assert log.times == {(0, 0): [1, 2, 3, 4, 5, 6], (1, 0): [7]}


def test_what_a_whole_prompt_finds_does_not_count_against_the_budget() -> None:
    built, cost = engine(max_num_batched_tokens=8, max_num_seqs=4, prefill="whole")
    served(built, Job(0, ((1, 8),), 1))
    served(built, Job(1, ((1, 8), (2, 6)), 1))
    assert cost.prefills == [([8], 0), ([6], 0)]


# --- reservations


def test_the_prediction_is_a_quantile_of_the_class() -> None:
    lengths = Lengths(0.9)
    for tokens in range(1, LEAST):
        lengths.ended("chat", tokens)
    assert lengths.predict("chat", 500) == 500  # one answer short of a history
    lengths.ended("chat", LEAST)
    assert lengths.predict("chat", 500) == 18  # of 1 to 20
    assert lengths.predict("chat", 7) == 7
    assert lengths.predict("code", 500) == 500


def test_old_answers_are_forgotten() -> None:
    lengths = Lengths(0.5)
    for tokens in [300] * WINDOW + [20] * (WINDOW // 2 - 1):
        lengths.ended("", tokens)
    assert lengths.predict("", 500) == 300
    lengths.ended("", 20)
    assert lengths.predict("", 500) == 20


def test_blocks_are_taken_at_admission() -> None:
    """8 + 9 tokens, the last never cached: 4 blocks at once where on demand takes 2. The ninth token goes into the third."""
    held = {}
    for share in (None, 0.9):
        built, _ = engine(preallocate=share)
        built.submit(job(0, 8, 9), 0.0)
        built.advance(0.5)
        held[share] = built.gauges()
    assert (held[None]["kv_usage"], held[0.9]["kv_usage"]) == (0.02, 0.04)
    assert held[0.9]["reserved_share"] == 0.01
    assert "reserved_share" not in held[None]
    built.advance(8.5)  # the last step is under way
    assert (built.gauges()["kv_usage"], built.gauges()["reserved_share"]) == (0.04, 0.0)


def test_a_reservation_is_published_as_it_fills() -> None:
    built, _ = engine(preallocate=0.9)
    built.submit(job(0, 8, 9), 0.0)
    built.advance(3.5)  # the step under way computes the eleventh token
    assert built.gauges()["cached_share"] == 0.02
    built.advance(4.5)
    assert built.gauges()["cached_share"] == 0.03


def test_reserved_answers_are_never_preempted() -> None:
    """Two of 4 + 17 tokens need 5 of 8 blocks each in the end."""
    jobs = job(0, 4, 17), job(1, 4, 17)
    on_demand = served(engine(8)[0], *jobs)
    assert sum(on_demand.preempted.values()) == 1
    reserved = served(engine(8, preallocate=0.9)[0], *jobs)
    assert reserved.preempted == {0: 0, 1: 0}
    assert reserved.times[1, 0] == list(range(18, 35))  # after the first one's end


def test_an_answer_may_outgrow_its_reservation() -> None:
    built, _ = engine(preallocate=0.9)
    served(built, *[job(number, 4, 1, cls="short") for number in range(LEAST)])
    start = built.until / 1e9
    built.submit(job(50, 4, 9, cls="short"), start)
    log = Log()
    log.advance(built, start + 0.5)
    assert built.gauges()["kv_usage"] == 0.01  # as the class has it: one token
    log.finish(built)
    assert len(log.times[50, 0]) == 9


def test_cancelled_answers_teach_nothing() -> None:
    built, _ = engine(preallocate=0.9)
    for number in range(LEAST):
        built.submit(job(number, 4, 40), 0.0)
    built.advance(3.5)
    for number in range(LEAST):
        built.cancel(number, 3.5)
    built.advance(5.0)
    built.submit(job(50, 4, 37), 5.0)
    built.advance(5.5)
    assert built.gauges()["kv_usage"] == 0.1  # 4 + 37 - 1 tokens


def test_a_window_group_reserves_nothing() -> None:
    built, _ = engine(400, "gpt-oss-120b", block=16, preallocate=0.9)
    built.submit(job(0, 160, 641), 0.0)
    built.advance(0.5)
    full = [
        len(s.holding.tables[at].blocks) for s in built.batch.running for at, g in enumerate(built.cache.groups) if not g.window
    ]
    slid = [len(s.holding.tables[at].blocks) for s in built.batch.running for at, g in enumerate(built.cache.groups) if g.window]
    assert set(full) == {50}
    assert set(slid) == {10}
    Log().finish(built)


# --- all of it together

CHOICES = list(product(ORDERS, VICTIMS, ("chunked", "whole"), ("prompt", "chunk"), (None, 0.5)))


def drive(
    jobs: list[tuple[float, Job]], gone: dict[int, float], tick: float | None, settings: dict[str, object]
) -> tuple[Log, float]:
    """To the end, checked after every event: by wake() where `tick` is None, else every `tick` seconds."""
    built, _ = engine(24, max_num_batched_tokens=16, max_num_seqs=5, **settings)
    log, now = Log(), 0.0
    events = sorted(
        [(at, 0, one) for at, one in jobs] + [(at, 1, jobs[number][1]) for number, at in gone.items()], key=lambda e: e[:2]
    )
    for at, kind, one in events:
        while (now := now + tick if tick is not None else built.wake()) < at:
            log.advance(built, now)
        log.advance(built, now := at)
        if kind == 0:
            assert built.submit(one, at) is None
        elif one.id in built._jobs:
            built.cancel(one.id, at)
        built.check()
    return log.finish(built), built.gauges()["preemptions"]


def drawn(draw: random.Random) -> list[tuple[float, Job]]:
    """Twenty-four jobs and when they come: shared prefixes, some with two answers."""
    jobs, at = [], 0.0
    for one in range(24):
        at += draw.choice((0.0, 0.3, 2.0, 6.0))
        shared = (draw.randrange(3) - 3, draw.randrange(1, 12))
        segments = (shared, (one + 1, draw.randrange(1, 30)))
        more = {"n": draw.choice((1, 1, 2)), "priority": draw.randrange(3), "cls": draw.choice("ab")}
        jobs.append((at, Job(one, segments, draw.randrange(1, 40), **more)))  # type: ignore[arg-type]
    return jobs


@pytest.mark.parametrize("order", ORDERS)
def test_every_combination_delivers_every_token_and_keeps_its_invariants(order: str) -> None:
    preempted = 0.0
    for number, (_, victim, prefill, admission, preallocate) in enumerate(c for c in CHOICES if c[0] == order):
        draw = random.Random(number)
        settings = {"order": order, "victim": victim, "prefill": prefill, "admission": admission, "preallocate": preallocate}
        jobs = drawn(draw)
        gone = {one: jobs[one][0] + 3.1 for one in draw.sample(range(24), 4)}
        log, count = drive(jobs, gone, None, settings)
        for _, one in jobs:
            if one.id not in gone:
                assert one.id in log.preempted, settings
                assert all(len(log.times[one.id, choice]) == one.max_tokens for choice in range(one.n)), settings
        assert all(times == sorted(set(times)) for times in log.times.values())
        ticked, again = drive(jobs, gone, 1.7, settings)
        assert (ticked.times, again) == (log.times, count), settings  # whoever drives it, however often
        preempted += count
    assert preempted > 20


def test_where_requests_fail_every_token_is_counted_and_every_invariant_kept() -> None:
    failed = 0
    for number, (victim, prefill, most) in enumerate(product(VICTIMS, ("chunked", "whole"), (0, 1))):
        draw = random.Random(number)
        settings: dict[str, object] = {"victim": victim, "prefill": prefill, "max_preemptions": most, "admission": "chunk"}
        jobs = drawn(draw)
        gone = {one: jobs[one][0] + 3.1 for one in draw.sample(range(24), 4)}
        log, _ = drive(jobs, gone, None, settings)
        for number, (_, done) in log.ends.items():
            assert done.n_out == sum(len(log.times.get((number, choice), ())) for choice in range(jobs[number][1].n))
            assert (done.failed == "oom") == (done.n_out < jobs[number][1].n * jobs[number][1].max_tokens)
            assert done.preempted <= most * jobs[number][1].n
            failed += bool(done.failed)
        assert {*log.ends} >= {*range(24)} - {*gone}
        ticked, _ = drive(jobs, gone, 1.7, settings)
        assert (ticked.times, ticked.ends) == (log.times, log.ends), settings
    assert failed > 20
