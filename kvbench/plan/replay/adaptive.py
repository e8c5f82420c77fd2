"""Kernels of LIRS (Jiang & Zhang, SIGMETRICS 2002) and LeCaR (Vietri et al., HotStorage 2018)."""

import numpy as np

from kvbench.plan.replay.chain import append, rings, unlink
from kvbench.plan.replay.compiled import Flags, Ids, compiled
from kvbench.plan.replay.frequency import most_used


@compiled
def lirs(keys: Ids, unique: int, capacity: int, hits: Flags) -> None:
    """Keeps what has a short reuse distance (LIR); 1 % of the blocks are for the rest (HIR). A stack remembers what was used
    since the oldest LIR block was, evicted blocks too, of those at most as many as the capacity."""
    nxt, prv = rings(unique, 1)  # the stack: newest is its top
    after, before = rings(unique, 2)  # HIR blocks: resident, oldest leaves first; evicted and still in the stack, oldest first
    none, low, high, gone = 0, 1, 2, 3
    state = np.zeros(unique, np.int8)
    stacked = np.zeros(unique, np.bool_)
    most_low = capacity - max(1, capacity // 100)
    lows, resident, ghosts = 0, 0, 0
    for i in range(len(keys)):
        key = keys[i]
        was, known = state[key], stacked[key]
        if was in (high, gone):
            unlink(after, before, key)
            ghosts -= was == gone
        if was in (low, high):
            hits[i] = True
        elif resident < capacity:
            resident += 1
        else:
            victim = after[unique]
            unlink(after, before, victim)
            state[victim] = gone if stacked[victim] else none
            if stacked[victim]:
                append(after, before, unique + 1, victim)
                ghosts += 1
        if known:
            unlink(nxt, prv, key)
        stacked[key] = True
        append(nxt, prv, unique, key)
        if known or lows < most_low:
            lows += was != low
            state[key] = low
        else:
            state[key] = high
            append(after, before, unique, key)
        while nxt[unique] != unique:  # until the bottom of the stack is LIR, and neither LIR nor ghosts are too many
            leaves = after[unique + 1] if ghosts > capacity else nxt[unique]
            if state[leaves] == low:
                if lows <= most_low:
                    break
                lows -= 1
                state[leaves] = high
                append(after, before, unique, leaves)
            elif state[leaves] == gone:
                state[leaves] = none
                unlink(after, before, leaves)
                ghosts -= 1
            unlink(nxt, prv, leaves)
            stacked[leaves] = False


@compiled
def lecar(keys: Ids, unique: int, capacity: int, hits: Flags) -> None:
    """LRU or LFU takes the victim, drawn by weights that fall when a block comes back that the expert evicted (rate 0.45,
    discount 0.005 ** (1 / capacity) per access). The draws are from one fixed seed."""
    most = most_used(keys, unique)
    nxt, prv = rings(unique, 3)  # recency; ghosts of LRU; ghosts of LFU
    after, before = rings(unique, most + 1)  # by count, as in lfu
    none, here = 0, 1  # ghosts: 2 evicted by LRU, 3 by LFU
    place = np.zeros(unique, np.int8)
    count = np.zeros(unique, np.int32)
    left = np.zeros(unique, np.int64)
    ghosts = np.zeros(4, np.int64)
    discount = 0.005 ** (1.0 / capacity)
    weight, draw = 0.5, 12345  # of LRU
    resident, least = 0, 1
    for i in range(len(keys)):
        key = keys[i]
        was = place[key]
        if was == here:
            hits[i] = True
            unlink(nxt, prv, key)
            unlink(after, before, key)
            if count[key] == least and after[unique + least] == unique + least:
                least += 1
            count[key] += 1
        else:
            if was != none:
                unlink(nxt, prv, key)
                ghosts[was] -= 1
                kept = np.exp(-0.45 * discount ** (i - left[key]))
                lru, lfu = (weight * kept, 1 - weight) if was == 2 else (weight, (1 - weight) * kept)
                weight = min(0.99, max(0.01, lru / (lru + lfu)))
                count[key] += 1
            else:
                count[key] = 1
            if resident < capacity:
                resident += 1
            else:
                draw = (draw * 1103515245 + 12345) % 2**31
                while after[unique + least] == unique + least:
                    least += 1
                oldest, rarest = nxt[unique], after[unique + least]
                to = 2 if draw < weight * 2**31 else 3
                victim = oldest if to == 2 else rarest
                unlink(nxt, prv, victim)
                unlink(after, before, victim)
                if oldest == rarest:
                    place[victim] = none
                else:
                    if ghosts[to] == capacity:
                        old = nxt[unique + to - 1]
                        unlink(nxt, prv, old)
                        place[old] = none
                        ghosts[to] -= 1
                    place[victim] = to
                    left[victim] = i
                    ghosts[to] += 1
                    append(nxt, prv, unique + to - 1, victim)
            least = min(least, count[key])
        place[key] = here
        append(nxt, prv, unique, key)
        append(after, before, unique + count[key], key)
