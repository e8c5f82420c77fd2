"""Energy of the headline interval: per token and request, with and without what the devices draw idle. Never of one request."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from kvbench import units
from kvbench.core import Sample, Seconds
from kvbench.report import cache, devices
from kvbench.report.intervals import Floats

LEAST: Seconds = 10.0  # a shorter difference of an energy counter says little
COVERED = 0.9  # share of the interval that readings have to cover
APART = 3  # periods between the readings on both sides of an edge, up to which the counter is interpolated there
KWH = 3.6e6  # J


def energy(
    samples: Sequence[Sample], start: Seconds, end: Seconds, tokens: float, requests: int,
    target: Mapping[str, Any], idle: float | None,
) -> dict[str, Any]:  # fmt: skip
    """joules: increase of the counter over [start, end], all devices summed; `power`: the mean of the power readings beside it.
    covered: the share of the interval that was read, by which the increase is divided; sources: whose counters.

    tokens: output tokens that arrived in [start, end); requests: that ended ok in it. The dynamic rows leave out `idle`, W, what
    the devices drew before the run had begun; None where nobody measured it.
    """
    modelled = target.get("kind") == "sim"
    counted = _counted(samples, "energy_total" if modelled else "gpu_energy_j_total", start, end)
    power = drawn_power(samples, start, end)
    row: dict[str, Any] = {"modelled": modelled, "idle_power": idle, "power": power["mean"]}
    row |= {"covered": counted.covered if counted.n else None, "sources": counted.sources}
    reason = counted.reason
    if end - start < LEAST:
        reason = reason or f"the interval is shorter than {units.duration(LEAST)}"
    elif not modelled and (counted.resets or _fell(samples, start, end)):
        reason = "the energy counter went backwards: the driver was loaded anew"
    if reason:
        return row | {"joules": None, "reason": reason}
    joules = counted.watts * (end - start)
    drawn = joules - idle * (end - start) if isinstance(idle, (int, float)) else None
    integral = power["mean"] * (end - start) if power["mean"] is not None else None
    return row | {
        "joules": joules,
        "mean_power": counted.watts,
        "disagreement": integral / joules - 1 if integral is not None and joules else None,
        "joules_per_token": joules / tokens if tokens else None,
        "tokens_per_joule": tokens / joules if joules else None,
        "requests_per_kwh": requests * KWH / joules if joules else None,
        "joules_per_token_without_idle": drawn / tokens if tokens and drawn is not None else None,
        "requests_per_kwh_without_idle": requests * KWH / drawn if drawn else None,
        "n": counted.n,
        "reason": None,
    }


class Counted(NamedTuple):
    """An energy counter over an interval: mean power (W), the share of it that readings cover, the number of them, falls."""

    watts: float
    covered: float
    n: int
    resets: int
    sources: list[str]
    reason: str | None


def _fell(samples: Sequence[Sample], start: Seconds, end: Seconds) -> bool:
    """A device's own counter did; that of all devices hides it where it is made of what each of them grew by."""
    each = devices.of_each(samples, "gpu_energy_j_total", start, end)
    return any(cache.counter(own, "gpu_energy_j_total", start, end)["resets"] for own in each.values())


def drawn_power(samples: Sequence[Sample], start: Seconds, end: Seconds) -> dict[str, Any]:
    """W, all devices of the target summed: the embedded engine's model, else what NVML, an agent or a DCGM exporter read."""
    modelled = cache.gauge(samples, "power", start, end)
    if modelled["mean"] is not None or "series" in modelled:
        return modelled
    known = _devices(samples, "gpu_power_w", start, end)
    means = [cache.gauge(own, "gpu_power_w", start, end)["mean"] for own in known.values()]
    if not means:
        return cache.gauge(samples, "gpu_power_w", start, end)
    whole = all(mean is not None for mean in means)
    told = {"n": sum(map(len, known.values())), "reason": None if whole else "a device did not tell its power all the time"}
    return {"mean": sum(means) if whole else None, "max": None, **told}


