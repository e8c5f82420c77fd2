"""When a warm-up is over: the test of stationarity against its definition, the account of a prefill by hand, whole warm-ups; and
that nothing measured was ever sent before."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.agenda import build_phases
from kvbench.core import Message, Record, Request, UsedUpError
from kvbench.metrics.slots import Slots
from kvbench.scenario import Scenario, ScenarioError, load
from kvbench.source import Source
from kvbench.warmup import LEAST, TAIL, Fill, Filled, Filling, Stationary, even, truncation
from tests.stub.stub import DONE, FIN, C, Reply, Seen, Stub, U, stream
from tests.whole import Whole, against, served, simulated

# ---- MSER


def by_definition(values: list[float]) -> int:
    """White (1997): the d that minimises the sum of squared deviations of what is left, over the square of its number."""

    def error(d: int) -> float:
        rest = np.array(values[d:])
        return float(((rest - rest.mean()) ** 2).sum() / len(rest) ** 2)

    return min(range(len(values) - TAIL + 1), key=error)


@pytest.mark.parametrize("seed", range(40))
def test_truncation_is_the_minimum_of_its_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(TAIL + 1, 120))
    transient = rng.uniform(-30, 30) * np.exp(-np.arange(n) / rng.uniform(0.5, 40))
    values = (rng.uniform(0, 1000) + transient + rng.normal(0, rng.uniform(0.01, 3), n)).tolist()
    assert truncation(values) == by_definition(values)


def test_truncation_by_hand() -> None:
    """9 5 1 3 1 3 1 3 1 3: of what is left after the first two the spread is 8 over 8^2; all ten have 56 + 4 over 100."""
    assert truncation([9, 5, 1, 3, 1, 3, 1, 3, 1, 3]) == 2
    assert truncation([7, 4, 4, 4, 4, 4, 4]) == 1
    assert truncation([0.1] * 30) == 0
    with pytest.raises(ValueError, match="at least 6"):
        truncation([1.0] * TAIL)


def test_what_is_even_and_what_is_not() -> None:
    n = np.arange(48)
    noise = np.random.default_rng(3).normal(0, 1, 48)
    assert even((100 + 5 * noise).tolist()) is not None
    assert even((100 + 20 * np.sin(n * math.tau / 8)).tolist()) is not None  # whole periods of a wave
    assert even([5.0] * 48) == 0
    assert even([0.0] * 48) == 0  # no throughput at all is even; a TTFT there is none
    assert even((100 + n).tolist()) is None  # rises
    assert even((200 - n).tolist()) is None  # falls
    assert even((100 + 100 * np.exp(-n / 30)).tolist()) is None  # still on its way
    assert even([1.0] * 4 + [1.5] * 4 + [2.25] * 4) is None  # a stair
    settled = even((100 + 400 * np.exp(-n / 3) + noise).tolist())
    assert settled is not None
    assert 5 <= settled <= 18  # 400 e^(-d/3) is below the noise after 18
    assert even((100 + 0.01 * n).tolist()) is not None  # less than 1 % in all
    assert even([1.0] * (LEAST - 1)) is None  # too few


def found_even(values: Any) -> int | None:
    """After how many values the test, asked once a batch, first says so."""
    return next((n for n in range(LEAST, len(values) + 1) if even(values[:n].tolist()) is not None), None)


def test_what_is_even_is_seen_soon_and_what_is_not_is_seldom_taken_for_it() -> None:
    """Noise of 10 %, one series of a minute, two and four, in batches of five seconds. The test is asked again and again: a trend
    that takes 8 % a batch at first must get through almost never."""
    rng = np.random.default_rng(8)
    noise = rng.normal(0, 5, (200, 48))
    still = [found_even(50 + row) for row in noise]
    assert sum(n is not None and n <= 2 * LEAST for n in still) > 0.97 * len(still)
    assert np.median([n for n in still if n is not None]) <= LEAST + 2
    assert sum(found_even(50 + 4 * np.arange(48) + row) is not None for row in noise) < 0.04 * len(noise)
    settling = [found_even(50 + 100 * np.exp(-np.arange(48) / 4) + row) for row in noise]
    assert sum(n is not None for n in settling) > 0.95 * len(settling)
    assert np.percentile([n for n in settling if n is not None], 10) >= 14  # 100 e^(-d/4) is above the noise until d = 12


# ---- stationarity of a phase


def answered(number: int, at: float, ttft: float) -> Record:
    """Sent at `at` s, a first token after `ttft` s and the second of two a tenth later."""
    sent, first = round(at * 1e9), round((at + ttft) * 1e9)
    record = Record(id=number, outcome="ok", due_ns=sent, release_ns=sent, sent_ns=sent, written_ns=sent, first_ns=first)
    record.content_ns, record.done_ns, record.end_ns = first, first + 10**8, first + 10**8
    record.token_ns, record.n_in, record.n_out, record.source = [first, first + 10**8], 5, 2, "usage"
    return record


def ended(test: Stationary, ttft: Callable[[int], float | None], seconds: int = 400) -> tuple[int, str]:
    """(the second at which a phase from 0 on is over, why): two requests a second, of which `ttft` gives the latency."""
    slots = Slots()
    for second in range(seconds):
        taken = ttft(second)
        if taken is not None:
            slots.fold([answered(2 * second + k, second + 0.1 * k, taken) for k in range(2)])
        slots.close(second + 1.0)
        why = test.check(slots, second + 1.0, [])
        if why is not None:
            return second + 1, why
    raise AssertionError("it went on")


def stationary(least: float = 0.0, most: float = 300.0, batch: int = 5, start: float = 0.0) -> Stationary:
    return Stationary(("ttft_mean", "output_tokens_rate"), batch, start, least, most)


def test_it_ends_when_both_are_even() -> None:
    at, why = ended(stationary(), lambda second: 0.2)
    assert (at, why) == (60, "stationary: ttft_mean from 0 s on, output_tokens_rate from 0 s on (MSER, 12 batches of 5 s)")
    assert ended(stationary(batch=1), lambda second: 0.2)[0] == 12
    assert ended(stationary(least=72.0), lambda second: 0.2)[0] == 75  # the first batch that is whole by then
    assert ended(stationary(start=7.4), lambda second: 0.2)[0] == 68  # whole seconds of its own: 8 to 68


def test_a_transient_is_waited_for_until_as_much_has_followed_it() -> None:
    """Latency rises for 60 s, then stays: the 12 batches of the rise are left out once 12 more have come."""
    at, why = ended(stationary(), lambda second: 0.1 + 0.01 * min(second, 60))
    assert 115 <= at <= 125
    assert "ttft_mean from 1m00s on" in why or "ttft_mean from 55 s on" in why


def test_what_never_is_even_ends_with_its_bound_and_the_culprit() -> None:
    at, why = ended(stationary(most=200.0), lambda second: 0.1 + 0.01 * second)
    assert 199 <= at <= 200
    assert why == f"not stationary within 3m20s: ttft_mean (MSER, {at // 5} batches of 5 s)"
    at, why = ended(stationary(most=90.0), lambda second: None)  # a server that does not answer is not stationary
    assert 89 <= at <= 90
    assert "ttft_mean" in why


# ---- the account of a prefill


class Rows:
    """Prompts of 100 tokens; no sessions."""

    def __init__(self) -> None:
        self.count = 0

    def next(self, at: float) -> Request:
        self.count += 1
        return Request(id=self.count, tokens=100, max_tokens=1, messages=(Message(segments=((self.count, 100),)),))

    def follow(self, request: Request, record: Record) -> None:
        return None


def test_a_prefill_counts_whole_blocks_that_were_answered() -> None:
    """Half of 640 tokens; a prompt of 100 has 6 whole blocks of 16, so 96: with three in the cache and one on its way, enough."""
    fill = Fill(0.5, 640, 16, requests=50)
    content = Filling(Rows(), fill)
    asked = [content.next(0.0) for _ in range(4)]
    with pytest.raises(UsedUpError, match=r"filled: 0 of 640 tokens, 0 % of the cache \(50 % asked\)"):
        content.next(0.0)  # four on their way are enough
    assert all(request.session is not None for request in asked)  # else their end would not be told
    ends = [("ok", 100, None), ("failed", None, None), ("ok", 100, 40), ("ok", None, 0)]
    for request, (outcome, n_in, cached) in zip(asked, ends, strict=True):
        content.follow(request, Record(id=request.id, outcome=outcome, n_in=n_in, cached=cached))  # type: ignore[arg-type]
    assert (fill.filled, fill.expected) == (96 + 48 + 96, 0)  # the failed one filled nothing; 40 of another were there before
    content.next(0.0)
    with pytest.raises(UsedUpError, match=r"filled: 240 of 640 tokens, 37\.5 %"):  # the text is that of the moment
        content.next(0.0)


def test_a_prefill_ends_with_its_count() -> None:
    fill = Fill(0.5, 10_000, 1, requests=2)
    content = Filling(Rows(), fill)
    for request in (content.next(0.0), content.next(0.0)):
        content.follow(request, Record(id=request.id, outcome="failed"))
    with pytest.raises(UsedUpError, match="2 requests did not fill it: 0 of 10,000 tokens"):
        content.next(0.0)


def test_the_gauge_ends_a_prefill_and_time_tells_how_far_it_came() -> None:
    slots, fill = Slots(), Fill(0.5, 1000, 1, requests=10)
    until = Filled(fill, start=3.2, most=10.0)
    slots.gauge("cached_share", 3.0, 0.9)  # read before the phase began
    assert until.check(slots, 4.0, []) is None
    slots.gauge("cached_share", 5.0, 0.49)
    assert until.check(slots, 5.0, []) is None
    assert until.check(slots, 13.0, []) == "not filled within 10 s: cached_share is 49 % (50 % asked)"
    slots.gauge("cached_share", 6.0, 0.51)
    assert until.check(slots, 6.0, []) == "filled: cached_share is 51 % (50 % asked)"
    fill.filled = 120
    assert Filled(fill, 0.0, 10.0).check(Slots(), 9.5, []) == (
        "not filled within 10 s: 120 of 1,000 tokens, 12 % of the cache (50 % asked)"
    )


# ---- whole warm-ups

SIM = "seed: 7\ntarget: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090}\n"
LOAD = "workload: {arrivals: {shape: poisson, rate: 2/s}, prompt: {dist: uniform, min: 300, max: 900}, output: 40}\n"
SHARED = LOAD.replace("output: 40", "output: 40, prefixes: {groups: 4, tokens: 64}")


def phase(run: Whole, name: str) -> dict[str, Any]:
    (found,) = [event for event in run.lines("events.jsonl") if event["kind"] == "phase_end" and event["data"]["phase"] == name]
    return {"t": event_time(found), **found["data"]}


def event_time(event: dict[str, Any]) -> float:
    return float(event["t"])


def cached(run: Whole, at: float) -> float:
    """The gauge at the first reading at or after `at`."""
    return float(next(s["value"] for s in run.lines("samples.jsonl") if s["name"] == "cached_share" and s["t"] >= at))


@pytest.mark.parametrize("content", ["own", "shared"])
@pytest.mark.parametrize("fill", [20, 50, 80])
def test_prefill_fills_the_share_to_within_its_prompts_in_flight(fill: int, content: str, tmp_path: Path) -> None:
    """The pool has 45,120 tokens: four prompts of at most 964 are 8.5 % of it, and a measured request comes every 0.5 s."""
    phases = f"phases: {{warmup: {{prefill: {fill}%, content: {content}}}, steady: {{for: 3s}}}}\n"
    run = simulated(SIM + SHARED + phases, tmp_path)
    end = phase(run, "warmup")
    assert end["reason"].startswith("filled: ")
    assert f"({fill} % asked)" in end["reason"]
    assert fill / 100 <= cached(run, end["t"]) <= fill / 100 + 0.085 + 0.1
    mine = [record for record in run.records if record.phase == "warmup"]
    assert {record.n_out for record in mine} == {1}
    assert not any(record.measured for record in mine)
    assert max(record.due_ns for record in mine) < 1e9 * end["t"]
    live = [(record.sent_ns, 1) for record in mine] + [(record.end_ns, -1) for record in mine]
    assert max(np.cumsum([step for _, step in sorted(live)])) == 4


def test_prefill_says_what_it_reached_in_its_time(tmp_path: Path) -> None:
    phases = "phases: {warmup: {prefill: 90%, max: 3s}, steady: {for: 3s}}\n"
    run = simulated(SIM + LOAD + phases, tmp_path)
    end = phase(run, "warmup")
    assert end["t"] <= 3
    assert end["reason"].startswith("not filled within 3 s: cached_share is ")
    assert 0.2 < cached(run, end["t"]) < 0.9
    few = simulated(SIM + LOAD + phases.replace("max: 3s", "requests: 5"), tmp_path)
    assert phase(few, "warmup")["reason"].startswith("5 requests did not fill it: ")
    assert phase(few, "warmup")["offered"] == 5


def test_prefill_passes_the_laws_limits(tmp_path: Path) -> None:
    """A bucket that lets one request in every 10 s would fill nothing in a minute."""
    phases = "phases: {warmup: {prefill: 50%, max: 1m}, steady: {for: 3s}}\ncontrol: {law: bucket, rate: 0.1/s}\n"
    run = simulated(SIM + LOAD + phases, tmp_path)
    assert phase(run, "warmup")["reason"].startswith("filled: ")
    assert phase(run, "warmup")["t"] < 10


def test_prefill_of_a_server_needs_its_capacity(tmp_path: Path) -> None:
    """Prompts of 8 tokens as the server counts them: half of 100 tokens are 7 prompts, and with two in flight one more."""

    def script(seen: Seen) -> Reply:
        return stream(C("a"), FIN, U(8, 1), DONE)

    phases = "{warmup: {prefill: 50%, concurrency: 2, capacity: 100}, steady: {requests: 3}}"
    arrivals = "{shape: constant, rate: 20/s}"
    run = against(Stub(script, gets=script), served(arrivals, phases), tmp_path)
    assert phase(run, "warmup")["reason"] == "filled: 56 of 100 tokens, 56 % of the cache (50 % asked)"
    assert phase(run, "warmup")["offered"] == 7
    file = tmp_path / "s.yaml"
    file.write_text(served(arrivals, phases.replace(", capacity: 100", "")).replace("{url}", "http://a"))
    with pytest.raises(ScenarioError, match=r"phases\.warmup\.capacity: the target does not say how many tokens"):
        build_phases(load(file), 1)
    told = build_phases(load(file), 1, facts={"kv_tokens": 1000, "block_tokens": 16})
    assert told[0].kind == "warmup"


def test_dynamic_warms_up_until_the_engine_is_even(tmp_path: Path) -> None:
    phases = "phases: {warmup: {policy: dynamic}, steady: {for: 20s}}\n"
    run = simulated(SIM + LOAD + phases, tmp_path)
    end = phase(run, "warmup")
    assert end["reason"].startswith("stationary: ttft_mean from ")
    assert 60 <= end["t"] <= 150
    assert end["t"] % 5 == 0
    heavy = LOAD.replace("rate: 2/s", "rate: 30/s")  # more than the hardware can do: the queue grows all the time
    run = simulated(SIM + heavy + phases.replace("dynamic", "dynamic, max: 90s"), tmp_path)
    assert phase(run, "warmup")["reason"].startswith("not stationary within 1m30s: ttft_mean")


def test_on_demand_is_no_phase(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(SIM + SHARED + "phases: {warmup: {policy: on_demand}, steady: {for: 20s}}\n")
    assert [found.name for found in build_phases(load(file), 1)] == ["steady"]


# ---- nothing measured is sent before


TALKS = [{"conversations": [{"from": "human", "value": f"question {i}"}, {"from": "human", "value": "and?"}]} for i in range(6)]
CLASSES = """
workload:
  nonce: NONCE
  arrivals: {shape: poisson, rate: 2/s}
  classes:
    chat: {weight: 40%, prompt: 200, output: 10, prefixes: {groups: 3, tokens: 96, share: 70%}, sessions: {turns: 2}}
    real: {weight: 30%, source: {file: talks.jsonl}, output: 5}
    rows: {weight: 30%, trace: {file: rows.jsonl, unit: ms, wrap: again}}
