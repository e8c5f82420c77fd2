"""Laws, phases, faults and the watch all at once, and where nothing goes on any more: every run ends, adds up and can be read."""

import json
import random
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvbench.level import BLANK, Ladder
from kvbench.plan.episode import offers
from kvbench.report import render
from kvbench.scenario import load
from kvbench.watch import WatchSpec
from tests.test_watch import LENGTH, Window, served, slow, steady, watching, window
from tests.whole import Whole, kvbench, simulated

SIM = "{kind: sim, model: llama-3.1-8b, hardware: rtx-4090, FAULTS}"
TEXT = """\
name: hostile
seed: 5
target: TARGET
workload: {arrivals: ARRIVALS, prompt: PROMPT, output: 20}
control: LAW
phases: PHASES
"""
LAWS = (
    "{law: none, inflight: 4, patience: 100ms}", "{law: bucket, rate: 3/s}", "{law: pid, setpoint: 60%, every: 3s}",
    "{law: pid, signal: ttft, setpoint: 1ns}", "{law: queue_feedback}", "{law: queue_feedback, mode: aimd, kv_limit: 50%}",
    "{law: learned, explore: 100%}", "{law: queue_feedback, every: 60s, over: 600s}",
)  # fmt: skip
FAULTS = (
    "faults: [{kind: slow, at: 0s, for: 1ns, factor: 1000}, {kind: slow, at: 14s, for: 8s, factor: 6},"
    " {kind: refuse, at: 4s, for: 6s, share: 50%}, {kind: refuse, at: 5s, for: 1s, share: 100%},"
    " {kind: pinned, at: 10s, for: 6s, share: 100%}, {kind: pinned, at: 12s, for: 1s, share: 50%},"
    " {kind: stall, at: 20s, for: 2s}, {kind: stall, at: 21s, for: 2s}, {kind: stall, at: 1h}]"
)
EVERYTHING = """\
name: everything
seed: 5
target: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090, FAULTS}
workload: {arrivals: {shape: chaos, min: 1/s, max: 10/s, every: 5s}, prompt: {dist: lognormal, median: 400, sigma: 1, max: 4000},
  output: {dist: uniform, min: 1, max: 200}, prefixes: {groups: 5, tokens: 256}, sessions: {turns: 3, think: 1s}}
control: LAW
watch: {metrics: [ttft_p50, kv_usage, hit_rate], window: 1s, action: rollback, hold: 2s, learn: 4, sigma: 1, confirm: 1, of: 1}
phases:
  baseline: {prompts: 2, idle_power: 300ms}
  warmup: {prefill: 1%}
  steady: {for: 17700ms, snapshot: 1s, epochs: [{for: 7500ms, arrivals: {shape: poisson, rate: 4/s}},
    {for: 1s, arrivals: {shape: closed, concurrency: 8}}]}
  stress: {step: 50%, every: 1s, max: 1.9x}
  drain: {for: 2s}
"""


def text(phases: str, faults: str = "", arrivals: str = "{shape: closed, concurrency: 3}", **parts: str) -> str:
    found = {"TARGET": SIM, "ARRIVALS": arrivals, "PROMPT": "100", "LAW": "{law: none}", "PHASES": phases, **parts}
    whole = TEXT
    for key, value in found.items():
        whole = whole.replace(key, value)
    return whole.replace(", FAULTS", f", faults: [{faults}]" if faults else "")


def sound(whole: Whole) -> None:
    """What holds of every run: a documented exit code, accounts that add up, stamps in order, strict JSON, a readable report."""
    assert whole.code in (0, 3, 4, 5, 6), whole.why
    total = whole.summary["accounting"]["total"]
    assert total["offered"] == total["admitted"] + total["shed"] + total["dropped"] + total["withdrawn"] == len(whole.records)
    json.dumps(whole.summary, allow_nan=False)
    for record in whole.records:
        stamps = (record.due_ns, record.release_ns, record.sent_ns, record.written_ns, record.first_ns, record.done_ns)
        known = [stamp for stamp in (*stamps, record.end_ns) if stamp is not None]
        assert all(before <= after for before, after in pairwise(known)), record
    shown = StringIO()
    render.terminal(whole.summary, Console(file=shown, width=100))
    assert not {"nan", "inf", "None"} & set(shown.getvalue().replace(",", " ").split())


