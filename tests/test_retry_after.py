"""Retry-After of a 429 or 503: heeded by the whole run where control.retry_after grants it, by a request that is tried again."""

import email.utils
from pathlib import Path

import pytest

from kvbench.clock import wall_time
from tests.stub.stub import DONE, FIN, C, Reply, Seen, Stub, U, answer_json, stream
from tests.whole import Whole, against, served

pytestmark = pytest.mark.alone
GOOD = stream(C("a"), FIN, U(8, 1), DONE)
STEADY = "{steady: {for: 1s}, drain: {for: 1s}}"


def refusing(number: int, header: str, status: int = 429) -> Stub:
    """Refuses the number-th request, answers the others at once."""
    refusal = answer_json({"error": "slow down"}, status, (("Retry-After", header), ("Content-Type", "application/json")))
    return Stub(lambda seen: refusal if seen.number == number else GOOD)


def run(stub: Stub, folder: Path, also: str, target: str = "") -> Whole:
    return against(stub, served("{shape: constant, rate: 50/s}", STEADY, also=also, target=target), folder)


def pause(whole: Whole) -> list[float]:
    """When the requests after the refused one were sent, in seconds from its end."""
    refused = next(record for record in whole.records if record.outcome == "rejected")
    return sorted(((r.sent_ns or 0) - refused.end_ns) / 1e9 for r in whole.records if (r.sent_ns or 0) > refused.end_ns)


@pytest.mark.parametrize(
    ("header", "granted", "seconds"), [("1", "300ms", 0.3), ("0.4", "10s", 0.4)], ids=["as granted", "as asked"]
)
def test_the_gate_stays_closed_for_as_long_as_the_server_asks(header: str, granted: str, seconds: float, tmp_path: Path) -> None:
    """50/s; the 11th is refused at 0.2 s. What falls due in the pause waits at the gate, and leaves together at its end."""
    whole = run(refusing(10, header), tmp_path, f"control: {{law: none, retry_after: {granted}}}")
    refused = whole.records[10]
    assert (refused.outcome, refused.retry_after) == ("rejected", float(header))
    sent = pause(whole)
    assert sent[0] == pytest.approx(seconds, abs=0.05)
    assert sent[0] >= seconds
    held = [r for r in whole.records if r.release_ns > r.due_ns]
    assert len(held) == pytest.approx(50 * seconds, abs=2)
    assert len({r.release_ns for r in held}) == 1, "released at one instant, by arithmetic"
    assert whole.summary["pacing"]["blocked_at_gate"] == len(held)
    assert whole.summary["pacing"]["holds"] == 1
    assert whole.summary["pacing"]["closed"] == pytest.approx(seconds)
    (event,) = [each["data"] for each in whole.lines("events.jsonl") if each["kind"] == "gate_hold"]
    assert event["until"] == pytest.approx(refused.end_ns / 1e9 + seconds, abs=0.02)
    assert whole.summary["outcomes"]["ok"] == 49


def test_a_date_is_as_good_as_a_number(tmp_path: Path) -> None:
    """An HTTP date has whole seconds: one written for 3 s from now is 2 to 3 s away, less what the start took."""
    date = email.utils.formatdate(wall_time() + 3, usegmt=True)
    whole = run(refusing(5, date, 503), tmp_path, "control: {law: none, retry_after: 200ms}")
    assert 0.5 < whole.records[5].retry_after <= 3
    assert pause(whole)[0] >= 0.2


def test_by_default_the_load_goes_on_and_the_report_says_what_was_asked(tmp_path: Path) -> None:
    whole = run(refusing(10, "30"), tmp_path, "control: {law: none}")
    assert pause(whole)[0] < 0.1
    pacing = whole.summary["pacing"]
    assert (pacing["holds"], pacing["asked_to_wait"], pacing["longest_wait_asked"]) == (0, 1, 30)


def test_patience_goes_on_while_the_gate_is_closed(tmp_path: Path) -> None:
    """Closed for the rest of the second: those whose 100 ms of patience end before are shed, and counted as that."""
    whole = run(refusing(10, "5"), tmp_path, "control: {law: none, retry_after: 5s, patience: 100ms}")
    outcomes = whole.summary["accounting"]["total"]
    assert outcomes["ok"] == 10
    assert outcomes["shed"] == pytest.approx(34, abs=2)  # due from 0.22 to 0.9
    assert outcomes["shed"] + outcomes["withdrawn"] == 39


def test_a_try_after_a_refusal_waits_and_holds_nobody_else_up(tmp_path: Path) -> None:
    """With retries the refused request itself waits as long as asked; in the end it is answered, so the gate stays open."""
    whole = run(refusing(10, "0.5"), tmp_path, "control: {law: none, retry_after: 5s}", target="retries: 1")
    again = whole.records[10]
    assert (again.outcome, again.attempts, again.throttled, again.retry_after) == ("ok", 2, 1, 0.5)
    assert (again.end_ns - again.sent_ns) / 1e9 >= 0.5
    pacing = whole.summary["pacing"]
    assert (pacing["holds"], pacing["throttled_attempts"], pacing["retried"]) == (0, 1, 1)
    assert whole.summary["outcomes"]["ok"] == 50


def test_many_refusals_close_the_gate_once(tmp_path: Path) -> None:
    """Ten users refused within milliseconds: one pause, each of them only moves its end."""

    def script(seen: Seen) -> Reply:
        if seen.number < 10:
            return Reply([(20 + seen.number, b'{"error": "busy"}')], 503, (("Retry-After", "1"),), "length")
        return GOOD

    text = served(
        "{shape: closed, concurrency: 10, think: 10ms}",
        "{steady: {for: 500ms}, drain: {for: 1s}}",
        also="control: {law: none, retry_after: 200ms}",
    )
    whole = against(Stub(script), text, tmp_path)
    assert whole.summary["outcomes"]["rejected"] == 10
    assert whole.summary["pacing"]["holds"] == 1
    assert whole.summary["pacing"]["closed"] == pytest.approx(0.21, abs=0.03)
