"""Cases B08, B10, B12, C01 and C02 once more, in full size and in virtual time: to the nanosecond, where the others allow for a
machine. The whole run is kvbench's; only the server is a line of arithmetic: when a request that arrives at t is answered."""

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from kvbench import compose
from kvbench.core import Record, Request
from kvbench.target.null import NullTarget
from tests.whole import Whole, simulated

Play = Callable[..., Whole]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """play(end, arrivals, phases, control): `end` maps the time of arrival to the time of the answer, in seconds."""

    def run(end: Callable[[float], float], arrivals: str, phases: str, control: str = "{law: none}") -> Whole:
        class Server(NullTarget):
            async def send(self, request: Request, record: Record) -> None:
                sent = self.clock.ns()
                try:
                    await self.clock.sleep_until(end(sent / 1e9))
                    await super().send(request, record)
                finally:
                    record.sent_ns = record.written_ns = sent
                    record.outcome = record.outcome or "cancelled"
                    record.end_ns = self.clock.ns()

        monkeypatch.setattr(compose, "NullTarget", Server)
        workload = f"workload: {{arrivals: {arrivals}, prompt: 8, output: 2}}"
        return simulated(f'target: {{kind: "null"}}\n{workload}\nphases: {phases}\ncontrol: {control}\n', tmp_path)

    return run


def after(seconds: float) -> Callable[[float], float]:
    return lambda at: at + seconds


def lumps(at: float) -> float:
    """The next whole second."""
    return math.floor(at + 1e-9) + 1.0


def most(times: list[float], span: float) -> int:
    return max(sum(start <= at < start + span - 1e-9 for at in times) for start in times)


def test_b08_a_cap_whose_places_free_together_lets_out_a_burst_of_its_size(play: Play) -> None:
    """50/s for 10 s, cap 16, answers at every whole second: sixteen a second, at one instant, 134 + 9 x 0 of them told."""
    control = "{law: none, inflight: 16, patience: 1m}"
    run = play(lumps, "{shape: constant, rate: 50/s}", "{steady: {for: 10s}, drain: {for: 2s}}", control)
    sent = [r.sent_ns / 1e9 for r in run.records if r.sent_ns is not None]
    assert Counter(at for at in sent if at >= 1) == dict.fromkeys(map(float, range(1, 10)), 16)
    assert run.summary["pacing"]["max_sends_per_100ms"] == 16
    assert run.summary["pacing"]["blocked_at_gate"] == 500 - 16
    assert run.summary["accounting"]["total"]["withdrawn"] == 500 - 160


def test_b08_a_bucket_is_the_strict_option(play: Play) -> None:
    """The same behind a bucket of 50/s: never more than 6 sends in 100 ms (here 5), and still sixteen a second."""
    control = "{law: bucket, rate: 50/s, burst: 1, inflight: 16, patience: 1m}"
    run = play(lumps, "{shape: constant, rate: 50/s}", "{steady: {for: 10s}, drain: {for: 2s}}", control)
    sent = [r.sent_ns / 1e9 for r in run.records if r.sent_ns is not None]
    assert most(sent, 0.1) == run.summary["pacing"]["max_sends_per_100ms"] == 5
    assert Counter(math.floor(at + 1e-6) for at in sent) == dict.fromkeys(range(10), 16)
    assert min(b - a for a, b in pairwise(sent)) == pytest.approx(0.02, abs=1e-6)
    assert run.summary["pacing"]["blocked_at_gate"] == 500 - 16
    assert run.summary["pacing"]["postponed"] == 0


