"""Small plants for laws, from textbooks: what a server's signal does when so many requests a second are let in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.control import Law
from kvbench.core import Window


@dataclass
class Lag:
    """First order: y follows gain x rate with time constant tau, and cannot pass `top`."""

    gain: float
    tau: float
    top: float = 1.0
    y: float = 0.0

    def step(self, rate: float) -> float:
        self.y = min(self.top, self.y + (self.gain * rate - self.y) / self.tau)
        return self.y


@dataclass
class Queue:
    """A queue: what is let in waits, and `served` a second leave."""

    served: float
    y: float = 0.0

    def step(self, rate: float) -> float:
        self.y = max(0.0, self.y + rate - self.served)
        return self.y


@dataclass
class Played:
    """Second by second: the signal, the law's limit, what was let in."""

    signal: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    entered: list[float] = field(default_factory=list)
    states: list[dict[str, float]] = field(default_factory=list)


def play(
    law: Law, plant: Any, offered: Sequence[float], show: Callable[[float], dict[str, float]], start: float = float("inf")
) -> Played:
    """Offer so much each second; what is above the limit is shed at once. `show`: the signal as the window's values."""
    out, limit = Played(), start
    recent: list[float] = []
    for second, want in enumerate(offered, 1):
        entered = min(limit, want)
        recent = [*recent, entered][-5:]
        y = plant.step(entered)
        values: dict[str, float | None] = {**show(y), "admitted_rate": sum(recent) / len(recent)}
        held = int(want > limit)
        ages = {"kv_usage": 0.0, "waiting": 0.0, "gpu_memory": 0.0}
        seen = Window(start=max(0, second - 5), end=second, counts={"held": 0, "shed": held}, values=values, age=ages)
        limit = law.update(seen).rate
        out.signal.append(y)
        out.rate.append(limit)
        out.entered.append(entered)
        out.states.append(law.state())
    return out
