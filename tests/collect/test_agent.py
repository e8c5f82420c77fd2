"""`kvbench agent` and its collector over loopback, on a compiled fake of NVIDIA's library."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvbench.agent.agent import Agent
from kvbench.agent.http import Server
from kvbench.agent.ring import Ring
from kvbench.clock import Clock
from kvbench.collect import CollectorError, Place
from kvbench.collect.agent import Agent as Spec
from kvbench.collect.agent import AgentCollector
from kvbench.collect.gputhread import open_gpus
from kvbench.collect.peer import Bearing, Peer
from kvbench.collect.prometheus import Prometheus
from kvbench.core import CacheAccess, Event, Sample
from tests.collect.fake_nvml import Fake
from tests.stub.stub import DONE, FIN, C, Stub, U, answer_json, stream

pytest.importorskip("pynvml")
ANSWER = stream(C("a") + C("b") + FIN + U(8, 2) + DONE)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setenv("KVBENCH_FAKE_NVML", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Fake(tmp_path / "state")


class Running:
    """An agent in this loop, and what it said to people."""

    def __init__(self, every: float, keep: float, gpus: bool = True, port: int = 0) -> None:
        self.said: list[str] = []
        self.clock = Clock(asyncio.get_running_loop())
        opened = open_gpus(None, self.clock.now()) if gpus else None
        self.agent = Agent(self.clock, opened, every, keep, None, self.said.append)
        self.server = Server(self.agent)
        self.port = port

    async def start(self) -> "Running":
        self.port = await self.server.listen("127.0.0.1", self.port)
        self.url = f"http://127.0.0.1:{self.port}"
        self.agent.start()
        return self

    async def stop(self) -> None:
        await self.server.close()
        await self.agent.stop()


@asynccontextmanager
async def running(every: float = 0.1, keep: float = 60.0, **how: Any) -> AsyncIterator[Running]:
    found = await Running(every, keep, **how).start()
    try:
        yield found
    finally:
        await found.stop()


Told = list[Sample | Event | CacheAccess]


async def collect(
    spec: Any, seconds: float, meanwhile: Callable[[], Awaitable[None]] | None = None
) -> tuple[dict[str, Any], Told]:
    """(what open told, what was emitted) in a run of so many seconds."""
    told: Told = []
    clock = Clock(asyncio.get_running_loop())
    collector = spec.build(Place(clock, Path()))
    try:
        facts = await collector.open()
        clock.start()
        facts["wall"] = clock.wall
        collector.start(told.append)
        if meanwhile is not None:
            await meanwhile()
        await asyncio.sleep(seconds)
    finally:
        await collector.stop()
    return facts, told


def states(told: Told, state: str) -> list[dict[str, Any]]:
    return [item.data for item in told if isinstance(item, Event) and item.data.get("state") == state]


def series(told: Told, name: str, **labels: str) -> list[tuple[float, float | None]]:
    found = [item for item in told if isinstance(item, Sample) and item.name == name]
    return [(item.t, item.value) for item in found if (labels.items() <= item.labels.items() if labels else not item.labels)]


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.text()


# ---- the page


def test_the_page_is_prometheus_text_with_types_help_and_labels(fake: Fake) -> None:
    fake.say({"count": 2, "gpu0.power": 250_000, "gpu1.power": 410_000, "mem.used": 40e9, "energy.at": 7_000_000})

    async def work() -> str:
        async with running() as found:
            await asyncio.sleep(0.3)
            told = json.loads((await get(f"{found.url}/health"))[1])
            assert [gpu["unsupported"] for gpu in told["gpus"]] == [{}, {}]  # GPM is not given up for being asked too soon
            return (await get(f"{found.url}/metrics"))[1]

    families = {family.name: family for family in text_string_to_metric_families(asyncio.run(work()))}
    power = families["kvbench_gpu_power_w"]
    assert (power.type, [(s.labels, s.value) for s in power.samples]) == (
        "gauge",
        [({"gpu": "0", "uuid": "GPU-00000000-fake"}, 250.0), ({"gpu": "1", "uuid": "GPU-10000000-fake"}, 410.0)],
    )
    energy = families["kvbench_gpu_energy_j"]  # the parser takes _total off
    assert (energy.type, energy.samples[0].name, energy.samples[0].value) == ("counter", "kvbench_gpu_energy_j_total", 7000.0)
    assert families["kvbench_gpu_memory"].samples[0].value == pytest.approx((40e9 + 6e8) / 80e9)
    for name in (
        "host_cpu",
        "host_load_1m",
        "agent_cpu_seconds",
        "agent_nvml_cpu_seconds",
        "agent_ring_bytes",
        "agent_memory_bytes",
    ):
        assert f"kvbench_{name}" in families
    bare = [name for name, family in families.items() if not family.documentation or family.documentation == name[8:]]
    assert bare == []


def test_our_prometheus_collector_and_the_agents_read_the_same_numbers(fake: Fake) -> None:
    """What all GPUs come to, by either."""
    fake.say({"count": 2, "gpu0.power": 250_000, "gpu1.power": 410_000, "gpu1.mem.used": 40e9, "gpu0.util": 20, "gpu1.util": 90,
              "gpu1.temp": 71, "energy.at": 7_000_000})  # fmt: skip
    expected = {"gpu_power_w": 660.0, "gpu_utilization": 0.55, "gpu_temperature_c": 71.0, "gpu_energy_j_total": 14_000.0,
                "gpu_memory": (40e9 + 6e8) / 80e9, "gpu_sm_clock_hz": 1.98e9}  # fmt: skip

    async def work() -> list[Told]:
        async with running() as found:
            specs = [Prometheus.model_validate({"url": found.url}), Spec.model_validate({"url": found.url})]
            return [told for _, told in await asyncio.gather(*(collect(spec, 0.3) for spec in specs))]

    for told in asyncio.run(work()):
        assert {name: series(told, name)[-1][1] for name in expected} == pytest.approx(expected)
        assert series(told, "gpu_power_w", gpu="1")[-1][1] == 410.0


# ---- the clock and the ring


def test_every_reading_comes_once_in_order_and_on_the_runs_clock(fake: Fake) -> None:
    """The agent's clock is 123.456 s ahead: the collector says so to within its own bound, and its readings lie in the run."""
    fake.say(count=2)

    async def work() -> tuple[dict[str, Any], Told, list[dict[str, Any]]]:
        async with running() as found:
            found.clock.wall += 123.456
            facts, told = await collect(Spec.model_validate({"url": found.url}), 1.5)
            return facts, told, [json.loads(line) for line in (await get(f"{found.url}/samples"))[1].splitlines()]

    facts, told, lines = asyncio.run(work())
    zero = facts["wall"] + 123.456  # of the run, by the agent's clock, since both took theirs from the machine's
    assert facts["clock"]["offset_s"] == pytest.approx(123.456, abs=facts["clock"]["error_s"] + 0.001)
    assert 0 < facts["clock"]["error_s"] < 0.05
    (end,) = states(told, "clock")
    assert abs(end["drift_s"]) <= facts["clock"]["error_s"] + end["error_s"]
    fine = series(told, "gpu_power_w", gpu="1")
    times = [t for t, _ in fine]
    assert times == sorted(set(times))
    read = [line["t"] - zero for line in lines if line.get("labels", {}).get("gpu") == "1" and "gpu_power_w" in line["values"]]
    mine = [t for t in read if 0.01 < t < times[-1] - 0.01]  # what lies at an end may be in or out by the error
    assert [t for t in times if 0.01 < t < times[-1] - 0.01] == pytest.approx(mine, abs=facts["clock"]["error_s"] + 0.003)
    assert len(mine) >= 10
    (account,) = states(told, "fine")
    assert account["missed"] == 0
    assert account["samples"] == len([item for item in told if isinstance(item, Sample) and item.labels and item.t >= 0])
    assert [line["n"] for line in lines] == list(range(lines[0]["n"], lines[0]["n"] + len(lines)))


