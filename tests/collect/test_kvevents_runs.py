"""The collector on real sockets: `kvbench serve` tells the same of its cache by its events, its page and its own file; messages
that are lost are replayed or counted; another publisher is noticed."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from kvbench.clock import Clock
from kvbench.collect import CollectorError, Place
from kvbench.collect.kvevents import KvEvents
from kvbench.collect.kvframes import Batch
from kvbench.core import CacheAccess, Event
from kvbench.metrics import kv
from kvbench.report.files import load as load_run
from tests.whole import ROOT, finished, play

zmq = pytest.importorskip("zmq")

SERVED = """\
name: served
target: {kind: sim, model: smollm2-135m, hardware: l4, engine: vllm, settings: {blocks: 120}}
workload: {arrivals: {shape: constant, rate: 1/s}, prompt: 16, output: 8}
phases: {steady: {for: 6s}}
"""
ASKED = """\
name: asked
seed: 3
target: {kind: http, url: URL, tokenizer: ids, api: completions}
workload: {arrivals: {shape: constant, rate: 40/s}, prompt: {dist: uniform, min: 3, max: 200},
  output: {dist: uniform, min: 8, max: 40}, prefixes: {groups: 6, tokens: 64, share: 60%}}
collect: [{kind: kv_events, endpoint: EVENTS}, {kind: prometheus}]
phases: {steady: {for: 3s}, drain: {for: 10s}}
"""


def folded(path: Path) -> dict[str, Any]:
    decode = msgspec.json.Decoder(CacheAccess).decode
    return kv.fold([decode(line) for line in path.read_bytes().splitlines()], 10.0, 1.0, None)


def test_events_page_and_own_file_of_kvbench_serve_agree(tmp_path: Path) -> None:
    (tmp_path / "served.yaml").write_text(SERVED)
    events, own = f"ipc://{tmp_path}/kv", tmp_path / "own.jsonl"
    command = [sys.executable, "-m", "kvbench", "serve", str(tmp_path / "served.yaml"), "--port", "0", "--kv-events", events]
    server = subprocess.Popen([*command, "--cache-log", str(own)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split(" at ")[1].split()[0].removesuffix("/v1")
        text = ASKED.replace("URL", url).replace("EVENTS", events)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            run = finished(runner.run(play(text, tmp_path)))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(20)
        server.stdout.close()
    told, kept = folded(run.directory / "cache.jsonl"), folded(own)
    assert told["lookups"] > 500
    assert told["misses"]["evicted"] > 0
    assert told["misses"]["divergence"] > 0
    for name in ("lookups", "hits", "misses", "block_hit_rate", "groups"):  # groups: reuse distances too
        assert told[name] == kept[name], name
    assert told["ops"]["evict"] == kept["ops"]["evict"]
    for name in ("lifetime", "idle_before_evict", "reuse_gap"):  # an event is of when a block was full, not of when it was taken
        assert told[name]["n"] == kept[name]["n"]
        assert told[name]["mean"] == pytest.approx(kept[name]["mean"], abs=0.05), name
    assert told["hits"] * 16 == sum(record.cached for record in run.records)
    account = next(e.data for e in load_run(run.directory).all("collector") if e.data["state"] == "account")
    assert {key: account[key] for key in ("lost", "broken", "unknown", "blind", "unresolved")} == dict.fromkeys(
        ("lost", "broken", "unknown", "blind", "unresolved"), 0
    )
    counted = next(e.data["metrics"] for e in load_run(run.directory).all("collector") if e.data["state"] == "totals")
    assert counted["hit_tokens_total"]["value"] == told["hits"] * 16
    assert counted["query_tokens_total"]["value"] == sum(record.n_in for record in run.records)


class Publisher:
    """vLLM's framing by hand: one message per number, and what a replay may still have."""

    def __init__(self, folder: Path, kept: set[int]) -> None:
        self.context = zmq.Context()
        self.socket, self.router = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        self.endpoint, self.replay = f"ipc://{folder}/pub", f"ipc://{folder}/replay"
        self.socket.bind(self.endpoint)
        self.router.bind(self.replay)
        self.kept = kept

    def send(self, clock: Clock, number: int) -> None:
        self.socket.send_multipart((b"kv", number.to_bytes(8, "big"), self.payload(clock, number)))

    def payload(self, clock: Clock, number: int) -> bytes:
        stored = {
            "type": "BlockStored",
            "block_hashes": [number + 1],
            "parent_block_hash": None,
            "token_ids": [number],
            "block_size": 1,
        }
        return msgspec.msgpack.encode([clock.wall + clock.now(), [stored], 0])

    async def answer(self, clock: Clock) -> None:
        while True:
            try:
                client, _, start = self.router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                await asyncio.sleep(0.01)
                continue
            for number in sorted(n for n in self.kept if n >= int.from_bytes(start, "big")):
                self.router.send_multipart((client, b"", number.to_bytes(8, "big"), self.payload(clock, number)))
            self.router.send_multipart((client, b"", (-1).to_bytes(8, "big", signed=True), b""))


