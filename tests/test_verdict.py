"""The verdict table of DESIGN.md section 7, each row at its thresholds."""

from typing import Any

import numpy as np
import pytest

from kvbench import verdict
from kvbench.core import Event, Record, Sample
from kvbench.evidence import Evidence, sent_share
from kvbench.verdict import CHECKS, checks, judge
from tests.report.build import lost, ns, own, record


def evidence(**changes: Any) -> Evidence:
    """A run of 2,000 requests over 100 s in which nothing is wrong."""
    whole: dict[str, Any] = {
        "records": [record(k, k * 0.05, tokens=1) for k in range(2000)],
        "samples": own(100, cpu=0.2, loop_lag_p99=0.001, wall_drift=0.0),
        "events": [], "manifest": {"clock": "real", "nonce": 1, "scenario": {}}, "steady": 2000, "lags": np.zeros(2000),
        "connects": np.zeros(2000), "ttft_p50": 0.1,
    }  # fmt: skip
    return Evidence(**(whole | changes))


def level(name: str, **changes: Any) -> str | None:
    rows = {row["check"]: row for row in judge(evidence(**changes))["checks"]}
    return str(rows[name]["level"]) if rows[name]["level"] else None


def test_nothing_wrong_is_valid_and_what_is_missing_is_listed() -> None:
    found = judge(evidence())
    assert found["verdict"] == "VALID"
    assert found["reasons"] == []
    missing = {row["check"]: row["reason"] for row in found["not_measured"]}
    assert "no server counters" in missing["server_requests"]
    assert "no answer" in missing["prefix_hits"] or "cached" in missing["prefix_hits"]


def test_the_thresholds_are_those_of_the_design() -> None:
    table = {name: (check.worse, check.degraded, check.invalid) for name, check in CHECKS.items() if not callable(check.degraded)}
    assert table == {
        "sent_share": ("<", 0.99, 0.95), "loop_lag_p99": (">", 0.010, 0.100), "client_cpu": (">", 0.80, 0.95),
        "connect_p99": (">", 0.005, 0.050), "dropped_share": (">", 0, 0.01), "steady_requests": ("<", 1000, 30),
        "prefix_hits": (">=", 0.01, 0.10), "server_requests": (">", 0.01, 0.10), "collector_gap": (">", 3, None),
        "count_mismatch": (">", 0.02, 0.20), "workers_lost": (">", None, 0), "clock_steps": (">", None, None),
        "collectors_lost": (">", 0, None), "required_lost": (">", None, 0), "sink_loss": (">", 0.0, None),
        "recompute_in_hits": (">", None, None), "resets_unconfirmed": (">", 0, None), "unanswered": (">", 0.01, 0.10),
        "captured": (">", None, None), "gpus_lost": (">", 0, None), "messages_lost": (">", 0, None),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ttft", "degraded", "invalid"),
    [(0.001, 0.0005, 0.005), (0.040, 0.002, 0.010), (0.2, 0.005, 0.050), (10.0, 0.005, 0.050), (None, 0.0005, 0.005)],
)
def test_lag_is_judged_beside_ttft(ttft: float | None, degraded: float, invalid: float) -> None:
    """min(5 ms, max(0.5 ms, 5 %)) and min(50 ms, max(5 ms, 25 %)) of the median TTFT."""
    for lag, expected in ((degraded, "OK"), (degraded * 1.01, "DEGRADED"), (invalid, "DEGRADED"), (invalid * 1.01, "INVALID")):
        assert level("lag_p99", lags=np.full(2000, lag), ttft_p50=ttft) == expected


@pytest.mark.parametrize(("n", "expected"), [(29, "INVALID"), (30, "DEGRADED"), (999, "DEGRADED"), (1000, "OK")])
def test_requests_in_steady(n: int, expected: str) -> None:
    assert level("steady_requests", steady=n) == expected


def test_c04_a_client_that_stalls_says_so() -> None:
    found = judge(evidence(samples=own(20, loop_lag_p99=0.29, cpu=0.5)))
    assert found["verdict"] == "INVALID"
    assert found["reasons"][0]["check"] == "loop_lag_p99"
    assert "290 ms, above 100 ms" in found["reasons"][0]["text"]
    assert "stalled" in found["reasons"][0]["advice"]


