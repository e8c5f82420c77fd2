"""`kvbench serve` through sockets in this process: in virtual time against the engine itself, and what its clients do to it."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
import zmq
from prometheus_client.parser import text_string_to_metric_families

from kvbench.clock import Clock, VirtualLoop
from kvbench.compose import build_machine
from kvbench.endpoint import Sim
from kvbench.engine.tape import Access
from kvbench.serve import http
from kvbench.serve.app import Feed, Server
from kvbench.serve.events import Ledger, Publisher
from kvbench.serve.tokens import Plain
from tests.whole import Whole, finished, play, simulated

TEXT = """
name: same
seed: 5
target: TARGET
workload:
  arrivals: {shape: constant, rate: 4/s}
  prompt: {dist: uniform, min: 50, max: 400}
  output: {dist: uniform, min: 20, max: 120, force: true}
  prefixes: {groups: 3, zipf: 1.0, tokens: 96, share: 60%}
  sessions: {turns: 3, think: 1s}
  nonce: false
phases: {steady: {for: 6s}, drain: {for: 60s}}
"""
SIM = {"kind": "sim", "model": "llama-3.1-8b", "hardware": "rtx-4090", "settings": {"blocks": 400}}


def spec(**more: Any) -> Sim:
    return Sim.model_validate({key: value for key, value in SIM.items() if key != "kind"} | more)


OPEN: list[asyncio.StreamWriter] = []  # closed when their server is


async def opened(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    OPEN.append(writer)
    return reader, writer


def served(
    work: Callable[[Server, int], Awaitable[Any]],
    loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
    speed: float = 1000.0,
    feed: Callable[[asyncio.AbstractEventLoop], Feed] | None = None,
    **more: Any,
) -> Any:
    """What `work(server, port)` returns."""

    async def whole() -> Any:
        running = asyncio.get_running_loop()
        told = feed(running) if feed is not None else None

        def hear(access: Access) -> None:
            assert told is not None
            told.ledgers[access.node].hear(access)

        machine = build_machine(spec(**more), 0, [hear] if told else ())
        server = Server(machine, Clock(running), Plain(), "llama-3.1-8b", speed, told)
        try:
            return await work(server, await server.listen("127.0.0.1", 0))
        finally:
            for writer in OPEN:
                writer.transport.abort()
            OPEN.clear()
            server.close()
            await asyncio.sleep(0.01)
            machine.check()

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(whole())


def figures(run: Whole) -> list[tuple[Any, ...]]:
    return [(r.outcome, r.session, r.turn, r.n_in, r.n_out, r.cached, r.asked_out) for r in run.records]


def test_a_run_over_http_is_the_run_on_the_engine(tmp_path: Path) -> None:
    """Sessions, shared prefixes, too few blocks: request by request the same counts; times apart by what a socket takes, which is
    nothing in virtual time, and by the moment at which a request comes within a step."""
    (tmp_path / "sim").mkdir()
    (tmp_path / "http").mkdir()
    direct = simulated(TEXT.replace("TARGET", json.dumps(SIM)), tmp_path / "sim")

    async def over(server: Server, port: int) -> Path:
        target = {"kind": "http", "url": f"http://127.0.0.1:{port}", "tokenizer": "server"}
        return await play(TEXT.replace("TARGET", json.dumps(target)), tmp_path / "http")

    wired = finished(served(over, VirtualLoop, 1.0))
    assert len(direct.records) > 40
    assert sum(record.cached for record in direct.records) > 2000
    assert Counter(r.outcome for r in wired.records) == Counter(r.outcome for r in direct.records)
    assert {r.malformed for r in wired.records} == {0}
    assert {r.source for r in wired.records} == {"usage"}
    assert figures(wired) == figures(direct)
    for one, other in zip(wired.records, direct.records, strict=True):
        assert one.first_ns == pytest.approx(other.first_ns, abs=1000)
        assert one.done_ns == pytest.approx(other.done_ns, abs=1000)


def post(path: str, body: Any, extra: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\n{extra}content-length: {len(data)}\r\n\r\n".encode() + data


async def said(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of a whole response."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length"))
    return int(head.split()[1]), await reader.readexactly(length)


def talk(raw: bytes, answers: int, **more: Any) -> list[tuple[int, Any]]:
    """Statuses and JSON bodies, to bytes as they are."""

    async def work(server: Server, port: int) -> list[tuple[int, Any]]:
        reader, writer = await opened(port)
        writer.write(raw)
        found = [await asyncio.wait_for(said(reader), 10) for _ in range(answers)]
        writer.close()
        return [(status, json.loads(body) if body[:1] in (b"{", b"[") else body) for status, body in found]

    result: list[tuple[int, Any]] = served(work, **more)
    return result


def test_requests_behind_each_other_on_one_connection_are_answered_in_order() -> None:
    bodies = [{"prompt": "a", "max_tokens": count} for count in (30, 2, 1)]
    found = talk(b"".join(post("/v1/completions", body) for body in bodies), 3)
    assert [(status, body["usage"]["completion_tokens"]) for status, body in found] == [(200, 30), (200, 2), (200, 1)]


def test_several_prompts_and_choices_are_counted_together() -> None:
    ((status, body),) = talk(post("/v1/completions", {"prompt": [[1, 2, 3], [4, 5]], "n": 2, "max_tokens": 4}), 1)
    assert status == 200
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in body["choices"]}) == 4
    assert body["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 5, "total_tokens": 21, "completion_tokens": 16, "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }  # fmt: skip


def test_tokens_there_and_back() -> None:
    raw = post("/tokenize", {"prompt": "sea Öl"}) + post("/tokenize", {"messages": [{"role": "user", "content": "sea Öl"}]})
    (_, text), (_, chat) = talk(raw, 2)
    assert text["tokens"] == chat["tokens"]
    assert (text["count"], text["max_model_len"]) == (len(text["tokens"]), 131_072)
    assert talk(post("/detokenize", {"tokens": text["tokens"]}), 1) == [(200, {"prompt": "sea Öl"})]
    assert talk(post("/detokenize", {"tokens": [1 << 40]}), 1)[0][0] == 400


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"GET /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n", 405),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * (http.HEAD + 1) + b"\r\n\r\n", 400),
        (post("/v1/completions", b"{"), 400),
        (post("/v1/completions", {"prompt": "a", "model": "b"}), 404),
        (post("/v1/completions", {"prompt": [1] * 7000, "max_tokens": 1}), 400),  # more blocks than there are
        (b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n", 200),
        (post("/ping", b""), 200),
    ],
)
def test_what_is_not_served_is_said(raw: bytes, status: int) -> None:
    assert talk(raw, 1)[0][0] == status


def test_a_full_queue_is_a_503_and_counted() -> None:
    async def work(server: Server, port: int) -> None:
        held = [await opened(port) for _ in range(2)]
        for _, writer in held:
            writer.write(post("/v1/completions", {"prompt": [1] * 3000, "max_tokens": 3000, "stream": True}))
            await asyncio.sleep(0.05)
        reader, writer = await opened(port)
        writer.write(post("/v1/completions", {"prompt": "a", "max_tokens": 1}))
        status, body = await said(reader)
        assert status == 503
        assert json.loads(body)["error"]["code"] == 503
        assert b'admission_rejections_total{model_name="llama-3.1-8b",reason="max_num_queued_reqs"} 1.0' in server.page.text()
        for _, other in held:
            other.close()

    served(work, speed=1.0, settings={"blocks": 400, "max_waiting": 1, "max_num_seqs": 1})


def test_a_reset_fails_while_blocks_are_in_use_and_says_so() -> None:
    async def work(server: Server, port: int) -> list[bytes]:
        _, busy = await opened(port)
        busy.write(post("/v1/completions", {"prompt": [1] * 300, "max_tokens": 2000, "stream": True}))
        await asyncio.sleep(0.1)
        reader, writer = await opened(port)
        writer.write(post("/reset_prefix_cache", b""))
        during = await said(reader)
        busy.close()
        await asyncio.sleep(0.1)
        writer.write(post("/reset_prefix_cache", b""))
        return [during, await said(reader)]

    assert served(work, speed=1.0) == [(200, b'{"success":false}'), (200, b'{"success":true}')]


def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "UNREAD", 1 << 14)

    async def work(server: Server, port: int) -> None:
        _, writer = await opened(port)
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # a ReadTransport
        writer.write(post("/v1/completions", {"prompt": "a", "n": 8, "max_tokens": 6000, "stream": True}))
        for _ in range(200):
            await asyncio.sleep(0.01)
            if b'finished_reason="abort",model_name="llama-3.1-8b"} 1.0' in server.page.text():
                break
        assert not server.replies.live
        assert server.machine.gauges()["kv_usage"] == 0

    served(work, settings={"blocks": 4000})


def test_counters_are_what_the_replies_said_preemptions_too() -> None:
    """Twelve streams in a third of the blocks that they need."""

    async def one(port: int, number: int) -> dict[str, Any]:
        reader, writer = await opened(port)
        body = {"prompt": [number % 3] * 200, "max_tokens": 300, "stream": True, "stream_options": {"include_usage": True}}
        writer.write(post("/v1/completions", body, "connection: close\r\n"))
        raw = (await reader.read()).decode()
        writer.close()
        events = [json.loads(line[6:]) for line in raw.split("\n") if line.startswith("data: {")]
        assert len(events) == 301
        usage: dict[str, Any] = events[-1]["usage"]
        return usage

    async def work(server: Server, port: int) -> None:
        usages = await asyncio.gather(*(one(port, number) for number in range(12)))
        text = server.page.text().decode()

        def counter(name: str) -> float:
            return float(next(line for line in text.splitlines() if line.startswith(f"vllm:{name}{{")).split()[-1])

        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        assert counter("prompt_tokens_total") == counter("prefix_cache_queries_total") == 2400
        assert counter("generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages) == 3600
        assert counter("prompt_tokens_cached_total") == counter("prefix_cache_hits_total") == cached > 0
        assert counter("num_preemptions_total") == counter("request_num_preemptions_sum") > 0
        assert counter("iteration_tokens_total_sum") == 2400 - cached + 3600
        queue, prefill, decode, inference, first, whole = (
            counter(f"{name}_seconds_sum")
            for name in ("request_queue_time", "request_prefill_time", "request_decode_time", "request_inference_time",
                         "time_to_first_token", "e2e_request_latency")
        )  # fmt: skip
        assert queue > 0 < prefill
        assert queue + prefill == pytest.approx(first)
        assert queue + inference == pytest.approx(whole)
        assert prefill + decode == pytest.approx(inference)
        assert 'request_success_total{engine="0",finished_reason="length",model_name="llama-3.1-8b"} 12.0' in text

    served(work, speed=20.0, settings={"blocks": 130})


def test_hits_below_the_device_are_external_as_vllms_are() -> None:
    """A prompt of 20 blocks leaves a pool of 30 for another one, and comes up from the host's memory: all of it but one block."""

    async def work(server: Server, port: int) -> None:
        reader, writer = await opened(port)
        for number in (1, 2, 1):
            writer.write(post("/v1/completions", {"prompt": [number] * 320, "max_tokens": 8}))
            assert (await said(reader))[0] == 200
        reader, writer = await opened(port)
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
        text = (await said(reader))[1].decode()
        told = {line.split()[0].split("{")[0] + "".join(re.findall('source="([a-z0-9_]+)"', line)): float(line.split()[-1])
                for line in text.splitlines() if line.startswith("vllm:")}  # fmt: skip
        host = told["vllm:prompt_tokens_cached_by_source_totalhost"]
        device = told["vllm:prompt_tokens_cached_by_source_totaldevice"]
        assert (host + device, host > 100) == (304, True)
        assert {told[f"vllm:prompt_tokens_cached_by_source_total{name}"] for name in ("disk", "p2p", "external_unspecified")} == {
            0
        }
        assert told["vllm:prefix_cache_hits_total"] == told["vllm:prompt_tokens_by_source_totallocal_cache_hit"] == device
        assert told["vllm:external_prefix_cache_hits_total"] == host
        assert told["vllm:prompt_tokens_by_source_totalexternal_kv_transfer"] == host
        assert told["vllm:external_prefix_cache_queries_total"] == 960 - device
        assert told["vllm:prompt_tokens_by_source_totallocal_compute"] == 960 - 304

    served(work, settings={"blocks": 30}, tiers={"host": {"capacity": 1e9}})


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_memory_runs_out_for_ends_with_an_error(stream: bool) -> None:
    """Two of two prompts each, and blocks for three and a half: the last prompt fails, and with it its whole request."""

    async def one(port: int, number: int) -> tuple[int, str]:
        reader, writer = await opened(port)
        body = {"prompt": [[number] * 30, [number + 10] * 30], "max_tokens": 100, "stream": stream}
        writer.write(post("/v1/completions", body, "connection: close\r\n"))
        raw = (await reader.read()).decode()
        writer.close()
        return int(raw.split()[1]), raw

    async def work(server: Server, port: int) -> None:
        first = asyncio.ensure_future(one(port, 1))
        for _ in range(1000):
            if server.replies.live:
                break
            await asyncio.sleep(0.001)
        (kept, whole), (status, raw) = await asyncio.gather(first, one(port, 2))
        events = [line[6:].strip() for line in raw.split("\n") if line.startswith("data: ")]
        if stream:
            assert events[-1] == "[DONE]"
            assert 20 < len(events) < 202
        error = json.loads(events[-2] if stream else raw.partition("\r\n\r\n")[2])
        assert (kept, status) == (200, 200 if stream else 500)
        assert "error" not in whole
        assert {**error["error"], "message": ""} == {"message": "", "type": "InternalServerError", "param": None, "code": 500}
        assert "memory ran out" in error["error"]["message"]
        assert not server.replies.live
        text = server.page.text().decode()
        for why, count in (("length", 2), ("error", 1), ("abort", 1)):
            assert f'finished_reason="{why}",model_name="llama-3.1-8b"}} {count}.0' in text

    served(work, speed=20.0, settings={"blocks": 30, "max_preemptions": 0})


