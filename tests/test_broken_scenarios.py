"""More than a hundred broken scenario files. Each is refused with file:line (or --set ...), the key and what is allowed; none
ends in a traceback, and `kvbench check` exits 2 on each."""

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvbench.cli.check import check
from kvbench.scenario import ScenarioError, load

GOOD = """\
name: good
seed: 7
target: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090, engine: vllm}
workload:
  nonce: on
  arrivals: {shape: wave, mean: 3/s, amplitude: 80%, period: 2m, process: poisson}
  classes:
    chat:
      weight: 80%
      prompt: {dist: power_law, alpha: 1.8, min: 64, max: 2048}
      output: {dist: power_law, alpha: 2.1, min: 16, max: 1024, force: true}
      prefixes: {groups: 20, zipf: 1.1, tokens: 512, share: 60%}
      sampling: {temperature: {0: 50%, 0.7: 50%}, penalties: [{}, {frequency: 0.2}]}
      slo: {response_ttft: 800ms, tpot: 50ms}
    agent:
      weight: 20%
      prompt: {dist: fixed, value: 100}
      output: {dist: fixed, value: 10}
control: {law: bucket, rate: 5/s, burst: 10, inflight: 64, patience: 5s}
phases:
  warmup: {policy: fixed, requests: 20}
  steady: {for: 10m, requests: 9000}
  drain: {for: 2m}
stop:
  - {kv_usage: ">= 90%", for: 2m}
  - {success_rate: "< 99.9%", over: 10m, min_requests: 1000}
budget: {response_ttft_p99: 800ms, goodput: ">= 99%"}
windows: {length: 10s, slide: 1s}
out: results
"""

