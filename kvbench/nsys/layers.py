"""Rows per layer: how often, how long on the CPU and on the GPU, what share, and which layers stand out."""

from typing import Any

import numpy as np

from kvbench.nsys import GRAPH, KERNEL, Capture, Floats, Ints
from kvbench.nsys.columns import by, spread
from kvbench.nsys.metrics import dram_share
from kvbench.nsys.passes import Passes

OUTLIER = 3.5  # robust z beyond which a value stands out (Iglewicz & Hoaglin 1993)
_MAD = 0.6745  # of a normal distribution: median absolute deviation / standard deviation
_MEAN_AD = 1.2533  # and standard deviation / mean absolute deviation
TOP = 3  # kernels named per layer


def rows(capture: Capture, found: Passes) -> list[dict[str, Any]]:
    """A row for every layer that was run, by stack and number. Times are seconds.

    `gpu` is null where nothing that the layer launched is in the capture. `share` is of all layers' GPU time, of CPU time where
    there is none; `z` is the robust z of the layer's median among its stack's.
    """
    on_gpu = bool(found.gpu.count.any())
    total = np.maximum(found.gpu.last - found.gpu.first, 0) if on_gpu else found.cpu
    everything = int(total.sum())
    kernels = _kernels(capture, found)
    made: list[dict[str, Any]] = []
    for key, which in by(np.arange(len(found.key)), found.key):
        stack, layer = found.layers[key]
        ran = which[found.gpu.count[which] > 0]
        own = total[ran if on_gpu else which]
        made.append({
            "stack": stack, "layer": layer, "count": len(which), "from_parts": not bool(found.whole[which].all()),
            "cpu": spread(found.cpu[which]), "gpu": spread(found.gpu.last[ran] - found.gpu.first[ran]) if len(ran) else None,
            "busy": int(found.gpu.busy[which].sum()) / 1e9, "operations": float(found.gpu.count[which].mean()),
            "share": int(total[which].sum()) / everything if everything else None,
            "slow": int(np.count_nonzero(robust_z(own.astype(np.float64)) > OUTLIER)),
            "dram_share": _dram(capture, found, ran), **kernels.get(key, {"kernels": 0.0, "top_kernels": []}),
        })  # fmt: skip
    _judge(made, on_gpu)
    return made


def robust_z(values: Floats) -> Floats:
    """How far each value is from the median, in standard deviations as the median absolute deviation estimates them (the mean one
    where more than half of the values are equal; 0 where all are)."""
    if not len(values):
        return values
    off = values - np.median(values)
    deviation = float(np.median(np.abs(off)))
    if deviation > 0:
        return _MAD * off / deviation
    mean = float(np.abs(off).mean())
    return off / (_MEAN_AD * mean) if mean > 0 else np.zeros_like(off)


def _judge(made: list[dict[str, Any]], on_gpu: bool) -> None:
    """Compare layers with the others of their stack, by median."""
    for stack in {row["stack"] for row in made}:
        of = [row for row in made if row["stack"] == stack and (row["gpu"] or not on_gpu)]
        medians = np.array([row["gpu" if on_gpu else "cpu"]["median"] for row in of], np.float64)
        for row, z in zip(of, robust_z(medians).tolist(), strict=True):
            row["z"] = z
    for row in made:
        row.setdefault("z", None)
        row["outlier"] = row["z"] is not None and abs(row["z"]) > OUTLIER


def _kernels(capture: Capture, found: Passes) -> dict[int, dict[str, Any]]:
    """By layer: kernels per pass, and those that took longest with their share of the layer's kernel time."""
    op, of = found.gpu.op, found.gpu.of
    work = capture.operations
    ours = (work.kind[op] == KERNEL) | (work.kind[op] == GRAPH)
    op, key = op[ours], found.key[of[ours]]
    if not len(op):
        return {}
    pairs, index = np.unique(key * len(work.names) + work.name[op], return_inverse=True)
    spent = np.bincount(index, (work.end[op] - work.start[op]).astype(np.float64))
    runs = np.bincount(found.key)
    each = np.bincount(key, minlength=len(runs))
    made: dict[int, dict[str, Any]] = {}
    for layer in np.unique(key).tolist():
        mine = np.flatnonzero(pairs // len(work.names) == layer)
        whole = float(spent[mine].sum())
        top = mine[np.argsort(-spent[mine], kind="stable")][:TOP]
        named = [
            {
                "name": work.names[int(pairs[i]) % len(work.names)],
                "total": float(spent[i]) / 1e9,
                "share": float(spent[i]) / whole if whole else 0.0,
            }
            for i in top
        ]
        made[layer] = {"kernels": float(each[layer] / runs[layer]), "top_kernels": named}
    return made


def _dram(capture: Capture, found: Passes, ran: Ints) -> float | None:
    """Share of the memory bandwidth in use during these passes; null where they were on several GPUs, or it was not sampled."""
    devices = np.unique(found.gpu.device[ran])
    if not capture.metrics or len(devices) != 1:
        return None
    return dram_share(capture, int(devices[0]), found.gpu.first[ran], found.gpu.last[ran])
