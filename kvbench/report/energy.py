"""Energy of the headline interval: per token and request, with and without what the devices draw idle. Never of one request."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvbench import units
from kvbench.core import Sample, Seconds
from kvbench.report import cache

LEAST: Seconds = 10.0  # a shorter difference of an energy counter says little
KWH = 3.6e6  # J


def energy(
    samples: Sequence[Sample], start: Seconds, end: Seconds, tokens: float, requests: int, target: Mapping[str, Any]
) -> dict[str, Any]:
    """joules: increase of the counter, all devices summed; `power`: the mean of the power readings beside it.

    tokens: output tokens that arrived in [start, end); requests: that ended ok in it. The dynamic rows leave out idle power.
    """
    counted, power = cache.counter(samples, "energy_total", start, end), cache.gauge(samples, "power", start, end)
    idle = target.get("idle_power")
    row: dict[str, Any] = {"modelled": target.get("kind") == "sim", "idle_power": idle, "power": power["mean"]}
    if counted["value"] is None or end - start < LEAST:
        reason = counted["reason"] or f"the interval is shorter than {units.duration(LEAST)}"
        return row | {"joules": None, "reason": reason}
    joules = counted["value"]
    drawn = joules - idle * (end - start) if isinstance(idle, (int, float)) else None
    integral = power["mean"] * (end - start) if power["mean"] is not None else None
    return row | {
        "joules": joules,
        "mean_power": joules / (end - start),
        "disagreement": integral / joules - 1 if integral is not None and joules else None,
        "joules_per_token": joules / tokens if tokens else None,
        "tokens_per_joule": tokens / joules if joules else None,
        "requests_per_kwh": requests * KWH / joules if joules else None,
        "joules_per_token_without_idle": drawn / tokens if tokens and drawn is not None else None,
        "requests_per_kwh_without_idle": requests * KWH / drawn if drawn else None,
        "n": counted["n"],
        "reason": None,
    }


def rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, text) for the report."""
    if found["joules"] is None or found["joules_per_token"] is None:
        return
    by = "modelled" if found["modelled"] else "by the energy counter"
    apart = found["joules_per_token_without_idle"]
    without = f" ({apart:.3g} beyond idle)" if apart is not None else ""
    per = f"{found['joules_per_token']:.3g} J/token{without}, {found['requests_per_kwh']:,.0f} requests/kWh"
    yield "energy", f"{per}, {found['mean_power']:,.0f} W in the mean, {by}"
