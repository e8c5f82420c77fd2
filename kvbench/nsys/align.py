"""Where a capture lies on a run's clock, and what the run's windows say of that time."""

from collections.abc import Iterable, Mapping
from typing import Any

from kvbench.core import Event, Seconds, Window
from kvbench.nsys import Capture, CaptureError

COUNTS = ("ok", "failed")
VALUES = (
    "output_tokens_rate",
    "input_tokens_rate",
    "ok_rate",
    "ttft_p50",
    "ttft_p99",
    "itl_p99",
    "e2e_p99",
    "kv_usage_mean",
    "running_mean",
    "waiting_mean",
)
RATES = ("output_tokens_rate", "ok_rate")  # compared with the rest of the phase


def aligned(capture: Capture, wall: Seconds, windows: Iterable[Window], events: Iterable[Event]) -> dict[str, Any]:
    """The capture on the clock of a run whose instant 0 was at `wall` (seconds since 1970): from, to, phases, the windows that it
    overlaps with their figures, and rates in them beside the rest of the same phases.

    Raises CaptureError where the capture has no clock, or no window of the run overlaps it.
    """
    if capture.utc is None:
        raise CaptureError(
            f"{capture.path} does not say when it began (no TARGET_INFO_SESSION_START_TIME): it cannot be laid on a run"
        )
    zero = capture.utc - round(wall * 1e9)
    begin, end = (zero + capture.begin) / 1e9, (zero + capture.end) / 1e9
    every = [window for window in windows if window.end > window.start]  # of a damaged run some may have no length
    covered = [window for window in every if window.start < end and window.end > begin]
    if not covered:
        last = max((window.end for window in every), default=0.0)
        raise CaptureError(
            f"the capture lies at {begin:,.1f} to {end:,.1f} s of a run whose windows end at {last:,.1f} s: another "
            "run's, or the clocks of the capture's host and of this run disagree"
        )
    spans = _phases(events)
    phases = [phase for phase in spans if phase[1] < end and phase[2] > begin]
    rest = [w for w in every if w not in covered and any(start <= w.start and w.end <= stop for _, start, stop in phases)]
    return {
        "from": begin, "to": end, "phases": [name for name, _, _ in phases],
        "windows": [_row(window, begin, end) for window in covered],
        "rates": {name: {"covered": _mean(covered, name), "rest_of_phase": _mean(rest, name)} for name in RATES},
    }  # fmt: skip


def _row(window: Window, begin: Seconds, end: Seconds) -> dict[str, Any]:
    shared = min(window.end, end) - max(window.start, begin)
    counts = {name: window.counts.get(name) for name in COUNTS}
    return {
        "start": window.start, "end": window.end, "covered": shared / (window.end - window.start),
        **counts, **{name: window.values.get(name) for name in VALUES},
    }  # fmt: skip


def _phases(events: Iterable[Event]) -> list[tuple[str, Seconds, Seconds]]:
    """(name, start, end) of every phase; end is infinite where the run was cut off in it."""
    found: list[tuple[str, Seconds, Seconds]] = []
    for event in events:
        if event.kind == "phase_start":
            found.append((_name(event.data), event.t, float("inf")))
        elif event.kind == "phase_end" and found:
            found[-1] = (*found[-1][:2], event.t)
    return found


def _name(data: Mapping[str, Any]) -> str:
    return str(data.get("phase", ""))


def _mean(windows: list[Window], name: str) -> float | None:
    """Mean over the windows that have it."""
    values = [value for window in windows if (value := window.values.get(name)) is not None]
    return sum(values) / len(values) if values else None
