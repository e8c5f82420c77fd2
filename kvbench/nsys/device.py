"""What the GPUs did as a whole: kernels, memory operations, how busy they were, and where they had nothing to do."""

from typing import Any

import numpy as np

from kvbench.nsys import GRAPH, KERNEL, MEMCPY, MEMSET, Capture, Ints, Operations
from kvbench.nsys.columns import by, spread

TOP = 20  # kernels and gaps that are listed


def kernels(work: Operations) -> list[dict[str, Any]]:
    """Kernels by name (whole CUDA graphs too, where only those were recorded), the longest in total first."""
    ours = np.flatnonzero((work.kind == KERNEL) | (work.kind == GRAPH))
    taken = int((work.end[ours] - work.start[ours]).sum())
    rows = []
    for name, which in by(ours, work.name[ours]):
        told = spread(work.end[which] - work.start[which])
        rows.append(
            {"name": work.names[name], "count": len(which), "share": told["total"] / taken * 1e9 if taken else None, **told}
        )
    return sorted(rows, key=lambda row: -row["total"])


def memory(work: Operations) -> list[dict[str, Any]]:
    """Copies and fills by kind: time, bytes, and bytes/s while they lasted."""
    ours = np.flatnonzero((work.kind == MEMCPY) | (work.kind == MEMSET))
    rows = []
    for name, which in by(ours, work.name[ours]):
        told, size = spread(work.end[which] - work.start[which]), int(work.size[which].sum())
        rows.append({
            "name": work.names[name], "count": len(which), "bytes": size, "largest": int(work.size[which].max()),
            "bytes_per_s": size / told["total"] if told["total"] else None, **told,
        })  # fmt: skip
    return sorted(rows, key=lambda row: -row["total"])


def devices(capture: Capture, layered: Ints) -> list[dict[str, Any]]:
    """Each GPU: its operations, busy share, gaps, the same per stream, and how much of its busy time is outside of any layer.

    Busy is the union of its operations over all streams; shares are of the span from the first operation of any GPU to the last.
    `layered`: indices of the operations that belong to a layer.
    """
    work = capture.operations
    if not len(work.start):
        return []
    span = int(work.end.max() - work.start.min())
    of_layers = np.zeros(len(work.start), bool)
    of_layers[layered] = True
    rows = []
    for number, which in by(np.arange(len(work.start)), work.device):
        known = capture.devices.get(number)
        streams = [{"stream": stream, **idle(work, mine, span)} for stream, mine in by(which, work.stream[which])]
        spent = int((work.end[which] - work.start[which]).sum())
        outside = which[~of_layers[which]]
        rows.append({
            "device": number, "name": known.name if known is not None else "",
            "outside_layers": int((work.end[outside] - work.start[outside]).sum()) / spent if spent else None,
            **idle(work, which, span), "top_gaps": top_gaps(work, which), "streams": streams,
        })  # fmt: skip
    return rows


def idle(work: Operations, which: Ints, span: int) -> dict[str, Any]:
    """How long any of these operations went on, and the times between in which none did. span: ns."""
    _, length, busy = gaps(work.start[which], work.end[which])
    return {
        "operations": len(which), "busy": busy / 1e9, "busy_share": busy / span if span else None,
        "gaps": {"count": len(length), **(spread(length) if len(length) else {})},
    }  # fmt: skip


def gaps(start: Ints, end: Ints) -> tuple[Ints, Ints, int]:
    """(the span that ends each gap, how long the gap is, ns covered by at least one span) of spans in order of start."""
    if not len(start):
        return np.empty(0, np.int64), np.empty(0, np.int64), 0
    reach = np.maximum.accumulate(end)
    between = start[1:] - reach[:-1]
    idle = np.flatnonzero(between > 0)
    return idle + 1, between[idle], int(reach[-1] - start[0]) - int(between[idle].sum())


def top_gaps(work: Operations, which: Ints) -> list[dict[str, Any]]:
    """The longest gaps: when (seconds on the capture's axis), how long, and what ran before and after."""
    start, end = work.start[which], work.end[which]
    after, length, _ = gaps(start, end)
    found = []
    for i in np.argsort(-length, kind="stable")[:TOP].tolist():
        following, before = int(after[i]), int(np.argmax(end[: after[i]]))
        found.append({
            "at": int(start[following] - length[i]) / 1e9, "seconds": int(length[i]) / 1e9,
            "before": work.names[int(work.name[which[before]])], "after": work.names[int(work.name[which[following]])],
        })  # fmt: skip
    return found
