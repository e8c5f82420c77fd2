"""The HTTP target: connections, what is on the wire, what is found before a run, and where secrets may not go."""

import asyncio
import gzip
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvbench.clock import Clock
from kvbench.core import Record
from kvbench.target import TargetUnreachable
from kvbench.target.connection import Timeouts
from kvbench.target.http import HttpTarget, _retry_after
from tests.stub.stub import DONE, FIN, JSON, C, Reply, Seen, Stub, U, answer_json, stream
from tests.target.wire import ask, one, over_loopback, render

GOOD = stream(C("a"), FIN, U(4, 1), DONE)
SECRET = "sk-do-not-show"


def test_connections_are_kept_and_their_number_follows_the_users() -> None:
    async def play(target: HttpTarget, stub: Stub) -> tuple[int, int, dict[str, int]]:
        numbers = iter(range(400))

        async def user() -> None:
            for number in numbers:
                await target.send(*ask(number))

        await asyncio.gather(*(user() for _ in range(8)))
        return stub.connections, len(stub.posts), target.counts

    connections, posts, counts = over_loopback(Reply([(1, C("a") + FIN + DONE)]), play)
    assert (connections, posts) == (8, 400)
    assert counts["connections"] == 8


def test_no_limit_on_connections() -> None:
    async def play(target: HttpTarget, stub: Stub) -> int:
        await asyncio.gather(*(target.send(*ask(number)) for number in range(250)))
        return stub.max_in_flight

    assert over_loopback(Reply([(300, C("a") + FIN + DONE)]), play) == 250


def test_several_urls_take_turns() -> None:
    async def play(target: HttpTarget, stub: Stub) -> list[str]:
        records = []
        for number in range(4):
            request, record = ask(number)
            await target.send(request, record)
            records.append(record.url)
        return [url.removesuffix(f":{stub.port}") for url in records]

    urls = ["http://127.0.0.1:PORT", "http://localhost:PORT/v1/"]
    assert over_loopback(GOOD, play, urls=urls) == ["http://127.0.0.1", "http://localhost"] * 2


def test_the_request_on_the_wire() -> None:
    async def play(target: HttpTarget, stub: Stub) -> Seen:
        request, record = ask(sampling={"temperature": 0.5, "n": 2}, force=True)
        await target.send(request, record)
        return stub.posts[0]

    options: dict[str, Any] = {
        "key": SECRET,
        "headers": {"X-Team": "blue"},
        "chunk_usage": True,
        "extra_body": {"top_k": 3, "model": "z"},
    }
    seen = over_loopback(GOOD, play, **options)
    assert seen.path == "/v1/chat/completions"
    assert (seen.headers["authorization"], seen.headers["x-team"]) == (f"Bearer {SECRET}", "blue")
    assert seen.headers["accept-encoding"] == "identity"
    assert seen.json() == {
        "model": "z", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0.5, "n": 2, "ignore_eos": True, "min_tokens": 16, "top_k": 3,
    }  # fmt: skip


def test_a_null_in_extra_body_removes_a_key_and_completions_have_their_own_path() -> None:
    async def play(target: HttpTarget, stub: Stub) -> Seen:
        await target.send(*ask())
        return stub.posts[0]

    extra = {"max_tokens": None, "max_completion_tokens": 16}
    seen = over_loopback(GOOD, play, api="completions", stream=False, extra_body=extra, urls=["http://127.0.0.1:PORT/base/v1"])
    assert seen.path == "/base/v1/completions"
    body = seen.json()
    assert (body["stream"], body["max_completion_tokens"]) == (False, 16)
    assert "max_tokens" not in body
    assert "stream_options" not in body


def test_a_body_encoded_ahead_is_sent_as_it_is() -> None:
    async def play(target: HttpTarget, stub: Stub) -> Seen:
        await target.send(*ask(body=b'{"mine": 1}'))
        return stub.posts[0]

    assert over_loopback(GOOD, play).json() == {"mine": 1}


