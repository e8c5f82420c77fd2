"""Exit codes in their order of precedence (DESIGN.md section 6)."""

from pathlib import Path
from typing import Any

import pytest

from kvbench.core import Event
from kvbench.report import junit
from kvbench.report.files import load
from kvbench.report.outcome import ended, exit_code
from kvbench.report.summary import summarise
from tests.report.build import lost, own, record, write

FINE: dict[str, Any] = {
    "stop": {
        "kind": "bound",
        "reason": "duration",
        "signal": None,
        "by": None,
        "phase": None,
        "phase_kind": None,
        "purpose": None,
    },
    "accounting": {"total": {"ok": 5, "offered": 6, "admitted": 6, "unrecorded": 0}},
    "self_check": {"ok": True, "negative_durations": {}},
    "verdict": {"verdict": "VALID", "reasons": []},
    "budgets": [],
}
BROKEN = [  # each with what makes it so, in order: a later one never hides an earlier one
    (130, {"stop": FINE["stop"] | {"kind": "signal", "signal": "SIGINT", "reason": "interrupted by SIGINT"}}),
    (1, {"self_check": {"ok": False, "negative_durations": {"ttft": 1}}}),
    (6, {"accounting": {"total": FINE["accounting"]["total"] | {"ok": 0}}}),
    (
        5,
        {
            "stop": FINE["stop"]
            | {"kind": "rule", "by": "rule", "phase": "steady", "phase_kind": "steady", "reason": "kv_usage 95 %"}
        },
    ),
    (4, {"verdict": {"verdict": "INVALID", "reasons": [{"level": "INVALID", "text": "lag"}]}}),
    (3, {"budgets": [{"status": "not evaluated", "text": "ttft_p99 not evaluated: no sample"}]}),
]


@pytest.mark.parametrize(("first", "code"), [(k, code) for k, (code, _) in enumerate(BROKEN)])
def test_the_first_that_applies_wins(first: int, code: int) -> None:
    summary = dict(FINE)
    for _, change in reversed(BROKEN[first:]):
        summary |= change
    assert exit_code(summary)[0] == code


def test_all_well_is_zero_and_a_rule_that_ends_stress_is_no_failure() -> None:
    assert exit_code(FINE) == (0, "the run is whole")
    stress = FINE["stop"] | {"kind": "rule", "by": "rule", "phase": "stress", "phase_kind": "stress", "reason": "kv_usage 95 %"}
    stress["purpose"] = "stress ended at level 2.2 by kv_usage 95 %"
    told = "stress ended at level 2.2 by kv_usage 95 %, which is its purpose; the run is whole"
    assert exit_code(FINE | {"stop": stress}) == (0, told)
    assert exit_code(FINE | {"stop": FINE["stop"] | {"kind": "signal", "signal": "SIGTERM"}})[0] == 143
    assert exit_code(FINE | {"stop": FINE["stop"] | {"kind": "error"}})[0] == 1


FIRED = {"rule": "kv_usage >= 90 %", "reason": "kv_usage is 95 %", "phase": "steady", "phase_kind": "steady"}


@pytest.mark.parametrize(
    ("event", "kind", "code"),
    [
        (Event(t=5.0, kind="signal", data={"signal": "SIGINT"}), "signal", 130),
        (Event(t=5.0, kind="signal", data={"signal": "SIGTERM"}), "signal", 143),
        (Event(t=5.0, kind="stop", data=FIRED), "rule", 5),
    ],
)
def test_what_ended_a_run_is_read_from_its_events(tmp_path: Path, event: Event, kind: str, code: int) -> None:
    summary = summarise(load(write(tmp_path / "run", [record(k, k * 0.1) for k in range(50)], events=[event])))
    assert summary["stop"]["kind"] == kind
    assert summary["exit"]["code"] == code
    assert summary["run"]["partial"] == (kind == "signal")


def test_l09_an_interrupted_run_counts_what_was_in_flight_as_cancelled(tmp_path: Path) -> None:
    records = [record(k, k * 0.1) for k in range(50)] + [lost(50 + k, 4.9, "cancelled") for k in range(3)]
    event = Event(t=5.0, kind="signal", data={"signal": "SIGINT"})
    summary = summarise(load(write(tmp_path / "run", records, events=[event])))
    assert summary["accounting"]["total"]["cancelled"] == 3
    assert summary["outcomes"]["error_rate"] == 0  # cancelled by us: not the server's failure
    assert any("partial" in line for line in summary["warnings"])


def test_a_whole_run_is_zero(tmp_path: Path) -> None:
    records = [record(k, k * 0.005, tokens=2) for k in range(2000)]
    summary = summarise(load(write(tmp_path / "run", records, samples=own(10, cpu=0.2, loop_lag_p99=0.001))))
    assert summary["verdict"]["verdict"] == "VALID"
    assert summary["exit"] == {"code": 0, "reason": "the run is whole"}


@pytest.mark.parametrize(
    ("by", "told"),
    [({}, "a stop rule ended steady"), ({"by": "rule"}, "a stop rule ended steady"), ({"by": "watch"}, "the watch ended steady")],
)
def test_who_ended_a_run_is_named(tmp_path: Path, by: dict[str, str], told: str) -> None:
    """Events of older runs do not say who spoke: it was a rule."""
    files = load(
        write(tmp_path / "run", [record(k, k * 0.1) for k in range(50)], events=[Event(t=5.0, kind="stop", data=FIRED | by)])
    )
    summary = summarise(files)
    assert summary["exit"] == {"code": 5, "reason": f"{told}: kv_usage is 95 %"}
    assert ended(summary["stop"]) == f"{told}: kv_usage is 95 %"
    failed = [(group, name) for group, name, failure in junit.cases(summary) if failure]
    assert failed == ([("run", "requests succeeded and the run ended in order")] if told.startswith("the watch") else [])


@pytest.mark.parametrize(
    ("reason", "told"),
    [("duration", "steady ran its 10 s"), ("count", "steady offered all its requests"), ("trace.csv ended", "trace.csv ended")],
)
def test_the_bound_of_a_run_is_a_sentence(tmp_path: Path, reason: str, told: str) -> None:
    summary = summarise(load(write(tmp_path / "run", [record(k, k * 0.1) for k in range(50)], reason=reason)))
    assert ended(summary["stop"]) == told
