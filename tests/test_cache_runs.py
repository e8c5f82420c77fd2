"""Whole runs whose cache.jsonl, folded, must be what the engine's own counters say: layer groups over tiers in a cluster."""

from collections import Counter, defaultdict
from pathlib import Path

import pytest

from kvbench.metrics import kv
from kvbench.profile import load_model
from kvbench.report.files import load
from tests.whole import Whole, simulated

SCENARIO = """
name: all
seed: 5
target:
  kind: sim
  model: llama-3.1-8b
  hardware: rtx-4090
  cache_log: 100%
  settings: {blocks: 161, policy: POLICY}
  layers:
    groups:
      - {layers: 1-6, quota: 20%}
      - {layers: 7-12, codec: int4-g64, block: 32, quota: 10%}
      - {layers: "13+", codec: fp8}
    partition: dynamic
    every: 1s
  tiers: {host: {capacity: 100MB}, ssd: {capacity: 300MB}, persist: 2s, TIERS}
  cluster: {replicas: 3, router: round_robin, migrate: 1GB, store: {cold: 2s}}
  faults: [FAULTS]
workload:
  arrivals: {shape: poisson, rate: 6/s}
  prompt: {dist: uniform, min: 40, max: 400}
  output: {dist: uniform, min: 5, max: 40, force: true}
  prefixes: {groups: 12, zipf: 0.5, tokens: 256, share: 80%}
phases: {steady: {for: 10s}, drain: {for: 60s}}
"""
GROUPS = {"1_6": 16, "7_12": 32, "13_32": 16}  # tokens of a block
LOSS = "{kind: node_loss, node: 1, at: 4s, for: 2s}, {kind: reset_storm, at: 7s, for: 2s, every: 1s}"


def last(run: Whole, name: str) -> float:
    """What the run's last sample says of the whole cluster."""
    return [row["value"] for row in run.lines("samples.jsonl") if row["name"] == name and "node" not in row.get("labels", {})][-1]


def counted(run: Whole) -> None:
    """What holds with losses too: hits by group, misses by reason, migrations."""
    found = run.summary["cache"]
    assert found["groups"].keys() == {"0", "1", "2"}
    for (name, block), row in zip(GROUPS.items(), found["groups"].values(), strict=True):
        assert row["hits"] * block == last(run, f"hit_tokens_{name}_total") > 0
        assert sum(row["misses"].values()) == row["lookups"] - row["hits"] > 0
        assert row["block_hit_rate"] == row["hits"] / row["lookups"]
    assert found["hits"] == sum(row["hits"] for row in found["groups"].values())
    assert found["ops"].get("migrate", 0) == last(run, "migrated_blocks_total")
    assert 0 < found["byte_efficiency"] < found["byte_residency"] < 1


@pytest.mark.parametrize(
    ("policy", "tiers"),
    [("lru", "write: write_back"), pytest.param("s3fifo", "write: write_through", marks=pytest.mark.slow)],
)
def test_the_file_folds_to_the_gauges_of_layers_tiers_and_cluster(policy: str, tiers: str, tmp_path: Path) -> None:
    text = SCENARIO.replace("POLICY", policy).replace("TIERS", tiers).replace("FAULTS", "")
    run = simulated(text.replace(", persist: 2s", "") if "through" in tiers else text, tmp_path)
    counted(run)
    found, records = run.summary["cache"], run.records
    assert {record.outcome for record in records} == {"ok"}
    for (name, block), row in zip(GROUPS.items(), found["groups"].values(), strict=True):
        assert last(run, f"lookup_tokens_{name}_total") == sum(record.n_in for record in records)
        assert row["lookups"] == sum((record.n_in - 1) // block for record in records)
    # A prefix is found as far as every group has it: request by request the least of the groups' hits.
    hits: dict[int, Counter[int]] = defaultdict(Counter)
    below: Counter[str] = Counter()
    for line in run.lines("cache.jsonl"):
        if line["op"] == "hit" and not line.get("again"):
            hits[line["job"]][line.get("group", 0)] += [*GROUPS.values()][line.get("group", 0)]
            below[line.get("tier", "gpu")] += 1
    assert {record.id: record.cached for record in records} == {
        record.id: min(hits[record.id][group] for group in range(3)) for record in records
    }
    assert last(run, "hit_tokens_total") == sum(record.cached for record in records)
    assert below["host"] + below["ssd"] > 0


def test_losses_and_resets_are_in_the_file_as_in_the_gauges(tmp_path: Path) -> None:
    run = simulated(SCENARIO.replace("POLICY", "lru").replace("TIERS", "write: write_back").replace("FAULTS", LOSS), tmp_path)
    counted(run)
    assert run.summary["cache"]["misses"]["reset"] > 0
    files = load(run.directory)
    assert kv.fold([], files.end, 1.0, None)["lookups"] == 0


HYBRID = """
name: hybrid
seed: 5
target: {kind: sim, model: MODEL, hardware: h100, cache_log: 100%, settings: {blocks: BLOCKS, max_num_batched_tokens: 512}}
workload:
  arrivals: {shape: poisson, rate: 8/s}
  prompt: {dist: uniform, min: 100, max: 900}
  output: {dist: uniform, min: 5, max: 40, force: true}
  prefixes: {groups: 8, zipf: 0.5, tokens: 640, share: 80%}
phases: {steady: {for: 10s}, drain: {for: 60s}}
"""


@pytest.mark.parametrize(("model", "blocks", "kinds"), [("gpt-oss-20b", 601, "fw"), ("gemma-3-4b", 2401, "fwwwwww")])
def test_lines_of_a_hybrid_model_fold_by_group(model: str, blocks: int, kinds: str, tmp_path: Path) -> None:
    run = simulated(HYBRID.replace("MODEL", model).replace("BLOCKS", str(blocks)), tmp_path)
    told = load(run.directory).manifest["target"]["groups"]
    assert sorted(group["name"][0] for group in told) == sorted(kinds)
    window = load_model(model).kinds
    reach = next(part.window for part in window if part.window)
    found = run.summary["cache"]
    assert list(found["groups"]) == [str(at) for at in range(len(told))]
    assert found["misses"]["evicted"] > 0 < found["ops"]["evict"]
    for group, row in zip(told, found["groups"].values(), strict=True):
        block, hits, lookups = group["block"], 0, 0
        for record in run.records:  # a window group needs the blocks of the last `window - 1` tokens of what was found
            had = record.cached // block
            used = had - max(0, record.cached - reach + 1) // block if group["name"].startswith("window") else had
            hits += used
            lookups += used + (record.n_in - 1) // block - had
        assert (row["hits"], row["lookups"]) == (hits, lookups)
        assert hits > 0
        assert sum(row["misses"].values()) == lookups - hits
    assert 0 < found["byte_efficiency"] < found["byte_residency"] < 1
    allocated = Counter(line.get("group", 0) for line in run.lines("cache.jsonl") if line["op"] == "alloc")
    assert set(allocated) == set(range(len(told)))
