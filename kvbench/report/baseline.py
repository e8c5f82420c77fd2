"""The baseline phase: cold start, latencies without load, prefill by prompt length, layers, power, and the change since before.

Requests go one at a time, so none waits for another. The first stands apart (it may meet a cold server); every other figure is of
the rest. None of it counts in the headline.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from kvbench.core import Record, Sample
from kvbench.metrics import request
from kvbench.metrics.histogram import order_statistic
from kvbench.report import accounting
from kvbench.report.energy import drawn_power
from kvbench.report.files import RunFiles
from kvbench.report.intervals import Floats, describe, nothing
from kvbench.report.kept import Kept, Planned
from kvbench.report.latency import Cohort
from kvbench.report.phases import Phase

Values = list[float | None]
EDGES = (0, 32, 64, 128, 256, 512, 1024)  # prompt tokens at which a row of lengths begins
LATENCIES = ("ttft", "tpot", "e2e")
FEWEST = 3  # different prompt lengths below which a line through them says nothing
NO_POWER = "no `power` reading: nothing here measures it"


def baseline(files: RunFiles, found: Sequence[Phase]) -> dict[str, Any]:
    """The section of the summary; n 0 and a reason where no baseline was measured. Seconds, tokens/s, W."""
    phase = next((one for one in found if one.kind == "baseline" and one.name != "idle"), None)
    idle = next((one for one in found if one.kind == "baseline" and one.name == "idle"), None)
    if phase is None or not phase.records:
        return {"n": 0, "complete": False, "reason": "no prompt of a baseline was sent"}
    plan = msgspec.convert(files.manifest.get("baseline") or {}, Planned)
    rest, by_prompt = Cohort(phase.records[1:]), _by_prompt(phase.records)
    summary: dict[str, Any] = {
        "n": sum(record.outcome == "ok" for record in phase.records),
        "reason": None,
        "complete": phase.reason == "count",
        "ended": phase.reason,
        "outcomes": accounting.tally(phase.records),
        "prompts": {"version": plan.version, "digest": plan.digest},
        "target": plan.target,
        "cold_start": {name: _cold(phase.records[0], rest, name) for name in ("ttft", "e2e")},
        "latency": _latency(rest, int(files.manifest.get("seed") or 0)),
        "lengths": _lengths(rest),
        "prefill": _prefill(by_prompt, range(1, len(phase.records))),
        "layers": msgspec.structs.asdict(plan.layers),
        "power": {"idle": _power(files.samples, idle), "base": _power(files.samples, phase)},
        "by_prompt": by_prompt,
    }
    summary["compared"] = _compared(summary, plan)
    return summary


def kept(summary: dict[str, Any], files: RunFiles) -> Kept:
    """What baseline.json holds. `summary`: the run's, with a complete baseline."""
    found = summary["baseline"]
    return Kept(
        run=files.directory.resolve().name, started=str(files.manifest.get("started") or ""), target=found["target"],
        idle_power=found["power"]["idle"]["mean"], base_power=found["power"]["base"]["mean"], **found["prompts"],
        **found["by_prompt"],
    )  # fmt: skip


def _cold(first: Record, rest: Cohort, name: str) -> dict[str, Any]:
    """The first request beside the median of the others."""
    value = request.value(first, name) if first.outcome == "ok" else None
    others = rest.values(name)
    median = order_statistic(np.sort(others), 0.5) if len(others) else None
    reason = None
    if first.outcome != "ok":
        reason = f"the first request ended {first.outcome}"
    elif value is None:
        reason = "not streaming" if not first.streamed else "the first answer had no tokens"
    return {"value": value, "rest_p50": median, "n": len(others), "times": value / median if value and median else None,
            "unit": "s", "reason": reason}  # fmt: skip


def _latency(rest: Cohort, seed: int) -> dict[str, Any]:
    """Of all but the first request."""
    values = {name: rest.values(name) for name in LATENCIES}
    row = {name: describe(each, "s", seed) for name, each in values.items()}
    speeds = 1 / values["tpot"][values["tpot"] > 0]
    row["decode_rate"] = describe(speeds, "tokens/s", seed) if len(speeds) else nothing("no tpot to take it from", "tokens/s")
    return row


def _tokens(rest: Cohort) -> Floats:
    """Prompt tokens, as the server counted them where it did."""
    return np.array([_length(record) for record in rest.records], float)


def _lengths(rest: Cohort) -> list[dict[str, Any]]:
    """Medians by prompt length, [from, below)."""
    tokens, rows = _tokens(rest), []
    for low, high in zip(EDGES, (*EDGES[1:], None), strict=True):
        inside = (tokens >= low) & (tokens < (np.inf if high is None else high)) & rest.ok
        if not inside.any():
            continue
        row: dict[str, Any] = {"from": low, "below": high, "n": int(inside.sum()), "tokens": float(tokens[inside].mean())}
        for name in LATENCIES:
            values = np.sort(rest.values(name, inside & ~np.isnan(rest.columns[name])))
            row[f"{name}_p50"] = order_statistic(values, 0.5) if len(values) else None
        rows.append(row)
    return rows


