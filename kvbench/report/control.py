"""How well the law held its signal over steady, and what that cost (docs/metrics.md, Control). From readings once a second.

settling: from the last disturbance until the signal entered its band for good. The band is 5 points of a share to either side of
the set-point, a quarter of any other set-point. overshoot: how far past the set-point the signal went at most. iae: the integral
of |signal - set-point|, each reading holding until the next; mean_error is that over its time. A signal that noise throws out of
its band now and then never settles: in_band says for how much of the time it was inside.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbench.core import Seconds
from kvbench.metrics.names import METRICS, Unit
from kvbench.report import cache
from kvbench.report.files import RunFiles
from kvbench.report.intervals import Floats
from kvbench.report.phases import Headline, Phase

POINTS = 0.05  # half of the band of a share
PART = 0.25  # half of the band of anything else, as a part of its set-point
HOLD: Seconds = 10.0  # it counts as settled once it was in the band for so long
LIMIT = "95%"  # of the KV cache, above which time is counted
TRACKED = ("settling", "overshoot", "iae", "mean_error", "in_band")


@dataclass(frozen=True)
class Aim:
    """What a law holds, and where."""

    signal: str
    set_point: float

    @property
    def unit(self) -> Unit:
        return "share" if self.signal == "gpu_memory" else METRICS[self.signal].unit

    @property
    def band(self) -> float:
        return POINTS if self.unit == "share" else PART * self.set_point


def control(files: RunFiles, found: Sequence[Phase], head: Headline, table: Mapping[str, Any], aim: Aim | None) -> dict[str, Any]:
    """The measures of this run, of whose summary `table` has the rest. `aim`: what it is held to; None: its own law's."""
    law = (files.scenario.get("control") or {}).get("law")
    aim = aim or aim_of(files)
    end = files.last("run_end")
    usage = table["engine"]["kv_usage"]
    above = usage.get("time_above", {}).get(LIMIT)
    return {
        "law": law,
        "signal": aim.signal if aim else None,
        "set_point": aim.set_point if aim else None,
        "unit": aim.unit if aim else None,
        "band": aim.band if aim else None,
        "reason": None if aim else _aimless(law),
        **(tracking(files, found, head, aim) if aim else _nothing(_aimless(law))),
        "time_above": {"limit": LIMIT, "value": above, "n": usage["n"], "reason": None if above is not None else _unread(usage)},
        "preemptions": table["engine"]["preemptions_total"],
        "shed_share": {"value": table["outcomes"]["shed_rate"], "n": table["outcomes"]["shed"]},
        "goodput": {name: table["goodput"].get(name) for name in ("value", "rate", "n", "reason")},
        "law_rate": law_rate(files, head.start, head.end),
        "told": (end.data.get("law") if end is not None else None) or {},
    }


def aim_of(files: RunFiles) -> Aim | None:
    """The signal and set-point of the run's law; None where it holds none, or one that the report does not know."""
    block = files.scenario.get("control") or {}
    signal, set_point = block.get("signal"), block.get("setpoint")
    if block.get("target_queue") is not None:
        signal, set_point = "waiting", block["target_queue"]
    known = signal in READINGS and isinstance(set_point, (int, float)) and set_point > 0
    return Aim(str(signal), float(set_point)) if known and set_point is not None else None


def tracking(files: RunFiles, found: Sequence[Phase], head: Headline, aim: Aim) -> dict[str, Any]:
    """The signal against the aim over [head.start, head.end)."""
    times, values, why = readings(files, aim.signal, head.start, head.end)
    if why:
        return _nothing(why)
    holds = np.diff(np.append(times, max(head.end, times[-1])))
    error = np.abs(values - aim.set_point)
    n, total = len(values), float(holds.sum())
    inside = error <= aim.band + 1e-9
    iae, within = float((error * holds).sum()), float(holds[inside].sum())
    alone = None if total else "one reading has no length"
    return {
        "settling": settling(times, inside, disturbed(files, found, head), head.end),
        "overshoot": {"value": max(0.0, float(values.max()) - aim.set_point), "n": n, "unit": aim.unit, "reason": None},
        "iae": {"value": iae, "n": n, "unit": f"{aim.unit or 'requests'} x s", "reason": None},
        "mean_error": {"value": iae / total if total else None, "n": n, "unit": aim.unit, "reason": alone},
        "in_band": {"value": within / total if total else None, "n": n, "unit": "share", "reason": alone},
    }


