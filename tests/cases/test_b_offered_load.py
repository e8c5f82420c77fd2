"""Group B of the public cases, end to end: the load that was asked for is the load that was offered, or the run says so."""

import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.stub.stub import DONE, FIN, C, Reply, Stub, U
from tests.whole import Whole, against, instant, kvbench, simulated

HTTP = """
name: case
seed: 7
target: {kind: http, url: "{url}", model: m, tokenizer: words}
workload:
  arrivals: ARRIVALS
  prompt: {dist: fixed, value: 8}
  output: {dist: fixed, value: 2}
phases: PHASES
"""
ANSWER = b"".join([C("a"), C("b"), FIN, U(8, 2), DONE])


def http(arrivals: str, phases: str) -> str:
    return HTTP.replace("ARRIVALS", arrivals).replace("PHASES", phases)


def replies(seconds: float) -> Reply:
    return Reply(steps=[(1000 * seconds, ANSWER)])


def on_instant(arrivals: str, phases: str, folder: Path, *arguments: str | int | Path) -> Whole:
    """A run in a process of its own against the compiled stub, so that nothing shares our loop."""
    from tests.whole import finished

    with instant(*arguments) as url:
        (folder / "scenario.yaml").write_text(http(arrivals, phases).replace("{url}", url))
        done = kvbench("run", folder / "scenario.yaml", "-q", "--out", folder / "results")
    assert "Traceback" not in done.stderr, done.stderr
    return finished(next((folder / "results").iterdir()))


def stub_log(path: Path) -> np.ndarray:
    """(received, first, done) in seconds of the stub's own clock, in order of arrival."""
    rows = np.array([[int(x) for x in line.split()] for line in path.read_text().splitlines()], dtype=np.int64)
    return np.sort(rows, axis=0) / 1e9


@pytest.mark.alone
def test_b01_constant_rate_is_absolute_by_the_servers_own_clock(tmp_path: Path) -> None:
    """200/s for 10 s: 2,000 requests, the last at 9.995 s +- 20 ms after the first, by the server's log."""
    run = on_instant(
        "{shape: constant, rate: 200/s}", "{steady: {for: 10s}, drain: {for: 5s}}", tmp_path, 2, "--log", tmp_path / "log"
    )
    received = stub_log(tmp_path / "log")[:, 0]
    assert len(received) == 2000
    assert run.summary["accounting"]["total"]["offered"] == run.summary["accounting"]["total"]["ok"] == 2000
    assert received[-1] - received[0] == pytest.approx(9.995, abs=0.020)
    assert [r.due_ns for r in run.records] == [k * 5_000_000 for k in range(2000)]


@pytest.mark.alone
def test_b01_poisson_keeps_its_mean_and_its_independence(tmp_path: Path) -> None:
    arrivals = "{shape: poisson, rate: 200/s}"
    run = on_instant(arrivals, "{steady: {for: 10s}, drain: {for: 5s}}", tmp_path, 2, "--log", tmp_path / "log")
    received = stub_log(tmp_path / "log")[:, 0]
    assert abs(len(received) - 2000) < 4 * math.sqrt(2000)
    gaps = np.diff([r.due_ns / 1e9 for r in run.records])
    assert gaps.mean() == pytest.approx(0.005, rel=4 / math.sqrt(len(gaps)))
    counts = np.histogram(received - received[0], bins=np.arange(0, 10.01, 0.5))[0]
    assert 0.3 < counts.var(ddof=1) / counts.mean() < 2.1  # dispersion index 1; 20 bins: chi-square 99.9 % bounds
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 4 / math.sqrt(len(gaps))


@pytest.mark.alone
@pytest.mark.parametrize(
    ("arrivals", "integral"),
    [
        (
            "{shape: wave, mean: 100/s, amplitude: 80%, period: 4s}",
            lambda t: 100 * t + 80 * 4 / (2 * math.pi) * (1 - math.cos(2 * math.pi * t / 4)),
        ),
        (
            "{shape: stair, start: 50/s, step: 20%, every: 2s, process: poisson}",
            lambda t: sum(50 * 1.2**k * min(2.0, max(0.0, t - 2 * k)) for k in range(8)),
        ),
    ],
    ids=["wave", "stair"],
)
def test_shapes_follow_the_integral_of_their_rate(arrivals: str, integral: object, tmp_path: Path) -> None:
    """Counts at the server within 4 sigma of the integral of rate(t), in every second."""
    on_instant(arrivals, "{steady: {for: 8s}, drain: {for: 5s}}", tmp_path, 1, "--log", tmp_path / "log")
    lines = [line for line in (next((tmp_path / "results").iterdir()) / "requests.jsonl").read_text().splitlines()]
    import json

    sent = sorted(json.loads(line)["sent_ns"] / 1e9 for line in lines)
    received = stub_log(tmp_path / "log")[:, 0]
    assert len(received) == len(sent)
    start = received[0] - sent[0]  # the run's zero on the server's clock
    for second in range(8):
        expected = integral(second + 1) - integral(second)  # type: ignore[operator]  # a lambda of the parameters
        seen = int(((received - start >= second) & (received - start < second + 1)).sum())
        assert abs(seen - expected) <= 4 * math.sqrt(expected), f"second {second}: {seen} for {expected:.1f}"


