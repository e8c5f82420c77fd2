"""What a phase offers: when (an open-loop schedule or closed users) and what (content), as the driver sees them."""

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from kvbench.core import Record, Request, Seconds, UsedUpError

Encode = Callable[[Request], bytes]  # the target's: a request's body
AHEAD: Seconds = 2.0  # content is built at most this long before it is due,
READY = 4096  # at most this many,
ROOM = 64 << 20  # of at most so many bytes before a run,
SLICE: Seconds = 2e-3  # and for at most this long at a time: building must not make a send or a stamp late


class Content(Protocol):
    """What is asked: workload/mix."""

    def next(self, at: Seconds) -> Request: ...
    def follow(self, request: Request, record: Record) -> tuple[Seconds, Request] | None: ...


class Schedule(Protocol):
    """When it is asked, open loop: workload/schedule."""

    @property
    def due(self) -> Seconds: ...
    def ahead(self, k: int) -> Seconds: ...
    def pop(self) -> Seconds: ...
    def relevel(self, level: float, now: Seconds) -> None: ...


class Users(Protocol):
    """When it is asked, closed loop: so many users, each pausing between an answer and the next question."""

    @property
    def concurrency(self) -> int: ...
    def pause(self, rng: Any) -> Seconds: ...


class Source:
    """One phase's arrivals: an open-loop schedule or closed users, and what they ask. `ready` holds content built ahead.

    used_up: why there is no more content than that, "" while there is. wanted: users that should be asking, at this level.
    """

    def __init__(self, content: Content, schedule: Schedule | None = None, users: Users | None = None, rng: Any = None) -> None:
        assert (schedule is None) != (users is None), "a source is an open-loop schedule or closed users"
        self.content, self.schedule, self.users, self.rng = content, schedule, users, rng
        self.ready: deque[Request] = deque()
        self.used_up = ""
        self.wanted = users.concurrency if users is not None else 0

    @property
    def due(self) -> Seconds:
        return self.schedule.due if self.schedule is not None and (self.ready or not self.used_up) else math.inf

    def relevel(self, level: float, now: Seconds) -> None:
        """Offer `level` times as much from `now` on: a rate, or a number of users (at least one)."""
        if self.schedule is not None:
            self.schedule.relevel(level, now)
        elif self.users is not None:
            self.wanted = max(1, round(level * self.users.concurrency))

    def take(self, encode: Encode, at: Seconds) -> Request | None:
        """The next content: built ahead, or now; None where it is used up."""
        return self.ready.popleft() if self.ready else self._build(encode, at)

    def prepare(self, encode: Encode, most: float) -> None:
        """Build, before the clock matters, what falls due in the first seconds; where nothing says when, up to `most`."""
        size = 0
        while len(self.ready) < most and size < ROOM:
            at = self.schedule.ahead(len(self.ready)) if self.schedule is not None else 0.0
            if self.schedule is not None and at > self.due + AHEAD:
                break
            request = self._build(encode, at)
            if request is None:
                break
            self.ready.append(request)
            size += len(request.body)

    def fill(self, encode: Encode, now: Callable[[], Seconds], end: Seconds, left: float) -> Seconds:
        """Build what falls due soon and before `end`, at most `left`; return when to go on (inf: the next due time will do)."""
        began = now()
        while self.schedule is not None and len(self.ready) < min(READY, left):
            at = self.schedule.ahead(len(self.ready))
            if at >= end or math.isinf(at):
                break
            if at > began + AHEAD:
                return at - AHEAD
            request = self._build(encode, at)
            if request is None:
                break
            self.ready.append(request)
            spent = now() - began
            if self.due < began + spent + SLICE:
                break
            if spent > SLICE:
                return began + spent + SLICE
        return math.inf

    def _build(self, encode: Encode, at: Seconds) -> Request | None:
        try:
            request = self.content.next(at)
        except UsedUpError as error:
            self.used_up = str(error)
            return None
        request.body = encode(request)
        return request
