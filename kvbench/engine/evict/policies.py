"""Eviction policies by the name that a scenario gives."""

from collections.abc import Callable

from kvbench.engine import Policy
from kvbench.engine.evict.adaptive import Arc, Lecar
from kvbench.engine.evict.frequency import Gdsf, LengthAware, Lfu
from kvbench.engine.evict.order import Clock, Fifo, Lru, Sieve
from kvbench.engine.evict.queues import Lirs, S3Fifo, TwoQ
from kvbench.engine.evict.radix import Leaves, by_age, by_release, by_uses

POLICIES: dict[str, Callable[[int, int], Policy]] = {
    "lru": Lru,
    "fifo": Fifo,
    "lfu": Lfu,
    "clock": Clock,
    "sieve": Sieve,
    "arc": Arc,
    "2q": TwoQ,
    "lirs": Lirs,
    "s3fifo": S3Fifo,
    "gdsf": Gdsf,
    "lecar": Lecar,
    "length_aware": LengthAware,
    "leaf_lru": lambda capacity, seed: Leaves(by_release),
    "leaf_lfu": lambda capacity, seed: Leaves(by_uses),
    "leaf_fifo": lambda capacity, seed: Leaves(by_age),
}
"""Constructed with (capacity in blocks, seed)."""
