"""Windows and single statistics, by hand."""

import pytest

from kvbench.core import Record
from kvbench.metrics import Stat, names
from kvbench.metrics.names import Name
from kvbench.metrics.slots import Slots
from kvbench.metrics.window import statistic, window
from tests.metrics.stream import stream

S = 1_000_000_000


def flying(number: int, sent: float, first: float | None = None) -> Record:
    at = round(sent * S)
    return Record(
        id=number, due_ns=at, release_ns=at, sent_ns=at, written_ns=at, first_ns=None if first is None else round(first * S)
    )


def test_an_interval_is_half_open_and_rates_are_per_second_of_it() -> None:
    slots = Slots()
    slots.fold([stream(k, float(k), [k + 0.5, k + 1.0]) for k in range(4)])  # ends at 1, 2, 3, 4
    slots.close(5)
    w = window(slots, 1, 3, [], 5.0)
    assert (w.start, w.end) == (1.0, 3.0)
    assert w.counts["offered"] == 2
    assert w.counts["ok"] == 2
    assert w.counts["tokens_out"] == 4
    assert w.values["offered_rate"] == 1.0
    assert w.values["output_tokens_rate"] == 2.0
    assert w.values["input_tokens_rate"] == 10.0
    assert w.values["e2e_p50"] == pytest.approx(1.0, rel=0.01)
    assert w.n["e2e_p50"] == 2
    assert w.values["goodput"] is None
    assert w.values["kv_usage_mean"] is None
    assert "kv_usage_mean" not in w.n


def test_windows_add_up_to_the_whole() -> None:
    slots = Slots()
    slots.fold([stream(k, k / 7, [k / 7 + 0.1 * j for j in range(1, 9)]) for k in range(60)])
    slots.close(12)
    parts = [window(slots, a, a + 3, [], 12.0).counts for a in range(0, 12, 3)]
    whole = window(slots, 0, 12, [], 12.0).counts
    assert {name: sum(part[name] for part in parts) for name in whole} == whole
    assert whole["tokens_out"] == 480


def test_min_p50_p90_p99_max_are_in_order_with_ages_too() -> None:
    slots = Slots()
    slots.fold([stream(k, 0.0, [0.001 * (k + 1)]) for k in range(50)])
    slots.close(9)
    for live in ([], [flying(90 + k, 0.1 * k) for k in range(20)]):
        ways = ("min", "p50", "p90", "p95", "p99", "p999", "max")
        got = [value for way in ways if (value := statistic(slots, f"ttft_{way}", 10, live).value) is not None]
        assert len(got) == len(ways)
        assert got == sorted(got)


def test_rates_of_outcomes_by_hand() -> None:
    slots = Slots()
    outcomes = ["ok"] * 6 + ["failed"] * 2 + ["timeout", "rejected"] + ["shed"] * 6 + ["dropped"] * 4 + ["cancelled"] * 3
    slots.fold([stream(k, 0.0, [0.5], outcome=outcome) for k, outcome in enumerate(outcomes)])
    slots.close(1)
    got = {
        name: statistic(slots, name, 1, []) for name in ("success_rate", "error_rate", "rejection_rate", "shed_rate", "drop_rate")
    }
    assert {name: stat.value for name, stat in got.items()} == pytest.approx(
        {"success_rate": 0.6, "error_rate": 0.4, "rejection_rate": 0.1, "shed_rate": 0.3, "drop_rate": 0.2}
    )
    assert got["error_rate"].n == 10
    assert got["shed_rate"].n == 20


