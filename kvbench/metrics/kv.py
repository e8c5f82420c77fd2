"""Cache accesses into the metrics of a KV cache (docs/metrics.md, KV cache): from cache.jsonl alone, whoever wrote it.

Where the file holds a sample of the blocks (by key), counts are of the sample and said so, shares need no correction, and stack
distances are divided by the share: each sampled block stands for 1 / share of them (Waldspurger et al., SHARDS, FAST'15).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from kvbench.core import CacheAccess, Seconds

REASONS = ("reset", "divergence", "compulsory", "evicted")
RECENT: Seconds = 60.0  # over which active_share looks back
QUANTILES = (0.5, 0.9, 0.99)
EVEN: Mapping[int, float] = MappingProxyType({})


@dataclass
class _Block:
    """A block of the device from its allocation on."""

    taken: Seconds
    tokens: float  # weighted, as all below
    touched: Seconds
    held: Seconds = 0.0  # total time referenced, of ended stays
    since: Seconds | None = None  # referenced since; None: by nobody


@dataclass
class Fold:
    """All that is kept while lines are read, in the order of the file. `weights`: as for `fold`."""

    weights: Mapping[int, float] = field(default_factory=dict)
    lookups: dict[int, int] = field(default_factory=dict)  # by group, as the next two
    hits: dict[int, int] = field(default_factory=dict)
    reasons: dict[int, dict[str, int]] = field(default_factory=dict)
    order: dict[tuple[int, int], list[str]] = field(default_factory=dict)  # by (group, node): looked-up keys, for stack distances
    gaps: list[Seconds] = field(default_factory=list)
    lifetimes: list[Seconds] = field(default_factory=list)
    idles: list[Seconds] = field(default_factory=list)
    held: float = 0.0  # token-seconds in referenced blocks
    resident: float = 0.0  # the same until eviction
    ops: dict[str, int] = field(default_factory=dict)
    blocks: dict[tuple[int, int, str], _Block] = field(default_factory=dict)
    loose: dict[tuple[int, int, int], tuple[Seconds, float]] = field(default_factory=dict)  # blocks that never filled
    seen: dict[tuple[int, int, str], Seconds] = field(default_factory=dict)  # last look-up

    def feed(self, line: CacheAccess) -> None:
        self.ops[line.op] = self.ops.get(line.op, 0) + 1
        handler = HANDLERS.get(line.op)
        if handler is not None and (line.tier == "gpu" or line.op == "hit"):
            handler(self, line, (line.node, line.group, line.key))

    def _hit(self, line: CacheAccess, at: tuple[int, int, str]) -> None:
        self._look(line, at)
        if not line.again:
            self.hits[line.group] = self.hits.get(line.group, 0) + 1
        block = self.blocks.get(at) if line.tier == "gpu" else None
        if block is not None:
            block.touched = line.t
            if block.since is None:
                block.since = line.t

    def _miss(self, line: CacheAccess, at: tuple[int, int, str]) -> None:
        self._look(line, at)
        if line.again:
            return
        row = self.reasons.setdefault(line.group, dict.fromkeys(REASONS, 0))
        row[line.reason] = row.get(line.reason, 0) + 1

    def _look(self, line: CacheAccess, at: tuple[int, int, str]) -> None:
        if not line.again:
            self.lookups[line.group] = self.lookups.get(line.group, 0) + 1
        self.order.setdefault((line.group, line.node), []).append(line.key)
        before = self.seen.get(at)
        if before is not None:
            self.gaps.append(line.t - before)
        self.seen[at] = line.t

    def _alloc(self, line: CacheAccess, at: tuple[int, int, str]) -> None:
        tokens = line.tokens * self.weights.get(line.group, 1.0)
        if line.key:
            self.blocks[at] = _Block(line.t, tokens, line.full or line.t, since=line.t)
        else:
            self.loose[(line.node, line.group, line.block)] = (line.t, tokens)

    def _free(self, line: CacheAccess, at: tuple[int, int, str]) -> None:
        if not line.key:
            taken, tokens = self.loose.pop((line.node, line.group, line.block), (line.t, 0))
            self.held += (line.t - taken) * tokens
            self.resident += (line.t - taken) * tokens
            return
        block = self.blocks.get(at)
        if block is not None and block.since is not None:
            block.held += line.t - block.since
            block.since, block.touched = None, line.t

    def _gone(self, line: CacheAccess, at: tuple[int, int, str]) -> None:
        block = self.blocks.pop(at, None)
        if block is None:
            return
        self.lifetimes.append(line.t - block.taken)
        self.idles.append(line.t - block.touched)
        self.held += block.held * block.tokens
        self.resident += (line.t - block.taken) * block.tokens


HANDLERS = {
    "hit": Fold._hit,
    "miss": Fold._miss,
    "alloc": Fold._alloc,
    "free": Fold._free,
    "evict": Fold._gone,
    "reset": Fold._gone,
}


def fold(
    lines: Iterable[CacheAccess], end: Seconds, share: float, tokens: float | None, weights: Mapping[int, float] = EVEN
) -> dict[str, Any]:
    """Everything that cache.jsonl says. end: until when it was kept. tokens: capacity of the whole memory, where it is known, in
    tokens, or in bytes with the bytes of a token in each layer group as `weights` (1 where not named)."""
    found = Fold(weights)
    for line in lines:
        found.feed(line)
    groups = {str(group): _group(found, group, share) for group in sorted(found.lookups)}
    lookups, hits = sum(found.lookups.values()), sum(found.hits.values())
    return {
        "share": share,
        "ops": dict(sorted(found.ops.items())),
        "lookups": lookups,
        "hits": hits,
        "block_hit_rate": hits / lookups if lookups else None,
        "misses": {name: sum(row["misses"][name] for row in groups.values()) for name in REASONS},
        "groups": groups,
        "reuse_gap": _spread(found.gaps),
        "lifetime": _spread(found.lifetimes),
        "idle_before_evict": _spread(found.idles),
        "active_share": _active(found, end, share, tokens),
        **_bytes(found, end, share, tokens),
        "reason": None if lookups else "no full block was looked up",
    }


def _group(found: Fold, group: int, share: float) -> dict[str, Any]:
    lookups, hits = found.lookups[group], found.hits.get(group, 0)
    orders = [order for (of, _), order in sorted(found.order.items()) if of == group]
    return {
        "lookups": lookups,
        "hits": hits,
        "block_hit_rate": hits / lookups,
        "misses": found.reasons.get(group, dict.fromkeys(REASONS, 0)),
        "reuse_distance": _spread([distance / share for order in orders for distance in stack_distances(order)]),
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    if not values:
        return {"n": 0, "mean": None, **{f"p{q * 100:g}": None for q in QUANTILES}, "max": None, "reason": "none happened"}
    array = np.asarray(values, float)
    marks = np.quantile(array, QUANTILES, method="inverted_cdf")  # values that were seen, as every quantile of kvbench
    row: dict[str, Any] = {"n": len(values), "mean": float(array.mean())}
    row |= {f"p{q * 100:g}": float(mark) for q, mark in zip(QUANTILES, marks, strict=True)}
    return row | {"max": float(array.max()), "reason": None}


def _active(found: Fold, end: Seconds, share: float, tokens: float | None) -> float | None:
    """Share of the memory in blocks touched in the last RECENT seconds."""
    if not tokens:
        return None
    recent = sum(b.tokens for b in found.blocks.values() if b.since is not None or b.touched >= end - RECENT)
    return recent / share / tokens


def _bytes(found: Fold, end: Seconds, share: float, tokens: float | None) -> dict[str, float | None]:
    """byte_efficiency and byte_residency: valid token-seconds over what the memory could have held, weighted alike."""
    if not tokens or end <= 0:
        return {"byte_efficiency": None, "byte_residency": None}
    held, resident = found.held, found.resident
    for block in found.blocks.values():
        stay = end - block.since if block.since is not None else 0.0
        held += (block.held + stay) * block.tokens
        resident += (end - block.taken) * block.tokens
    for taken, loose in found.loose.values():
        held += (end - taken) * loose
        resident += (end - taken) * loose
    return {"byte_efficiency": held / share / (end * tokens), "byte_residency": resident / share / (end * tokens)}


def stack_distances(order: Sequence[str]) -> list[int]:
    """Of each access to a key that came before: how many distinct keys were accessed in between (Mattson 1970; Fenwick tree)."""
    size = len(order)
    tree, found = [0] * (size + 1), []
    last: dict[str, int] = {}
    for at, key in enumerate(order, 1):
        before = last.get(key)
        if before is not None:
            found.append(_sum(tree, at - 1) - _sum(tree, before))
            _add(tree, before, -1)
        _add(tree, at, 1)
        last[key] = at
    return found


def _add(tree: list[int], at: int, value: int) -> None:
    while at < len(tree):
        tree[at] += value
        at += at & -at


def _sum(tree: list[int], at: int) -> int:
    total = 0
    while at:
        total += tree[at]
        at -= at & -at
    return total