def settling(times: Floats, inside: "np.typing.NDArray[np.bool_]", since: tuple[Seconds, str], end: Seconds) -> dict[str, Any]:
    """Seconds from `since` (when, and what happened) until the last entry into the band; null where it was not there to stay."""
    start, after = since
    row: dict[str, Any] = {"value": None, "since": start, "after": after, "unit": "s", "n": int((times >= start).sum())}
    out = np.flatnonzero(~inside & (times >= start))
    if not row["n"]:
        return row | {"reason": f"no reading after {after} at {start:.0f} s"}
    if not len(out):
        return row | {"value": 0.0, "reason": None}
    first = int(out[-1]) + 1
    if first == len(times):
        return row | {"reason": f"never: outside the band at the end, after {after} at {start:.0f} s"}
    stayed = end - float(times[first])
    if stayed < HOLD:
        return row | {"reason": f"never: in the band only for the last {stayed:.0f} s, after {after} at {start:.0f} s"}
    return row | {"value": float(times[first]) - start, "reason": None}


def disturbed(files: RunFiles, found: Sequence[Phase], head: Headline) -> tuple[Seconds, str]:
    """The last thing within steady that a law had to answer: its start, an epoch, a level, a fault's begin or end."""
    known = [(phase.start, f"the start of {phase.name}") for phase in found if phase.kind == "steady"]
    known += [(event.t, SHIFTS[event.kind].format(**event.data)) for event in files.events if event.kind in SHIFTS]
    return max(((t, what) for t, what in known if head.start <= t < head.end), default=(head.start, "the start"))


def readings(files: RunFiles, signal: str, start: Seconds, end: Seconds) -> tuple[Floats, Floats, str]:
    """(times, values, "") of a signal in [start, end], or why there are none. ttft is the sliding windows' median."""
    if READINGS[signal] == "windows":
        known = [(window.end, window.values.get("ttft_p50")) for window in files.windows]
        rows = {"windows": (np.array([t for t, v in known if v is not None]), np.array([v for _, v in known if v is not None]))}
    else:
        rows = cache.series(files.samples, signal)
    if len(rows) > 1:
        return np.zeros(0), np.zeros(0), f"{len(rows)} series of {signal}: which one the law read is not known"
    times, values = next(iter(rows.values()), (np.zeros(0), np.zeros(0)))
    inside = (times >= start) & (times <= end)
    return times[inside], values[inside], "" if inside.any() else f"no reading of {signal} in steady"


def law_rate(files: RunFiles, start: Seconds, end: Seconds) -> dict[str, Any]:
    """The rate that the law let in, requests/s; unlimited: readings at which it set no limit."""
    told = [sample.value for sample in files.samples if sample.name == "law_rate" and start <= sample.t <= end]
    known = [value for value in told if value is not None]
    row: dict[str, Any] = {"n": len(told), "unlimited": len(told) - len(known), "unit": "requests/s"}
    if not known:
        why = "the law set no limit on the rate" if told else "no decision of a law is on record"
        return row | {"min": None, "mean": None, "max": None, "reason": why}
    return row | {"min": min(known), "mean": sum(known) / len(known), "max": max(known), "reason": None}


def _nothing(reason: str) -> dict[str, Any]:
    return {name: {"value": None, "n": 0, "reason": reason} for name in TRACKED}


def _aimless(law: str | None) -> str:
    return f"the law {law} holds no signal at a set-point" if law else "the manifest names no law"


def _unread(usage: Mapping[str, Any]) -> str:
    return str(usage["reason"] or "the readings are no shares")


SHIFTS = {"level": "a change of level", "fault": "the {edge} of the fault {kind}", "gate_hold": "a Retry-After"}
"""Events that disturb what a law holds."""
READINGS = {"kv_usage": "samples", "waiting": "samples", "gpu_memory": "samples", "ttft": "windows"}
"""Where a signal of a law is read from."""
