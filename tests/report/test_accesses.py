"""cache.jsonl in the report: of a run, of a torn file, of none."""

import json
from pathlib import Path

from kvbench.report.files import load
from kvbench.report.summary import summarise
from tests.whole import simulated

SCENARIO = """
name: kept
seed: 3
target: {{kind: sim, model: llama-3.1-8b, hardware: rtx-4090, engine: vllm{log}}}
workload:
  arrivals: {{shape: constant, rate: 4/s}}
  prompt: {{dist: uniform, min: 40, max: 400}}
  output: {{dist: fixed, value: 20, force: true}}
  prefixes: {{groups: 3, zipf: 1.0, tokens: 128, share: 80%}}
phases: {{steady: {{for: 20s}}, drain: {{for: 20s}}}}
"""


def test_the_file_says_what_the_engine_counted(tmp_path: Path) -> None:
    directory = simulated(SCENARIO.format(log=", cache_log: 100%"), tmp_path).directory
    summary = json.loads((directory / "summary.json").read_text())
    found = summary["cache"]
    hit = summary["engine"]["hit_rate"]
    assert found["hits"] * 16 == round(hit["value"] * hit["n"])
    assert sum(found["misses"].values()) == found["lookups"] - found["hits"]
    assert found["misses"]["compulsory"] > 0
    assert summary["target"]["cache_log"] == 1.0
    assert "block hit rate" in (directory / "report.html").read_text()


def test_without_the_key_there_is_no_file(tmp_path: Path) -> None:
    directory = simulated(SCENARIO.format(log=""), tmp_path).directory
    assert not (directory / "cache.jsonl").exists()
    assert json.loads((directory / "summary.json").read_text())["cache"] is None


def test_torn_and_damaged_lines_are_dropped_and_counted(tmp_path: Path) -> None:
    directory = simulated(SCENARIO.format(log=", cache_log: 50%"), tmp_path).directory
    path = directory / "cache.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[3] = b'{"t":1,"op":"miss"}'  # a miss without a reason is not ours
    path.write_bytes(b"\n".join(lines[:-1])[:-5])
    summary = summarise(load(directory))
    assert summary["cache"]["share"] == 0.5
    assert summary["run"]["torn_lines"]["cache.jsonl"] == 1
    assert summary["run"]["damaged_lines"]["cache.jsonl"] == 1
