"""Scenario files: how YAML is read, what a file means, what overrides and targets do, what a run is made of, what a plan says."""

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from kvbench import compose
from kvbench.cli.check import lines
from kvbench.endpoint import Http, Null, Sim
from kvbench.forecast import forecast
from kvbench.problem import SourceError
from kvbench.reference import markdown
from kvbench.scenario import Scenario, ScenarioError, load, schema
from kvbench.yaml_source import Source, read_text

ROOT = Path(__file__).parent.parent
SHIPPED = sorted((ROOT / "scenarios").glob("*.yaml"))
SIM = "target: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090}\n"
FLAT = SIM + "workload: {arrivals: {shape: constant, rate: 2/s}, prompt: 100, output: 10}\nphases: {steady: {for: 60s}}\n"
TRACE = "".join(
    json.dumps({"timestamp": 500 * i, "input_length": 20 + i, "output_length": 3, "hash_ids": [i]}) + "\n" for i in range(37)
)


def scenario(tmp_path: Path, text: str, *overrides: str, target: str | None = None) -> Scenario:
    path = tmp_path / "file name.yaml"
    path.write_text(text)
    return load(path, overrides, target)


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        scenario(tmp_path, text, *overrides)
    return str(caught.value)


# ---- YAML


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("off", "off"), ("on", "on"), ("yes", "yes"), ("No", "No"), ("true", True), ("False", False), ("~", None), ("null", None),
        ("", None), ("1:30", "1:30"), ("12", 12), ("-3", -3), ("1_000", 1000), ("0", 0), ("0.5", 0.5), (".5", 0.5), ("3.", 3.0),
        ("1e3", 1000.0), ("0x10", "0x10"), ("0o17", "0o17"), ("2026-01-01", "2026-01-01"), ("'12'", "12"), ('"off"', "off"),
        ("1.2.3", "1.2.3"), ("!!str 12", "12"), ("inf", "inf"), (".inf", ".inf"), ("5m", "5m"), ("3/s", "3/s"),
    ],
)  # fmt: skip
def test_scalars_are_read_as_yaml_1_2(written: str, meant: object) -> None:
    value = read_text(f"a: {written}\n", "f").data["a"]
    assert (type(value), value) == (type(meant), meant)


def test_every_node_has_its_line() -> None:
    source = read_text("a: 1\nb:\n  - x: 2\n    y:\n      3\n  - z\n\nc: {d: 4,\n  e: 5}\n", "f")
    assert source.data == {"a": 1, "b": [{"x": 2, "y": 3}, "z"], "c": {"d": 4, "e": 5}}
    places = {("a",): 1, ("b",): 2, ("b", 0): 3, ("b", 0, "y"): 4, ("b", 1): 6, ("c", "d"): 8, ("c", "e"): 9}
    assert {path: source.place(path) for path in places} == {path: f"f:{line}" for path, line in places.items()}
    assert source.place(("b", 0, "new")) == "f:3"  # what is missing is told at its parent


def test_aliases_merge_and_stay_apart() -> None:
    source = read_text("base: &b {x: 1, y: [1, 2]}\none: {<<: *b, x: 2}\ntwo: *b\nmany: {<<: [{x: 7}, *b]}\n", "f")
    assert source.data["one"] == {"x": 2, "y": [1, 2]}
    assert source.data["many"] == {"x": 7, "y": [1, 2]}
    source.set("two.x=9")
    assert (source.data["two"]["x"], source.data["base"]["x"]) == (9, 1)


def test_yaml_agrees_with_the_standard_loader_on_the_shipped_files() -> None:
    import yaml

    for path in SHIPPED:
        assert read_text(path.read_text(), str(path)).data == yaml.safe_load(path.read_text())


def test_overrides_set_create_and_index() -> None:
    source = Source("f", {"a": {"b": 1}, "l": [{"x": 1}, 2]}, {("a", "b"): "f:1"})
    source.set("a.b={c: 5}")
    source.set("new.deep=off")
    source.set("l.0.x=[1]")
    assert source.data == {"a": {"b": {"c": 5}}, "l": [{"x": [1]}, 2], "new": {"deep": "off"}}
    assert source.place(("a", "b", "c")) == "--set a.b={c: 5}"
    with pytest.raises(SourceError, match=r"--set l\.9=1: l: has no key '9'"):
        source.set("l.9=1")


