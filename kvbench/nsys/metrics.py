"""GPU metrics that were sampled beside a capture (--gpu-metrics-device): DRAM bandwidth, SMs active and so on."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from kvbench.nsys import Capture, Device, Ints, Metric
from kvbench.nsys.tables import Tables, sane

_DEVICE = 0xFF  # of a typeId: the GPU
_PERCENT = "%]"
_READS, _WRITES = ("dram read bandwidth", "dram read throughput"), ("dram write bandwidth", "dram write throughput")


def metrics(tables: Tables) -> list[Metric]:
    """Every metric of every GPU that has samples."""
    rows = tables.rows("TARGET_INFO_GPU_METRICS", "typeId", "metricId", "metricName")
    names = {(kind, metric): str(name) for kind, metric, name in rows if isinstance(kind, int) and isinstance(metric, int)}
    told = tables.numbers("GPU_METRICS", "timestamp", "typeId", "metricId", "value")
    good = sane(told["timestamp"])
    told = {name: column[good] for name, column in told.items()}
    found = []
    for (kind, metric), name in names.items():
        which = np.flatnonzero((told["typeId"] == kind) & (told["metricId"] == metric))
        which = which[np.argsort(told["timestamp"][which], kind="stable")]
        if len(which):
            found.append(Metric(kind & _DEVICE, name, told["timestamp"][which], told["value"][which].astype(np.float64)))
    return found


def described(found: Iterable[Metric], devices: dict[int, Device]) -> list[dict[str, Any]]:
    """Rows of a report: mean, p99 and largest of each metric; bytes/s of DRAM metrics where the GPU's bandwidth is known."""
    rows = []
    for metric in found:
        mean = float(metric.value.mean())
        peak = devices[metric.device].bandwidth if metric.device in devices else None
        moved = mean / 100 * peak if peak is not None and _dram(metric.name) else None
        rows.append({
            "device": metric.device, "name": metric.name, "samples": len(metric.at), "mean": mean,
            "p99": float(np.quantile(metric.value, 0.99)), "max": float(metric.value.max()), "bytes_per_s": moved,
        })  # fmt: skip
    return rows


def dram_share(capture: Capture, device: int, start: Ints, end: Ints) -> float | None:
    """Share of its memory bandwidth that `device` used while any of [start, end) lasted, reads and writes together; None: not
    sampled in them."""
    total, any_samples = 0.0, False
    for kind in (_READS, _WRITES):
        for metric in capture.metrics:
            if metric.device == device and metric.name.lower().startswith(kind) and metric.name.endswith(_PERCENT):
                sums = np.concatenate([[0.0], np.cumsum(metric.value)])
                low, high = np.searchsorted(metric.at, start), np.searchsorted(metric.at, end)
                count = int((high - low).sum())
                if count:
                    total += float((sums[high] - sums[low]).sum()) / count / 100
                    any_samples = True
    return total if any_samples else None


def _dram(name: str) -> bool:
    return name.lower().startswith((*_READS, *_WRITES)) and name.endswith(_PERCENT)
