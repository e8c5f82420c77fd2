"""scenarios/whatif/: every file checks clean, and short runs point where docs/whatif.md says the full ones do."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvbench.cli import app
from tests.whole import ROOT, Whole, simulated

FILES = sorted((ROOT / "scenarios/whatif").glob("*.yaml"))


def played(name: str, folder: Path, seconds: int) -> Whole:
    folder = folder / name
    folder.mkdir()
    return simulated((ROOT / f"scenarios/whatif/{name}.yaml").read_text(), folder, f"phases.steady.for={seconds}s")


def last(run: Whole, name: str) -> float:
    """The last reading of a gauge of the engine."""
    return [float(line["value"]) for line in run.lines("samples.jsonl") if line["name"] == name and not line["labels"]][-1]


def of(run: Whole, *keys: str) -> Any:
    found: Any = run.summary
    for key in keys:
        found = found[key]
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_checks_clean(file: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(file)])
    assert result.exit_code == 0, result.output
    assert f"name: {file.stem}\n" in file.read_text()
    assert f"whatif/{file.stem}.yaml" in (ROOT / "docs/whatif.md").read_text(), "no word of it in docs/whatif.md"


def test_a_sharing_takes_less_memory(tmp_path: Path) -> None:
    shared, alone = played("a-shared", tmp_path, 60), played("a-alone", tmp_path, 60)
    assert of(shared, "engine", "kv_usage", "mean") < 0.6 * of(alone, "engine", "kv_usage", "mean")
    assert of(shared, "engine", "hit_rate", "value") > 0.6
    assert of(alone, "engine", "hit_rate", "value") < 0.01


def test_f_delta_writes_less_for_the_same_conversations(tmp_path: Path) -> None:
    delta, whole = played("f-delta", tmp_path, 60), played("f-whole", tmp_path, 60)
    assert of(delta, "outcomes", "ok") == of(whole, "outcomes", "ok") > 50
    name = "tier_ssd_written_bytes_total"
    assert 0 < last(delta, name) < 0.8 * last(whole, name)


def test_h_apart_decodes_evenly_and_answers_later(tmp_path: Path) -> None:
    mixed, split = played("h-mixed", tmp_path, 15), played("h-split", tmp_path, 15)
    assert of(split, "latency", "tpot", "p50") < 0.85 * of(mixed, "latency", "tpot", "p50")
    assert of(split, "latency", "ttft", "p50") > of(mixed, "latency", "ttft", "p50")


@pytest.mark.slow
def test_i_a_starved_group_costs_everybody(tmp_path: Path) -> None:
    fair, starved = played("i-fair", tmp_path, 240), played("i-starved", tmp_path, 240)
    assert of(starved, "engine", "hit_rate", "value") < 0.85 < of(fair, "engine", "hit_rate", "value")
    assert of(starved, "latency", "ttft", "mean") > 1.3 * of(fair, "latency", "ttft", "mean")
