"""PID: holds one signal at a set-point by the admitted rate.

The form is that of Astrom and Hagglund: set-point weight, derivative on the measurement and filtered, anti-windup by
back-calculation, bumpless start. The signal is taken relative to the set-point and the rate relative to a nominal rate: gains are
pure numbers that fit a card which serves 2/s as well as a cluster which serves 200/s. The nominal rate is the scenario's where it
gives one; else it begins at the load's mean and follows, slowly, what is admitted while the signal is held near its set-point.
All signals rise with the rate, so a positive error (set-point - signal) always asks for more.
"""

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, WithJsonSchema, field_validator, model_validator

from kvbench import units
from kvbench.control import Law
from kvbench.control.follow import FLOOR, Follow, Follower, binding
from kvbench.control.law import SIGNALS, TAPER, Ceiling
from kvbench.core import Seconds, Window
from kvbench.units import Duration, Rate, Share, Span

FOLLOWING: Seconds = 60.0  # time constant with which the nominal rate follows
FARTHEST = 10.0  # set-points: a signal beyond says no more
NEAR = 0.25  # relative error up to which the signal is near its set-point


class Pid(Follower):
    """Holds a signal at a set-point by the admitted rate: proportional, integral and derivative parts of the relative error."""

    signal: Literal["kv_usage", "waiting", "ttft", "gpu_memory"] = Field("kv_usage", description="what is held")
    setpoint: Annotated[float, Field(gt=0), WithJsonSchema({"type": ["string", "number"], "examples": ["80%", 8, "800ms"]})] = (
        Field(description="in the signal's unit: 80% (kv_usage, gpu_memory), 8, 800ms")
    )
    kp: Annotated[float, Field(gt=0, le=1000)] = Field(0.8, description="gain: share of the nominal rate per relative error")
    ti: Span = Field(6.0, description="integral time, not below the control period")
    td: Duration = Field(1.0, description="derivative time; 0s: no derivative part")
    n: Annotated[float, Field(ge=1, le=100)] = Field(10.0, description="the derivative is filtered with td / n")
    b: Annotated[float, Field(ge=0, le=1)] = Field(1.0, description="how much of the set-point the proportional part sees")
    tt: Span | None = Field(None, description="tracking time of the anti-windup; left out, sqrt(ti x td), or ti where td is 0s")
    nominal: Rate | None = Field(
        None, description="rate that gains refer to; left out, the load's mean, then what is admitted near the set-point"
    )
    slew: Share | None = Field(None, description="most that the rate changes in a second, as a share of the nominal rate")
    example: ClassVar[dict[str, Any]] = {"setpoint": "80%"}

    @field_validator("setpoint", mode="before")
    @classmethod
    def _in_unit(cls, value: Any, info: ValidationInfo) -> float:
        signal = SIGNALS.get(info.data.get("signal", ""))
        if signal is None:
            return 1.0  # the signal's own error is told
        if info.context and info.context.get("text") and signal.table is not None and not isinstance(value, str):
            raise ValueError(f"{value!r} has no unit: {signal.what} is written with one of {', '.join(signal.table)}")
        return signal.setpoint(value)

    @model_validator(mode="after")
    def _slower(self) -> Self:
        if self.ti < self.every:
            raise ValueError(f"ti: {units.duration(self.ti)} is below the control period; it must be at least every")
        if self.signal == "kv_usage" and self.setpoint >= self.kv_limit:
            raise ValueError(f"setpoint: {units.share(self.setpoint)} is not below kv_limit, {units.share(self.kv_limit)}")
        return self

    def tracking(self) -> Seconds:
        """The time constant of the back-calculation."""
        return self.tt or (math.sqrt(self.ti * self.td) if self.td else self.ti)

    def arm(self, offered: float | None) -> Law:
        room = (self.kv_limit - self.setpoint) / 2 if self.signal == "kv_usage" else TAPER
        return Follow(self, SIGNALS[self.signal], PidRule(self, offered), Ceiling(self.kv_limit, self.every, min(TAPER, room)))


class PidRule:
    """The controller during one run. Rates are requests/s; y is the signal / the set-point."""

    def __init__(self, spec: Pid, offered: float | None) -> None:
        self.spec, self.tt = spec, spec.tracking()
        self.nominal = spec.nominal or offered or 0.0
        self.p = self.i = self.d = self.v = 0.0
        self._y = 0.0
        self._answer = 0.0

    def begin(self, rate: float, value: float) -> None:
        self.nominal = self.nominal or rate
        self._y = self._relative(value)
        self.v = self._answer = rate
        self.p = self._proportional(self._y)
        self.i = rate - self.p

    def rate(self, value: float, entered: float, window: Window) -> float:
        spec, h, y = self.spec, self.spec.every, self._relative(value)
        if spec.nominal is None and binding(window) and abs(1 - y) <= NEAR:
            self.nominal += min(1.0, h / FOLLOWING) * (max(entered, FLOOR * self.nominal) - self.nominal)
        self.i += self.nominal * spec.kp * h / spec.ti * (1 - y) + min(1.0, h / self.tt) * (entered - self.v)
        self.d = (spec.td * self.d - self.nominal * spec.kp * spec.td * spec.n * (y - self._y)) / (spec.td + spec.n * h)
        self.p, self._y = self._proportional(y), y
        self.v = self.p + self.i + self.d
        self._answer = self._slewed(self.v)
        return self._answer

    def state(self) -> dict[str, float]:
        parts = {"p": self.p, "i": self.i, "d": self.d, "v": self.v}
        return {"error": 1 - self._y, "nominal": self.nominal, **parts}

    def _proportional(self, y: float) -> float:
        return self.nominal * self.spec.kp * (self.spec.b - y)

    def _relative(self, value: float) -> float:
        return min(value / self.spec.setpoint, FARTHEST)

    def _slewed(self, v: float) -> float:
        if self.spec.slew is None:
            return v
        most = self.spec.slew * self.nominal * self.spec.every
        return min(max(v, self._answer - most), self._answer + most)
