"""Numbers of made runs against arithmetic done by hand; the cases of public bug reports that end in a report."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.core import Record, Sample
from kvbench.report.files import load
from kvbench.report.summary import strict, summarise
from tests.report.build import MANIFEST, gauges, lost, ns, record, write


def summary(path: Path, records: list[Record], **run: Any) -> dict[str, Any]:
    return summarise(load(write(path / "run", records, **run)))


def test_latencies_start_where_they_say(tmp_path: Path) -> None:
    """Due at 1.0 s, held until 1.2 s, sent at 1.203 s after 2 ms for a connection; tokens from 1.5 s on, 20 ms apart."""
    one = record(0, 1.0, ttft=0.5, release_ns=ns(1.2), sent_ns=ns(1.203), connect_ns=ns(0.002), written_ns=ns(1.204))
    found = summary(tmp_path, [one])["latency"]
    expected = {
        "gate_wait": 0.2, "connect": 0.002, "lag": 0.001, "upload": 0.001, "ttft": 0.297, "ttft_written": 0.296,
        "response_ttft": 0.5,
        "e2e": 0.497, "response": 0.7, "tpot": 0.02, "itl": 0.02, "icl": 0.02, "ntpot": 0.497 / 11,
    }  # fmt: skip
    assert {name: found[name]["p50"] for name in expected} == pytest.approx(expected)


def test_d16_tpot_is_not_one_over_the_throughput(tmp_path: Path) -> None:
    """Four identical streams at once, 11 tokens 20 ms apart, the first after 100 ms: tpot 20 ms, throughput 44 tokens / 0.3 s."""
    found = summary(tmp_path, [record(k, 0.0) for k in range(4)], steady=(0.0, 0.301))
    assert found["latency"]["tpot"]["mean"] == pytest.approx(0.02)
    assert found["latency"]["tpot"]["p50"] == pytest.approx(0.02)
    assert found["classes"]["default"]["latency"]["tpot"]["p50"] == pytest.approx(0.02)
    assert found["tokens"]["output_rate"]["value"] == pytest.approx(44 / 0.301)


def test_f02_tokens_of_cut_off_requests_count_in_the_throughput(tmp_path: Path) -> None:
    """Four at a time, 100 tokens evenly over 8 s each; stopped at 10 s: 500 tokens came, 400 of them in answers that ended."""
    whole = [record(k, 0.0, ttft=0.08, tokens=100, gap=0.08) for k in range(4)]
    part = [
        record(4 + k, 8.0, ttft=0.08, tokens=25, gap=0.08, outcome="cancelled", n_out=None, n_in=None, source="", end_ns=ns(10.0))
        for k in range(4)
    ]
    found = summary(tmp_path, whole + part, steady=(0.0, 10.0 + 1e-6))
    rate = found["tokens"]["output_rate"]
    assert rate["value"] == pytest.approx(50, rel=1e-4)
    assert rate["succeeded_only"] == pytest.approx(40, rel=1e-4)
    assert rate["mixed_sources"]
    assert found["outcomes"]["cancelled"] == 4
    assert found["latency"]["e2e"]["n"] == 4


def test_f01_a_token_belongs_to_the_interval_in_which_it_came(tmp_path: Path) -> None:
    """Warm-up ends at 10 s. A brings ten tokens from 9.5 s on, every 0.5 s: nine at 10.0 s or later. B: ten, all later."""
    a = record(0, 8.0, ttft=1.5, tokens=10, gap=0.5)
    b = record(1, 9.0, ttft=1.5, tokens=10, gap=0.5)
    found = summary(tmp_path, [a, b], steady=(10.0, 20.0))
    assert found["tokens"]["output_rate"]["n"] == 19


def test_f05_failed_requests_stay_out_of_the_latencies(tmp_path: Path) -> None:
    """100 requests, 10 of which time out at 30 s after one token."""
    ok = [record(k, k * 0.1, ttft=1.0, tokens=1) for k in range(90)]
    bad = [lost(90 + k, 9.0, "timeout", "idle", after=30.0, first_ns=ns(9.5), token_ns=[ns(9.5)]) for k in range(10)]
    found = summary(tmp_path, ok + bad)
    e2e = found["latency"]["e2e"]
    assert (e2e["n"], e2e["max"]) == (90, pytest.approx(1.0))
    assert e2e["with_timeouts"] == {
        "n": 100, "timeouts": 10, "cancelled": 0, "p50": 1.0, "p90": 1.0, "p95": 30.0, "p99": 30.0, "p999": 30.0,
        "at_least": ["p95", "p99", "p999"],
    }  # fmt: skip
    assert found["latency"]["ttft"]["with_timeouts"]["at_least"] == []  # their first tokens did come
    assert found["failures"][0]["class"] == "idle"


def test_a_crowd_that_the_end_of_the_run_cut_off_sorts_last(tmp_path: Path) -> None:
    """90 answers of 1 s, ten requests that were in flight for 30 s when the run ended. Two that were never sent count nowhere."""
    ok = [record(k, k * 0.1, ttft=1.0, tokens=1) for k in range(90)]
    hung = [lost(90 + k, 9.0, "cancelled", after=30.0) for k in range(10)]
    unsent = [lost(100 + k, 9.0, "cancelled", after=30.0, sent_ns=None) for k in range(2)]
    found = summary(tmp_path, ok + hung + unsent, scenario={"budget": {"response_ttft_p99": "40s", "response_ttft_p50": "40s"}})
    assert found["latency"]["response_ttft"]["with_timeouts"] == {
        "n": 100, "timeouts": 0, "cancelled": 10, "p50": 1.0, "p90": 1.0, "p95": 30.0, "p99": 30.0, "p999": 30.0,
        "at_least": ["p95", "p99", "p999"],
    }  # fmt: skip
    assert [row["status"] for row in found["budgets"]] == ["fail", "pass"]
    assert found["outcomes"]["error_rate"] == 0.0


def test_the_last_young_requests_of_a_run_without_drain_are_censored_at_their_age(tmp_path: Path) -> None:
    """Answers of 1, 2, 3 and 4 s, and two requests cut off at 2.5 s. Kaplan-Meier by hand: 1/6 and 2/6 are below; the other 4/6
    fall to the two that were at risk at 3 and 4 s: 4/6 at 3 s, all at 4 s. One that timed out at 0.5 s lies above all of it."""
    ok = [record(k, 0.0, ttft=k + 1.0, tokens=1) for k in range(4)]
    young = [lost(4 + k, 7.5, "cancelled", after=2.5) for k in range(2)]
    counted = summary(tmp_path / "a", ok + young)["latency"]["e2e"]["with_timeouts"]
    assert [counted[name] for name in ("n", "p50", "p90", "p999")] == [6, 3.0, 4.0, 4.0]
    assert counted["at_least"] == []
    late = lost(9, 1.0, "timeout", "first", after=0.5)
    counted = summary(tmp_path / "b", [*ok, *young, late])["latency"]["e2e"]["with_timeouts"]
    assert [counted[name] for name in ("n", "p50", "p90")] == [7, 3.0, 4.0]  # 1/7, 2/7, 2/7 + 5/7 / 3 = 0.52, 0.76
    assert counted["at_least"] == ["p90", "p95", "p99", "p999"]


def test_g04_asked_and_counted_prompt_lengths_stand_side_by_side(tmp_path: Path) -> None:
    found = summary(tmp_path, [record(k, k * 0.1, n_in=277) for k in range(5)])
    prompt = found["tokens"]["prompt"]
    assert (prompt["asked"], prompt["got"], prompt["difference"], prompt["sources"]) == (256, 277, 21, {"usage": 5})
    assert any("256 asked, 277 counted on average (by usage)" in line for line in found["warnings"])
    assert found["tokens"]["input_rate"]["n"] == 5 * 277  # the server's, not ours


def test_every_choice_was_asked_for_its_tokens(tmp_path: Path) -> None:
    """n = 2 answers (or beams) of 11 tokens are 22 asked for, and 22 come: no warning."""
    found = summary(tmp_path, [record(k, k * 0.1, n_out=22, sampling={"n": 2}) for k in range(5)])
    output = found["tokens"]["output"]
    assert (output["asked"], output["got"], output["exact"]) == (22, 22, 5)
    assert not any(line.startswith("output tokens") for line in found["warnings"])


def test_what_looked_wrong_before_the_run_stands_in_the_report(tmp_path: Path) -> None:
    target = {"kind": "http", "model": "stub", "warnings": ["http://x does not list model 'stub': it has other"]}
    found = summary(tmp_path, [record(0, 0.0)], manifest={**MANIFEST, "target": target})
    assert "before the run: http://x does not list model 'stub': it has other" in found["warnings"]


def test_sources_of_counts_are_never_added(tmp_path: Path) -> None:
    records = [record(0, 0.0), record(1, 0.1, source="events", n_in=None), record(2, 0.2, source="tokenizer")]
    found = summary(tmp_path, records)
    assert {name: row["n_out"] for name, row in found["tokens"]["by_source"].items()} == {
        "usage": 11,
        "events": 11,
        "tokenizer": 11,
    }
    assert any("several sources (usage, events, tokenizer)" in line for line in found["warnings"])


def test_d18_not_streaming_leaves_first_token_times_null(tmp_path: Path) -> None:
    whole = record(0, 0.0, tokens=0, streamed=False, done_ns=ns(2.0), end_ns=ns(2.0), n_out=50, reads=0)
    found = summary(tmp_path, [whole])
    for name in ("ttft", "itl", "icl", "tpot"):
        assert found["latency"][name]["p50"] is None
    assert found["latency"]["ttft"]["reason"] == "not streaming"
    assert found["latency"]["e2e"]["p50"] == pytest.approx(2.0)
    assert sum("not streaming" in line for line in found["warnings"]) == 1


def test_d04_no_visible_output_is_flagged_and_not_averaged_in(tmp_path: Path) -> None:
    silent = record(0, 0.0, tokens=0, done_ns=ns(4.7), end_ns=ns(4.7), n_out=1000, reads=0)
    found = summary(tmp_path, [silent, record(1, 1.0)])
    assert found["streaming"]["no_visible_output"] == 1
    assert found["latency"]["ttft"]["n"] == 1
    assert found["latency"]["ttft"]["min"] == pytest.approx(0.1)
    assert found["latency"]["e2e"]["max"] == pytest.approx(4.7)


def test_c10_coalesced_reads_are_flagged_and_tpot_stays_right(tmp_path: Path) -> None:
    """A token every 6 ms, ten to a write: within a lump all have one stamp."""
    times = [ns(0.1 + 0.06 * (k // 10)) for k in range(100)]
    lumped = record(0, 0.0, tokens=100, token_ns=times, done_ns=times[-1], end_ns=times[-1], reads=10)
    found = summary(tmp_path, [lumped])
    assert found["streaming"]["events_per_read"] == 10
    assert found["streaming"]["coalesced"]
    assert found["latency"]["tpot"]["p50"] == pytest.approx(0.54 / 90)  # 6 ms: from the first lump to the last
    assert found["latency"]["icl"]["p50"] == 0  # which is why the warning says to read tpot
    assert any("coalesced: 10 events per read" in line for line in found["warnings"])


def test_b17_rates_use_the_true_length(tmp_path: Path) -> None:
    """100 of 5/s were asked for; the count was reached after 16 s of at most 20."""
    found = summary(tmp_path, [record(k, k * 0.16) for k in range(100)], steady=(0.0, 16.0), reason="count")
    assert found["stop"]["reason"] == "count"
    assert found["stop"]["steady_seconds"] == 16.0
    assert found["rates"]["offered"]["value"] == pytest.approx(100 / 16)


def test_b08_burst_and_gate_are_told(tmp_path: Path) -> None:
    """16 freed at once, once a second, after waiting at the gate."""
    records = [
        record(16 * lump + k, lump + k * 0.02, release_ns=ns(lump + 1), sent_ns=ns(lump + 1))
        for lump in range(4)
        for k in range(16)
    ]
    for r in records:
        shift = (r.sent_ns or 0) - r.due_ns
        r.written_ns, r.first_ns = r.sent_ns, (r.first_ns or 0) + shift
        r.token_ns = [t + shift for t in r.token_ns]
        r.done_ns = r.end_ns = r.token_ns[-1]
    pacing = summary(tmp_path, records)["pacing"]
    assert (pacing["max_sends_per_100ms"], pacing["blocked_at_gate"]) == (16, 64)


def test_sends_within_a_hundred_milliseconds_are_counted_wherever_they_fall(tmp_path: Path) -> None:
    """Every 30 ms: four begin within any 100 ms (0, 30, 60, 90), never five."""
    assert summary(tmp_path, [record(k, k * 0.03) for k in range(50)])["pacing"]["max_sends_per_100ms"] == 4


def test_what_arrives_after_steady_is_not_its_throughput(tmp_path: Path) -> None:
    """Due at 9.0 s, a token every 0.5 s from 9.5 s on: one of ten before 10 s, and the one at 10.0 s is the next interval's."""
    found = summary(tmp_path, [record(0, 9.0, ttft=0.5, tokens=10, gap=0.5)])
    assert found["tokens"]["output_rate"]["n"] == 1


