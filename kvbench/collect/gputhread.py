"""A thread that reads GPUs every so often, and says what they say: of the collector `nvml`, and of `kvbench agent`."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil

from kvbench.clock import Clock, stopwatch, thread_time
from kvbench.collect import CollectorError
from kvbench.collect.gpuread import THROTTLES
from kvbench.collect.gpus import Gpu, Gpus, joined
from kvbench.core import Event, Sample, Seconds

BUSY = 0.25  # share of a period that its calls may take before the period is doubled: the driver serves others through one lock
SLOWEST: Seconds = 10.0
PATIENCE: Seconds = 5.0  # for the thread to end; a call into a driver can hang
LATE = 3  # periods after which a missing reading is a gap

Take = Callable[[list[Sample | Event]], None]


def open_gpus(asked: Sequence[int | str] | None, now: Seconds) -> Gpus:
    """Those that are meant (Gpus.choose), every group of each tried once: what it cannot tell is known from then on. Blocks.
    CollectorError where there are none."""
    import pynvml

    gpus = Gpus(pynvml)
    try:
        gpus.choose(asked, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except pynvml.NVMLError as error:
        raise CollectorError(f"NVML answers {error}") from None
    if not gpus.gpus:
        raise CollectorError("no GPU is meant: CUDA_VISIBLE_DEVICES is empty, or this machine has none")
    for gpu in gpus.gpus:
        for _ in gpus.read(gpu, now):
            pass
        gpu.due.clear()
    return gpus


class GpuThread:
    """Samples `gpu_*` with labels gpu and uuid (and mig), and their join over all GPUs without, handed over on the loop."""

    def __init__(self, gpus: Gpus, source: str, clock: Clock, every: Seconds, take: Take) -> None:
        self.gpus, self.source, self.clock, self.every = gpus, source, clock, every
        self.asked = every  # before it was made rarer
        self.readings = self.gaps = 0
        self.longest: Seconds = 0.0  # of the gaps
        self.cost: Seconds = 0.0  # CPU of the thread
        self.inside: Seconds = 0.0  # wall time in calls
        self._take, self._loop = take, clock.loop
        self._end = threading.Event()
        self._said: set[tuple[str, str]] = set()
        self._throttled: dict[str, frozenset[str]] = {}
        self._last: Seconds = clock.now()  # when the latest reading began
        self._thread = threading.Thread(target=self._run, name="kvbench-nvml", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """One last reading; nothing where it was never started. CollectorError where a call into the driver does not return."""
        if self._thread.ident is None:
            return
        self._end.set()
        await asyncio.to_thread(self._thread.join, PATIENCE)
        if self._thread.is_alive():
            now = self.clock.now()
            self._take(list(self._gap(self._last, now, "the driver does not answer")))
            raise CollectorError(f"a call into the driver has not returned for {PATIENCE:g} s")
        await asyncio.sleep(0)  # what the thread has handed over is told before its account

    def account(self) -> dict[str, Any]:
        told = {"readings": self.readings, "gaps": self.gaps, "longest_gap_s": self.longest, "failures": 0}
        return told | {"cost_s": self.cost, "in_calls_s": self.inside, "every_s": self.every, "every_first_s": self.asked}

    # ---- in the thread

    def _run(self) -> None:
        self._last = due = self.clock.now()
        while True:
            ended = self._end.is_set()
            before, cpu = stopwatch(), thread_time()
            now = self.clock.now()
            try:
                items = list(self._read(now))
            except Exception as error:  # a thread that dies says nothing
                why = f"internal error: {type(error).__name__}: {error}"
                self._hand_over([self._event(self.clock.now(), "lost", reason=why, readings=self.readings)])
                return
            spent = (stopwatch() - before) / 1e9
            self.inside += spent
            self.cost += thread_time() - cpu
            if all(gpu.lost for gpu in self.gpus.gpus):
                why = f"every GPU is lost: {self.gpus.gpus[0].lost}"
                self._hand_over([*items, self._event(self.clock.now(), "lost", reason=why, readings=self.readings)])
                return
            items += self._kept_pace(self._last, now, spent)
            self._last = now
            self.readings += 1
            self._hand_over(items)
            if ended:
                return
            due = max(due + self.every, self.clock.now())
            self._end.wait(max(0.0, due - self.clock.now()))

    def _hand_over(self, items: list[Sample | Event]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._take, items)
        except RuntimeError:
            pass  # the loop is closed: the run did not wait for a call that hung

    def _read(self, now: Seconds) -> Iterator[Sample | Event]:
        for gpu in self.gpus.gpus:
            if gpu.lost:
                yield from self._silent(gpu, now)
                continue
            for _, name, value in self.gpus.read(gpu, now):
                yield Sample(t=self.clock.now(), name=name, value=value, source=self.source, labels=gpu.labels)
            yield from self._silent(gpu, now)
            if not gpu.lost:
                yield from self._of_the_system(gpu, now)
                yield from self._held_back(gpu, now)
        for name, value in joined(self.gpus.gpus):
            yield Sample(t=now, name=name, value=value, source=self.source)

    def _silent(self, gpu: Gpu, now: Seconds) -> Iterator[Sample | Event]:
        """What this GPU does not tell, once each."""
        for group, why in (("", gpu.lost), *gpu.off.items()):
            if not why or (gpu.uuid, group) in self._said:
                continue
            self._said.add((gpu.uuid, group))
            state, metric = ("gpu_lost", "every metric") if not group else ("unsupported", f"{group} of GPU {gpu.index}")
            yield self._event(now, state, metric=metric, reason=why, gpu=gpu.index, uuid=gpu.uuid, last=gpu.seen)
            yield Sample(t=now, name=f"gpu_{group or 'alive'}", value=None, source=self.source, labels=gpu.labels)

    def _of_the_system(self, gpu: Gpu, now: Seconds) -> Iterator[Sample]:
        """The system's memory, where the GPU has none of its own."""
        if self.gpus.integrated(gpu):
            system = psutil.virtual_memory()
            gpu.values["gpu_memory"] = (system.total - system.available) / system.total
            labels = gpu.labels | {"memory": "system"}
            yield Sample(t=now, name="gpu_memory", value=gpu.values["gpu_memory"], source=self.source, labels=labels)

    def _held_back(self, gpu: Gpu, now: Seconds) -> Iterator[Event]:
        """Clocks that begin or cease to be held down."""
        bits = int(gpu.values.get("gpu_throttle_bits", 0))
        held = frozenset(name for bit, name in THROTTLES.items() if bits & bit)
        if held != self._throttled.get(gpu.uuid, frozenset()):
            self._throttled[gpu.uuid] = held
            yield Event(t=now, kind="gpu", data={"what": "throttled", "gpu": gpu.index, "uuid": gpu.uuid, "by": sorted(held)})

    def _kept_pace(self, last: Seconds, now: Seconds, spent: Seconds) -> Iterator[Event]:
        """A gap is told; calls that take long are made more rarely, since the server's own go through the same lock."""
        if self.readings:
            yield from self._gap(last, now, "the driver answered late")
        if spent > BUSY * self.every and self.every < SLOWEST and self.readings > 1 and self.inside > BUSY * now:
            self.every = min(SLOWEST, 2 * self.every)
            yield self._event(now, "slower", every_s=self.every, reason=f"one reading took {spent:.3g} s")

    def _gap(self, last: Seconds, now: Seconds, why: str) -> Iterator[Event]:
        silence = now - last
        if silence > LATE * self.every:
            self.gaps, self.longest = self.gaps + 1, max(self.longest, silence)
            yield self._event(now, "gap", start=last, end=now, periods=silence / self.every, reason=why)

    def _event(self, now: Seconds, state: str, **data: Any) -> Event:
        return Event(t=now, kind="collector", data={"source": self.source, "state": state, **data})
