"""The phases as a scenario names them: what is read, what is refused, how epochs take turns, what a plan says of each."""

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from kvbench import units
from kvbench.agenda import build_phases
from kvbench.cli.check import ROWS, lines
from kvbench.forecast import forecast
from kvbench.level import Ladder
from kvbench.scenario import Scenario, ScenarioError, load, schema
from kvbench.timetable import Epoch, Prefill, Steady, Stress

SIM = "target: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090}\n"
FLAT = SIM + "workload: {arrivals: {shape: constant, rate: 2/s}, prompt: 100, output: 10}\nphases: {steady: {for: 60s}}\n"
HTTP = "target={kind: http, url: http://a}"


def scenario(folder: Path, *overrides: str, text: str = FLAT) -> Scenario:
    (folder / "s.yaml").write_text(text)
    return load(folder / "s.yaml", overrides)


def refusal(folder: Path, *overrides: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        scenario(folder, *overrides)
    return str(caught.value)


def warned(folder: Path, *overrides: str) -> str:
    return "\n".join(forecast(scenario(folder, *overrides))["warnings"])


# ---- what is read


def test_multiples() -> None:
    assert Stress.model_validate({"step": "20%", "every": "1m", "max": "5x"}, context={"text": True}).max == 5
    assert units.parse("2.5x", units.MULTIPLES, "a multiple", "5x") == 2.5
    assert [units.multiple(value) for value in (5.0, 2.5, None)] == ["5x", "2.5x", "-"]
    for wrong in ("5", 5, "x", "5 times", "0x", "-1x", "nanx"):
        with pytest.raises(ValidationError):
            Stress.model_validate({"step": "20%", "every": "1m", "max": wrong}, context={"text": True})


def test_the_short_form_of_a_prefill(tmp_path: Path) -> None:
    short = scenario(tmp_path, "phases.warmup={prefill: 50%, content: own, concurrency: 2}")
    long = scenario(tmp_path, "phases.warmup={policy: prefill, fill: 50%, content: own, concurrency: 2}")
    assert short.phases.warmup == long.phases.warmup == Prefill.model_validate({"fill": 0.5, "concurrency": 2})
    written = short.resolved()["phases"]["warmup"]
    assert (written["policy"], written["fill"], "prefill" in written) == ("prefill", 0.5, False)
    tree = {
        "target": {"kind": "null"},
        "workload": {"arrivals": {"shape": "constant", "rate": "2/s"}, "prompt": 5, "output": 5},
        "phases": {"warmup": {"prefill": "50%"}, "steady": {"for": "9s"}},
    }
    jsonschema.validate(tree, schema())
    tree["phases"]["warmup"] = {"policy": "prefill", "fill": "50%"}  # type: ignore[index]
    jsonschema.validate(tree, schema())
    for wrong in ({"prefill": "50%", "policy": "fixed"}, {"prefil": "50%"}, {"fill": "50%"}):
        tree["phases"]["warmup"] = wrong  # type: ignore[index]
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(tree, schema())


def test_every_phase_in_its_order(tmp_path: Path) -> None:
    found = scenario(
        tmp_path, "phases.baseline={prompts: 7, idle_power: 10s}", "phases.warmup={prefill: 50%, max: 2m}",
        "phases.steady.snapshot=20s", "phases.stress={step: 20%, every: 30s, max: 2x}", "phases.drain={for: 1m}",
    )  # fmt: skip
    idle, baseline, warmup, steady, stress, drain = build_phases(found, 1)
    assert [(p.name, p.kind) for p in (idle, baseline, warmup)] == [
        ("idle", "baseline"), ("baseline", "baseline"), ("warmup", "warmup"),
    ]  # fmt: skip
    assert (idle.source, idle.seconds) == (None, 10.0)
    assert (baseline.requests, baseline.seconds) == (7, math.inf)
    assert baseline.source is not None
    assert baseline.source(0.0).wanted == 1
    assert warmup.until is not None
    assert warmup.seconds == 120
    assert (steady.kind, steady.snapshot, stress.snapshot) == ("steady", 20, None)
    assert (stress.kind, stress.seconds, stress.ladder) == ("stress", math.inf, Ladder(0.2, 30.0, 2.0))
    assert drain.kind == "drain"
    assert [p.controlled for p in (idle, baseline, warmup, steady, stress)] == [False, False, False, True, True]
    json.dumps([p.plan() for p in (idle, baseline, warmup, steady, stress, drain)], allow_nan=False)
    alone = build_phases(scenario(tmp_path, "phases.baseline={prompts: 7}"), 1)
    assert [p.name for p in alone] == ["baseline", "steady"]  # nothing to wait for before it


# ---- epochs


def epoch(seconds: float, rate: float) -> Epoch:
    return Epoch.model_validate({"for": seconds, "arrivals": {"shape": "poisson", "rate": rate}})


def test_epochs_take_turns_until_the_time_is_over() -> None:
    parts = [epoch(300.0, 1.0), epoch(120.0, 2.0)]
    assert Steady.model_validate({"epochs": parts}).turns() == [(0, 300.0), (1, 120.0)]
    assert Steady.model_validate({"for": 1000.0, "epochs": parts}).turns() == [(0, 300), (1, 120), (0, 300), (1, 120), (0, 160)]
    night = Steady.model_validate({"for": 8 * 3600.0, "epochs": [epoch(300.0, 1.0)]})
    assert (len(night.turns()), night.seconds()) == (96, 8 * 3600.0)
    tenths = Steady.model_validate({"for": 0.9, "epochs": [epoch(0.1, 1.0), epoch(0.2, 1.0)]})
    assert len(tenths.turns()) == 6  # float arithmetic leaves no sliver
    assert Steady.model_validate({"for": 5.0}).turns() == []


EPOCHS = """epochs: [
  {for: 10s, arrivals: {shape: constant, rate: 1/s}},
  {for: 20s, arrivals: {shape: closed, concurrency: 3}, classes: {long: {prompt: 400, output: 10}}}]"""


def test_each_turn_is_a_phase_and_the_plan_has_a_row_for_it(tmp_path: Path) -> None:
    found = scenario(tmp_path, f"phases.steady={{for: 40s, snapshot: 5s, {EPOCHS}}}")
    phases = build_phases(found, 1)
    assert [(p.name, p.seconds, p.expected) for p in phases] == [
        ("steady-1", 10.0, 10.0), ("steady-2", 20.0, None), ("steady-3", 10.0, 10.0),
    ]  # fmt: skip
    assert {p.snapshot for p in phases} == {5.0}
    plan = forecast(found)
    assert [(row["name"], row["kind"], row["requests"]) for row in plan["phases"]] == [
        ("steady-1", "steady", 10), ("steady-2", "steady", None), ("steady-3", "steady", 10),
    ]  # fmt: skip
    assert plan["tokens"]["prompt_mean"] == pytest.approx((20 * 100 + 20 * 400) / 40)  # by time, where answers decide how many


def test_the_plan_weighs_epochs_by_their_requests(tmp_path: Path) -> None:
    ten = "{for: 10s, arrivals: {shape: constant, rate: 1/s}}"
    forty = "{for: 10s, arrivals: {shape: constant, rate: 4/s}, classes: {long: {prompt: 600, output: 10}}}"
    plan = forecast(scenario(tmp_path, f"phases.steady={{epochs: [{ten}, {forty}]}}"))
    assert plan["tokens"]["prompt_mean"] == pytest.approx((10 * 100 + 40 * 600) / 50)
    assert plan["context"]["longest"] == 610
    assert plan["steady"]["requests"] == 50


def test_a_night_of_epochs_prints_short_and_whole_as_data(tmp_path: Path) -> None:
    five = "{for: 5m, arrivals: {shape: poisson, rate: 1/s}}"
    plan = forecast(scenario(tmp_path, f"phases.steady={{for: 8h, epochs: [{five}]}}"))
    assert len(plan["phases"]) == 96
    printed = [line for line in lines(plan) if line.startswith(("  steady-", "  ... "))]
    assert len(printed) == ROWS
    assert printed[-4] == f"  ... and {96 - ROWS + 1} more like these ..."
    assert printed[-1].startswith("  steady-96 ")


# ---- what is refused


CLASS = "classes: {a: {prompt: 9, output: 9}}"


@pytest.mark.parametrize(
    ("overrides", "key", "word"),
    [
        (["phases.steady={requests: 9, EPOCHS}"], "phases.steady.requests", "leave out its own bounds but `for`"),
        (["phases.steady={tokens: 9, EPOCHS}"], "phases.steady.tokens", "leave out its own bounds but `for`"),
        (["phases.steady={for: 29s, EPOCHS}"], "phases.steady.for", "shorter than one round of the epochs, 30 s"),
        (["phases.steady={for: 300h, EPOCHS}"], "phases.steady.for", "makes 72,000 epochs: at most 10,000"),
        (["phases.steady.epochs=[{for: 5s, arrivals: {shape: constant, rate: 1/s}, classes: {a: {}}}]"],
         "phases.steady.epochs[0].classes.a", "exactly one of prompt, source and trace"),
        (["phases.steady={epochs: [{for: 5s, arrivals: {shape: constant, rate: 1/s}, classes: {a b: {prompt: 9, output: 9}}}]}"],
         "phases.steady.epochs[0].classes.a b", "letters, digits"),
        (["phases.steady={epochs: [{for: 5s, arrivals: {shape: constant, rate: 1/s}, classes: {a: {prompt: 9, output: 9, "
          "weight: 50%}}}]}"], "phases.steady.epochs[0].classes", "must add up to 100 %"),
        (["phases.steady={epochs: [{for: 5s, arrivals: {shape: constant, rate: inf}}]}"],
         "phases.steady.epochs[0].arrivals", "an infinite rate"),
        (["phases.steady={epochs: [{for: 5s, arrivals: {shape: constant, rate: 1/s}, classes: {default: {prompt: 9, output: 9, "
          "slo: {ttft: 1s}}}}]}"], "phases.steady.epochs[0].classes.default", "other limits (slo)"),
        (["workload.arrivals.rate=inf", "phases.steady.requests=9", "phases.warmup={policy: dynamic}"], "phases.warmup",
         "an infinite rate"),
        (["workload.arrivals.rate=inf", "phases.steady.requests=9", "phases.warmup={policy: fixed, for: 5s}"], "phases.warmup",
         "an infinite rate"),
        (["workload.arrivals.rate=inf", "phases.steady.requests=9", "phases.stress={step: 20%, every: 1m, max: 2x}"],
         "phases.stress", "no rate to raise"),
        (["phases.warmup={prefill: 50%, content: shared}"], "phases.warmup.content", "no class has `prefixes`"),
        (["target={kind: 'null'}", "phases.warmup={prefill: 50%}"], "phases.warmup", "no cache to fill"),
        (["target={kind: http, url: http://a, api: completions, tokenizer: ids}", "phases.baseline={}"], "phases.baseline",
         "standard prompts are text"),
        (["phases.warmup={prefill: half}"], "phases.warmup.prefill", "not a share"),
        (["phases.warmup={policy: prefill}"], "phases.warmup.fill", "is missing"),
        (["phases.warmup={policy: dynamik}"], "phases.warmup.policy", "did you mean 'dynamic'"),
        (["phases.warmup={}"], "phases.warmup", "has no `policy:`"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_at_its_key(overrides: list[str], key: str, word: str, tmp_path: Path) -> None:
    told = refusal(tmp_path, *(one.replace("EPOCHS", EPOCHS) for one in overrides))
    assert f": {key}: " in told
    assert word in told


def test_an_infinite_rate_is_fine_where_a_count_ends_it(tmp_path: Path) -> None:
    scenario(tmp_path, "workload.arrivals.rate=inf", "phases.steady.requests=9", "phases.warmup={policy: fixed, requests: 5}")
    epochs = "phases.steady={epochs: [{for: 5s, arrivals: {shape: constant, rate: 1/s}}]}"
    scenario(tmp_path, "workload.arrivals.rate=inf", epochs)  # the workload's own arrivals are not played


# ---- what a plan says


def row(plan: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [phase for phase in plan["phases"] if phase["name"] == name]
    return dict(found)


def test_the_plan_of_a_prefill_counts_its_prompts(tmp_path: Path) -> None:
    """45,120 tokens in blocks of 16: prompts of 100 leave 92.5 by the rule of half a block, so 244 of them are half of it."""
    plan = forecast(scenario(tmp_path, "phases.warmup={prefill: 50%}"))
    warmup = row(plan, "warmup")
    assert warmup["requests"] == math.ceil(22_560 / (100 - 7.5))
    assert (warmup["seconds"], warmup["most"]) == (None, 600.0)
    assert warmup["why"] == "until 50 % of the cache's 45,120 tokens are filled, 4 at a time"
    assert (plan["seconds"], plan["seconds_most"]) == (None, 660.0)
    printed = "\n".join(lines(plan))
    assert "<= 10m00s" in printed
    assert "depends on the server, 11m00s at most" in printed
    talk = forecast(scenario(tmp_path, "phases.warmup={prefill: 50%}", "workload.sessions={turns: 4}"))
    assert row(talk, "warmup")["requests"] == warmup["requests"]  # one turn of each
    given = forecast(scenario(tmp_path, HTTP, "phases.warmup={prefill: 50%, capacity: 1000}"))
    assert row(given, "warmup")["requests"] == 5
    unknown = forecast(scenario(tmp_path, HTTP, "phases.warmup={prefill: 50%}"))
    assert row(unknown, "warmup")["requests"] is None
    assert "what the server says its cache holds" in row(unknown, "warmup")["why"]


def test_the_plan_of_baseline_dynamic_and_stress(tmp_path: Path) -> None:
    """Stress from the end of a ramp: 4/s at levels 1, 1.5 and 2, ten seconds each."""
    plan = forecast(
        scenario(
            tmp_path, "phases.baseline={idle_power: 5s}", "phases.warmup={policy: dynamic, max: 2m}",
            "workload.arrivals={shape: ramp, start: 2/s, end: 4/s, over: 30s}", "phases.stress={step: 50%, every: 10s, max: 2x}",
        )
    )  # fmt: skip
    assert (row(plan, "idle")["seconds"], row(plan, "idle")["requests"]) == (5.0, 0)
    assert (row(plan, "baseline")["seconds"], row(plan, "baseline")["requests"]) == (None, 100)
    warmup, stress = row(plan, "warmup"), row(plan, "stress")
    assert (warmup["requests"], warmup["seconds"], warmup["most"], warmup["peak"]) == (None, None, 120.0, 4.0)
    assert (stress["seconds"], stress["peak"]) == (30.0, 8.0)
    assert stress["requests"] == pytest.approx(4 * 10 * (1 + 1.5 + 2))
    assert stress["why"] == "50 % more every 10 s up to 2x, unless something stops it"
    users = forecast(
        scenario(tmp_path, "workload.arrivals={shape: closed, concurrency: 4}", "phases.stress={step: 50%, every: 10s, max: 2x}")
    )
    assert row(users, "stress")["why"].startswith("4 to 8 users; ")
    trickle = "workload.arrivals={shape: burst, requests: 9}"
    assert "a multiple of nothing" in warned(tmp_path, trickle, "phases.stress={step: 50%, every: 10s, max: 2x}")


def test_warnings_of_the_phases(tmp_path: Path) -> None:
    stress = "phases.stress={step: 20%, every: 1m, max: 5x}"
    assert "nothing ends it before 5x of the load" in warned(tmp_path, stress)
    assert "nothing ends it" not in warned(tmp_path, stress, "stop=[{kv_usage: '>= 90%'}]")
    assert "in flight when stress ends is cancelled" in warned(tmp_path, stress)
    few = warned(tmp_path, "phases.warmup={prefill: 50%, requests: 61}")
    assert "it takes about 244 prompts and at most 61 are sent, which fill 12.5 %" in few
    assert "98 % may not be reached" in warned(tmp_path, "phases.warmup={prefill: 98%}")
    assert "give `phases.warmup.capacity`" in warned(tmp_path, HTTP, "phases.warmup={prefill: 50%}")
    assert "prefill" not in warned(tmp_path, "phases.warmup={prefill: 50%}")
    assert "no class has `prefixes`" in warned(tmp_path, "phases.warmup={policy: on_demand}")
    assert "on demand" not in warned(tmp_path, "phases.warmup={policy: on_demand}", "workload.prefixes={groups: 2, tokens: 9}")
    assert "no part of steady is longer than 1m00s: none is taken" in warned(tmp_path, "phases.steady.snapshot=5m")
    assert "snapshot" not in warned(tmp_path, "phases.steady.snapshot=30s")


@pytest.mark.parametrize(
    ("arrivals", "still"),
    [
        ("{shape: poisson, rate: 2/s}", False),
        ("{shape: ramp, start: 1/s, end: 90/s, over: 1h}", True),
        ("{shape: stair, start: 1/s, step: 50%, every: 20s}", True),
        ("{shape: stair, start: 1/s, step: 50%, every: 5m}", False),  # its first step is long enough
        ("{shape: wave, mean: 5/s, amplitude: 80%, period: 20s}", False),
        ("{shape: wave, mean: 5/s, amplitude: 80%, period: 1h}", True),
    ],
)
def test_a_load_that_never_is_stationary_is_told_before_the_run(arrivals: str, still: bool, tmp_path: Path) -> None:
    told = warned(tmp_path, f"workload.arrivals={arrivals}", "phases.warmup={policy: dynamic}")
    assert ("the load itself is not stationary within 5m00s" in told) == still


@pytest.mark.parametrize(
    ("control", "said"),
    [
        ("{law: pid, setpoint: 80%}", "pid holds kv_usage"),
        ("{law: pid, signal: waiting, setpoint: 8}", "pid holds waiting"),
        ("{law: queue_feedback}", "queue_feedback holds waiting"),
        ("{law: learned}", "learned holds kv_usage and waiting"),
    ],
)
def test_a_law_without_its_signal_is_doubted_on_a_server(tmp_path: Path, control: str, said: str) -> None:
    """One whose metrics are not read; whether a server shows what it needs is known once it was asked."""
    told = warned(tmp_path, HTTP, f"control={control}", "collect=[]")
    assert f"{said}, and nothing that this run reads tells it of this target, so the law holds still for the whole run" in told
    assert "`signal: ttft`" in told
    assert "holds still" not in warned(tmp_path, HTTP, f"control={control}")
    assert "holds still" not in warned(tmp_path, f"control={control}")  # the embedded engine has gauges


def test_a_law_that_has_its_signal_is_not_doubted(tmp_path: Path) -> None:
    ttft = "control={law: pid, signal: ttft, setpoint: 1s}"
    for control in (ttft, "control={law: bucket, rate: 1/s}", "control={law: none}"):
        assert "holds still" not in warned(tmp_path, HTTP, control)
    assert "there is none with `stream: false`, so the law holds still" in warned(
        tmp_path, HTTP.replace("}", ", stream: false}"), ttft
    )


def test_epochs_with_other_classes_have_one_request_per_arrival(tmp_path: Path) -> None:
    """Weights of 1/3 and the like do not add up to 1 in floats; a turn each is a turn each."""
    one = "{arrivals: {shape: constant, rate: RATE/s}, for: TIMEs, classes: {a: {weight: 100%, prompt: 8, output: 8}}}"
    parts = [one.replace("RATE", rate).replace("TIME", time) for rate, time in (("0.7", "11"), ("1.3", "7"), ("0.1", "13"))]
    for count in range(1, 4):
        plan = forecast(scenario(tmp_path, f"phases.steady={{epochs: [{', '.join(parts * count)}]}}"))
        assert plan["tokens"]["turns_mean"] == 1
        assert "turns (requests)" not in "\n".join(lines(plan))