def test_no_number_that_is_not_finite_leaves() -> None:
    odd = {"a": float("inf"), "b": [float("nan"), np.float64(2.5), np.int64(3)], 4: (1.0, -float("inf"))}
    assert strict(odd) == {"a": None, "b": [None, 2.5, 3], "4": [1.0, None]}


def test_goodput_counts_each_class_by_its_own_limits_and_all_that_was_offered(tmp_path: Path) -> None:
    classes = {"classes": {"chat": {"slo": {"response_ttft": 0.3}}, "bulk": {"slo": {}}}}
    records = [
        record(0, 0.0, cls="chat"), record(1, 1.0, cls="chat", ttft=0.4),  # met, missed
        record(2, 2.0, cls="bulk", ttft=5.0), lost(3, 3.0, "failed", "http_500", cls="bulk"),  # no limits: ok is enough
        lost(4, 4.0, "shed", cls="chat"),
    ]  # fmt: skip
    found = summary(tmp_path, records, scenario={"workload": classes})
    assert (found["goodput"]["good"], found["goodput"]["n"], found["goodput"]["value"]) == (2, 5, 0.4)
    assert found["goodput"]["rate"] == pytest.approx(0.2)
    assert found["classes"]["chat"]["goodput"]["value"] == pytest.approx(1 / 3)


