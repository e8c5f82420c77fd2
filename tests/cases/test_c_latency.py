"""Group C of the public cases, end to end: latency from the right moment, and a client that says when it was the bottleneck."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from tests.stub.stub import DONE, FIN, C, Reply, Seen, Stub, U
from tests.whole import against

HTTP = """
name: case
seed: 7
target: {kind: http, url: "{url}", model: m, tokenizer: words}
workload:
  arrivals: ARRIVALS
  prompt: {dist: fixed, value: 8}
  output: {dist: fixed, value: 2}
phases: {steady: {for: SECONDS}, drain: {for: 5s}}
"""
ANSWER = b"".join([C("a"), C("b"), FIN, U(8, 2), DONE])


def http(arrivals: str, seconds: str) -> str:
    return HTTP.replace("ARRIVALS", arrivals).replace("SECONDS", seconds)


def test_c01_the_wait_at_our_own_cap_is_part_of_the_response(tmp_path: Path) -> None:
    """40 at 40/s, cap 4, service 190 ms: waits 0.09 * floor(k / 4), mean 0.405 s; the headline counts from the schedule."""
    text = http("{shape: constant, rate: 40/s}", "1s") + "control: {law: none, inflight: 4, patience: 1m}\n"
    run = against(Stub(Reply(steps=[(190, ANSWER)])), text, tmp_path)
    records = run.records
    assert len(records) == 40
    waits = np.array([r.release_ns - r.due_ns for r in records]) / 1e9
    service = np.array([r.done_ns - r.sent_ns for r in records]) / 1e9
    response = np.array([r.done_ns - r.due_ns for r in records]) / 1e9
    assert service.mean() == pytest.approx(0.19, abs=0.02)
    assert waits.mean() == pytest.approx(0.405, abs=0.06)
    assert response[-1] == pytest.approx(1.0, abs=0.12)
    latency = run.summary["latency"]
    assert latency["response"]["max"]["value"] > 4 * latency["e2e"]["p50"]["value"]


def test_c02_a_frozen_server_shows_in_half_the_requests(tmp_path: Path) -> None:
    """Open loop 10/s for 6 s, service 10 ms, frozen from 2.0 s to 5.0 s: 30 of 60 wait 3.01 ... 0.11 s; mean 0.79, p90 2.4 s."""
    began: list[int] = []

    def answer(seen: Seen) -> Reply:
        began.append(seen.received)
        at = (seen.received - began[0]) / 1e9
        thaw = 5.0 - at if 2.0 - 0.01 <= at < 5.0 - 0.01 else 0.0
        return Reply(steps=[(1000 * thaw + 10, ANSWER)])

    run = against(Stub(lambda seen: answer(seen)), http("{shape: constant, rate: 10/s}", "6s"), tmp_path)
    response = np.sort([(r.done_ns - r.due_ns) / 1e9 for r in run.records])
    assert len(response) == 60, "every slot was sent; nothing was filled in afterwards"
    assert (response > 0.09).sum() == 30
    assert response[-1] == pytest.approx(3.01, abs=0.05)
    assert response.mean() == pytest.approx(0.79, abs=0.04)
    assert run.summary["latency"]["response"]["p90"]["value"] == pytest.approx(2.4, abs=0.15)


def test_c04_a_stalled_client_says_that_it_was_the_bottleneck(tmp_path: Path) -> None:
    """A 300 ms stall of our own loop each second: loop-lag p99 at least 280 ms, and the run is flagged."""

    async def stall() -> None:
        while True:
            await asyncio.sleep(0.7)
            time.sleep(0.3)

    steps = [(20 * k, C("x")) for k in range(1, 11)] + [(200, FIN + U(8, 10) + DONE)]
    run = against(Stub(Reply(steps=steps)), http("{shape: constant, rate: 10/s}", "5s"), tmp_path, also=stall)
    lags = [s["value"] for s in run.lines("samples.jsonl") if s["name"] == "loop_lag_p99"]
    assert max(lags) >= 0.280
    verdict = run.summary["verdict"]
    assert verdict["verdict"] == "INVALID"
    assert any("loop" in reason["text"] for reason in verdict["reasons"])


def test_c06_an_answer_without_a_token_has_no_ttft(tmp_path: Path) -> None:
    """A stream of role, finish and [DONE] only: ttft null, never negative, and the self-check holds."""
    from tests.stub.stub import ROLE

    run = against(Stub(Reply(steps=[(20, ROLE + FIN + DONE)])), http("{shape: constant, rate: 10/s}", "1s"), tmp_path)
    assert all(r.first_ns is None for r in run.records)
    assert run.summary["latency"]["ttft"]["n"] == 0
    assert run.summary["self_check"]["ok"]
