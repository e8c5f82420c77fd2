"""Tiers in whole runs: what a scenario says, what its samples tell, and what a recorded agent's trace saves by delta writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.engine import Job
from kvbench.engine.engine import Engine
from kvbench.engine.tiers import TiersSpec, build_below
from kvbench.profile import load_engine, load_hardware, load_model
from kvbench.scenario import ScenarioError
from tests.whole import ROOT, Whole, kvbench, simulated

TEXT = """\
name: tiers
seed: 7
target:
  kind: sim
  model: smollm2-135m
  hardware: rtx-4090
  settings: {blocks: 120}
  TIERS
workload: {arrivals: {shape: constant, rate: 2/s}, prompt: 100, output: 16, sessions: {turns: 4, think: 4s}}
phases: {steady: {for: 30s}, drain: {for: 1m}}
"""


def run(tiers: str, folder: Path) -> Whole:
    folder.mkdir(exist_ok=True)
    return simulated(TEXT.replace("TIERS", f"tiers: {tiers}" if tiers else ""), folder)


def last(whole: Whole) -> dict[str, float]:
    return {line["name"]: line["value"] for line in whole.lines("samples.jsonl")}


def manifest(whole: Whole) -> dict[str, Any]:
    return json.loads((whole.directory / "manifest.json").read_text())


def test_samples_tell_of_every_tier_and_the_manifest_what_it_is(tmp_path: Path) -> None:
    whole = run("{host: {capacity: 64MiB}, ssd: {capacity: 4GiB}, write: write_through, prefetch: 2}", tmp_path / "with")
    bare = last(run("", tmp_path / "without"))
    told = last(whole)
    assert told["hit_tokens_total"] > 1.5 * bare["hit_tokens_total"]
    below = told["hit_tokens_host_total"] + told["hit_tokens_ssd_total"]
    assert 0 < below <= told["hit_tokens_total"]
    assert 0 < told["tier_host_used"] <= 1
    assert told["tier_ssd_written_bytes_total"] == pytest.approx(told["tier_ssd_used"] * 2**32)
    assert told["ssd_dwpd"] > 0
    assert 0 < told["delta_saving"] < 1
    facts = manifest(whole)["target"]["tiers"]
    assert facts["ssd"]["profile"] == "ssd-nvme-gen4"
    assert facts["write"] == "write_through"


def test_a_directory_that_cannot_be_written_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ScenarioError, match=r"target\.tiers\.ssd\.real: .*file/kv' cannot be written"):
        run(f"{{ssd: {{capacity: 64MiB, real: {tmp_path}/file/kv}}}}", tmp_path)
    scenario = tmp_path / "bad.yaml"
    scenario.write_text(TEXT.replace("TIERS", "tiers: {ssd: {capacity: 64MiB, real: file/kv}}"))
    ended = kvbench("run", scenario, "--out", tmp_path / "out")
    assert ended.returncode == 2
    assert "Traceback" not in ended.stdout + ended.stderr


def test_a_slow_tier_that_is_not_there_is_said_at_its_key(tmp_path: Path) -> None:
    text = TEXT.replace("TIERS", "tiers: {host: {capacity: 1GiB}}\n  faults: [{kind: slow_tier, tier: ssd, at: 1s, factor: 2}]")
    with pytest.raises(ScenarioError, match=r"faults\[0\]\.tier: 'ssd' is no tier of target\.tiers \(host\)"):
        simulated(text, tmp_path)


def test_real_files_change_no_result_and_a_second_run_finds_them(tmp_path: Path) -> None:
    tiers = "{host: {capacity: 8MiB}, ssd: {capacity: 200MiB%s}}"
    virtual, real = (run(tiers % more, tmp_path) for more in ("", f", real: {tmp_path}/kv"))
    assert [(r.first_ns, r.cached) for r in virtual.records] == [(r.first_ns, r.cached) for r in real.records]
    told = last(real)
    assert told["ssd_real_written_bytes_total"] - told["ssd_real_moved_bytes_total"] == told["tier_ssd_written_bytes_total"]
    assert told["ssd_real_read_bytes_total"] == told["tier_ssd_read_bytes_total"] > 0
    again = manifest(run(tiers % f", real: {tmp_path}/kv", tmp_path))["target"]["tiers"]
    assert again["ssd"]["real"]["recovered_blocks"] > 100


def test_on_a_recorded_agents_trace_delta_writes_save_what_the_prefix_cache_hits() -> None:
    """Two WEKA traces, request after request. By hand: blocks never seen before / blocks of all requests."""
    requests: list[tuple[int, list[int]]] = []
    for number, path in enumerate(sorted((ROOT / "tests/data/traces/weka").glob("*.json")), 1):
        requests += [(number, each["hash_ids"]) for each in json.loads(path.read_text())["requests"]]
    new = len({(trace, key) for trace, keys in requests for key in keys})
    whole = sum(len(keys) for _, keys in requests)
    model, hardware, profile = load_model("llama-3.1-8b"), load_hardware("h100"), load_engine("vllm", block=64, blocks=4000)
    spec = TiersSpec.model_validate({"ssd": {"capacity": 2**40}, "write": "write_through"})
    built = Engine(model, hardware, profile, below=build_below(spec, model, hardware, profile, lambda: 0))
    for number, (trace, keys) in enumerate(requests):
        at = 100.0 * number
        built.advance(at)
        assert built.submit(Job(number, tuple((key, 64) for key in keys), 1, salt=trace), at) is None
    built.advance(1e5)
    gauges = built.gauges()
    assert gauges["delta_saving"] == pytest.approx(1 - new / whole)
    assert gauges["tier_ssd_written_bytes"] == new * 64 * 131072
    assert gauges["hit_tokens"] / gauges["query_tokens"] == pytest.approx(1 - new / whole, abs=0.01)


def test_each_node_of_a_cluster_has_files_of_its_own_and_finds_them_after_a_loss(tmp_path: Path) -> None:
    text = TEXT.replace("  hardware: rtx-4090\n", "  hardware: rtx-4090\n  cluster: {replicas: 2}\n")
    tiers = (
        f"tiers: {{ssd: {{capacity: 64MiB, real: {tmp_path}/kv}}}}\n  faults: [{{kind: node_loss, node: 1, at: 10s, for: 10s}}]"
    )
    whole = simulated(text.replace("TIERS", tiers), tmp_path)
    assert all(record.outcome == "ok" for record in whole.records)
    for node in (0, 1):
        assert list((tmp_path / f"kv/node-{node}").glob("segment-*.kv"))
