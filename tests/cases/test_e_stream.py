"""Group E: the stream on the wire."""

import pytest

from kvbench.core import Record
from kvbench.target.connection import Timeouts
from kvbench.target.http import HttpTarget
from tests.stub.stub import DONE, FIN, C, Reply, Stub, sse
from tests.target.wire import ask, cut, one, over_loopback, read

AB = b'data: {"choices":[{"index":0,"delta":{"content":"a b"}}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*parts: bytes) -> bytes:
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize("at", [5, AB.index(b" b"), AB.index(b"b")])
def test_e01_a_cut_at_white_space_changes_nothing(at: int) -> None:
    record = read([(0, AB[:at]), (20, AB[at:]), (30, FIN + DONE)])
    assert (record.outcome, record.text) == ("ok", "a b")
    wire = one(Reply([(0, AB[:at]), (20, AB[at:]), (30, FIN + DONE)]))
    assert (wire.outcome, len(wire.token_ns)) == ("ok", 1)


def test_e01_every_cut_of_one_stream_gives_the_same_answer() -> None:
    wire = chunked(AB, FIN, DONE)
    for at in range(1, len(wire)):
        record, _ = cut([wire[:at], wire[at:]])
        assert (record.outcome, record.text, len(record.token_ns)) == ("ok", "a b", 1)
    record, _ = cut(wire[i : i + 1] for i in range(len(wire)))
    assert (record.outcome, record.text) == ("ok", "a b")


@pytest.mark.parametrize(
    "event",
    [
        AB.replace(b"data: ", b"data:"),
        AB.replace(b"data: ", b"data:  "),
        AB.replace(b"\n", b"\r\n"),
        AB.replace(b"\n", b"\r"),
        b"\xef\xbb\xbf" + AB,
    ],
    ids=["no space", "two spaces", "CRLF", "CR", "BOM"],
)
def test_e02_every_spelling_of_an_event_is_read(event: bytes) -> None:
    for pieces in ([event + FIN + DONE], [event[i : i + 1] for i in range(len(event))] + [FIN, DONE]):
        record = read([(0, piece) for piece in pieces])
        assert (record.outcome, record.text) == ("ok", "a b")


@pytest.mark.parametrize(
    ("tail", "outcome", "tokens"),
    [
        (b"data: [DONE]", "ok", 1),
        (C("z", finish="stop").rstrip(), "ok", 2),
        (C("z", finish="stop").rstrip()[:-4], "failed", 1),
    ],
)
def test_e02_the_last_event_without_its_blank_line(tail: bytes, outcome: str, tokens: int) -> None:
    counts: dict[str, int] = {}

    async def play(target: HttpTarget, stub: Stub) -> Record:
        request, record = ask()
        await target.send(request, record)
        counts.update(target.counts)
        return record

    record = over_loopback(Reply([(0, AB + tail)]), play)
    assert (record.outcome, len(record.token_ns)) == (outcome, tokens)
    assert counts["unterminated"] == (outcome == "ok")


def test_e03_comments_and_other_fields_are_never_tokens() -> None:
    noise = b":\n\n: keep-alive\n\nid: 7\nretry: 500\n\nevent: message\n" + C("a")
    record = read([(10, b":\n\n"), (20, b": keep-alive\n\n"), (30, noise), (40, b":\n\n" + FIN + DONE)])
    assert (record.outcome, record.text, record.first_ns, record.ignored) == ("ok", "a", 30_000_000, 0)


def test_e03_comments_reset_the_idle_limit() -> None:
    steps = [(0, C("a")), *((60 * i, b": keep-alive\n\n") for i in range(1, 8)), (480, FIN + DONE)]
    assert one(Reply(steps), timeouts=Timeouts(idle=0.2)).outcome == "ok"
    silent = one(Reply([(0, C("a")), (480, FIN + DONE)]), timeouts=Timeouts(idle=0.2))
    assert (silent.outcome, silent.cause) == ("timeout", "idle")


def test_e05_characters_cut_between_reads_are_whole() -> None:
    text = "héllo 世界 🚀"
    wire = chunked(C(text), FIN, DONE)
    record, _ = cut(wire[i : i + 1] for i in range(len(wire)))
    assert (record.outcome, record.text, record.replaced) == ("ok", text, 0)


def test_e05_an_invalid_byte_is_replaced_and_counted() -> None:
    record = read([(0, C("a�b?").replace(b"?", b"\xff")), (1, FIN + DONE)])
    assert (record.outcome, record.text, record.replaced, record.malformed) == ("ok", "a�b�", 1, 0)


def test_a_malformed_event_is_counted_and_fails_the_request() -> None:
    record = read([(0, C("a")), (1, sse(b'{"choices": [')), (2, C("b")), (3, FIN + DONE)])
    assert (record.outcome, record.cause, record.malformed, len(record.token_ns)) == ("failed", "malformed", 1, 2)


@pytest.mark.parametrize("body", [b"", b": nothing\n\n"])
def test_a_stream_without_any_event_is_failed(body: bytes) -> None:
    record = read([(0, body)])
    assert (record.outcome, record.cause) == ("failed", "empty")
