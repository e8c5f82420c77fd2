"""Where a run's numbers go while it runs. Called for every event, window and sample, and for records where a sink takes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvbench.core import Event, Record, Sample, Window


class SinkError(ValueError):
    """A sink cannot work. The text says what was tried, what came back and what to do; it holds no secret."""


@dataclass(frozen=True)
class SinkPlace:
    """A run's directory, its name there, the seconds since 1970 at which its clock was 0, and what is known of it
    (scenario, model, engine)."""

    directory: Path
    run: str
    wall: float
    facts: Mapping[str, Any] = field(default_factory=dict)


class Sink(Protocol):
    """`write` never blocks and never raises into the run; `aclose` is bounded."""

    def write(self, item: Event | Sample | Window | Record) -> None: ...
    async def aclose(self) -> None: ...


class Store(Sink, Protocol):
    """A sink that keeps what it is given somewhere else."""

    def behind(self) -> dict[str, Any]:
        """{} while what it is given arrives; else which `sink`, `to` where, the `reason`, how many points are `waiting`. JSON."""

    def told(self) -> dict[str, Any]:
        """After `aclose`: how many points it was given, delivered and could not deliver, with `notes` for people. JSON."""


class View(Sink, Protocol):
    """A sink that a person watches. The run calls `refresh` as often as it likes; the view decides, by wall time, when to draw.

    totals: the driver's running counts (offered, done, inflight, held, ...), which windows cannot give since they overlap.
    """

    def refresh(self, totals: Mapping[str, int]) -> None: ...