def test_b10_stages_keep_what_they_could_not_send(play: Play) -> None:
    """100/s x 5 s, then 200/s x 5 s, cap 10, 1 s each: 500 and 1,000 scheduled, 50 sent in each, the rest withdrawn there."""
    epochs = "[{for: 5s, arrivals: {shape: constant, rate: 100/s}}, {for: 5s, arrivals: {shape: constant, rate: 200/s}}]"
    phases = f"{{steady: {{epochs: {epochs}}}, drain: {{for: 2s}}}}"
    run = play(after(1.0), "{shape: constant, rate: 100/s}", phases, "{law: none, inflight: 10, patience: 1m}")
    rows = run.summary["accounting"]["phases"]
    assert (rows["steady-1"]["offered"], rows["steady-2"]["offered"]) == (500, 1000)
    assert (rows["steady-1"]["ok"], rows["steady-2"]["ok"]) == (50, 50)
    assert (rows["steady-1"]["withdrawn"], rows["steady-2"]["withdrawn"]) == (450, 950)
    assert rows["drain"]["offered"] == 0
    for record in run.records:
        first, end = {"steady-1": (0.0, 5.0), "steady-2": (5.0, 10.0)}[record.phase]
        assert first <= record.due_ns / 1e9 < end
        if record.sent_ns is not None:
            assert record.sent_ns / 1e9 < end, "no later stage has it"


def test_b12_the_same_slots_every_time_and_all_of_them_accounted_for(play: Play) -> None:
    """30/s for 3 s, cap 5, 1 s a request: 90 scheduled; 15 sent and 75 not, of which the report says why; three times over."""
    phases, control = "{steady: {for: 3s}, drain: {for: 2s}}", "{law: none, inflight: 5, patience: 500ms}"
    for _ in range(3):
        run = play(after(1.0), "{shape: constant, rate: 30/s}", phases, control)
        total, rates = run.summary["accounting"]["total"], run.summary["rates"]
        assert total["offered"] == 90
        assert total["ok"] == 15
        assert total["shed"] + total["withdrawn"] == 75
        assert total["dropped"] == 0, "a limit held them, and not this tool"
        assert (rates["requested"]["value"], rates["offered"]["value"]) == (pytest.approx(30), pytest.approx(30))
        assert rates["sent"]["value"] == pytest.approx(5)


def test_c01_the_waits_at_the_cap_are_exact(play: Play) -> None:
    """40 at 40/s, cap 4, 190 ms: request k waits 0.09 floor(k/4) s: mean 0.405, last 0.81, last response 1.00 s."""
    control = "{law: none, inflight: 4, patience: 1m}"
    run = play(after(0.19), "{shape: constant, rate: 40/s}", "{steady: {requests: 40}}", control)
    waits = [(r.release_ns - r.due_ns) / 1e9 for r in run.records]
    assert waits == pytest.approx([0.09 * (k // 4) for k in range(40)], abs=2e-9)
    latency = run.summary["latency"]
    assert latency["gate_wait"]["mean"] == pytest.approx(0.405, abs=1e-8)
    assert latency["gate_wait"]["max"] == pytest.approx(0.81, abs=1e-8)
    assert latency["e2e"]["mean"] == pytest.approx(0.19, abs=1e-8)
    assert latency["response"]["max"] == pytest.approx(1.00, abs=1e-8)
    assert latency["lag"]["max"] == 0


def test_c02_a_frozen_server_shows_in_every_request_that_met_it(play: Play) -> None:
    """10/s for 6 s, 10 ms each, frozen from 2 to 5 s: thirty responses of 3.01, 2.91, ... 0.11 s; mean 0.785, p90 2.41 s."""
    run = play(
        lambda at: (5.0 if 2 - 1e-9 <= at < 5 - 1e-9 else at) + 0.01,
        "{shape: constant, rate: 10/s}",
        "{steady: {for: 6s}, drain: {for: 5s}}",
    )
    response = run.summary["latency"]["response"]
    slow = [(r.done_ns - r.due_ns) / 1e9 for r in run.records[20:50]]
    assert slow == pytest.approx([3.01 - 0.1 * k for k in range(30)], abs=1e-8)
    assert response["n"] == 60
    assert response["mean"] == pytest.approx((sum(slow) + 30 * 0.01) / 60, abs=1e-8) == pytest.approx(0.785, abs=1e-8)
    assert response["p90"] == pytest.approx(2.41, abs=1e-8)
