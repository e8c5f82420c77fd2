"""Group A of the public cases, as whole runs: a failure is never counted as a success, whatever the report is read from."""

import itertools
import json
from pathlib import Path

import pytest

from tests.stub.stub import DONE, FIN, ROLE, STREAM, C, Reply, Seen, Stub, U, answer_json, sse
from tests.whole import against, served

GOOD = ROLE + C("a") + C("b") + FIN + U(8, 2) + DONE
ONE_BY_ONE = "{shape: closed, concurrency: 1}"


def test_a01_an_error_inside_a_stream_leaves_three_of_four(tmp_path: Path) -> None:
    died = {"error": {"message": "engine died", "type": "InternalServerError", "param": None, "code": 500}}
    bad = Reply([(50, ROLE), (100, C("a")), (120, C("b")), (130, sse(died) + DONE)])
    good = Reply([(5, ROLE), (20, C("a")), (70, C("b")), (71, FIN + U(8, 2) + DONE)])
    run = against(Stub(lambda seen: bad if seen.number == 2 else good), served(ONE_BY_ONE, "{steady: {requests: 4}}"), tmp_path)
    found = run.summary
    assert (found["outcomes"]["ok"], found["outcomes"]["failed"], found["outcomes"]["error_rate"]) == (3, 1, 0.25)
    (failure,) = found["failures"]
    assert (failure["outcome"], failure["class"], failure["n"], failure["tokens"]) == ("failed", "stream_error", 1, 2)
    assert failure["examples"] == ["engine died (InternalServerError, 500)"]
    assert found["tokens"]["of_failed"] == 2
    assert [found["latency"][name]["n"] for name in ("ttft", "tpot", "e2e", "response")] == [3, 3, 3, 3]
    assert found["latency"]["ttft"]["max"] < 0.1, "the failed one's 100 ms is not in it"
    rate, seconds = found["tokens"]["output_rate"], found["headline"]["seconds"]
    assert rate["n"] == 8
    assert rate["succeeded_only"] * seconds == pytest.approx(6)
    assert [(r.outcome, r.error) for r in run.records if r.outcome != "ok"] == [("failed", failure["examples"][0])]


def test_a03_ten_refusals_are_ten_posts_and_an_error_rate_of_one(tmp_path: Path) -> None:
    stub = Stub(answer_json({"error": "busy"}, 503))
    run = against(stub, served(ONE_BY_ONE, "{steady: {requests: 10}}"), tmp_path)
    outcomes = run.summary["outcomes"]
    assert len(stub.posts) == 10
    assert (outcomes["rejected"], outcomes["ok"], outcomes["error_rate"], outcomes["rejection_rate"]) == (10, 0, 1.0, 1.0)
    assert run.summary["failures"][0]["statuses"] == {"503": 10}
    assert run.code == 6


def test_a03_retries_that_were_asked_for_are_counted_and_part_of_the_latency(tmp_path: Path) -> None:
    """503 twice, then 200 (waits of 0.5 and 1 s), for ten users at once: 30 posts, and e2e starts at the first of them."""
    tries: dict[str, int] = {}

    def script(seen: Seen) -> Reply:
        who = seen.json()["messages"][0]["content"]
        tries[who] = tries.get(who, 0) + 1
        return Reply([(0, GOOD)]) if tries[who] == 3 else answer_json({"error": "busy"}, 503)

    stub = Stub(script)
    text = served("{shape: closed, concurrency: 10}", "{steady: {requests: 10}}", target="retries: 2")
    run = against(stub, text, tmp_path)
    assert (len(stub.posts), run.summary["outcomes"]["ok"]) == (30, 10)
    pacing = run.summary["pacing"]
    assert (pacing["retried"], pacing["throttled_attempts"]) == (10, 20)
    assert 1.5 <= run.summary["latency"]["e2e"]["min"] < 2


def test_a03_retry_after_is_waited_for(tmp_path: Path) -> None:
    """Always 429 with `Retry-After: 1`, one retry asked for: two posts a second apart, one rejected request."""
    stub = Stub(answer_json({}, 429, (("Retry-After", "1"),)))
    run = against(stub, served(ONE_BY_ONE, "{steady: {requests: 1}}", target="retries: 1"), tmp_path)
    first, second = (seen.received / 1e9 for seen in stub.posts)
    assert 1.0 <= second - first < 1.5
    assert [(r.outcome, r.status, r.attempts, r.throttled) for r in run.records] == [("rejected", 429, 2, 1)]


