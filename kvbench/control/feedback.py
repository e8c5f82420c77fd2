"""Queue feedback: holds the server's waiting queue near a target by the admitted rate.

A queue integrates what arrives less what is served, so a controller of it must not integrate much by itself: both modes answer to
how far the queue is from its target, around a rate that the server is known to take. Where a queue only forms once the KV cache
is full, the limit on KV usage acts first, and the queue stays short.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kvbench.control import Law
from kvbench.control.follow import FLOOR, Follow, Follower, binding
from kvbench.control.law import SIGNALS, Ceiling
from kvbench.core import Seconds, Window
from kvbench.units import Share

FOLLOWING: Seconds = 20.0  # time constant with which the served rate is followed
LONGEST = 10.0  # targets: a queue beyond says no more


class QueueFeedback(Follower):
    """Holds the server's waiting queue at a target by the admitted rate."""

    target_queue: Annotated[float, Field(gt=0, le=1e6)] = Field(8.0, description="requests waiting in the server")
    mode: Literal["aimd", "gradient"] = Field(
        "gradient", description="gradient: the rate in proportion to what the queue lacks; aimd: up by steps, down by a share"
    )
    gain: Annotated[float, Field(gt=0, le=10)] = Field(1.0, description="gradient: share of the served rate per relative error")
    up: Share = Field(0.05, gt=0, description="aimd: rise in a second while the queue is short, as a share of the first rate")
    down: Share = Field(
        0.3, gt=0, lt=1, description="aimd: what a queue above the target takes off the rate, at most once in `over`"
    )
    example: ClassVar[dict[str, Any]] = {"target_queue": 8}

    def arm(self, offered: float | None) -> Law:
        return Follow(self, SIGNALS["waiting"], MODES[self.mode](self), Ceiling(self.kv_limit, self.every))


class Gradient:
    """Served rate x (1 + gain x (1 - queue / target)): proportional action around a slowly followed rate."""

    def __init__(self, spec: QueueFeedback) -> None:
        self.spec = spec
        self.served = self.error = 0.0

    def begin(self, rate: float, value: float) -> None:
        self.served = rate

    def rate(self, value: float, entered: float, window: Window) -> float:
        spec = self.spec
        self.error = 1 - min(value / spec.target_queue, LONGEST)
        if binding(window):
            self.served += min(1.0, spec.every / FOLLOWING) * (max(entered, FLOOR * self.served) - self.served)
        return self.served * (1 + spec.gain * self.error)

    def state(self) -> dict[str, float]:
        return {"error": self.error, "served": self.served}


class Aimd:
    """Additive increase while the queue is at most the target and all of the rate is used; multiplicative decrease above it, or
    where the cache was full; then none before `over` has passed: the queue needs that time to show what the decrease did."""

    def __init__(self, spec: QueueFeedback) -> None:
        self.spec = spec
        self.error = self.step = self.now = 0.0
        self.wait: Seconds = 0.0  # before the next decrease

    def begin(self, rate: float, value: float) -> None:
        self.now, self.step = rate, rate

    def rate(self, value: float, entered: float, window: Window) -> float:
        spec = self.spec
        self.error = 1 - min(value / spec.target_queue, LONGEST)
        self.wait = max(0.0, self.wait - spec.every)
        shut = binding(window) and entered <= 0
        if (self.error < 0 or shut) and not self.wait:
            self.now, self.wait = (1 - spec.down) * (self.now if shut else min(self.now, entered)), spec.over
        elif self.error >= 0 and entered >= self.now:
            self.now += spec.up * self.step * spec.every
        return self.now

    def state(self) -> dict[str, float]:
        return {"error": self.error, "cooling": self.wait}


MODES: dict[str, type[Gradient] | type[Aimd]] = {"gradient": Gradient, "aimd": Aimd}
