"""What knows the future: when a block is next used, and Belady's policy (1966), the most hits any cache of the size can have."""

import numpy as np

from kvbench.plan.replay.compiled import Flags, Ids, compiled


@compiled
def next_use(keys: Ids, unique: int) -> Ids:
    """(n,) index of the following access to the same block; n where there is none."""
    n = len(keys)
    seen = np.full(unique, n, np.int32)
    following = np.empty(n, np.int32)
    for i in range(n - 1, -1, -1):
        following[i] = seen[keys[i]]
        seen[keys[i]] = i
    return following


@compiled
def belady(keys: Ids, unique: int, capacity: int, hits: Flags) -> None:
    """Evict what is used again last. Every block that is computed is kept at first, as engines must.

    A heap holds the next uses of residents; an entry is stale once its access is past. Blocks never used again are evicted
    before all others, in the order they came to that.
    """
    n = len(keys)
    following = next_use(keys, unique)
    resident = np.zeros(unique, np.bool_)
    spent = np.empty(unique, np.int32)  # residents without a next use, a stack
    heap = np.empty(n + 1, np.int32)  # next uses, largest first; an index of an access names its block
    room, dead, size = capacity, 0, 0
    for i in range(n):
        key = keys[i]
        if resident[key]:
            hits[i] = True
        elif room > 0:
            room -= 1
        elif dead > 0:
            dead -= 1
            resident[spent[dead]] = False
        else:
            resident[keys[heap[0]]] = False
            size -= 1
            last = heap[size]
            at = 0
            while 2 * at + 1 < size:
                child = 2 * at + 1
                if child + 1 < size and heap[child + 1] > heap[child]:
                    child += 1
                if heap[child] <= last:
                    break
                heap[at] = heap[child]
                at = child
            heap[at] = last
        resident[key] = True
        use = following[i]
        if use == n:
            spent[dead] = key
            dead += 1
            continue
        at = size
        size += 1
        while at > 0 and heap[(at - 1) // 2] < use:
            heap[at] = heap[(at - 1) // 2]
            at = (at - 1) // 2
        heap[at] = use
