"""offered = admitted + shed + dropped + withdrawn, and admitted = ok + failed + rejected + timeout + cancelled: or no report."""

from pathlib import Path

import pytest

from kvbench.core import Event
from kvbench.report.accounting import AccountingError, check, tally
from kvbench.report.files import load
from kvbench.report.summary import summarise
from kvbench.report.write import finish
from tests.report.build import lost, record, write

EVERY = [
    record(0, 0.0), record(1, 0.1), lost(2, 0.2, "failed", "http_500", error="boom", status=500),
    lost(3, 0.3, "failed", "stream_error", error="engine died", n_out=2), lost(4, 0.4, "rejected", "http_503", status=503),
    lost(5, 0.5, "timeout", "first"), lost(6, 0.6, "cancelled"), lost(7, 0.7, "shed"),
    lost(8, 0.8, "dropped"), lost(9, 0.9, "withdrawn"),
]  # fmt: skip


def test_every_outcome_is_counted_once(tmp_path: Path) -> None:
    total = summarise(load(write(tmp_path / "run", EVERY)))["accounting"]["total"]
    assert total == {
        "offered": 10, "admitted": 7, "shed": 1, "dropped": 1, "withdrawn": 1, "ok": 2, "failed": 2, "rejected": 1, "timeout": 1,
        "cancelled": 1, "in_flight": 0, "unrecorded": 0, "failed_by_class": {"http_500": 1, "stream_error": 1},
        "timeout_by_class": {"first": 1},
    }  # fmt: skip


def test_failures_keep_what_was_said_and_their_tokens(tmp_path: Path) -> None:
    rows = {row["class"]: row for row in summarise(load(write(tmp_path / "run", EVERY)))["failures"]}
    assert rows["http_500"]["examples"] == ["boom"]
    assert rows["http_500"]["statuses"] == {"500": 1}
    assert rows["stream_error"]["tokens"] == 2
    assert set(rows) == {"http_500", "stream_error", "http_503", "first"}


def test_a_request_that_left_no_record_stops_the_report(tmp_path: Path) -> None:
    run = write(tmp_path / "run", EVERY, offered=11)
    with pytest.raises(AccountingError, match="1 of 11 offered requests have no record"):
        finish(run)
    assert not (run / "summary.json").exists()
    assert summarise(load(run))["exit"]["code"] == 1  # read later, it is still shown, and says so


def test_more_records_than_requests_is_a_contradiction(tmp_path: Path) -> None:
    with pytest.raises(AccountingError, match="10 requests on record, only 9 offered"):
        summarise(load(write(tmp_path / "run", EVERY, offered=9)))


def test_the_same_request_twice_is_a_contradiction(tmp_path: Path) -> None:
    with pytest.raises(AccountingError, match="request 1 is on record 2 times"):
        summarise(load(write(tmp_path / "run", [*EVERY, record(1, 5.0)])))


def test_the_identity_itself_is_checked() -> None:
    row = tally([]) | {"offered": 5, "admitted": 4, "ok": 4}
    with pytest.raises(AccountingError, match="steady: offered 5 != admitted 4"):
        check({"phases": {"steady": row}, "total": row})
    with pytest.raises(AccountingError, match="total: admitted 4 != ended and in flight 3"):
        check({"phases": {}, "total": row | {"offered": 4, "ok": 3}})


def test_requests_in_flight_at_a_kill_are_offered_and_admitted(tmp_path: Path) -> None:
    """The driver offered 12 in steady, 10 ended, then the power went."""
    run = write(tmp_path / "run", EVERY, offered=12)
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    (run / "events.jsonl").write_bytes(b"".join(lines[:-1]))
    total = summarise(load(run))["accounting"]["total"]
    assert (total["offered"], total["in_flight"], total["admitted"]) == (12, 2, 9)
    check(summarise(load(run))["accounting"])


def test_a_negative_duration_is_an_internal_error(tmp_path: Path) -> None:
    """C06: never a negative latency in a report that says all is well."""
    wrong = record(0, 1.0, sent_ns=1_500_000_000)  # its first token came at 1.1 s
    summary = summarise(load(write(tmp_path / "run", [wrong, record(1, 2.0)])))
    assert not summary["self_check"]["ok"]
    assert summary["self_check"]["negative_durations"]["ttft"] == 1
    assert summary["exit"]["code"] == 1


def test_phases_keep_their_own(tmp_path: Path) -> None:
    """B10: what was due in one phase is never counted in another, whenever it ended."""
    events = [
        Event(t=0.0, kind="phase_start", data={"phase": "warmup", "phase_kind": "warmup", "bounds": {}}),
        Event(t=5.0, kind="phase_end", data={"phase": "warmup", "phase_kind": "warmup", "reason": "count", "offered": 1}),
    ]
    late = record(0, 4.9, ttft=3.0, phase="warmup", measured=False)
    summary = summarise(load(write(tmp_path / "run", [late, record(1, 6.0)], steady=(5.0, 10.0), offered=1, events=events)))
    phases = summary["accounting"]["phases"]
    assert (phases["warmup"]["offered"], phases["steady"]["offered"]) == (1, 1)
    assert summary["headline"]["n"] == 1
    assert summary["latency"]["ttft"]["max"] == 0.1  # not 3.0
