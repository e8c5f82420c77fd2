"""The formulas of one request against values computed by hand. Times in the tests are milliseconds."""

from typing import Any

import pytest

from kvbench.core import Record
from kvbench.metrics import request

MS = 1_000_000


def near(pairs: list[tuple[float, int]] | None) -> list[tuple[float, int]]:
    """itl with its gaps rounded to 0.1 us, so that it compares as a list."""
    assert pairs is not None
    return [(round(gap, 7), tokens) for gap, tokens in pairs]


def record(tokens: list[float], **kwargs: Any) -> Record:
    """A request sent at 0 whose token-bearing events arrive at `tokens` (ms); usage says one token each unless told otherwise."""
    times = [round(at * MS) for at in tokens]
    base: dict[str, Any] = {
        "id": 0,
        "outcome": "ok",
        "source": "usage",
        "release_ns": 0,
        "sent_ns": 0,
        "written_ns": 0,
        "token_ns": times,
        "reads": len(times),
        "n_out": len(times),
        "first_ns": times[0] if times else None,
        "content_ns": times[0] if times else None,
        "done_ns": times[-1] if times else 0,
    }
    return Record(**(base | kwargs))


def test_every_stamp_goes_into_the_formula_it_belongs_to() -> None:
    r = record([], due_ns=100 * MS, release_ns=130 * MS, connect_ns=7 * MS, sent_ns=140 * MS, written_ns=145 * MS,
               first_ns=200 * MS, content_ns=260 * MS, done_ns=500 * MS, end_ns=501 * MS, n_out=10)  # fmt: skip
    got = request.values(r)
    want = {
        "gate_wait": 30, "connect": 7, "lag": 3, "upload": 5, "ttft": 60, "ttft_written": 55, "response_ttft": 100, "ttfc": 120,
        "e2e": 360, "response": 400, "tpot": None, "ntpot": 36,
    }  # fmt: skip
    assert got == {name: None if ms is None else pytest.approx(ms / 1e3) for name, ms in want.items()}


def test_what_was_not_reached_is_none_and_not_zero() -> None:
    shed = Record(id=0, due_ns=5, end_ns=9, outcome="shed")
    assert set(request.values(shed).values()) == {None}
    assert request.icl(shed) == []
    assert request.events_per_read(shed) is None


def test_c06_a_reply_without_tokens_has_no_ttft_and_nothing_is_negative() -> None:
    role_only = record([], done_ns=40 * MS, n_out=0)
    assert request.value(role_only, "ttft") is None
    assert request.value(role_only, "e2e") == pytest.approx(0.04)
    assert request.negative([role_only]) == {}
    broken = record([50, 40], sent_ns=60 * MS, first_ns=50 * MS, done_ns=70 * MS)
    assert request.negative([role_only, broken]) == {
        "upload": 1, "ttft": 1, "ttfc": 1, "icl": 1, "tpot": 1
    }  # fmt: skip


def test_d01_reasoning_starts_ttft_and_content_starts_ttfc() -> None:
    r = record([200, 220, 1000], content_ns=1000 * MS, n_out=40)
    assert request.value(r, "ttft") == pytest.approx(0.2)
    assert request.value(r, "ttfc") == pytest.approx(1.0)
    only_thought = record([200, 220], content_ns=None)
    assert request.value(only_thought, "ttft") == pytest.approx(0.2)
    assert request.value(only_thought, "ttfc") is None


def test_d04_tokens_told_of_but_never_seen_leave_tpot_null() -> None:
    r = record([], done_ns=4700 * MS, n_out=1000)
    assert request.value(r, "e2e") == pytest.approx(4.7)
    assert [request.value(r, name) for name in ("ttft", "tpot")] == [None, None]
    assert request.itl(r) is None


def test_d05_the_first_token_is_no_gap() -> None:
    r = record([1000 + 10 * k for k in range(10)])
    assert request.icl(r) == pytest.approx([0.01] * 9)
    assert near(request.itl(r)) == [(0.01, 1)] * 9


