"""The tape of accesses: every look-up and every change of the KV memory, in order, for whoever listens.

Nothing is computed from it here. `cache.jsonl`, the KV events of `kvbench serve` and the metrics of docs/metrics.md (KV cache)
are all folded from the same rows.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from kvbench.core import Nanos
from kvbench.engine import Key

Op = Literal["hit", "miss", "alloc", "store", "free", "evict", "reset", "spill", "restore", "migrate"]
"""hit, miss: a full block of a prompt was looked up at an admission (a hit in a tier below has its name); alloc: a block was
taken, still without content; store: it is full and has its key; free: its last reference went; evict: its content was given up
for another, or because it is too short to keep; reset: it was given up for nothing, once with each key and once without; spill,
restore, migrate: content went down a tier, came up, moved between nodes.
"""


class Access(NamedTuple):
    """One row. job is -1 where no request is behind it, key None for a block that is not full, block 0 where none is meant.

    tier: where the content was found, went or left. parent: the key before it in its chain (of a miss or a store). tokens: of a
    freed block that are valid. node: of a cluster. again: a look-up that is not a job's first.
    """

    t: Nanos
    op: Op
    key: Key | None
    group: int
    job: int
    block: int
    tier: str
    parent: Key | None
    tokens: int
    node: int
    again: bool


class Tape:
    """Hands each access to its listeners, stamped with the time of the engine. `node`: whose of a cluster it is."""

    def __init__(self, node: int = 0) -> None:
        self.now: Nanos = 0
        self.node = node
        self.listeners: list[Callable[[Access], None]] = []

    def note(
        self, op: Op, key: Key | None, group: int = 0, job: int = -1, block: int = 0, tier: str = "gpu",
        parent: Key | None = None, tokens: int = 0, again: bool = False,
    ) -> None:  # fmt: skip
        access = Access(self.now, op, key, group, job, block, tier, parent, tokens, self.node, again)
        for listener in self.listeners:
            listener(access)
