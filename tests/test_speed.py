"""Our own speed, as ratios measured in one run: absolute times are noise on shared machines."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

from kvbench.clock import Clock
from tests.bench import hot_path
from tests.whole import ROOT, finished, instant, kvbench

OPEN = """
name: open
seed: 1
target: {kind: http, url: "URL", model: m, tokenizer: words}
workload:
  arrivals: {shape: SHAPE, rate: 1000/s}
  prompt: {dist: fixed, value: 12}
  output: {dist: fixed, value: 4}
phases: {steady: {for: 20s}, drain: {for: 5s}}
"""


@pytest.mark.alone
def test_a_whole_run_keeps_up_with_a_bare_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and journal on, every token time kept, beside a client that does nothing else.

    The aim is 0.8, medians of three rounds, and `make bench` prints how far it is met; on a shared machine that figure moved
    between 0.75 and 1.24 within an hour. This guards against a design that cannot come near, such as a task switch or an object
    a token: the best of each (noise only slows) within 0.65, in two rounds or as many more, up to six, as it takes.
    """
    monkeypatch.setattr(hot_path, "CLIENTS", {"kvbench run": hot_path.whole_run, "bare client": hot_path.bare})
    best = {"kvbench run": 0.0, "bare client": 0.0}
    for _ in range(3):
        for name, rates in hot_path.race(2).items():
            best[name] = max(best[name], *rates)
        if best["kvbench run"] >= 0.65 * best["bare client"]:
            return
    pytest.fail(f"requests/s, the best of six rounds: {best}")


def timer_floor() -> float:
    """p99 of how late this machine wakes a process that only sleeps, 1,000 times a second for 5 s."""

    async def work() -> list[float]:
        clock = Clock(asyncio.get_running_loop())
        late = []
        for k in range(1, 5001):
            await clock.sleep_until(k * 1e-3)
            late.append(clock.now() - k * 1e-3)
        return sorted(late)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        late = runner.run(work())
    return late[int(0.99 * len(late))]


@pytest.mark.alone
@pytest.mark.parametrize(("shape", "limit"), [("constant", 0.001), ("poisson", 0.0015)])
def test_sends_at_1000_a_second_leave_on_time(shape: str, limit: float, tmp_path: Path) -> None:
    """Send lag p99 within 1 ms (constant) or 1.5 ms (Poisson) where the machine itself wakes a sleeper in time; on a noisier
    one within three times of what it adds, measured right before and after. The best of three tries: noise only slows."""
    tries = []
    for number in range(3):
        floor = timer_floor()
        with instant(4) as url:
            (tmp_path / "s.yaml").write_text(OPEN.replace("URL", url).replace("SHAPE", shape))
            done = kvbench("run", tmp_path / "s.yaml", "-q", "--out", tmp_path / f"out{number}")
        run = finished(next((tmp_path / f"out{number}").iterdir()))
        assert run.summary["accounting"]["total"]["ok"] > 19_000, done.stdout
        floor = max(floor, timer_floor())
        tries.append((run.summary["latency"]["lag"]["p99"], floor))
        if tries[-1][0] <= max(limit, limit + 3 * (floor - 0.0003)):
            return
    pytest.fail(f"(lag p99, the machine's own) in seconds, three tries: {tries}")


def test_the_bare_client_of_the_benchmark_does_what_it_says() -> None:
    """It reads every token of every answer; its figure would be worth nothing otherwise."""
    with instant(5) as url:
        command = [sys.executable, ROOT / "tests/bench/bare_client.py", "200", "8", "5", url.rsplit(":", 1)[1]]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0
