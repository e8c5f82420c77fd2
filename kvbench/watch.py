"""The watch: is the server worse than it was under the same load? And what follows: a mark, a smaller load, the end of the run.

It looks at windows that do not overlap. A metric is out of line where it is more than `sigma` worse than healthy windows were
under this load (residuals.py). The anomaly is confirmed when that is so of `confirm` out of the last `of` windows judged. What
has too few requests behind it is not judged, and said; nor is the window in which the level moved. A window is learned from
only when the `of - 1` after it have passed without an anomaly. Every decision is told with its numbers.
"""

from collections import deque
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvbench.core import Seconds, Window
from kvbench.level import Level, Move, Retreat
from kvbench.metrics import histogram, names
from kvbench.metrics.names import Name
from kvbench.metrics.window import SHOWN
from kvbench.residuals import Expected, Floats, Load, model
from kvbench.units import Share, Span

SETTLE: Seconds = 30.0  # after the first window: caches and queues fill, and what they show then is not learned
_WAYS = {"latency": ("p50", "p90", "p99", "max"), "gauge": ("", "mean", "max", "last"), "counter": ("", "rate")}


class WatchSpec(BaseModel):
    """Finds windows that are worse than healthy ones under the same load, and marks them, lowers the load or ends the run."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    metrics: Annotated[tuple[str, ...], Field(min_length=1, max_length=20)] = Field(
        ("ttft_p50", "tpot_p50", "kv_usage", "error_rate"),
        description="what is watched: metrics with their statistics, as a stop rule's",
    )
    sigma: Annotated[float, Field(ge=1, le=100)] = Field(3.0, description="how many sigmas worse than expected is out of line")
    window: Span = Field(10.0, le=600, description="what one look covers; looks do not overlap. Whole seconds, at most 10m")
    confirm: Annotated[int, Field(ge=1, le=100)] = Field(2, description="so many windows out of line are an anomaly")
    of: Annotated[int, Field(ge=1, le=100)] = Field(3, description="out of so many, the latest that were judged")
    action: Literal["mark", "rollback", "stop"] = Field("mark", description="what an anomaly does")
    step: Share = Field(0.2, gt=0, lt=1, description="rollback where no lower level is known healthy: one step down")
    hold: Span = Field(60.0, description="rollback: nothing moves for so long after a fall")
    tries: Annotated[int, Field(ge=0, le=100)] = Field(
        3, description="rollback: how often to go up again, each time by half the step"
    )
    learn: Annotated[int, Field(ge=4, le=1000)] = Field(8, description="healthy windows of a metric before it is judged")

    @field_validator("metrics")
    @classmethod
    def _readable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            name = names.parse(text)
            ways = _WAYS.get(name.of.kind, ("",))
            if name.of.kind == "latency" and name.metric not in SHOWN:
                raise ValueError(f"{text!r}: windows hold no {name.metric}; of latencies they hold {', '.join(SHOWN)}")
            if name.statistic not in ways:
                allowed = ", ".join(str(Name(name.metric, way)) for way in ways)
                raise ValueError(f"{text!r}: a window holds {allowed}")
        if len(set(value)) < len(value):
            raise ValueError("a metric is named twice")
        return value

    @model_validator(mode="after")
    def _coherent(self) -> "WatchSpec":
        if self.confirm > self.of:
            raise ValueError(f"confirm: {self.confirm} of {self.of} windows can never be: confirm must be at most `of`")
        if self.window % 1:
            raise ValueError("window: must be whole seconds, 1s to 10m")
        return self

    def arm(self) -> "Watch":
        """A fresh watch for one run."""
        return Watch(self)


class Decision(NamedTuple):
    """`data` for the run's event; `move` where the level fell; `stop`: why the run has to end."""

    data: dict[str, Any]
    move: Move | None = None
    stop: str | None = None


