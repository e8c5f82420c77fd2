"""A capture in numbers: what `kvbench profile` prints and writes as JSON."""

from pathlib import Path
from typing import Any

import numpy as np

from kvbench.nsys import Capture, Found, Ints, Name
from kvbench.nsys.columns import by, spread
from kvbench.nsys.device import devices, kernels, memory
from kvbench.nsys.events import diagnostics
from kvbench.nsys.events import ranges as nvtx
from kvbench.nsys.layers import rows
from kvbench.nsys.metrics import described
from kvbench.nsys.names import told
from kvbench.nsys.passes import Passes, passes
from kvbench.nsys.projection import projected
from kvbench.nsys.source import WAIT, opened

NAMED = 30  # ranges and kernels that are listed
_SHORT = 200  # characters of a name
EAGER = (
    "layer ranges exist in eager mode only, so these times are those of a server without CUDA graphs and without compilation, "
    "and with the profiler's cost: compare layers with each other, not with the latencies of an ordinary run"
)


def ranges(path: Path, wait: float = WAIT) -> Found:
    """Is this capture worth anything: how many ranges ended, layers among them, what nsys warned of. Raises CaptureError."""
    with opened(path, wait) as tables:
        found = nvtx(tables)
        warned = tuple(each.text for each in diagnostics(tables))
    places = [told(name.text).place for name in found.names]
    return Found(len(found.start), len({(each.stack, each.layer) for each in places if each is not None}), warned)


def profiled(capture: Capture) -> dict[str, Any]:
    """Everything, JSON-ready; times in seconds. `advice`: what to do where no layer was found, null where some were."""
    found, work = passes(capture.ranges, capture.operations), capture.operations
    of_kernels = kernels(work)
    return {
        "file": str(capture.path), "exporter": capture.exporter, "schema": capture.schema,
        "began": capture.utc / 1e9 + capture.begin / 1e9 if capture.utc is not None else None,
        "seconds": (capture.end - capture.begin) / 1e9, "mode": "eager" if len(found.key) else None,
        "by": "gpu" if found.gpu.count.any() else "cpu",
        "ranges": {
            "count": len(capture.ranges.start), "unfinished": capture.ranges.unfinished, "damaged": capture.ranges.damaged,
            "output_twins": found.twins, "nested": found.nested, "passes": len(found.key),
            "threads": len(np.unique(found.thread)), "processes": _processes(found),
        },
        "layers": rows(capture, found), **_others(capture, found),
        "kernels": of_kernels[:NAMED], "kernels_unlisted": max(0, len(of_kernels) - NAMED), "memory": memory(work),
        "devices": devices(capture, found.gpu.op), "metrics": described(capture.metrics, capture.devices),
        "graphs": _graphs(capture), "diagnostics": [each._asdict() for each in capture.diagnostics],
        "notes": _notes(capture, found), "advice": None if len(found.key) else _advice(capture),
    }  # fmt: skip


def shown(name: Name, module: str) -> str:
    """A range's name as nsys shows it: with its domain, unless that is the default one; of a dict only the module."""
    text = f"{name.domain}:{module}" if name.domain else module
    return text if len(text) <= _SHORT else text[: _SHORT - 1] + "…"


def _others(capture: Capture, found: Passes) -> dict[str, Any]:
    """Ranges that are no layer by name: `parts` inside one (of all layers together), `unknown` outside. CPU times, and `gpu` as
    projected; the longest in total first. `_unlisted`: how many names more there are."""
    every = capture.ranges
    left_out = np.array([each.twin or (each.place is not None and not each.place.part) for each in found.told], bool)
    labels = [
        each.place.part if each.place is not None and each.place.part else shown(name, each.module)
        for each, name in zip(found.told, every.names, strict=True)
    ]
    by_number = list(dict.fromkeys(labels))
    numbers = {label: i for i, label in enumerate(by_number)}
    number = np.array([numbers[label] for label in labels], np.int64)[every.name]
    made: dict[str, Any] = {}
    for key, inside in (("parts", True), ("unknown", False)):
        which = np.flatnonzero((found.inside == inside) & ~left_out[every.name])
        which = which[np.argsort(every.thread[which], kind="stable")]
        gpu = _projections(capture, which)
        listed: list[dict[str, Any]] = [
            {
                "name": by_number[label], "count": len(part), **spread((every.end - every.start)[which[part]]),
                "gpu": spread(gpu[part][gpu[part] >= 0]) if (gpu[part] >= 0).any() else None,
            }
            for label, part in by(np.arange(len(which)), number[which])
        ]  # fmt: skip
        listed.sort(key=lambda row: -row["total"])
        made[key], made[f"{key}_unlisted"] = listed[:NAMED], max(0, len(listed) - NAMED)
    return made


