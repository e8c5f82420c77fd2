"""Each device once, whoever read it: what GPUs were at in the headline interval, and the client's machine beside them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace
from rich.console import Group, RenderableType

from kvbench import units
from kvbench.core import Sample, Seconds
from kvbench.report import cache
from kvbench.report.text import block, count, pairs

GPU = ("gpu_memory", "gpu_utilization", "gpu_power_w", "gpu_temperature_c", "gpu_throttled")
MACHINE = ("host_cpu", "host_memory", "client_cpu")
NAMED = ("host", "gpu", "uuid", "mig")  # labels that tell one device from another
LINES = 3  # of a chart
MOST = 16  # GPUs shown; summary.json has all


def of_each(samples: Sequence[Sample], name: str, start: Seconds, end: Seconds) -> dict[str, list[Sample]]:
    """The readings of each device, as one teller's: where several collectors read the same one, that with most coverage, then by
    cache.ORDER. A teller that shares a device with a better one is left out with all of its own: it sees the same machine.
    """
    tellers: dict[tuple[str, str], dict[str, list[Sample]]] = {}
    for sample in samples:
        if sample.name == name and sample.value is not None and ("gpu" in sample.labels or "uuid" in sample.labels):
            teller = sample.source, sample.labels.get("collector", "")
            tellers.setdefault(teller, {}).setdefault(_key(sample), []).append(sample)
    times = {who: [sample.t for own in told.values() for sample in own] for who, told in tellers.items()}
    most = max((cache.coverage(told, start, end) for told in times.values()), default=0.0)
    found: dict[str, list[Sample]] = {}
    for who in sorted(tellers, key=lambda who: cache.rank(who[0], times[who], start, end, most)):
        if not tellers[who].keys() & found.keys():
            found |= tellers[who]
    return found


def _key(sample: Sample) -> str:
    """A UUID where there is one: it is the same for everyone who reads the device."""
    labels = sample.labels
    name = labels.get("uuid") or f"{labels.get('host', '')}/{labels.get('gpu', '')}"
    return f"{name}/{labels['mig']}" if labels.get("mig") and not name.startswith("MIG-") else name


def devices(samples: Sequence[Sample], start: Seconds, end: Seconds, engine: Mapping[str, Any]) -> dict[str, Any]:
    """gpus: a row per GPU, or MIG instance, with the gauges of GPU in [start, end]. joined: the target's, of `engine`.
    machine: that of the client."""
    told = [sample for sample in samples if sample.name in GPU]
    rows: dict[str, dict[str, Any]] = {}
    for name in GPU:
        for key, own in of_each(told, name, start, end).items():
            labels = own[-1].labels
            row = rows.setdefault(key, {label: labels.get(label) for label in NAMED} | {"source": own[0].source})
            row[name] = cache.gauge([replace(sample, labels={}) for sample in own], name, start, end)
    none = {"mean": None, "max": None, "n": 0, "reason": "not told"}
    known = [row | {name: row.get(name, none) for name in GPU} for row in rows.values()]
    known.sort(key=lambda row: (row["host"] or "", int(row["gpu"]) if str(row["gpu"]).isdecimal() else 0, row["mig"] or ""))
    asked = [sample for sample in samples if sample.name in MACHINE]
    return {
        "gpus": known,
        "joined": {name: engine[name] for name in GPU if name in engine} if known else {},
        "machine": {name: cache.gauge(asked, name, start, end) for name in MACHINE},
        "reason": None if known else "no GPU was read",
    }


def drawn(samples: Sequence[Sample], name: str) -> dict[str, list[tuple[Seconds, float | None]]]:
    """What a chart shows of a gauge: each GPU, up to LINES of them, else all together; nothing where none was read."""
    told = [sample for sample in samples if sample.name == name and sample.value is not None]
    if not told:
        return {}
    start, end = told[0].t, told[-1].t
    each = of_each(told, name, start, end)
    if 0 < len(each) <= LINES:
        named = {
            f"GPU {own[0].labels.get('gpu', key)}{' mig' if own[0].labels.get('mig') else ''}": own for key, own in each.items()
        }
        if len(named) == len(each):
            return {label: [(sample.t, sample.value) for sample in own] for label, own in named.items()}
    whole = cache.series(told, name, start, end)
    return {"all": list(zip(*map(np.ndarray.tolist, next(iter(whole.values()))), strict=True))} if len(whole) == 1 else {}


def shown(summary: Mapping[str, Any], width: int) -> RenderableType:
    """The block of the terminal; nothing where neither was read."""
    told = list(rows(summary["devices"]))
    return block("GPUs and machines", pairs(told)) if told else Group()


def rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, text) for people."""
    hosts = {row["host"] for row in found["gpus"]}
    for row in found["gpus"][:MOST]:
        where = f"{row['host']} " if len(hosts) > 1 and row["host"] else ""
        part = f" mig {row['mig']}" if row["mig"] else ""
        yield f"{where}GPU {row['gpu'] or row['uuid']}{part}", f"{_at(row)} ({row['source']})"
    if len(found["gpus"]) > MOST:
        yield "", f"and {len(found['gpus']) - MOST} more: see summary.json"
    if len(found["gpus"]) > 1 and (text := _at(found["joined"])):
        yield "all GPUs", text
    machine = [_machine(name, row) for name, row in found["machine"].items() if row["mean"] is not None]
    if machine:
        yield "machine", ", ".join(machine)


def _at(row: Mapping[str, Any]) -> str:
    parts = []
    for name, way, text in SHOWN:
        value = row.get(name, {}).get(way)
        if value is not None:
            parts.append(text.format(share=units.share(value), number=count(value)))
    return ", ".join(parts)


SHOWN = (
    ("gpu_memory", "max", "memory max {share}"),
    ("gpu_utilization", "mean", "a kernel ran {share} of the time"),
    ("gpu_power_w", "mean", "{number} W in the mean"),
    ("gpu_temperature_c", "max", "max {number} C"),
    ("gpu_throttled", "mean", "throttled {share} of the time"),
)
"""Of each gauge of a GPU the statistic that counts, and what is said of it."""


def _machine(name: str, row: Mapping[str, Any]) -> str:
    what = {"host_cpu": "CPU", "host_memory": "memory", "client_cpu": "kvbench's own CPU (of one core)"}[name]
    return f"{what} mean {units.share(row['mean'])} max {units.share(row['max'])}"