def test_1xx_answers_announce_and_the_connection_stays_usable() -> None:
    wire = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    wire += b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    body = C("a") + FIN + DONE
    wire += b"Content-Length: %d\r\n\r\n%b" % (len(body), body)

    async def play(target: HttpTarget, stub: Stub) -> tuple[list[Record], int]:
        records = []
        for number in range(3):
            request, record = ask(number)
            await target.send(request, record)
            records.append(record)
        return records, stub.connections

    records, connections = over_loopback(Reply([(0, wire[:30]), (5, wire[30:])], framing="raw"), play)
    assert [(r.outcome, r.status, len(r.token_ns)) for r in records] == [("ok", 200, 1)] * 3
    assert connections == 1


def test_an_upgrade_nobody_asked_for_is_a_failure() -> None:
    wire = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"
    record = one(Reply([(0, wire)], framing="raw"), timeouts=Timeouts(total=5))
    assert (record.outcome, record.cause) == ("failed", "protocol")


def test_a_server_that_never_ends_the_body_after_done() -> None:
    record = one(Reply([(0, C("a") + FIN + DONE)], after="hang"))
    assert (record.outcome, len(record.token_ns)) == ("ok", 1)


def test_a_gzipped_answer_nobody_asked_for_is_not_ok() -> None:
    packed = gzip.compress(C("a") + FIN + DONE)
    record = one(Reply([(0, packed)], headers=(("Content-Type", "text/event-stream"), ("Content-Encoding", "gzip"))))
    assert record.outcome == "failed"


def test_text_is_kept_for_sessions_only() -> None:
    async def play(target: HttpTarget, stub: Stub) -> list[str | None]:
        texts = []
        for session in (None, 4):
            request, record = ask(session=session)
            await target.send(request, record)
            texts.append(record.text)
        return texts

    assert over_loopback(GOOD, play) == [None, "a"]


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("http://127.0.0.1:1", "connect_refused"),
        ("http://no-such-host.invalid", "connect_dns"),
    ],
)
def test_connections_that_fail_say_why(url: str, cause: str) -> None:
    record = one(GOOD, urls=[url])
    assert (record.outcome, record.cause, record.sent_ns) == ("failed", cause, None)
    assert record.error.startswith("cannot connect to http")


def test_a_connection_that_does_not_come_is_a_timeout() -> None:
    with socket.socket() as full:  # a backlog of one that nobody accepts from: further connections hang
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(3)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        record = one(GOOD, urls=[f"http://127.0.0.1:{full.getsockname()[1]}"], timeouts=Timeouts(connect=0.2))
        for sock in waiting:
            sock.close()
    assert (record.outcome, record.cause) == ("timeout", "connect")


def test_ipv6() -> None:
    record = one(GOOD, stub={"host": "::1"})
    assert (record.outcome, record.url.startswith("http://[::1]:")) == ("ok", True)


def test_https_with_a_ca_file(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    options = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subprocess.run([openssl, *options, "-keyout", key, "-out", cert, *subject], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    trusted = one(GOOD, stub={"tls": tls}, ca_file=str(cert))
    assert (trusted.outcome, len(trusted.token_ns)) == ("ok", 1)
    assert trusted.sent_ns <= trusted.written_ns <= trusted.first_ns
    assert (one(GOOD, stub={"tls": tls}).outcome, one(GOOD, stub={"tls": tls}).cause) == ("failed", "connect_tls")


def test_a_secret_that_the_server_repeats_is_blotted_out() -> None:
    record = one(
        answer_json({"error": f"bad key {SECRET} from team blue-1234"}, 401), key=SECRET, headers={"X-Team": "blue-1234"}
    )
    assert (record.cause, record.error) == ("http_401", "bad key *** from team ***")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"3", 3), (b" 0 ", 0), (b"0.25", 0.25), (b"", None), (b"soon", None), (b"\xb2", None), (b"-3", None), (b"1e3", None),
        (b"nan", None), (b"Thu, 01 Jan 1970 00:00:00 GMT", 0), (b"Thu, 01 Jan 1970 00:00:00 -0000", 0),
    ],
)  # fmt: skip
def test_retry_after(value: bytes, seconds: float | None) -> None:
    assert _retry_after(value) == seconds


