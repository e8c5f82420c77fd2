"""How this process itself is doing: whether the client, and not the server, is the bottleneck."""

import math

from kvbench.clock import Clock, cpu_time, wall_time
from kvbench.core import Seconds

LAG_EVERY: Seconds = 0.02  # how often the event loop's own lateness is measured


class Pulse:
    """Our own state, once a second: how late the event loop ran, CPU share of this process, drift of the wall clock.

    Lateness is sampled on an absolute grid, and a stall counts for every sample it swallowed: a 300 ms stall is 15 samples of 300
    down to 0 ms, not one. In virtual time there is nothing to measure.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lags: list[Seconds] = []
        self.timer = None if clock.virtual else clock.timer(self._beat)
        self.next: Seconds = 0.0
        self.cpu, self.at = cpu_time(), clock.now()
        self.anchor = wall_time() - clock.now()
        if self.timer is not None:
            self._arm()

    def _arm(self) -> None:
        assert self.timer is not None
        self.next = (math.floor(self.clock.now() / LAG_EVERY) + 1) * LAG_EVERY
        self.timer.at(self.next)

    def _beat(self) -> None:
        now = self.clock.now()
        while self.next <= now:
            self.lags.append(now - self.next)
            self.next += LAG_EVERY
        self._arm()

    def read(self, at: Seconds) -> dict[str, float]:
        if self.timer is None:
            return {}
        lags, self.lags = sorted(self.lags), []
        cpu, now = cpu_time(), self.clock.now()
        values = {"cpu": (cpu - self.cpu) / max(1e-3, now - self.at), "wall_drift": wall_time() - now - self.anchor}
        self.cpu, self.at = cpu, now
        if lags:
            values |= {"loop_lag_p99": lags[math.ceil(0.99 * len(lags)) - 1], "loop_lag_max": lags[-1]}
        return values

    def close(self) -> None:
        if self.timer is not None:
            self.timer.close()