def series(text: str) -> dict[str, dict[str, float]]:
    """By the name of a sample: its value by engine label (one of each engine's, where other labels tell several apart)."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[sample.labels.get("engine", "")] = sample.value
    return found


def test_three_nodes_behind_one_port() -> None:
    async def work(server: Server, port: int) -> None:
        reader, writer = await opened(port)
        for number in range(6):
            writer.write(post("/v1/completions", {"prompt": [number] * 64, "max_tokens": 4}))
            status, _ = await said(reader)
            assert status == 200
        shares = [gauges["query_tokens"] for gauges in server.machine.gauges_by_node()]  # type: ignore[attr-defined]
        assert sum(shares) == 384
        assert len(shares) == 3
        told = {name: one for name, one in series(server.page.text().decode()).items() if name.startswith("vllm:")}
        for name in ("prefix_cache_queries_total", "prompt_tokens_total"):
            assert [told[f"vllm:{name}"][str(engine)] for engine in range(3)] == shares
        assert [told["vllm:generation_tokens_total"][str(engine)] for engine in range(3)] == [8, 8, 8]
        assert [told["vllm:e2e_request_latency_seconds_count"][str(engine)] for engine in range(3)] == [2, 2, 2]
        for name, one in told.items():
            assert one.keys() == ({""} if "admission_rejections" in name else {"0", "1", "2"}), name
        assert "kvbench:num_requests_held" in server.page.text().decode()

    served(work, cluster={"replicas": 3})


def test_vllms_priority_and_cache_salt_reach_the_engine() -> None:
    """One at a time: whoever has the least priority number goes first. Content of another salt is not found."""

    async def work(server: Server, port: int) -> None:
        ended: list[int] = []

        async def ask(number: int, **more: Any) -> int:
            reader, writer = await opened(port)
            writer.write(post("/v1/completions", {"prompt": [7] * 64, "max_tokens": 100, **more}))
            status, body = await said(reader)
            assert status == 200
            ended.append(number)
            return int(json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"])

        first = asyncio.ensure_future(ask(0, max_tokens=2000))
        await asyncio.sleep(0.1)
        wanted: list[dict[str, Any]] = [{"priority": 5}, {"priority": -1}, {}]
        others = [asyncio.ensure_future(ask(number, **more)) for number, more in enumerate(wanted, 1)]
        cached = await asyncio.gather(first, *others)
        assert ended == [0, 2, 3, 1]
        assert cached == [0, 48, 48, 48]
        assert await ask(4, cache_salt="someone else") == 0
        assert await ask(5, cache_salt="someone else") == 48

    served(work, VirtualLoop, 1.0, settings={"order": "priority", "max_num_seqs": 1})


def unpacked(frames: list[bytes]) -> tuple[bytes, int, list[Any]]:
    return frames[0], int.from_bytes(frames[1], "big"), msgspec.msgpack.decode(frames[2]) if frames[2] else []


def test_kv_events_reach_a_subscriber_and_can_be_replayed(tmp_path: Path) -> None:
    """Frames as a real vLLM's (facts: topic, number in eight bytes, msgpack of time, events, rank); the end of a replay is -1."""
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"

    def feed(loop: asyncio.AbstractEventLoop) -> Feed:
        return Feed([Ledger(16)], Publisher(events, replay, "kv", loop.add_reader, loop.remove_reader))

    async def work(server: Server, port: int) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as heard, context.socket(zmq.DEALER) as again:
            for socket in (heard, again):
                socket.linger, socket.rcvtimeo = 0, 5000
            await listened(heard, again, port)

    async def listened(heard: Any, again: Any, port: int) -> None:
        heard.connect(events)
        heard.subscribe(b"kv")
        again.connect(replay)
        await asyncio.sleep(0.1)
        reader, writer = await opened(port)
        writer.write(post("/v1/completions", {"prompt": list(range(100)), "max_tokens": 20, "cache_salt": "me"}))
        await said(reader)
        writer.write(post("/reset_prefix_cache", b""))
        await said(reader)
        frames = [unpacked(await asyncio.to_thread(heard.recv_multipart)) for _ in range(3)]
        assert [(topic, number) for topic, number, _ in frames] == [(b"kv", 0), (b"kv", 1), (b"kv", 2)]
        (first,), (second,), (third,) = (batch[1] for _, _, batch in frames)
        assert {batch[2] for _, _, batch in frames} == {0}
        assert list(first) == [
            "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
            "extra_keys", "group_idx", "kv_cache_spec_kind",
        ]  # fmt: skip
        assert (first["type"], first["parent_block_hash"], first["token_ids"]) == ("BlockStored", None, list(range(96)))
        assert first["extra_keys"] == [["me"], None, None, None, None, None]
        assert second["parent_block_hash"] == first["block_hashes"][-1]
        assert second["token_ids"][:4] == [96, 97, 98, 99]
        assert third == {"type": "AllBlocksCleared"}
        again.send_multipart([b"", (1).to_bytes(8, "big")])
        got = [await asyncio.to_thread(again.recv_multipart) for _ in range(3)]
        assert [frame[2] for frame in got] == [(1).to_bytes(8, "big"), (2).to_bytes(8, "big"), b"\xff" * 8]

    served(work, feed=feed)


