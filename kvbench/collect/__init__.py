"""WHAT MACHINES SAY: readings and happenings that no request tells, on the run's clock.

A run builds its collectors with the `build` of their models (collectors.py), opens each before its first phase, starts them when
its clock starts, tells them of its events and windows, and stops them when the last request is over.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kvbench.clock import Clock
from kvbench.core import CacheAccess, Event, Record, Request, Sample, Window

Emit = Callable[[Sample | Event | CacheAccess], None]
"""Called on the loop's thread only. A sample without labels whose name metrics/names.py has goes into the windows, so that laws,
stop rules and budgets read it; one with labels (of one GPU, one engine) goes to the record and to sinks."""


class CollectorError(Exception):
    """A collector cannot work here. The text says what was tried, what is missing and what to do; it holds no secret."""


@dataclass(frozen=True)
class Place:
    """Where a run takes place. `urls`: the target's base addresses; `facts`: what its `open` told; `directory`: the run's."""

    clock: Clock
    directory: Path
    urls: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)  # what the target is asked with; never recorded
    server_log: Path | None = None  # the output of a server that the run launched itself
    session: str = ""  # of nsys, under which that server runs
    unprofiled: str = ""  # why it does not, where a collector asked for it
    prompt: Callable[[Request], Sequence[int] | None] = lambda _: None  # a request's token ids, where they are known exactly
    secrets: Sequence[str] = ()  # what a launched server was given besides; never recorded


class Collector(Protocol):
    """One source of readings. Its loss is an event; where it is `required`, the run is then invalid."""

    source: str  # as its samples and events name it: nvml, prometheus, ...
    required: bool

    async def open(self) -> dict[str, Any]:
        """Before the run: can it work, and what is there? Returns JSON facts for the manifest. Raises CollectorError."""

    def start(self, emit: Emit) -> None:
        """The run's clock is at 0: begin, in tasks or threads of its own, and return at once. Errors from here on are events."""

    def tell(self, item: Event | Window) -> None:
        """Something happened to the run, or a window was closed. For triggers; returns at once."""

    async def stop(self) -> None:
        """The last request is over, or nothing was started: emit the last readings, and free everything, within 10 s."""


@runtime_checkable
class Listener(Protocol):
    """A collector that also hears of each request: `began` before it is sent, `ended` when it is over, by whatever outcome."""

    def began(self, request: Request, record: Record) -> None: ...
    def ended(self, request: Request, record: Record) -> None: ...
