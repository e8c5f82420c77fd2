"""Hit rate against cache size: what each eviction policy makes of a recorded trace at each capacity, and where the curve bends.

Blocks are independent objects of one size, taken one after the other: no running request holds any. A block counts as a hit
whether or not those before it in its prompt are there (block_hit_rate), or only where they are (token_hit_rate).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.engine.evict.policies import POLICIES
from kvbench.plan.replay.compiled import Flags, Ids
from kvbench.plan.replay.kernels import KERNELS
from kvbench.plan.replay.objects import replay
from kvbench.plan.replay.references import References
from kvbench.plan.replay.reuse import ideal, reuse, working_set
from kvbench.plan.replay.stack import stack_distances

NAMES = (*KERNELS, *(name for name in POLICIES if name not in KERNELS))
"""Every policy: those with kernels, then those that only the engine has, replayed through its objects."""

SHARES = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
REACHED = (0.5, 0.9, 0.95, 0.99)
_WORTH = 0.005  # a gain below half a point is not worth a sentence
_SEED = 0  # of the policies that draw


@dataclass(frozen=True)
class Point:
    """One policy at one capacity. block_hit_rate: hits / references. token_hit_rate: tokens in the leading runs of hits / prompt
    tokens. compulsory + capacity + policy = misses: never seen before; Belady misses it too; Belady would have hit it."""

    policy: str
    blocks: int
    block_hit_rate: float
    token_hit_rate: float
    misses: int
    compulsory: int
    capacity: int
    policy_misses: int

    def json(self) -> dict[str, Any]:
        reasons = {"compulsory": self.compulsory, "capacity": self.capacity, "policy": self.policy_misses}
        rates = {"block_hit_rate": self.block_hit_rate, "token_hit_rate": self.token_hit_rate}
        return {"policy": self.policy, "blocks": self.blocks, **rates, "misses": self.misses, "reasons": reasons}


@dataclass(frozen=True)
class Knee:
    """The point of the LRU curve that lies furthest above the straight line from nothing to where it first reaches the ideal."""

    blocks: int
    block_hit_rate: float
    of_ideal: float


class Lru:
    """The LRU curve of a trace: the hits of every capacity, from one pass by stack distance."""

    def __init__(self, refs: References) -> None:
        self.distances: Ids = stack_distances(refs.keys, refs.unique)
        self._refs = len(refs.keys)
        near = self.distances[self.distances < self._refs]
        self._hits: NDArray[np.int64] = np.cumsum(np.bincount(near)) if len(near) else np.zeros(0, np.int64)

    @property
    def enough(self) -> int:
        """Blocks from which on more do not help; 0 where no block is used twice."""
        return len(self._hits)

    @property
    def ideal(self) -> float:
        """Block hit rate of a cache that forgets nothing."""
        return self.rate(self.enough)

    def flags(self, blocks: int) -> Flags:
        """(n,) whether a cache of so many blocks hits."""
        return self.distances < min(blocks, self._refs)

    def rate(self, blocks: int) -> float:
        """Block hit rate with so many blocks."""
        at = min(blocks, self.enough)
        return float(self._hits[at - 1]) / self._refs if at > 0 else 0.0

    def blocks_for(self, share: float) -> int | None:
        """The fewest blocks that reach `share` of the ideal; None where no block is used twice."""
        if not self.enough:
            return None
        return int(np.searchsorted(self._hits, share * self._hits[-1] - 1e-9)) + 1

    def knee(self) -> Knee | None:
        """None where no block is used twice."""
        if not self.enough:
            return None
        sizes = np.arange(1, self.enough + 1)
        at = int(np.argmax(self._hits / self._hits[-1] - sizes / self.enough))
        return Knee(at + 1, float(self._hits[at]) / self._refs, float(self._hits[at] / self._hits[-1]))

    def tiers(self, sizes: Sequence[int]) -> list[dict[str, Any]]:
        """Hits of each tier of an exclusive hierarchy, where what one evicts moves down to the next and a hit goes to the top.
        It is the stack of one LRU cache, cut into the tiers' sizes."""
        rows, above, before = [], 0, 0
        for number, blocks in enumerate(sizes, 1):
            above += blocks
            hits = int(self.flags(above).sum())
            own = hits - before
            rows.append(
                {"tier": number, "blocks": blocks, "hits": own, "block_hit_rate": own / self._refs, "reach": hits / self._refs}
            )
            before = hits
        return rows


