"""`kvbench trace`: what it prints, what it writes, and how it refuses."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from kvbench.cli.trace import sparkline, trace
from kvbench.workload.fit import sample_power_law
from kvbench.workload.lengths import LENGTHS
from kvbench.workload.traces import Row, read, write

DATA = Path(__file__).parents[1] / "data/traces"
RUN = CliRunner()


def column(path: Path, lengths: list[int]) -> Path:
    write(path, [Row(float(i), n, 1) for i, n in enumerate(lengths)], "kvbench")
    return path


def test_inspect_prints_facts_and_warnings() -> None:
    got = RUN.invoke(trace, ["inspect", str(DATA / "weka")])
    assert got.exit_code == 0
    assert "ideal token hit rate" in got.stdout
    assert "warning: all 2 sessions begin at 0" in got.stderr
    as_json = json.loads(RUN.invoke(trace, ["inspect", str(DATA / "weka"), "--json"]).stdout)
    assert as_json["facts"]["sessions"] == 2
    assert as_json["facts"]["blocks"] == read(DATA / "weka").facts["blocks"]


def test_convert_writes_and_says_what_was_lost(tmp_path: Path) -> None:
    out = tmp_path / "out.csv.gz"
    got = RUN.invoke(trace, ["convert", str(DATA / "weka"), str(out), "--to", "vidur"])
    assert got.exit_code == 0
    assert "lost: hashes of" in got.stdout
    assert out.read_bytes()[:2] == b"\x1f\x8b"
    assert [r.n_in for r in read(out).rows] == [r.n_in for r in read(DATA / "weka").rows]


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "absent.jsonl"],
        ["inspect", str(DATA / "README.md")],
        ["inspect", str(DATA / "azure_conv.csv"), "--format", "nonsense"],
        ["convert", str(DATA / "azure_conv.csv"), "nowhere/out", "--to", "kvbench"],
        ["convert", str(DATA / "azure_conv.csv"), "out", "--to", "nonsense"],
        ["fit", str(DATA / "llmservingsim.jsonl")],  # 20 rows
        ["fit", str(DATA / "azure_conv.csv"), "--column", "middle"],
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str]) -> None:
    got = RUN.invoke(trace, arguments)
    assert got.exit_code == 2
    assert "Traceback" not in got.output
    if "middle" not in arguments:  # typer's own refusals come in a box
        assert got.stderr.startswith("error: ")
        assert got.stderr.count("\n") == 1


def test_fit_offers_a_power_law_that_a_scenario_takes(tmp_path: Path) -> None:
    import numpy as np

    x = sample_power_law(2.4, 30, 600, np.random.default_rng(1))
    path = column(tmp_path / "t.jsonl", [int(v) for v in x])
    got = RUN.invoke(trace, ["fit", str(path), "--bootstraps", "20", "--xmin", "30", "--json"])
    found = json.loads(got.stdout)
    assert found["power_law"]["alpha"] == pytest.approx(2.4, abs=0.25)
    assert found["verdict"].startswith("Power law not rejected")
    law = yaml.safe_load("\n".join(found["scenario"]))["prompt"]
    assert LENGTHS[law.pop("dist")].model_validate(law, context={"text": True}).bounds() == (30, int(x.max()))


def test_fit_says_that_real_lengths_are_no_power_law_and_offers_their_quantiles(tmp_path: Path) -> None:
    lengths = [100] * 300 + [400] * 300 + [4000] * 300 + list(range(50, 150))
    got = RUN.invoke(trace, ["fit", str(column(tmp_path / "t.jsonl", lengths)), "--bootstraps", "10"])
    assert got.exit_code == 0
    assert "Power law rejected: p < 0.1" in got.stdout
    law = yaml.safe_load(got.stdout[got.stdout.index("prompt:") :])["prompt"]
    assert law.pop("dist") == "histogram"
    spec = LENGTHS["histogram"].model_validate(law, context={"text": True})
    assert spec.quantile(0.5) == 400


def test_the_sparkline_shows_every_part_that_is_not_empty() -> None:
    assert sparkline([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 2.5, 4.0], 4) == "█ ▁▁"