# name: (what stands in GOOD, what takes its place, a word that the message must hold). The line is that of the replaced text.
KEYS = {
    "top": ("seed: 7", "sede: 7", "did you mean 'seed'"),
    "top_unlike": ("seed: 7", "zzz: 7", "unknown key 'zzz'"),
    "target": ("engine: vllm", "engien: vllm", "did you mean 'engine'"),
    "workload": ("  nonce: on", "  nnce: on", "did you mean 'nonce'"),
    "arrivals": ("amplitude: 80%", "amplitud: 80%", "did you mean 'amplitude'"),
    "class": ("      weight: 20%", "      wieght: 20%", "did you mean 'weight'"),
    "prompt": ("alpha: 1.8", "alhpa: 1.8", "did you mean 'alpha'"),
    "output": ("force: true", "forse: true", "did you mean 'force'"),
    "prefixes": ("groups: 20", "gruops: 20", "did you mean 'groups'"),
    "sampling": ("temperature:", "temprature:", "did you mean 'temperature'"),
    "penalty": ("{frequency: 0.2}", "{freqency: 0.2}", "did you mean 'frequency'"),
    "slo": ("response_ttft: 800ms, tpot", "respnse_ttft: 800ms, tpot", "response_ttft"),
    "control": ("inflight: 64", "inflght: 64", "did you mean 'inflight'"),
    "phases": ("  drain:", "  darin:", "did you mean 'drain'"),
    "warmup": ("requests: 20", "request: 20", "did you mean 'requests'"),
    "steady": ("requests: 9000", "reqests: 9000", "did you mean 'requests'"),
    "stop": ('kv_usage: ">= 90%"', 'kv_usaeg: ">= 90%"', "kv_usage"),
    "budget": ("response_ttft_p99: 800ms", "respons_ttft_p99: 800ms", "response_ttft_p99"),
    "budget_statistic": ("response_ttft_p99: 800ms", "response_ttft_p42: 800ms", "response_ttft_p99"),
    "windows": ("slide: 1s", "slied: 1s", "did you mean 'slide'"),
    "watch": ("out: results", "watch: {sigmas: 3}", "did you mean 'sigma'"),
    "watch_metric": ("out: results", "watch: {metrics: [ttft_p42]}", "ttft_p99"),
    "collect": ("out: results", "collect: [{kind: nvm}]", "did you mean 'nvml'"),
    "collect_key": ("out: results", "collect: [{kind: host, evry: 1s}]", "did you mean 'every'"),
    "sinks": ("out: results", "sinks: [{kind: influxdb, url: x}]", "did you mean 'influx'"),
    "baseline": ("  drain: {for: 2m}", "  baseline: {prompt: 5}", "did you mean 'prompts'"),
    "stress": ("  drain: {for: 2m}", "  stress: {step: 20%, evry: 1m, max: 5x}", "did you mean 'every'"),
    "snapshot": ("requests: 9000", "snapshots: 5m", "did you mean 'snapshot'"),
    "prefill": ("{policy: fixed, requests: 20}", "{prefill: 50%, contents: own}", "did you mean 'content'"),
    "on_demand": ("policy: fixed", "policy: on_demand", "unknown key 'requests'"),
    "flat_beside_classes": ("  nonce: on", "  prompt: {dist: fixed, value: 1}", "belongs into one of the classes"),
}
UNITS = {
    "bare_rate": ("mean: 3/s", "mean: 3", "no unit"),
    "bare_share": ("amplitude: 80%", "amplitude: 0.8", "no unit"),
    "bare_span": ("period: 2m", "period: 120", "no unit"),
    "bare_for": ("for: 10m", "for: 600", "no unit"),
    "bare_patience": ("patience: 5s", "patience: 5", "no unit"),
    "bare_slo": ("tpot: 50ms", "tpot: 50", "no unit"),
    "bare_budget": ("response_ttft_p99: 800ms", "response_ttft_p99: 800", "no unit"),
    "bare_window": ("length: 10s", "length: 10", "no unit"),
    "wrong_rate": ("mean: 3/s", "mean: 3s", "/s"),
    "wrong_share": ("amplitude: 80%", "amplitude: 80s", "%"),
    "wrong_span": ("period: 2m", "period: 2 minutes", "unknown unit"),
    "case": ("patience: 5s", "patience: 5S", "unknown unit"),
    "sexagesimal": ("for: 10m", "for: 1:30", "a duration"),
    "thousands": ("mean: 3/s", "mean: 3,000/s", "a rate"),
    "two_units": ("mean: 3/s", "mean: 3/s 2/s", "one number"),
    "word": ("patience: 5s", "patience: soon", "a duration"),
    "empty_text": ("patience: 5s", "patience: ''", "a duration"),
    "stop_unit": ('">= 90%"', '">= 90ms"', "%"),
    "stop_for": ("for: 2m}\n  - {success", "for: 120}\n  - {success", "no unit"),
    "bare_fill": ("{policy: fixed, requests: 20}", "{prefill: 0.5}", "no unit"),
    "bare_multiple": ("  drain: {for: 2m}", "  stress: {step: 20%, every: 1m, max: 5}", "no unit"),
    "wrong_multiple": ("  drain: {for: 2m}", "  stress: {step: 20%, every: 1m, max: 500%}", "allowed are x"),
    "bare_idle": ("  drain: {for: 2m}", "  baseline: {idle_power: 10}", "no unit"),
    "rate_unit_in_bucket": ("rate: 5/s", "rate: 5%", "/s"),
}
TYPES = {
    "seed_text": ("seed: 7", "seed: seven", "integer"),
    "seed_fraction": ("seed: 7", "seed: 7.5", "integer"),
    "seed_list": ("seed: 7", "seed: [7]", "integer"),
    "name_number": ("name: good", "name: 12", "string"),
    "target_text": ("target: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090, engine: vllm}", "target: sim", "kind"),
    "target_list": ("target: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090, engine: vllm}", "target: [sim]", "kind"),
    "arrivals_text": (
        "arrivals: {shape: wave, mean: 3/s, amplitude: 80%, period: 2m, process: poisson}",
        "arrivals: wave",
        "shape",
    ),
    "prompt_number": ("prompt: {dist: fixed, value: 100}", "prompt: yes", "dist"),
    "alpha_text": ("alpha: 1.8", "alpha: steep", "number"),
    "min_fraction": ("min: 64", "min: 64.5", "integer"),
    "force_word": ("force: true", "force: maybe", "boolean"),
    "nonce_word": ("  nonce: on", "  nonce: maybe", "on or off"),
    "penalties_mapping": ("penalties: [{}, {frequency: 0.2}]", "penalties: 3", "list"),
    "stop_mapping": ('  - {kv_usage: ">= 90%", for: 2m}', "  - kv_usage", "mapping"),
    "budget_list": ('budget: {response_ttft_p99: 800ms, goodput: ">= 99%"}', "budget: [1]", "mapping"),
    "inflight_text": ("inflight: 64", "inflight: many", "integer"),
    "windows_text": ("windows: {length: 10s, slide: 1s}", "windows: 10s", "windows"),
    "steady_text": ("steady: {for: 10m, requests: 9000}", "steady: 10m", "steady"),
    "phase_null": ("steady: {for: 10m, requests: 9000}", "steady:", "steady"),
    "out_number": ("out: results", "out: 3", "string"),
    "rate_bool": ("rate: 5/s", "rate: true", "a rate"),
    "weight_list": ("      weight: 20%", "      weight: [20%]", "weight"),
    "timestamp": ("for: 10m", "for: 2026-01-01", "a duration"),
}
RANGES = {
    "seed_negative": ("seed: 7", "seed: -1", "greater than or equal to 0"),
    "seed_huge": ("seed: 7", "seed: 99999999999999999999", "less than"),
    "rate_zero": ("mean: 3/s", "mean: 0/s", "out of range"),
    "rate_negative": ("mean: 3/s", "mean: -1/s", "out of range"),
    "rate_nan": ("rate: 5/s", "rate: nan/s", "a rate"),
    "rate_overflow": ("mean: 3/s", "mean: 1e999/s", "too large"),
    "amplitude_over": ("amplitude: 80%", "amplitude: 180%", "less than or equal"),
    "period_zero": ("period: 2m", "period: 0s", "out of range"),
    "share_over": ("share: 60%", "share: 160%", "less than or equal"),
    "min_over_max": ("min: 64, max: 2048", "min: 4096, max: 2048", "max"),
    "value_negative": ("value: 100", "value: -100", "greater than or equal"),
    "inflight_zero": ("inflight: 64", "inflight: 0", "greater than or equal to 1"),
    "burst_half": ("burst: 10", "burst: 0.5", "greater than or equal to 1"),
    "for_negative": ("for: 10m", "for: -10m", "out of range"),
    "window_fraction": ("slide: 1s", "slide: 1500ms", "whole seconds"),
    "window_long": ("length: 10s", "length: 11m", "whole seconds"),
    "slide_longer": ("slide: 1s", "slide: 20s", "longer than a window"),
    "name_slash": ("name: good", "name: ../../etc", "pattern"),
    "name_empty": ("name: good", "name: ''", "pattern"),
    "unknown_model": ("model: llama-3.1-8b", "model: lama-3.1-8b", "did you mean 'llama-3.1-8b'"),
    "unknown_hardware": ("hardware: rtx-4090", "hardware: rtx-4091", "did you mean 'rtx-4090'"),
    "unknown_engine": ("engine: vllm}", "engine: vlm}", "did you mean 'vllm'"),
    "unknown_shape": ("shape: wave", "shape: wav", "did you mean 'wave'"),
    "unknown_dist": ("dist: fixed, value: 100", "dist: fxied, value: 100", "fixed"),
    "unknown_kind": ("kind: sim", "kind: simulator", "known are sim, http, null"),
    "unknown_law": ("law: bucket", "law: buckt", "did you mean 'bucket'"),
    "unknown_policy": ("policy: fixed", "policy: fxed", "did you mean 'fixed'"),
    "does_not_fit": ("model: llama-3.1-8b", "model: llama-3.1-70b", "does not fit"),
    "prompts_over": ("  drain: {for: 2m}", "  baseline: {prompts: 101}", "less than or equal to 100"),
    "fill_over": ("{policy: fixed, requests: 20}", "{prefill: 150%}", "less than or equal to 1"),
    "fill_zero": ("{policy: fixed, requests: 20}", "{policy: prefill, fill: 0%}", "greater than 0"),
    "content": ("{policy: fixed, requests: 20}", "{prefill: 50%, content: mine}", "'own' or 'shared'"),
    "least_over_most": ("{policy: fixed, requests: 20}", "{policy: dynamic, min: 10m, max: 5m}", "longer than max"),
    "too_short_to_test": ("{policy: fixed, requests: 20}", "{policy: dynamic, max: 30s}", "at least 1m00s"),
    "batch_fraction": ("{policy: fixed, requests: 20}", "{policy: dynamic, batch: 1500ms}", "whole seconds"),
    "max_of_one": ("  drain: {for: 2m}", "  stress: {step: 20%, every: 1m, max: 1x}", "greater than 1"),
    "rung_fraction": ("  drain: {for: 2m}", "  stress: {step: 20%, every: 1500ms, max: 5x}", "whole seconds"),
    "rungs": ("  drain: {for: 2m}", "  stress: {step: 0.01%, every: 1s, max: 5x}", "at most 10,000"),
    "snapshot_long": ("requests: 9000", "snapshot: 11m", "whole seconds"),
    "two_bounds": ("{policy: fixed, requests: 20}", "{policy: fixed, requests: 20, for: 5s}", "one bound"),
    "no_bound": ("steady: {for: 10m, requests: 9000}", "steady: {}", "nothing ends it"),
    "weights": ("      weight: 20%", "      weight: 30%", "100 %"),
    "temperatures": ("{0: 50%, 0.7: 50%}", "{0: 50%, 0.7: 60%}", "100 %"),
    "no_law_tag": ("law: bucket, ", "", "has no `law:`"),
    "no_kind": ("kind: sim, ", "", "has no `kind:`"),
}
YAML = {
    "tab": ("  nonce: on", "\tnonce: on", "tab"),
    "duplicate": ("seed: 7", "name: good", "given twice"),
    "duplicate_deep": ("alpha: 2.1, ", "min: 16, ", "given twice"),
    "unclosed": ("windows: {length: 10s, slide: 1s}", "windows: {length: 10s, slide: 1s", "not YAML"),
    "unquoted": ('kv_usage: ">= 90%"', "kv_usage: >= 90%", "not YAML"),
    "python_tag": ("seed: 7", "seed: !!python/object/apply:os.system ['true']", "tag"),
    "int_tag": ("seed: 7", "seed: !!int '7'", "tag"),
    "own_tag": ("seed: 7", "seed: !secret x", "tag"),
    "cycle_list": ("seed: 7", "seed: &loop [*loop]", "cycle"),
    "cycle_map": ("out: results", "out: &loop {again: *loop}", "cycle"),
    "no_anchor": ("seed: 7", "seed: *nowhere", "nowhere"),
    "octal": ("seed: 7", "seed: 017", "leading zero"),
    "second_document": ("out: results", "---\nout: results", "second document"),
    "list_key": ("seed: 7", "[seed]: 7", "a key must be"),
    "bool_key": ("seed: 7", "true: 7", "cannot be a key"),
    "null_key": ("seed: 7", "~: 7", "cannot be a key"),
    "merge_scalar": ("seed: 7", "<<: 7", "<< merges mappings"),
    "indent": ("  drain:", "   drain:", "not YAML"),
    "nul": ("seed: 7", "seed: \0", "control character"),
    "escape": ("seed: 7", "seed: \x1b[31m", "control character"),
    "directive": ("name: good", "%YAML 9.9\n---\nname: good", "not YAML"),
    "at": ("seed: 7", "seed: @7", "not YAML"),
}
GROUPS = {"key": KEYS, "unit": UNITS, "type": TYPES, "range": RANGES, "yaml": YAML}
TABLE = {f"{group}_{name}": row for group, rows in GROUPS.items() for name, row in rows.items()}
# Where the parser, or a check of two keys together, can only speak of another line than the one that was changed.
ELSEWHERE = {"yaml_unclosed", "yaml_indent", "yaml_second_document", "yaml_directive", "range_weights"}

