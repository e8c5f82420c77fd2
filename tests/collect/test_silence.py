"""What falls silent, and stays so to the end, is told: in events, in the verdict, in the report."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.clock import Clock, VirtualLoop
from kvbench.collect import CollectorError, Place
from kvbench.collect.agent import Agent as Spec
from kvbench.collect.agent import AgentCollector
from kvbench.collect.beat import Beat
from kvbench.collect.gpus import Gpus
from kvbench.collect.gputhread import GpuThread, open_gpus
from kvbench.collect.kvevents import KvEvents
from kvbench.collect.nvml import Nvml
from kvbench.collect.peer import Bearing
from kvbench.core import CacheAccess, Event, Sample
from kvbench.crew import Crew
from kvbench.unanswered import why
from tests.collect.fake_nvml import Fake
from tests.collect.pages import read


def beaten(every: float, good: float, end: float) -> list[dict[str, Any]]:
    """Events of a source that answers before `good`, and then never again."""
    told: list[dict[str, Any]] = []

    async def work() -> None:
        clock = Clock(asyncio.get_running_loop())

        async def read() -> None:
            if clock.now() >= good:
                raise OSError("refused")

        beat = Beat("x", clock, every, read)
        beat.start(lambda item: told.append(item.data))  # type: ignore[union-attr]
        await clock.sleep_until(end)
        await beat.stop()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work())
    return told


@pytest.mark.parametrize(
    ("every", "good", "end", "states"),
    [
        (1.0, 5.5, 7.5, ["failing", "stopped"]),  # 2.5 periods
        (1.0, 5.5, 9.5, ["failing", "gap", "stopped"]),  # 4.5: it may come back
        (1.0, 5.5, 15.0, ["failing", "gap", "lost", "stopped"]),  # 10 s
        (0.1, 5.05, 14.0, ["failing", "gap", "stopped"]),  # 90 periods, but 9 s
        (5.0, 11.0, 55.0, ["failing", "gap", "stopped"]),  # 45 s, but 9 periods
        (5.0, 11.0, 61.0, ["failing", "gap", "lost", "stopped"]),
        (1.0, 0.0, 1.5, ["failing", "lost", "stopped"]),  # three readings, and never one
        (1.0, 0.0, 5.0, ["failing", "gap", "lost", "stopped"]),
    ],
)
def test_silence_up_to_the_end_is_a_gap_and_after_a_while_a_loss(
    every: float, good: float, end: float, states: list[str]
) -> None:
    told = beaten(every, good, end)
    assert [data["state"] for data in told] == states
    assert (told[-1]["longest_gap_s"] > 0) == ("gap" in states)
    assert all("refused" in data["reason"] for data in told if data["state"] == "lost")


def test_one_that_comes_back_at_once_is_back_and_has_no_gap() -> None:
    told: list[dict[str, Any]] = []

    async def work() -> None:
        clock = Clock(asyncio.get_running_loop())

        async def read() -> None:
            if 1.5 < clock.now() < 3.5:
                raise OSError("refused")

        beat = Beat("x", clock, 1.0, read)
        beat.start(lambda item: told.append(item.data))  # type: ignore[union-attr]
        await clock.sleep_until(5.5)
        await beat.stop()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work())
    assert [data["state"] for data in told] == ["failing", "back", "stopped"]
    assert (told[-1]["failures"], told[-1]["longest_gap_s"]) == (2, 0.0)


# ---- the crew


class Early:
    source, required = "early", False

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    async def open(self) -> dict[str, Any]:
        if self.fails:
            raise CollectorError("no driver")
        return {}

    def start(self, emit: Any) -> None:
        emit(Sample(t=-0.0218, name="x", value=1.0, source="early"))
        emit(CacheAccess(t=-1.0, op="alloc"))
        emit(Sample(t=0.5, name="x", value=1.0, source="early"))

    def tell(self, item: Any) -> None:
        return

    async def stop(self) -> None:
        return


def crewed(*members: Any) -> list[Any]:
    told: list[Any] = []

    async def work() -> None:
        crew = Crew(Clock(asyncio.get_running_loop()), members)
        await crew.open()
        crew.start(told.append)
        await crew.stop()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work())
    return told


def test_nothing_is_told_of_a_time_before_the_run() -> None:
    assert [item.t for item in crewed(Early()) if not isinstance(item, Event)] == [0.0, 0.0, 0.5]


def test_a_collector_that_did_not_start_is_an_event() -> None:
    data = [item.data for item in crewed(Early(fails=True)) if isinstance(item, Event)]
    assert [(each["state"], each["reason"]) for each in data] == [("not_started", "no driver")]


def test_an_agents_page_of_before_the_start_is_of_the_start() -> None:
    told: list[Any] = []
    loop = asyncio.new_event_loop()
    collector = AgentCollector(Spec.model_validate({"url": "http://h:1"}), Clock(loop))
    loop.close()
    collector.emit = told.append
    collector.bearing, collector._zero = Bearing("i", 0, 0, 0), 100_000_000_000  # the run began at 100 s of its clock
    collector.told = {"every_s": 0.1}
    collector.fleet = SimpleNamespace(readings=lambda: [SimpleNamespace(labels={}, name="gpu_power_w", value=5.0)], events=[])  # type: ignore[assignment]
    collector._tell_page(read("kvbench_agent_reading_timestamp_seconds 99.9782\n", None), 0.01)
    assert [(item.t, item.value) for item in told] == [(0.0, 5.0)]


def test_an_agent_without_any_gpu_left_is_lost() -> None:
    told: list[Any] = []
    loop = asyncio.new_event_loop()
    collector = AgentCollector(Spec.model_validate({"url": "http://h:1"}), Clock(loop))
    loop.close()
    collector.emit = told.append
    page = 'kvbench_gpu_up{gpu="0",uuid="A"} 0\nkvbench_gpu_up{gpu="1",uuid="B"} %d\n'
    assert collector._lost_gpus(read(page % 1, None)) is False
    assert [item.data["state"] for item in told] == ["gpu_lost"]
    assert collector._lost_gpus(read(page % 0, None)) is True
    assert collector._lost_gpus(read(page % 0, None)) is True
    assert [item.data["state"] for item in told] == ["gpu_lost", "gpu_lost", "lost"]


# ---- NVML


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    pytest.importorskip("pynvml")
    monkeypatch.setenv("KVBENCH_FAKE_NVML", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Fake(tmp_path / "state")


async def collect(collector: Any, clock: Clock, meanwhile: Any) -> list[Any]:
    told: list[Any] = []
    try:
        await collector.open()
        clock.start()
        collector.start(told.append)
        await asyncio.sleep(0.2)
        meanwhile()
        await asyncio.sleep(0.2)
    finally:
        await collector.stop()
    return told


@pytest.mark.parametrize(("gone", "lost"), [([1], 0), ([0, 1], 1)])
def test_a_collector_whose_gpus_are_all_lost_is_lost(fake: Fake, gone: list[int], lost: int) -> None:
    fake.say(count=2)

    async def work() -> list[Any]:
        clock = Clock(asyncio.get_running_loop())
        place = Place(clock, Path())
        return await collect(Nvml(every=0.05).build(place), clock, lambda: fake.say({f"gpu{n}.error": 15 for n in gone}))

    data = [item.data for item in asyncio.run(work()) if isinstance(item, Event)]
    states = [each["state"] for each in data]
    assert (states.count("gpu_lost"), states.count("lost"), states[-1]) == (len(gone), lost, "stopped")
    assert all("every GPU is lost: GPU is lost" in each["reason"] for each in data if each["state"] == "lost")
    assert data[-1]["every_first_s"] == data[-1]["every_s"] == 0.05


def test_a_missing_library_is_told_once_and_without_stutter() -> None:
    class AbsentError(Exception):
        value = 12

    def fail() -> None:
        raise AbsentError("NVML Shared Library Not Found")

    codes = {f"NVML_ERROR_{name}": n for n, name in enumerate(("DRIVER_NOT_LOADED", "NO_PERMISSION", "LIB_RM_VERSION_MISMATCH"))}
    nvml = SimpleNamespace(nvmlInit=fail, NVMLError=AbsentError, NVML_ERROR_LIBRARY_NOT_FOUND=12, **codes)
    with pytest.raises(CollectorError, match=r"^there is no libnvidia-ml\.so\.1: "):
        Gpus(nvml)


# ---- KV events


@pytest.mark.parametrize(
    ("n_in", "broken", "reason"), [(None, 0, ""), (8, 0, "no message came while 1 "), (8, 3, "3 messages came, and none")]
)
def test_no_message_while_requests_were_answered_is_a_loss(tmp_path: Path, n_in: int | None, broken: int, reason: str) -> None:
    pytest.importorskip("zmq")

    async def work() -> list[Any]:
        clock = Clock(asyncio.get_running_loop())
        collector: Any = KvEvents(endpoint=f"ipc://{tmp_path}/nobody").build(Place(clock, tmp_path))

        def answered() -> None:
            collector.began(SimpleNamespace(id=1), None)
            collector.ended(SimpleNamespace(id=1), SimpleNamespace(n_in=n_in, sent_ns=0, cached=None))
            collector.broken = broken

        return await collect(collector, clock, answered)

    lost = [item.data["reason"] for item in asyncio.run(work()) if isinstance(item, Event) and item.data["state"] == "lost"]
    assert len(lost) == bool(reason)
    assert all(text.startswith(reason) for text in lost)


# ---- its words


def test_a_refused_connection_is_told_in_plain_words() -> None:
    async def work() -> str:
        import aiohttp

        async with aiohttp.ClientSession() as session:
            try:
                await session.get("http://127.0.0.1:1")
            except aiohttp.ClientError as error:
                return why(error)
        return ""

    assert asyncio.run(work()) == "connection refused"


def test_a_driver_that_does_not_return_leaves_a_gap_up_to_the_end(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.collect.gputhread.PATIENCE", 0.05)
    let_go = threading.Event()

    async def work() -> list[Any]:
        told: list[Any] = []
        clock = Clock(asyncio.get_running_loop())
        gpus = open_gpus(None, clock.now())
        thread = GpuThread(gpus, "nvml", clock, 0.05, told.extend)
        thread.start()
        await asyncio.sleep(0.1)
        monkeypatch.setattr(gpus, "read", lambda *_: let_go.wait(5) and ())
        await asyncio.sleep(0.3)
        with pytest.raises(CollectorError, match="has not returned"):
            await thread.stop()
        let_go.set()
        await asyncio.to_thread(thread._thread.join, 5)
        return told

    gaps = [item.data for item in asyncio.run(work()) if isinstance(item, Event) and item.data["state"] == "gap"]
    assert [(gap["periods"] > 3, gap["reason"]) for gap in gaps[:1]] == [(True, "the driver does not answer")]
