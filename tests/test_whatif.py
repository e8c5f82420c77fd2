"""scenarios/whatif/: every file checks clean, and short runs point where docs/whatif.md says the full ones do."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvbench.cli import app
from kvbench.scenario import load
from kvbench.verdict import checks
from tests.whole import ROOT, Whole, simulated

KILLS = "target.settings.max_preemptions=0"
FILES = sorted((ROOT / "scenarios/whatif").glob("*.yaml"))


def played(name: str, folder: Path, seconds: int, *sets: str) -> Whole:
    folder = folder / f"{name}-{len(list(folder.iterdir()))}"
    folder.mkdir()
    return simulated((ROOT / f"scenarios/whatif/{name}.yaml").read_text(), folder, f"phases.steady.for={seconds}s", *sets)


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


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["equal", "mixed"])
def test_c_requests_fail_under_round_robin_and_not_under_load_aware(tmp_path: Path, nodes: str) -> None:
    turns, aware = (played(f"c-{nodes}-{router}", tmp_path, 90, KILLS) for router in ("round-robin", "load-aware"))
    assert last(turns, "oom_rate") == of(turns, "outcomes", "failed_by_class", "oom") / of(turns, "outcomes", "offered") > 0.03
    assert last(aware, "oom_rate") <= 0.001
    assert of(turns, "outcomes", "failed_by_class").keys() == {"oom"}


@pytest.mark.slow
def test_d_reserving_fills_memory_and_delays_first_tokens(tmp_path: Path) -> None:
    demand, ahead = (played("d-dynamic", tmp_path, 60, *sets) for sets in (("target.settings.preallocate=null",), ()))
    assert of(ahead, "engine", "kv_usage", "mean") > of(demand, "engine", "kv_usage", "mean") + 0.05
    assert last(ahead, "preemptions_total") < 0.5 * last(demand, "preemptions_total")
    assert of(ahead, "latency", "ttft", "mean") > 1.5 * of(demand, "latency", "ttft", "mean")


@pytest.mark.slow
def test_b_short_sequences_are_worse_off_with_a_sparse_plan(tmp_path: Path) -> None:
    """Below 512 tokens layers 13-32 are raw, in a pool that was cut for an eighth of it."""
    short = ("prompt.median=150", "prompt.min=32", "prompt.max=200", "output.min=100", "output.max=300", "arrivals.rate=18/s")
    sets = [f"workload.{one}" for one in short]
    plain, codecs = played("b-plain", tmp_path, 20, *sets), played("b-codecs", tmp_path, 20, *sets)
    assert last(plain, "preemptions_total") == 0 < last(codecs, "preemptions_total")
    assert of(codecs, "latency", "ttft", "mean") > 2 * of(plain, "latency", "ttft", "mean")


def test_e_encoding_in_the_background_takes_less_memory_and_no_step_waits_for_it(tmp_path: Path) -> None:
    ways = [played(name, tmp_path, 10) for name in ("e-sync", "e-async")]
    peaks = [last(run, "kv_peak_bytes") for run in ways]
    assert 0.75 * peaks[0] < peaks[1] < 0.95 * peaks[0]
    assert of(ways[1], "latency", "tpot", "p50") < of(ways[0], "latency", "tpot", "p50")
    most = [max(float(line["value"]) for line in run.lines("samples.jsonl") if line["name"] == "staged_bytes") for run in ways]
    assert most[0] > 30 * most[1] > 0  # a chunk in 32 layers, and in one


def test_f_delta_writes_less_for_the_same_conversations(tmp_path: Path) -> None:
    delta, whole = played("f-delta", tmp_path, 60), played("f-whole", tmp_path, 60)
    assert of(delta, "outcomes", "ok") == of(whole, "outcomes", "ok") > 50
    name = "tier_ssd_written_bytes_total"
    assert 0 < last(delta, name) < 0.8 * last(whole, name)


def test_h_apart_decodes_evenly_and_answers_later(tmp_path: Path) -> None:
    mixed, split = played("h-mixed", tmp_path, 15), played("h-split", tmp_path, 15)
    assert of(split, "latency", "tpot", "p50") < 0.85 * of(mixed, "latency", "tpot", "p50")
    assert of(split, "latency", "ttft", "p50") > of(mixed, "latency", "ttft", "p50")


def test_j_what_waits_in_an_engine_that_preempts_fails_in_one_that_does_not(tmp_path: Path) -> None:
    """48 GB of KV are asked for where 16 fit: a fifth of the requests fail, two thirds where all are let in at once, and nobody
    with an answer reserved at admission, in two devices more, or where requests may be preempted once."""
    chunk = ("target.settings.admission=chunk", "target.settings.max_num_batched_tokens=2048")
    failed = {
        sets: of(played("j-llama", tmp_path, 5, *sets), "outcomes", "failed")
        for sets in (
            (KILLS,),
            (KILLS, *chunk),
            (KILLS, "target.settings.preallocate=90%"),
            ("target.settings.max_preemptions=1",),
        )
    }
    assert list(failed.values()) == [3, 10, 0, 0]


@pytest.mark.slow
def test_i_a_starved_group_costs_everybody(tmp_path: Path) -> None:
    fair, starved = played("i-fair", tmp_path, 240), played("i-starved", tmp_path, 240)
    assert of(starved, "engine", "hit_rate", "value") < 0.85 < of(fair, "engine", "hit_rate", "value")
    assert of(starved, "latency", "ttft", "mean") > 1.3 * of(fair, "latency", "ttft", "mean")


def test_fifteen_requests_are_no_reason_to_call_j_invalid() -> None:
    limits = checks(load(ROOT / "scenarios/whatif/j-llama.yaml").verdict)["steady_requests"]
    assert (limits.degraded, limits.invalid) == (None, None)
