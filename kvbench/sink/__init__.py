"""Where a run's numbers go while it runs. Called for every event, window and sample, and for records where a sink takes them."""

from collections.abc import Mapping
from typing import Protocol

from kvbench.core import Event, Record, Sample, Window


class Sink(Protocol):
    """`write` never blocks and never raises into the run; `aclose` is bounded."""

    def write(self, item: Event | Sample | Window | Record) -> None: ...
    async def aclose(self) -> None: ...


class View(Sink, Protocol):
    """A sink that a person watches. The run calls `refresh` as often as it likes; the view decides, by wall time, when to draw.

    totals: the driver's running counts (offered, done, inflight, held, ...), which windows cannot give since they overlap.
    """

    def refresh(self, totals: Mapping[str, int]) -> None: ...
