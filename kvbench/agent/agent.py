"""One agent: its GPU thread, its readings of the machine, what they told last, and where else they go."""

import asyncio
import os
import platform
import secrets
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import psutil

from kvbench import __version__
from kvbench.agent.page import Row
from kvbench.agent.ring import Ring
from kvbench.clock import Clock, cpu_time, wall_time
from kvbench.collect.beat import Beat
from kvbench.collect.gpus import Gpus
from kvbench.collect.gputhread import GpuThread
from kvbench.collect.host import machine
from kvbench.core import CacheAccess, Event, Sample, Seconds
from kvbench.sink.influx import InfluxSink

HOST_EVERY: Seconds = 1.0
FIRST: Seconds = 0.1  # over which the first reading of the machine's CPU is taken
TOGETHER: Seconds = 1e-3  # readings of one GPU that are so near to each other share a line
STUCK: Seconds = 5.0  # without a reading after which the agent is not well
TIMES = ("start", "end", "last")  # what an event calls instants of the run's clock


class Agent:
    """`gpus`: opened, or None where only the machine is read. `say`: takes what a person should know.

    Stamps are seconds since 1970: the machine's clock when `clock` was started, and what has passed since. They never jump.
    """

    def __init__(
        self, clock: Clock, gpus: Gpus | None, every: Seconds, keep: Seconds, sink: InfluxSink | None, say: Callable[[str], None]
    ) -> None:
        self.clock, self.gpus, self.keep, self.sink, self.say = clock, gpus, keep, sink, say
        self.instance, self.host = secrets.token_hex(8), platform.node()
        self.ring = Ring(keep)
        self.thread = GpuThread(gpus, "agent", clock, every, self._take_gpus) if gpus is not None else None
        self.every = every if gpus is not None else HOST_EVERY
        self.read_at: Seconds | None = None  # the latest reading of the GPUs
        self._machine: list[Row] = []
        self._beat = Beat("agent", clock, HOST_EVERY, self._read_host)
        self._process = psutil.Process()
        self._told = 0  # notes of the sink

    def start(self) -> None:
        self._beat.start(self._hear)
        if self.thread is not None:
            self.thread.start()

    async def stop(self) -> None:
        """CollectorError where the driver does not return."""
        await self._beat.stop()
        try:
            if self.thread is not None:
                await self.thread.stop()
                assert self.gpus is not None
                self.gpus.close()
        finally:
            if self.sink is not None:
                await self.sink.aclose()
                self._tell_of_sink()
                if self.sink.sender.remaining:
                    where = self.sink.spool.directory
                    self.say(
                        f"{self.sink.sender.remaining:,} points wait in {where}: the next agent with this database sends them"
                    )

    def stamp(self, t: Seconds) -> float:
        return self.clock.wall + t

    @property
    def now_ns(self) -> int:
        """Nanoseconds since 1970 by the clock of the stamps."""
        return round(self.clock.wall * 1e9) + self.clock.ns()

    def _hear(self, item: Sample | Event | CacheAccess) -> None:
        """Of the beat, which tells events alone."""
        if isinstance(item, Event):
            self.take([item])

    def _take_gpus(self, items: list[Sample | Event]) -> None:
        self.read_at = items[0].t if items else self.clock.now()
        self.take(items)

    def take(self, items: Sequence[Sample | Event]) -> None:
        """What was read, in order: near readings of one device as one line."""
        line: dict[str, float | None] = {}
        first: Sample | None = None
        for item in items:
            if isinstance(item, Event):
                data = {key: self.stamp(value) if key in TIMES else value for key, value in item.data.items()}
                self.ring.event(self.stamp(item.t), item.kind, data)
                continue
            self._send(item)
            if not item.labels:
                continue  # the join over all GPUs, which the page's reader makes itself
            if first is None or item.labels != first.labels or item.t - first.t > TOGETHER or item.name in line:
                self._file(first, line)
                first, line = item, {}
            line[item.name] = item.value
        self._file(first, line)

    def _file(self, first: Sample | None, line: dict[str, float | None]) -> None:
        if first is not None:
            self.ring.values(self.stamp(first.t), first.labels, line)

    def _send(self, sample: Sample) -> None:
        if self.sink is not None:
            labels = {**sample.labels, "host": self.host}
            self.sink.write(Sample(t=sample.t, name=sample.name, value=sample.value, source="agent", labels=labels))

    async def _read_host(self) -> None:
        if not self._beat.readings:
            psutil.cpu_percent()  # its first reading is of nothing
            await asyncio.sleep(FIRST)
        now, rows = self.clock.now(), list(machine())
        labels = {"host": self.host}
        self.take([Sample(t=now, name=f"host_{name}", value=value, source="host", labels=labels) for name, value in rows])
        self._machine = [Row(f"host_{name}", {}, value) for name, value in rows]
        self._tell_of_sink()

    def _tell_of_sink(self) -> None:
        if self.sink is not None:
            for note in self.sink.sender.notes[self._told :]:
                self.say(note)
                self._told += 1

    # ---- what is told

    def rows(self) -> Iterator[Row]:
        """What the page shows: of a lost GPU only that it is lost, of one that does not tell something nothing."""
        return chain(self._gpu_rows(), self._machine, self._own_rows(), self._sink_rows())

    def _gpu_rows(self) -> Iterator[Row]:
        for gpu in self.gpus.gpus if self.gpus is not None else ():
            yield Row("gpu_up", gpu.labels, float(not gpu.lost))
            if not gpu.lost:
                yield from (Row(name, gpu.labels, value) for name, value in dict(gpu.values).items())

    def _own_rows(self) -> Iterator[Row]:
        told = {"version": __version__, "instance": self.instance, "host": self.host}
        yield Row("agent_info", told, 1.0)
        yield Row("agent_start_timestamp_seconds", {}, self.stamp(0.0))
        yield Row("agent_clock_behind_seconds", {}, wall_time() - self.stamp(self.clock.now()))
        if self.read_at is not None:
            yield Row("agent_reading_timestamp_seconds", {}, self.stamp(self.read_at))
        if self.thread is not None:
            yield Row("agent_sampling_seconds", {}, self.thread.every)
            yield Row("agent_readings_total", {}, float(self.thread.readings))
            yield Row("agent_gaps_total", {}, float(self.thread.gaps))
            yield Row("agent_nvml_cpu_seconds_total", {}, self.thread.cost)
            yield Row("agent_nvml_call_seconds_total", {}, self.thread.inside)
        yield Row("agent_cpu_seconds_total", {}, cpu_time())
        yield Row("agent_memory_bytes", {}, float(self._process.memory_info().rss))
        yield Row("agent_ring_lines_total", {}, float(self.ring.count))
        yield Row("agent_ring_bytes", {}, float(self.ring.bytes))
        yield Row("agent_ring_seconds", {}, self.ring.reach)

    def _sink_rows(self) -> Iterator[Row]:
        if self.sink is not None:
            yield Row("agent_points_total", {}, float(self.sink.sender.offered))
            yield Row("agent_points_waiting", {}, float(self.sink.sender.remaining))
            yield Row("agent_points_lost_total", {}, float(self.sink.sender.lost))

    def sick(self) -> str:
        """Why it is not well; "" where it is."""
        if self.thread is None or self.gpus is None:
            return ""
        silent = self.clock.now() - (self.read_at or 0.0)
        if all(gpu.lost for gpu in self.gpus.gpus):
            return "every GPU is lost: " + self.gpus.gpus[0].lost
        return f"the driver has not answered for {silent:.0f} s" if silent > max(STUCK, 3 * self.thread.every) else ""

    def told(self) -> dict[str, Any]:
        """Of /health: JSON."""
        why = self.sick()
        return {
            "status": "failing" if why else "ok", "reason": why or None, "version": __version__, "instance": self.instance,
            "host": self.host, "pid": os.getpid(), "every_s": self.thread.every if self.thread is not None else self.every,
            "keep_s": self.keep, "started": self.stamp(0.0), **(self.gpus.facts() if self.gpus is not None else {"gpus": []}),
        }  # fmt: skip
