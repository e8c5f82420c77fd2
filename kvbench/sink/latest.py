"""What is known of a run at this moment, from the items that a view has been shown."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from kvbench import units
from kvbench.core import Event, Record, Sample, Seconds, Window
from kvbench.metrics import names

HISTORY = 12  # windows in a sparkline
RATES = ("offered", "ok", "tokens_out", "failed", "timeout")
PAST = ("offered", "ok", "ttft_p99", "kv_usage", "law_rate")  # what a sparkline shows
CONTROL = ("law_rate", "level")  # readings of the loops that hold the run
UNSAID = ("healthy", "flag")  # decisions of the watch that change nothing
TROUBLE = ("not_started", "failing", "back", "gap", "lost", "gpu_lost", "restarted", "behind")  # of collectors and sinks


class Latest:
    """What is known now, from the items seen so far. Values are the last window's, by METRICS.md's names."""

    def __init__(self, total_phases: int) -> None:
        self.total_phases = total_phases
        self.phase, self.number = "", 0
        self.began: Seconds = 0.0
        self.now: Seconds = 0.0
        self.seconds: Seconds | None = None  # the phase's length where its bounds say it
        self.requests: float | None = None
        self.values: dict[str, float | None] = {}
        self.rates: dict[str, float] = {}
        self.gauges: dict[str, float] = {}
        self.past: dict[str, deque[float]] = {name: deque(maxlen=HISTORY) for name in PAST}
        self.news = ""
        self.law = False  # one has spoken

    def take(self, item: Event | Sample | Window | Record) -> None:
        if isinstance(item, Window):
            self._window(item)
        elif isinstance(item, Sample):
            self.law = self.law or item.name == "law_rate"
            if item.value is not None:
                self.gauges[item.name] = item.value
            elif item.name in CONTROL:
                self.gauges.pop(item.name, None)  # no limit now, whatever it was before
        elif isinstance(item, Event):
            self._event(item)

    def _window(self, window: Window) -> None:
        self.now = max(self.now, window.end)
        self.values = window.values
        length = window.end - window.start
        if length > 0:
            self.rates = {name: window.counts.get(name, 0) / length for name in RATES}
        for name, past in self.past.items():
            value = self._now(name)
            if value is not None and math.isfinite(value):
                past.append(value)

    def _now(self, name: str) -> float | None:
        """The latest point of a sparkline."""
        if name == "kv_usage":
            return self.kv
        known: tuple[Mapping[str, float | None], ...] = (self.rates, self.gauges, self.values)
        return next((row[name] for row in known if name in row), None)

    def _event(self, event: Event) -> None:
        self.now = max(self.now, event.t)
        if event.kind == "phase_start":
            bounds = event.data.get("bounds") or {}
            self.phase, self.number, self.began = str(event.data.get("phase") or ""), self.number + 1, event.t
            self.seconds, self.requests = (float(bounds[key]) if key in bounds else None for key in ("seconds", "requests"))
        elif newsworthy(event):
            told = TOLD[event.kind](event.data)
            self.news = f"{event.kind}: {told}" if told else event.kind

    @property
    def kv(self) -> float | None:
        """The pool's use: the newest reading, else the window's mean."""
        found = self.gauges.get("kv_usage")
        return found if found is not None else self.values.get("kv_usage_mean")

    @property
    def elapsed(self) -> Seconds:
        return max(0.0, self.now - self.began)

    @property
    def controlled(self) -> bool:
        """A law limits the rate, or a level scales what is offered."""
        return any(name in self.gauges for name in CONTROL)


def newsworthy(event: Event) -> bool:
    """Worth a line of its own. The watch mostly finds nothing, and collectors and sinks mostly just work."""
    if event.kind in ("collector", "sink"):
        return event.data.get("state") in TROUBLE
    return event.kind in TOLD and not (event.kind == "watch" and event.data.get("action") in UNSAID)


def _level(data: Mapping[str, Any]) -> str:
    level = data.get("level")
    return f"{level:.4g}, {data.get('why') or 'no reason told'}" if isinstance(level, (int, float)) else ""


def _watch(data: Mapping[str, Any]) -> str:
    told = " ".join(str(data[key]) for key in ("action", "metric") if data.get(key))
    if any(data.get(key) is None for key in ("metric", "value", "expected")):
        return told
    name = names.parse(str(data["metric"]))
    value, expected = (names.show(data[key], name) for key in ("value", "expected"))
    return f"{told} is {value}, {expected} expected"


def _source(data: Mapping[str, Any]) -> str:
    """Of a collector or a sink."""
    who, state = data.get("source") or data.get("to") or data.get("sink"), str(data.get("state")).replace("_", " ")
    if data.get("state") == "gap":
        start, end = (units.duration(float(data[edge])) if data.get(edge) is not None else "?" for edge in ("start", "end"))
        state = f"no reading from {start} to {end}"
    if data.get("state") == "gpu_lost":
        state = f"GPU {data.get('gpu')} lost"
    waiting = f", {data['waiting']:,} points wait" if isinstance(data.get("waiting"), int) else ""
    return f"{who} {state}{waiting}" + (f": {reason}" if (reason := data.get("reason")) else "")


TOLD: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "stop": lambda data: str(data.get("reason") or ""),
    "signal": lambda data: str(data.get("signal") or ""),
    "watch": _watch,
    "level": _level,
    "gate_hold": lambda data: f"Retry-After closed the gate until {units.duration(data['until'])}" if "until" in data else "",
    "collector": _source,
    "sink": _source,
    "fault": lambda data: f"{data.get('kind')} {data.get('edge')}s",
}
"""What is said of an event, by its kind."""
