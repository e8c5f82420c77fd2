"""A fault of the engine: when it begins, strikes and ends. The kinds are in faults.py.

The engine keeps the times: it comes to a fault's edge first, whatever it is asked to advance to. A step in progress at an edge
goes on as planned; only what hangs the server stretches it.
"""

import heapq
import math
import re
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from kvbench.core import Nanos
from kvbench.units import Duration, Span

if TYPE_CHECKING:
    from kvbench.engine.engine import Engine

Strike = tuple[Nanos, Literal["on", "off"]]


class Fault(BaseModel):
    """When it begins and how long it lasts. `begin` and `end` are called once each, in order of time, between two steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    at: Duration = Field(description="when it begins, on the run's clock")
    for_: Span | None = Field(None, alias="for", description="how long it lasts; to the end of the run where not given")
    node: Annotated[int, Field(ge=0, le=9999)] | None = Field(
        None, description="the node of a cluster that it befalls, counted from 0; every node where not given"
    )

    @abstractmethod
    def begin(self, engine: "Engine", now: Nanos) -> None: ...

    @abstractmethod
    def end(self, engine: "Engine", now: Nanos) -> None: ...

    def strikes(self, begin: Nanos) -> Iterator[Strike]:
        """When the methods `on` and `off` are to be called, in order; those at the end and after it are left out."""
        yield from ()

    def gauges(self, engine: "Engine") -> dict[str, float]:
        """What it leaves among the engine's gauges, from the first second on."""
        return {}

    def told(self) -> dict[str, Any]:
        """Its kind and numbers, in SI units, for events and the manifest. `node` where it is for one."""
        kind = re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()
        told = {"kind": kind, **self.model_dump(mode="json", by_alias=True)}
        return told if self.node is not None else {key: value for key, value in told.items() if key != "node"}


class Periodic(Fault):
    """Strikes when it begins, and again every so often while it lasts."""

    every: Annotated[Span, Field(ge=1e-3)] = Field(description="from one strike to the next, at least 1 ms")

    def begin(self, engine: "Engine", now: Nanos) -> None:
        """The first strike is at the same time."""

    def end(self, engine: "Engine", now: Nanos) -> None:
        """No more strikes."""

    @abstractmethod
    def on(self, engine: "Engine", now: Nanos) -> None:
        """A strike."""

    def strikes(self, begin: Nanos) -> Iterator[Strike]:
        at, every = begin, round(self.every * 1e9)
        while True:
            yield at, "on"
            at += every


class Edge(NamedTuple):
    """Something to do at `at`: a fault begins, strikes (on, off) or ends; or what is told of one: it was refused."""

    at: Nanos
    edge: Literal["begin", "end", "on", "off", "refusal"]
    fault: Fault

    def act(self, engine: "Engine") -> None:
        getattr(self.fault, self.edge)(engine, self.at)

    def told(self) -> dict[str, Any]:
        """For an event: {kind, edge, at, for, and the kind's own numbers}."""
        return {**self.fault.told(), "edge": self.edge}


class Agenda:
    """All edges of some faults in order of time, strikes among them; at one time what ends goes first."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        faults = tuple(faults)
        self._turns = edges(faults)
        self._rest = heapq.merge(*(_edges(fault, fault.strikes(_begin(fault))) for fault in faults), key=_order)
        self._next = next(self._rest, None)

    @property
    def at(self) -> float:
        """When the next edge is, in nanoseconds; inf after the last."""
        return math.inf if self._next is None else self._next.at

    @property
    def turn(self) -> float:
        """When the next fault begins or ends; inf after the last. Strikes may go on for ever and give nothing back."""
        return self._turns[0].at if self._turns else math.inf

    def pop(self) -> Edge:
        """Take the next edge. IndexError after the last."""
        edge = self._next
        if edge is None:
            raise IndexError("no edge is left")
        if edge.edge in ("begin", "end"):
            self._turns.popleft()
        self._next = next(self._rest, None)
        return edge


def edges(faults: Iterable[Fault]) -> deque[Edge]:
    """The edges at which faults begin and end, in order of time; at one time what ends goes first. A fault lasts 1 ns at
    least."""
    return deque(sorted((edge for fault in faults for edge in _edges(fault)), key=_order))


def _begin(fault: Fault) -> Nanos:
    return round(fault.at * 1e9)


def _edges(fault: Fault, strikes: Iterable[Strike] = ()) -> Iterator[Edge]:
    begin = _begin(fault)
    end = None if fault.for_ is None else max(begin + 1, round((fault.at + fault.for_) * 1e9))
    yield Edge(begin, "begin", fault)
    for at, edge in strikes:
        if end is not None and at >= end:
            break
        yield Edge(at, edge, fault)
    if end is not None:
        yield Edge(end, "end", fault)


_RANK = {"off": 0, "end": 1, "begin": 2, "on": 3, "refusal": 4}


def _order(edge: Edge) -> tuple[Nanos, int]:
    return edge.at, _RANK[edge.edge]