DEEP = "".join(f"{'  ' * level}a:\n" for level in range(60))
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 10}]\n" for i in range(1, 12))
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [[[[[[[[[*a{i - 1}]]]]]]]]]\n" for i in range(1, 500))
WHOLE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "only_comment": (b"# nothing\n", "empty"),
    "only_null": (b"null\n", "empty"),
    "scalar": (b"hello\n", "mapping"),
    "list": (b"- a\n- b\n", "mapping"),
    "nothing_in_it": (b"{}\n", "is missing"),
    "huge": (b"# " + b"x" * (2 << 20), "larger than"),
    "huge_list": (b"a: [" + b"1," * 60_000 + b"1]", "more than"),
    "deep_block": (DEEP.encode(), "nested deeper"),
    "deep_flow": (b"a: " + b"[" * 5000, "nest"),
    "deep_braces": (b"{a: " * 5000, "nest"),
    "laughs": (LAUGHS.encode(), "aliases"),
    "alias_chain": (CHAIN.encode(), "nested deeper"),
    "latin1": ("name: caf\xe9\n".encode("latin-1"), "not UTF-8"),
    "utf16": (GOOD.encode("utf-16"), "not UTF-8"),
    "half_a_character": (b"name: \xe2\x82", "not UTF-8"),
    "binary": (bytes(range(256)), "not UTF-8"),
    "gzip": (b"\x1f\x8b\x08\x00\x00\x00\x00\x00", "not UTF-8"),
    "json_cut": (b'{"name": "x", "seed"', "not YAML"),
    "nul_only": (b"\0\0\0\0", "control character"),
}


