"""KV on its way into a node before its job begins there: from the node that computed the prompt, or from the shared store.

A prompt's KV leaves when its last chunk has been computed (no overlap with the prefill, layer by layer, as some servers do), and
takes one line out of the prefill node and one into the decode node, first come first served on both. It arrives as content: full
blocks, found at admission; the tokens of the last, partial block are computed again, with what did not find room.
"""

from typing import NamedTuple

from kvbench.core import Nanos
from kvbench.engine import Key
from kvbench.engine.node import Node, Source, Task, resident
from kvbench.engine.store import Store, carry


class Coming(NamedTuple):
    """The KV of a prompt's first `tokens` tokens will be there `at` that time."""

    at: Nanos
    tokens: int
    source: Source


class Mover:
    """Says what has to move before a job can begin on a node, and when it will have."""

    def __init__(self, store: Store | None) -> None:
        self.store = store
        self._bytes = 0.0
        self._fetched = 0

    def totals(self) -> dict[str, float]:
        """Bytes moved between nodes for jobs, and prompt tokens that the store gave."""
        return {"transfer_bytes": self._bytes, "store_tokens": float(self._fetched)}

    def handover(self, task: Task, source: Node, into: Node, now: Nanos) -> Coming:
        """Move the KV of the task's prompt that `into` lacks."""
        missing = task.job.tokens - resident(into.cache, task.holding, task.job.tokens)
        size = missing * source.token_bytes
        self._bytes += size
        return Coming(carry(source.out, into.into, size, now), task.job.tokens, "gpu")

    def fetch(self, task: Task, node: Node, now: Nanos) -> Coming | None:
        """Read from the store what of the prompt follows the node's own, where that is sooner than computing it. None where
        nothing is read."""
        if self.store is None or not node.up:
            return None
        block = node.cache.groups[0].pool.tokens
        most = (task.job.tokens - 1) // block
        here = resident(node.cache, task.holding, most * block) // block
        keys: list[Key] = task.holding.tables[0].chain.upto(most)[here:most]
        count = self.store.found(keys)
        arrival = self.store.reads.arrival(count * self.store.size, now)
        if not count or arrival - now >= count * block / node.prefill_rate * 1e9:
            return None
        self._fetched += count * block
        return Coming(self.store.fetch(keys[:count], now), (here + count) * block, "store")
