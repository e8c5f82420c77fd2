"""The collector of server metrics against a real vLLM: what its page came to over a run is what the answers say, unasked."""

import asyncio
from pathlib import Path
from typing import Any

import uvloop

from tests.real.test_vllm import SCENARIO, URL, idle, pytestmark
from tests.whole import Whole, finished, kvbench, play

__all__ = ["pytestmark"]  # needs a server at KVBENCH_REAL_URL, as test_vllm.py does


def run(folder: Path, *sets: str) -> Whole:
    idle()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return finished(runner.run(play(SCENARIO, folder, *sets)))


def checks(found: Whole) -> dict[str, Any]:
    return {row["check"]: row for row in found.summary["verdict"]["checks"]}


def test_the_runs_deltas_are_our_own_counts(tmp_path: Path) -> None:
    found = run(tmp_path, "workload.prefixes={groups: 1, tokens: 80, share: 100%}")
    metrics, records = found.summary["server"]["metrics"], found.records
    assert {record.outcome for record in records} == {"ok"}
    assert metrics["finished_total"]["value"] == len(records)
    assert metrics["prompt_tokens_total"]["value"] == sum(record.n_in for record in records)
    assert metrics["generation_tokens_total"]["value"] == sum(record.n_out for record in records)
    assert metrics["hit_tokens_total"]["value"] == sum(record.cached for record in records) > 0
    assert metrics["server_e2e"]["n"] == metrics["server_ttft"]["n"] == len(records)
    rows = checks(found)
    assert [(rows[name]["value"], rows[name]["level"]) for name in ("server_requests", "count_mismatch")] == [(0, "OK")] * 2
    (page,) = found.summary["server"]["pages"]
    (engine,) = page["engines"]
    assert (page["kinds"], engine["block_size"], engine["num_gpu_blocks"]) == (["vllm"], 32, 200)
    assert engine["capacity_tokens"] == 6400
    assert found.summary["engine"]["kv_usage"]["n"] > 0
    assert found.summary["engine"]["kv_usage"]["names"] == ["vllm:kv_cache_usage_perc"]


def test_the_servers_latencies_bound_ours(tmp_path: Path) -> None:
    """Where the server says that a request took at most so long, ours took at least the lower edge of its bucket."""
    found = run(tmp_path, "phases.warmup={policy: none}")
    told = found.summary["server"]["metrics"]["server_e2e"]
    ours = sorted((record.end_ns - record.sent_ns) / 1e9 for record in found.records)
    assert ours[-1] >= told["p999"]["low"]
    assert told["mean"] <= sum(ours) / len(ours)


def test_preemptions_are_told_and_the_hit_rate_is_warned_of(tmp_path: Path) -> None:
    """24 answers of 320 tokens at once need more than 200 blocks of 32: the server preempts."""
    sets = ("workload.arrivals={shape: closed, concurrency: 24}", "workload.prompt=64", "workload.output=320")
    found = run(tmp_path, *sets, "phases.warmup={policy: none}", "phases.steady={requests: 24}", "phases.drain={for: 300s}")
    preempted = found.summary["server"]["metrics"]["preemptions_total"]["value"]
    assert preempted > 0
    assert checks(found)["recompute_in_hits"]["value"] == preempted
    assert any(line.startswith(f"the server preempted {preempted:,.0f} times") for line in found.summary["warnings"])
    assert found.summary["engine"]["kv_usage"]["max"] > 0.9


def test_kvbench_metrics_understands_the_page() -> None:
    found = kvbench("metrics", URL)
    assert found.returncode == 0
    assert "not exposed" not in found.stdout