def refused(path: Path, overrides: tuple[str, ...] = (), target: str | None = None) -> ScenarioError:
    with pytest.raises(ScenarioError) as caught:
        load(path, overrides, target)
    for problem in caught.value.problems:
        assert problem.where, problem
        assert len(problem.text) < 1500
    return caught.value


def exit_code(*arguments: str) -> int:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(check)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result.exit_code


def test_the_unbroken_file_loads(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(GOOD)
    assert load(tmp_path / "good.yaml").name == "good"
    assert exit_code(str(tmp_path / "good.yaml")) == 0


def test_there_are_more_than_a_hundred() -> None:
    assert len(TABLE) + len(WHOLE) > 100


@pytest.mark.parametrize("case", TABLE)
def test_one_change_is_told_with_its_line(case: str, tmp_path: Path) -> None:
    old, new, word = TABLE[case]
    assert GOOD.count(old) == 1, f"{old!r} must stand in GOOD once"
    path = tmp_path / "broken.yaml"
    path.write_text(GOOD.replace(old, new))
    error = refused(path)
    assert word in str(error)
    found = re.match(rf"{re.escape(str(path))}:(\d+): ", str(error))
    assert found, str(error)
    if case not in ELSEWHERE:
        assert int(found[1]) == GOOD[: GOOD.index(old)].count("\n") + 1, str(error)
    assert exit_code(str(path)) == 2


@pytest.mark.parametrize("case", WHOLE)
def test_files_that_are_no_scenarios(case: str, tmp_path: Path) -> None:
    content, word = WHOLE[case]
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    error = refused(path)
    assert word in str(error)
    assert re.match(rf"{re.escape(str(path))}:\d+: ", str(error)), str(error)
    assert exit_code(str(path)) == 2


def test_a_directory_a_missing_and_an_unreadable_file(tmp_path: Path) -> None:
    for path, word in ((tmp_path, "directory"), (tmp_path / "none.yaml", "No such file"), (tmp_path / ("x" * 300), "too long")):
        assert word in str(refused(path))
        assert exit_code(str(path)) == 2


def test_a_missing_file_has_no_line_and_may_be_meant_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenarios").mkdir()
    (tmp_path / "scenarios/wave.yaml").write_text(GOOD)
    missing = "cannot be read: No such file or directory"
    for name in ("wave", "wave.yaml", "elsewhere/wave.yaml"):
        assert str(refused(Path(name))) == f"{name}: {missing} (did you mean scenarios/wave.yaml?)"
    assert str(refused(Path("tide"))) == f"tide: {missing}"


@pytest.mark.parametrize(
    ("assignment", "text"),
    [
        ("control={law: pid}", "control.setpoint: is missing; for example setpoint: 80% or 8 or 800ms"),
        ("control={law: bucket}", "control.rate: is missing; for example rate: 2/s"),
        ("workload.arrivals={shape: ramp, start: 1/s, end: 2/s}", "workload.arrivals.over: is missing; for example over: 5m"),
        ("workload.classes.agent.prompt={dist: fixed}", "workload.classes.agent.prompt.value: is missing"),  # no example
    ],
)
def test_a_missing_key_is_told_with_an_example(assignment: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    assert str(refused(path, (assignment,))) == f"--set {assignment}: {text}"


@pytest.mark.parametrize(
    ("assignment", "word"),
    [
        ("seed", "key.path=value"),
        ("=3", "key.path=value"),
        ("a..b=3", "key.path=value"),
        ("seed=seven", "integer"),
        ("control.patience=10", "no unit"),
        ("control.patinece=10s", "did you mean 'patience'"),
        ("seed.x=3", "has no key 'x'"),
        ("stop.7.for=3s", "has no key '7'"),
        ("seed=[", "not YAML"),
        ("seed=!!python/name:os.system", "tag"),
        ("workload.classes.chat.prompt.alpha=x", "number"),
        ("stop.0.for=soon", "a duration"),
    ],
)
def test_overrides_point_to_themselves(assignment: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    error = refused(path, (assignment,))
    assert str(error).startswith(f"--set {assignment}: ")
    assert word in str(error)
    assert exit_code(str(path), "--set", assignment) == 2


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://user:hunter2@host", "http://host/v1?key=3", ""])
def test_targets_that_are_no_servers(url: str, tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    error = refused(path, target=url)
    assert str(error).startswith("--target")
    assert exit_code(str(path), "--target", url) == 2


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    text = GOOD.replace("mean: 3/s", "mean: 3").replace("seed: 7", "sede: 7").replace("patience: 5s", "patience: -5s")
    path.write_text(text)
    error = refused(path)
    assert [problem.key for problem in error.problems] == ["workload.arrivals.mean", "control.patience", "sede"]
    many = GOOD + "".join(f"wrong{number}: 1\n" for number in range(30))
    path.write_text(many)
    assert len(refused(path).problems) == 30
    assert str(refused(path)).count("\n") == 20  # twenty problems and how many more
    assert str(refused(path)).endswith("... and 10 more")
