"""Group C, at the target: latency from the right moment, and a client that is not the bottleneck."""

import asyncio
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from kvbench.clock import Clock
from kvbench.core import Message, Record
from kvbench.target.connection import Timeouts
from kvbench.target.http import HttpTarget
from tests.stub.stub import DONE, FIN, ROLE, C, Reply, Seen, Stub, U, answer_json, stream, usage
from tests.target.wire import ask, one, over_loopback, render

GOOD = stream(C("a"), FIN, U(4, 1), DONE)
SOURCE = Path(__file__).parent.parent / "stub" / "instant.c"


@pytest.fixture
def instant(tmp_path: Path) -> Iterator[Callable[..., tuple[int, Path]]]:
    """start(tokens, delay_us, first_us) -> (port, log): the compiled stub."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    subprocess.run([compiler, "-O2", "-o", tmp_path / "instant", SOURCE], check=True)
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: int) -> tuple[int, Path]:
        log = tmp_path / "log"
        command = [str(tmp_path / "instant"), "0", *map(str, arguments), "--log", str(log)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        return int(process.stdout.readline().split()[1]), log

    yield start
    for process in running:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_c05_large_bodies_at_concurrency_agree_with_the_servers_own_log(instant: Callable[..., tuple[int, Path]]) -> None:
    users, tokens, first_ms = 64, 64, 1000
    port, log = instant(tokens, 5000, first_ms * 1000)
    body = Message(text="x" * 1_000_000)

    async def main() -> list[Record]:
        target = HttpTarget(Clock(asyncio.get_running_loop()), urls=[f"http://127.0.0.1:{port}"], render=render, model="m")
        pairs = [ask(number, messages=(body,)) for number in range(users)]
        for request, _ in pairs:
            request.body = target.encode(request)
        await asyncio.gather(*(target.send(request, record) for request, record in pairs))
        await target.aclose()
        return [record for _, record in pairs]

    records = uvloop.run(main())
    truth = [[int(stamp) for stamp in line.split()] for line in log.read_text().splitlines()]
    assert all(record.outcome == "ok" and record.n_out == tokens for record in records)
    assert len(truth) == users
    # both sides measure from "the whole request has left / is here", and from the first token to the last byte
    ours = sum(record.first_ns - record.written_ns for record in records) / users
    theirs = sum(first - received for received, first, _ in truth) / users
    assert ours == pytest.approx(theirs, rel=0.05)
    span = sum(record.end_ns - record.first_ns for record in records) / users
    assert span == pytest.approx(sum(done - first for _, first, done in truth) / users, rel=0.05)
    assert all(record.written_ns > record.sent_ns for record in records)


def test_c05_the_upload_has_its_own_time_while_the_server_does_not_read() -> None:
    async def play(target: HttpTarget, stub: Stub) -> Record:
        request, record = ask(messages=(Message(text="x" * 8_000_000),))
        await target.send(request, record)
        return record

    record = over_loopback(GOOD, play)
    assert record.outcome == "ok"
    assert record.sent_ns < record.written_ns <= record.first_ns


def test_c06_no_first_token_is_null_and_never_negative() -> None:
    whole = answer_json({"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}], "usage": usage(2, 1)})
    for record in (one(whole), one(stream(ROLE, FIN, DONE))):
        assert (record.outcome, record.first_ns, record.content_ns) == ("ok", None, None)
        assert 0 <= record.sent_ns <= record.written_ns <= record.done_ns <= record.end_ns


def test_c08_connections_closed_while_idle_cost_no_request() -> None:
    async def play(target: HttpTarget, stub: Stub) -> tuple[list[Record], int]:
        records = []
        for number in range(30):
            request, record = ask(number)
            await target.send(request, record)
            records.append(record)
            await asyncio.sleep(0.0505)
        return records, len(stub.posts)

    records, posts = over_loopback(GOOD, play, stub={"idle": 0.05})
    assert [record.outcome for record in records] == ["ok"] * 30
    assert posts == 30


def test_c08_a_stale_connection_is_replaced_once_and_counted() -> None:
    used: set[int] = set()

    def script(seen: Seen) -> Reply:
        if seen.connection in used:
            return Reply(framing="raw", after="rst")  # as if it had been closed already
        used.add(seen.connection)
        return GOOD

    async def play(target: HttpTarget, stub: Stub) -> tuple[list[Record], dict[str, int], int]:
        records = []
        for number in range(4):
            request, record = ask(number)
            await target.send(request, record)
            records.append(record)
        return records, target.counts, len(stub.posts)

    records, counts, posts = over_loopback(script, play)
    assert [(record.outcome, record.stale, record.attempts) for record in records] == [("ok", False, 1)] + [("ok", True, 1)] * 3
    assert (counts["connections"], counts["reconnects"], posts) == (4, 3, 7)
    for record in records:
        assert record.sent_ns <= record.written_ns <= record.first_ns


def test_c08_the_time_lost_on_a_stale_connection_is_connection_time() -> None:
    def script(seen: Seen) -> Reply:
        return Reply([(150, b"")], framing="raw", after="rst") if seen.number == 1 else GOOD

    async def play(target: HttpTarget, stub: Stub) -> Record:
        for number in range(2):
            request, record = ask(number)
            entered = target.clock.ns()
            await target.send(request, record)
        record.due_ns = entered
        return record

    record = over_loopback(script, play)
    assert (record.outcome, record.stale) == ("ok", True)
    assert record.connect_ns >= 149e6
    assert record.sent_ns - record.due_ns == pytest.approx(record.connect_ns, abs=5e6)
    assert record.first_ns - record.sent_ns < 149e6


@pytest.mark.parametrize("early", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", b"H"])
def test_c08_nothing_is_sent_again_once_a_byte_of_an_answer_came(early: bytes) -> None:
    def script(seen: Seen) -> Reply:
        return GOOD if seen.number == 0 else Reply([(0, early)], framing="raw", after="close")

    async def play(target: HttpTarget, stub: Stub) -> tuple[Record, int]:
        request, record = ask()
        await target.send(request, record)
        request, record = ask(1)
        await target.send(request, record)
        return record, len(stub.posts)

    record, posts = over_loopback(script, play, retries=3)
    assert (record.outcome, record.stale, posts) == ("failed", False, 2)


def test_c08_a_fresh_connection_that_drops_is_a_failure() -> None:
    record = one(Reply(framing="raw", after="rst"))
    assert (record.outcome, record.cause, record.stale) == ("failed", "disconnected", False)


def waited(record: Record, since: int | None) -> float:
    assert record.end_ns is not None
    assert since is not None
    return (record.end_ns - since) / 1e9


def test_c09_a_first_token_that_comes_too_late() -> None:
    record = one(Reply([(0, ROLE), (900, C("a") + FIN + DONE)]), timeouts=Timeouts(first=0.3))
    assert (record.outcome, record.cause, record.first_ns) == ("timeout", "first", None)
    assert waited(record, record.sent_ns) == pytest.approx(0.3, abs=0.1)
    assert record.error == "no token within 0.3 s"


def test_c09_a_slow_stream_passes_an_idle_limit_that_each_gap_meets() -> None:
    steps = [(100.0 * i, C("a")) for i in range(1, 9)] + [(900.0, FIN + DONE)]
    record = one(Reply(steps), timeouts=Timeouts(idle=0.4))
    assert (record.outcome, len(record.token_ns)) == ("ok", 8)


def test_c09_silence_after_a_token() -> None:
    record = one(Reply([(50, C("a"))], after="hang"), timeouts=Timeouts(idle=0.3, first=10))
    assert (record.outcome, record.cause, len(record.token_ns)) == ("timeout", "idle", 1)
    assert waited(record, record.first_ns) == pytest.approx(0.3, abs=0.1)


def test_c09_total_ends_a_stream_that_still_flows() -> None:
    steps = [(50.0 * i, C("a")) for i in range(1, 40)]
    record = one(Reply(steps), timeouts=Timeouts(total=0.4, idle=5))
    assert (record.outcome, record.cause) == ("timeout", "total")
    assert waited(record, record.sent_ns) == pytest.approx(0.4, abs=0.1)
    assert len(record.token_ns) >= 4


def test_c09_limits_hold_on_a_reused_connection_too() -> None:
    def script(seen: Seen) -> Reply:
        return GOOD if seen.number == 0 else Reply(after="hang")

    async def play(target: HttpTarget, stub: Stub) -> Record:
        for number in range(2):
            request, record = ask(number)
            await target.send(request, record)
        return record

    record = over_loopback(script, play, timeouts=Timeouts(first=0.2, total=30))
    assert (record.outcome, record.cause) == ("timeout", "first")


def test_c10_ten_events_in_one_read_are_told_apart_from_ten_reads() -> None:
    record = one(Reply([(60.0 * i, C("x") * 10) for i in range(1, 5)] + [(250.0, FIN + U(3, 40) + DONE)]))
    assert (len(record.token_ns), record.reads, record.n_out) == (40, 4, 40)
    # the headline: from the first read to the last, over the tokens of the later reads: 180 ms / 30 = 6 ms
    assert (record.token_ns[-1] - record.token_ns[0]) / 30 / 1e6 == pytest.approx(6, abs=0.7)