def vllm_like(seen: Seen) -> Reply:
    if seen.path == "/v1/models":
        return answer_json(
            {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 2048}, {"id": "lora", "max_model_len": 1024}]}
        )
    if seen.path == "/version":
        return answer_json({"version": "0.32.0"})
    if seen.path == "/tokenize":
        return (
            answer_json({"count": 3, "max_model_len": 2048, "tokens": [1, 2, 3]})
            if seen.json()["prompt"]
            else answer_json({}, 400)
        )
    return GOOD


def test_open_finds_the_facts() -> None:
    async def play(target: HttpTarget, stub: Stub) -> tuple[dict[str, Any], list[int] | None]:
        return await target.open(), await target.tokenize_probe("a b c")

    facts, tokens = over_loopback(vllm_like, play, stub={"gets": vllm_like}, key=SECRET)
    assert (facts["model"], facts["max_context"], facts["warnings"]) == ("m", 2048, [])
    assert (facts["servers"][0]["version"], facts["servers"][0]["models"]) == ("0.32.0", ["m", "lora"])
    assert tokens == [1, 2, 3]
    assert SECRET not in repr(facts)


def test_open_warns_of_a_model_that_is_not_there_and_of_a_refusal() -> None:
    async def play(target: HttpTarget, stub: Stub) -> tuple[dict[str, Any], list[int] | None]:
        return await target.open(), await target.tokenize_probe("x")

    other = answer_json({"data": [{"id": "other"}]})
    facts, tokens = over_loopback(answer_json({}, 404), play, stub={"gets": other})
    assert "does not list model 'm': it has other" in facts["warnings"][0]
    assert (facts["max_context"], tokens) == (None, None)
    refusal = Reply([(0, b"no")], 401, JSON, "length")
    facts, _ = over_loopback(refusal, play, stub={"gets": refusal}, key=SECRET)
    assert "answers 401" in facts["warnings"][0]


def test_open_says_what_does_not_answer_and_keeps_the_key() -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        target = HttpTarget(
            Clock(loop), urls=["http://127.0.0.1:1"], render=render, model="m", key=SECRET, headers={"X-K": SECRET}
        )
        with pytest.raises(TargetUnreachable) as caught:
            await target.open()
        assert caught.value.__cause__ is None
        return str(caught.value)

    text = uvloop.run(main())
    assert text == "nothing answers at http://127.0.0.1:1/v1/models: connection refused"  # and no more of what aiohttp says
    assert SECRET not in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"urls": []}, "urls"),
        ({"urls": ["ftp://x"]}, "ftp://x"),
        ({"urls": ["http://user:sk-do-not-show@x"]}, "credentials"),
        ({"urls": ["http://x/?key=sk-do-not-show"]}, "query"),
        ({"api": "chats"}, "chats"),
        ({"retries": -1}, "-1"),
        ({"urls": ["https://x"], "ca_file": "/no/such/file"}, "/no/such/file"),
        ({"backoff": -0.5}, "-0.5"),
        ({"headers": {"X-A": "sk-do-not-show\r\nX-B: 1"}}, "X-A"),
        ({"key": "sk-do-not-show\n"}, "Authorization"),
        ({"headers": {"Content-Length": "1"}}, "Content-Length"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_without_secrets(options: dict[str, Any], says: str) -> None:
    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(ValueError) as caught:
            HttpTarget(Clock(loop), **({"urls": ["http://x"], "render": render, "model": "m"} | options))
    finally:
        loop.close()
    assert says in str(caught.value)
    assert SECRET not in str(caught.value)


def test_timeouts_are_spans() -> None:
    assert Timeouts.model_validate({"first": "60s", "total": "10m"}, context={"text": True}).total == 600
    with pytest.raises(ValueError, match="idle"):
        Timeouts.model_validate({"idle": "0s"})