def test_b02_a_rate_that_was_not_reached_invalidates_the_run(tmp_path: Path) -> None:
    """A stall of 2 ms per send at 5,000/s asked: at most 500/s leave; requested, offered and sent stand side by side."""
    import time

    from kvbench.target.http import HttpTarget

    plain = HttpTarget.encode

    def slow(self: HttpTarget, request: object) -> bytes:
        time.sleep(0.002)
        return plain(self, request)  # type: ignore[arg-type]  # the wrapped method checks it

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HttpTarget, "encode", slow)
        run = against(Stub(replies(0)), http("{shape: constant, rate: 5000/s}", "{steady: {for: 11s}}"), tmp_path)
    rates = run.summary["throughput"]["rates"] if "rates" in run.summary["throughput"] else run.summary["throughput"]
    assert run.summary["verdict"]["verdict"] == "INVALID"
    assert run.code == 4
    assert "requests_requested" in str(rates) or "requested" in str(rates)


@pytest.mark.parametrize("n", [1, 2, 3, 250])
def test_b03_concurrency_n_holds_n_in_flight_at_the_server(n: int, tmp_path: Path) -> None:
    stub = Stub(replies(0.3))
    run = against(stub, http(f"{{shape: closed, concurrency: {n}}}", "{steady: {for: 2s}, drain: {for: 2s}}"), tmp_path)
    assert stub.max_in_flight == n
    peak = max(line["counts"]["inflight"] for line in run.lines("windows.jsonl"))
    assert peak == n


def test_b06_a_freed_place_is_refilled_within_5_ms(tmp_path: Path) -> None:
    times = itertools.cycle([0.1, 0.1, 0.1, 1.0])
    run = against(
        Stub(lambda seen: replies(next(times))), http("{shape: closed, concurrency: 4}", "{steady: {requests: 40}}"), tmp_path
    )
    records = run.records
    assert max(r.end_ns for r in records) / 1e9 <= 4.2
    starts, ends = sorted(r.sent_ns for r in records)[4:], sorted(r.end_ns for r in records)[:36]
    assert np.median([s - e for s, e in zip(starts, ends, strict=True)]) < 5e6


def test_b10_what_a_stage_did_not_send_stays_with_that_stage(tmp_path: Path) -> None:
    """Stages of 100/s and 200/s for 5 s each behind a cap of 10, 1 s a request, in virtual time on a made-up engine's null target."""
    phases = """
  steady:
    epochs:
      - {for: 5s, arrivals: {shape: constant, rate: 100/s}}
      - {for: 5s, arrivals: {shape: constant, rate: 200/s}}
  drain: {for: 5s}
control: {law: none, inflight: 10, patience: 1m}"""
    run = against(Stub(replies(0.98)), http("{shape: constant, rate: 100/s}", phases), tmp_path)
    by_phase = {name: Counter(r.outcome for r in run.records if r.phase == name) for name in ("steady-1", "steady-2")}
    assert sum(by_phase["steady-1"].values()) == 500
    assert sum(by_phase["steady-2"].values()) == 1000
    assert 40 <= by_phase["steady-1"]["ok"] <= 60
    assert by_phase["steady-1"]["withdrawn"] + by_phase["steady-1"]["ok"] == 500
    assert all(r.sent_ns is None for r in run.records if r.outcome == "withdrawn")


def test_b11_a_stalled_start_sends_late_and_says_so(tmp_path: Path) -> None:
    """500 ms of stall at the start, constant 50/s: the 25 late slots leave at once, each with its lag; no second silently has 70."""
    import time

    async def stall() -> None:
        import asyncio

        await asyncio.sleep(0)
        for _ in range(400):  # as soon as the first request is under way
            if stub.log and stub.posts:
                time.sleep(0.5)
                return
            await asyncio.sleep(0.005)

    stub = Stub(replies(0))
    run = against(stub, http("{shape: constant, rate: 50/s}", "{steady: {for: 3s}, drain: {for: 1s}}"), tmp_path, also=stall)
    lags = sorted((r.sent_ns - r.release_ns) / 1e9 for r in run.records)
    assert len(lags) == 150
    assert sum(lag > 0.02 for lag in lags) >= 20, "late sends are measured, not hidden"
    assert lags[-1] > 0.4
    offered = Counter(r.due_ns // 10**9 for r in run.records)
    assert offered == {0: 50, 1: 50, 2: 50}
    assert run.summary["verdict"]["verdict"] == "INVALID"  # lag p99 above 50 ms


def test_b12_open_loop_behind_a_cap_offers_the_same_every_time(tmp_path: Path) -> None:
    """30/s for 3 s, cap 5, 1 s a request: 90 offered on every run; what was not sent is counted."""
    phases = "{steady: {for: 3s}, drain: {for: 3s}}\ncontrol: {law: none, inflight: 5, patience: 1s}"
    run = against(Stub(replies(1.0)), http("{shape: constant, rate: 30/s}", phases), tmp_path)
    total = run.summary["accounting"]["total"]
    assert total["offered"] == 90
    assert total["ok"] + total["shed"] + total["withdrawn"] == 90
    assert total["shed"] > 0
    assert run.summary["accounting"]["total"]["dropped"] == 0


@pytest.mark.parametrize("seed", range(20))
def test_b17_the_bound_that_fired_is_named(seed: int, tmp_path: Path) -> None:
    """Poisson 5/s, 20 s, 100 requests, 20 seeds: duration or count, and the rate over the true length."""
    text = """
target: {kind: sim, model: llama-3.1-8b, hardware: h100}
workload:
  arrivals: {shape: poisson, rate: 5/s}
  prompt: {dist: fixed, value: 20}
  output: {dist: fixed, value: 4}
phases: {steady: {for: 20s, requests: 100}, drain: {for: 5s}}
"""
    run = simulated(text, tmp_path, f"seed={seed}")
    count = len(run.records)
    stop = run.summary["stop"]
    assert stop["reason"] == ("count" if count == 100 and stop["steady_seconds"] < 20 else "duration")
    assert stop["steady_seconds"] <= 20.0 + 1e-6
    if stop["reason"] == "duration":
        assert stop["steady_seconds"] == pytest.approx(20.0)
