"""The engine at the pace of the clock: one timer for all requests, steps handed out as they end.

Engine time runs `speed` times as fast as the clock. Nothing is handed out early: late, by as much as the process is.
"""

import math
from collections.abc import Callable

from kvbench.clock import Clock
from kvbench.core import Seconds
from kvbench.engine import Machine, Span


class Pace:
    """deliver: called with the spans of one moment, in order, and the engine's time then; settled: called after it."""

    def __init__(
        self, machine: Machine, clock: Clock, speed: float, deliver: Callable[[list[Span], Seconds], None],
        settled: Callable[[], None],
    ) -> None:  # fmt: skip
        if not 0 < speed <= 1e6:
            raise ValueError(f"speed is {speed:g}: from more than 0 to 1000000 times real time")
        self.machine, self.clock, self.speed = machine, clock, speed
        self._deliver, self._settled = deliver, settled
        self._timer = clock.timer(self._wake)

    def _wake(self) -> None:
        self.pump()
        self.arm()

    def pump(self) -> Seconds:
        """Hand out what has happened by now. Returns the engine's time: what happens next happens then. Call arm() after it."""
        now = self.clock.ns() * self.speed / 1e9
        self._deliver(self.machine.advance(now), now)
        self.machine.passed.clear()  # faults come and go unannounced, as they would
        self._settled()
        return now

    def arm(self) -> None:
        """Set the timer for the end of the step in progress, or for what comes before."""
        due = self.machine.tick()
        if math.isinf(due):
            self._timer.cancel()
        else:
            self._timer.at(math.ceil(due * 1e9 / self.speed) / 1e9)

    def shown(self, at: float) -> Seconds:
        """An engine time in ns, or a stretch of it, as seconds of the clock."""
        return at / self.speed / 1e9

    def close(self) -> None:
        self._timer.close()