def test_cpu_is_the_busiest_ten_seconds() -> None:
    """30 s at 50 % with 10 s at 90 % among them; five busy seconds are not ten."""

    def readings(busy: range) -> list[Sample]:
        return [Sample(t=float(t), name="cpu", value=0.9 if t in busy else 0.5, source="kvbench") for t in range(1, 31)]

    assert level("client_cpu", samples=readings(range(10, 20))) == "DEGRADED"
    assert level("client_cpu", samples=readings(range(10, 15))) == "OK"
    assert level("client_cpu", samples=own(5, cpu=0.99)) is None


def test_virtual_time_has_no_late_client() -> None:
    found = judge(evidence(manifest={"clock": "virtual", "nonce": 1, "scenario": {}}, samples=[]))
    missing = {row["check"]: row["reason"] for row in found["not_measured"]}
    assert found["verdict"] == "VALID"
    assert "virtual time" in missing["loop_lag_p99"]
    assert "virtual time" in missing["client_cpu"]


def spans(late: range, by: float) -> list[Record]:
    """100/s for 60 s; those in `late` leave `by` seconds late."""
    records = [record(k, k * 0.01, tokens=1) for k in range(6000)]
    for k in late:
        records[k].sent_ns = records[k].due_ns + ns(by)
    return records


def test_b02_sent_share_is_of_the_worst_ten_seconds() -> None:
    """60 of the 1,000 due in [20 s, 30 s) leave 30 s late: 94 % there, 99 % over the whole minute."""
    found = sent_share(evidence(records=spans(range(2400, 2460), 30.0)))
    assert found.value == pytest.approx(0.94)
    assert level("sent_share", records=spans(range(2400, 2460), 30.0)) == "INVALID"


def test_a_send_within_a_second_after_the_span_counts() -> None:
    assert sent_share(evidence(records=spans(range(6000), 0.9))).value == 1.0
    assert (
        sent_share(evidence(records=spans(range(6000), 1.5))).value or 1
    ) < 0.96  # half a second's worth is late in every span


def test_a_refused_connection_is_not_the_tools_debt_but_a_drop_is() -> None:
    records = spans(range(0), 0)
    for k in range(2400, 2460):
        records[k] = lost(k, k * 0.01, "failed", "connect", sent_ns=None)
    assert sent_share(evidence(records=records)).value == 1.0
    for k in range(2400, 2460):
        records[k] = lost(k, k * 0.01, "dropped", release_ns=ns(k * 0.01))
    assert sent_share(evidence(records=records)).value == pytest.approx(0.94)


def test_few_releases_are_not_measured() -> None:
    found = sent_share(evidence(records=[record(k, k * 1.0) for k in range(199)]))
    assert (found.value, found.reason) == (None, "no span of 10 s holds 200 releases")


@pytest.mark.parametrize(("dropped", "expected"), [(0, "OK"), (1, "DEGRADED"), (20, "DEGRADED"), (21, "INVALID")])
def test_dropped_by_the_tool(dropped: int, expected: str) -> None:
    records = [lost(k, k * 0.05, "dropped") if k < dropped else record(k, k * 0.05) for k in range(2000)]
    assert level("dropped_share", records=records) == expected


def cut(number: int) -> list[Record]:
    """2,000 sent in steady, the first `number` of which the end of the run at 340 s cut off."""
    hung = [lost(k, k * 0.05, "cancelled", after=340 - k * 0.05) for k in range(number)]
    return hung + [record(k, k * 0.05) for k in range(number, 2000)]


@pytest.mark.parametrize(("number", "expected"), [(0, "OK"), (20, "OK"), (21, "DEGRADED"), (200, "DEGRADED"), (201, "INVALID")])
def test_what_steady_sent_and_nobody_answered(number: int, expected: str) -> None:
    assert level("unanswered", records=cut(number)) == expected


def test_unanswered_is_of_what_steady_sent_and_tells_the_age_of_the_oldest() -> None:
    """Of the 500 cut off 100 were warm-up's and 100 never left: 300 of 1,800, the oldest of them due at 10 s."""
    records = cut(500)
    for k in range(100):
        records[k].measured, records[400 + k].sent_ns = False, None
    (row,) = (row for row in judge(evidence(records=records))["checks"] if row["check"] == "unanswered")
    assert (row["value"], row["n"]) == (pytest.approx(300 / 1800), 1800)
    assert "the oldest had waited 5m" in row["text"]  # 335 s
    assert "lengthen drain" in row["advice"]
    assert "hangs" in row["advice"]


def test_what_a_signal_cut_off_is_not_judged() -> None:
    assert level("unanswered", records=cut(1000), events=[Event(t=340.0, kind="signal", data={"signal": "SIGINT"})]) is None


