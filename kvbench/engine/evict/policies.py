"""Eviction policies by the name that a scenario gives."""

from collections.abc import Callable

from kvbench.engine import Policy
from kvbench.engine.evict.adaptive import Arc, Lecar
from kvbench.engine.evict.frequency import Gdsf, LengthAware, Lfu
from kvbench.engine.evict.learned import Learned
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
    "learned": Learned,
}
"""Constructed with (capacity in blocks, seed)."""


def unknown(name: str) -> str:
    """What to tell a user who asked for a policy that is not in POLICIES."""
    names = ", ".join(POLICIES)
    if name == "belady":
        return (
            f"policy 'belady' must know the future, so it cannot serve a run: `kvbench curve` shows it as a bound. One of {names}"
        )
    return f"policy {name!r} is unknown: one of {names}"
