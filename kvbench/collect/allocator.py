"""PyTorch's CUDA allocator as a server tells it: the numbers of torch.cuda.memory_stats() as JSON, from a URL or a file.

Source: the names of torch.cuda.memory_stats (PyTorch's documentation), which a dict per device holds.
"""

import asyncio
import os
import stat
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import aiohttp
import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvbench.clock import Clock
from kvbench.collect import Collector, CollectorError, Emit, Place
from kvbench.collect.aside import aside
from kvbench.collect.beat import Beat
from kvbench.collect.scrape import parts
from kvbench.core import Event, Sample, Window
from kvbench.unanswered import why
from kvbench.units import Span

LONG: Final = 1 << 24  # bytes of an answer
PATIENCE: Final = aiohttp.ClientTimeout(total=5)
ODD: Final = (ValueError, RecursionError, aiohttp.ClientError)  # what an answer that is none of ours raises
BYTES: Final = {
    "allocated": "allocated_bytes.all.current",
    "reserved": "reserved_bytes.all.current",
    "reserved_peak": "reserved_bytes.all.peak",
    "inactive_split": "inactive_split_bytes.all.current",
}
COUNTS: Final = {"alloc_retries_total": "num_alloc_retries", "ooms_total": "num_ooms"}


class Allocator(BaseModel):
    """Memory that PyTorch holds and does not use, and how often it had to give some back before it could go on."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    stats: str = Field(
        description="a URL, or a file that the server rewrites: memory_stats() as JSON, of one device or a list of them"
    )
    every: Span = Field(5.0, ge=0.1, description="how often it is read")
    required: bool = Field(False, description="true: losing it makes the run invalid")

    @field_validator("stats")
    @classmethod
    def _address(cls, value: str) -> str:
        if value.startswith(("http://", "https://")) and "@" in value.split("://", 1)[1].split("/", 1)[0]:
            raise ValueError("no password in the address: it would stand in the run's files")
        return value

    def build(self, place: Place) -> Collector:
        return AllocatorCollector(self, place.clock)


class AllocatorCollector:
    """Samples `torch_*` with the label `device`. `torch_fragmentation`: the share of reserved memory that no tensor uses."""

    source = "allocator"

    def __init__(self, spec: Allocator, clock: Clock) -> None:
        self.spec, self.clock, self.required = spec, clock, spec.required
        self.beat = Beat(self.source, clock, spec.every, self._read)
        self._session: aiohttp.ClientSession | None = None
        self._retries: dict[str, float] = {}

    async def open(self) -> dict[str, Any]:
        try:
            devices = await self._ask()
        except (OSError, TimeoutError, *ODD) as error:
            raise CollectorError(f"no memory_stats at {self.spec.stats}: {_why(error)}") from None
        return {"stats": self.spec.stats, "devices": len(devices), "every": self.spec.every}

    def start(self, emit: Emit) -> None:
        self.emit = emit
        self.beat.start(emit)

    def tell(self, item: Event | Window) -> None:
        return

    async def stop(self) -> None:
        await self.beat.stop()
        if self._session is not None:
            await self._session.close()

    async def _ask(self) -> list[Mapping[str, Any]]:
        if self.spec.stats.startswith(("http://", "https://")):
            self._session = self._session or aiohttp.ClientSession(timeout=PATIENCE)
            async with self._session.get(self.spec.stats) as answer:
                if answer.status != 200:
                    raise ValueError(f"HTTP {answer.status}")
                data = b"".join(await parts(answer, LONG))
        else:
            data = await asyncio.wait_for(aside(partial(_read, self.spec.stats)), PATIENCE.total)
        said = msgspec.json.decode(data)
        devices = said if isinstance(said, list) else [said]
        if not devices or not all(isinstance(each, dict) and any(name in each for name in BYTES.values()) for each in devices):
            raise ValueError(f"it has none of {', '.join(BYTES.values())}")
        return devices

    async def _read(self) -> None:
        try:
            devices = await self._ask()
        except ODD as error:
            raise OSError(f"{self.spec.stats}: {_why(error)}") from None
        at = self.clock.now()
        for device, stats in enumerate(devices):
            labels = {"device": str(device)}
            for name, value in readings(stats):
                self.emit(Sample(t=at, name=f"torch_{name}", value=value, source=self.source, labels=labels))
            self._retried(at, device, stats)

    def _retried(self, at: float, device: int, stats: Mapping[str, Any]) -> None:
        """An allocation that had to be tried again stops the server while memory is given back: worth an event."""
        for name in COUNTS.values():
            value, key = stats.get(name), f"{device}.{name}"
            if _number(value) is not None and isinstance(value, int):
                before = self._retries.setdefault(key, value)
                if value > before:
                    data = {"source": self.source, "what": name, "device": device, "more": value - before, "total": value}
                    self.emit(Event(t=at, kind="allocator", data=data))
                self._retries[key] = value


def readings(stats: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """(name, value) of one device; None where it is not told."""
    found = {name: _number(stats.get(key)) for name, key in BYTES.items()}
    for name, value in found.items():
        yield f"{name}_bytes", value
    for name, key in COUNTS.items():
        yield name, _number(stats.get(key))
    held, used = found["reserved"], found["allocated"]
    yield "fragmentation", 1 - used / held if held and used is not None and used <= held else None


def _why(error: BaseException) -> str:
    return why(error) if isinstance(error, aiohttp.ClientError) else str(error) or type(error).__name__


def _number(value: object) -> float | None:
    """None where it is no count: memory is not negative, and not of so many bytes that no float holds them."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None


def _read(file: str) -> bytes:
    """A plain file, no longer than LONG: what waits for a writer, or has no end, is none."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(22, "not a regular file", file)
    with os.fdopen(descriptor, "rb") as opened:
        data = opened.read(LONG + 1)
    if len(data) > LONG:
        raise OSError(27, f"longer than {LONG >> 20} MiB", file)
    return data
