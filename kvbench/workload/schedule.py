"""Due times: an arrival shape, or the stamps of a trace, on the run's clock under a load level that may change while it runs."""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import accumulate, count
from typing import Annotated, Any

from numpy.random import Generator
from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema

from kvbench.core import Seconds
from kvbench.units import Duration, Span
from kvbench.workload import Arrivals
from kvbench.workload.arrivals import Constant
from kvbench.workload.spec import Spec, choices, named, written

INF = math.inf
CLOSE = 1e-9  # seconds: stamps are whole nanoseconds
FAR = 1e12  # seconds: a shape that has not reached its next request by then never will
NEWTON = 12  # steps after which bisection takes over


def reach(shape: Arrivals, goal: float, low: Seconds) -> Seconds:
    """The last t >= low with exposure(t) <= goal: where a request due at exposure `goal` falls; inf when it never does.

    Newton's method kept inside a bracket, so that kinks, plateaus and impulses only cost it steps. Within a nanosecond where the
    rate is above 0; else, at a burst without background, the very float at which it comes.
    """
    t, high, stride = math.nextafter(low, INF), INF, 1.0
    miss = goal - shape.exposure(t)
    if miss < 0:
        return low  # the impulse that the request before fell on is not used up
    for turn in count():
        if miss >= 0:
            low = t
        else:
            high = t
        if math.nextafter(low, INF) >= high:
            return low
        rate = shape.rate(t)
        step = miss / rate if rate > 0 else INF
        if abs(step) <= CLOSE:
            return max(low, t + step)
        if turn < NEWTON and low < t + step < high:
            t += step
        elif high < INF:
            t = low + (high - low) / 2
        elif low > FAR:
            return INF
        else:
            t, stride = low + stride, 2 * stride
        miss = goal - shape.exposure(t)
    raise AssertionError("unreachable: bisection ends")


class Paced:
    """Due times of requests that fall at given marks of a progress that a level speeds up, slows down or stops.

    Progress is level x exposure, integrated piece by piece over run time, so that what was not spent when the level changed
    carries over. A request that was due before a change stays due when it was; later ones move.
    """

    def __init__(self, marks: Iterator[float], pace: Arrivals, level: float, start: Seconds) -> None:
        if not math.isfinite(start):
            raise ValueError(f"start: {start!r} is out of range: it must be finite")
        self._marks, self._pace, self._start = marks, pace, start
        self._level = _checked(level)
        self._since: Seconds = 0.0  # shape time of the last change of level,
        self._spent = 0.0  # the progress made until then,
        self._shown = 0.0  # and the shape's own exposure there
        self._changed = -INF  # the same instant in run time
        self._taken: Seconds = start  # when the request taken last was due
        self._ahead: deque[float] = deque()  # marks drawn and not taken
        self._dues: deque[Seconds] = deque()  # due times of the first of them

    @property
    def level(self) -> float:
        return self._level

    @property
    def due(self) -> Seconds:
        """When the next request is due; inf at level 0 and after the last."""
        return self._dues[0] if self._dues else self.ahead(0)

    def ahead(self, k: int) -> Seconds:
        """When the k-th request after the next one is due at the present level: ahead(0) is `due`."""
        while len(self._dues) <= k:
            self._dues.append(self._next())
        return self._dues[k]

    def pop(self) -> Seconds:
        """Take the next request: returns when it was due. Raises ValueError where nothing is (due is inf)."""
        due = self.due
        if due == INF:
            raise ValueError("nothing is due: the level is 0 or the shape has ended")
        self._taken = self._dues.popleft()
        self._ahead.popleft()
        return due

    def relevel(self, level: float, now: Seconds) -> None:
        """From `now` on, progress at `level` (0 stops it). Raises ValueError when `now` lies before the last change."""
        level = _checked(level)
        if not now >= self._changed or now == INF:
            raise ValueError(f"now: {now!r} is out of range: it must be finite and not before the last change, {self._changed:g}")
        since = max(0.0, now - self._start)
        shown = self._pace.exposure(since)
        if self._pace.exposure(math.nextafter(since, INF)) == INF:  # an infinite rate: never spent, so nothing to carry over
            self._dues.clear()
        else:
            while self.ahead(len(self._dues)) <= now:
                pass  # those due by now keep their times, also where nobody has asked yet
            while self._dues and self._dues[-1] > now:
                self._dues.pop()
            self._spent += self._level * (shown - self._shown)
        self._since, self._shown, self._changed, self._level = since, shown, now, level

    def _next(self) -> Seconds:
        """The due time that follows those known."""
        if len(self._ahead) == len(self._dues):
            self._ahead.append(next(self._marks, INF))
        mark = self._ahead[len(self._dues)]
        last = self._dues[-1] if self._dues else self._taken
        if self._level == 0 or mark == INF or last == INF:
            return INF
        if self._shown == INF:
            return self._start + self._since
        goal = self._shown + (mark - self._spent) / self._level
        return self._start + reach(self._pace, goal, max(self._since, last - self._start))


