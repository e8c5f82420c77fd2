"""The shell of laws that follow a signal: still without one, rates within bounds, the gate shut near a full cache.

What a law decides is a Rule's business. The rule is told what came of its last rate, so that it does not wind up while the gate
holds nothing: then the offered load is what limits, and turning the rate up changes nothing.
"""

import math
from typing import Annotated, Any, Final, Protocol, Self

from pydantic import Field, model_validator

from kvbench.control.law import INF, Ceiling, Open, Signal
from kvbench.core import Limits, Window
from kvbench.units import Rate, Share

HEADROOM = 2.0  # admitted rates: where the gate holds nothing, a limit this far above them is as good as any other
FLOOR = 0.01  # of the rate a law began with: the least where none is given


class Follower(Open):
    """What every law that follows a signal may be told."""

    start: Rate | None = Field(None, description="the rate until there is a signal; left out, whatever is offered")
    min: Rate | None = Field(None, description="least rate while the gate is open; left out, 1% of the rate it began with")
    max: Rate | None = Field(None, description="highest rate; left out, there is none")
    kv_limit: Annotated[Share, Field(gt=0, le=1)] = Field(
        0.9, description="KV usage at or above which nothing more is admitted, and less and less shortly before it"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min: {self.min:g}/s is above max: {self.max:g}/s; it must be at most that")
        return self

    def limits(self, rate: float | None = None, burst: float = 1.0) -> Limits:
        return super().limits(min(self.start or INF, self.max or INF) if rate is None else rate, burst)


class Rule(Protocol):
    """What a law that follows a signal decides by."""

    def begin(self, rate: float, value: float) -> None:
        """The first signal is there, and so many requests/s are let in: go on from that without a jump."""
        ...

    def rate(self, value: float, entered: float, window: Window) -> float:
        """Requests/s from now on. `entered`: what came of the last answer, less than it where the gate held nothing."""
        ...

    def state(self) -> dict[str, float]: ...


class Follow:
    """A law for one run: `rule` on `signal` within what `spec` allows."""

    def __init__(self, spec: Follower, signal: Signal, rule: Rule, ceiling: Ceiling) -> None:
        self.spec: Final = spec
        self.signal, self.rule, self.ceiling = signal, rule, ceiling
        self.limits = spec.limits()
        self.low = spec.min or 0.0
        self.updates = self.stale = self.saturated = self.shut = 0
        self._rate: float | None = None  # the rule's last answer within bounds; None: it has not begun

    def update(self, window: Window) -> Limits:
        self.updates += 1
        value = self.signal.read(window, self.spec.every)
        if value is None:
            self.stale += 1
        else:
            self._decide(value, window)
        share = self.ceiling.look(window)
        self.shut += share == 0
        if self._rate is not None:
            rate = share * self._rate
            self.limits = self.spec.limits(
                rate, max(1.0, rate * self.spec.every)
            )  # arrivals are uneven: a period's worth at once
        return self.limits

    def _decide(self, value: float, window: Window) -> None:
        admitted, held = window.values.get("admitted_rate") or 0.0, binding(window)
        if not math.isfinite(admitted):
            admitted = 0.0
        if self._rate is None:
            rate = min(self.limits.rate, admitted)
            if rate <= 0:
                return  # nothing was let in yet: there is no rate to go on from
            self.low = self.spec.min or FLOOR * rate
            self.rule.begin(rate, value)
            entered = rate
        else:
            entered = self.limits.rate if held else min(self.limits.rate, HEADROOM * admitted)
            self.saturated += not held
        self._rate = min(max(self.rule.rate(value, entered, window), self.low), self.spec.max or INF)

    def state(self) -> dict[str, float]:
        return {"share": self.ceiling.share, **self.rule.state()}

    def told(self) -> dict[str, Any]:
        return {"updates": self.updates, "stale": self.stale, "saturated": self.saturated, "shut": self.shut}


def binding(window: Window) -> bool:
    """Whether the limits held anything up. Where they did not, the offered load is what limits."""
    return window.counts.get("held", 0) + window.counts.get("shed", 0) > 0
