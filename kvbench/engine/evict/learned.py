"""Learned: several policies compete on a sample of the blocks, and the one that would have hit most lately rules the pool."""

from collections import OrderedDict
from collections.abc import Callable

from kvbench.engine import BlockInfo, Key, Policy
from kvbench.engine.evict.adaptive import Arc
from kvbench.engine.evict.frequency import Gdsf
from kvbench.engine.evict.order import Lru
from kvbench.engine.evict.queues import Lirs

EXPERTS: tuple[Callable[[int, int], Policy], ...] = (Lru, Gdsf, Arc, Lirs)
SHADOW = 512

class Shadow:
    def __init__(self, policy: Policy, capacity: int) -> None:
        self._policy = policy
        self._capacity = capacity
        self._resident: set[Key] = set()

    def access(self, key: Key, block: BlockInfo) -> bool:
        if key in self._resident:
            self._policy.hit(key)
            self._policy.free(key)
            return True
        self._policy.miss(key)
        if len(self._resident) >= self._capacity:
            self._resident.remove(self._policy.evict(lambda _: False, key))
        self._policy.insert(key, block)
        self._policy.free(key)
        self._resident.add(key)
        return False


class Learned:
    HORIZON = 8
    MARGIN = 0.0
    Z = 2.0
    EVERY = 0.25
    def __init__(self, capacity: int, seed: int) -> None:
        self._capacity, self._seed = capacity, seed
        self._sampled = min(1.0, max(SHADOW / capacity, 1 / 16))
        self._threshold = int(self._sampled * 2**64)
        small = max(1, round(capacity * self._sampled))
        self._shadows = [Shadow(expert(small, seed), small) for expert in EXPERTS]
        self._scores = [0.0] * len(EXPERTS)
        self._decay = 1 - 1 / (self.HORIZON * small)
        self._every = max(1, int(self.EVERY * small))
        self._count = 0
        self._noise = [0.0] * len(EXPERTS)
        self._rule = 0
        self._policy = EXPERTS[0](capacity, seed)
        self._blocks: OrderedDict[Key, list] = OrderedDict()
        self.switches = []

    def _seen(self, key, block):
        if (key * 0x9E3779B97F4A7C15 + self._seed) % 2**64 >= self._threshold:
            return
        d = self._decay
        hits = [s.access(key, block) for s in self._shadows]
        r = hits[self._rule]
        self._scores = [d * s + h for s, h in zip(self._scores, hits)]
        self._noise = [d * s + (h != r) for s, h in zip(self._noise, hits)]
        self._count += 1
        if self._count % self._every == 0:
            self._judge()

    def _judge(self):
        best = max(range(len(EXPERTS)), key=self._scores.__getitem__)
        lead = self._scores[best] - self._scores[self._rule]
        if best != self._rule and lead > self.Z * self._noise[best] ** .5 and len(self._blocks) >= self._capacity:
            self._crown(best)

    def _crown(self, best):
        self.switches.append((self._count, best))
        self._rule = best
        self._noise = [0.0] * len(EXPERTS)  # XXX
        self._noise = [abs(s - self._scores[best]) for s in self._scores]
        self._policy = policy = EXPERTS[best](self._capacity, self._seed)
        for key, (block, uses) in self._blocks.items():
            policy.insert(key, block)
            for _ in range(min(uses - 1, 3)):
                policy.hit(key)
            policy.free(key)

    def insert(self, key: Key, block: BlockInfo) -> None:
        self._blocks[key] = [block, 1]
        self._policy.insert(key, block)
        self._seen(key, block)

    def hit(self, key: Key) -> None:
        entry = self._blocks[key]
        entry[1] += 1
        self._blocks.move_to_end(key)
        self._policy.hit(key)
        self._seen(key, entry[0])

    def miss(self, key: Key) -> None:
        self._policy.miss(key)

    def free(self, key: Key) -> None:
        self._policy.free(key)

    def evict(self, pinned, incoming):
        key = self._policy.evict(pinned, incoming)
        del self._blocks[key]
        return key

    def remove(self, key: Key) -> None:
        self._blocks.pop(key, None)
        self._policy.remove(key)
