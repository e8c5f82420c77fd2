"""The part of make gpu-check about NVML: how long its calls take, how finely the energy counter steps, whether power and energy
agree, which form of memory the driver has, what GPM tells, and what the collector costs while the GPU works. A minute in all."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pynvml

from kvbench.clock import Clock
from kvbench.collect import Place
from kvbench.collect.gpuread import Gpm
from kvbench.collect.gpus import Gpu, Gpus
from kvbench.collect.nvml import Nvml
from kvbench.core import Event

CALLS = 50
STEPS_FOR = 3.0  # s over which the energy counter is watched
LOAD_FOR = 10.0  # s over which power and energy are compared


def driver(busy: Callable[[], None] | None, seconds: float = LOAD_FOR) -> dict[str, Any]:
    """busy: keeps the GPU at work for some milliseconds; None: there is nothing to load it with, and it is watched as it is."""
    found = Gpus(pynvml)
    try:
        found.choose(None, None)
        gpu = found.gpus[0]
        told: dict[str, Any] = {"driver": found.facts()["driver"], "gpu": gpu.name, "loaded": busy is not None}
        told["calls"] = calls(found, gpu)
        told["memory"] = memory(gpu)
        told["gpm"] = gpm(gpu)
        with working(busy):
            told["energy"] = energy_step(gpu, min(STEPS_FOR, seconds)) | agreement(gpu, seconds)
            told["collector"] = asyncio.run(collector(seconds / 2))
        return told | {"unsupported": gpu.off}
    finally:
        found.close()


def calls(found: Gpus, gpu: Gpu) -> dict[str, Any]:
    """Microseconds of each group of calls: median and worst of 50; a group that is not supported has its reason."""
    rows: dict[str, Any] = {}
    for name, (read, _) in [(name, group) for name, group in gpu.groups.items() if name != "gpm"]:
        times = []
        try:
            for _ in range(CALLS if name not in ("pcie", "processes") else 5):
                begin = time.perf_counter()
                list(read(pynvml, gpu.handle))
                times.append((time.perf_counter() - begin) * 1e6)
        except (pynvml.NVMLError, AttributeError) as error:
            gpu.off[name] = str(error)
            rows[name] = {"median_us": None, "max_us": None, "reason": str(error)}
        else:
            rows[name] = {"median_us": median(times), "max_us": max(times), "reason": None}
    return rows


def memory(gpu: Gpu) -> dict[str, Any]:
    """Both forms, raw: does `used` of the second hold what is reserved?"""
    rows: dict[str, Any] = {}
    for name, version in (("v1", None), ("v2", pynvml.nvmlMemory_v2)):
        try:
            told = pynvml.nvmlDeviceGetMemoryInfo(gpu.handle, **({} if version is None else {"version": version}))
        except pynvml.NVMLError as error:
            rows[name] = {"reason": str(error)}
            continue
        rows[name] = {key: getattr(told, key) for key in ("total", "used", "free", "reserved") if hasattr(told, key)}
    two = rows.get("v2", {})
    if "reserved" in two:
        rows["v2_used_holds_reserved"] = abs(two["total"] - two["free"] - two["used"]) < two["reserved"] / 2
    return rows


def gpm(gpu: Gpu) -> dict[str, Any]:
    """Two samples 150 ms apart, which is the only proof that it works."""
    probe = Gpm()
    try:
        list(probe(pynvml, gpu.handle))
        time.sleep(0.15)
        return {"values": dict(probe(pynvml, gpu.handle)), "reason": None}
    except (pynvml.NVMLError, AttributeError) as error:
        return {"values": {}, "reason": str(error)}
    finally:
        probe.close(pynvml)


def energy_step(gpu: Gpu, seconds: float) -> dict[str, Any]:
    """Seconds between two changes of the counter, by looking every 2 ms."""
    changes, last, end = [], None, time.perf_counter() + seconds
    try:
        while time.perf_counter() < end:
            now = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu.handle)
            if last is not None and now != last:
                changes.append(time.perf_counter())
            last = now
            time.sleep(0.002)
    except pynvml.NVMLError as error:
        return {"step_s": None, "steps": 0, "reason": str(error)}
    gaps = [b - a for a, b in pairwise(changes)]
    return {"step_s": median(gaps) if gaps else None, "steps": len(gaps), "reason": None}


def agreement(gpu: Gpu, seconds: float) -> dict[str, Any]:
    """The counter's difference beside the integral of power readings every 50 ms."""
    try:
        begin, energy = time.perf_counter(), pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu.handle) / 1000
        joules, last = 0.0, begin
        while last - begin < seconds:
            time.sleep(0.05)
            now = time.perf_counter()
            joules += pynvml.nvmlDeviceGetPowerUsage(gpu.handle) / 1000 * (now - last)
            last = now
        counted = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu.handle) / 1000 - energy
    except pynvml.NVMLError as error:
        return {"counter_j": None, "integral_j": None, "integral_over_counter": None, "why": str(error)}
    return {
        "counter_j": counted,
        "integral_j": joules,
        "integral_over_counter": joules / counted if counted else None,
        "why": None,
    }


async def collector(seconds: float) -> dict[str, Any]:
    """What the collector costs at 100 ms: its CPU, and the share of time its calls hold the driver."""
    told: list[Any] = []
    clock = Clock(asyncio.get_running_loop())
    one = Nvml(every=0.1).build(Place(clock, Path()))
    await one.open()
    clock.start()
    one.start(told.append)
    await asyncio.sleep(seconds)
    await one.stop()
    account = next(item.data for item in told if isinstance(item, Event) and item.data.get("state") == "stopped")
    ran = clock.now()
    shares = {"core_share": account["cost_s"] / ran, "in_calls_share": account["in_calls_s"] / ran}
    return {"readings": account["readings"], "every_s": account["every_s"], **shares}


@contextmanager
def working(busy: Callable[[], None] | None) -> Iterator[None]:
    """Keep the GPU at work from another thread."""
    over = threading.Event()

    def work() -> None:
        while busy is not None and not over.is_set():
            busy()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


def lines(told: dict[str, Any]) -> Iterator[str]:
    """The table."""
    yield f"NVML of driver {told['driver']}, {told['gpu']}{'' if told['loaded'] else ' (nothing to load it with)'}"
    for name, row in told["calls"].items():
        shown = f"{row['median_us']:9.0f} us{row['max_us']:9.0f} us" if row["median_us"] is not None else f"  {row['reason']}"
        yield f"  {name:<20}{shown}"
    energy, cost = told["energy"], told["collector"]
    if energy["step_s"] is not None:
        yield f"  energy counter steps every {energy['step_s'] * 1e3:.0f} ms"
    if energy["integral_over_counter"] is not None:
        yield f"  power integrated / energy counted {energy['integral_over_counter']:.3f}"
    yield f"  GPM {', '.join(told['gpm']['values']) or told['gpm']['reason']}"
    yield f"  collector at 100 ms: {cost['core_share']:.2%} of a core, {cost['in_calls_share']:.2%} of the time inside the driver"
