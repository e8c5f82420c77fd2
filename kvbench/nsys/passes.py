"""Which ranges count as layers, and what the GPU did for each.

A layer's ranges hold those of its parts, so that adding up both counts time twice. Of a layer that has ranges of its own only
those count; of one that has only parts, its outermost parts, put together to passes. A range inside another that counts is left
out.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbench.nsys import Ints, Operations, Ranges
from kvbench.nsys.columns import runs
from kvbench.nsys.names import Told, told
from kvbench.nsys.projection import Projected, projected


@dataclass(frozen=True, slots=True)
class Passes:
    """Times that a layer was run, as columns of one length. key: index into `layers`; cpu: ns in its ranges; whole: from a range
    of its own, not from its parts; gpu: what the GPU did for it.

    inside: of all ranges, whether it lies in a range that counts. told: what each range's name says. twins, nested: ranges left
    out, as the second of a module and as inside another that counts.
    """

    layers: list[tuple[str, int]]
    key: Ints
    thread: Ints
    cpu: Ints
    whole: NDArray[np.bool_]
    gpu: Projected
    inside: NDArray[np.bool_]
    told: list[Told]
    twins: int
    nested: int


def passes(ranges: Ranges, operations: Operations) -> Passes:
    """The passes of every layer, in order of thread and start."""
    said = [told(name.text) for name in ranges.names]
    twin = np.array([each.twin for each in said], bool)
    places = [each.place for each in said]
    layers = sorted({(found.stack, found.layer) for found in places if found is not None})
    index = {layer: i for i, layer in enumerate(layers)}
    key_of = np.array([-1 if found is None else index[found.stack, found.layer] for found in places], np.int64)
    whole_of = np.array([found is not None and not found.part for found in places], bool)
    chosen, nested = _counting(ranges, key_of, whole_of, len(layers))
    belongs = _grouped(ranges, chosen, key_of, whole_of)
    total = int(belongs[-1]) + 1 if len(belongs) else 0
    heads = np.searchsorted(belongs, np.arange(total))
    gpu = projected(operations, ranges.thread[chosen], ranges.start[chosen], ranges.end[chosen], belongs)
    cpu = np.add.reduceat(ranges.end[chosen] - ranges.start[chosen], heads) if total else np.empty(0, np.int64)
    own = chosen[heads] if total else chosen
    return Passes(
        layers, key_of[ranges.name[own]], ranges.thread[own], cpu, whole_of[ranges.name[own]], gpu,
        _inside(ranges, chosen), said, int(np.count_nonzero(twin[ranges.name])), nested,
    )  # fmt: skip


def _counting(ranges: Ranges, key_of: Ints, whole_of: NDArray[np.bool_], layers: int) -> tuple[Ints, int]:
    """(ranges that count, by thread and start; how many ranges lay inside one of those)."""
    if not layers:
        return np.empty(0, np.int64), 0
    key, whole = key_of[ranges.name], whole_of[ranges.name]
    has_own = np.zeros(layers, bool)
    has_own[key[(key >= 0) & whole]] = True
    named = np.flatnonzero((key >= 0) & (whole | ~has_own[key]))
    named = named[np.lexsort((-ranges.end[named], ranges.start[named], ranges.thread[named]))]
    kept = np.zeros(len(named), bool)
    for part in runs(ranges.thread[named]):
        end = ranges.end[named[part]]
        kept[part] = np.concatenate([[True], end[1:] > np.maximum.accumulate(end)[:-1]])
    return named[kept], int(np.count_nonzero(~kept))


def _grouped(ranges: Ranges, chosen: Ints, key_of: Ints, whole_of: NDArray[np.bool_]) -> Ints:
    """The pass that each range belongs to, from 0 on. Parts make one pass until the layer changes or a part comes again."""
    belongs, at = np.empty(len(chosen), np.int64), -1
    parts: set[int] = set()
    before = (-1, -1)
    names, threads = ranges.name[chosen].tolist(), ranges.thread[chosen].tolist()
    for i, (name, thread) in enumerate(zip(names, threads, strict=True)):
        here = (int(key_of[name]), thread)
        if here != before or whole_of[name] or name in parts:
            at, before = at + 1, here
            parts.clear()
        parts.add(name)
        belongs[i] = at
    return belongs


def _inside(ranges: Ranges, chosen: Ints) -> NDArray[np.bool_]:
    """Which ranges lie within one that counts, or are one."""
    found = np.zeros(len(ranges.start), bool)
    order = np.lexsort((ranges.start, ranges.thread))
    for part in runs(ranges.thread[order]):
        every = order[part]
        mine = chosen[slice(*np.searchsorted(ranges.thread[chosen], [ranges.thread[every[0]], ranges.thread[every[0]] + 1]))]
        if len(mine):
            reach = np.maximum.accumulate(ranges.end[mine])
            at = np.searchsorted(ranges.start[mine], ranges.start[every], "right") - 1
            found[every] = (at >= 0) & (ranges.end[every] <= reach[np.maximum(at, 0)])
    return found
