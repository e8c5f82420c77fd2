"""The properties at the end of the public cases, over whole runs: whatever the server does, and whatever the load.

Property 3 (any split of a byte stream gives the same events) is held at the target for every recorded stream, in
tests/target/test_recorded.py and test_sse.py, and end to end here.
"""

import json
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvbench.control.laws import LAWS
from kvbench.report.files import load as load_run
from kvbench.units import duration
from tests.stub.stub import DONE, FIN, ROLE, C, R, Reply, Stub, U, answer_json, sse, stream, usage
from tests.whole import ROOT, Whole, against, kvbench, served, simulated

ORDER = ("min", "p50", "p90", "p95", "p99", "p999", "max")
BEHAVIOURS = {
    "good": stream(ROLE, C("a"), C("b"), FIN, U(8, 2), DONE),
    "uncounted": stream(C("a"), FIN, DONE),
    "thinking": stream(R("t"), sse({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}), DONE),
    "silent": stream(FIN, U(8, 500), DONE),
    "whole": answer_json({"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}], "usage": usage(8, 1)}),
    "error": stream(C("a"), sse({"error": "out of memory"}), DONE),
    "busy": answer_json({"error": "busy"}, 503),
    "throttled": answer_json({}, 429),
    "broken": answer_json({"error": "no"}, 500),
    "cut": Reply([(0, C("a"))], after="rst"),
    "hung": Reply([(0, C("a"))], after="hang"),
    "garbage": stream(sse(b"{nonsense"), DONE),
}
EARNED = {
    "ok": ("good", "uncounted", "thinking", "silent", "whole"),
    "rejected": ("busy", "throttled"),
    "failed": ("error", "broken", "cut", "garbage"),
    "timeout": ("hung",),
}
QUICK = settings(deadline=None, derandomize=True, phases=(Phase.generate,))  # a whole run is too slow to shrink by


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner, path)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value


def hold(run: Whole) -> None:
    """Properties 1, 2, 4 and 5 of one run."""
    found = strict((run.directory / "summary.json").read_text())
    for name in ("windows.jsonl", "samples.jsonl", "events.jsonl", "requests.jsonl", "manifest.json"):
        for line in (
            (run.directory / name).read_text().splitlines() if name.endswith("l") else [(run.directory / name).read_text()]
        ):
            strict(line)
    total = found["accounting"]["total"]
    assert total["admitted"] == sum(total[name] for name in ("ok", "failed", "rejected", "timeout", "cancelled"))
    assert total["offered"] == total["admitted"] + total["shed"] + total["dropped"] + total["withdrawn"]
    assert len(run.records) == total["offered"]
    for name, row in found["latency"].items():
        assert (row["n"] > 0) == (row["p50"] is not None), name
        assert row["n"] > 0 or row["reason"], f"{name}: null without a reason"
        if row["n"]:
            values = [row[each] for each in ORDER]
            assert values == sorted(values), name
            assert values[0] >= 0, name
            assert row["min"] <= row["mean"] <= row["max"], name
    signed = ("difference", "disagreement", "interval", "wall_drift")  # what may be below zero
    for path, value in numbers({key: found[key] for key in found if key not in ("run", "target", "host", "tokenizer")}):
        assert math.isfinite(value), path
        assert value >= 0 or path.rsplit(".", 1)[-1] in signed or path.startswith(".features"), f"{path} is {value}"
    for name in ("requested", "offered", "sent", "ok"):
        row = found["rates"][name]
        assert row["value"] is not None or row["reason"], name
    lag = found["latency"]["lag"]
    assert lag["n"] == sum(r.sent_ns is not None for r in run.records if r.measured)
    for check in found["verdict"]["checks"]:
        assert check["value"] is not None or check["reason"], check["check"]


@settings(QUICK, max_examples=6)
@given(st.lists(st.sampled_from(sorted(BEHAVIOURS)), min_size=1, max_size=20), st.integers(1, 6))
def test_property_1_2_4_5_hold_whatever_the_server_does(plan: list[str], users: int) -> None:
    """Any mix of good, late, broken and dead answers: every request in the class its answer earned, as many posts as requests."""
    stub = Stub(lambda seen: BEHAVIOURS[plan[seen.number]])
    text = served(
        f"{{shape: closed, concurrency: {users}}}", f"{{steady: {{requests: {len(plan)}}}}}", target="timeouts: {idle: 200ms}"
    )
    with TemporaryDirectory() as folder:
        run = against(stub, text, Path(folder))
        hold(run)
        total = run.summary["accounting"]["total"]
    assert {name: total[name] for name in EARNED} == {
        name: sum(each in earned for each in plan) for name, earned in EARNED.items()
    }
    assert len(stub.posts) == total["admitted"] == len(plan)


@settings(QUICK, max_examples=4)
@given(
    shape=st.sampled_from(
        [
            "poisson, rate: RATE",
            "constant, rate: RATE",
            "wave, mean: RATE, amplitude: 80%, period: 4s",
            "burst, requests: 30, every: 3s",
        ]
    ),
    rate=st.integers(1, 60),
    blocks=st.integers(30, 400),
    cap=st.integers(1, 64),
    seed=st.integers(0, 2**32),
)
def test_property_1_2_4_7_hold_on_the_engine_whatever_the_load(shape: str, rate: int, blocks: int, cap: int, seed: int) -> None:
    """A small pool under any load and cap, with shared prefixes: sums, order, and the same bytes for the same seed."""
    text = f"""
seed: {seed}
target: {{kind: sim, model: llama-3.1-8b, hardware: rtx-4090, settings: {{blocks: {blocks}}}}}
workload:
  arrivals: {{shape: {shape.replace("RATE", f"{rate}/s")}}}
  prompt: {{dist: uniform, min: 8, max: 200}}
  output: {{dist: uniform, min: 1, max: 120}}
  prefixes: {{groups: 3, tokens: 48}}
control: {{law: none, inflight: {cap}, patience: 1s}}
phases: {{steady: {{for: 6s}}, drain: {{for: 3s}}}}
"""
    with TemporaryDirectory() as one, TemporaryDirectory() as two:
        run, again = simulated(text, Path(one)), simulated(text, Path(two))
        hold(run)
        assert (run.directory / "requests.jsonl").read_bytes() == (again.directory / "requests.jsonl").read_bytes()
        usage_ = [line["value"] for line in run.lines("samples.jsonl") if line["name"] == "kv_usage"]
        assert usage_
        assert all(0.0 <= value <= 1.0 for value in usage_)
        engine = run.summary["engine"]
        assert engine["hit_tokens_total"]["value"] <= engine["query_tokens_total"]["value"]
        assert all(r.n_out == r.asked_out for r in run.records if r.outcome == "ok")


LOOPS = {
    "none": "inflight: 12", "bucket": "rate: 6/s, burst: 3", "pid": "setpoint: 60%",
    "queue_feedback": "target_queue: 2, mode: aimd", "learned": "explore: 30%",
}  # fmt: skip
FAULTS = ("slow, factor: 6", "pinned, share: 70%", "refuse, share: 40%", "stall")
WARMUPS = (
    "policy: none", "policy: on_demand", "prefill: 30%", "policy: fixed, for: 4s",
    "policy: dynamic, min: 0s, max: 20s, batch: 1s",
)  # fmt: skip


@pytest.mark.parametrize("law", sorted(LAWS))
@settings(QUICK, max_examples=2)
@given(
    fault=st.sampled_from(FAULTS),
    warmup=st.sampled_from(WARMUPS),
    at=st.integers(3, 40),
    patience=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)
def test_property_1_2_4_5_hold_under_every_law_in_every_phase(
    law: str, fault: str, warmup: str, at: int, patience: int, seed: int
) -> None:
    """Every law over baseline, a warm-up, two epochs and stress, with a fault and a watch that moves the level: nothing is lost
    between phases, at the gate or by a move, and the sums are those of every phase."""
    text = f"""
seed: {seed}
target:
  {{kind: sim, model: llama-3.1-8b, hardware: rtx-4090, settings: {{blocks: 200}},
    faults: [{{kind: {fault}, at: {at}s, for: 6s}}]}}
workload: {{arrivals: {{shape: poisson, rate: 8/s}}, prompt: {{dist: uniform, min: 8, max: 200}}, output: 40}}
control: {{law: {law}, {LOOPS[law]}, patience: {patience}s}}
phases:
  baseline: {{prompts: 3, idle_power: 1s}}
  warmup: {{{warmup}}}
  steady: {{snapshot: 5s, epochs: [{{for: 10s, arrivals: {{shape: constant, rate: 6/s}}}},
    {{for: 10s, arrivals: {{shape: burst, requests: 40, every: 5s}}, classes: {{b: {{prompt: 90, output: 60}}}}}}]}}
  stress: {{step: 50%, every: 5s, max: 2x}}
  drain: {{for: 2s}}
watch: {{window: 2s, learn: 4, confirm: 1, of: 1, action: rollback, hold: 4s}}
"""
    with TemporaryDirectory() as folder:
        run = simulated(text, Path(folder))
        hold(run)
        accounts = run.summary["accounting"]
    assert accounts["total"]["offered"] > 200
    ends = (*EARNED, "cancelled", "shed", "dropped", "withdrawn")
    for name, row in accounts["phases"].items():
        assert row["offered"] == sum(row[each] for each in ends), name
    for name in ("offered", "admitted", *ends):
        assert accounts["total"][name] == sum(row[name] for row in accounts["phases"].values()), name


def test_property_3_every_split_of_an_answer_gives_the_same_run(tmp_path: Path) -> None:
    wire = ROLE + R("t") + C("é 世") + C("b", usage=usage(8, 3)) + FIN + U(8, 3) + DONE
    cuts = range(1, len(wire), 9)
    replies = [Reply([(0, wire[:at]), (3, wire[at:])]) for at in cuts]
    text = served("{shape: closed, concurrency: 1}", f"{{steady: {{requests: {len(replies)}}}}}")
    run = against(Stub(lambda seen: replies[seen.number]), text, tmp_path)
    found = {(r.outcome, r.finish, r.n_in, r.n_out, r.source, len(r.token_ns), r.replaced, r.malformed) for r in run.records}
    assert found == {("ok", "stop", 8, 3, "usage", 3, 0, 0)}


def test_property_4_console_json_page_junit_and_files_agree(tmp_path: Path) -> None:
    text = served("{shape: closed, concurrency: 2}", "{steady: {requests: 40}}", also="budget: {ttft_p99: 1s, error_rate: 1%}")
    reply = Reply([(5, C("a")), (25, C("b") + FIN + U(8, 2) + DONE)])
    run = against(Stub(lambda seen: reply if seen.number % 4 else answer_json({}, 503)), text, tmp_path)
    found = strict((run.directory / "summary.json").read_text())
    assert (found["outcomes"]["ok"], found["outcomes"]["rejected"]) == (30, 10)
    assert strict(kvbench("report", run.directory, "--json").stdout)["latency"] == found["latency"]
    console, page = kvbench("report", run.directory).stdout, (run.directory / "report.html").read_text()
    row, header = (next(line for line in console.splitlines() if re.match(rf" *{start}", line)) for start in ("ttft ", "n "))
    shown = dict(zip(header.split(), re.findall(r"[\d.]+ [mµ]?s|\d+", row), strict=True))
    for name in ("mean", "p50", "p90", "max"):
        assert shown[name] == duration(found["latency"]["ttft"][name])
        assert shown[name] in page
    suite = ET.parse(run.directory / "junit.xml").getroot()
    cases = {case.get("name"): case.find("failure") is not None for case in suite.iter("testcase")}
    for budget in found["budgets"]:
        (failed,) = [bad for name, bad in cases.items() if name is not None and budget["name"] in name]
        assert failed == (budget["status"] != "pass")


def test_property_6_sources_that_differ_are_told_apart(tmp_path: Path) -> None:
    """Asked 2 tokens and got 5; usage says 5 where 2 events came; half of the answers without usage: each is a line."""
    with_usage, without = stream(C("a"), C("b"), FIN, U(30, 5), DONE), stream(C("a"), C("b"), FIN, DONE)
    text = served("{shape: closed, concurrency: 1}", "{steady: {requests: 10}}")
    run = against(Stub(lambda seen: with_usage if seen.number % 2 else without), text, tmp_path)
    said = " | ".join(run.summary["warnings"])
    assert "prompt tokens: 8 asked, 30 counted on average (by usage)" in said
    assert "output tokens: 2 asked, 3.5 received on average (by events, usage)" in said
    assert "token counts come from several sources" in said
    assert run.summary["tokens"]["by_source"]["usage"]["n_out"] == 25
    assert run.summary["tokens"]["by_source"]["events"]["n_out"] == 10


@pytest.mark.parametrize("scenario", ["smoke"])
def test_seed_7_gives_the_same_bytes_twice(scenario: str, tmp_path: Path) -> None:
    """The shipped scenario as it is, seed 7, twice on the embedded engine; another seed gives others."""
    text = (ROOT / "scenarios" / f"{scenario}.yaml").read_text()
    bytes_ = []
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        (tmp_path / name).mkdir()
        run = simulated(text, tmp_path / name, f"seed={seed}")
        assert len(load_run(run.directory).records) > 30
        bytes_.append((run.directory / "requests.jsonl").read_bytes())
    assert bytes_[0] == bytes_[1] != bytes_[2]