@pytest.mark.parametrize("law", LAWS)
def test_everything_at_once_is_sound_and_the_same_twice(law: str, tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        runs.append(simulated(EVERYTHING.replace("FAULTS", FAULTS).replace("LAW", law), tmp_path / name))
    sound(runs[0])
    for file in ("requests.jsonl", "events.jsonl"):
        assert (runs[0].directory / file).read_bytes() == (runs[1].directory / file).read_bytes()


def test_requests_that_are_due_within_one_nanosecond_are_not_sent_before_they_are_due(tmp_path: Path) -> None:
    """Clumps of a heavy-tailed shape: 1e-9 s is the clock's step, and what is due within it goes together."""
    arrivals = "{shape: gamma, rate: 20/s, cv: 5}"
    whole = simulated(text("{steady: {for: 30s}}", arrivals=arrivals, PROMPT="1"), tmp_path)
    due = sorted(record.due_ns for record in whole.records)
    assert sum(b - a <= 1 for a, b in pairwise(due)) > 3, "there are such"
    sound(whole)


# ---- nothing goes on any more


@pytest.mark.parametrize("fault", ["{kind: stall, at: 2s}", "{kind: pinned, at: 2s, share: 100%}"])
def test_a_phase_that_waits_for_a_server_that_hangs_for_good_ends_after_a_clients_timeout(fault: str, tmp_path: Path) -> None:
    """Virtual time would pass for ever. Three users, six requests: three answers before the fault, three timeouts."""
    whole = simulated(text("{steady: {requests: 6}}", fault), tmp_path)
    over = [(record.outcome, record.cause) for record in whole.records if record.outcome != "ok"]
    assert set(over) <= {("timeout", "idle"), ("timeout", "first")}
    assert len(over) >= 3 or whole.summary["stop"]["seconds"] < 3
    assert whole.summary["stop"]["reason"] == "count"
    sound(whole)


def test_a_request_on_a_hung_engine_waits_600_seconds_from_when_it_was_sent_or_the_engine_stopped(tmp_path: Path) -> None:
    phases = "{warmup: {policy: fixed, requests: 3}, steady: {for: 5s}, drain: {for: 1s}}"
    whole = simulated(text(phases, "{kind: stall, at: 0s}"), tmp_path)
    warm = [record for record in whole.records if record.phase == "warmup"]
    assert [(r.outcome, r.cause, r.end_ns - r.sent_ns) for r in warm] == [("timeout", "first", 600 * 10**9)] * 3
    assert {record.outcome for record in whole.records if record.phase == "steady"} == {"cancelled"}
    sound(whole)


def test_an_engine_that_hangs_for_a_while_lets_its_requests_wait(tmp_path: Path) -> None:
    """Its end is known, so nobody gives up: a model of a server, and no client's patience."""
    whole = simulated(text("{steady: {requests: 3}}", "{kind: stall, at: 100ms, for: 15m}"), tmp_path)
    assert [record.outcome for record in whole.records] == ["ok"] * 3
    assert whole.summary["stop"]["seconds"] > 900


def test_a_ladder_that_fell_ends_where_the_watch_sees_nothing_any_more(tmp_path: Path) -> None:
    """After the fall no window has a value: no healthy one will ever let it rise, and a stress phase has no other end."""
    watch = WatchSpec.model_validate({"metrics": ["tpot_p50"], "action": "rollback"})
    level = watch.arm().level()
    level.begin(-1.0, Ladder(0.2, 10_000.0, 2.0))
    ill = served(steady, 330, 1, slow(300.0))
    quiet = [window(start, 8.0, {"tpot_p50": None}, 0) for start in _starts(ill[-1].end, 2 * BLANK)]
    decisions, _ = watching([*ill, *quiet], level, metrics=["tpot_p50"], action="rollback")
    fell = next(d.data["end"] for d in decisions if d.data["action"] == "rollback")
    (last,) = [d.data for d in decisions if d.data["action"] == "gave_up"]
    assert last["end"] == pytest.approx(fell + BLANK * LENGTH)
    assert level.done == f"level 0.8 is kept: {BLANK} windows in a row could not be judged after its fall" == last["why"]


def _starts(since: float, count: int) -> list[float]:
    return [since + place * LENGTH for place in range(count)]


def test_steady_waits_for_as_long_as_it_lasts() -> None:
    ill = served(steady, 330, 1, slow(300.0))
    quiet: list[Window] = [window(start, 8.0, {"tpot_p50": None}, 0) for start in _starts(ill[-1].end, 2 * BLANK)]
    decisions, _ = watching([*ill, *quiet], metrics=["tpot_p50"], action="rollback")
    assert [d.data["action"] for d in decisions if d.data["action"] in ("rollback", "gave_up")] == ["rollback"]


# ---- laws on what they do not suit


def test_compare_says_which_law_does_not_go_with_the_control_period(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(text("{steady: {for: 12s}}", LAW="{law: none, every: 60s}"))
    done = kvbench("laws", "compare", tmp_path / "s.yaml", "--law", "pid", "--out", tmp_path / "out")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "--law pid: ti: 6 s is below the control period" in done.stderr


def test_tune_says_so_where_the_engine_takes_no_request(tmp_path: Path) -> None:
    """A rate that is raised until the cache fills would be raised for ever."""
    (tmp_path / "s.yaml").write_text(text("{steady: {for: 12s}}", arrivals="{shape: constant, rate: 2/s}", PROMPT="900000"))
    done = kvbench("laws", "tune", tmp_path / "s.yaml")
    assert done.returncode == 2
    assert "the engine refuses its requests (context_too_long)" in done.stderr


def test_a_set_point_that_pid_does_not_take_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(text("{steady: {for: 12s}}", arrivals="{shape: constant, rate: 2/s}"))
    done = kvbench("laws", "tune", tmp_path / "s.yaml", "--setpoint", "150%")
    assert done.returncode == 2
    assert done.stderr.strip().endswith("cannot be tuned: setpoint: 150 % is not below kv_limit, 90 %")


def test_training_takes_no_more_requests_than_steady_offers(tmp_path: Path) -> None:
    """All at once at an infinite rate: only the count ends them."""
    file = tmp_path / "s.yaml"
    file.write_text(text("{steady: {requests: 20}}", arrivals="{shape: constant, rate: inf}"))
    assert len(offers(load(file), 10.0)) == 20


# ---- any valid scenario


def drawn(seed: int) -> dict[str, Any]:
    """Settings in place of EVERYTHING's own, drawn from values at the edges of what is allowed."""
    pick = random.Random(seed).choice
    epochs = [{"for": pick(["1s", "3s"]), "arrivals": {"shape": "burst", "requests": pick([1, 60]), "every": "1s"}}]
    return {
        "seed": pick([0, 2**62]),
        "target.settings": {"gpu_memory_utilization": pick(["74%", "80%", "95%"]), "max_num_seqs": pick([1, 4, 256])},
        "workload.prompt": pick([1, 64, 6000]),
        "phases.baseline": pick([None, {"prompts": 1}]),
        "phases.warmup": pick(
            [
                {"policy": "none"}, {"policy": "on_demand"}, {"policy": "fixed", "for": "300ms"},
                {"policy": "prefill", "fill": "100%", "max": "1s"}, {"policy": "prefill", "fill": "100%", "requests": 1},
                {"policy": "dynamic", "min": "0s", "max": "12s", "batch": "1s"},
            ]
        ),
        "phases.steady": pick([{"for": "1s"}, {"for": "500ms"}, {"requests": 1}, {"for": "6700ms", "epochs": epochs}]),
        "phases.stress": pick([None, {"step": pick(["10%", "100%"]), "every": "1s", "max": pick(["1.01x", "1.3x"])}]),
        "phases.drain.for": pick(["0s", "2s"]),
        "watch.window": pick(["1s", "60s"]),
        "watch.tries": pick([0, 5]),
        "stop": pick([[], [{"response_ttft_p99": "> 1s"}], [{"kv_usage": ">= 90%", "for": "2s"}]]),
    }  # fmt: skip


@pytest.mark.parametrize("seed", [seed if seed < 8 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(60)])
def test_any_valid_scenario_ends_and_is_sound(seed: int, tmp_path: Path) -> None:
    law = random.Random(seed).choice(LAWS)
    sets = [f"{key}={json.dumps(value)}" for key, value in drawn(seed).items()]
    sound(simulated(EVERYTHING.replace("FAULTS", FAULTS).replace("LAW", law), tmp_path, *sets))