def test_g01_prefix_hits_of_requests_that_should_find_nothing() -> None:
    """Four groups of 500: only the first of each should find nothing; all later ones find the prefix, as groups are for."""

    def records(first: int) -> list[Record]:
        return [record(k, k * 0.05, group=k % 4, cached=first if k < 4 else 240) for k in range(2000)]

    assert level("prefix_hits", records=records(2)) == "OK"
    assert level("prefix_hits", records=records(3)) == "DEGRADED"  # 1.2 %
    assert level("prefix_hits", records=records(26)) == "INVALID"  # 10.2 %
    exact = [record(k, k * 0.05, group=k % 4, cached=1, n_in=100, asked_in=100) for k in range(2000)]
    assert level("prefix_hits", records=exact) == "DEGRADED"  # 1 % itself is too much
    off = {"clock": "real", "nonce": None, "scenario": {}}
    assert level("prefix_hits", records=records(240), manifest=off) is None


def test_of_requests_sent_at_one_instant_the_first_to_be_served_should_find_nothing() -> None:
    """Closed load begins with all users at once, and short answers are filed first: neither order is that of the engine."""
    starts = [record(k, 0.0, ttft=0.1 + 0.01 * (k % 4), group=k // 4, cached=0 if k % 4 == 0 else 200) for k in range(200)]
    assert level("prefix_hits", records=starts[::-1]) == "OK"
    together = [record(k, 0.0, group=k // 4, cached=0 if k % 4 == 0 else 200) for k in range(200)]  # one step served them all
    assert level("prefix_hits", records=together[::-1]) == "OK"
    warm = [record(k, 0.0, ttft=0.1 + 0.01 * (k % 4), group=k // 4, cached=200) for k in range(200)]
    assert level("prefix_hits", records=warm) == "INVALID"
    unserved = [lost(1000 + k, 0.0, "timeout", group=k) for k in range(50)]
    assert level("prefix_hits", records=[*unserved, *starts]) == "OK"  # who was never served has not filled the cache


def test_nobody_is_told_to_reset_or_restart_the_embedded_engine() -> None:
    def said(kind: str) -> str:
        manifest = {"clock": "virtual", "nonce": 1, "scenario": {"target": {"kind": kind}}}
        records = [record(k, k * 0.05, cached=200) for k in range(2000)]
        rows = {row["check"]: row for row in judge(evidence(records=records, manifest=manifest))["checks"]}
        return str(rows["prefix_hits"]["advice"])

    assert all(word in said("http") for word in ("target.reset", "restart"))
    assert not any(word in said("sim") for word in ("target.reset", "restart"))
    assert "nonce" in said("sim")


def test_a_chat_template_is_no_warm_cache() -> None:
    records = [record(k, k * 0.05, cached=16, n_in=277) for k in range(2000)]  # 256 asked; 16 of the template's 21 tokens found
    assert level("prefix_hits", records=records) == "OK"


def test_wall_clock_steps_are_noted() -> None:
    drift = [0.0, 0.001, 0.002, 1.002, 1.003]
    samples = [Sample(t=float(t), name="wall_drift", value=value, source="kvbench") for t, value in enumerate(drift)]
    rows = {row["check"]: row for row in judge(evidence(samples=samples))["checks"]}
    assert (rows["clock_steps"]["value"], rows["clock_steps"]["level"]) == (1, "NOTED")


def test_a_scenario_moves_a_threshold_or_takes_it_away() -> None:
    manifest = {"clock": "real", "nonce": 1, "scenario": {"verdict": {"steady_requests": {"degraded": 10, "invalid": None}}}}
    assert level("steady_requests", steady=15, manifest=manifest) == "OK"
    assert level("steady_requests", steady=5, manifest=manifest) == "DEGRADED"
    assert checks({"lag_p99": {"invalid": "1ms"}})["lag_p99"].invalid == pytest.approx(0.001)
    assert checks({"sent_share": {"degraded": "90%"}})["sent_share"].degraded == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"lag_p9": {}}, "did you mean 'lag_p99'"), ({"lag_p99": {"bad": 1}}, "unknown key 'bad'"),
        ({"lag_p99": {"invalid": "5%"}}, "is not a duration|unknown unit"),
        ({"steady_requests": {"invalid": "many"}}, "is not a count"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checks(overrides)


def test_every_reason_has_its_number_and_advice() -> None:
    found = judge(evidence(steady=5, lags=np.full(2000, 1.0), connects=np.full(2000, 0.01)))
    assert found["verdict"] == "INVALID"
    assert [row["level"] for row in found["reasons"]] == ["INVALID", "INVALID", "DEGRADED"]
    for row in found["reasons"]:
        assert row["advice"]
        assert verdict.amount(row["value"], row["unit"]) in row["text"]


@pytest.mark.parametrize(
    ("late", "expected"),
    [(0, "OK"), (1, "OK"), (9, "OK"), (11, "INVALID"), (54, "INVALID")],
)
def test_few_sends_are_judged_by_the_quantile_they_support(late: int, expected: str) -> None:
    """54 sends support p81: up to 10 late ones are chance, 11 are a habit. With 1,000 the p99 itself is judged."""
    assert level("lag_p99", lags=np.array([0.2] * late + [0.0] * (54 - late)), ttft_p50=0.1) == expected
    assert level("lag_p99", lags=np.array([0.2] * 11 + [0.0] * 989), ttft_p50=0.1) == "INVALID"


def emptied(hits: float | None, queries: float | None, believed: bool | None = True, **more: Any) -> dict[str, Any]:
    """A run with target.reset whose requests told nothing of their cached tokens; the counters were read at 0.5 s."""
    data = {"requests": 8, "hits": hits, "queries": queries, "reason": None if hits is not None else "http://x: no counters"}
    manifest = {"clock": "real", "nonce": 1, "scenario": {}, "target": {"reset": {"servers": [{"believed": believed}]}}}
    return {"events": [Event(t=0.5, kind="reset_check", data=data)], "manifest": manifest | more}


@pytest.mark.parametrize(
    ("hits", "expected"), [(0, "OK"), (25, "OK"), (26, "DEGRADED"), (255, "DEGRADED"), (256, "INVALID"), (2560, "INVALID")]
)
def test_first_requests_by_the_servers_counters(hits: float, expected: str) -> None:
    """Ten requests of 256 tokens were sent before the reading at 0.5 s: 1 % of 2,560 is 25.6, 10 % is 256."""
    assert level("prefix_hits", **emptied(hits, 2560)) == expected


def test_hits_of_requests_that_may_share_are_taken_off_the_counters() -> None:
    """Ten of 256 tokens, four of them later ones of a prefix group. 2,560 looked up; 4 x 256 = 1,024 may be hits of the group.
    1,100 hits: at least 76 of the other six's 1,536 tokens are not (4.9 %). 1,000: all may be the group's."""
    records = [record(k, k * 0.05, tokens=1, group=0 if k < 5 else None) for k in range(2000)]
    rows = {}
    for hits in (1000, 1100):
        rows[hits] = next(
            row for row in judge(evidence(records=records, **emptied(hits, 2560)))["checks"] if row["check"] == "prefix_hits"
        )
    assert (rows[1000]["value"], rows[1000]["level"]) == (0, "OK")
    assert rows[1100]["value"] == pytest.approx(76 / 1536)
    assert (rows[1100]["n"], rows[1100]["level"]) == (6, "DEGRADED")
    all_shared = [record(k, k * 0.05, tokens=1, group=0) for k in range(2000)]
    assert level("prefix_hits", records=all_shared, **emptied(2304, 2304)) is None


def test_the_chat_template_is_no_hit_in_the_counters_either() -> None:
    records = [record(k, k * 0.05, tokens=1, n_in=286) for k in range(2000)]
    assert level("prefix_hits", records=records, **emptied(300, 2860)) == "OK"


def test_what_the_answers_tell_comes_before_the_counters() -> None:
    """The counters count everyone's requests; an answer only its own."""
    records = [record(k, k * 0.05, tokens=1, cached=0) for k in range(2000)]
    assert level("prefix_hits", records=records, **emptied(2560, 2560)) == "OK"


@pytest.mark.parametrize(
    ("believed", "hits", "expected"),
    [(True, None, "OK"), (None, 0, "OK"), (None, 2560, "OK"), (None, None, "DEGRADED")],
    ids=["said yes", "shown cold", "shown warm, which is the other check's", "nothing"],
)
def test_a_reset_that_neither_the_server_nor_a_count_confirms(believed: bool | None, hits: float | None, expected: str) -> None:
    assert level("resets_unconfirmed", **emptied(hits, 2560 if hits is not None else None, believed)) == expected


def test_without_a_nonce_only_a_reset_makes_the_run_a_cold_one() -> None:
    assert level("prefix_hits", **emptied(2560, 2560, nonce=None)) == "INVALID"
    assert level("prefix_hits", manifest={"clock": "real", "nonce": None, "scenario": {}}) is None