def _projections(capture: Capture, which: Ints) -> Ints:
    """ns of each range's projection, -1 where it launched nothing."""
    every = capture.ranges
    gpu = projected(capture.operations, every.thread[which], every.start[which], every.end[which], np.arange(len(which)))
    return np.where(gpu.count > 0, gpu.last - gpu.first, -1)


def _graphs(capture: Capture) -> dict[str, Any]:
    """How much of the GPU's work came from CUDA graphs, in which there are no ranges."""
    work = capture.operations
    length = work.end - work.start
    spent = int(length.sum())
    share = int(length[work.graph].sum()) / spent if spent else None
    return {"launches": capture.graph_launches, "operations": int(np.count_nonzero(work.graph)), "share": share}


def _notes(capture: Capture, found: Passes) -> list[str]:
    """What a reader must know of these numbers."""
    notes, work = [], capture.operations
    if len(found.key):
        notes.append(EAGER)
    if work.graph.any() or capture.graph_launches:
        share = _graphs(capture)["share"]
        part = f"{100 * share:.3g} % of the GPU's time" if share is not None else "work"
        notes.append(
            f"CUDA graphs were launched ({capture.graph_launches:,} times) and did {part}: ranges do not reach in, so "
            "that part belongs to no layer; start the server with --enforce-eager (SGLang: --disable-cuda-graph)"
        )
    lost = int(np.count_nonzero(work.thread == -1))
    if lost:
        notes.append(
            f"{lost:,} of {len(work.start):,} GPU operations belong to no layer: the call that launched them was not captured"
        )
    if len(found.key) and not found.gpu.count.any():
        notes.append(
            "no GPU operation belongs to a layer: times are those of the CPU's ranges (was CUDA traced? nsys -t cuda,nvtx)"
        )
    if capture.ranges.unfinished:
        notes.append(f"{capture.ranges.unfinished:,} ranges had not ended when the capture did, and are left out")
    if capture.ranges.damaged or work.damaged:
        notes.append(
            f"{capture.ranges.damaged + work.damaged:,} rows make no sense (no time, an end before its start) and are left out"
        )
    if found.nested:
        notes.append(f"{found.nested:,} layer ranges lay inside another layer's and are not counted twice")
    if len(found.key) and not found.whole.all():
        notes.append("some layers have no range of their own: a pass is their parts added up, without what lies between them")
    if _processes(found) > 1:
        notes.append(f"layers ran in {_processes(found)} processes (ranks): counts and totals are of all of them together")
    return notes


def _processes(found: Passes) -> int:
    """Processes in which layers ran."""
    return len(np.unique(found.thread[found.thread >= 0] >> 24))


def _advice(capture: Capture) -> str:
    """What to do about a capture without layers."""
    told = " ".join(each.text for each in capture.diagnostics)
    if not len(capture.ranges.start):
        why = "no NVTX range at all is in it" + (
            f", {capture.ranges.unfinished} unfinished ones aside" if capture.ranges.unfinished else ""
        )
        if "NVTX" in told and "incompatible" in told:
            return f"{why}: the nvtx package is newer than this nsys understands; use nvtx==0.2.11 or a newer Nsight Systems"
        return (
            f"{why}: trace NVTX (nsys -t cuda,nvtx), follow the server's children (--trace-fork-before-exec=true, and "
            "VLLM_WORKER_MULTIPROC_METHOD=spawn), capture while requests are served; nsys up to 2024.2 needs nvtx==0.2.11"
        )
    return (
        "none of its ranges is named after a layer (DecoderLayer_18, or a module with layers.18 in it): start vLLM with "
        "--enable-layerwise-nvtx-tracing --enforce-eager, SGLang with --enable-layerwise-nvtx-marker --disable-cuda-graph"
    )