def test_answers_are_made_up_when_they_are_due_kv_events_or_not(tmp_path: Path) -> None:
    """128 answers of 100,000 tokens: making them, and the keys of their blocks, would hold the server up for seconds."""

    def feed(loop: asyncio.AbstractEventLoop) -> Feed:
        return Feed([Ledger(16)], Publisher(f"ipc://{tmp_path}/events", None, "", loop.add_reader, loop.remove_reader))

    async def work(server: Server, port: int) -> None:
        _, writer = await opened(port)
        writer.write(post("/v1/completions", {"prompt": list(range(1000)), "n": 128, "max_tokens": 100_000}))
        await asyncio.sleep(0.1)
        (ledger,) = server.feed.ledgers if server.feed is not None else ()
        ((_, part, _),) = server.replies.live.values()
        (known,) = ledger._known.values()
        assert not any(choice.written.ids for choice in part.choices)
        assert sum(len(chain.keys) for chain in known.chains) == len(known.places) - 1 == 62  # the prompt's blocks
        await asyncio.sleep(2.0)
        assert all(choice.got > 40 for choice in part.choices)
        assert all(len(choice.written.ids) == 256 for choice in part.choices)
        blocks = (1000 + part.choices[0].got) // 16
        assert len(known.places) - 1 == 62 + 128 * (blocks - 62)
        assert max(len(chain.keys) for chain in known.chains) == blocks

    served(work, VirtualLoop, 1.0, feed, settings={"blocks": 20_000})


