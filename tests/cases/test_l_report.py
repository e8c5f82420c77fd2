"""Group L of the public bug reports: what a report and its gate must not do."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvbench.report.files import load
from kvbench.report.summary import summarise
from kvbench.report.write import finish
from kvbench.stop import Budget
from tests.report.build import lost, record, write

ORDER = ("min", "p50", "p90", "p95", "p99", "p999", "max")


def run(path: Path, records: list[Any], **scenario: Any) -> dict[str, Any]:
    return summarise(load(write(path / "run", records, scenario=scenario)))


def test_l01_a_gate_without_data_does_not_pass(tmp_path: Path) -> None:
    """Every request failed: no latency to hold against its limit, no cache counters at all."""
    failed = [lost(k, k * 0.1, "failed", "http_500") for k in range(50)]
    found = run(tmp_path, failed, budget={"ttft_p99": "200ms", "error_rate": "1%", "hit_rate": ">= 50%"})
    rows = {row["name"]: (row["status"], row["value"], row["n"]) for row in found["budgets"]}
    assert rows == {
        "ttft_p99": ("not evaluated", None, 0),
        "error_rate": ("fail", 1.0, 50),
        "hit_rate": ("not evaluated", None, 0),
    }
    assert found["exit"]["code"] == 6  # nothing succeeded, which comes before the budgets


def test_l01_a_budget_that_is_not_evaluated_fails_an_otherwise_good_run(tmp_path: Path) -> None:
    good = [record(k, k * 0.005, tokens=2) for k in range(2000)]
    found = run(tmp_path, good, budget={"ttft_p99": "200ms", "kv_usage_max": "90%"})
    assert [row["status"] for row in found["budgets"]] == ["pass", "not evaluated"]
    assert found["exit"]["code"] == 3
    assert "kv_usage_max not evaluated: not exposed by the target" in found["exit"]["reason"]


def test_l01_a_misspelt_name_is_an_error_of_the_scenario() -> None:
    with pytest.raises(ValueError, match="did you mean 'ttft_p99'"):
        Budget.model_validate({"tfft_p99": "200ms"})


@pytest.mark.parametrize("limit", ["250ms", "0.25s"])
def test_l02_seconds_and_milliseconds_fail_alike(tmp_path: Path, limit: str) -> None:
    slow = [record(k, k * 0.1, ttft=0.3) for k in range(50)]
    (row,) = run(tmp_path, slow, budget={"ttft_p99": limit})["budgets"]
    assert (row["status"], row["value"], row["limit"]) == ("fail", pytest.approx(0.3), 0.25)
    assert "300 ms, limit <= 250 ms" in row["text"]


def test_l02_a_bare_number_is_refused() -> None:
    with pytest.raises(ValueError, match="has no unit"):
        Budget.model_validate({"ttft_p99": 250})


@pytest.mark.parametrize(
    "records",
    [[], [lost(k, k * 0.1, "failed", "http_500") for k in range(5)], [record(0, 0.0, tokens=0, done_ns=None, n_out=0)],
     [lost(0, 0.0, "shed")], [record(0, 0.0, tokens=1)]],
    ids=["nothing", "no success", "no token", "all shed", "one token"],
)  # fmt: skip
def test_l03_strict_json_whatever_is_missing(tmp_path: Path, records: list[Any]) -> None:
    """No NaN, no Infinity, no sentinel: null, and a reason beside it."""
    path = write(tmp_path / "run", records, windows=[], scenario={"budget": {"ttft_p99": "200ms", "ok_rate": ">= 1/s"}})
    finish(path)

    def refuse(word: str) -> None:
        raise AssertionError(f"summary.json holds {word}")

    told = json.loads((path / "summary.json").read_text(), parse_constant=refuse)
    for name, row in told["latency"].items():
        assert row["n"] > 0 or (row["p50"] is None and row["reason"]), name
    numbers = [float(word) for word in re.findall(r"-?\d+\.?\d*(?:e[+-]?\d+)?", json.dumps(told["latency"]))]
    assert all(abs(number) < 1e9 for number in numbers)
    page = (path / "report.html").read_text()
    assert "NaN" not in page
    assert ">None<" not in page


def test_l05_quantiles_stay_within_the_extremes(tmp_path: Path) -> None:
    """50 latencies up to 596 ms: p99 is one of them."""
    found = run(tmp_path, [record(k, k * 0.1, ttft=(106 + 10 * k) / 1e3) for k in range(50)])
    assert found["latency"]["ttft"]["max"] == pytest.approx(0.596)
    assert found["latency"]["ttft"]["p99"] == found["latency"]["ttft"]["max"]
    for row in found["latency"].values():
        if row["n"]:
            values = [row[name] for name in ORDER]
            assert values == sorted(values)
            assert row["min"] <= row["mean"] <= row["max"]


def test_l07_scheduled_sent_and_completed_rates_are_named_apart(tmp_path: Path) -> None:
    """Overloaded: 100 due in 10 s, half of them sent only after it, a fifth ended in time."""
    records = [record(k, k * 0.1, ttft=12.0 if k >= 20 else 0.1, tokens=2) for k in range(50)]
    records += [record(50 + k, k * 0.1 + 0.05, sent_ns=round((10.5 + k) * 1e9), ttft=70.0) for k in range(50)]
    path = write(
        tmp_path / "run", records, manifest={"phases": [{"name": "steady", "kind": "steady", "expected": 110, "seconds": 10}]}
    )
    rates = summarise(load(path))["rates"]
    assert {name: rates[name]["value"] for name in ("requested", "offered", "sent", "ok")} == pytest.approx(
        {"requested": 11.0, "offered": 10.0, "sent": 5.0, "ok": 2.0}
    )


def test_a04_and_a_server_that_refuses_is_not_faster(tmp_path: Path) -> None:
    """A04: 70 of 100 answered 503. The result says so in numbers, and goodput has the offered ones below the line."""
    records = [lost(k, k * 0.05, "rejected", status=503) for k in range(70)] + [record(70 + k, 4 + k * 0.1) for k in range(30)]
    classes = {"classes": {"default": {"slo": {"response": 5.0}}}}
    found = run(tmp_path, records, workload=classes)
    outcomes = found["outcomes"]
    assert (outcomes["offered"], outcomes["ok"], outcomes["rejected"]) == (100, 30, 70)
    assert (outcomes["error_rate"], outcomes["rejection_rate"]) == (0.7, 0.7)
    assert found["goodput"]["value"] == pytest.approx(0.3)
    assert found["rates"]["ok"]["value"] == pytest.approx(3.0)


def test_c09_timeouts_cannot_meet_a_latency_limit(tmp_path: Path) -> None:
    """C09: 5 of 100 gave up after 0.5 s. The p99 is among them: at least 0.5 s, so no pass against 0.8 s."""
    records = [record(k, k * 0.05, ttft=0.1) for k in range(95)] + [
        lost(95 + k, 5 + k * 0.1, "timeout", "first", after=0.5) for k in range(5)
    ]
    found = run(tmp_path, records, budget={"response_ttft_p99": "800ms", "response_ttft_p90": "800ms"})
    p99, p90 = found["budgets"]
    assert (p99["status"], p99["value"]) == ("fail", pytest.approx(0.5))
    assert "got no answer" in p99["text"]
    assert p90["status"] == "pass"