def test_d06_usage_per_chunk_gives_exact_tpot_and_itl() -> None:
    exact = record([100, 140, 180, 220], token_n=[4, 8, 12, 16], n_out=16)
    assert request.value(exact, "tpot") == pytest.approx(0.010)
    assert not request.approximate(exact)
    assert request.icl(exact) == pytest.approx([0.04] * 3)
    assert near(request.itl(exact)) == [(0.010, 4)] * 3
    without = record([100, 140, 180, 220], n_out=16)
    assert request.value(without, "tpot") == pytest.approx(0.008)
    assert request.approximate(without)
    assert request.itl(without) is None
    assert request.icl(without) == pytest.approx([0.04] * 3)


def test_d08_unequal_chunks_count_each_token_once() -> None:
    r = record([435.8, 619.4, 801.8], token_n=[1, 17, 31], n_out=31)
    assert request.value(r, "ttft") == pytest.approx(0.4358)
    assert request.value(r, "tpot") == pytest.approx(0.0122)
    assert near(request.itl(r)) == [(0.011475, 16), (0.0130286, 14)]


@pytest.mark.parametrize("tokens", [0, 1])
def test_d10_no_or_one_token_divides_by_nothing(tokens: int) -> None:
    r = record([100.0] * tokens, done_ns=100 * MS)
    assert request.value(r, "tpot") is None
    assert request.icl(r) == []
    assert request.value(r, "ntpot") == (None if tokens == 0 else pytest.approx(0.1))


def test_d16_tpot_of_eleven_tokens_twenty_ms_apart() -> None:
    assert request.value(record([100 + 20 * k for k in range(11)]), "tpot") == pytest.approx(0.02)


def test_d18_without_streaming_only_whole_latencies_exist() -> None:
    r = record([900], streamed=False, n_out=50)
    got = request.values(r)
    assert [got[name] for name in ("ttft", "response_ttft", "ttfc", "tpot")] == [None] * 4
    assert got["e2e"] == pytest.approx(0.9)
    assert request.itl(r) is None
    assert request.icl(r) == []


def test_c10_tokens_coalesced_into_the_first_read_are_not_part_of_the_decode_time() -> None:
    stamps = [60.0] * 10 + [120.0] * 10  # 20 tokens at 6 ms each, ten to a read
    r = record(stamps, reads=2)
    assert request.value(r, "tpot") == pytest.approx(0.006)  # 60 ms / 10, not 60 ms / 19
    assert request.events_per_read(r) == 10


def test_choices_are_timed_apart() -> None:
    r = record([100, 101, 110, 121, 120, 141], token_choice=[0, 1, 0, 1, 0, 1])  # 10 ms and 20 ms apart
    assert request.icl(r) == pytest.approx([0.010, 0.020, 0.010, 0.020])
    assert near(request.itl(r)) == [(gap, 1) for gap in (0.010, 0.020, 0.010, 0.020)]
    assert request.value(r, "tpot") == pytest.approx((0.020 + 0.040) / 4)


def test_an_event_without_a_new_token_lends_its_gap_to_the_next() -> None:
    r = record([100, 110, 130], token_n=[1, 1, 3], n_out=3)
    assert near(request.itl(r)) == [(0.015, 2)]


def test_events_alone_cannot_say_what_a_token_took() -> None:
    r = record([100, 120], source="events")
    assert request.approximate(r)
    assert request.itl(r) is None
    assert request.value(r, "tpot") == pytest.approx(0.02)


def test_meets_is_inclusive_wants_ok_and_a_missing_value_fails() -> None:
    r = record([800, 850])
    assert request.meets(r, {"response_ttft": 0.8, "tpot": 0.05})
    assert request.meets(r, {})
    assert not request.meets(r, {"response_ttft": 0.799})
    assert not request.meets(record([800]), {"tpot": 10.0})  # one token: no tpot
    assert not request.meets(record([800, 850], outcome="timeout"), {"response_ttft": 0.8})


def test_columns_are_the_same_numbers_as_one_by_one() -> None:
    records = [record([100, 120, 140]), record([]), Record(id=1, outcome="shed"), record([5, 9], n_out=7)]
    columns = request.columns(records)
    for i, r in enumerate(records):
        for name, one in request.values(r).items():
            assert (None if columns[name][i] != columns[name][i] else columns[name][i]) == one