@pytest.mark.parametrize(
    ("sent", "late"),
    [
        (b"", True),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n", True),  # no end of the head
        (b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{", True),  # nor of the body
        (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", False),  # between requests a client may take its time
    ],
)
def test_a_request_that_does_not_end_is_cut_off_after_a_minute(sent: bytes, late: bool) -> None:
    """However often a byte of it comes."""

    async def work(server: Server, port: int) -> float:
        loop = asyncio.get_running_loop()
        reader, writer = await opened(port)
        began = loop.time()
        writer.write(sent)
        if not late:
            assert (await said(reader))[0] == 200
        dripping = asyncio.ensure_future(drip(writer)) if late and sent else None
        try:
            await asyncio.wait_for(reader.read(1), 200)
        except TimeoutError:
            pass
        if dripping is not None:
            dripping.cancel()
        return loop.time() - began

    async def drip(writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(20)
            writer.write(b"x")

    took = served(work, VirtualLoop, 1.0)
    assert took == pytest.approx(60 if late else 200, abs=0.1)


def test_an_endpoint_that_cannot_be_had_is_said() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(ValueError, match="tcp://"):
            Publisher("nonsense", None, "", loop.add_reader, loop.remove_reader)

    coroutine: Coroutine[Any, Any, None] = work()
    asyncio.run(coroutine)


def test_a_request_in_part_behind_a_long_answer_has_its_minute_after_it() -> None:
    async def work(server: Server, port: int) -> list[int]:
        reader, writer = await opened(port)
        ask, rest = post("/tokenize", {"prompt": "the sea"}), b"GET /health HTTP/1.1\r\nhost: x\r\n"
        writer.write(post("/v1/completions", {"prompt": "the sea", "max_tokens": 6000}) + ask + rest)
        loop = asyncio.get_running_loop()
        began, codes = loop.time(), [(await said(reader))[0]]
        assert loop.time() - began > 70
        codes.append((await said(reader))[0])
        await asyncio.sleep(50)
        writer.write(b"\r\n")
        return [*codes, (await said(reader))[0]]

    assert served(work, VirtualLoop, 1.0) == [200, 200, 200]
