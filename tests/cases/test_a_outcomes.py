"""Group A: a failure is never counted as a success. At the level of one target: what each record says."""

import asyncio
from collections import Counter

import pytest

from kvbench.core import Record
from kvbench.target.connection import Timeouts
from kvbench.target.http import HttpTarget
from tests.stub.stub import DONE, FIN, ROLE, STREAM, C, Reply, Seen, Stub, U, answer_json, sse, stream
from tests.target.wire import ask, one, over_loopback, read

GOOD = stream(ROLE, C("a"), C("b"), FIN, U(4, 2), DONE)
DIED = {"error": {"message": "engine died", "type": "InternalServerError", "param": None, "code": 500}}


async def many(target: HttpTarget, count: int, users: int) -> list[Record]:
    """`count` requests by `users` who each send the next as soon as theirs is over."""
    numbers, records = iter(range(count)), []

    async def user() -> None:
        for number in numbers:
            request, record = ask(number)
            records.append(record)
            await target.send(request, record)

    await asyncio.gather(*(user() for _ in range(users)))
    return records


def test_a01_an_error_inside_a_stream_fails_the_request_and_keeps_its_text() -> None:
    def script(seen: Seen) -> Reply:
        if seen.number != 2:
            return GOOD
        return Reply([(5, ROLE), (10, C("a")), (12, C("b")), (13, sse(DIED)), (13, DONE)])

    records = over_loopback(script, lambda target, stub: many(target, 4, 1))
    assert Counter(record.outcome for record in records) == {"ok": 3, "failed": 1}
    failed = records[2]
    assert (failed.cause, failed.error, failed.n_out) == ("stream_error", "engine died (InternalServerError, 500)", 2)


@pytest.mark.parametrize("error", [DIED, {"error": "out of memory"}, {"error": {}}, {"object": "error", "message": "bad"}])
def test_a01_any_error_fails_whatever_follows(error: dict[str, object]) -> None:
    record = read([(1, C("a")), (2, sse(error)), (3, C("b")), (4, FIN + U(4, 2) + DONE)])
    assert (record.outcome, record.cause, len(record.token_ns)) == ("failed", "stream_error", 2)
    assert record.error


def test_a01_an_error_beside_choices_fails_and_an_empty_one_does_not() -> None:
    assert read([(1, C("a", error="half") + FIN + DONE)]).outcome == "failed"
    for nothing in (None, "", False):
        assert read([(1, C("a", error=nothing) + FIN + DONE)]).outcome == "ok"


def test_a03_without_retries_each_refusal_is_a_record_and_one_post() -> None:
    def script(seen: Seen) -> Reply:
        return answer_json({"error": "busy"}, 503) if seen.number % 3 != 2 else GOOD

    async def play(target: HttpTarget, stub: Stub) -> tuple[list[Record], int]:
        return await many(target, 10, 1), len(stub.posts)

    records, posts = over_loopback(lambda seen: answer_json({"error": "busy"}, 503), play)
    assert posts == 10
    assert [(r.outcome, r.status, r.cause, r.error, r.attempts) for r in records] == [
        ("rejected", 503, "http_503", "busy", 1)
    ] * 10
    records, posts = over_loopback(script, play, retries=2, backoff=0.01)
    assert posts == 30
    assert [(r.outcome, r.attempts, r.throttled) for r in records] == [("ok", 3, 2)] * 10


def test_a03_retry_after_is_respected_and_the_clock_runs_from_the_first_attempt() -> None:
    def script(seen: Seen) -> Reply:
        return answer_json({}, 429, (("Retry-After", "1"),)) if seen.number == 0 else GOOD

    async def play(target: HttpTarget, stub: Stub) -> tuple[Record, list[int]]:
        request, record = ask()
        await target.send(request, record)
        return record, [seen.received for seen in stub.posts]

    record, received = over_loopback(script, play, retries=1)
    assert (record.outcome, record.attempts, record.throttled, record.status) == ("ok", 2, 1, 200)
    assert received[1] - received[0] >= 0.999e9
    assert record.first_ns - record.sent_ns >= 0.999e9