class Watch:
    """One run's watch. `judged`: windows per metric; `skipped`: those that were not, per metric and reason."""

    def __init__(self, spec: WatchSpec) -> None:
        self.spec: Final = spec
        self.judged: dict[str, int] = dict.fromkeys(spec.metrics, 0)
        self.skipped: dict[str, dict[str, int]] = {}
        self._eyes = [_Eye(names.parse(name), spec) for name in spec.metrics]
        self._load = Load()
        self._first: Seconds | None = None
        self._spent = ""

    def level(self) -> Level:
        """A level that falls and tries again as the spec says."""
        return Level(Retreat(self.spec.step, self.spec.hold, self.spec.tries))

    def look(self, window: Window, level: Level, now: Seconds) -> list[Decision]:
        """Judge one window of steady or stress, learn from it if it proves healthy, act on what is confirmed. `now`: its end."""
        load = self._load.next(window)
        self._first = window.start if self._first is None else self._first
        why = self._unfit(window, level, self._first)
        seen = [eye.look(window, load, why) for eye in self._eyes]
        judged = {eye: one for eye, one in zip(self._eyes, seen, strict=True) if isinstance(one, Seen)}
        for eye, one in zip(self._eyes, seen, strict=True):
            self._count(str(eye.name), one)
        where = {"start": window.start, "end": window.end, "level": level.at(window.end)}
        said = []
        for eye, one in judged.items():
            fresh = eye.vote(one)
            if one.out:
                said.append(Decision({"action": "anomaly" if fresh else "flag", **one.data(), **where}))
        ill = any(eye.on for eye in self._eyes)
        for eye in self._eyes:
            eye.learn(not ill)
        due = [one for eye, one in judged.items() if eye.confirmed and one.out]
        worst = max(due, key=lambda one: one.expected.z, default=None)
        if worst is not None:
            said += self._act(worst, where, level, now)
        if any(one.out for one in judged.values()):
            level.doubt()
        elif judged and not ill:
            level.healthy(now)
            said.append(Decision({"action": "healthy", "metrics": [str(eye.name) for eye in judged], **where}))
        else:
            level.blank()
        if level.spent != self._spent:
            self._spent = level.spent
            known = worst.data() if worst is not None else {}
            said += [Decision({"action": "gave_up", **known, **where, "why": level.spent})] if level.spent else []
        return said

    @staticmethod
    def _unfit(window: Window, level: Level, first: Seconds) -> str:
        """Why no metric of the window can be judged; "" where they can."""
        if window.start <= level.moved < window.end:
            return "the level moved"
        return "settling" if window.start < first + SETTLE else ""

    def told(self) -> dict[str, Any]:
        """For the run's end: windows judged per metric, and per reason those that were not."""
        return {"judged": self.judged, "skipped": self.skipped}

    def _count(self, name: str, seen: "Seen | str") -> None:
        if isinstance(seen, str):
            told = self.skipped.setdefault(name, {})
            told[seen] = told.get(seen, 0) + 1
        else:
            self.judged[name] += 1

    def _act(self, worst: "Seen", where: dict[str, Any], level: Level, now: Seconds) -> list[Decision]:
        data = worst.data() | where
        if self.spec.action == "mark":
            return []
        if self.spec.action == "stop":
            return [Decision({"action": "stop", **data}, stop=str(worst))]
        move = level.fall(now, str(worst))
        if move is None:
            return []
        for eye in self._eyes:
            eye.votes.clear()  # the lower level is judged by itself
        return [Decision({"action": "rollback", **data, "to": move.level}, move)]


class Seen(NamedTuple):
    """A value judged. `out`: out of line, to the bad side."""

    name: Name
    value: float
    n: int
    expected: Expected
    out: bool

    def data(self) -> dict[str, Any]:
        expected = self.expected
        numbers = {"value": self.value, "expected": expected.value, "sigma": expected.sigma, "z": expected.z}
        return {"metric": str(self.name), **numbers, "n": self.n, "learned": expected.n}

    def __str__(self) -> str:
        value, expected = names.show(self.value, self.name), names.show(self.expected.value, self.name)
        return f"{self.name} is {value}, {expected} expected: {self.expected.z:.3g} sigmas (n={self.n})"


class _Eye:
    """One metric: its model, the latest votes, and the windows that are not yet known to be healthy."""

    def __init__(self, name: Name, spec: WatchSpec) -> None:
        self.name, self.spec = name, spec
        self.model = model(name, spec.sigma)
        self.votes: deque[bool] = deque(maxlen=spec.of)
        self.on = False  # an anomaly is confirmed and not over
        self._pending: deque[tuple[Floats, float, int]] = deque()

    def look(self, window: Window, load: Floats, why: str) -> Seen | str:
        """The window's value judged, or why it is not. `why`: a reason that holds for the whole window, "" where none does."""
        read = self._read(window)
        if why or isinstance(read, str):
            return why or str(read)
        value, n = read
        self._pending.append((load, value, n))
        if self.model.n < self.spec.learn:
            return "too few healthy windows yet"
        expected = self.model.judge(load, value, n)
        return Seen(self.name, value, n, expected, expected.z > self.spec.sigma)

    @property
    def confirmed(self) -> bool:
        return sum(self.votes) >= self.spec.confirm

    def vote(self, seen: Seen) -> bool:
        """Count it. True: it confirms an anomaly that was not there before."""
        self.votes.append(seen.out)
        before = self.on
        self.on = before or self.confirmed if seen.out else before and self.confirmed
        return self.on and not before

    def learn(self, healthy: bool) -> None:
        """From windows that `of - 1` others have followed; from none while any metric is ill."""
        if not healthy:
            self._pending.clear()
        while len(self._pending) >= self.spec.of:
            self.model.learn(*self._pending.popleft())

    def _read(self, window: Window) -> tuple[float, int] | str:
        """(value, n), or why there is nothing to judge."""
        name = self.name
        if name.metric == "inflight":
            return float(window.counts["inflight"]), 1
        key = str(Name(name.metric, "mean")) if name.of.kind == "gauge" and not name.statistic else str(name)
        value, n = window.values.get(key), window.n.get(key, 0)
        if value is None:
            return "no value"
        if name.quantile is not None and not histogram.supported(name.quantile, n):
            return f"fewer than {histogram.least(name.quantile)} requests"
        return value, n