@pytest.mark.parametrize(
    ("sent", "kept", "expected"),
    [
        ([0, 1, 2, 3], set(), {"messages": 4, "lost": 0, "replayed": 0, "restarts": 0}),
        ([0, 3, 4], {0, 1, 2, 3, 4}, {"messages": 5, "lost": 0, "replayed": 2, "restarts": 0}),
        ([0, 3, 4], {2, 3, 4}, {"messages": 4, "lost": 1, "replayed": 1, "restarts": 0}),
        ([5, 6, 0, 1], set(), {"messages": 4, "lost": 0, "replayed": 0, "restarts": 1}),
    ],
)
def test_holes_are_replayed_or_counted(tmp_path: Path, sent: list[int], kept: set[int], expected: dict[str, int]) -> None:
    told: list[Any] = []

    async def go() -> None:
        publisher = Publisher(tmp_path, kept)
        clock = Clock(asyncio.get_running_loop())
        answering = asyncio.ensure_future(publisher.answer(clock))
        collector = KvEvents(endpoint=publisher.endpoint, replay=publisher.replay).build(Place(clock, tmp_path))
        await collector.open()
        clock.start()
        collector.start(told.append)
        await asyncio.sleep(0.3)  # for the subscription
        for number in sent:
            publisher.send(clock, number)
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.6)
        await collector.stop()
        answering.cancel()
        publisher.context.destroy(linger=0)

    asyncio.run(go())
    account = next(item.data for item in told if isinstance(item, Event) and item.data["state"] == "account")
    assert {name: account[name] for name in expected} == expected
    assert sum(isinstance(item, CacheAccess) and item.op == "alloc" for item in told) == expected["messages"]
    assert sum(isinstance(item, CacheAccess) and item.op == "reset" for item in told) == expected["restarts"]


def test_a_publisher_may_connect_to_us(tmp_path: Path) -> None:
    """As vLLM does where its endpoint names a host and no *."""
    told: list[Any] = []

    async def go() -> None:
        clock, endpoint = Clock(asyncio.get_running_loop()), f"ipc://{tmp_path}/here"
        collector = KvEvents(endpoint=endpoint, bind=True).build(Place(clock, tmp_path))
        facts = await collector.open()
        assert facts["bind"] is True
        clock.start()
        collector.start(told.append)
        publisher = Publisher(tmp_path, set())
        publisher.socket.unbind(publisher.endpoint)
        publisher.socket.connect(endpoint)
        await asyncio.sleep(0.3)
        for number in range(3):
            publisher.send(clock, number)
        await asyncio.sleep(0.1)
        await collector.stop()
        publisher.context.destroy(linger=0)

    asyncio.run(go())
    account = next(item.data for item in told if isinstance(item, Event) and item.data["state"] == "account")
    assert (account["messages"], account["lost"]) == (3, 0)


@pytest.mark.parametrize(
    ("ahead", "offset"), [(0.0, 0.0), (-1.5, 0.0), (0.005, 0.0), (40.0, -40.0), (-100.0, 100.0)]
)  # a second and a half behind may be the way; more, or from the future, is the clock
def test_a_servers_clock_that_is_off_is_moved_by_the_least_delay(tmp_path: Path, ahead: float, offset: float) -> None:
    """Events of 10.0, 11.0 and 12.0 s by its clock without the error, which arrive 0, 30 and 10 ms later."""
    loop = asyncio.new_event_loop()
    clock = Clock(loop)
    collector = KvEvents(endpoint="ipc:///x").build(Place(clock, tmp_path))
    placed = []
    for at, delay in ((10.0, 0.0), (11.0, 0.03), (12.0, 0.01)):
        clock.now = lambda now=at + delay: now  # type: ignore[method-assign,misc]
        placed.append(collector._time(Batch(clock.wall + at + ahead, (), 0, 0)))  # type: ignore[attr-defined]
    loop.close()
    expected = [min(t + ahead + offset, t + delay) for t, delay in ((10.0, 0.0), (11.0, 0.03), (12.0, 0.01))]
    assert placed == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("endpoint", ["ipc:///nowhere/at/all/kv", "tcp://256.1.1.1:0"])
def test_an_endpoint_that_cannot_be_had_is_refused(tmp_path: Path, endpoint: str) -> None:
    async def go() -> None:
        collector = KvEvents(endpoint=endpoint, bind=True).build(Place(Clock(asyncio.get_running_loop()), tmp_path))
        try:
            await collector.open()
        finally:
            await collector.stop()

    with pytest.raises(CollectorError, match="is the address right"):
        asyncio.run(go())
