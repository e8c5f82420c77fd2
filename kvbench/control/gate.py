"""How much may enter: a token bucket, a cap on requests in flight, bounded patience. Analytic: no ticks, no clock."""

import math
from collections import deque
from typing import Any

from kvbench.core import Limits, Seconds

STEP: Seconds = 1e-9  # the clock's own: a token that is due within it is there
SLACK: Seconds = 0.02  # how late this tool may be and still use, all at once, the tokens that it missed meanwhile


class Gate:
    """First come, first served under Limits(rate, burst, inflight, patience, retry_after).

    The bucket holds at most `burst` tokens and gains `rate` a second; a request takes one. At rate 0 the gate is shut. What
    cannot enter waits in order; what has waited longer than `patience` is shed. The instant of release is computed, not observed:
    it is when the limits first allowed the request, however late the caller wakes. Only a bucket does not make up for more than
    SLACK of that: see `settle`.
    """

    def __init__(self, limits: Limits, now: Seconds = 0.0) -> None:
        self.limits = limits
        self.inflight = 0
        self.blocked = 0  # requests that could not enter at once
        self.postponed = 0  # of them: only because this tool was late and its bucket did not wait
        self.holds = 0  # how often the gate was closed
        self.closed: Seconds = 0.0  # and for how long in all, to the end of the last hold
        self.open_at: Seconds = -math.inf  # nothing is released before
        self._depth = max(1.0, limits.burst)  # a bucket that holds less than one request would never let one pass
        self._tokens = self._depth
        self._stamp = now  # when _tokens was right
        self._ready = now  # where there is a whole token: since when
        self._slot_at = -math.inf  # when the cap last ceased to bind
        self._settled = -math.inf
        self._queue: deque[tuple[Any, Seconds]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def enter(self, item: Any, now: Seconds) -> bool:
        """True: it may go at once. False: it waits, and a later pump will release or shed it."""
        if not self._queue and self.inflight < self.limits.inflight and self._allowed_at() <= now + STEP:
            self._take(now)
            return True
        self.blocked += 1
        self.postponed += now < self._settled and self._token_at() > now
        self._queue.append((item, now))
        return False

    def leave(self, now: Seconds) -> None:
        """A request that had entered is over."""
        if self.inflight >= self.limits.inflight:
            self._slot_at = max(self._slot_at, now)
        self.inflight -= 1
        assert self.inflight >= 0, "more requests left the gate than entered"

    def pump(self, now: Seconds) -> tuple[list[tuple[Any, Seconds]], list[tuple[Any, Seconds]]]:
        """(released with the instant of release, shed with the instant at which patience ended), both in order of arrival."""
        released: list[tuple[Any, Seconds]] = []
        shed: list[tuple[Any, Seconds]] = []
        self.settle(now)
        while self._queue:
            item, since = self._queue[0]
            deadline = since + self.limits.patience
            at = max(since, self._allowed_at())
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

    def settle(self, now: Seconds) -> None:
        """It is `now`: of the tokens that nobody fetched, those older than SLACK are lost where the bucket is full.

        Call it before offering what fell due. A caller that was stalled so lets out at most burst + rate x SLACK at once, and
        not all that it missed; the requests which that holds back are counted as `postponed`. An idle bucket is merely full.
        """
        until = now - SLACK
        if math.isinf(self.limits.rate) or self._token_at() >= until:
            return
        if self._queue and self.inflight < self.limits.inflight:
            start = max(self._queue[0][1], self._allowed_at())  # since then nothing but our absence held it
            gathered = min(self._depth, self._tokens + (start - self._stamp) * self.limits.rate)
            missed = math.floor(gathered + (until - start) * self.limits.rate - self._depth)
            self.postponed += max(0, min(len(self._queue), missed))
        self._refill(until)
        self._settled = until

    def wake(self, now: Seconds) -> Seconds:
        """When pump has something to do next, if nothing leaves before: the next token, the end of a hold or of a patience. inf:
        never."""
        if not self._queue:
            return math.inf
        deadline = self._queue[0][1] + self.limits.patience
        if self.inflight >= self.limits.inflight:
            return deadline
        return min(deadline, max(now, self._allowed_at()))

    def hold(self, seconds: Seconds, now: Seconds) -> None:
        """A server asks for that long a pause, and gets it up to limits.retry_after: nothing is released before it is over.
        Patience goes on meanwhile, and tokens gather as they always do."""
        until = now + min(seconds, self.limits.retry_after)
        if until <= max(now, self.open_at):
            return
        self.holds += now >= self.open_at  # else the present hold only becomes longer
        self.closed += until - max(now, self.open_at)
        self.open_at = until

    def relimit(self, limits: Limits, now: Seconds) -> None:
        """New limits from now on: tokens earned so far are kept (at most the new burst), the remaining gap is rescaled."""
        if limits == self.limits:
            return
        self._refill(now)
        if self.limits.rate <= 0:
            self._ready = now  # it was shut: what was saved before may go from now on
        if self.limits.inflight <= self.inflight < limits.inflight:
            self._slot_at = now
        self.limits, self._depth = limits, max(1.0, limits.burst)
        self._tokens = min(self._tokens, self._depth)
        if math.isinf(limits.rate) and self._tokens < 1:
            self._tokens, self._ready = self._depth, now

    def told(self) -> dict[str, Any]:
        """For the end of the run."""
        return {"blocked": self.blocked, "postponed": self.postponed, "holds": self.holds, "closed": self.closed}

    def waiting(self) -> list[Any]:
        """Everything that waits, in order of arrival."""
        return [item for item, _ in self._queue]

    def withdraw(self) -> list[Any]:
        """Everything that still waits, taken out: the phase is over."""
        items = self.waiting()
        self._queue.clear()
        return items

    def _allowed_at(self) -> Seconds:
        """When bucket, cap and holds allow, or allowed, the next request; the cap as far as it has a place now."""
        return max(self._token_at(), self._slot_at, self.open_at)

    def _token_at(self) -> Seconds:
        """When the next whole token will be, or was, there."""
        if self.limits.rate <= 0:
            return math.inf  # shut, whatever was saved
        if self._tokens >= 1:
            return self._ready
        return self._stamp + (1 - self._tokens) / self.limits.rate

    def _refill(self, at: Seconds) -> None:
        if at <= self._stamp:
            return
        if self.limits.rate > 0:
            self._ready = self._token_at()
        self._tokens = min(self._depth, self._tokens + (at - self._stamp) * self.limits.rate)
        self._stamp = at

    def _take(self, at: Seconds) -> None:
        if math.isfinite(self.limits.rate):
            self._refill(max(at, self._token_at()))
            self._tokens = max(0.0, self._tokens - 1)
            self._ready = self._stamp
        self.inflight += 1
