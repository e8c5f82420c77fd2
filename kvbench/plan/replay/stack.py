"""LRU for every capacity at once, by stack distance (Mattson et al., 1970)."""

import numpy as np

from kvbench.plan.replay.compiled import Ids, compiled


@compiled
def stack_distances(keys: Ids, unique: int) -> Ids:
    """(n,) distinct other blocks since the last access to the same block; n at a first access. An LRU cache of c blocks hits
    exactly where the distance is below c.

    A Fenwick tree counts positions that are no block's latest access; only repeated accesses touch it.
    """
    n = len(keys)
    latest = np.full(unique, -1, np.int32)
    stale = np.zeros(n + 1, np.int32)
    distances = np.empty(n, np.int32)
    for i in range(n):
        key = keys[i]
        before = latest[key]
        latest[key] = i
        if before < 0:
            distances[i] = n
            continue
        passed = 0  # stale positions in (before, i): up to i less up to before, until the two walks meet
        high, low = i, before + 1
        while high > low:
            passed += stale[high]
            high &= high - 1
        while low > high:
            passed -= stale[low]
            low &= low - 1
        distances[i] = i - before - 1 - passed
        at = before + 1
        while at <= n:
            stale[at] += 1
            at += at & -at
    return distances