def _counted(samples: Sequence[Sample], name: str, start: Seconds, end: Seconds) -> Counted:
    known = _devices(samples, name, start, end)
    rows = [_grown(cache.series(own, name), start, end) for own in known.values()]
    sources = sorted({own[0].source for own in known.values()})
    if not rows:
        found = cache.counter(samples, name, start, end)
        if found["value"] is None:
            return Counted(0.0, 0.0, 0, 0, [], found["reason"])
        whole = cache.series(samples, name, start, end)
        rows, sources = [_grown(whole, start, end)], sorted({label.partition(",")[0] for label in whole})
    watts, n, resets = (sum(row[at] for row in rows) for at in (0, 2, 3))
    covered = min(row[1] for row in rows)
    reason = None
    if covered < COVERED:
        reason = f"the energy counter was read for {units.share(covered)} of the interval: {units.share(COVERED)} are needed"
    return Counted(float(watts), covered, int(n), int(resets), sources, reason)


def _grown(told: cache.Series, start: Seconds, end: Seconds) -> tuple[float, float, int, int]:
    """(W, share of the interval, readings, falls) of the counters that make one number."""
    rows = [_slope(times, values, start, end) for times, values in told.values()]
    return (
        sum(row[0] for row in rows),
        min((row[1] for row in rows), default=0.0),
        sum(r[2] for r in rows),
        sum(r[3] for r in rows),
    )


def _slope(times: Floats, values: Floats, start: Seconds, end: Seconds) -> tuple[float, float, int, int]:
    """The same of one counter: its increase between the edges, interpolated where readings lie close on both sides of one, else
    between the readings nearest to them; / the time between. A reading speaks for one period: that much beside it is covered."""
    inside = (times >= start) & (times <= end)
    n = int(inside.sum())
    if n < 2:
        return 0.0, 0.0, n, 0
    period = float(np.median(np.diff(times[inside])))
    steps = np.diff(values)
    grown = np.concatenate([[0.0], np.cumsum(np.where(steps >= 0, steps, values[1:]))])
    first, last = int(np.argmax(inside)), len(inside) - 1 - int(np.argmax(inside[::-1]))
    low, high = float(times[first]), float(times[last])
    if low > start and first > 0 and steps[first - 1] >= 0 and low - times[first - 1] <= APART * period:
        low, first = start, first - 1
    if high < end and last + 1 < len(times) and steps[last] >= 0 and times[last + 1] - high <= APART * period:
        high, last = end, last + 1
    joules = float(np.interp(high, times, grown) - np.interp(low, times, grown))
    missed = max(0.0, low - start - period) + max(0.0, end - high - period)
    resets = int((steps[first:last] < 0).sum())
    return joules / (high - low), 1 - missed / (end - start), n, resets


def _devices(samples: Sequence[Sample], name: str, start: Seconds, end: Seconds) -> dict[str, list[Sample]]:
    """Of each device its readings where several collectors spoke for the target (agents of two machines, NVML and an exporter),
    or none spoke for all of it: nothing where one did, which then stands for its devices."""
    told = [sample for sample in samples if sample.name == name]
    tellers = {(sample.source, sample.labels.get("collector")) for sample in told}
    if len(tellers) < 2 and any(not sample.labels for sample in told):
        return {}
    each = devices.of_each([sample for sample in told if "mig" not in sample.labels], name, start, end)
    return {key: [replace(sample, labels={}) for sample in own] for key, own in each.items()}


def rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, text) for the report."""
    if found["joules"] is None or found["joules_per_token"] is None:
        return
    apart = found["disagreement"]
    beside = f" (power readings say {apart:+.1%})" if apart is not None else ""
    of = f" of {' and '.join(found['sources'])}" if found["sources"] else ""
    by = "modelled" if found["modelled"] else f"by the energy counter{of}{beside}"
    apart = found["joules_per_token_without_idle"]
    without = f" ({apart:.3g} beyond idle)" if apart is not None else ""
    per = f"{found['joules_per_token']:.3g} J/token{without}, {found['requests_per_kwh']:,.0f} requests/kWh"
    yield "energy", f"{per}, {found['mean_power']:,.0f} W in the mean, {by}"
