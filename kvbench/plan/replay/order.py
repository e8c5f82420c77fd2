"""Kernels of policies that keep one order: FIFO, LRU, Clock (one bit), SIEVE (Zhang et al., NSDI 2024)."""

import numpy as np

from kvbench.plan.replay.chain import append, rings, unlink
from kvbench.plan.replay.compiled import Flags, Ids, compiled


@compiled
def fifo(keys: Ids, unique: int, capacity: int, hits: Flags) -> None:
    """First in, first out."""
    slots = np.full(capacity, -1, np.int32)
    resident = np.zeros(unique, np.bool_)
    hand = 0
    for i in range(len(keys)):
        key = keys[i]
        if resident[key]:
            hits[i] = True
            continue
        if slots[hand] >= 0:
            resident[slots[hand]] = False
        slots[hand] = key
        resident[key] = True
        hand = hand + 1 if hand + 1 < capacity else 0


@compiled
def lru(keys: Ids, unique: int, capacity: int, hits: Flags) -> None:
    """Least recently used."""
    nxt, prv = rings(unique, 1)
    resident = np.zeros(unique, np.bool_)
    room = capacity
    for i in range(len(keys)):
        key = keys[i]
        if resident[key]:
            hits[i] = True
            unlink(nxt, prv, key)
        elif room > 0:
            room -= 1
        else:
            victim = nxt[unique]
            unlink(nxt, prv, victim)
            resident[victim] = False
        resident[key] = True
        append(nxt, prv, unique, key)


@compiled
def clock(keys: Ids, unique: int, capacity: int, hits: Flags) -> None:
    """FIFO where what was hit since the hand last passed stays for another round."""
    slots = np.full(capacity, -1, np.int32)
    state = np.zeros(unique, np.uint8)  # 0 absent, 1 resident, 2 hit since
    hand = 0
    for i in range(len(keys)):
        key = keys[i]
        if state[key]:
            hits[i] = True
            state[key] = 2
            continue
        while slots[hand] >= 0 and state[slots[hand]] == 2:
            state[slots[hand]] = 1
            hand = hand + 1 if hand + 1 < capacity else 0
        if slots[hand] >= 0:
            state[slots[hand]] = 0
        slots[hand] = key
        state[key] = 1
        hand = hand + 1 if hand + 1 < capacity else 0


@compiled
def sieve(keys: Ids, unique: int, capacity: int, hits: Flags) -> None:
    """As Clock, but what stays keeps its place, and the hand goes on from where it last took."""
    nxt, prv = rings(unique, 1)
    state = np.zeros(unique, np.uint8)  # as in clock
    room, hand = capacity, unique
    for i in range(len(keys)):
        key = keys[i]
        if state[key]:
            hits[i] = True
            state[key] = 2
            continue
        if room > 0:
            room -= 1
        else:
            if hand == unique:
                hand = nxt[unique]
            while state[hand] == 2:
                state[hand] = 1
                hand = nxt[hand]
                if hand == unique:
                    hand = nxt[unique]
            victim = hand
            hand = nxt[victim]
            unlink(nxt, prv, victim)
            state[victim] = 0
        state[key] = 1
        append(nxt, prv, unique, key)