class Schedule(Paced):
    """A load shape from run time `start` on, scaled by `level`: the rate at run time t is level x rate(t - start)."""

    def __init__(self, arrivals: Arrivals, rng: Generator, level: float = 1.0, start: Seconds = 0.0) -> None:
        super().__init__(accumulate(arrivals.gaps(rng)), arrivals, level, start)


class TraceSchedule(Paced):
    """The stamps of a trace from run time `start` on; `level` is the speed of replay.

    Rows keep their order: a stamp before its predecessor's, or below 0, is due together with the one before it (or at `start`).
    Raises ValueError for a stamp that is not finite.
    """

    def __init__(self, due_times: Iterable[Seconds], level: float = 1.0, start: Seconds = 0.0) -> None:
        super().__init__(accumulate([_stamp(due) for due in due_times], max), Constant(rate=1.0), level, start)


def _stamp(due: Seconds) -> Seconds:
    if not math.isfinite(due):
        raise ValueError(f"due: {due!r} is out of range: a stamp of a trace must be finite")
    return max(0.0, due)


def _checked(level: float) -> float:
    if not 0 <= level < INF:
        raise ValueError(f"level: {level!r} is out of range: it must be finite and at least 0")
    return level


class FixedPause(Spec):
    """Always the same pause."""

    mean: Duration = Field(description="from the end of one request to the next of the same user")

    def pause(self, rng: Generator) -> Seconds:
        return self.mean


class ExponentialPause(Spec):
    """Pauses without memory."""

    mean: Span = Field(description="mean pause")

    def pause(self, rng: Generator) -> Seconds:
        return float(rng.exponential(self.mean))


Pause = FixedPause | ExponentialPause
THINKS: dict[str, type[FixedPause] | type[ExponentialPause]] = {"fixed": FixedPause, "exponential": ExponentialPause}


def parse_think(value: Any, context: Any = None) -> Pause:
    """A think time from "2s" or {dist: exponential, mean: "2s"}. Raises ValueError (pydantic's, located, for a wrong field)."""
    if isinstance(value, (str, int, float)):
        return FixedPause.model_validate({"mean": value}, context=context)
    return named(value, "dist", THINKS, context)


Think = Annotated[
    Pause,
    PlainValidator(lambda value, info: parse_think(value, info.context)),
    PlainSerializer(lambda think: written(think, "dist", THINKS)),
    WithJsonSchema(choices("dist", THINKS, {"type": "string", "examples": ["2s"]})),
]


class Closed(Spec):
    """A closed loop: so many users, each sending its next request a think time after its last one ended."""

    concurrency: int = Field(ge=1, le=1_000_000, description="requests kept in flight (fewer while users think)")
    think: Think = Field(FixedPause(mean=0.0), description="pause of a user between requests")

    def pause(self, rng: Generator) -> Seconds:
        return self.think.pause(rng)
