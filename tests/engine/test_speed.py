"""The whole Mooncake conversation trace, its own times, lengths and shared blocks, through scheduler, pool and cost."""

import time

import pytest

from kvbench.engine import Job
from kvbench.engine.engine import Engine
from kvbench.profile import load_engine, load_hardware, load_model
from kvbench.workload.traces import read
from tests.whole import ROOT

TRACE = ROOT / "scenarios/traces/mooncake_conversation.jsonl.gz"


@pytest.mark.slow
@pytest.mark.alone
def test_a_whole_trace_takes_at_most_a_minute_on_one_core() -> None:
    built = Engine(load_model("llama-3.1-70b"), load_hardware("8xh100"), load_engine("mooncake"))
    trace = read(TRACE)
    load = [(due or 0.0, Job(number, trace.segments(row), row.n_out)) for number, (due, _, row) in enumerate(trace.replay())]
    assert (len(load), sum(job.tokens for _, job in load)) == (12_031, 144_793_823)
    done, cached, tokens = 0, 0, 0

    def take(until: float) -> None:
        nonlocal done, cached, tokens
        for span in built.advance(until):
            done, tokens = done + len(span.done), tokens + len(span.times) * len(span.tokens)
            cached += sum(one.cached for one in span.done)

    start = time.process_time()
    for at, job in load:
        take(at)
        assert built.submit(job, at) is None
    while built.wake() < float("inf"):
        take(built.wake())
    took = time.process_time() - start
    print(f"{tokens / 1e6:.1f} M answer tokens, {cached / 1e6:.1f} M prompt tokens found, {took:.1f} CPU s")
    assert done == len(load)
    assert tokens == sum(job.max_tokens for _, job in load) == 4_122_048
    assert 0 < cached == built.gauges()["hit_tokens"] < 0.3736 * built.gauges()["query_tokens"]  # of an endless cache
    assert took <= 60
