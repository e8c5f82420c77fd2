"""The baseline phase in whole runs: on the embedded engine in virtual time, and with real text against the stub."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvbench.baseline import fingerprint, modelled, newest
from kvbench.endpoint import Http, Sim
from kvbench.report.baseline_rows import rows
from kvbench.report.kept import Kept, read
from kvbench.report.write import write_page
from kvbench.workload.standard import standard
from tests.stub.stub import DONE, FIN, C, Reply, Seen, Stub, U, answer_json
from tests.whole import Whole, against, simulated

FILE = Path(__file__).parent.parent / "profiles" / "prompts" / "standard-v1.jsonl"
RECORDS = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
ENGINE = """
name: based
seed: 7
target: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090}
workload: {arrivals: {shape: constant, rate: 5/s}, prompt: 64, output: 4}
phases: {baseline: {prompts: 12, idle_power: 10s}, steady: {for: 8s}, drain: {for: 5s}}
"""
SERVER = """
name: served
seed: 7
target: {kind: http, url: "{url}", model: m, tokenizer: words}
workload: {arrivals: {shape: constant, rate: 20/s}, prompt: 8, output: 2}
phases: {baseline: {prompts: 16}, steady: {requests: 6}, drain: {for: 5s}}
"""


def text_of(seen: Seen) -> str:
    return str(seen.json()["messages"][0]["content"])


def served(seen: Seen) -> Reply:
    """First token after 5 ms and 50 ms per 1,000 prompt tokens, 200 ms more for the very first; 5 more, 4 ms apart."""
    tokens = len(text_of(seen)) // 4
    first = 5 + 0.05 * tokens + (200 if seen.number == 0 else 0)
    steps = [(first + 4 * k, C("x")) for k in range(6)]
    return Reply([*steps[:-1], (first + 20, steps[-1][1] + FIN + U(tokens, 6) + DONE)])


def listing(model: str = "m") -> Any:
    def gets(seen: Seen) -> Reply:
        if seen.path == "/version":
            return answer_json({"version": "1.0"})
        headers = (("Content-Type", "application/json"), ("Server", "stub"))
        return answer_json({"data": [{"id": model}]}, headers=headers)

    return gets


def said(whole: Whole, name: str) -> str:
    return dict(rows(whole.summary["baseline"]))[name]


def test_on_the_engine_idle_waits_then_prompts_go_one_at_a_time(tmp_path: Path) -> None:
    whole = simulated(ENGINE, tmp_path)
    assert whole.code == 0, whole.why
    phases = {phase["name"]: phase for phase in whole.summary["phases"]}
    assert list(phases) == ["idle", "baseline", "steady", "drain"]
    assert (phases["idle"]["seconds"], phases["idle"]["outcomes"]["offered"]) == (10.0, 0)
    asked = [record for record in whole.records if record.phase == "baseline"]
    assert len(asked) == 12
    assert not any(record.measured for record in asked)
    assert all(b.sent_ns >= a.end_ns for a, b in pairwise(asked))
    assert [record.n_out for record in asked] == [record["max_tokens"] for record in RECORDS[:12]]
    assert not any(record.cached for record in asked)
    found = whole.summary["baseline"]
    assert (found["n"], found["complete"]) == (12, True)
    assert whole.summary["headline"]["n"] == 40
    assert whole.summary["accounting"]["total"]["ok"] == 52


def test_on_the_engine_prefill_and_decode_are_those_of_the_roofline(tmp_path: Path) -> None:
    """llama-3.1-8b on an RTX 4090, by hand: 2 FLOP x 6.98e9 weights in layers per token; 2 bytes of each read per decode step."""
    whole = simulated(ENGINE, tmp_path, "phases.baseline.prompts=100")
    spec = Sim.model_validate({"model": "llama-3.1-8b", "hardware": "rtx-4090"})
    hardware = spec.load_hardware()
    layer = 128 * 4096 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336  # attention and gated MLP
    per_token = 2 * 32 * layer / (hardware.flops * hardware.flops_share)
    found = whole.summary["baseline"]
    assert found["prefill"]["per_1000"] == pytest.approx(1000 * per_token, rel=0.15)  # and attention, activations on top
    assert found["prefill"]["r2"] > 0.97  # short prompts are bound by memory: not quite a line
    read_layer = 2 * layer / (hardware.bandwidth * hardware.bandwidth_share)
    assert found["layers"]["decode"] == pytest.approx(read_layer, rel=0.03)
    assert found["layers"]["tokens"] == standard().median()
    head = 2 * 4096 * 128256 / (hardware.bandwidth * hardware.bandwidth_share)
    assert found["latency"]["tpot"]["p50"] == pytest.approx(32 * read_layer + head, rel=0.1)  # layers, head; overhead on top
    assert found["cold_start"]["ttft"]["times"] == pytest.approx(1.0, abs=0.1)  # the engine has no cold start


def test_a_prefill_longer_than_the_budget_is_the_sum_of_its_chunks() -> None:
    target = {"model": "llama-3.1-8b", "hardware": "rtx-4090"}
    budgets = ({"max_num_batched_tokens": budget, "max_num_seqs": 64} for budget in (2048, 128))
    whole, chunked = (modelled(Sim.model_validate(target | {"settings": settings}), 1000) for settings in budgets)
    assert whole.prefill is not None
    assert chunked.prefill is not None
    assert 1 < chunked.prefill / whole.prefill < 2  # eight reads of the weights in place of one, never fewer FLOPs
    assert chunked.decode == whole.decode


def test_overhead_is_no_part_of_a_layer() -> None:
    target = {"model": "llama-3.1-8b", "hardware": "rtx-4090"}
    quick, slow = (modelled(Sim.model_validate(target | {"settings": {"step_overhead": s}}), 200) for s in ("0ms", "50ms"))
    assert (quick.prefill, quick.decode) == pytest.approx((slow.prefill, slow.decode), rel=1e-9)


def test_a_later_run_finds_the_newest_and_shows_the_change(tmp_path: Path) -> None:
    first = simulated(ENGINE, tmp_path)
    assert said(first, "compared") == "- (no earlier run has a baseline here)"
    second = simulated(ENGINE, tmp_path, "seed=8")
    third = simulated(ENGINE, tmp_path, "phases.baseline.prompts=4")
    assert json.loads((second.directory / "manifest.json").read_text())["baseline"]["earlier"]["run"] == first.directory.name
    assert third.summary["baseline"]["compared"]["run"] == second.directory.name
    assert re.fullmatch(
        rf"ttft p50 \S+ ms, the same as the baseline of {second.directory.name} "
        r"\(\S+ ms; n 3 and 11, over the 3 prompts of both\)",
        said(third, "compared"),
    )


def test_another_target_or_prompt_set_is_not_compared_and_it_says_why(tmp_path: Path) -> None:
    first = simulated(ENGINE, tmp_path)
    other = simulated(ENGINE, tmp_path, "target.hardware=a100-80gb")
    assert other.summary["baseline"]["compared"]["run"] is None
    why = f"- (the baseline of {first.directory.name} is of something else: hardware rtx-4090 there, a100-80gb here; blocks 2820"
    assert said(other, "compared").startswith(why)
    tuned = simulated(ENGINE, tmp_path, "target.settings.step_overhead=2ms")
    assert "step_overhead 0.001 there, 0.002 here" in said(tuned, "compared")
    (tuned.directory / "baseline.json").unlink()
    for directory in (first.directory, other.directory):
        path = directory / "baseline.json"
        write_page(path, path.read_text().replace('"standard-v1"', '"standard-v0"'))
    again = simulated(ENGINE, tmp_path)
    assert "(so is an older one): prompts standard-v0 there, standard-v1 here" in said(again, "compared")


def test_a_stop_rule_that_ends_it_is_exit_5_and_leaves_nothing_to_compare_with(tmp_path: Path) -> None:
    rule = 'stop: [{ttft_p50: "> 1ms", over: 5s, min_requests: 3}]\n'
    whole = simulated(ENGINE.replace("prompts: 12", "prompts: 100") + rule, tmp_path)
    assert whole.summary["stop"]["phase"] == "baseline"
    assert (whole.code, whole.summary["headline"]["n"]) == (5, 0)
    assert 3 <= whole.summary["baseline"]["n"] < 100
    assert not (whole.directory / "baseline.json").exists()
    assert "cut short" in said(whole, "prompts")
    assert said(simulated(ENGINE, tmp_path), "compared") == "- (no earlier run has a baseline here)"


def test_without_the_phase_nothing_is_looked_up_or_kept(tmp_path: Path) -> None:
    whole = simulated(ENGINE.replace("baseline: {prompts: 12, idle_power: 10s}, ", ""), tmp_path)
    assert json.loads((whole.directory / "manifest.json").read_text())["baseline"] is None
    assert rows(whole.summary["baseline"]) == []
    assert not (whole.directory / "baseline.json").exists()


def test_prompts_that_may_not_fit_are_said_before_the_run(tmp_path: Path) -> None:
    whole = simulated(ENGINE, tmp_path, "target.settings.max_model_len=1024", "phases.baseline.prompts=100")
    longer = sum(len(r["messages"][0]["content"].encode()) / 4 + r["max_tokens"] > 1024 for r in RECORDS)
    warned = [line for line in whole.summary["warnings"] if "baseline" in line]
    assert warned == [
        f"before the run: {longer} of the baseline's 100 prompts may not fit into the model's context of 1,024: those fail"
    ]
    assert whole.summary["baseline"]["outcomes"]["failed"] >= longer > 0


def test_a_server_gets_the_text_itself_one_prompt_at_a_time(tmp_path: Path) -> None:
    stub = Stub(served, gets=listing())
    whole = against(stub, SERVER, tmp_path)
    bodies = [seen.json() for seen in stub.posts[:16]]
    texts = [re.sub(r"^\[[0-9a-f]{15}\] ", "", body["messages"][0]["content"]) for body in bodies]
    assert texts == [record["messages"][0]["content"] for record in RECORDS[:16]]
    assert [body["max_tokens"] for body in bodies] == [record["max_tokens"] for record in RECORDS[:16]]
    assert {body["temperature"] for body in bodies} == {0}
    ends = [seen.writes[-1] for seen in stub.posts[:16]]
    assert all(seen.received > end for seen, end in zip(stub.posts[1:16], ends, strict=False))
    assert len(stub.posts) == 22
    assert whole.summary["headline"]["n"] == 6


@pytest.mark.alone
def test_a_server_that_starts_cold_and_takes_longer_for_longer_prompts_is_seen_to(tmp_path: Path) -> None:
    whole = against(Stub(served, gets=listing()), SERVER, tmp_path)
    found = whole.summary["baseline"]
    assert 0.2 < found["cold_start"]["ttft"]["value"] < 0.3
    assert found["cold_start"]["ttft"]["times"] > 5
    assert found["prefill"]["per_1000"] == pytest.approx(0.05, rel=0.3)
    assert found["prefill"]["r2"] > 0.8
    assert found["latency"]["tpot"]["p50"] == pytest.approx(0.004, rel=0.3)
    assert found["layers"]["prefill"] is None
    assert "profiler" in said(whole, "per layer")
    assert found["target"] == {"kind": "http", "model": "m", "software": ["stub 1.0"], "api": "chat", "stream": True}


def test_the_address_of_a_server_is_no_part_of_a_comparison_its_model_is(tmp_path: Path) -> None:
    first = against(Stub(served, gets=listing()), SERVER, tmp_path)
    second = against(Stub(served, gets=listing()), SERVER, tmp_path)  # on another port
    assert second.summary["baseline"]["compared"]["run"] == first.directory.name
    other = against(Stub(served, gets=listing("n")), SERVER.replace("model: m", "model: n"), tmp_path)
    assert said(other, "compared").endswith("model m there, n here)")


def test_fingerprints_by_hand() -> None:
    servers = [{"software": None, "version": None, "url": u} for u in ("http://a", "http://b")]
    spec = Http.model_validate({"url": "http://a", "stream": False, "api": "completions"})
    assert fingerprint(spec, {"model": "m", "servers": servers}) == {
        "kind": "http", "model": "m", "software": ["not told (version not told)"], "api": "completions", "stream": False,
    }  # fmt: skip
    assert fingerprint(None, {"kind": "null"}) == {"kind": "null"}


def test_the_newest_of_the_same_kind_wins_and_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    target = {"kind": "null"}

    def keep(run: str, started: str, **changes: Any) -> None:
        kept = {"run": run, "started": started, "version": standard().version, "digest": standard().digest, "target": target}
        kept |= {"tokens": [1.0], "ttft": [1.0], "tpot": [1.0], "e2e": [1.0]} | changes
        (tmp_path / run).mkdir()
        (tmp_path / run / "baseline.json").write_text(json.dumps(kept))

    keep("a", "2026-01-02T00:00:00")
    keep("b", "2026-01-01T00:00:00")
    keep("c", "2026-01-03T00:00:00", digest="other")
    keep("d", "2026-01-04T00:00:00", ttft="nothing")
    kept, why = newest(tmp_path, standard(), target)
    assert isinstance(kept, Kept)
    assert (kept.run, why) == ("a", "")
    assert read(tmp_path / "d" / "baseline.json") is None
    kept, why = newest(tmp_path, standard(), {"kind": "sim"})
    assert kept is None
    assert why.startswith("the baseline of c is of something else (so are 2 older ones): the prompts' digest other there, ")