def _prefill(by_prompt: Mapping[str, Values], chosen: Iterable[int]) -> dict[str, Any]:
    """TTFT as a line over prompt tokens that were not cached, by least squares: its slope, its start and its R^2."""
    points = [(by_prompt["tokens"][k], by_prompt["ttft"][k]) for k in chosen if by_prompt["ttft"][k] is not None]
    row: dict[str, Any] = {"per_1000": None, "fixed": None, "r2": None, "n": len(points), "unit": "s"}
    if len({tokens for tokens, _ in points}) < FEWEST:
        return row | {"reason": f"fewer than {FEWEST} prompt lengths with a ttft"}
    x, y = np.array(points, float).T
    dx, dy = x - x.mean(), y - y.mean()
    slope, spread = float(dx @ dy / (dx @ dx)), float(dy @ dy)
    r2 = 1 - float(((dy - slope * dx) ** 2).sum()) / spread if spread else None
    return row | {"per_1000": 1000 * slope, "fixed": float(y.mean() - slope * x.mean()), "r2": r2, "reason": None}


def _power(samples: Sequence[Sample], phase: Phase | None) -> dict[str, Any]:
    """Mean power over a phase, W; of several devices the sum."""
    if phase is None:
        return {"mean": None, "n": 0, "unit": "W", "reason": "the scenario gives it no time: phases.baseline.idle_power"}
    row = drawn_power(samples, phase.start, phase.end)
    devices = list(row.get("series", {"": row}).values())
    if any(one["mean"] is None for one in devices):
        return {"mean": None, "n": 0, "unit": "W", "reason": NO_POWER}
    total, n = sum(one["mean"] for one in devices), sum(one["n"] for one in devices)
    return {"mean": total, "n": n, "devices": len(devices), "unit": "W", "reason": None}


def _by_prompt(records: Sequence[Record]) -> dict[str, Values]:
    """Per prompt, in order; requests that did not end ok have no value. tokens: of the prompt, by the server's count where it has
    one, less those that it found cached."""

    def of(read: Callable[[Record], float | None]) -> Values:
        return [read(record) if record.outcome == "ok" else None for record in records]

    found = {name: of(partial(request.value, name=name)) for name in LATENCIES}
    return {"tokens": of(lambda record: float(_length(record) - (record.cached or 0))), **found}


def _length(record: Record) -> int:
    return record.n_in if record.n_in is not None else record.asked_in


def _compared(found: Mapping[str, Any], plan: Planned) -> dict[str, Any]:
    """Each figure beside the earlier run's; those over many prompts, over the prompts alone that ended ok in both."""
    then = plan.earlier
    if then is None:
        return {"run": None, "rows": [], "reason": plan.why}
    now: dict[str, Values] = found["by_prompt"]
    before: dict[str, Values] = {name: getattr(then, name) for name in now}
    power = found["power"]
    rows = [
        *(_median(name, now[name], before[name]) for name in LATENCIES),
        _change("cold ttft", now["ttft"][0], next(iter(then.ttft), None)),
        _slope(now, before),
        _change("idle power", power["idle"]["mean"], then.idle_power, "W"),
        _change("base power", power["base"]["mean"], then.base_power, "W"),
    ]
    return {"run": then.run, "started": then.started, "rows": [row for row in rows if row is not None], "reason": None}


def _both(now: Values, before: Values) -> list[int]:
    """Prompts with a value in both, the first left out."""
    return [k for k in range(1, min(len(now), len(before))) if now[k] is not None and before[k] is not None]


def _median(name: str, now: Values, before: Values) -> dict[str, Any] | None:
    both = _both(now, before)
    if not both:
        return None
    a, b = (order_statistic(np.sort(np.array([values[k] for k in both], float)), 0.5) for values in (now, before))
    return _counted(_change(f"{name} p50", a, b), len(both), now, before)


def _slope(now: Mapping[str, Values], before: Mapping[str, Values]) -> dict[str, Any] | None:
    both = _both(now["ttft"], before["ttft"])
    a, b = (_prefill(values, both)["per_1000"] for values in (now, before))
    return _counted(_change("prefill per 1,000 tokens", a, b), len(both), now["ttft"], before["ttft"])


def _counted(row: dict[str, Any] | None, n: int, now: Values, before: Values) -> dict[str, Any] | None:
    """`row` with the prompts behind it: in both, in this run, in the earlier one."""
    counts = {key: sum(value is not None for value in values[1:]) for key, values in (("n_now", now), ("n_then", before))}
    return None if row is None else row | {"n": n} | counts


def _change(name: str, now: float | None, then: float | None, unit: str = "s") -> dict[str, Any] | None:
    """None where either run lacks the figure."""
    if now is None or then is None:
        return None
    return {"figure": name, "now": now, "then": then, "change": (now - then) / then if then > 0 else None, "unit": unit, "n": 1}
