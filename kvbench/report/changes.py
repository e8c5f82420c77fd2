"""Change points: when a metric left its level and kept away, beyond what the offered load explains, and what happened then.

Of each metric's windows that do not overlap, what load does not explain (kvbench.residuals) is cut into stretches of constant
mean by PELT (Killick, Fearnhead and Eckley 2012): the cuts that lower the squared error by more than a penalty each. The penalty
grows with the logarithm of the number of windows, and with how alike neighbours in time are, which by itself looks like change.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvbench.core import Event, Seconds, Window
from kvbench.metrics import names
from kvbench.metrics.histogram import supported
from kvbench.metrics.names import Name
from kvbench.report.files import RunFiles
from kvbench.report.phases import Phase
from kvbench.residuals import MAD, Floats, Load, resolution, scale, unexplained

WATCHED = ("ttft_p50", "tpot_p50", "kv_usage_mean", "waiting_mean", "error_rate", "output_tokens_rate")
PENALTY = 3.0  # times the logarithm of the windows, in squared sigmas: about one false mark in a hundred series of white noise
LEAST = 3  # windows in a stretch
FEW = 12  # windows below which nothing is looked for
CUT = 8.0  # sigmas at which a window counts no more
CLEAR = 0.1  # a change smaller than a tenth of the level, or than two of what the metric resolves, is not marked
LED = 3.0  # windows by which a cause may come before what it does
CAUSES = {
    "fault": "the fault {kind} {edge}",
    "level": "the level moved from {from} to {level}",
    "gate_hold": "the gate was closed by Retry-After",
    "phase_start": "the phase {phase} began",
}
"""Events that explain a change, the most telling first."""


def changes(files: RunFiles, found: Sequence[Phase]) -> dict[str, Any]:
    """Marks in order of time: {t, metric, before, after (medians of the stretches), n_before, n_after (windows), explained_by}.
    `skipped`: the metrics without a mark because there was too little to look at, and why."""
    windows = _apart(files.windows, found)
    load = Load()
    loads = np.array([load.next(window) for window in windows])
    wanted = dict.fromkeys([*WATCHED, *((files.scenario.get("watch") or {}).get("metrics") or [])])
    marks: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for text in dict.fromkeys(_spelled(name) for name in wanted):
        name = names.parse(text)
        kept = [i for i, window in enumerate(windows) if _counts(window, name)]
        if len(kept) < FEW:
            skipped[text] = f"{len(kept)} windows with enough behind them; {FEW} are the fewest"
            continue
        series = [windows[i] for i in kept]
        marks += [mark | _cause(mark["t"], series[0], files) for mark in _marks(series, loads[kept], name)]
    marks.sort(key=lambda mark: (mark["t"], mark["metric"]))
    return {"marks": marks, "windows": len(windows), "skipped": skipped}


def pelt(values: Floats, penalty: float, least: int = LEAST) -> list[int]:
    """Where to cut `values` (unit variance) so that squared error + penalty x cuts is least; stretches of at least `least`."""
    n = len(values)
    sums, squares = (np.concatenate([[0.0], np.cumsum(part)]) for part in (values, values**2))
    best, last = np.full(n + 1, math.inf), np.zeros(n + 1, dtype=int)
    best[0] = -penalty
    starts = np.array([0])
    for end in range(least, n + 1):
        length = end - starts
        cost = best[starts] + squares[end] - squares[starts] - (sums[end] - sums[starts]) ** 2 / length
        found = int(np.argmin(cost))
        best[end], last[end] = cost[found] + penalty, starts[found]
        starts = np.append(starts[cost <= best[end]], end - least + 1)
        starts = starts[(starts == 0) | (starts >= least)]
    cuts, at = [], n
    while at > 0:
        at = int(last[at])
        cuts.append(at)
    return sorted(cuts)[1:]


def _apart(windows: Sequence[Window], found: Sequence[Phase]) -> list[Window]:
    """Windows that lie within steady or stress and do not overlap."""
    spans = [(phase.start, phase.end) for phase in found if phase.kind in ("steady", "stress")]
    first, end = min((start for start, _ in spans), default=0.0), max((end for _, end in spans), default=0.0)
    kept: list[Window] = []
    for window in windows:
        after = kept[-1].end if kept else first
        if after - 1e-9 <= window.start < window.end <= end + 1e-9:
            kept.append(window)
    return kept


def _spelled(text: str) -> str:
    """As a window has it: a gauge's bare name is its mean."""
    name = names.parse(text)
    return f"{text}_mean" if name.of.kind == "gauge" and not name.statistic else text


def _counts(window: Window, name: Name) -> bool:
    if window.values.get(str(name)) is None:
        return False
    return name.quantile is None or supported(name.quantile, window.n.get(str(name), 0))


def _marks(series: Sequence[Window], loads: Floats, name: Name) -> list[dict[str, Any]]:
    """The changes of one metric, with the medians of what was measured before and after."""
    raw = np.array([window.values[str(name)] or 0.0 for window in series])
    bend, _ = scale(name)
    left, news = unexplained(loads, np.array([bend(float(value)) for value in raw]))
    steps = np.diff(left)
    middle = float(np.median(raw))
    least = bend(middle + resolution(name, middle)) - bend(middle)
    sigma = max(MAD * float(np.median(np.abs(steps - np.median(steps)))) / math.sqrt(2), least)
    cuts = pelt(np.clip((left - np.median(left)) / sigma, -CUT, CUT), PENALTY * math.log(len(series)) / news)
    edges = [0, *cuts, len(series)]
    rows = []
    for a, b, c in zip(edges, edges[1:], edges[2:], strict=False):
        before, after = float(np.median(raw[a:b])), float(np.median(raw[b:c]))
        if abs(after - before) > max(CLEAR * max(before, after), 2 * resolution(name, 0.0)):
            row = {"t": series[b].start, "metric": str(name), "before": before, "after": after}
            rows.append(row | {"n_before": b - a, "n_after": c - b})
    return rows


def _cause(t: Seconds, window: Window, files: RunFiles) -> dict[str, Any]:
    """The nearest event that may have done it: at most LED windows before the change, or within its first window."""
    length = window.end - window.start
    near = [event for event in files.events if event.kind in CAUSES and t - LED * length <= event.t <= t + length]
    for kind in CAUSES:
        of_kind = [event for event in near if event.kind == kind]
        if of_kind:
            event = min(of_kind, key=lambda event: abs(event.t - t))
            return {"explained_by": {"kind": kind, "t": event.t, "what": _told(event)}}
    return {"explained_by": _law(t, length, files)}


def _told(event: Event) -> str:
    data = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in event.data.items()}
    try:
        return CAUSES[event.kind].format(**data)
    except KeyError:
        return event.kind.replace("_", " ")


def _law(t: Seconds, length: Seconds, files: RunFiles) -> dict[str, Any] | None:
    """A law that let in a fifth more or less than before."""
    rates = [(sample.t, sample.value) for sample in files.samples if sample.name == "law_rate" and sample.value is not None]
    before = [value for at, value in rates if t - 2 * LED * length <= at < t - LED * length]
    after = [value for at, value in rates if t - LED * length <= at <= t + length]
    if not before or not after:
        return None
    low, high = sorted((float(np.median(before)), float(np.median(after))))
    if high <= 1.2 * low:
        return None
    what = f"the law's rate went from {np.median(before):.4g}/s to {np.median(after):.4g}/s"
    return {"kind": "law", "t": t, "what": what}
