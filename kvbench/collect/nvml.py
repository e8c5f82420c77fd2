"""GPUs of this machine while the run goes on, read by a thread of their own: memory, power, energy, clocks, throttling."""

from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvbench.clock import Clock
from kvbench.collect import Collector, Emit, Place
from kvbench.collect.aside import aside
from kvbench.collect.gpus import Gpus
from kvbench.collect.gputhread import GpuThread, open_gpus
from kvbench.core import Event, Sample, Seconds, Window
from kvbench.units import Span


class Nvml(BaseModel):
    """NVIDIA GPUs of this machine (nvidia-ml-py). On another machine run `kvbench agent`, or scrape its DCGM exporter."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    every: Span = Field(1.0, ge=0.05, description="how often memory, use, power and energy are read; the rest more rarely")
    gpus: list[int | str] | None = Field(
        None, max_length=64, description="NVML indices or UUIDs; left out: those that CUDA_VISIBLE_DEVICES shows"
    )
    required: bool = Field(False, description="true: losing it makes the run invalid")

    def build(self, place: Place) -> Collector:
        return NvmlCollector(self, place.clock)


class NvmlCollector:
    """Samples `gpu_*` with labels gpu and uuid (and mig), and their join over the target's GPUs without labels."""

    source = "nvml"

    def __init__(self, spec: Nvml, clock: Clock) -> None:
        self.spec, self.clock, self.required = spec, clock, spec.required
        self.gpus: Gpus | None = None
        self._thread: GpuThread | None = None

    async def open(self) -> dict[str, Any]:
        self.gpus = await aside(partial(open_gpus, self.spec.gpus, self.clock.now()))
        every: Seconds = self.spec.every
        system = [gpu.labels["gpu"] for gpu in self.gpus.gpus if self.gpus.integrated(gpu)]
        told = {"every": every, "memory_source": dict.fromkeys(system, "system") or "device", "gives": ["gpu_memory"]}
        return self.gpus.facts() | told

    def start(self, emit: Emit) -> None:
        assert self.gpus is not None
        self._emit = emit
        self._thread = GpuThread(self.gpus, self.source, self.clock, self.spec.every, self._take)
        self._thread.start()

    def tell(self, item: Event | Window) -> None:
        return

    async def stop(self) -> None:
        if self._thread is not None:
            thread, self._thread = self._thread, None
            await thread.stop()
            data = {"source": self.source, "state": "stopped", **thread.account()}
            self._emit(Event(t=self.clock.now(), kind="collector", data=data))
        if self.gpus is not None:
            self.gpus.close()
            self.gpus = None

    def _take(self, items: list[Sample | Event]) -> None:
        for item in items:
            self._emit(item)
