"""Load without a plan: rates, spikes, lulls and lengths that jump at random, the same for one seed."""

import math
from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.random import Generator
from pydantic import Field, model_validator

from kvbench.core import Seconds
from kvbench.units import Rate, Share, Span
from kvbench.workload.process import Shape
from kvbench.workload.spec import Spec

Stretch = tuple[Seconds, float]  # how long, and the value meanwhile


class Walk:
    """Stretches drawn one after the other as far as anyone asks; the same for one generator, in whatever order."""

    def __init__(self, rng: Generator, draw: Callable[[Generator], Stretch]) -> None:
        self.rng, self.draw = rng, draw
        self.knots: list[Seconds] = [0.0]  # stretch i is [knots[i], knots[i + 1])
        self.values: list[float] = []
        self.areas: list[float] = [0.0]  # the integral up to each knot

    def at(self, t: Seconds) -> float:
        """The value at t >= 0."""
        return self.values[self._index(t)]

    def area(self, t: Seconds) -> float:
        """The integral over [0, t]."""
        i = self._index(t)
        return self.areas[i] + self.values[i] * (t - self.knots[i])

    def _index(self, t: Seconds) -> int:
        while self.knots[-1] <= t:
            dwell, value = self.draw(self.rng)
            self.values.append(value)
            self.areas.append(self.areas[-1] + dwell * value)
            self.knots.append(self.knots[-1] + dwell)
        return bisect_right(self.knots, t) - 1


class Regimes(Spec):
    """Spells in which every length is multiplied by one factor, log-uniform between two bounds."""

    every: Span = Field(description="mean length of a spell")
    min: float = Field(0.5, gt=0, le=1, description="smallest factor")
    max: float = Field(2.0, ge=1, le=100, description="largest factor")


class Chaos(Shape):
    """Rates that jump at random between two bounds, with spikes, lulls and spells of other lengths; the same for one seed.

    Stretches last exponential times of mean `every`. A share `spikes` of them stands at `max` for a fifth of that time, a share
    `lulls` at `min`; the others are log-uniform in between.
    """

    min: Rate = Field(description="requests per second that are always exceeded or met")
    max: Rate = Field(description="requests per second that are never exceeded")
    every: Span = Field(description="mean time from jump to jump")
    spikes: Share = Field(0.1, le=1, description="share of stretches that are spikes to max, five times shorter")
    lulls: Share = Field(0.1, le=1, description="share of stretches that are lulls at min")
    lengths: Regimes | None = Field(None, description="spells in which prompts and outputs are longer or shorter")
    seed: int = Field(0, ge=0, description="seed of the jumps; in a scenario the run's, where not given")
    example: ClassVar[dict[str, Any]] = {"min": "2/s", "max": "60/s", "every": "5s", "lengths": {"every": "20s"}, "seed": 7}

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min: {self.min:g}/s is above max: {self.max:g}/s; it must be at most that")
        if self.spikes + self.lulls > 1:
            raise ValueError(f"spikes and lulls add up to {self.spikes + self.lulls:.0%}: together they must be at most 100 %")
        return self

    @cached_property
    def rates(self) -> Walk:
        return Walk(np.random.default_rng([self.seed, 0]), self._stretch)

    @cached_property
    def factors(self) -> Walk:
        return Walk(np.random.default_rng([self.seed, 1]), self._spell)

    def _stretch(self, rng: Generator) -> Stretch:
        kind, where, dwell = rng.random(), rng.random(), self.every * rng.standard_exponential()
        if kind < self.spikes:
            return dwell / 5, self.max
        if kind >= 1 - self.lulls:
            return dwell, self.min
        return dwell, min(self.max, self.min * (self.max / self.min) ** where)

    def _spell(self, rng: Generator) -> Stretch:
        assert self.lengths is not None  # asked only where there are spells
        low, high = self.lengths.min, self.lengths.max
        return self.lengths.every * rng.standard_exponential(), low * (high / low) ** rng.random()

    def rate(self, t: Seconds) -> float:
        return self.rates.at(max(t, 0.0))

    def exposure(self, t: Seconds) -> float:
        return self.rates.area(t) if t > 0 else 0.0

    def peak(self, until: Seconds = math.inf) -> float:
        return self.max

    def regime(self, t: Seconds) -> float:
        """The factor on every length drawn at t."""
        return 1.0 if self.lengths is None else self.factors.at(max(t, 0.0))
