"""Group F of the cases: which requests and which seconds count. Here at the level of the fold, without a run."""

import numpy as np
import pytest

from kvbench.metrics import request
from kvbench.metrics.slots import Slots
from kvbench.metrics.window import statistic, window
from tests.metrics.stream import stream

S = 1_000_000_000


def test_f01_each_event_counts_in_the_interval_of_its_own_time_and_once() -> None:
    a = stream(1, 8.0, [9.5 + 0.5 * k for k in range(10)])
    b = stream(2, 9.0, [10.5 + 0.5 * k for k in range(10)])
    slots = Slots()
    slots.fold([a, b])
    slots.close(16)
    before, after = window(slots, 0, 10, [], 16.0), window(slots, 10, 16, [], 16.0)
    assert after.n["ttft_p50"] == 1
    assert after.values["ttft_max"] == pytest.approx(1.5)
    assert after.counts["tokens_out"] == 9 + 10  # A's token at exactly 10.0 is inside [10, 16)
    assert before.counts["tokens_out"] == 1
    assert after.counts["ok"] == 2
    assert after.n["e2e_p50"] == 2
    assert after.counts["offered"] == 0
    assert before.counts["offered"] == 2


def test_f02_tokens_of_requests_cut_off_stay_in_the_throughput_but_not_in_the_latencies() -> None:
    slots = Slots()
    whole = [stream(k, 0.0, [0.08 * (j + 1) - 0.001 for j in range(100)]) for k in range(4)]
    cut = [
        stream(4 + k, 8.0, [8.0 + 0.08 * (j + 1) - 0.001 for j in range(25)], outcome="cancelled", end_ns=10 * S, n_out=None)
        for k in range(4)
    ]
    slots.fold(whole)
    slots.peek(cut, 9 * S)
    slots.peek(cut, 10 * S)
    slots.fold(cut)
    slots.close(11)
    w = window(slots, 0, 10, [], 11.0)
    assert w.counts["tokens_out"] == 500
    assert w.values["output_tokens_rate"] == 50
    assert sum(r.n_out or 0 for r in [*whole, *cut] if r.outcome == "ok") / 10 == 40
    assert window(slots, 0, 11, [], 11.0).counts["cancelled"] == 4
    assert w.n["e2e_p50"] == w.n["tpot_p50"] == 4


def test_f05_failures_stay_out_of_the_latencies_and_show_as_what_they_are() -> None:
    fine = [stream(k, 0.0, [0.2, 1.0]) for k in range(90)]
    late = [stream(90 + k, 0.0, [0.3], outcome="timeout", cause="total", end_ns=30 * S) for k in range(10)]
    slots = Slots()
    slots.fold([*fine, *late])
    slots.close(31)
    e2e = np.array([v for r in [*fine, *late] if r.outcome == "ok" and (v := request.value(r, "e2e")) is not None])
    assert len(e2e) == 90
    assert e2e.max() == pytest.approx(1.0)
    mean = statistic(slots, "e2e_mean", 31, [])
    assert mean.n == 90
    assert mean.value == pytest.approx(1.0)
    assert statistic(slots, "tpot_max", 31, []).n == 90
    assert statistic(slots, "itl_max", 31, []).value == pytest.approx(0.8)
    assert statistic(slots, "error_rate", 31, []).value == pytest.approx(0.1)
    p90, p99 = statistic(slots, "e2e_p90", 31, []), statistic(slots, "e2e_p99", 31, [])
    assert p90.value == pytest.approx(1.0, rel=0.01)
    assert not p90.lower_bound
    assert p99.value == pytest.approx(30.0)
    assert p99.lower_bound
