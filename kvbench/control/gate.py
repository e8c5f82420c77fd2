"""How much may enter: a token bucket, a cap on requests in flight, bounded patience. Analytic: no ticks, no clock."""

import math
from collections import deque
from typing import Any

from kvbench.core import Limits, Seconds


class Gate:
    """First come, first served under Limits(rate, burst, inflight, patience).

    The bucket holds at most `burst` tokens and gains `rate` a second; a request takes one. What cannot enter waits in order;
    what has waited longer than `patience` is shed. The instant of release is computed, not observed: it is when the limits first
    allowed the request, however late the caller wakes.
    """

    def __init__(self, limits: Limits, now: Seconds = 0.0) -> None:
        self.limits = limits
        self.inflight = 0
        self.blocked = 0  # requests that could not enter at once
        self._tokens = limits.burst
        self._stamp = now  # when _tokens was right
        self._slot_at = now  # when a place last became free
        self._queue: deque[tuple[Any, Seconds]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def enter(self, item: Any, now: Seconds) -> bool:
        """True: it may go at once. False: it waits, and a later pump will release or shed it."""
        if not self._queue and self.inflight < self.limits.inflight and self._token_at() <= now:
            self._take(now)
            return True
        self.blocked += 1
        self._queue.append((item, now))
        return False

    def leave(self, now: Seconds) -> None:
        """A request that had entered is over."""
        self.inflight -= 1
        assert self.inflight >= 0, "more requests left the gate than entered"
        self._slot_at = now

    def pump(self, now: Seconds) -> tuple[list[tuple[Any, Seconds]], list[tuple[Any, Seconds]]]:
        """(released with the instant of release, shed with the instant at which patience ended), both in order of arrival."""
        released: list[tuple[Any, Seconds]] = []
        shed: list[tuple[Any, Seconds]] = []
        while self._queue:
            item, since = self._queue[0]
            deadline = since + self.limits.patience
            at = max(since, self._token_at(), self._slot_at)
            if self.inflight < self.limits.inflight and at <= min(now, deadline):
                self._queue.popleft()
                self._take(at)
                released.append((item, at))
            elif deadline <= now:
                self._queue.popleft()
                shed.append((item, deadline))
            else:
                break
        return released, shed

    def wake(self, now: Seconds) -> Seconds:
        """When pump has something to do next, if nothing leaves before: the next token or the end of a patience. inf: never."""
        if not self._queue:
            return math.inf
        deadline = self._queue[0][1] + self.limits.patience
        if self.inflight >= self.limits.inflight:
            return deadline
        return min(deadline, max(now, self._token_at()))

    def relimit(self, limits: Limits, now: Seconds) -> None:
        """New limits from now on: tokens earned so far are kept (at most the new burst), the remaining gap is rescaled."""
        self._refill(now)
        self.limits = limits
        self._tokens = min(self._tokens, limits.burst)

    def waiting(self) -> list[Any]:
        """Everything that waits, in order of arrival."""
        return [item for item, _ in self._queue]

    def withdraw(self) -> list[Any]:
        """Everything that still waits, taken out: the phase is over."""
        items = self.waiting()
        self._queue.clear()
        return items

    def _token_at(self) -> Seconds:
        """When the next whole token is there."""
        if self._tokens >= 1 or math.isinf(self.limits.rate):
            return self._stamp
        if self.limits.rate <= 0:
            return math.inf
        return self._stamp + (1 - self._tokens) / self.limits.rate

    def _refill(self, at: Seconds) -> None:
        if at > self._stamp:
            if math.isinf(self.limits.rate):
                self._tokens = self.limits.burst
            else:
                self._tokens = min(self.limits.burst, self._tokens + (at - self._stamp) * self.limits.rate)
            self._stamp = at

    def _take(self, at: Seconds) -> None:
        due = self._token_at()
        self._refill(max(at, due))
        self._tokens = max(0.0, self._tokens - 1) if math.isfinite(self.limits.rate) else self.limits.burst
        self.inflight += 1
