"""When a capture window may open, and why one should: what the nsight collector decides, without a clock and without I/O."""

import math
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from kvbench.core import Event, Seconds, Window
from kvbench.metrics import names
from kvbench.metrics.names import Name
from kvbench.metrics.window import SHOWN
from kvbench.stop import Rule

STORM: Final = {"preemptions_total_rate": ">= 1"}  # a preemption a second, over a window
Trigger = Rule | Literal["anomaly"]
_WAYS = {"latency": ("p50", "p90", "p99", "max"), "gauge": ("", "mean", "max", "last"), "counter": ("", "rate")}
_LEFT_OUT = ("over", "preallocated")


def read_trigger(text: Any) -> Trigger:
    """What the scenario writes: preemptions, anomaly, or a condition as a stop rule's. Raises ValueError."""
    if isinstance(text, Rule):
        return text
    if text == "anomaly":
        return "anomaly"
    if text == "preemptions":
        return Rule.model_validate(STORM)
    if not isinstance(text, Mapping):
        raise ValueError('write preemptions, anomaly, or a condition such as {ttft_p99: "> 800ms"}')
    rule = Rule.model_validate(dict(text))
    if "when" not in text and (given := [key for key in _LEFT_OUT if key in text]):
        raise ValueError(f"{given[0]} is no part of a trigger: it reads the run's windows (`windows.length`)")
    name = rule.when.metric
    ways = _WAYS.get(name.of.kind, ("",))
    if (name.of.kind == "latency" and name.metric not in SHOWN) or name.statistic not in ways or name.of.kind == "count":
        allowed = "" if name.metric not in SHOWN else f": {', '.join(str(Name(name.metric, way)) for way in ways)}"
        raise ValueError(f"windows hold no {name}, of latencies p50 p90 p99 max of {', '.join(SHOWN)}{allowed}")
    return rule


class Stay(NamedTuple):
    """A phase in which windows may open: [start, end), end inf where only requests or content bound it."""

    name: str
    start: Seconds
    end: Seconds


class Moments:
    """`phase`: steady, or the name of one of its epochs. `stay`: the phase the run is in, where windows may open; `zero`: when
    the first of those began."""

    def __init__(self, phase: str, trigger: Trigger | None) -> None:
        self.phase, self.trigger = phase, trigger
        self.stay: Stay | None = None
        self.zero: Seconds | None = None
        self._held: Seconds | None = None  # since when the condition holds at every window

    def tell(self, item: Event | Window) -> dict[str, Any] | None:
        """Why a window should open now, with the numbers; None where nothing asks for one."""
        if isinstance(item, Window):
            return self._window(item)
        if item.kind == "phase_start":
            self._begun(item.t, item.data)
        elif item.kind in ("phase_end", "run_end"):
            self.stay = None
        elif item.kind == "watch" and self.trigger == "anomaly" and self.stay is not None:
            return self._anomaly(item.data)
        return None

    def _begun(self, t: Seconds, data: Mapping[str, Any]) -> None:
        if data.get("phase_kind") != "steady" or self.phase not in ("steady", data.get("phase")):
            return
        start = float(data.get("start", t))
        self.stay = Stay(str(data.get("phase")), start, start + float(data.get("bounds", {}).get("seconds", math.inf)))
        self.zero = start if self.zero is None else self.zero

    def _anomaly(self, data: Mapping[str, Any]) -> dict[str, Any] | None:
        if data.get("action") != "anomaly":
            return None
        return {"trigger": "anomaly", **{key: data.get(key) for key in ("metric", "value", "expected", "z", "start", "end")}}

    def _window(self, window: Window) -> dict[str, Any] | None:
        rule = self.trigger
        if self.stay is None or self.zero is None or not isinstance(rule, Rule) or window.start < self.zero - 1e-9:
            return None  # a window that began before it is of something else
        name = rule.when.metric
        key = str(Name(name.metric, "mean")) if name.of.kind == "gauge" and not name.statistic else str(name)
        value, n = window.values.get(key), window.n.get(key, 0)
        if value is None or (name.of.kind in ("latency", "ratio") and n < rule.needs):
            return None
        if not rule.when.holds(value):
            self._held = None
            return None
        self._held = window.end if self._held is None else self._held
        if window.end - self._held < rule.hold - 1e-9:
            return None
        told = f"{name} is {names.show(value, name)} (n={n}); the trigger is {rule.when}"
        return {
            "trigger": str(rule.when),
            "metric": key,
            "value": value,
            "n": n,
            "start": window.start,
            "end": window.end,
            "why": told,
        }
