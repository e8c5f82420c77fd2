"""The contract of collectors, held against every one of COLLECTORS: none breaks a run, whatever there is or is not to read; and
what the crew makes of those that misbehave."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.clock import Clock
from kvbench.collect import Collector, CollectorError, Emit, Place
from kvbench.collect.beat import Beat
from kvbench.collect.collectors import COLLECTORS
from kvbench.core import Event, Sample, Window
from kvbench.crew import Crew

NOWHERE: dict[str, dict[str, Any]] = {  # of each kind: settings that point at nothing
    "agent": {"url": "http://127.0.0.1:9"},
    "allocator": {"stats": "/nowhere/stats.json"},
    "kv_events": {"endpoint": "ipc:///nowhere/kv", "bind": True},
    "nsight": {"session": "kvbench-no-such-session"},
    "prometheus": {"url": "http://127.0.0.1:9/metrics"},
    "server_log": {"file": "/nowhere/server.log"},
}
WINDOW = Window(start=0.0, end=1.0, counts={}, values={})


def built(kind: str, folder: Path, clock: Clock) -> Collector:
    spec = COLLECTORS[kind].model_validate(NOWHERE.get(kind, {}), context={"text": True})
    return spec.build(Place(clock, folder, ["http://127.0.0.1:9"]))


@pytest.mark.parametrize("kind", sorted(COLLECTORS))
def test_every_kind_opens_or_says_why_not_and_leaves_nothing_running(kind: str, tmp_path: Path) -> None:
    told: list[Any] = []

    async def live() -> str:
        clock = Clock(asyncio.get_running_loop())
        collector = built(kind, tmp_path, clock)
        assert collector.source
        assert collector.required is False
        try:
            facts = await asyncio.wait_for(collector.open(), 15)
        except CollectorError as error:
            await collector.stop()
            return str(error)
        json.dumps(facts, allow_nan=False)
        clock.start()
        collector.start(told.append)
        collector.tell(Event(t=0.0, kind="phase_start", data={"phase": "steady", "phase_kind": "steady"}))
        collector.tell(WINDOW)
        await asyncio.sleep(0.15)
        await asyncio.wait_for(collector.stop(), 15)
        await collector.stop()  # twice is once
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left
        return ""

    why = asyncio.run(live())
    assert why or told
    for item in told:
        if isinstance(item, Event):
            assert item.kind != "collector" or item.data["source"]
            json.dumps(item.data, allow_nan=False)


@pytest.mark.parametrize("kind", sorted(COLLECTORS))
def test_every_kind_is_described_for_the_reference(kind: str) -> None:
    for name, field in COLLECTORS[kind].model_fields.items():
        assert field.description, f"{kind}.{name}"
    assert "required" in COLLECTORS[kind].model_fields
    assert COLLECTORS[kind].__doc__


class Odd:
    """A collector that fails where it is told to."""

    source, required = "odd", False

    def __init__(self, at: str, required: bool = False, error: Exception | None = None) -> None:
        self.at, self.required, self.error = at, required, error or RuntimeError("oh")
        self.stopped = 0

    async def open(self) -> dict[str, Any]:
        if self.at == "open":
            raise self.error
        return {}

    def start(self, emit: Emit) -> None:
        if self.at == "start":
            raise self.error

    def tell(self, item: Event | Window) -> None:
        if self.at == "tell":
            raise self.error

    async def stop(self) -> None:
        self.stopped += 1
        if self.at == "stop":
            raise self.error


def crewed(*members: Odd) -> tuple[Crew, list[Any]]:
    told: list[Any] = []

    async def live() -> Crew:
        crew = Crew(Clock(asyncio.get_running_loop()), members)
        await crew.open()
        crew.start(told.append)
        crew.tell(WINDOW)
        crew.tell(WINDOW)
        await crew.stop()
        await crew.stop()
        return crew

    return asyncio.run(live()), [item.data for item in told]


@pytest.mark.parametrize("at", ["open", "start", "tell", "stop"])
def test_a_collector_that_fails_is_left_out_once_and_the_others_go_on(at: str) -> None:
    bad, good = Odd(at), Odd("never")
    crew, told = crewed(bad, good)
    assert good.stopped == 1
    if at == "open":
        assert crew.facts[0]["error"] == "internal error: RuntimeError: oh"
        assert bad.stopped == 1  # what it had opened is freed
    else:
        lost = [data for data in told if data["state"] == "lost"]
        assert [data["reason"] for data in lost] == ["internal error: RuntimeError: oh"]


def test_a_required_collector_that_cannot_work_keeps_the_run_from_starting() -> None:
    good = Odd("never")
    with pytest.raises(CollectorError, match="required collector odd cannot work: no driver"):
        crewed(good, Odd("open", required=True, error=CollectorError("no driver")))
    assert good.stopped == 1


def beaten(read: Any, every: float, seconds: float) -> list[Any]:
    told: list[Any] = []

    async def live() -> None:
        from kvbench.clock import VirtualLoop

        assert isinstance(asyncio.get_running_loop(), VirtualLoop)
        clock = Clock(asyncio.get_running_loop())
        beat = Beat("b", clock, every, lambda: read(clock, told))
        beat.start(told.append)
        await clock.sleep_until(seconds)
        await beat.stop()

    from kvbench.clock import VirtualLoop

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(live())
    return told


def test_a_beat_reads_on_an_absolute_grid_and_a_late_one_is_a_gap_with_its_length() -> None:
    async def read(clock: Clock, told: list[Any]) -> None:
        told.append(Sample(t=clock.now(), name="x", value=1.0))
        if clock.now() == 3.0:
            await clock.sleep_until(7.4)  # a page that takes 4.4 s

    told = beaten(read, 1.0, 9.9)
    assert [item.t for item in told if isinstance(item, Sample)] == [0, 1, 2, 3, 8, 9, 9.9]  # the last when it is stopped
    (gap,) = [item.data for item in told if isinstance(item, Event) and item.data["state"] == "gap"]
    assert (gap["start"], gap["end"]) == (2.0, 7.4)
    assert gap["periods"] == pytest.approx(5.4)


def test_a_beat_that_fails_says_so_once_and_once_more_when_it_is_back_a_gap() -> None:
    async def read(clock: Clock, told: list[Any]) -> None:
        if 2.0 <= clock.now() <= 6.0:
            raise OSError("connection refused")

    told = [item.data for item in beaten(read, 1.0, 9.5)]
    assert [data["state"] for data in told] == ["failing", "gap", "stopped"]
    assert told[0]["reason"] == told[1]["reason"] == "connection refused"
    assert told[2]["failures"] == 5


def test_a_beat_with_an_error_of_ours_is_lost_and_says_which() -> None:
    async def read(clock: Clock, told: list[Any]) -> None:
        raise KeyError("x")

    told = [item.data for item in beaten(read, 1.0, 3.0)]
    assert [(data["state"], data["reason"]) for data in told] == [("lost", "internal error: KeyError: 'x'")]
