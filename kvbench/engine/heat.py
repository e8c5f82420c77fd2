"""What a cluster does with content nobody is using, by how long ago it was used: warm content of full nodes is copied to nodes
with room, cold content goes to the store. Both in the background, one at a time, and only while their lines are free.

The unit is a *context*: prompt and answer of a job that ended, as a chain of blocks. A copy leaves the original where it is:
being the least recently used, it is what the full node evicts next.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvbench.core import Nanos
from kvbench.engine import Key
from kvbench.engine.holding import Holding
from kvbench.engine.node import Node, adopt, resident
from kvbench.engine.store import Line, Store

FULL = 0.1  # share of a node's memory: with less than that empty it is full; a copy leaves that much empty
CONTEXTS = 4096  # remembered per node

After = Callable[[Nanos, Callable[[Nanos], None]], None]
"""Have something done at a time to come."""


@dataclass(slots=True)
class _Context:
    holding: Holding
    tokens: int
    used: Nanos


class Heat:
    """`line` carries copies between nodes (None: none are made); `cold`: the age from which content goes to `store`."""

    def __init__(self, nodes: Sequence[Node], store: Store | None, line: Line | None, cold: Nanos, after: After) -> None:
        self.nodes, self.store, self.line, self.cold, self.after = nodes, store, line, cold, after
        self._migrated = 0
        self._contexts: dict[int, OrderedDict[Key, _Context]] = {node.number: OrderedDict() for node in nodes}

    def used(self, node: Node, holding: Holding, tokens: int, now: Nanos) -> None:
        """A job on `node` ended that left the first `tokens` tokens of `holding` there."""
        block = node.cache.groups[0].pool.tokens
        if tokens < block or (self.line is None and self.store is None):
            return
        contexts = self._contexts[node.number]
        last = holding.tables[0].chain.upto(tokens // block)[tokens // block - 1]
        contexts[last] = _Context(holding, tokens // block * block, now)
        contexts.move_to_end(last)
        if len(contexts) > CONTEXTS:
            contexts.popitem(last=False)

    def totals(self) -> dict[str, float]:
        """Blocks copied between nodes, and bytes written to the store."""
        return {"migrated_blocks": float(self._migrated), "store_written_bytes": self.store.writes.carried if self.store else 0.0}

    def forget(self, node: Node) -> None:
        """The node's content is gone."""
        self._contexts[node.number].clear()

    def look(self, now: Nanos) -> None:
        """Begin what can be begun. Called when a request arrives, after all that happened before."""
        for node in self.nodes:
            if node.up:
                self._persist(node, now)
                if self.line is not None and self.line.free <= now and node.empty < FULL * node.tokens:
                    self._copy(node, self.line, now)

    def _persist(self, node: Node, now: Nanos) -> None:
        """The node's coldest context, once cold: to the store, if there is one whose line is free; forgotten without a store."""
        contexts, store = self._contexts[node.number], self.store
        while contexts:
            last, context = next(iter(contexts.items()))
            if now - context.used < self.cold or (store is not None and store.writes.free > now):
                return
            del contexts[last]
            if store is not None:
                table = context.holding.tables[0]
                here = resident(node.cache, context.holding, context.tokens) // node.cache.groups[0].pool.tokens
                keys = table.chain.upto(here)[:here]
                new = sum(key not in store for key in keys)
                if new:
                    self.after(store.write(new, now), partial(self._keep, store, keys))

    def _keep(self, store: Store, keys: Sequence[Key], now: Nanos) -> None:
        store.keep(keys)

    def _copy(self, node: Node, line: Line, now: Nanos) -> None:
        """The node's coldest context that is not cold yet, to the node with most room, where it fits."""
        contexts = self._contexts[node.number]
        while contexts:
            _, context = contexts.popitem(last=False)
            here = resident(node.cache, context.holding, context.tokens)
            into = max((other for other in self.nodes if other.up and other.known), key=lambda other: other.empty)
            missing = here - resident(into.cache, context.holding, here)
            if into is node or missing <= 0 or into.empty - missing < FULL * into.tokens:
                continue
            size, losses = missing * node.token_bytes, into.losses
            self.after(line.send(size, now), partial(self._arrive, into, losses, context, here))
            return

    def _arrive(self, node: Node, losses: int, context: _Context, tokens: int, now: Nanos) -> None:
        if node.up and node.losses == losses and node.empty >= tokens:  # never at the cost of what is there
            self._migrated += adopt(node.cache, context.holding, tokens, now, "gpu")
            contexts = self._contexts[node.number]
            block = node.cache.groups[0].pool.tokens
            if tokens >= block:
                contexts[context.holding.tables[0].chain.keys[tokens // block - 1]] = context
