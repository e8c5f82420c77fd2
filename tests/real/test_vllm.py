"""Against a real vLLM: what kvbench counts is what the server counts, token for token.

Needs a server that nobody else uses, at KVBENCH_REAL_URL; `make test-real` brings its own (.ci/real_server.sh). Requests are
few and short: it may be a small model on one core. Its counters are read before and after each run, once it is idle.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.whole import ROOT, Whole, finished, play

URL = os.environ.get("KVBENCH_REAL_URL", "")
PATIENCE = 120.0  # seconds that the server may take to become idle
BLOCK = 32  # tokens of a KV block, as .ci/real_server.sh sets it
SCENARIO = f"""
name: real
seed: 7
target: {{kind: http, url: "{URL}"}}
workload:
  arrivals: {{shape: closed, concurrency: 3}}
  prompt: {{dist: uniform, min: 20, max: 100}}
  output: {{dist: uniform, min: 4, max: 12, force: true}}
phases:
  warmup: {{policy: fixed, requests: 2}}
  steady: {{requests: 6}}
  drain: {{for: 60s}}
"""


def scrape() -> Counter[str]:
    """The server's counters and gauges by name, over all engines; finished requests by reason."""
    with urllib.request.urlopen(f"{URL}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: Counter[str] = Counter()
    for name, labels, value in re.findall(r"^vllm:(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        found[name] += int(float(value))
        if name == "request_success_total":
            found[re.findall(r'finished_reason="(\w+)"', labels)[0]] += int(float(value))
    return found


def busy() -> int:
    now = scrape()
    return now["num_requests_running"] + now["num_requests_waiting"]


def idle() -> Counter[str]:
    """The counters once nothing runs. They are updated a step later than the gauges, so until two readings agree."""
    until, before = time.monotonic() + PATIENCE, Counter[str]()
    while time.monotonic() < until:
        now = scrape()
        at_rest = now["num_requests_running"] + now["num_requests_waiting"] == 0
        if at_rest and now["generation_tokens_total"] == before["generation_tokens_total"]:
            return now
        before = now
        time.sleep(0.5)
    raise AssertionError(f"the server was not idle within {PATIENCE:g} s")


def reachable() -> bool:
    try:
        return bool(URL) and scrape()["generation_tokens_total"] >= 0
    except (OSError, urllib.error.URLError):
        return False


pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not reachable(), reason="no vLLM answers at KVBENCH_REAL_URL (make test-real installs and starts one)"),
]


def measured(folder: Path, *sets: str) -> tuple[Whole, Counter[str]]:
    """A run, all of whose requests must end ok, and what the server's counters grew by meanwhile."""
    before = idle()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        run = finished(runner.run(play(SCENARIO, folder, *sets)))
    grown = Counter({name: value - before[name] for name, value in idle().items()})
    assert Counter(r.outcome for r in run.records) == {"ok": 8}
    assert {r.source for r in run.records} == {"usage"}
    return run, grown


def total(run: Whole, name: str) -> int:
    return sum(getattr(record, name) for record in run.records)


@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("target.stream=false",),
        ("target.extra_body={stream_options: {include_usage: true, continuous_usage_stats: true}}",),
        ("workload.sampling={temperature: {0: 50%, 0.7: 50%}, top_p: 0.9, penalties: [{}, {frequency: 0.2, repetition: 1.1}]}",),
        ("workload.sessions={turns: 3, think: 200ms}",),
        ("target.api=completions", "workload.prefixes={groups: 1, tokens: 80, share: 100%}"),
    ],
    ids=["chat", "whole", "chunk usage", "sampling", "sessions", "prefixes"],
)
def test_tokens_agree_with_the_servers_counters(tmp_path: Path, sets: tuple[str, ...]) -> None:
    run, server = measured(tmp_path, *sets)
    assert server["prompt_tokens_total"] == total(run, "n_in")
    assert server["generation_tokens_total"] == total(run, "n_out")
    assert server["request_success_total"] == server["length"] == 8
    assert all(record.n_out == record.asked_out for record in run.records)  # output.force
    assert server["prefix_cache_queries_total"] == total(run, "n_in")
    assert server["prefix_cache_hits_total"] == total(run, "cached")
    assert server["num_preemptions_total"] == 0


def test_every_choice_is_a_request_to_the_server(tmp_path: Path) -> None:
    """n = 2: vLLM's usage counts the prompt once, its counters once per choice; both count the tokens of both."""
    run, server = measured(tmp_path, "workload.sampling={n: 2}")
    assert server["generation_tokens_total"] == total(run, "n_out") == 2 * total(run, "asked_out")
    assert server["prompt_tokens_total"] == 2 * total(run, "n_in")
    assert server["request_success_total"] == 16
    output: dict[str, Any] = run.summary["tokens"]["output"]
    assert output["asked"] == output["got"]


def test_prompts_of_token_ids_are_as_long_as_asked(tmp_path: Path) -> None:
    run, server = measured(tmp_path, "target.api=completions")
    assert all(record.n_in == record.asked_in for record in run.records)
    assert server["prompt_tokens_total"] == total(run, "asked_in")


def test_words_are_as_long_as_the_server_said(tmp_path: Path) -> None:
    """Words measured by /tokenize: the stated overhead is the chat template's, and the stated error is not exceeded."""
    run, _ = measured(tmp_path)
    told = json.loads((run.directory / "manifest.json").read_text())["tokenizer"]
    assert told["kind"] == "server"
    for record in run.records:
        assert abs(record.n_in - told["overhead"] - record.asked_in) <= told["error"] * record.asked_in


def test_a_second_run_meets_a_cold_cache(tmp_path: Path) -> None:
    """The same scenario and seed: without its nonce every full block but the last token's was there already. What comes before
    the nonce, the chat template's beginning, is less than a block."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        assert total(measured(tmp_path / folder)[0], "cached") == 0
    for folder in ("c", "d"):
        (tmp_path / folder).mkdir()
        warm, server = measured(tmp_path / folder, "workload.nonce=off")
    assert total(warm, "cached") == server["prefix_cache_hits_total"]
    assert total(warm, "cached") == sum((record.n_in - 1) // BLOCK * BLOCK for record in warm.records)


def test_an_interrupted_run_leaves_the_server_idle(tmp_path: Path) -> None:
    """SIGINT: what is in flight is aborted at the server, not left to run to its 500th token."""
    idle()
    file = tmp_path / "scenario.yaml"
    file.write_text(SCENARIO)
    sets = ("workload.output={dist: fixed, value: 500, force: true}", "phases.warmup={policy: none}")
    command = [sys.executable, "-m", "kvbench", "run", str(file), "--out", str(tmp_path / "results"), "--quiet"]
    run = subprocess.Popen([*command, *(part for each in sets for part in ("--set", each))], cwd=ROOT, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while busy() < 3 and time.monotonic() < until:
        time.sleep(0.2)
    assert busy() == 3
    run.send_signal(signal.SIGINT)
    assert run.wait(30) == 130
    until = time.monotonic() + 10
    while busy() and time.monotonic() < until:
        time.sleep(0.2)
    assert busy() == 0
    partial = finished(next((tmp_path / "results").iterdir()))
    assert Counter(r.outcome for r in partial.records) == {"cancelled": 3}
