"""Every event to the second of its own time, once; and what does not fit is counted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core import Record
from kvbench.metrics import request
from kvbench.metrics.ring import AHEAD, COUNTERS, LATENCIES, Ring
from kvbench.metrics.slots import Slots
from kvbench.metrics.window import Interval
from tests.metrics.stream import stream

S = 1_000_000_000
MS = 1_000_000


def per_second(slots: Ring, name: str, seconds: int) -> list[int]:
    return [Interval(slots, s, s + 1, []).counts[name] for s in range(seconds)]  # type: ignore[arg-type]  # reads counts only


def values_at(slots: Slots, name: str, second: int) -> int:
    return int(slots.buckets[LATENCIES.index(name), second % slots.size].sum())


def test_each_event_lies_in_its_own_second() -> None:
    slots = Slots()
    slots.fold([stream(1, 0.5, [2.0, 2.5, 4.0], release_ns=1 * S, sent_ns=round(1.2 * S), end_ns=5 * S)])
    assert per_second(slots, "offered", 6) == [1, 0, 0, 0, 0, 0]
    assert per_second(slots, "admitted", 6) == [0, 1, 0, 0, 0, 0]
    assert per_second(slots, "sent", 6) == [0, 1, 0, 0, 0, 0]
    assert per_second(slots, "tokens_out", 6) == [0, 0, 2, 0, 1, 0]
    assert per_second(slots, "ok", 6) == [0, 0, 0, 0, 0, 1]
    assert per_second(slots, "tokens_in", 6) == [0, 0, 0, 0, 0, 10]
    assert [values_at(slots, name, 2) for name in ("ttft", "response_ttft", "icl", "itl")] == [1, 1, 1, 1]
    assert [values_at(slots, name, 4) for name in ("e2e", "tpot", "icl", "gate_wait")] == [1, 1, 1, 0]
    assert [values_at(slots, name, 1) for name in ("lag", "connect", "gate_wait")] == [1, 1, 1]


def test_peek_counts_live_requests_once_and_fold_only_the_rest() -> None:
    slots = Slots()
    live = stream(1, 0.5, [1.0, 2.0], outcome="", end_ns=None, done_ns=None, n_out=None)
    for now in (1, 1, 3):
        slots.peek([live], now * S)
    assert per_second(slots, "tokens_out", 5) == [0, 1, 1, 0, 0]
    assert per_second(slots, "sent", 5) == [1, 0, 0, 0, 0]
    live.token_ns.append(4 * S)
    live.outcome, live.n_out, live.done_ns, live.end_ns = "ok", 3, 4 * S, 4 * S
    slots.fold([live])
    assert per_second(slots, "tokens_out", 5) == [0, 1, 1, 0, 1]
    assert [sum(per_second(slots, name, 5)) for name in ("offered", "admitted", "sent", "ok")] == [1, 1, 1, 1]
    assert slots._seen == {}


def test_peek_leaves_what_the_engine_stamped_ahead_of_now() -> None:
    slots = Slots()
    live = stream(1, 0.5, [1.0, 2.0, 3.0], outcome="", end_ns=None)
    slots.peek([live], 2 * S)
    assert per_second(slots, "tokens_out", 4) == [0, 1, 0, 0]  # the token at exactly 2.0 belongs to the next look
    slots.peek([live], 4 * S)
    assert per_second(slots, "tokens_out", 4) == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("n_out", "token_n", "want"),
    [(7, None, [0, 2, 2, 3]), (1, None, [0, 0, 0, 1]), (9, [1, 5, 9], [0, 1, 4, 4]), (None, None, [0, 1, 1, 1])],
)
def test_tokens_add_up_to_usage_whatever_the_events_are(n_out: int | None, token_n: list[int] | None, want: list[int]) -> None:
    for peeked in (False, True):
        slots = Slots()
        r = stream(1, 0.5, [1.0, 2.0, 3.0], n_out=n_out, token_n=token_n)
        if peeked:
            slots.peek([r], 3 * S)
        slots.fold([r])
        assert per_second(slots, "tokens_out", 4) == want


def test_tokens_that_were_never_seen_arrive_at_the_end() -> None:
    slots = Slots()
    slots.fold([stream(1, 0.5, [], n_out=50, done_ns=2 * S, end_ns=2 * S)])
    assert per_second(slots, "tokens_out", 3) == [0, 0, 50]


def test_c06_a_negative_duration_is_counted_and_left_out() -> None:
    slots = Slots()
    slots.fold([stream(1, 2.0, [3.0, 2.5], first_ns=1 * S), stream(2, 2.0, [3.0, 3.5])])
    assert slots.negative["ttft"] == 1
    assert slots.negative["icl"] == 1
    assert values_at(slots, "ttft", 3) == 1
    assert values_at(slots, "ttft", 1) == 0


def test_events_older_than_the_ring_are_counted_not_lost_in_silence() -> None:
    slots = Slots(seconds=10)
    slots.close(10 + AHEAD + 2)
    slots.fold([stream(1, 1.0, [2.0, 129.0])])
    assert sum(per_second(slots, "offered", 3)) == 0
    assert slots.late > 0
    assert values_at(slots, "e2e", 129) == 1


def test_the_ring_takes_slots_ahead_and_refuses_a_stamp_out_of_all_reason() -> None:
    slots = Slots(seconds=10)
    slots.close(5)
    slots.count("ok", (5 + AHEAD) * S)
    slots.count("ok", 10**9 * S)
    assert (slots.early, slots.late) == (1, 0)
    slots.close(5 + AHEAD + 1)
    assert Interval(slots, 5 + AHEAD, 6 + AHEAD, []).counts["ok"] == 1


def test_a_reused_slot_starts_empty() -> None:
    slots = Slots(seconds=10)
    size = 10 + AHEAD
    slots.gauge("kv_usage", 3.5, 0.5)
    slots.fold([stream(1, 3.0, [3.1, 3.2]), stream(2, 3.0, [], outcome="timeout", end_ns=round(3.5 * S), done_ns=None)])
    for at in range(1, 2 * size):
        slots.close(at)
        assert Interval(slots, at - 10, at, []).counts["ok"] == (3 in range(at - 10, at))
    assert slots.buckets.sum() == slots.counts.sum() == slots.ages.sum() == slots.gauges["kv_usage"].n.sum() == 0


def test_gauges_outside_their_range_are_no_reading() -> None:
    slots = Slots()
    for value in (1.2, -0.1, None, float("nan")):
        slots.gauge("kv_usage", 1.0, value)
    assert slots.out_of_range == 2
    assert "kv_usage" not in slots.gauges


def test_limits_of_an_unknown_metric_are_refused() -> None:
    with pytest.raises(ValueError, match="slo of class 'chat': 'ttft_p99' is not one of"):
        Slots(slos={"chat": {"ttft_p99": 1.0}})


records = st.lists(
    st.builds(
        lambda i, start, gaps, kind, n, usage, choices: stream(
            i, start / 10, list(np.cumsum([start / 10 + 0.1, *(g / 1000 for g in gaps)])), outcome=kind, n_out=n,
            token_n=list(range(2, 2 * len(gaps) + 3, 2)) if usage else None,
            token_choice=[k % 2 for k in range(len(gaps) + 1)] if choices else None,
        ),
        st.integers(0, 10**6), st.integers(0, 50), st.lists(st.integers(0, 1500), max_size=6),
        st.sampled_from(["ok", "ok", "failed", "timeout"]), st.one_of(st.none(), st.integers(0, 9)), st.booleans(), st.booleans(),
    ),
    min_size=1, max_size=12, unique_by=lambda r: r.id,
)  # fmt: skip


@given(records, st.integers(0, 20))
@settings(deadline=None, max_examples=60)
def test_the_fold_holds_what_the_formulas_say(batch: list[Record], peek_at: int) -> None:
    """The batch arithmetic of the slots against the formulas of one request, which are the report's."""
    slots = Slots(seconds=30)
    slots.peek(batch, peek_at * S)
    slots.fold(batch[:5])
    slots.fold(batch[5:])
    assert sum(per_second(slots, "tokens_out", 40)) == sum(
        (r.token_n[-1] if r.token_n else len(r.token_ns)) if r.n_out is None or r.token_n else r.n_out for r in batch
    )
    ok = [r for r in batch if r.outcome == "ok"]
    want = {name: [v for r in ok if (v := request.value(r, name)) is not None] for name in ("e2e", "tpot", "ntpot")}
    alive = [r for r in batch if r.outcome in ("ok", "timeout")]
    want["ttft"] = [v for r in alive if (v := request.value(r, "ttft")) is not None]
    want["icl"] = [gap for r in ok for gap in request.icl(r)]
    want["itl"] = [gap for r in ok for gap, tokens in request.itl(r) or [] for _ in range(tokens)]
    for name, values in want.items():
        row = LATENCIES.index(name)
        assert slots.buckets[row].sum() == len(values)
        assert slots.sums[row].sum() / 1e9 == pytest.approx(sum(values))
        if values:
            assert slots.low[row].min() / 1e9 == pytest.approx(min(values))
            assert slots.high[row].max() / 1e9 == pytest.approx(max(values))
    assert slots.counts[COUNTERS.index("offered")].sum() == len(batch)
