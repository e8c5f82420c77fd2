"""Energy of the headline interval: per token and request, with and without what the devices draw idle. Never of one request."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvbench import units
from kvbench.core import Sample, Seconds
from kvbench.report import cache

LEAST: Seconds = 10.0  # a shorter difference of an energy counter says little
KWH = 3.6e6  # J


def energy(
    samples: Sequence[Sample], start: Seconds, end: Seconds, tokens: float, requests: int,
    target: Mapping[str, Any], idle: float | None,
) -> dict[str, Any]:  # fmt: skip
    """joules: increase of the counter, all devices summed; `power`: the mean of the power readings beside it.

    tokens: output tokens that arrived in [start, end); requests: that ended ok in it. The dynamic rows leave out `idle`, W, what
    the devices drew before the run had begun; None where nobody measured it.
    """
    modelled = target.get("kind") == "sim"
    counted = cache.counter(samples, "energy_total" if modelled else "gpu_energy_j_total", start, end)
    power = drawn_power(samples, start, end)
    row: dict[str, Any] = {"modelled": modelled, "idle_power": idle, "power": power["mean"]}
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


def drawn_power(samples: Sequence[Sample], start: Seconds, end: Seconds) -> dict[str, Any]:
    """W, all devices of the target summed: the embedded engine's model, else what NVML, an agent or a DCGM exporter read."""
    modelled = cache.gauge(samples, "power", start, end)
    return modelled if modelled["mean"] is not None or "series" in modelled else cache.gauge(samples, "gpu_power_w", start, end)


def rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, text) for the report."""
    if found["joules"] is None or found["joules_per_token"] is None:
        return
    apart = found["disagreement"]
    beside = f" (power readings say {apart:+.1%})" if apart is not None else ""
    by = "modelled" if found["modelled"] else f"by the energy counter{beside}"
    apart = found["joules_per_token_without_idle"]
    without = f" ({apart:.3g} beyond idle)" if apart is not None else ""
    per = f"{found['joules_per_token']:.3g} J/token{without}, {found['requests_per_kwh']:,.0f} requests/kWh"
    yield "energy", f"{per}, {found['mean_power']:,.0f} W in the mean, {by}"
