"""KV on its way into a node before its job begins there: from the node that computed the prompt, or from the shared store.

A prompt's KV leaves when its last chunk has been computed (no overlap with the prefill, layer by layer, as some servers do), and
takes one line out of the prefill node and one into the decode node, first come first served on both. It arrives as content: full
blocks, found at admission; the tokens of the last, partial block are computed again, with what did not find room.
"""

from kvbench.core import Nanos
from kvbench.engine import Key
from kvbench.engine.node import Node, Task, resident
from kvbench.engine.store import Store, carry


class Mover:
    """Says what has to move before a job can begin on a node, and when it will have."""

    def __init__(self, store: Store | None) -> None:
        self.store = store
        self._bytes = 0.0
        self._fetched = 0

    def totals(self) -> dict[str, float]:
        """Bytes moved between nodes for jobs, and prompt tokens that the store gave."""
        return {"transfer_bytes": self._bytes, "store_tokens": float(self._fetched)}

    def handover(self, task: Task, source: Node, into: Node, now: Nanos) -> Nanos:
        """Move the KV of the task's prompt that `into` lacks. Returns when it has arrived."""
        missing = task.job.tokens - resident(into.cache, task.holding, task.job.tokens)
        size = missing * source.engine.model.kv_token_bytes()
        self._bytes += size
        return carry(source.out, into.into, size, now)

    def fetch(self, task: Task, node: Node, now: Nanos) -> tuple[Nanos, int] | None:
        """Read from the store what of the prompt follows the node's own, where that is sooner than computing it. Returns when it
        will have arrived and up to which token; None where nothing is read."""
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
        return self.store.fetch(keys[:count], now), (here + count) * block