def known(names: Sequence[str]) -> list[str]:
    """The policies asked for; none named, those that have kernels; "all" is every one. ValueError on others, with the nearest."""
    for name in names:
        if name not in NAMES and name != "all":
            near = "".join(f"; did you mean {match}?" for match in get_close_matches(name, NAMES, 1, 0.5))
            raise ValueError(f"unknown policy {name!r}: one of {', '.join(NAMES)}, or all{near}")
    if not names:
        return list(KERNELS)
    return list(NAMES) if "all" in names else list(dict.fromkeys(names))


def capacities(refs: References, lru: Lru) -> list[int]:
    """What to try where nobody says: SHARES of the distinct blocks, and the knee."""
    sizes = {max(1, round(share * refs.unique)) for share in SHARES}
    knee = lru.knee()
    return sorted(sizes | ({knee.blocks} if knee else set()))


def points(refs: References, lru: Lru, policies: Sequence[str], blocks: Sequence[int]) -> list[Point]:
    """Every policy at every capacity, in the order given."""
    found = {}
    for capacity in blocks:
        best = hits_of("belady", refs, lru, capacity)
        for name in policies:
            hits = best if name == "belady" else hits_of(name, refs, lru, capacity)
            found[name, capacity] = _point(name, capacity, refs, hits, best)
    return [found[name, capacity] for name in policies for capacity in blocks]


def hits_of(name: str, refs: References, lru: Lru, blocks: int) -> Flags:
    """(n,) where a policy hits. A cache that has room for every block evicts none, whatever its policy."""
    if blocks >= refs.unique:
        return ~refs.first
    if name == "lru":
        return lru.flags(blocks)
    hits = np.zeros(len(refs.keys), np.bool_)
    if name in KERNELS:
        KERNELS[name](refs.keys, refs.unique, blocks, hits)
    else:
        replay(POLICIES[name](blocks, _SEED), refs, blocks, hits)
    return hits


def _point(name: str, blocks: int, refs: References, hits: Flags, best: Flags) -> Point:
    n, count = len(hits), int(hits.sum())
    avoidable = int((best & ~hits).sum())
    tokens = float(refs.run_tokens(hits).sum() / refs.prompts.sum())
    return Point(name, blocks, count / n, tokens, n - count, refs.unique, n - count - refs.unique - avoidable, avoidable)


def facts(refs: References, lru: Lru, tiers: Sequence[int]) -> dict[str, Any]:
    """What holds whatever the policy; strict JSON. What cannot be said is None."""
    knee = lru.knee()
    return {
        "requests": len(refs.prompts),
        "refs": len(refs.keys),
        "unique": refs.unique,
        "block": refs.block,
        "ideal": ideal(refs),
        "reuse": reuse(refs, lru.distances),
        "working_set": working_set(refs),
        "knee": asdict(knee) if knee else None,
        "lru_blocks_for": {f"{share:g}": lru.blocks_for(share) for share in REACHED},
        "tiers": lru.tiers(tiers),
    }


def _shown(rate: float) -> float:
    """A rate as the table has it, in hundredths of a per cent: what the text says is the difference of what it shows."""
    return round(rate, 4)


def conclusion(lru: Lru, found: Sequence[Point]) -> str:
    """A sentence or three for who buys the memory."""
    knee = lru.knee()
    if knee is None:
        return "No block is used twice: no cache of any size helps this trace."
    nearest = min({point.blocks for point in found}, key=lambda blocks: (abs(blocks - knee.blocks), blocks))
    where = "the knee" if nearest == knee.blocks else f"the knee is at {knee.blocks:,}"
    reached, most = 100 * lru.rate(nearest) / lru.ideal, 100 * lru.ideal
    text = f"LRU at {nearest:,} blocks ({where}) reaches {reached:.0f} % of the ideal {most:.2f} %"
    gains = {
        (point.policy, point.blocks): _shown(point.block_hit_rate) - _shown(lru.rate(point.blocks))
        for point in found
        if point.policy != "lru"
    }
    online = {key: gain for key, gain in gains.items() if key[0] != "belady"}
    here = max((key for key in online if key[1] == nearest), key=online.__getitem__, default=None)
    if here is not None:
        does = f"{here[0]} would gain {100 * online[here]:.2f} points there"
        text += f"; {does if online[here] > 0 else 'none of the other policies does better there'}"
    if ("belady", nearest) in gains:
        text += f", and none can gain more than {100 * gains['belady', nearest]:.2f} (belady)"
    best = max(online, key=online.__getitem__, default=None)
    if best is not None and best != here and online[best] >= _WORTH:
        text += f". The choice matters most at {best[1]:,} blocks, where {best[0]} gains {100 * online[best]:.2f} points"
    return f"{text}. LRU needs {lru.blocks_for(0.9):,} blocks for 90 % of the ideal and {lru.enough:,} for all of it."