def test_a_limit_without_its_value_is_not_met(tmp_path: Path) -> None:
    classes = {"classes": {"default": {"slo": {"tpot": 0.05}}}}
    assert summary(tmp_path, [record(0, 0.0, tokens=1)], scenario={"workload": classes})["goodput"]["value"] == 0


def test_kv_block_from_the_targets_own_readings(tmp_path: Path) -> None:
    samples = gauges({
        "kv_usage": [0.5] * 5 + [0.92] * 3 + [0.96] * 2, "running": [4.0] * 10, "waiting": [0.0] * 9 + [3.0],
        "hit_tokens_total": [0, 0, 10, 20, 30, 40, 50, 60, 70, 80],
        "query_tokens_total": [0, 40, 80, 120, 160, 200, 240, 280, 320, 400],
        "preemptions_total": [5, 6, 7, 2, 2, 2, 2, 2, 2, 3],
    })  # fmt: skip
    engine = summary(tmp_path, [record(0, 0.0)], samples=samples, steady=(0.0, 11.0))["engine"]
    assert engine["kv_usage"]["mean"] == pytest.approx((5 * 0.5 + 3 * 0.92 + 2 * 0.96) / 10)  # each reading holds until the next
    assert engine["kv_usage"]["time_above"] == {"90%": pytest.approx(0.5), "95%": pytest.approx(0.2)}
    assert engine["hit_rate"]["value"] == pytest.approx(0.2)
    assert (engine["preemptions_total"]["value"], engine["preemptions_total"]["resets"]) == (
        2 + 2 + 1,
        1,
    )  # after the reset: from 0
    assert engine["cached_share"]["reason"] == "not exposed by the target"


