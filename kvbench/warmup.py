"""When a warm-up has done its work: the cache holds its share, or time to first token and throughput have become stationary.

The test is MSER (White 1997, Simulation 69(6): 323-334) on means of five seconds, so MSER-5: it leaves out so many of them at the
start that the standard error of the mean of the rest is least. It was chosen over a slope test because it asks for no level of
significance and no distribution, sees a transient that rises as well as one that falls, and says from where on the rest is even.
The halves of that rest have to agree, too.
"""

import math
from collections.abc import Sequence

import numpy as np

from kvbench import units
from kvbench.core import Record, Request, Seconds, UsedUpError
from kvbench.metrics import names
from kvbench.metrics.slots import Slots
from kvbench.metrics.window import Interval
from kvbench.source import Content

TAIL = 5  # values at the end at which no series is cut: so few are even by chance
LEAST = 12  # batches that the test needs: below, there would hardly be a place to cut in the second half
REST = 10  # values that a cut has to leave: of six with noise the halves agree whatever the trend
EVEN = 0.01  # of the mean: differences below are none, or a drift that nobody would notice could keep a warm-up going
TICK: Seconds = 1.0  # how often a phase is asked whether it is over


def truncation(values: Sequence[float]) -> int:
    """How many values at the start to leave out: the d <= n - TAIL that minimises sum((y - mean)^2) / (n - d)^2 of the rest."""
    series = np.asarray(values, dtype=np.float64)
    n = len(series)
    if n <= TAIL:
        raise ValueError(f"{n} values: at least {TAIL + 1} are needed")
    centred = series - series.mean()  # so that the sums below keep their digits
    left = np.arange(n, 0, -1)
    sums, squares = np.cumsum(centred[::-1])[::-1], np.cumsum(centred[::-1] ** 2)[::-1]
    spread = squares - sums**2 / left
    error = np.where(spread > 1e-12 * squares[0], spread, 0.0) / left**2  # a rest without spread has none by rounding either
    return int(np.argmin(error[: n - TAIL + 1]))


def even(values: Sequence[float]) -> int | None:
    """From which value on the series is stationary; None where it is too short, or a cut leaves too little or an uneven rest."""
    if len(values) < LEAST:
        return None
    unit = EVEN * abs(math.fsum(values) / len(values))
    steps = [round(value / unit) for value in values] if unit else [0] * len(values)
    cut = truncation(steps)
    return cut if cut <= len(values) / 2 and len(values) - cut >= REST and level(steps[cut:]) else None


def level(values: Sequence[float]) -> bool:
    """Whether the halves of a series agree, to one unit or two standard errors of their difference.

    MSER alone takes a stair of few steps for even: no place to cut is better than another there.
    """
    half = len(values) // 2
    parts = [np.asarray(part, dtype=np.float64) for part in (values[:half], values[half:])]
    apart = abs(parts[0].mean() - parts[1].mean())
    return bool(apart <= max(1.0, 2 * math.sqrt(sum(part.var(ddof=1) / len(part) for part in parts))))


class Stationary:
    """Ends a phase once each of `metrics` is even over batches of so many seconds, not before `least` and not after `most`."""

    def __init__(self, metrics: Sequence[str], batch: int, start: Seconds, least: Seconds, most: Seconds) -> None:
        self.batch, self.most = batch, most
        self.earliest, self.end = start + least, start + most
        self.values: dict[str, list[float]] = {metric: [] for metric in metrics}
        self._upto = self._first = math.ceil(start - 1e-9)

    def check(self, slots: Slots, now: Seconds, live: Sequence[Record]) -> str | None:
        fresh = self._read(slots, live)
        cuts = {metric: even(values) for metric, values in self.values.items()}
        moving = [metric for metric, cut in cuts.items() if cut is None]
        if fresh and not moving and now >= self.earliest - 1e-9:
            since = ", ".join(f"{metric} from {units.duration(float(cut or 0) * self.batch)} on" for metric, cut in cuts.items())
            return f"stationary: {since} (MSER, {self._told()})"
        if now >= self.end - TICK:  # the last time that it is asked
            return f"not stationary within {units.duration(self.most)}: {' and '.join(moving or cuts)} (MSER, {self._told()})"
        return None

    def _read(self, slots: Slots, live: Sequence[Record]) -> bool:
        """Take in the batches that are whole by now; True where there was one. A batch without a value of a metric has none."""
        before = self._upto
        while self._upto + self.batch <= slots.closed:
            part = Interval(slots, self._upto, self._upto + self.batch, live)
            for metric, values in self.values.items():
                value = part.stat(names.parse(metric)).value
                if value is not None:
                    values.append(value)
            self._upto += self.batch
        return self._upto > before

    def _told(self) -> str:
        return f"{(self._upto - self._first) // self.batch} batches of {units.duration(float(self.batch))}"


