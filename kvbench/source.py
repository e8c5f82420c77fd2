"""What a phase offers: when (an open-loop schedule or closed users) and what (content), as the driver sees them."""

import math
from collections import deque
from typing import Any, Protocol

from kvbench.core import Record, Request, Seconds


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


class Users(Protocol):
    """When it is asked, closed loop: so many users, each pausing between an answer and the next question."""

    @property
    def concurrency(self) -> int: ...
    def pause(self, rng: Any) -> Seconds: ...


class Source:
    """One phase's arrivals: an open-loop schedule or closed users, and what they ask."""

    def __init__(self, content: Content, schedule: Schedule | None = None, users: Users | None = None, rng: Any = None) -> None:
        assert (schedule is None) != (users is None), "a source is an open-loop schedule or closed users"
        self.content, self.schedule, self.users, self.rng = content, schedule, users, rng
        self.ready: deque[Request] = deque()  # content built ahead

    @property
    def due(self) -> Seconds:
        return self.schedule.due if self.schedule is not None else math.inf