def test_several_engines_are_never_mixed(tmp_path: Path) -> None:
    samples = [
        Sample(t=1.0, name="kv_usage", value=v, source="prometheus", labels={"engine": e}) for e, v in (("0", 0.9), ("1", 0.1))
    ]
    usage = summary(tmp_path, [record(0, 0.0)], samples=samples)["engine"]["kv_usage"]
    assert usage["mean"] is None
    assert {label: row["max"] for label, row in usage["series"].items()} == {
        "prometheus,engine=0": 0.9,
        "prometheus,engine=1": 0.1,
    }


def test_cached_tokens_as_the_answers_told_them(tmp_path: Path) -> None:
    records = [record(0, 0.0, cached=128), record(1, 1.0, cached=0), record(2, 2.0)]
    told = summary(tmp_path, records)["told"]
    assert (told["hit_rate"], told["prompt_tokens"], told["untold"]) == (0.25, 512, 1)


def test_the_seven_features_stand_in_one_table(tmp_path: Path) -> None:
    records = [
        record(0, 0.0, n_in=1, tokens=5, sampling={"temperature": 0.7, "frequency_penalty": 0.2}),
        record(1, 1.0, n_in=2, tokens=6, sampling={"temperature": 0}),
        record(2, 2.0, n_in=3, tokens=7, sampling={"use_beam_search": True, "n": 4}),
        record(3, 3.0, n_in=1024, tokens=8),
    ]
    found = summary(tmp_path, records)["features"]
    filled = [row for row in found["input_length"]["bins"] if row["n"]]
    assert filled == [{"from": 1, "below": 2, "n": 1}, {"from": 2, "below": 4, "n": 2}, {"from": 1024, "below": 2048, "n": 1}]
    assert found["output_length_p99"]["value"] == 8
    assert found["beam_width"]["shares"] == {"1": 0.75, "4": 0.25}
    assert found["temperature"]["shares"] == {"default": 0.5, "0.7": 0.25, "0": 0.25}
    assert found["penalties"]["shares"] == {"none": 0.75, "frequency 0.2": 0.25}
    assert found["head_activity_variance"]["value"] is None
    assert "probe" in found["head_activity_variance"]["reason"]
    assert found["reuse_distance"]["value"] is None


def test_no_steady_phase_is_said_not_hidden(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [record(0, 0.0)])
    (run / "events.jsonl").write_text("")
    (run / "requests.jsonl").write_text((run / "requests.jsonl").read_text().replace('"phase":"steady"', '"phase":"baseline"'))
    found = summarise(load(run))
    assert found["headline"]["cohort"] == "all measured requests (steady did not run)"
    assert any("no steady phase" in line for line in found["warnings"])


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(("requests", "tokens", "most"), [(30_000, 32, 5.0), (12_000, 340, 10.0)])
def test_a_large_run_is_summarised_in_seconds(tmp_path: Path, requests: int, tokens: int, most: float) -> None:
    import time

    run = write(tmp_path / "run", [record(k, k * 0.005, tokens=tokens) for k in range(requests)], steady=(0.0, requests * 0.005))
    start = time.perf_counter()
    found = summarise(load(run))
    assert time.perf_counter() - start <= most
    assert found["latency"]["itl"]["n"] == requests * (tokens - 1)
