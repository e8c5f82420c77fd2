"""What laws have in common: what a scenario may say of every one, the signals they read, and the KV usage none of them passes.

A signal that is missing or stale is no signal: a law then holds still, which is to return what it returned before, and counts it.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvbench import units
from kvbench.control import Law
from kvbench.core import Limits, Seconds, Window
from kvbench.units import Duration, Span

INF = math.inf
TAPER = 0.2  # KV usage below the limit within which less and less is admitted
Count = Annotated[int, Field(ge=1, le=10**9)]


class Open(BaseModel):
    """No law: arrivals are sent as they fall due. A cap on requests in flight may still hold them."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    example: ClassVar[dict[str, Any]] = {}  # what the contract tests, and a comparison of laws, give where there is no default
    inflight: Count | None = Field(default=None, description="most requests in flight; without it there is no cap")
    patience: Span = Field(default=30.0, description="how long a request waits to be let in before it is shed")
    every: Span = Field(default=1.0, description="the control period: whole seconds, at most 60s")
    over: Span = Field(default=5.0, description="what the rates and latencies that a law reads cover: whole seconds, at most 10m")
    retry_after: Duration = Field(
        default=0.0, description="longest wait that a server's Retry-After (429, 503) is granted; 0s: it is not heeded"
    )

    @field_validator("every")
    @classmethod
    def _period(cls, value: Seconds) -> Seconds:
        return _whole(value, 60)

    @field_validator("over")
    @classmethod
    def _span(cls, value: Seconds) -> Seconds:
        return _whole(value, 600)

    def limits(self, rate: float = INF, burst: float = 1.0) -> Limits:
        """The gate's limits at this rate. Without arguments: those in force until the law is first asked."""
        return Limits(rate=rate, burst=burst, inflight=self.inflight or INF, patience=self.patience, retry_after=self.retry_after)

    def arm(self, offered: float | None) -> Law | None:
        """The law for one run; None: the limits stay as they are. `offered`: mean requests/s of the load shape at level 1, None
        where it cannot say."""
        return None


def _whole(value: Seconds, most: int) -> Seconds:
    if value % 1 or not 1 <= value <= most:
        raise ValueError(f"must be whole seconds, 1s to {units.duration(most)}: the run looks once a second")
    return value


class Signal(NamedTuple):
    """Something a law can hold: the window's value, the gauge whose age counts ("" where our own requests give it), and how a
    set-point of it is written."""

    value: str
    gauge: str
    table: Mapping[str, float] | None  # of units; None: a plain number
    what: str
    example: str

    def read(self, window: Window, every: Seconds) -> float | None:
        """The value, or None where there is none or it is older than two control periods and a second."""
        value = window.values.get(self.value)
        if value is None or not math.isfinite(value):
            return None
        if self.gauge and window.age.get(self.gauge, INF) > 2 * every + 1:
            return None
        return value

    def setpoint(self, written: object) -> float:
        """A set-point in base units. Raises ValueError on a missing or other unit, and on what is not above zero."""
        if isinstance(written, str) and self.table is not None:
            number = units.parse(written, dict(self.table), self.what, self.example)
        elif isinstance(written, (int, float)) and not isinstance(written, bool):
            number = float(written)
        else:
            raise ValueError(f"{written!r} is not {self.what}: write it as {self.example}")
        if not 0 < number < INF:
            raise ValueError(f"{written!r} is out of range: {self.what} above zero is needed, for example {self.example}")
        return number


SIGNALS: dict[str, Signal] = {
    "kv_usage": Signal("kv_usage_last", "kv_usage", units.SHARES, "a share", "80%"),
    "waiting": Signal("waiting_last", "waiting", None, "a number of requests", "8"),
    "ttft": Signal("ttft_p50", "", units.DURATIONS, "a duration", "800ms"),
    "gpu_memory": Signal("gpu_memory_last", "gpu_memory", units.SHARES, "a share", "85%"),
}
"""Fast signals of the server. Response latency is not among them, and must not be: it contains the wait at our own gate."""


class Ceiling:
    """The KV usage from which nothing more is admitted, and the room before it, in which less and less is. What was admitted goes
    on growing token by token, so the usage that counts is the one a control period on, by the trend.
    """

    def __init__(self, limit: float, every: Seconds, taper: float = TAPER) -> None:
        self.limit, self.every, self.taper = limit, every, taper
        self.share = 1.0  # of a law's rate that may be let in
        self._last: tuple[Seconds, float] | None = None

    def look(self, window: Window) -> float:
        """That share, 0 to 1; asked once per control period. A stale reading leaves it as it was; without any it is 1."""
        usage = SIGNALS["kv_usage"].read(window, self.every)
        if usage is None:
            self._last = None
            return self.share
        before, self._last = self._last, (window.end, usage)
        rise = (usage - before[1]) / (window.end - before[0]) if before is not None and window.end > before[0] else 0.0
        room = self.limit - usage - max(rise, 0.0) * self.every
        self.share = float(min(max(room / self.taper, 0.0), 1.0))
        return self.share