class Fill:
    """The account of a prefill: `share` of `capacity` tokens are wanted, in at most so many `requests`.

    A prompt that was answered has filled its whole blocks of `block` tokens (1: not known), less what it found in the cache.
    """

    def __init__(self, share: float, capacity: int, block: int, requests: int) -> None:
        self.share, self.capacity, self.block, self.most = share, capacity, block, requests
        self.filled = self.expected = self.asked = 0  # tokens in the cache; of prompts on their way; requests

    def ask(self, request: Request) -> None:
        self.asked += 1
        self.expected += self._whole(request.tokens)

    def answer(self, request: Request, record: Record) -> None:
        """However it ended."""
        self.expected -= self._whole(request.tokens)
        if record.outcome == "ok":
            tokens = request.tokens if record.n_in is None else record.n_in
            self.filled += self._whole(tokens - (record.cached or 0))

    def enough(self) -> str | None:
        """Why nothing more is asked; None while something is."""
        if self.filled + self.expected >= self.share * self.capacity:
            return f"filled: {self}"
        return f"{self.most:,} requests did not fill it: {self}" if self.asked >= self.most else None

    def __str__(self) -> str:
        reached = f"{self.filled:,} of {self.capacity:,} tokens, {units.share(self.filled / self.capacity)}"
        return f"{reached} of the cache ({units.share(self.share)} asked)"

    def _whole(self, tokens: int) -> int:
        return max(0, tokens) // self.block * self.block


class Filling:
    """The content of a prefill: `content` until the account says that it is enough.

    Every request bears a session, be it one of a single turn, since only of those the end is told here.
    """

    def __init__(self, content: Content, fill: Fill) -> None:
        self.content, self.fill = content, fill

    def next(self, at: Seconds) -> Request:
        if (why := self.fill.enough()) is not None:
            raise UsedUpError(why)
        request = self.content.next(at)
        if request.session is None:
            request.session = request.id
        self.fill.ask(request)
        return request

    def follow(self, request: Request, record: Record) -> tuple[Seconds, Request] | None:
        self.fill.answer(request, record)
        following = self.content.follow(request, record)
        if following is None or self.fill.enough() is not None:
            return None
        self.fill.ask(following[1])
        return following


class Filled:
    """Ends a prefill where the cache's own gauge says that the share is reached, or its time is over: then with what was reached.

    That nothing more needs to be asked is the content's to say (`Filling`), at once and not after up to a second.
    """

    def __init__(self, fill: Fill, start: Seconds, most: Seconds) -> None:
        self.fill, self.start, self.most = fill, start, most

    def check(self, slots: Slots, now: Seconds, live: Sequence[Record]) -> str | None:
        gauge = slots.gauges.get("cached_share")
        known = gauge is not None and gauge.at >= self.start
        said = f"cached_share is {units.share(gauge.last)} ({units.share(self.fill.share)} asked)" if gauge and known else ""
        if gauge is not None and known and gauge.last >= self.fill.share:
            return f"filled: {said}"
        if now >= self.start + self.most - TICK:  # the last time that it is asked
            return f"not filled within {units.duration(self.most)}: {said or self.fill}"
        return None
