"""The machine this client runs on, and the client's own process: CPU, memory, load, network, open files, garbage collection."""

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict, Field

from kvbench.clock import Clock, stopwatch
from kvbench.collect import Collector, Emit, Place
from kvbench.collect.beat import Beat
from kvbench.core import Event, Sample, Window
from kvbench.units import Span

UNREADABLE = (psutil.Error, OSError, AttributeError)


class Host(BaseModel):
    """The client's own machine: is it the client that is short of something?"""

    model_config = ConfigDict(frozen=True, extra="forbid")
    every: Span = Field(1.0, ge=0.1, description="how often it is read")
    required: bool = Field(False, description="true: losing it makes the run invalid")

    def build(self, place: Place) -> Collector:
        return HostCollector(self, place.clock)


class HostCollector:
    """Counters (`_total`) are since the machine started; shares are of all cores, of all memory."""

    source = "host"

    def __init__(self, spec: Host, clock: Clock) -> None:
        self.clock, self.required = clock, spec.required
        self.beat = Beat(self.source, clock, spec.every, self._read)
        self.process = psutil.Process()
        self._pauses: list[float] = []
        self._began = 0

    async def open(self) -> dict[str, Any]:
        return {"cores": psutil.cpu_count(), "memory_bytes": psutil.virtual_memory().total, "every": self.beat.every}

    def start(self, emit: Emit) -> None:
        self.emit = emit
        gc.callbacks.append(self._collected)
        self.beat.start(emit)

    def tell(self, item: Event | Window) -> None:
        return

    async def stop(self) -> None:
        if self._collected in gc.callbacks:
            gc.callbacks.remove(self._collected)
        await self.beat.stop()

    def _collected(self, phase: str, _: dict[str, int]) -> None:
        """A garbage collection of this process began or ended: it stops everything else in it."""
        if phase == "start":
            self._began = stopwatch()
        else:
            self._pauses.append((stopwatch() - self._began) / 1e9)

    async def _read(self) -> None:
        at = self.clock.now()
        for of, readings in (("host", machine()), ("client", self._own())):
            for name, value in readings:
                if name != "cpu" or self.beat.readings:  # the first is of the time before the run
                    self.emit(Sample(t=at, name=f"{of}_{name}", value=value, source=self.source))
        await asyncio.sleep(0)

    def _own(self) -> Iterator[tuple[str, float]]:
        pauses, self._pauses = self._pauses, []
        yield "gc_pauses", len(pauses)
        yield "gc_pause_max", max(pauses, default=0.0)
        try:
            with self.process.oneshot():
                yield "cpu", self.process.cpu_percent() / 100
                yield "memory_bytes", self.process.memory_info().rss
                yield "open_files", self.process.num_fds()
                yield "threads", self.process.num_threads()
        except UNREADABLE:
            return  # a system that does not say


def machine() -> Iterator[tuple[str, float]]:
    """(name, value) of the whole machine, in base units. Its first `cpu` is of nothing."""
    memory = psutil.virtual_memory()
    yield "cpu", psutil.cpu_percent() / 100
    yield "memory", (memory.total - memory.available) / memory.total
    yield "memory_available_bytes", memory.available
    try:
        yield "load_1m", psutil.getloadavg()[0]
        net = psutil.net_io_counters()
    except UNREADABLE:
        return  # a system that does not say
    if net is not None:
        yield "net_sent_bytes_total", net.bytes_sent
        yield "net_received_bytes_total", net.bytes_recv
        yield "net_errors_total", net.errin + net.errout + net.dropin + net.dropout
