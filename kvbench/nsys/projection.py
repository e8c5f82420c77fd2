"""Which GPU operations a range launched, and from when to when they ran.

An operation belongs to a range if the API call that launched it is inside, on the same thread; the range's projection goes from
the first operation's start to the last one's end. Both are how `nsys stats` has it.
"""

from dataclasses import dataclass

import numpy as np

from kvbench.nsys import Ints, Operations
from kvbench.nsys.columns import runs


@dataclass(frozen=True, slots=True)
class Projected:
    """What the GPU did for each of some groups of ranges. first, last: ns at which its first operation began and its last ended;
    busy: ns in all of them; count: how many; device: of the first launched. 0, and -1 for the device, where there is none.

    op, of: for each operation of a group its index and the group.
    """

    first: Ints
    last: Ints
    busy: Ints
    count: Ints
    device: Ints
    op: Ints
    of: Ints


def projected(operations: Operations, thread: Ints, start: Ints, end: Ints, group: Ints) -> Projected:
    """The projection of spans, in order of thread, put together to groups: `group` is ascending, from 0 on without gaps."""
    low, high, order = inside_of(operations, thread, start, end)
    size = high - low
    of = np.repeat(group, size)
    op = order[np.arange(len(of)) - np.repeat(np.cumsum(size) - size - low, size)]
    total = int(group[-1]) + 1 if len(group) else 0
    count = np.bincount(of, minlength=total).astype(np.int64)
    first, last, busy, device = (np.full(total, none, np.int64) for none in (0, 0, 0, -1))
    if len(op):
        some, cut = np.flatnonzero(count), (np.cumsum(count) - count)[count > 0]
        first[some] = np.minimum.reduceat(operations.start[op], cut)
        last[some] = np.maximum.reduceat(operations.end[op], cut)
        busy[some] = np.add.reduceat(operations.end[op] - operations.start[op], cut)
        device[some] = operations.device[op[cut]]
    return Projected(first, last, busy, count, device, op, of)


def inside_of(operations: Operations, thread: Ints, start: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """(low, high, order): `order[low:high]` are the operations launched in each span [start, end] of `thread`."""
    order = np.lexsort((operations.call_start, operations.thread))
    threads, calls = operations.thread[order], operations.call_start[order]
    low, high = np.zeros(len(thread), np.int64), np.zeros(len(thread), np.int64)
    for part in runs(thread):
        one = int(thread[part.start])
        left, right = np.searchsorted(threads, one), np.searchsorted(threads, one, "right")
        if one < 0 or left == right:
            continue
        low[part] = left + np.searchsorted(calls[left:right], start[part])
        high[part] = left + np.searchsorted(calls[left:right], end[part], "right")
        ended = operations.call_end[order[np.maximum(high[part] - 1, 0)]]
        high[part] -= (high[part] > low[part]) & (
            ended > end[part]
        )  # calls of a thread do not overlap: only the last can end outside
    return low, high, order
