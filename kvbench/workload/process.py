"""How requests are spread along a shape's exposure: the gaps, in units of exposure, with mean 1."""

from collections.abc import Callable, Iterator
from math import inf
from typing import Annotated, Any, Literal

from numpy.random import Generator
from pydantic import ConfigDict, Field

from kvbench.core import Seconds
from kvbench.units import Rate
from kvbench.workload.spec import Spec

BATCH = 256  # gaps drawn at a time: a scalar draw costs several times as much


def endless(draw: Callable[[int], Any]) -> Iterator[float]:
    while True:
        yield from draw(BATCH).tolist()


def exponential(rng: Generator) -> Iterator[float]:
    return endless(rng.standard_exponential)


def regular(rng: Generator) -> Iterator[float]:
    yield 0.0  # the first request at exposure 0: 200/s for 10 s are the 2,000 requests at 0, 5 ms, ..., 9.995 s
    while True:
        yield 1.0


PROCESSES: dict[str, Callable[[Generator], Iterator[float]]] = {"poisson": exponential, "deterministic": regular}
Process = Annotated[
    Literal["poisson", "deterministic"],
    Field(description="how requests are spread along the rate: at random (poisson) or evenly (deterministic)"),
]


class Shape(Spec):
    """What the shapes with a choice of process share."""

    process: Process = "poisson"

    def gaps(self, rng: Generator) -> Iterator[float]:
        return PROCESSES[self.process](rng)


class Flat(Spec):
    """A rate that never changes. The field is `rate` in a scenario; `rate` here is the contract's method."""

    model_config = ConfigDict(serialize_by_alias=True)
    level: Rate = Field(alias="rate", description="requests per second")

    def rate(self, t: Seconds) -> float:
        return self.level

    def exposure(self, t: Seconds) -> float:
        return self.level * t if t > 0 else 0.0

    def peak(self, until: Seconds = inf) -> float:
        return self.level