def test_a03_a_retry_that_the_total_limit_forbids_is_not_made() -> None:
    busy = answer_json({}, 429, (("Retry-After", "30"),))
    record = one(busy, retries=5, timeouts=Timeouts(total=0.5))
    assert (record.outcome, record.cause, record.attempts) == ("rejected", "http_429", 1)


def test_a06_an_event_named_error_fails_with_its_message() -> None:
    record = one(stream(C("a"), b'event: error\ndata: {"message":"overloaded"}\n\n'))
    assert (record.outcome, record.cause, record.error, record.n_out) == ("failed", "stream_error", "overloaded", 1)
    assert read([(0, C("a") + b"event: error\ndata: plain words\n\n" + DONE)]).error == "plain words"
    assert read([(0, b"event: message\n" + C("a") + FIN + DONE)]).outcome == "ok"


@pytest.mark.parametrize("status", [200, 201, 202, 299])
def test_a06_every_2xx_with_a_good_stream_is_ok(status: int) -> None:
    assert one(Reply(GOOD.steps, status=status)).outcome == "ok"


@pytest.mark.parametrize("status", [302, 400, 404, 418, 500])
def test_other_statuses_fail_by_their_number_even_with_a_good_stream(status: int) -> None:
    record = one(Reply(GOOD.steps, status=status))
    assert (record.outcome, record.cause, record.status, record.token_ns) == ("failed", f"http_{status}", status, [])


def test_a08_every_request_ends_in_exactly_one_class() -> None:
    closing = (*STREAM, ("Connection", "close"))  # a connection per request

    def script(seen: Seen) -> Reply:
        if seen.number % 70 == 69:
            return Reply(after="hang")
        return Reply(GOOD.steps, headers=closing)

    async def play(target: HttpTarget, stub: Stub) -> tuple[list[Record], int, int]:
        records = await many(target, 420, 20)
        return records, stub.connections, len(stub.posts)

    options = {"stub": {"refuse": lambda number: number % 50 == 49}, "timeouts": Timeouts(first=0.3)}
    records, connections, posts = over_loopback(script, play, **options)
    outcomes = Counter((record.outcome, record.cause) for record in records)
    assert connections == len(records) == 420
    dropped = 420 // 50
    assert posts == 420 - dropped
    assert outcomes == {
        ("ok", ""): posts - posts // 70,
        ("timeout", "first"): posts // 70,
        ("failed", "disconnected"): dropped,
    }


def test_a09_time_spent_throttled_is_part_of_the_latency() -> None:
    start: list[int] = []

    def script(seen: Seen) -> Reply:
        start.append(seen.received)
        return answer_json({"error": "slow down"}, 429) if seen.received - start[0] < 0.3e9 else GOOD

    records = over_loopback(script, lambda target, stub: many(target, 5, 5), retries=50, backoff=0.02)
    for record in records:
        assert record.outcome == "ok"
        assert record.done_ns - record.sent_ns >= 0.29e9
        assert record.throttled == record.attempts - 1 >= 3


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (Reply([(0, C("a"))], after="close"), "truncated"),
        (Reply([(0, C("a"))], after="rst"), "truncated"),
        (Reply([(0, C("a"))], framing="close"), "truncated"),
        (Reply([(0, C("a"))]), "truncated"),
        (Reply([(0, b"SSH-2.0-x\r\n\r\n")], framing="raw"), "protocol"),
        (Reply(framing="raw", after="close"), "disconnected"),
        (Reply([(0, b"<html>hi</html>")], headers=()), "malformed"),
    ],
)
def test_answers_that_are_not_whole(reply: Reply, cause: str) -> None:
    record = one(reply)
    assert (record.outcome, record.cause) == ("failed", cause)
    assert record.end_ns is not None


def test_a_stream_that_ends_with_the_connection_is_ok_when_finished() -> None:
    assert one(Reply([(0, C("a") + FIN + DONE)], framing="close")).outcome == "ok"
    assert one(Reply([(0, C("a") + FIN + DONE)], framing="length")).outcome == "ok"
    assert one(Reply([(0, C("a") + FIN)], after="rst")).outcome == "ok"
