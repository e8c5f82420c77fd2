"""KV events of a real vLLM: what is folded into cache.jsonl is what its counters and its answers say, token for token."""

import os
from pathlib import Path

import pytest

from kvbench.core import CacheAccess
from kvbench.report.files import load as load_run
from tests.whole import finished

pytestmark = pytest.mark.real
URL, EVENTS, REPLAY = (os.environ.get(f"KVBENCH_REAL_{name}", "") for name in ("URL", "EVENTS", "REPLAY"))

SCENARIO = """\
name: events
seed: 3
target: {kind: http, url: "URL", tokenizer: ids, api: completions}
workload: {arrivals: {shape: poisson, rate: 2/s}, prompt: {dist: uniform, min: 20, max: 200},
  output: {dist: uniform, min: 8, max: 40}, prefixes: {groups: 5, tokens: 64, share: 70%}}
collect: [{kind: kv_events, endpoint: "EVENTS", replay: "REPLAY", bind: true}, {kind: prometheus}]
phases: {steady: {for: 20s}, drain: {for: 60s}}
"""


@pytest.mark.skipif(not (URL and EVENTS), reason="no real server with KV events: make test-real starts one")
def test_hits_of_the_events_are_those_of_the_counters_and_of_the_answers(tmp_path: Path) -> None:
    import asyncio

    import msgspec
    import uvloop

    from tests.whole import play

    text = SCENARIO.replace("URL", URL).replace("EVENTS", EVENTS).replace("REPLAY", REPLAY)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        run = finished(runner.run(play(text, tmp_path)))
    files, decode = load_run(run.directory), msgspec.json.Decoder(CacheAccess).decode
    lines = [decode(line) for line in (run.directory / "cache.jsonl").read_bytes().splitlines()]
    told = {event.data["state"]: event.data for event in files.all("collector")}
    block = next(iter({line.tokens for line in lines if line.op == "alloc"}))
    hits = sum(line.op == "hit" for line in lines)
    assert told["account"]["unresolved"] == told["account"]["lost"] == told["account"]["broken"] == told["account"]["blind"] == 0
    assert hits > 0
    assert hits * block == sum(record.cached for record in run.records)
    assert hits * block == told["totals"]["metrics"]["hit_tokens_total"]["value"]
    assert hits + sum(line.op == "miss" for line in lines) == sum((record.n_in - 1) // block for record in run.records)
