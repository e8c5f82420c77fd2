"""`kvbench laws compare`: one scenario under several laws, whole runs on the embedded engine and against a server."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvbench.cli import app
from kvbench.cli.compare import variants
from kvbench.report.files import load as load_run
from kvbench.scenario import ScenarioError, load
from tests.whole import instant

SCENARIO = """\
name: pressed
seed: 7
target: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090, engine: vllm}
workload:
  arrivals: ARRIVALS
  prompt: {dist: uniform, min: 500, max: 3000}
  output: {dist: uniform, min: 64, max: 600, force: true}
  slo: {response_ttft: 2s}
control: {law: bucket, rate: 1.5/s, burst: 2, patience: 4s}
phases:
  steady: {for: 60s}
  drain: {for: 60s}
"""
OPEN = "{shape: constant, rate: 3/s}"
BUCKET = "law: bucket, rate: 1.5/s, burst: 2"
Compare = Callable[..., Result]


@pytest.fixture
def compare(tmp_path: Path) -> Compare:
    def run(*arguments: str, arrivals: str = OPEN, text: str = SCENARIO) -> Result:
        file = tmp_path / "scenario.yaml"
        file.write_text(text.replace("ARRIVALS", arrivals))
        return CliRunner().invoke(app, ["laws", "compare", str(file), "--out", str(tmp_path / "out"), *arguments])

    return run


def found(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_laws_meet_the_same_requests_and_every_run_is_kept(compare: Compare) -> None:
    """3/s are offered, 1.5/s let in: the bucket sheds about half, none sheds nothing."""
    told = found(compare("--law", "none", "--law", "bucket", "--json"))
    assert list(told["laws"]) == ["bucket", "none"]  # the scenario's own first
    assert told["offered"]["n"] == 180
    folder = Path(told["directory"])
    assert json.loads((folder / "compare.json").read_text()) == told
    runs = {law: load_run(Path(row["directory"])) for law, row in told["laws"].items()}
    assert all(run.directory.parent == folder for run in runs.values())
    for law, row in told["laws"].items():
        ended = [record.outcome for record in runs[law].records]
        share = ended.count("shed") / (180 - ended.count("withdrawn") - ended.count("cancelled"))
        assert row["measures"]["shed_share"]["value"] == pytest.approx(share)
    dues = {law: [(r.due_ns, r.asked_in) for r in sorted(run.records, key=lambda r: r.id)] for law, run in runs.items()}
    assert dues["bucket"] == dues["none"]
    assert told["laws"]["bucket"]["measures"]["shed_share"]["value"] > 0.3
    assert told["laws"]["none"]["measures"]["shed_share"] == {"value": 0.0, "reason": None, "best": True}
    assert told["laws"]["bucket"]["control"]["rate"] == 1.5  # its own block
    assert told["laws"]["none"]["control"]["patience"] == 4.0  # what laws have in common


def test_the_table_marks_the_best_and_says_what_was_the_same(compare: Compare) -> None:
    result = compare("--law", "none", "--law", "bucket")
    assert result.exit_code == 0, result.output
    assert "the same 180 requests over 1m00s of steady" in result.output
    goodput = next(line for line in result.output.splitlines() if line.strip().startswith("goodput "))
    assert goodput.count("*") == 1


def test_every_law_takes_part_unless_some_are_named(tmp_path: Path) -> None:
    from kvbench.control.laws import LAWS

    file = tmp_path / "scenario.yaml"
    file.write_text(SCENARIO.replace("ARRIVALS", OPEN).replace("law: bucket, rate: 1.5/s, burst: 2", "law: none"))
    laws, notes = variants(load(file), [])
    assert {name: type(law) for name, law in laws.items()} == LAWS
    assert {law.patience for law in laws.values()} == {4.0}
    assert laws["bucket"].rate == pytest.approx(3.0)
    assert "bucket: rate 3/s, since the scenario does not say" in notes


def test_an_assumed_rate_is_rounded_as_rates_are(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(
        SCENARIO.replace("ARRIVALS", "{shape: wave, mean: 3/s, amplitude: 50%, period: 47s}").replace(BUCKET, "law: none")
    )
    laws, notes = variants(load(file), ["bucket"])
    assert len(f"{laws['bucket'].rate}") > 8  # what is rounded is only what is said
    assert notes == [f"bucket: rate {laws['bucket'].rate:.3g}/s, since the scenario does not say"]


@pytest.mark.parametrize(
    "change",
    [("ARRIVALS", "{shape: closed, concurrency: 4}"), ("{for: 60s}\n  drain", "{requests: 50}\n  drain")],
)
def test_a_law_that_lacks_a_rate_is_left_out_unless_it_is_named(tmp_path: Path, change: tuple[str, str]) -> None:
    from kvbench.control.laws import LAWS

    file = tmp_path / "scenario.yaml"
    file.write_text(SCENARIO.replace(*change).replace("ARRIVALS", OPEN).replace(BUCKET, "law: none"))
    laws, notes = variants(load(file), [])
    assert list(laws) == [name for name in LAWS if name != "bucket"]
    assert any(note.startswith("bucket is left out: the load has no mean rate to take") for note in notes)
    with pytest.raises(ScenarioError, match="it needs `rate`"):
        variants(load(file), ["bucket"])


def test_the_command_leaves_it_out_and_says_so(compare: Compare) -> None:
    text = SCENARIO.replace(BUCKET, "law: none").replace("{for: 60s}\n  drain", "{requests: 20}\n  drain")
    told = found(compare("--json", text=text))
    assert "bucket" not in told["laws"]
    assert len(told["laws"]) == 4
    assert any("bucket is left out" in note for note in told["notes"])


@pytest.mark.parametrize("arrivals", ["{shape: closed, concurrency: 4}"])
def test_load_that_depends_on_answers_cannot_be_compared(compare: Compare, arrivals: str) -> None:
    result = compare("--law", "none", "--law", "bucket", arrivals=arrivals)
    assert result.exit_code == 4, result.output
    assert "not comparable: bucket" in result.output
    assert "no closed loop" in result.output


def test_what_is_wrong_is_said_with_exit_code_2(compare: Compare) -> None:
    unknown = compare("--law", "pod")
    assert unknown.exit_code == 2
    assert "--law pod: there is no such law; known are none, bucket" in unknown.output
    own = SCENARIO.replace("law: bucket, rate: 1.5/s, burst: 2", "law: none")
    rateless = compare("--law", "bucket", arrivals="{shape: closed, concurrency: 4}", text=own)
    assert rateless.exit_code == 2
    assert "it needs `rate`" in rateless.output


def test_a_server_is_driven_by_one_law_after_the_other(compare: Compare) -> None:
    text = SCENARIO.replace("{for: 60s}", "{for: 3s}").replace(
        "output: {dist: uniform, min: 64, max: 600, force: true}", "output: 2"
    )
    with instant(2) as url:
        text = text.replace("{kind: sim, model: llama-3.1-8b, hardware: rtx-4090, engine: vllm}", f'{{kind: http, url: "{url}"}}')
        text = text.replace("slo:", "#").replace("prompt: {dist: uniform, min: 500, max: 3000}", "prompt: 8")
        told = found(compare("--law", "none", "--law", "bucket", "--set", "target.tokenizer=words", "--json", text=text))
    assert told["clock"] == "real"
    assert told["notes"][0].startswith("the laws drive the server one after the other")
    assert told["offered"]["n"] == 9


def test_no_answer_ends_it(compare: Compare) -> None:
    text = SCENARIO.replace(
        "{kind: sim, model: llama-3.1-8b, hardware: rtx-4090, engine: vllm}", '{kind: http, url: "http://127.0.0.1:9"}'
    )
    result = compare("--law", "none", text=text)
    assert result.exit_code == 6
    assert "target unreachable" in result.output
