"""Doubly linked lists in two arrays. A list is a sentinel's index; nxt[sentinel] is its oldest member, prv[sentinel] its newest.

numba's cache on disk looks at the file of the kernel alone: after a change here, delete `__pycache__`.
"""

import numpy as np

from kvbench.plan.replay.compiled import Ids, compiled


@compiled
def rings(members: int, lists: int) -> tuple[Ids, Ids]:
    """(nxt, prv) for `members` and as many empty lists, whose sentinels follow the members."""
    nxt = np.arange(members + lists).astype(np.int32)
    return nxt, nxt.copy()


@compiled
def unlink(nxt: Ids, prv: Ids, x: int) -> None:
    """Take x out of the list that it is in."""
    a, b = prv[x], nxt[x]
    nxt[a] = b
    prv[b] = a


@compiled
def append(nxt: Ids, prv: Ids, sentinel: int, x: int) -> None:
    """Put x, in no list, at the newest end."""
    last = prv[sentinel]
    nxt[last] = x
    prv[x] = last
    nxt[x] = sentinel
    prv[sentinel] = x
