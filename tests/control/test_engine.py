"""Laws in whole runs on the embedded engine, in virtual time. Fixed lengths and even arrivals make the figures sharp."""

from pathlib import Path
from typing import Any

import pytest

from kvbench import units
from kvbench.control import Law
from kvbench.control.follow import Follow
from kvbench.control.law import Ceiling, Signal
from kvbench.control.laws import LAWS
from kvbench.control.pid import Pid, PidRule
from tests.whole import Whole, simulated

RUN = """\
name: laws
seed: 7
target: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090, engine: vllm, faults: FAULTS}
workload: {arrivals: ARRIVALS, prompt: PROMPT, output: OUTPUT, slo: {response_ttft: 2s, tpot: 100ms}}
control: CONTROL
phases: {steady: STEADY}
"""
SETPOINT, BAND = 0.8, 0.05


def run(folder: Path, control: str, arrivals: str, steady: str, **more: str) -> Whole:
    parts = {"FAULTS": "[]", "PROMPT": "512", "OUTPUT": "256"} | more
    text = RUN
    for name, part in {**parts, "CONTROL": control, "ARRIVALS": arrivals, "STEADY": steady}.items():
        text = text.replace(name, part)
    folder.mkdir()
    return simulated(text, folder)


def gauge(whole: Whole, name: str) -> list[float]:
    """Its readings, one a second."""
    return [sample["value"] for sample in whole.lines("samples.jsonl") if sample["name"] == name]


def told(whole: Whole) -> dict[str, Any]:
    return dict(next(event["data"]["law"] for event in whole.lines("events.jsonl") if event["kind"] == "run_end"))


def epochs(*parts: tuple[int, float]) -> str:
    listed = ", ".join(f"{{for: {seconds}s, arrivals: {{shape: constant, rate: {rate}/s}}}}" for seconds, rate in parts)
    return f"{{epochs: [{listed}]}}"


def test_pid_returns_from_a_lull_and_without_anti_windup_it_shoots_over(tmp_path: Path) -> None:
    """9/s are offered, of which 6.4/s fill 80 % of the cache; for 60 s only 1.5/s come, so that the gate holds nothing."""
    steady = epochs((90, 9), (60, 1.5), (90, 9))
    found = {}
    for name, tt in (("with", ""), ("without", ", tt: 1000h")):
        whole = run(tmp_path / name, f"{{law: pid, setpoint: 80%, patience: 2s{tt}}}", "{shape: constant, rate: 9/s}", steady)
        found[name] = gauge(whole, "kv_usage")[151:]
        assert told(whole)["saturated"] >= 50
        assert told(whole)["stale"] == 0
    over = {name: max(usage) - SETPOINT for name, usage in found.items()}
    away = [at for at, usage in enumerate(found["with"], 1) if abs(usage - SETPOINT) > BAND]
    print(f"overshoot {over['with']:+.3f}, settled after {away[-1]} s; without anti-windup {over['without']:+.3f}")
    assert over["with"] <= 0.05
    assert away[-1] <= 30
    assert over["without"] > 0.1


def test_pid_under_a_capacity_shock_beside_none(tmp_path: Path) -> None:
    """Half of the blocks are taken away for 60 s while 5.5/s are offered, which had filled 59 % of the cache."""
    fault = "[{kind: pinned, at: 60s, for: 60s, share: 50%}]"
    above, lost = {}, {}
    for name, control in (("none", "{law: none}"), ("pid", "{law: pid, setpoint: 80%, patience: 2s}")):
        whole = run(tmp_path / name, control, "{shape: constant, rate: 5.5/s}", "{for: 180s}", FAULTS=fault)
        above[name] = sum(usage > 0.95 for usage in gauge(whole, "kv_usage"))
        lost[name] = gauge(whole, "preemptions_total")[-1]
    print(f"seconds above 95 %: pid {above['pid']}, none {above['none']}; preemptions: {lost['pid']:.0f}, {lost['none']:.0f}")
    assert above["pid"] <= 10
    assert above["none"] > 60
    assert lost["pid"] < lost["none"] / 10


def test_queue_feedback_keeps_a_wave_off_the_limit_and_serves_more_in_time(tmp_path: Path) -> None:
    """A Poisson wave whose crest is too much for the cache, with heavy-tailed lengths."""
    lengths = {"PROMPT": "{dist: power_law, alpha: 1.8, min: 128, max: 4096}"}
    lengths["OUTPUT"] = "{dist: power_law, alpha: 1.8, min: 64, max: 2048}"
    wave = "{shape: wave, mean: 4.2/s, amplitude: 80%, period: 2m, process: poisson}"
    above, good = {}, {}
    for name, control in (
        ("none", "{law: none}"),
        ("gradient", "{law: queue_feedback, patience: 1500ms}"),
        ("aimd", "{law: queue_feedback, mode: aimd, patience: 1500ms}"),
    ):
        whole = run(tmp_path / name, control, wave, "{for: 240s}", **lengths)
        usage = gauge(whole, "kv_usage")
        above[name] = sum(one > 0.95 for one in usage) / len(usage)
        good[name] = whole.summary["goodput"]["value"]
    print(f"time above 95 %: {above}; goodput: {good}")
    assert above["none"] > 0.1
    assert max(above["gradient"], above["aimd"]) < 0.01
    assert min(good["gradient"], good["aimd"]) > good["none"]


class Spiral(Pid):
    """What no law may be: it holds the response time to the first token, which contains the wait at the gate it closes."""

    def arm(self, offered: float | None) -> Law:
        seen = Signal("response_ttft_p50", "", units.DURATIONS, "a duration", "1s")
        return Follow(self, seen, PidRule(self, offered), Ceiling(self.kv_limit, self.every))


def test_a_law_that_sees_response_latency_spirals_and_ours_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 requests come at once over 4/s, which this server takes easily. They wait at the gate, which is no fault of the server.
    A law that counts the wait against it closes the gate further and loses nearly all; ours on service ttft lets them through."""
    monkeypatch.setitem(LAWS, "spiral", Spiral)
    burst = "{shape: burst, requests: 200, first: 20s, background: 4/s}"
    served, usage = {}, {}
    for name in ("pid", "spiral"):
        whole = run(tmp_path / name, f"{{law: {name}, signal: ttft, setpoint: 1s, patience: 60s}}", burst, "{for: 180s}")
        served[name] = sum(record.outcome == "ok" for record in whole.records)
        usage[name] = sum(gauge(whole, "kv_usage")[60:120]) / 60
    print(f"served {served}, mean KV usage of the minute after: {usage}")
    assert served["pid"] > 1.5 * served["spiral"]
    assert usage["spiral"] < 0.1 < 0.3 < usage["pid"]
