"""Kernels of policies that count: LFU, and GDSF (Cherkasova 1998) for blocks of one size."""

import numpy as np

from kvbench.plan.replay.chain import append, rings, unlink
from kvbench.plan.replay.compiled import Flags, Ids, compiled


@compiled
def most_used(keys: Ids, unique: int) -> int:
    """Accesses of the block that has most."""
    counts = np.zeros(unique, np.int32)
    for i in range(len(keys)):
        counts[keys[i]] += 1
    return int(counts.max())


@compiled
def lfu(keys: Ids, unique: int, capacity: int, hits: Flags) -> None:
    """Fewest accesses since it came in; among equals, who reached that count first. Counts die with the block."""
    nxt, prv = rings(unique, most_used(keys, unique) + 1)  # one list per count; the first stays empty
    count = np.zeros(unique, np.int32)  # 0 absent
    room, least = capacity, 1
    for i in range(len(keys)):
        key = keys[i]
        used = count[key]
        if used:
            hits[i] = True
            unlink(nxt, prv, key)
            if used == least and nxt[unique + used] == unique + used:
                least += 1
        else:
            if room > 0:
                room -= 1
            else:
                victim = nxt[unique + least]
                unlink(nxt, prv, victim)
                count[victim] = 0
            least = 1
        count[key] = used + 1
        append(nxt, prv, unique + used + 1, key)


@compiled
def gdsf(keys: Ids, unique: int, capacity: int, hits: Flags) -> None:
    """Lowest count + age, the age being the priority of the last victim; among equals, the least recently used.

    Priorities of residents lie within [age, age + most]: a circle of most + 1 lists holds them in order.
    """
    width = most_used(keys, unique) + 1
    nxt, prv = rings(unique, width)
    count = np.zeros(unique, np.int32)
    room, age = capacity, 0
    for i in range(len(keys)):
        key = keys[i]
        if count[key]:
            hits[i] = True
            unlink(nxt, prv, key)
        elif room > 0:
            room -= 1
        else:
            while nxt[unique + age % width] == unique + age % width:
                age += 1
            victim = nxt[unique + age % width]
            unlink(nxt, prv, victim)
            count[victim] = 0
        count[key] += 1
        append(nxt, prv, unique + (age + count[key]) % width, key)
