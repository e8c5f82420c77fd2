"""Open-loop load shapes: how many requests are due when. What makes due times of them is `schedule.Schedule`.

Every shape claims a rate (requests/s at level 1) and its exact integral, and names the process that spreads requests along
that integral: `deterministic` puts request k (from 0) where the exposure reaches k, `poisson` puts unit exponential gaps
between them (an inhomogeneous Poisson process by time rescaling). Gaps are never rescaled afterwards.
"""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

from numpy.random import Generator
from pydantic import ConfigDict, Field, ValidationInfo, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from kvbench import units
from kvbench.core import Seconds
from kvbench.units import Duration, Rate, Share, Span
from kvbench.workload import Arrivals
from kvbench.workload.chaos import Chaos
from kvbench.workload.process import Flat, Process, Shape, endless, exponential, regular

INF = math.inf


def _or_inf(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    return INF if value in ("inf", "inf/s", INF) else handler(value)


def _or_zero(value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    if isinstance(value, str):
        zero = units.parse(value, units.RATES, "a rate", "2/s") == 0
    else:
        zero = value == 0 and not (info.context or {}).get("text")  # a bare 0 lacks its unit in a scenario
    return 0.0 if zero else handler(value)


EndlessRate = Annotated[Rate, WrapValidator(_or_inf)]  # "inf": everything at once, for runs bounded by a count
RateFromZero = Annotated[Rate, WrapValidator(_or_zero)]


class Constant(Flat):
    """Requests at equal distances, the first at once."""

    model_config = ConfigDict(allow_inf_nan=True)  # here and in Poisson: the rate may be infinite
    level: EndlessRate = Field(alias="rate", description='requests per second, or "inf": all at once')
    process: ClassVar[str] = "deterministic"
    example: ClassVar[dict[str, Any]] = {"rate": "20/s"}

    def gaps(self, rng: Generator) -> Iterator[float]:
        return regular(rng)


class Poisson(Flat):
    """Independent requests at a constant mean rate: exponential gaps."""

    model_config = ConfigDict(allow_inf_nan=True)
    level: EndlessRate = Field(alias="rate", description='requests per second, or "inf": all at once')
    process: ClassVar[str] = "poisson"
    example: ClassVar[dict[str, Any]] = {"rate": "20/s"}

    def gaps(self, rng: Generator) -> Iterator[float]:
        return exponential(rng)


class Gamma(Flat):
    """Gamma gaps of a chosen coefficient of variation: cv 1 is Poisson, more is clumped, less is regular."""

    cv: float = Field(gt=0, le=100, description="standard deviation of the gaps / their mean")
    process: ClassVar[str] = "gamma"
    example: ClassVar[dict[str, Any]] = {"rate": "20/s", "cv": 2}

    def gaps(self, rng: Generator) -> Iterator[float]:
        shape = 1 / self.cv**2
        return endless(lambda n: rng.gamma(shape, 1 / shape, n))


class Pareto(Flat):
    """Heavy-tailed gaps: P(gap > x) = (x_min / x)^tail; long silences between clumps. Variance is infinite up to tail 2.

    Within a clump requests come at up to tail / (tail - 1) times the rate, 11 times at tail 1.1. Below that a run of any length
    is one clump: the silences that would make up for it do not come in its time, and at tail 1 the mean gap is infinite.
    """

    tail: float = Field(ge=1.1, le=100, description="tail index, at least 1.1: nearer to 1 a run never sees its mean rate")
    process: ClassVar[str] = "pareto"
    example: ClassVar[dict[str, Any]] = {"rate": "20/s", "tail": 2.5}

    def gaps(self, rng: Generator) -> Iterator[float]:
        least = (self.tail - 1) / self.tail  # so that the mean is 1
        return endless(lambda n: least * (1 + rng.pareto(self.tail, n)))


class Ramp(Shape):
    """From one rate to another in a straight line, then on at the second."""

    start: RateFromZero = Field(description="requests per second at the start; may be 0/s")
    end: RateFromZero = Field(description="requests per second at the end and from then on; may be 0/s")
    over: Span = Field(description="how long the change takes")
    example: ClassVar[dict[str, Any]] = {"start": "0/s", "end": "40/s", "over": "60s"}

    @model_validator(mode="after")
    def _some(self) -> Self:
        if self.start == self.end == 0:
            raise ValueError("start and end are both 0/s: one of them must be above 0")
        return self

    def rate(self, t: Seconds) -> float:
        return self.start + (self.end - self.start) * min(t, self.over) / self.over

    def exposure(self, t: Seconds) -> float:
        if t <= 0:
            return 0.0
        sloped = min(t, self.over)
        return (self.start + self.rate(sloped)) / 2 * sloped + self.end * (t - sloped)

    def peak(self, until: Seconds = INF) -> float:
        return max(self.start, self.rate(until))


class Burst(Shape):
    """Many requests at one instant, again every period, over a background. Poisson makes their number random, too."""

    process: Process = "deterministic"
    requests: int = Field(ge=1, le=10_000_000, description="requests in a burst")
    every: Span | None = Field(None, description="from one burst to the next; without it there is a single burst")
    first: Duration = Field(0.0, description="when the first burst comes")
    background: Rate | None = Field(None, description="requests per second all the time, beside the bursts")
    example: ClassVar[dict[str, Any]] = {"requests": 50, "every": "7s", "first": "3s", "background": "5/s"}

    def impulses(self, t: Seconds) -> int:
        """Requests of the bursts before t. Exact to the last bit: burst k is at first + k x every as floats have it."""
        if t <= self.first or self.every is None:
            return self.requests * int(t > self.first)
        k = math.ceil((t - self.first) / self.every)
        while self.first + (k - 1) * self.every >= t:
            k -= 1
        while self.first + k * self.every < t:
            k += 1
        return self.requests * k

    def rate(self, t: Seconds) -> float:
        return self.background or 0.0

    def exposure(self, t: Seconds) -> float:
        return self.impulses(t) + (self.background or 0.0) * max(t, 0.0)

    def peak(self, until: Seconds = INF) -> float:
        return self.background or 0.0


class Stair(Shape):
    """Steps up, each by a share of the step before: 20 % five times is 2.49-fold. `max` ends the climb."""

    start: Rate = Field(description="requests per second on the first step")
    step: Share = Field(gt=0, le=100, description="rise from each step to the next, compounded")
    every: Span = Field(description="how long a step lasts")
    max: Rate | None = Field(None, description="requests per second that are not exceeded")
    example: ClassVar[dict[str, Any]] = {"start": "10/s", "step": "20%", "every": "10s", "max": "25/s"}

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.max is not None and self.max < self.start:
            raise ValueError(f"max: {self.max:g}/s is below start: {self.start:g}/s; it must be at least that")
        return self

    @cached_property
    def climb(self) -> float:
        """How many steps stay below `max`."""
        return INF if self.max is None else math.ceil(math.log(self.max / self.start) / math.log1p(self.step))

    def _on(self, step: float) -> float:
        if step >= self.climb:
            return self.max or INF
        growth = step * math.log1p(self.step)
        return min(self.start * math.exp(growth), self.max or INF) if growth < 600 else INF  # e^709 is the last float

    def rate(self, t: Seconds) -> float:
        return self._on(t // self.every)

    def exposure(self, t: Seconds) -> float:
        if t <= 0:
            return 0.0
        step = min(t // self.every, self.climb)
        growth = step * math.log1p(self.step)
        whole = math.expm1(growth) / self.step if growth < 600 else INF  # 1 + (1 + step) + ... over the steps behind
        return self.start * self.every * whole + self._on(step) * (t - step * self.every)

    def peak(self, until: Seconds = INF) -> float:
        return self.max or INF if math.isinf(until) else self.rate(until)


class Wave(Shape):
    """A sine: rate = mean x (1 + amplitude x sin(2 pi (t + phase) / period))."""

    mean: Rate = Field(description="requests per second over a whole period")
    amplitude: Share = Field(le=1, description="height of the crest above the mean; 100% touches zero in the trough")
    period: Span = Field(description="from crest to crest")
    phase: Duration = Field(0.0, description="how far into the period it starts; a quarter starts at the crest")
    example: ClassVar[dict[str, Any]] = {"mean": "20/s", "amplitude": "80%", "period": "30s", "phase": "4s"}

    def rate(self, t: Seconds) -> float:
        return self.mean * (1 + self.amplitude * math.sin(math.tau * (t + self.phase) / self.period))

    def exposure(self, t: Seconds) -> float:
        if t <= 0:
            return 0.0
        turn = math.tau / self.period
        swing = math.cos(turn * self.phase) - math.cos(turn * (t + self.phase))
        return self.mean * (t + self.amplitude / turn * swing)

    def peak(self, until: Seconds = INF) -> float:
        crest = (self.period / 4 - self.phase) % self.period
        return self.mean * (1 + self.amplitude) if crest <= until else max(self.rate(0.0), self.rate(until))


ARRIVALS: dict[str, type[Arrivals]] = {
    "constant": Constant,
    "poisson": Poisson,
    "gamma": Gamma,
    "pareto": Pareto,
    "ramp": Ramp,
    "burst": Burst,
    "stair": Stair,
    "wave": Wave,
    "chaos": Chaos,
}
