"""Kernels of policies with two queues and a memory of what they evicted: ARC (Megiddo & Modha, FAST 2003), 2Q (Johnson & Shasha,
VLDB 1994), S3-FIFO (Yang et al., SOSP 2023)."""

import numpy as np

from kvbench.plan.replay.chain import append, rings, unlink
from kvbench.plan.replay.compiled import Flags, Ids, compiled


@compiled
def arc(keys: Ids, unique: int, capacity: int, hits: Flags) -> None:
    """Adaptive replacement: seen once (t1) and seen again (t2), a ghost list of each (b1, b2), and a target size of t1."""
    nxt, prv = rings(unique, 5)
    none, t1, t2, b1, b2 = 0, 1, 2, 3, 4
    place = np.zeros(unique, np.int8)
    size = np.zeros(5, np.int64)
    target = 0.0
    for i in range(len(keys)):
        key = keys[i]
        was = place[key]
        if was != none:
            unlink(nxt, prv, key)
            size[was] -= 1
        goes = t2
        if was in (t1, t2):
            hits[i] = True
        else:
            full = size[t1] + size[t2] == capacity
            if was == b1:
                target = min(target + max(size[b2] / (size[b1] + 1), 1.0), float(capacity))
            elif was == b2:
                target = max(target - max(size[b1] / (size[b2] + 1), 1.0), 0.0)
            else:
                goes = t1
            leaves, to = none, none
            if full and was == none and size[t1] == capacity:
                leaves = t1  # and leaves no ghost: t1 and b1 hold no more than the capacity together
            elif full:
                if was == none:
                    old = none
                    if size[t1] + size[b1] >= capacity:
                        old = b1
                    elif size[t1] + size[t2] + size[b1] + size[b2] >= 2 * capacity:
                        old = b2
                    if old != none:
                        ghost = nxt[unique + old]
                        unlink(nxt, prv, ghost)
                        place[ghost] = none
                        size[old] -= 1
                first = size[t1] > 0 and (size[t1] > target or (size[t1] == target and was == b2))
                leaves, to = (t1, b1) if first or size[t2] == 0 else (t2, b2)
            if leaves != none:
                victim = nxt[unique + leaves]
                unlink(nxt, prv, victim)
                size[leaves] -= 1
                place[victim] = to
                if to != none:
                    append(nxt, prv, unique + to, victim)
                    size[to] += 1
        place[key] = goes
        size[goes] += 1
        append(nxt, prv, unique + goes, key)


@compiled
def two_queue(keys: Ids, unique: int, capacity: int, hits: Flags) -> None:
    """2Q: a FIFO of a quarter of the blocks; its victims, remembered for half the capacity, enter an LRU when they come back."""
    nxt, prv = rings(unique, 4)
    none, fresh, main, ghost = 0, 1, 2, 3
    place = np.zeros(unique, np.int8)
    size = np.zeros(4, np.int64)
    most_fresh, most_ghosts = max(1, capacity // 4), max(1, capacity // 2)
    for i in range(len(keys)):
        key = keys[i]
        was = place[key]
        if was == fresh:
            hits[i] = True
            continue
        if was != none:
            unlink(nxt, prv, key)
            size[was] -= 1
        if was == main:
            hits[i] = True
        elif size[fresh] + size[main] == capacity:
            leaves = fresh if size[fresh] > most_fresh or size[main] == 0 else main
            victim = nxt[unique + leaves]
            unlink(nxt, prv, victim)
            size[leaves] -= 1
            place[victim] = none
            if leaves == fresh:
                if size[ghost] == most_ghosts:
                    old = nxt[unique + ghost]
                    unlink(nxt, prv, old)
                    place[old] = none
                    size[ghost] -= 1
                place[victim] = ghost
                append(nxt, prv, unique + ghost, victim)
                size[ghost] += 1
        goes = fresh if was == none else main
        place[key] = goes
        size[goes] += 1
        append(nxt, prv, unique + goes, key)


@compiled
def s3fifo(keys: Ids, unique: int, capacity: int, hits: Flags) -> None:
    """Small FIFO of a tenth, main FIFO with two-bit counts, ghost FIFO of nine tenths; two hits take a block from small to main.
    What comes before the first eviction fills the small FIFO, then main, as libCacheSim has it."""
    nxt, prv = rings(unique, 4)
    none, small, main, ghost = 0, 1, 2, 3
    place = np.zeros(unique, np.int8)
    uses = np.zeros(unique, np.int32)
    size = np.zeros(4, np.int64)
    most_small, most_ghosts = max(1, capacity // 10), max(1, capacity * 9 // 10)
    filling = True
    for i in range(len(keys)):
        key = keys[i]
        was = place[key]
        if was in (small, main):
            hits[i] = True
            uses[key] += 1
            continue
        if was == ghost:
            unlink(nxt, prv, key)
            size[ghost] -= 1
        room = size[small] + size[main] < capacity
        filling = filling and room
        source = main if size[small] == 0 or size[main] > capacity - most_small else small
        while not room:
            if size[source] == 0:  # all of small was promoted
                source = main
            victim = nxt[unique + source]
            unlink(nxt, prv, victim)
            size[source] -= 1
            if source == main and uses[victim] > 0:
                uses[victim] = min(uses[victim], 3) - 1
                goes = main
            elif source == small and uses[victim] >= 2:
                uses[victim] = 0
                goes = main
            elif source == small:
                if size[ghost] == most_ghosts:
                    old = nxt[unique + ghost]
                    unlink(nxt, prv, old)
                    place[old] = none
                    size[ghost] -= 1
                goes, room = ghost, True
            else:
                goes, room = none, True
            place[victim] = goes
            if goes != none:
                append(nxt, prv, unique + goes, victim)
                size[goes] += 1
        goes = main if was == ghost or (filling and size[small] >= most_small) else small
        place[key] = goes
        uses[key] = 0
        size[goes] += 1
        append(nxt, prv, unique + goes, key)
