"""Eviction policies by the name that a scenario gives."""

from collections.abc import Callable

from kvbench.engine import Policy
from kvbench.engine.evict.order import Lru

POLICIES: dict[str, Callable[[int, int], Policy]] = {
    "lru": Lru,
}
"""Constructed with (capacity in blocks, seed)."""