# ---- what a file means


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_scenarios(path: Path) -> None:
    """Each loads, agrees with the published schema, says what it shows, can be written to a manifest, and has a plan."""
    found = load(path)
    assert found.name == path.stem
    assert path.read_text().startswith("# ")
    import yaml

    jsonschema.validate(yaml.safe_load(path.read_text()), schema())
    json.dumps(found.resolved(), allow_nan=False)
    plan = forecast(found)
    json.dumps(plan, allow_nan=False)
    assert not [line for line in plan["warnings"] if "fail" in line or "never" in line]


def test_the_six_are_shipped() -> None:
    assert {path.stem for path in SHIPPED} == {"smoke", "burst", "stair", "wave", "chaos", "mooncake"}


def test_the_schema_is_a_schema_and_strict() -> None:
    tree = schema()
    jsonschema.Draft202012Validator.check_schema(tree)
    json.dumps(tree, allow_nan=False)
    good = {
        "target": {"kind": "null"},
        "workload": {"arrivals": {"shape": "constant", "rate": "2/s"}, "prompt": 5, "output": 5},
        "phases": {"steady": {"for": "9s"}},
    }
    jsonschema.validate(good, tree)
    for wrong in ({"sede": 1}, {"target": {"kind": "nul"}}, {"phases": {}}, {"stop": [{"kv_usaeg": ">= 90%"}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(good | wrong, tree)


def test_the_reference_page_is_current_and_names_every_key() -> None:
    page = markdown(schema())
    assert (ROOT / "docs" / "scenario.md").read_text() == page, "run `make docs`"
    for word in (
        "| `backlog` | such as `80GiB` | `16GiB` |",
        "`shape: wave`",
        "`dist: power_law`",
        "`law: bucket`",
        "`key_env`",
        "`patience`",
        "`min_requests`",
        "`kind: sim`",
    ):
        assert word in page


def test_one_class_may_be_written_flat(tmp_path: Path) -> None:
    flat = scenario(tmp_path, FLAT)
    nested = scenario(tmp_path, FLAT.replace("prompt: 100, output: 10", "classes: {default: {prompt: 100, output: 10}}"))
    assert flat.resolved()["workload"] == nested.resolved()["workload"]
    assert flat.name == "file-name"
    assert refusal(tmp_path, FLAT.replace("prompt: 100", "promt: 100")).startswith(
        f"{tmp_path}/file name.yaml:2: workload.promt: unknown key"
    )


def test_values_are_in_base_units(tmp_path: Path) -> None:
    found = load(ROOT / "scenarios" / "wave.yaml")
    arrivals = found.workload.arrivals
    assert (arrivals.amplitude, arrivals.period) == (0.8, 300.0)
    assert found.workload.classes["chat"].slo == {"response_ttft": 2.0, "tpot": 0.08}
    assert found.phases.steady.seconds() == 1200.0
    limits = scenario(
        tmp_path, FLAT, "control={law: bucket, rate: 90/m, burst: 3, inflight: 8, patience: 1m30s}"
    ).control.limits()
    assert (limits.rate, limits.burst, limits.inflight, limits.patience) == (1.5, 3, 8, 90)
    free = scenario(tmp_path, FLAT).control.limits()
    assert (free.rate, free.inflight) == (math.inf, math.inf)


def test_targets(tmp_path: Path) -> None:
    assert isinstance(scenario(tmp_path, FLAT).target, Sim)
    for word in ("null", "'null'", "~"):
        assert isinstance(scenario(tmp_path, FLAT, f"target={{kind: {word}}}").target, Null)
    eight = scenario(
        tmp_path, FLAT, "target={kind: sim, model: llama-3.1-70b, hardware: 8 x h100, settings: {max_num_seqs: 64}, block: 32}"
    )
    assert eight.target.load_hardware().count == 8
    assert (eight.target.load_engine().max_num_seqs, eight.target.load_engine().block) == (64, 32)
    assert "settings: " in refusal(tmp_path, FLAT, "target.settings={max_num_sequences: 64}")
    many = scenario(tmp_path, FLAT, "target={kind: http, urls: ['http://a:1/', 'https://b/v1']}")
    assert many.target.addresses() == ["http://a:1", "https://b"]


def test_target_option(tmp_path: Path) -> None:
    """It replaces any target by a plain server, but leaves the other settings of a server alone; --set comes after it."""
    plain = scenario(tmp_path, FLAT, target="http://localhost:8000").target
    assert isinstance(plain, Http)
    assert (plain.addresses(), plain.api, plain.model) == (["http://localhost:8000"], "chat", None)
    server = FLAT.replace(SIM, "target: {kind: http, urls: ['http://a:1', 'http://b:1'], key_env: KEY, model: m}\n")
    moved = scenario(tmp_path, server, "target.api=completions", target="http://c:2").target
    assert (moved.addresses(), moved.key_env, moved.model, moved.api) == (["http://c:2"], "KEY", "m", "completions")


def test_secrets_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    server = "target={kind: http, url: http://a, key_env: SECRET_KEY, headers: {Authorization: $SECRET_KEY, X-Run: plain}}"
    found = scenario(tmp_path, FLAT, server)
    assert "hunter2" not in json.dumps(found.resolved()) + json.dumps(forecast(found))
    for headers in ("{Authorization: Bearer hunter2}", "{api-key: hunter2}", "{Cookie: a=hunter2}"):
        text = refusal(tmp_path, FLAT, f"target={{kind: http, url: http://a, headers: {headers}}}")
        assert "environment" in text
        assert "hunter2" not in text.split("}}: ", 1)[1]  # the override is repeated as it was typed, the message adds nothing
    assert "target.extra_body.api_key" in refusal(
        tmp_path, FLAT, "target={kind: http, url: http://a, extra_body: {api_key: hunter2}}"
    )
    allowed = scenario(tmp_path, FLAT, "target={kind: http, url: http://a, extra_body: {min_tokens: 4, max_tokens: null}}")
    assert allowed.target.extra_body == {"min_tokens": 4, "max_tokens": None}


def test_epochs_have_their_own_bounds(tmp_path: Path) -> None:
    second = "{for: 20s, arrivals: {shape: closed, concurrency: 3}}"
    epochs = f"phases.steady={{epochs: [{{for: 10s, arrivals: {{shape: constant, rate: 1/s}}}}, {second}]}}"
    found = scenario(tmp_path, FLAT, epochs)
    phases = compose.build_phases(found, None)
    assert [(phase.name, phase.kind, phase.seconds) for phase in phases] == [
        ("steady-1", "steady", 10.0),
        ("steady-2", "steady", 20.0),
    ]
    assert "leave out its own bounds" in refusal(tmp_path, FLAT, epochs, "phases.steady.requests=5")


def test_verdict_thresholds(tmp_path: Path) -> None:
    assert scenario(tmp_path, FLAT, "verdict={lag_p99: {degraded: 10ms, invalid: null}}").verdict["lag_p99"]["degraded"] == "10ms"
    assert "verdict.lag_p99.degraded: 10 has no unit" in refusal(tmp_path, FLAT, "verdict={lag_p99: {degraded: 10}}")
    assert "did you mean 'lag_p99'" in refusal(tmp_path, FLAT, "verdict={lag_p9: {degraded: 10ms}}")


# ---- what a run is made of


def test_streams_of_randomness_do_not_move_each_other() -> None:
    streams = compose.seeds(7)
    assert list(streams) == ["arrivals", "lengths", "prompts", "sampling", "routing", "chaos"]
    more = np.random.SeedSequence(7).spawn(9)  # as if three streams had been added
    for old, new in zip(streams.values(), more, strict=False):
        assert np.array_equal(old.generate_state(4), new.generate_state(4))
    states = {tuple(stream.generate_state(4)) for seed in (0, 1) for stream in compose.seeds(seed).values()}
    assert len(states) == 12  # seed 0 is a seed, and no two streams are one


def test_nonce(tmp_path: Path) -> None:
    """From the seed on the embedded engine, from the system on a server, none when it is off."""
    sim, other = scenario(tmp_path, FLAT, "seed=3"), scenario(tmp_path, FLAT, "seed=4")
    assert compose.build_nonce(sim) == compose.build_nonce(sim) != compose.build_nonce(other)
    server = scenario(tmp_path, FLAT, target="http://a")
    assert compose.build_nonce(server) != compose.build_nonce(server)
    assert compose.build_nonce(scenario(tmp_path, FLAT, "workload.nonce=off")) is None
    assert compose.build_nonce(scenario(tmp_path, FLAT, "workload.nonce=false")) is None


def dues(phase: Any, count: int, start: float = 0.0) -> list[float]:
    schedule = phase.source(start).schedule
    return [schedule.pop() for _ in range(count)]


def test_phases_are_composed(tmp_path: Path) -> None:
    found = scenario(
        tmp_path, FLAT, "phases.warmup={policy: fixed, requests: 5}", "phases.drain={for: 7s}", "phases.steady.requests=40"
    )
    warmup, steady, drain = compose.build_phases(found, 1)
    assert (warmup.name, warmup.kind, warmup.requests, warmup.seconds) == ("warmup", "warmup", 5, math.inf)
    assert (steady.kind, steady.requests, steady.seconds, steady.tokens) == ("steady", 40, 60.0, math.inf)
    assert (drain.kind, drain.source, drain.seconds) == ("drain", None, 7.0)
    assert dues(steady, 3, start=10.0) == [10.0, 10.5, 11.0]


def test_no_measured_prompt_is_sent_in_warm_up(tmp_path: Path) -> None:
    found = scenario(tmp_path, FLAT, "phases.warmup={policy: fixed, requests: 5}", "workload.prefixes={groups: 3, tokens: 50}")
    warmup, steady = compose.build_phases(found, 1)
    asked = {}
    for phase in (warmup, steady):
        content = phase.source(0.0).content
        asked[phase.kind] = [content.next(0.1 * i) for i in range(20)]
    keys = {kind: {key for request in requests for key, _ in request.segments()} for kind, requests in asked.items()}
    assert not keys["warmup"] & keys["steady"]
    ids = [request.id for requests in asked.values() for request in requests]
    assert ids == list(range(40))  # one numbering for the run


def test_a_trace_brings_its_content_along(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(TRACE)
    text = SIM + "workload: {arrivals: {shape: trace, file: t.jsonl, unit: ms}}\nphases: {steady: {}}\n"
    (phase,) = compose.build_phases(scenario(tmp_path, text), None)
    assert dues(phase, 37) == [0.5 * i for i in range(37)]
    source = phase.source(0.0)
    assert [source.content.next(0.0).tokens for _ in range(37)] == [20 + i for i in range(37)]
    slower = compose.build_phases(scenario(tmp_path, text, "workload.arrivals.scale=2"), None)[0]
    assert dues(slower, 3) == [0.0, 1.0, 2.0]
    own = scenario(tmp_path, text, "workload.prompt=7", "workload.output=2")  # the trace's times, other content
    assert compose.build_phases(own, None)[0].source(0.0).content.next(0.0).tokens == 7
    with pytest.raises(ScenarioError, match="50 requests asked"):
        compose.build_phases(scenario(tmp_path, text, "phases.steady.requests=50"), None)
    again = compose.build_phases(scenario(tmp_path, text, "phases.steady.requests=50", "workload.arrivals.wrap=again"), None)[0]
    assert len(dues(again, 50)) == 50
    assert "t2.jsonl" in refusal(tmp_path, text.replace("t.jsonl", "t2.jsonl"))


def test_slos_by_class() -> None:
    slos = compose.build_slos(load(ROOT / "scenarios" / "wave.yaml"))
    assert slos == {"chat": {"response_ttft": 2.0, "tpot": 0.08}, "summary": {"response_ttft": 5.0}}


# ---- what a plan says (expected values by hand)


@pytest.mark.parametrize(
    ("arrivals", "seconds", "requests", "peak"),
    [
        ("{shape: constant, rate: 2/s}", 60, 120, 2),
        ("{shape: stair, start: 1/s, step: 100%, every: 10s}", 30, 70, 4),  # 10 x 1 + 10 x 2 + 10 x 4
        ("{shape: wave, mean: 3/s, amplitude: 50%, period: 20s}", 40, 120, 4.5),  # two whole periods
        ("{shape: ramp, start: 0/s, end: 6/s, over: 60s}", 60, 180, 6),
        ("{shape: burst, requests: 10, every: 20s, background: 1/s}", 60, 90, 1),  # three bursts and sixty
    ],
)
def test_expected_requests(arrivals: str, seconds: int, requests: float, peak: float, tmp_path: Path) -> None:
    plan = forecast(scenario(tmp_path, FLAT, f"workload.arrivals={arrivals}", f"phases.steady.for={seconds}s"))
    (steady,) = plan["phases"]
    assert steady["requests"] == pytest.approx(requests)
    assert steady["mean"] == pytest.approx(requests / seconds)
    assert steady["peak"] == pytest.approx(peak)
    assert plan["tokens"]["prompt_total"] == pytest.approx(100 * requests)


def test_the_first_bound_counts(tmp_path: Path) -> None:
    plan = forecast(scenario(tmp_path, FLAT, "phases.steady.requests=31"))
    assert (plan["phases"][0]["requests"], plan["phases"][0]["seconds"]) == (31, 15.0)  # the 31st request is due at 15 s
    closed = forecast(scenario(tmp_path, FLAT, "workload.arrivals={shape: closed, concurrency: 4}"))
    assert closed["phases"][0]["requests"] is None
    assert "as fast as the server answers" in closed["phases"][0]["why"]


def test_kv_and_context(tmp_path: Path) -> None:
    found = scenario(
        tmp_path, FLAT, "workload.prompt=2000", "workload.output=200", "target.settings={max_model_len: 2100, blocks: 1001}"
    )
    plan = forecast(found)
    assert plan["context"] == {"longest": 2200, "limit": 2100, "fits": False, "why": ""}
    assert any("those will fail" in line for line in plan["warnings"])
    assert plan["kv"]["pool_tokens"] == 16_000  # the null block holds nothing
    # 2 requests/s x 200 steps x 2,100 tokens on average alive = 840,000 token-steps a second, times the step time
    step = plan["kv"]["share_at_mean"] * 16_000 / (2 * 200 * 2100)
    assert 0.02 < step < 0.2


def test_kv_counts_every_node(tmp_path: Path) -> None:
    """Three equal nodes hold what one does under a third of the load, in three times the memory; of a split cluster only the
    nodes that decode are under load, and each computes its part of the prompts."""
    sets = ("workload.prompt=2000", "workload.output=200", "target.settings={blocks: 1001}", "workload.arrivals.rate=")
    one = forecast(scenario(tmp_path, FLAT, *sets[:3], sets[3] + "1/s"))["kv"]
    three = forecast(scenario(tmp_path, FLAT, *sets[:3], sets[3] + "3/s", "target.cluster={replicas: 3}"))["kv"]
    assert (three["nodes"], three["pool_tokens"]) == (3, 48_000)
    assert three["share_at_mean"] == pytest.approx(one["share_at_mean"])
    split = "target.cluster={nodes: [{role: prefill, replicas: 2}, {role: decode}]}"
    apart = forecast(scenario(tmp_path, FLAT, *sets[:3], sets[3] + "1/s", split))["kv"]
    assert 0 < 3 * apart["share_at_mean"] < one["share_at_mean"]  # no prompt slows its decodes
    busy = 1.5 / one["prefill_seconds"]  # more than one node prefills, and less than two do
    assert forecast(scenario(tmp_path, FLAT, *sets[:3], f"{sets[3]}{busy}/s"))["kv"]["share_at_mean"] is None
    assert forecast(scenario(tmp_path, FLAT, *sets[:3], f"{sets[3]}{busy}/s", split))["kv"]["share_at_mean"] is not None
    mixed = forecast(scenario(tmp_path, FLAT, "target.cluster={nodes: [{}, {hardware: h100}]}"))["kv"]
    alone = [forecast(scenario(tmp_path, FLAT, f"target.hardware={name}"))["kv"]["pool_tokens"] for name in ("rtx-4090", "h100")]
    assert mixed["pool_tokens"] == sum(alone)
    assert "on 3 nodes" in printed(tmp_path, "target.cluster={replicas: 3}")


def test_the_pool_is_that_of_the_machine(tmp_path: Path) -> None:
    """Groups of layers, nodes, windows: what the plan says the cache holds is what the built machine says."""
    groups = "[{layers: 1-6, quota: 30%}, {layers: 7-12, quota: 20%, codec: int4-g64}, {layers: 13+, quota: 50%}]"
    changes = (f"layers={{groups: {groups}}}", "cluster={replicas: 2}", "cache_profile_aggressiveness=0.7", "model=gpt-oss-20b")
    for change in changes:
        found = scenario(tmp_path, FLAT, f"target.{change}")
        assert isinstance(found.target, Sim)
        assert forecast(found)["kv"]["pool_tokens"] == compose.build_machine(found.target, 0).facts()["kv_tokens"]


def test_turns_and_length_regimes(tmp_path: Path) -> None:
    """Four turns of 100 + 10: prompts of 100, 210, 320, 430 tokens. Spells of chaos double the drawn lengths, not the prefix."""
    talk = forecast(scenario(tmp_path, FLAT, "workload.sessions={turns: 4}"))
    assert (talk["tokens"]["prompt_mean"], talk["tokens"]["answer_mean"], talk["tokens"]["turns_mean"]) == (1060, 40, 4)
    assert talk["context"]["longest"] == 440
    wild = "workload.arrivals={shape: chaos, min: 1/s, max: 2/s, every: 5s, lengths: {every: 9s, min: 0.5, max: 2}}"
    plan = forecast(scenario(tmp_path, FLAT, wild, "workload.prefixes={groups: 3, tokens: 50}"))
    assert plan["context"]["longest"] == 50 + 2 * 110
    assert plan["tokens"]["answer_mean"] == pytest.approx(10 * 1.5 / math.log(4))  # the mean of a log-uniform factor


def test_warnings_carry_their_numbers(tmp_path: Path) -> None:
    def warned(*overrides: str) -> str:
        return "\n".join(forecast(scenario(tmp_path, FLAT, *overrides))["warnings"])

    assert "about 120 requests in steady: a p99 needs 1,000" in warned()
    assert "INVALID" in warned("phases.steady.for=5s")
    assert "no drain phase" in warned()
    assert "no drain phase" not in warned("phases.drain={for: 5s}")
    assert "1/s in: about 50% is shed" in warned("control={law: bucket, rate: 1/s}")
    burst = (
        "workload.arrivals={shape: burst, requests: 100, every: 60s}",
        "control={law: bucket, rate: 10/s, burst: 10, patience: 5s}",
    )
    assert "the last of a burst of 100 waits 9 s" in warned(*burst)
    assert "About 40 of each burst's 100 are shed\n" in warned(*burst) + "\n"  # 10 at once, 50 in 5 s; one burst in a minute
    five = warned(*burst, "phases.steady.for=5m")
    assert "About 40 of each burst's 100 are shed: 200 in the 5 bursts of steady" in five
    assert "fault" not in warned("target.faults=[{kind: stall, at: 59s}]")
    late = warned("target.faults=[{kind: stall, at: 2m}]")
    assert "fault stall: it begins at 2m00s and the run offers load for 1m00s, so it may never begin" in late
    assert "a share is 0 % to 100 %, so it cannot fire" in warned("stop=[{kv_usage: '> 900%'}]")
    assert "a share is 0 % to 100 %, so it always fires" in warned("stop=[{kv_usage: '< 101%'}]")
    assert "a share is" not in warned("stop=[{kv_usage: '>= 100%'}, {response_ttft_p99: '> 2s'}]")
    assert "so it cannot fire" in warned("stop=[{kv_usage: '>= 90%', for: 2m}]")
    assert "it needs 1000 and sees about 20 requests in 10 s" in warned("stop=[{success_rate: '< 99%', min_requests: 1000}]")
    assert "nonce is off" in warned("workload.nonce=off")
    assert "5 users, 3 of them in flight" in warned(
        "workload.arrivals={shape: closed, concurrency: 5}", "control={law: none, inflight: 3}"
    )
    assert "NO_SUCH_KEY (target.key_env) is not set" in warned("target={kind: http, url: http://a, key_env: NO_SUCH_KEY}")


@pytest.mark.parametrize(("extra", "seed"), [("", 7), (", seed: 3", 3)])
def test_chaos_moves_with_the_runs_seed_unless_it_has_its_own(extra: str, seed: int, tmp_path: Path) -> None:
    text = f"""
seed: 7
target: {{kind: sim, model: llama-3.1-8b, hardware: h100}}
workload: {{arrivals: {{shape: chaos, min: 1/s, max: 9/s, every: 5s{extra}}}, prompt: 10, output: 10}}
phases: {{steady: {{for: 60s}}}}
"""
    (tmp_path / "s.yaml").write_text(text)
    assert load(tmp_path / "s.yaml").workload.arrivals.seed == seed


def printed(tmp_path: Path, *overrides: str) -> str:
    return "\n".join(lines(forecast(scenario(tmp_path, FLAT, *overrides))))


@pytest.mark.parametrize(
    ("control", "row"),
    [
        ("{law: none}", "none; everything is sent as it falls due"),
        ("{law: none, inflight: 64, patience: 5s}", "none; at most 64 in flight; patience 5 s"),
        ("{law: bucket, rate: 4/s, burst: 20, patience: 1500ms}", "bucket; rate 4/s, burst 20; patience 1.5 s"),
        ("{law: pid, setpoint: 80%}", "setpoint 80 %"),
        ("{law: pid, signal: ttft, setpoint: 800ms, inflight: 9}", "signal ttft, setpoint 800 ms"),
        ("{law: pid, signal: waiting, setpoint: 8}", "setpoint 8"),
        ("{law: pid, setpoint: 80%, kp: 0.5, retry_after: 5s}", "kp 0.5"),
        ("{law: queue_feedback, target_queue: 8}", "queue_feedback; kv_limit 90 %, target_queue 8; patience 30 s"),
        ("{law: learned}", "learned; policy chaos"),
    ],
)
def test_the_plan_shows_the_law(control: str, row: str, tmp_path: Path) -> None:
    text = printed(tmp_path, f"control={control}")
    (line,) = (line for line in text.splitlines() if line.startswith("  control   "))
    assert row in f"{line} "
    assert "inf" not in line.replace("in flight", "")


def test_the_plan_shows_watch_and_faults(tmp_path: Path) -> None:
    faults = "[{kind: slow, at: 20s, for: 5s, factor: 3}, {kind: refuse, at: 30s, share: 20%}, {kind: stall, at: 40s, for: 1s}]"
    text = printed(tmp_path, f"target.faults={faults}", "watch={metrics: [ttft_p50, kv_usage], action: rollback}")
    for row in (
        "  watch     ttft_p50, kv_usage; 3 sigma worse in 2 of 3 windows of 10 s; then rollback\n",
        "  fault     slow at 20 s for 5 s, factor 3\n", "  fault     refuse at 30 s to the end, share 20 %\n",
        "  fault     stall at 40 s for 1 s\n",
    ):  # fmt: skip
        assert row in text
    assert "  watch  " not in printed(tmp_path)


def test_kv_at_the_top_of_stress(tmp_path: Path) -> None:
    """What five times the rate keeps alive is what a steady load of five times the rate does."""
    stress = forecast(scenario(tmp_path, FLAT, "phases.stress={step: 100%, every: 10s, max: 5x}"))["kv"]
    fivefold = forecast(scenario(tmp_path, FLAT, "workload.arrivals.rate=10/s"))["kv"]
    assert stress["share_at_stress"] == pytest.approx(fivefold["share_at_peak"])
    assert stress["share_at_stress"] > stress["share_at_peak"]
    assert "at stress's top" in printed(tmp_path, "phases.stress={step: 100%, every: 10s, max: 5x}")


def test_the_peak_of_a_burst_is_its_crowd(tmp_path: Path) -> None:
    burst = "workload.arrivals={shape: burst, requests: 100, every: 20s, background: 1/s}"
    row = next(line for line in printed(tmp_path, burst).splitlines() if line.startswith("  steady"))
    assert row.split("  ")[-1].strip() == "100 at once"
    late = "workload.arrivals={shape: burst, requests: 100, first: 90s, background: 1/s}"  # steady is over before it comes
    row = next(line for line in printed(tmp_path, late).splitlines() if line.startswith("  steady"))
    assert row.split()[-1] == "1/s"