def test_a_clock_that_drifts_is_told_and_taken_out(fake: Fake) -> None:
    """50 ms in a second, as no clock does. What was read half way, by a clock then 25 ms ahead, was read half way."""
    first, last = Bearing("i", 0, 1_000, 0), Bearing("i", 1_000_000_000, 50_001_000, 0)
    built = AgentCollector(Spec.model_validate({"url": "http://h:1"}), Clock(asyncio.new_event_loop()))
    halves = [built._run(at + 1_000 + at / 20, first, last) for at in (0, 500_000_000, 1_000_000_000)]
    built.clock.loop.close()
    assert halves == pytest.approx([0.0, 0.5, 1.0], abs=1e-6)

    async def work() -> Told:
        async with running() as found:

            async def drift() -> None:
                for _ in range(10):
                    await asyncio.sleep(0.1)
                    found.clock.wall += 0.005

            return (await collect(Spec.model_validate({"url": found.url}), 0.05, drift))[1]

    told = asyncio.run(work())
    (end,) = states(told, "clock")
    assert end["drift_s"] == pytest.approx(0.050, abs=0.005 + 2 * end["error_s"])


def test_of_eight_exchanges_the_one_with_the_shortest_round_trip_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another instance in between is another clock: what was asked of the one before says nothing."""

    def asked(errors: list[int], instances: str) -> Bearing:
        given = (Bearing(name, n, 1000 + n, error) for n, (error, name) in enumerate(zip(errors, instances, strict=True)))
        peer = Peer(None, "http://h:1")  # type: ignore[arg-type]

        async def exchange() -> Bearing:
            return next(given)

        monkeypatch.setattr(peer, "_exchange", exchange)
        return asyncio.run(peer.bearing())

    assert asked([9, 4, 7, 2, 8, 3, 5, 6], "aaaaaaaa") == ("a", 3, 1003, 2)
    assert asked([1, 4, 7, 2, 8, 3, 5, 6], "aaaabbbb") == ("b", 5, 1005, 3)


def test_a_ring_forgets_what_is_too_old_and_never_grows_too_large() -> None:
    ring = Ring(10.0, most=1000)
    for n in range(200):
        ring.values(100.0 + n / 10, {"gpu": "0"}, {"gpu_power_w": float(n)})
        assert ring.bytes <= 1000
    assert ring.reach <= 10.0
    kept = [json.loads(line) for line in ring.between(0, 1e9)]
    assert [line["n"] for line in kept] == list(range(201 - len(kept), 201))
    ring = Ring(10.0)
    for n in range(200):
        ring.values(100.0 + n / 10, {"gpu": "0"}, {"gpu_power_w": float(n)})
    assert ring.reach == pytest.approx(10.0)
    assert [json.loads(line)["t"] for line in ring.between(115.0, 115.3)] == pytest.approx([115.0, 115.1, 115.2])


def test_a_run_longer_than_what_the_agent_keeps_loses_nothing(fake: Fake) -> None:
    async def work() -> Told:
        async with running(every=0.05, keep=1.0) as found:
            return (await collect(Spec.model_validate({"url": found.url, "every": 0.1}), 2.0))[1]

    told = asyncio.run(work())
    times = [t for t, _ in series(told, "gpu_power_w", gpu="0")]
    assert times == sorted(set(times))
    assert len(times) >= 30
    assert times[0] < 0.15
    assert times[-1] > 1.8
    assert states(told, "fine")[0]["missed"] == 0


def test_the_first_cpu_of_the_machine_is_measured(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr("psutil.cpu_percent", lambda: asked.append(time.monotonic()) or 100.0 * (len(asked) - 1))

    async def work() -> list[float]:
        async with running(gpus=False) as found:
            await asyncio.sleep(0.3)
            return [row.value for row in found.agent.rows() if row.name == "host_cpu"]

    assert asyncio.run(work()) == [1.0]  # the first of psutil, which is of nothing, is told nowhere
    assert asked[1] - asked[0] > 0.09


def test_what_had_left_the_ring_is_counted(fake: Fake) -> None:
    """Fetched once, at the end, from an agent that keeps half a second: the numbers of its lines say how many are missing."""

    async def work() -> Told:
        async with running(every=0.05, keep=0.5) as found:
            told: Told = []
            clock = Clock(asyncio.get_running_loop())
            built = AgentCollector(Spec.model_validate({"url": found.url, "every": 0.1}), clock)
            await built.open()
            clock.start()
            built.start(told.append)
            built.told["keep_s"] = 1000.0  # as if it kept more
            await asyncio.sleep(0.2)
            await built._take_fine(0.0)
            await asyncio.sleep(1.5)
            await built.stop()
            return told

    told = asyncio.run(work())
    (account,) = states(told, "fine")
    assert 8 <= account["missed"] <= 45, account  # a second of 50 ms, and the machine's lines


# ---- what goes wrong


def test_an_agent_that_dies_and_comes_back_is_told(fake: Fake) -> None:
    async def work() -> Told:
        first = await running_once()
        again: list[Running] = []

        async def restart() -> None:
            await asyncio.sleep(0.5)
            await first.stop()
            await asyncio.sleep(0.7)
            again.append(await Running(0.1, 60.0, port=first.port).start())

        try:
            return (await collect(Spec.model_validate({"url": first.url, "every": 0.1}), 0.8, restart))[1]
        finally:
            await again[0].stop()

    async def running_once() -> Running:
        return await Running(0.1, 60.0).start()

    told = asyncio.run(work())
    assert states(told, "failing")
    (gap,) = [data for data in states(told, "gap") if "restarted" in data["reason"]]
    assert gap["start"] == pytest.approx(0.0, abs=0.05)  # nothing had been fetched
    assert 1.1 < gap["end"] < 2.5
    times = [t for t, _ in series(told, "gpu_power_w", gpu="0")]
    assert times == sorted(set(times))
    assert times[0] >= gap["end"] - 0.01
    assert len(times) >= 5
    assert states(told, "fine")[0]["restarts"] == 1
    joined = [t for t, _ in series(told, "gpu_power_w")]
    assert min(joined) < 0.5  # from the page of the first


def test_an_agent_that_is_gone_at_the_end_costs_its_fine_readings(fake: Fake) -> None:
    async def work() -> Told:
        found = await Running(0.1, 60.0).start()
        return (await collect(Spec.model_validate({"url": found.url, "every": 0.1}), 0.3, found.stop))[1]

    told = asyncio.run(work())
    silent, lost = states(told, "lost")
    assert silent["reason"].startswith("none of ")
    assert lost["reason"].startswith("all its fine readings are missing: ")


def test_a_lost_gpu_leaves_the_page_and_is_told_once(fake: Fake) -> None:
    fake.say(count=2)

    async def work() -> tuple[Told, str]:
        async with running() as found:

            async def lose() -> None:
                await asyncio.sleep(0.4)
                fake.say({"gpu1.error": 15})
                await asyncio.sleep(0.3)

            _, told = await collect(Spec.model_validate({"url": found.url, "every": 0.1}), 0.3, lose)
            return told, (await get(f"{found.url}/metrics"))[1]

    told, page = asyncio.run(work())
    (lost,) = states(told, "gpu_lost")
    assert lost["uuid"] == "GPU-10000000-fake"
    assert series(told, "gpu_power_w")[-1][1] == 300.0
    assert 'kvbench_gpu_up{gpu="1",uuid="GPU-10000000-fake"} 0.0' in page
    assert 'kvbench_gpu_power_w{gpu="1"' not in page


def test_a_page_whose_gpus_are_not_read_any_more_is_no_reading(fake: Fake) -> None:
    async def work() -> Told:
        async with running() as found:

            async def stall() -> None:
                await asyncio.sleep(0.3)
                assert found.agent.thread is not None
                found.agent.thread._end.set()

            return (await collect(Spec.model_validate({"url": found.url, "every": 0.1}), 0.8, stall))[1]

    told = asyncio.run(work())
    assert "its GPUs have not been read for" in states(told, "failing")[0]["reason"]
    assert max(t for t, _ in series(told, "gpu_power_w")) < 0.7  # and not what was read then, again and again


def test_a_driver_that_hangs_is_not_well(fake: Fake) -> None:
    async def work() -> tuple[int, str]:
        async with running() as found:
            await asyncio.sleep(0.2)
            found.agent.clock.origin -= 20_000_000_000  # 20 s pass at once
            return await get(f"{found.url}/health")

    status, text = asyncio.run(work())
    assert (status, json.loads(text)["status"]) == (503, "failing")
    assert "has not answered for" in json.loads(text)["reason"]


@pytest.mark.parametrize(("reply", "why"), [("closed", "connection refused"), ("other", "is no kvbench agent")])
def test_what_is_no_agent_is_refused(fake: Fake, reply: str, why: str) -> None:
    async def work() -> None:
        if reply == "closed":
            await collect(Spec.model_validate({"url": "http://127.0.0.1:1"}), 0)
        async with Stub(ANSWER, gets=answer_json({})) as stub:
            await collect(Spec.model_validate({"url": stub.url}), 0)

    with pytest.raises(CollectorError, match=why):
        asyncio.run(work())


def test_without_fine_readings_the_page_gives_each_gpu_and_the_machine(fake: Fake) -> None:
    fake.say(count=2)

    async def work() -> Told:
        async with running() as found:
            return (await collect(Spec.model_validate({"url": found.url, "every": 0.1, "fine": False}), 0.6))[1]

    told = asyncio.run(work())
    times = [t for t, _ in series(told, "gpu_power_w", gpu="1")]
    assert times == sorted(set(times))
    assert 3 <= len(times) <= 9
    assert any(isinstance(item, Sample) and item.name == "host_cpu" and item.labels for item in told)
    assert not states(told, "fine")


# ---- who asks


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/samples?since=yesterday", 400, "is not an instant"),
        ("/samples?since=nan", 400, "is not an instant"),
        ("/samples?until=inf", 400, "is not an instant"),
        ("/samples?since=1&since=2", 400, "is not an instant"),
        ("/samples?since=5&until=4", 400, "until is before since"),
        ("/samples?from=4", 400, "'from' is not known here"),
        ("/", 404, "there are /metrics"),
        ("/../etc/passwd", 404, "there are /metrics"),
        ("/samples?since=" + "9" * 4000, 400, "is not an instant"),
        ("/samples?since=-1e308&until=1e308", 200, '"n":'),
        ("/samples?until=0", 200, ""),
    ],
)
def test_odd_questions_have_plain_answers(fake: Fake, path: str, status: int, text: str) -> None:
    async def work() -> tuple[int, str]:
        async with running() as found:
            await asyncio.sleep(0.15)
            return await get(found.url + path)

    found, said = asyncio.run(work())
    assert found == status, said
    assert text in said
    assert len(said) < 4000


def test_a_huge_head_garbage_and_clients_that_do_not_read_hold_nobody_up(fake: Fake) -> None:
    async def work() -> tuple[list[bytes], int, float, int]:
        async with running() as found:
            for n in range(60_000):  # about 7 MB to send
                found.agent.ring.values(found.agent.stamp(0.0), {"gpu": "0"}, {"gpu_power_w": float(n)})
            said, writers = [], []
            for head in (b"GET /metrics HTTP/1.1\r\nx: " + b"y" * 100_000, b"\x16\x03\x01\x02\x00garbage\r\n\r\n",
                         b"POST /metrics HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"):  # fmt: skip
                reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
                writer.write(head)
                said.append(await reader.readline())
                writers.append(writer)
            for _ in range(20):  # ask, and do not read
                sock = socket.socket()
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.setblocking(False)
                await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", found.port))
                reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
                writer.write(b"GET /samples HTTP/1.1\r\nhost: x\r\n\r\n")
                writers.append(writer)
            readings, began = found.agent.thread.readings if found.agent.thread else 0, found.clock.now()
            await asyncio.sleep(0.5)
            status, _ = await get(f"{found.url}/metrics")
            spent = found.clock.now() - began
            came = (found.agent.thread.readings if found.agent.thread else 0) - readings
            for writer in writers:
                writer.transport.abort()
            return said, status, spent, came

    said, status, spent, came = asyncio.run(work())
    assert [line.split()[1] for line in said] == [b"400", b"400", b"405"]
    assert status == 200
    assert spent < 2.0
    assert came >= 2  # the GPUs were read on


def test_a_client_that_takes_nothing_is_cut_off(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.agent.http.SLOW", 0.2)

    async def work() -> int:
        async with running() as found:
            for n in range(60_000):
                found.agent.ring.values(found.agent.stamp(0.0), {"gpu": "0"}, {"gpu_power_w": float(n)})
            _, writer = await asyncio.open_connection("127.0.0.1", found.port, limit=1024)
            writer.write(b"GET /samples HTTP/1.1\r\nhost: x\r\n\r\n")
            for _ in range(40):
                await asyncio.sleep(0.05)
                if found.server._answering == 0:
                    break
            writer.transport.abort()
            return found.server._answering

    assert asyncio.run(work()) == 0


def test_connections_that_never_ask_are_closed_and_too_many_are_refused(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.agent.http.MUTE", 0.3)
    monkeypatch.setattr("kvbench.agent.http.CLIENTS", 20)

    async def work() -> tuple[int, int]:
        async with running() as found, aiohttp.ClientSession() as session:
            async with session.get(f"{found.url}/time") as answer:
                assert answer.status == 200
            pairs = [await asyncio.open_connection("127.0.0.1", found.port) for _ in range(30)]
            pairs[0][1].write(b"GET /time HT")
            await asyncio.sleep(0.1)
            refused = sum(reader.at_eof() for reader, _ in pairs)
            await asyncio.sleep(0.5)
            closed = sum(reader.at_eof() or reader.exception() is not None for reader, _ in pairs)
            async with session.get(f"{found.url}/time") as answer:  # the one that asked is still there
                assert answer.status == 200
            for _, writer in pairs:
                writer.transport.abort()
            return refused, closed

    assert asyncio.run(work()) == (11, 30)
