"""The step test: a lag is found again, SIMC by hand, and gains that hold the engine they were measured on."""

from pathlib import Path

import numpy as np
import pytest

from kvbench.cli.tune import as_pid
from kvbench.control.pid import Pid
from kvbench.plan.tune import Bench, Lag, climb, fit, prepare, simc, tune
from kvbench.scenario import load
from tests.whole import kvbench, simulated

FIXED = """\
name: fixed
target: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090, engine: vllm}
workload: {arrivals: {shape: constant, rate: 9/s}, prompt: PROMPT, output: OUTPUT}
phases: {steady: {for: 120s}}
"""


def scenario(folder: Path, prompt: int, output: int, also: str = "") -> Path:
    file = folder / "fixed.yaml"
    file.write_text(FIXED.replace("PROMPT", str(prompt)).replace("OUTPUT", str(output)) + also)
    return file


@pytest.mark.parametrize(("gain", "tau", "dead"), [(0.1, 8.0, 2.5), (0.02, 20.0, 0.0), (1.5, 3.0, 4.0)])
def test_a_lag_is_found_again(gain: float, tau: float, dead: float) -> None:
    times = np.arange(1.0, 121.0)
    answer = 2.0 * gain * (1 - np.exp(-np.maximum(times - dead, 0) / tau))
    found = fit(answer, 2.0)
    assert (found.gain, found.tau) == pytest.approx((gain, tau), rel=1e-3)
    assert found.dead == pytest.approx(dead, abs=0.02)
    assert found.explained > 0.9999


def test_a_lag_is_found_in_noise() -> None:
    times, rng = np.arange(1.0, 121.0), np.random.default_rng(1)
    found = fit(0.3 * (1 - np.exp(-np.maximum(times - 2, 0) / 8)) + rng.normal(0, 0.03, 120), 3.0)
    assert (found.gain, found.tau, found.dead) == pytest.approx((0.1, 8, 2), rel=0.25)
    assert 0.7 < found.explained < 0.95


def test_nothing_is_explained_by_a_lag_where_nothing_answers() -> None:
    assert fit(np.random.default_rng(1).normal(0, 1, 120), 1.0).explained < 0.3
    assert fit(np.zeros(60), 1.0).explained == 0


def test_simc_by_hand() -> None:
    """theta 1.5 + 0.5; lambda = tau = 10: kp = 10 / (0.1 x 12), ti = 10. With tau 1 lambda is theta: kp = 1 / (0.1 x 4)."""
    assert simc(Lag(0.1, 10.0, 1.5, 1.0), 1.0) == pytest.approx((10 / 1.2, 10.0))
    assert simc(Lag(0.1, 1.0, 1.5, 1.0), 1.0) == pytest.approx((2.5, 1.0))


def test_tuned_gains_hold_the_engine_they_were_measured_on(tmp_path: Path) -> None:
    """The printed block is pasted as it is. 9/s are offered: usage comes to 80 % and stays."""
    file = scenario(tmp_path, 512, 256)
    told = kvbench("laws", "tune", file)
    assert told.returncode == 0, told.stderr
    whole = simulated(file.read_text() + told.stdout, tmp_path)
    usage = [sample["value"] for sample in whole.lines("samples.jsonl") if sample["name"] == "kv_usage"]
    print(told.stdout, f"highest {max(usage):.3f}, from second 60 on {min(usage[60:]):.3f} to {max(usage[60:]):.3f}")
    assert max(usage) < 0.95
    assert all(abs(one - 0.8) <= 0.05 for one in usage[60:])


def test_a_tuned_nominal_rate_is_what_fills_the_set_point(tmp_path: Path) -> None:
    """At that rate, open loop, usage settles near 80 %: it rises steeply there, so within 10 points."""
    found = tune(*prepare(load(scenario(tmp_path, 1024, 128))), 0.8, 1.0)
    text = FIXED.replace("PROMPT", "1024").replace("OUTPUT", "128").replace("9/s", f"{found.nominal}/s")
    usage = [one["value"] for one in simulated(text, tmp_path).lines("samples.jsonl") if one["name"] == "kv_usage"]
    assert np.mean(usage[60:]) == pytest.approx(0.8, abs=0.1)


def test_two_nodes_take_twice_the_rate(tmp_path: Path) -> None:
    """The step test is of the whole cluster, and not of what goes wrong in it."""
    file, faults = scenario(tmp_path, 1024, 128), "target.faults=[{kind: refuse, at: 0s, share: 100%}]"
    rates = [climb(Bench(*prepare(load(file, [each, faults]))), 0.8)[0] for each in ("seed=7", "target.cluster={replicas: 2}")]
    assert rates[1] == pytest.approx(2 * rates[0], rel=0.05)


@pytest.mark.parametrize(
    ("prompt", "output", "also", "says"),
    [
        (4000, 1, "", "short of compute before its cache"),
        (512, 256, "control: {law: pid, signal: waiting, setpoint: 8}\n", "which is no lag"),
    ],
)
def test_what_cannot_be_tuned_is_said(tmp_path: Path, prompt: int, output: int, also: str, says: str) -> None:
    told = kvbench("laws", "tune", scenario(tmp_path, prompt, output, also))
    assert told.returncode == 2
    assert says in told.stderr
    assert "Traceback" not in told.stderr


def test_a_server_is_not_stepped(tmp_path: Path) -> None:
    told = kvbench("laws", "tune", scenario(tmp_path, 512, 256), "--set", "target={kind: http, url: 'http://127.0.0.1:1'}")
    assert told.returncode == 2
    assert "not the embedded engine" in told.stderr


def test_the_block_keeps_what_else_the_scenarios_control_says(tmp_path: Path) -> None:
    """patience, inflight and the limits go along, in units that read back as the same values."""
    also = "control: {law: queue_feedback, patience: 1500ms, inflight: 40, min: 0.5/s, kv_limit: 95%, up: 7%, retry_after: 90s}\n"
    file = scenario(tmp_path, 512, 256, also)
    told = kvbench("laws", "tune", file)
    assert told.returncode == 0, told.stderr
    before = load(file).control
    pasted = scenario(tmp_path, 512, 256, told.stdout)
    after = load(pasted).control
    assert isinstance(after, Pid)
    for key in ("patience", "inflight", "min", "kv_limit", "retry_after"):
        assert getattr(after, key) == getattr(before, key), key
    assert "\n  up:" not in told.stdout  # pid has no such key
    assert "\n  over:" not in told.stdout  # nor is a default written out


def test_a_slow_control_period_is_tuned_for(tmp_path: Path) -> None:
    """10 s is longer than pid's own ti: the block is one that loads."""
    assert as_pid(load(scenario(tmp_path, 512, 256, "control: {law: none, every: 10s}\n")).control, 0.8).every == 10