def test_a04_a_server_that_refuses_says_so_in_every_number(tmp_path: Path) -> None:
    """100 to a server that takes all in 1 s, and to one that refuses 70 and answers 30 in 0.2 s. Comparing comes later."""
    text = served("{shape: constant, rate: 100/s}", "{steady: {for: 1s}, drain: {for: 3s}}", workload="slo: {response: 1500ms}")
    patient, brisk = (tmp_path / "a", tmp_path / "b")
    patient.mkdir()
    brisk.mkdir()
    a = against(Stub(Reply([(1000, GOOD)])), text, patient).summary
    b = against(Stub(lambda seen: Reply([(200, GOOD)]) if seen.number % 10 < 3 else answer_json({}, 503)), text, brisk).summary
    row = ("offered", "ok", "failed", "rejected", "timeout", "error_rate")
    assert tuple(a["outcomes"][name] for name in row) == (100, 100, 0, 0, 0, 0.0)
    assert tuple(b["outcomes"][name] for name in row) == (100, 30, 0, 70, 0, 0.7)
    assert (a["goodput"]["value"], b["goodput"]["value"]) == (1.0, 0.3)
    assert json.loads((next((brisk / "results").iterdir()) / "summary.json").read_text())["outcomes"]["error_rate"] == 0.7


def test_a06_an_event_named_error_fails_and_a_201_does_not(tmp_path: Path) -> None:
    broken = Reply([(0, C("a") + b'event: error\ndata: {"message":"overloaded"}\n\n')])
    run = against(
        Stub(lambda seen: broken if seen.number == 0 else Reply([(0, GOOD)], 201)),
        served(ONE_BY_ONE, "{steady: {requests: 2}}"),
        tmp_path,
    )
    assert [(r.outcome, r.status, r.error) for r in run.records] == [("failed", 200, "overloaded"), ("ok", 201, "")]
    assert run.summary["failures"][0]["examples"] == ["overloaded"]


def test_a08_a_thousand_requests_add_up_by_class(tmp_path: Path) -> None:
    """A connection per request; every 50th is reset on arrival, every 70th request is never answered (limit 1 s)."""
    closing = (*STREAM, ("Connection", "close"))
    stub = Stub(
        lambda seen: Reply(after="hang") if seen.number % 70 == 69 else Reply([(0, GOOD)], headers=closing),
        refuse=lambda number: number % 50 == 49,
    )
    text = served("{shape: closed, concurrency: 20}", "{steady: {requests: 1000}}", target="timeouts: {first: 1s}")
    run = against(stub, text, tmp_path)
    total = run.summary["accounting"]["total"]
    assert total["offered"] == total["admitted"] == 1000
    assert total["ok"] + total["failed"] + total["timeout"] + total["rejected"] + total["cancelled"] == 1000
    assert (total["failed_by_class"], total["timeout_by_class"]) == ({"disconnected": 20}, {"first": 14})
    assert (total["ok"], len(stub.posts)) == (966, 980)


def test_a09_two_seconds_of_throttling_are_in_the_latency_of_all_five_users(tmp_path: Path) -> None:
    """429 for the first 2 s. The waits double from 0.5 s: tries at 0, 0.5, 1.5 and 3.5 s, three of them throttled."""
    start: list[int] = []

    def script(seen: Seen) -> Reply:
        start.append(seen.received)
        return answer_json({"error": "slow down"}, 429) if seen.received - start[0] < 2e9 else Reply([(0, GOOD)])

    stub = Stub(script)
    run = against(stub, served("{shape: closed, concurrency: 5}", "{steady: {requests: 5}}", target="retries: 9"), tmp_path)
    assert run.summary["outcomes"]["ok"] == 5
    assert run.summary["latency"]["e2e"]["min"] >= 2.0
    assert run.summary["latency"]["response"]["min"] >= 2.0
    assert run.summary["pacing"]["throttled_attempts"] == sum(seen.received - start[0] < 2e9 for seen in stub.posts) == 15


def test_a08_a_run_that_loses_a_request_ends_with_an_internal_error(tmp_path: Path) -> None:
    """The sum is asserted before the report: a record taken out of the file is missed."""
    from kvbench.report.accounting import AccountingError
    from tests.whole import finished

    run = against(Stub(Reply([(0, GOOD)])), served(ONE_BY_ONE, "{steady: {requests: 4}}"), tmp_path)
    lines = (run.directory / "requests.jsonl").read_bytes().splitlines(keepends=True)
    (run.directory / "requests.jsonl").write_bytes(b"".join(itertools.islice(lines, 3)))
    with pytest.raises(AccountingError, match="1 of 4 offered requests have no record"):
        finished(run.directory)