"""
POLICIES = [
    "{policy: fixed, for: 30s}", "{policy: prefill, fill: 50%}", "{policy: prefill, fill: 50%, content: shared}",
    "{policy: dynamic}", "{policy: on_demand}", "{policy: none}",
]  # fmt: skip


def composed(folder: Path, warmup: str, nonce: str) -> Scenario:
    (folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in TALKS))
    rows = ({"timestamp": 500 * i, "input_length": 600, "output_length": 3, "hash_ids": [i // 3, 100 + i]} for i in range(9))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    phases = f"phases: {{baseline: {{}}, warmup: {warmup}, steady: {{for: 30s}}, stress: {{step: 50%, every: 5s, max: 2x}}}}\n"
    (folder / "s.yaml").write_text(SIM + CLASSES.replace("NONCE", nonce) + phases)
    return load(folder / "s.yaml")


def asked(source: Source, count: int) -> list[Request]:
    """The next requests of a source, and of each that can have one its next turn."""
    found = []
    for number in range(count):
        request = source.content.next(0.1 * number)
        found.append(request)
        if request.session is not None:
            record = Record(id=request.id, outcome="ok", n_in=request.tokens, n_out=3)
            following = source.content.follow(request, record)
            found += [following[1]] if following else []
    return found


def sent(request: Request) -> tuple[Any, ...]:
    """All that a server sees of a prompt, and so what its cache can hold of it."""
    return tuple((message.role, message.text, str(message.raw), message.segments) for message in request.messages)


@pytest.mark.parametrize("nonce", ["on", "off"])
@pytest.mark.parametrize("warmup", POLICIES)
def test_no_measured_prompt_is_sent_outside_of_steady(warmup: str, nonce: str, tmp_path: Path) -> None:
    """By whole prompts and by their contents. Prefix groups are the run's where the policy says so, and in stress."""
    scenario = composed(tmp_path, warmup, nonce)
    phases = {found.name: found for found in build_phases(scenario, 1 if nonce == "on" else None) if found.source}
    requests = {name: asked(found.source(0.0), 40) for name, found in phases.items() if found.source}
    measured, place = requests["steady"], 1 if nonce == "on" else 0
    leads = {request.segments()[0][0] for request in measured if request.cls != "real"} if nonce == "on" else set()
    groups = {request.segments()[place][0] for request in measured if request.group is not None}
    own = {key for request in measured for key, _ in request.segments()} - leads - groups
    assert (len(leads), len(groups)) == (place, 3)
    assert len(own) > 50
    prompts = {sent(request) for request in measured}
    for name, found in requests.items():
        if name == "steady":
            continue
        assert not prompts & {sent(request) for request in found}, name
        seen = {key for request in found for key, _ in request.segments()}
        assert not seen & own, name
        shares = name == "stress" or (name == "warmup" and "shared" in warmup)
        assert bool(seen & groups) == shares, name
        assert bool(seen & leads) == (shares and nonce == "on"), name
    ids = [request.id for found in requests.values() for request in found]
    assert len(set(ids)) == len(ids)
