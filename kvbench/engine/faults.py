"""What goes wrong with a server for a while, on the run's clock. One class and one line in FAULTS per kind.

A fault acts through what the engine shows: `slowed` (factors on step times), `refusals` (shares of new jobs answered 503), `pool`
(blocks taken away), `stall` and `resume`. The engine keeps the times: it comes to a fault's edge first, whatever it is asked to
advance to. A step in progress when a fault begins or ends goes on as planned; only a stall stretches it.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from kvbench.core import Nanos
from kvbench.units import Duration, Share, Span

if TYPE_CHECKING:
    from kvbench.engine.engine import Engine

Part = Annotated[Share, Field(gt=0, le=1)]


class Fault(BaseModel):
    """When it begins and how long it lasts. `begin` and `end` are called once each, in order of time, between two steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    at: Duration = Field(description="when it begins, on the run's clock")
    for_: Span | None = Field(None, alias="for", description="how long it lasts; to the end of the run where not given")

    @abstractmethod
    def begin(self, engine: "Engine", now: Nanos) -> None: ...

    @abstractmethod
    def end(self, engine: "Engine", now: Nanos) -> None: ...

    def told(self) -> dict[str, Any]:
        """Its kind and numbers, in SI units, for events and the manifest."""
        kind = next(name for name, fault in FAULTS.items() if type(self) is fault)
        return {"kind": kind, **self.model_dump(mode="json", by_alias=True)}


class Slow(Fault):
    """Every step takes `factor` times as long: a throttled device, a noisy neighbour."""

    factor: Annotated[float, Field(ge=1, le=1e6)] = Field(description="on the time of each step that begins while it lasts")

    def begin(self, engine: "Engine", now: Nanos) -> None:
        engine.slowed.append(self.factor)

    def end(self, engine: "Engine", now: Nanos) -> None:
        engine.slowed.remove(self.factor)


class Pinned(Fault):
    """A share of the KV blocks is taken away: free ones at once, the rest before anyone else as they come free.

    They count as referenced, so kv_usage shows them. Cached content leaves for them as for an allocation.
    """

    share: Part = Field(description="of the usable blocks, rounded")

    def begin(self, engine: "Engine", now: Nanos) -> None:
        engine.pool.pin(self._blocks(engine))

    def end(self, engine: "Engine", now: Nanos) -> None:
        engine.pool.unpin(self._blocks(engine))

    def _blocks(self, engine: "Engine") -> int:
        return round(self.share * engine.pool.usable)


class Refuse(Fault):
    """A share of new requests is answered with status 503; which ones follows from the run's seed."""

    share: Part = Field(description="of the requests that arrive while it lasts")

    def begin(self, engine: "Engine", now: Nanos) -> None:
        engine.refusals.append(self.share)

    def end(self, engine: "Engine", now: Nanos) -> None:
        engine.refusals.remove(self.share)


class Stall(Fault):
    """A hung server: no step begins or ends while it lasts. The step in progress takes that much longer; requests queue."""

    def begin(self, engine: "Engine", now: Nanos) -> None:
        engine.stall(now)

    def end(self, engine: "Engine", now: Nanos) -> None:
        engine.resume(now)


FAULTS: dict[str, type[Fault]] = {"slow": Slow, "pinned": Pinned, "refuse": Refuse, "stall": Stall}


class Edge(NamedTuple):
    """A fault begins or ends."""

    at: Nanos
    edge: Literal["begin", "end"]
    fault: Fault

    def told(self) -> dict[str, Any]:
        """For an event: {kind, edge, at, for, and the kind's own numbers}."""
        return {**self.fault.told(), "edge": self.edge}


def edges(faults: Iterable[Fault]) -> deque[Edge]:
    """The edges of all faults in order of time; at one time what ends goes first. A fault lasts 1 ns at least."""
    found: list[Edge] = []
    for fault in faults:
        begin = round(fault.at * 1e9)
        found.append(Edge(begin, "begin", fault))
        if fault.for_ is not None:
            found.append(Edge(max(begin + 1, round((fault.at + fault.for_) * 1e9)), "end", fault))
    return deque(sorted(found, key=lambda edge: (edge.at, edge.edge == "begin")))