def test_goodput_counts_requests_within_their_classs_limits_over_all_that_were_offered_and_decided() -> None:
    slots = Slots(slos={"chat": {"ttft": 0.5, "tpot": 0.1}})
    slots.fold([
        stream(1, 0.0, [0.5, 0.6], cls="chat"),  # just within both
        stream(2, 0.0, [0.6, 0.7], cls="chat"),  # ttft too long
        stream(3, 0.0, [0.5], cls="chat"),  # no tpot: does not meet it
        stream(4, 0.0, [0.9, 1.9], cls="batch", end_ns=S // 2),  # no limits
        stream(5, 0.0, [], cls="chat", outcome="shed"),
    ])  # fmt: skip
    slots.close(1)
    assert statistic(slots, "goodput", 1, []) == Stat(2 / 5, 5)
    assert statistic(slots, "goodput_rate", 1, []) == Stat(2.0, 2)


def test_hit_rate_is_null_unless_every_server_answer_told_it() -> None:
    slots = Slots()
    slots.fold([stream(1, 0.0, [0.1], n_in=100, cached=60), stream(2, 0.0, [0.1], n_in=300, cached=0)])
    slots.close(1)
    assert statistic(slots, "hit_rate", 1, []) == Stat(60 / 400, 400)
    slots.fold([stream(3, 0.0, [0.1], n_in=100)])
    assert statistic(slots, "hit_rate", 1, []).value is None
    assert "1 requests" in statistic(slots, "hit_rate", 1, []).reason


def test_a_hung_server_shows_at_once_and_young_requests_do_not_drag() -> None:
    slots = Slots()
    slots.fold([stream(k, 0.0, [0.2]) for k in range(10)])
    slots.close(4)
    young = [flying(100 + k, 3.95) for k in range(1000)]
    assert statistic(slots, "ttft_p50", 10, young).value == pytest.approx(0.2, rel=0.01)
    hung = [flying(100 + k, 1.0) for k in range(30)]
    p90 = statistic(slots, "ttft_p90", 10, hung)
    assert p90.value == pytest.approx(3.0)
    assert p90.lower_bound
    assert p90.n == 40
    assert statistic(slots, "ttft_max", 10, hung).lower_bound


def test_a_first_token_in_flight_is_a_value_and_one_stamped_after_the_end_is_an_age() -> None:
    slots = Slots()
    slots.close(10)
    live = [flying(1, 2.0, 3.0), flying(2, 4.0, 9.0), flying(3, 6.0, 10.0)]
    assert statistic(slots, "ttft_max", 4, live) == Stat(5.0, 2)  # 9 - 4; the first lies before the span; the third is 4 s old
    assert statistic(slots, "e2e_p50", 4, live) == Stat(8.0, 3, supported=False, lower_bound=True)


def test_waiting_at_the_gate_ages_the_response_and_not_the_service() -> None:
    slots = Slots()
    slots.close(6)
    held = [Record(id=1, due_ns=1 * S)]
    assert statistic(slots, "response_ttft_p99", 10, held) == Stat(5.0, 1, supported=False, lower_bound=True)
    assert statistic(slots, "ttft_p99", 10, held).value is None


def test_gauge_statistics_by_hand() -> None:
    slots = Slots()
    for at, value in ((0.2, 0.2), (0.7, 0.4), (2.5, 0.9)):
        slots.gauge("kv_usage", at, value)
    slots.close(4)
    got = {way: statistic(slots, str(Name("kv_usage", way)), 4, []).value for way in ("", "mean", "min", "max", "last")}
    assert got == pytest.approx({"": 0.6, "mean": 0.6, "min": 0.2, "max": 0.9, "last": 0.9})  # seconds weigh alike: 0.3 and 0.9
    assert statistic(slots, "kv_usage", 1, []) == Stat(None, reason="not read in this interval")
    assert statistic(slots, "running", 1, []) == Stat(None, reason="not exposed")
    assert window(slots, 0, 4, [], 4.5).age["kv_usage"] == pytest.approx(2.0)


def test_counters_give_their_increase_and_survive_a_restart() -> None:
    slots = Slots()
    for at, value in ((0.5, 1000), (1.5, 1010), (2.5, 3), (3.5, 5)):
        slots.gauge("preemptions_total", at, value)
    slots.close(4)
    assert statistic(slots, "preemptions_total", 4, []).value == 10 + 3 + 2
    assert statistic(slots, "preemptions_total_rate", 2, []).value == 5 / 2
    assert statistic(slots, "preemptions_total_last", 4, []).value == 5


def test_before_the_first_second_nothing_is_measured() -> None:
    assert statistic(Slots(), "offered_rate", 10, []).value is None
    assert statistic(Slots(), "ttft_p99", 10, []).value is None


def test_names_are_strict() -> None:
    assert names.parse("ttft_p99") == ("ttft", "p99", 0.99)
    assert names.parse("preemptions_total_rate").statistic == "rate"
    for wrong, hint in (
        ("ttft_p98", "ttft_p99"),
        ("kv_usge", "'kv_usage'"),
        ("ttft", "ttft_p50"),
        ("error_rate_p99", "error_rate"),
    ):
        with pytest.raises(ValueError, match=hint):
            names.parse(wrong)
    assert all(str(names.parse(name)) == name for name in names.known())
