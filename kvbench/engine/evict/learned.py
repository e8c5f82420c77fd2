"""Learned: several policies run as shadows on the same accesses, and the pool follows the one that would have hit most lately."""

import math
from collections import OrderedDict
from collections.abc import Callable

from kvbench.engine import BlockInfo, Key, Policy
from kvbench.engine.evict.adaptive import Arc
from kvbench.engine.evict.line import Line, last_resort
from kvbench.engine.evict.order import Clock, Lru
from kvbench.engine.evict.queues import Lirs

EXPERTS: tuple[Callable[[int, int], Policy], ...] = (Lru, Clock, Arc, Lirs)
"""The first is the one never to fall behind."""

KEPT = 0.9  # of the evidence, from one judgement to the next
SURE = 2.0  # standard deviations by which a challenger must lead
ALLOWED = 0.002  # hits per access that the pool may have lost to the first expert before it must follow it


class Shadow:
    """Keys of up to `room` blocks that one expert rules. Nothing stays referenced in it."""

    def __init__(self, policy: Policy) -> None:
        self.resident: set[Key] = set()
        self._policy = policy

    def access(self, key: Key, block: BlockInfo, room: int) -> tuple[bool, list[Key]]:
        """Whether it is a hit, and who leaves for it."""
        policy, left = self._policy, []
        hit = key in self.resident
        if hit:
            policy.hit(key)
        else:
            policy.miss(key)
            while len(self.resident) >= room:
                left.append(policy.evict(lambda _: False, key))
                self.resident.remove(left[-1])
            policy.insert(key, block)
            self.resident.add(key)
        policy.free(key)
        return hit, left

    def evict(self, pinned: Callable[[Key], bool], incoming: Key | None) -> Key | None:
        """Make room ahead of an access. None where every key is pinned."""
        try:
            key = self._policy.evict(pinned, incoming)
        except KeyError:
            return None
        self.resident.remove(key)
        return key

    def free(self, key: Key) -> None:
        if key in self.resident:
            self._policy.free(key)

    def remove(self, key: Key) -> None:
        if key in self.resident:
            self.resident.remove(key)
            self._policy.remove(key)


class Learned:
    """A bandit with full information (Blum and Burch, "On-line learning and the metrical task system problem", 1997).

    Every expert plays every access in a shadow as large as the pool, with ghosts of its own. Four times per capacity the accesses
    at which they differed are judged, older ones counting less, and the pool turns to a challenger that leads by two standard
    deviations of its wins and losses. It follows the shadow of the one who rules: first go blocks that the shadow does
    not hold, then the shadow's own victim. No books are ever rebuilt, and a change costs at most one pool of misses.
    When the pool has lost 0.2 points of hit rate to LRU's shadow, LRU rules until it has made them good.
    An access costs what it costs all the experts together. Nothing is random.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self._shadows = [Shadow(expert(capacity, seed)) for expert in EXPERTS]
        self._room = capacity  # less while running sequences hold blocks without a key
        self._rules = 0
        self._blocks: OrderedDict[Key, BlockInfo] = OrderedDict()  # resident, used longest ago first
        self._strays = Line()  # of these, what the shadow that rules does not hold
        self._every = max(1, capacity // 4)
        self._accesses = 0
        self._lost = 0  # hits, to the first expert
        self._evidence: dict[tuple[bool, ...], float] = {}  # who hit: how often

    def insert(self, key: Key, block: BlockInfo) -> None:
        self._blocks[key] = block
        self._room = max(self._room, len(self._blocks))
        self._play(key, 0)

    def hit(self, key: Key) -> None:
        self._blocks.move_to_end(key)
        self._play(key, 1)

    def miss(self, key: Key) -> None:
        """An access is played once it is a hit or an insertion: what is never computed teaches nothing."""

    def free(self, key: Key) -> None:
        self._blocks.move_to_end(key)
        if key in self._strays:
            self._strays.push(key)
        for shadow in self._shadows:
            shadow.free(key)

    def _play(self, key: Key, hit: int) -> None:
        outcomes = [shadow.access(key, self._blocks[key], self._room) for shadow in self._shadows]
        self._strays.discard(key)  # every shadow holds it now
        for left in outcomes[self._rules][1]:
            if left in self._blocks:
                self._strays.push(left)
        hits = tuple(each for each, _ in outcomes)
        self._evidence[hits] = self._evidence.get(hits, 0.0) + 1
        self._lost += hits[0] - hit
        self._accesses += 1
        if self._accesses % self._every == 0:
            self._judge()

    def _judge(self) -> None:
        best = max(range(len(EXPERTS)), key=lambda at: sum(count for hits, count in self._evidence.items() if hits[at]))
        if self._lost > ALLOWED * self._accesses + 1:
            self._follow(0)
        elif self._leads(best, self._rules):
            self._follow(best)
        self._evidence = {hits: count * KEPT for hits, count in self._evidence.items()}

    def _leads(self, one: int, other: int) -> bool:
        won = sum(count for hits, count in self._evidence.items() if hits[one] and not hits[other])
        lost = sum(count for hits, count in self._evidence.items() if hits[other] and not hits[one])
        return won - lost > SURE * math.sqrt(won + lost)

    def _follow(self, expert: int) -> None:
        if expert != self._rules:
            self._rules = expert
            self._strays = Line()
            for key in self._blocks:
                if key not in self._shadows[expert].resident:
                    self._strays.push(key)

    def evict(self, pinned: Callable[[Key], bool], incoming: Key | None) -> Key:
        self._room = len(self._blocks)
        key = self._strays.pop(pinned)
        while key is None:
            key = self._shadows[self._rules].evict(lambda each: each in self._blocks and pinned(each), incoming)
            if key is None:
                key = last_resort([self._strays], pinned)
            elif key not in self._blocks:
                key = None  # its block was refused to it by an earlier ruler, or the shadow had more room: the next one
        del self._blocks[key]
        return key

    def remove(self, key: Key) -> None:
        self._blocks.pop(key, None)
        self._strays.discard(key)
        for shadow in self._shadows:
            shadow.remove(key)
