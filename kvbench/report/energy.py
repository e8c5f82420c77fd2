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
    name = "energy_total" if modelled else "gpu_energy_j_total"
    counted = _counted(samples, name, start, end)
    power = drawn_power(samples, start, end)
    row: dict[str, Any] = {"modelled": modelled, "idle_power": idle, "power": power["mean"]}
    reason = counted["reason"]
    if end - start < LEAST:
        reason = reason or f"the interval is shorter than {units.duration(LEAST)}"
    elif not modelled and (counted["resets"] or _fell(samples, name, start, end)):
        reason = "the energy counter went backwards: the driver was loaded anew"
    if reason:
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


def _fell(samples: Sequence[Sample], name: str, start: Seconds, end: Seconds) -> bool:
    """A device's own counter did; that of all devices hides it where it is made of what each of them grew by."""
    devices = [sample for sample in samples if sample.name == name and sample.labels]
    return bool(cache.counter(devices, name, start, end)["resets"])


def drawn_power(samples: Sequence[Sample], start: Seconds, end: Seconds) -> dict[str, Any]:
    """W, all devices of the target summed: the embedded engine's model, else what NVML, an agent or a DCGM exporter read."""
    modelled = cache.gauge(samples, "power", start, end)
    if modelled["mean"] is not None or "series" in modelled:
        return modelled
    whole = cache.gauge(samples, "gpu_power_w", start, end)
    devices = _devices(samples, "gpu_power_w")
    means = [cache.gauge(own, "gpu_power_w", start, end)["mean"] for own in devices.values()]
    if not means:
        return whole
    known = all(mean is not None for mean in means)
    told = {"n": sum(map(len, devices.values())), "reason": None if known else "a device did not tell its power all the time"}
    return {"mean": sum(means) if known else None, "max": None, **told}


def _counted(samples: Sequence[Sample], name: str, start: Seconds, end: Seconds) -> dict[str, Any]:
    devices = _devices(samples, name)
    if not devices:
        return cache.counter(samples, name, start, end)
    rows = [cache.counter(own, name, start, end) for own in devices.values()]
    if any(row["value"] is None for row in rows):
        return {"value": None, "n": 0, "resets": 0, "reason": "a device did not tell its energy all the time"}
    return {name: sum(row[name] for row in rows) for name in ("value", "n", "resets")} | {"reason": None}


def _devices(samples: Sequence[Sample], name: str) -> dict[str, list[Sample]]:
    """Of each device its readings, as the first source told them, where several collectors (agents of two machines, NVML and an
    exporter) spoke for the target: nothing where one did. No device is counted twice, whoever reads it."""
    if not any(sample.name == name and cache.second(sample) for sample in samples):
        return {}
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        uuid = sample.labels.get("uuid")
        if sample.name == name and uuid and "mig" not in sample.labels:
            own = found.setdefault(uuid, [])
            if not own or (own[0].source == sample.source and own[0].labels == sample.labels):
                own.append(sample)
    return found


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
