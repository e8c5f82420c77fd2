"""Clusters in whole runs: nodes in samples, a node lost and back, what a scenario may not ask."""

import json
from collections import Counter
from pathlib import Path

import pytest

from kvbench.scenario import ScenarioError, load
from tests.whole import simulated

SCENARIO = """
name: nodes
seed: 7
target:
  kind: sim
  model: llama-3.1-8b
  hardware: rtx-4090
  cluster: {{replicas: 3{more}}}
  faults: [{faults}]
workload:
  arrivals: {{shape: constant, rate: 8/s}}
  prompt: {{dist: uniform, min: 100, max: 900}}
  output: {{dist: uniform, min: 20, max: 200, force: true}}
phases: {{steady: {{for: 30s}}, drain: {{for: 30s}}}}
"""
LOSS = "{kind: node_loss, node: 1, at: 10s, for: 10s}"


def samples(directory: Path, name: str) -> list[dict]:
    return [row for row in map(json.loads, (directory / "samples.jsonl").read_text().splitlines()) if row["name"] == name]


def test_a_lost_node_is_seen_and_nothing_fails_where_jobs_are_tried_again(tmp_path: Path) -> None:
    run = simulated(SCENARIO.format(more="", faults=LOSS), tmp_path)
    assert run.summary["accounting"]["total"]["ok"] == 240
    up = {(row["labels"]["node"], row["t"]): row["value"] for row in samples(run.directory, "up")}
    assert [up["1", float(t)] for t in (9, 11, 19, 21)] == [1, 0, 0, 1]
    assert all(value == 1 for (node, _), value in up.items() if node != "1")
    total = {row["t"]: row["value"] for row in samples(run.directory, "running") if row["source"] == "target"}
    nodes = Counter()
    for row in samples(run.directory, "running"):
        if row["source"] == "node":
            nodes[row["t"]] += row["value"]
    assert total == {t: nodes[t] for t in total}
    assert run.summary["engine"]["kv_usage"]["n"] > 0  # one series: the nodes' stand apart


def test_with_fail_its_requests_fail_by_name(tmp_path: Path) -> None:
    run = simulated(SCENARIO.format(more=", on_loss: fail", faults=LOSS), tmp_path)
    failures = {(row["outcome"], row["class"]): row["n"] for row in run.summary["failures"]}
    assert set(failures) == {("failed", "node_lost")}
    assert run.summary["accounting"]["total"]["ok"] + failures["failed", "node_lost"] == 240


@pytest.mark.parametrize(
    ("more", "faults", "said"),
    [
        ("", "{kind: slow, node: 3, at: 1s, factor: 2}", "nodes 0 to 2"),
        (", router: {kind: load_awre}", "", "load_aware"),
        (", nodes: [{hardware: h100}]", "", "nodes"),
    ],
)
def test_what_it_may_not_ask(more: str, faults: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO.format(more=more, faults=faults))
    with pytest.raises(ScenarioError, match=said):
        load(path)
