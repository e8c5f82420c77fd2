"""The tape as lines of cache.jsonl: misses with their reason, blocks from allocation to last release, sampled by key.

The reason of a miss is the first that applies (docs/metrics.md): reset (it was here, and a reset took it), divergence (never
seen, and the block before it was found, behind which other content is known: the prompts differ inside this block), compulsory
(never seen), evicted. All accesses are looked at, whatever share of them is kept, so reasons do not depend on it.
"""

from kvbench.core import CacheAccess, Nanos
from kvbench.engine import Key
from kvbench.engine.tape import Access

PLACES = 1 << 24  # what a key is hashed onto for sampling
RESIDENT, EVICTED, RESET = 1, 2, 3


class Log:
    """A listener of tapes. Keeps those lines whose key falls into `share`, until `take`. About 100 bytes per key ever seen."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._below = round(share * PLACES)
        self._state: dict[tuple[int, int, Key], int] = {}  # (node, group, key)
        self._parents: set[tuple[int, int, Key]] = set()  # with known content behind them
        self._taken: dict[tuple[int, int, int], tuple[Nanos, int]] = {}  # (node, group, block) -> when, for whom
        self._lines: list[CacheAccess] = []

    def take(self) -> list[CacheAccess]:
        """What was kept since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def __call__(self, access: Access) -> None:
        at = (access.node, access.group)
        if access.op == "alloc":
            self._taken[(*at, access.block)] = (access.t, access.job)
        elif access.op == "store" and access.key is not None:
            self._stored(access, access.key)
        elif access.op == "free" and access.key is None:
            self._loose(access)
        elif access.key is None:
            self._lines.append(CacheAccess(t=access.t / 1e9, op=access.op, node=access.node))  # a reset of everything
        else:
            reason = self._why(access, access.key) if access.op == "miss" else ""
            if access.op in ("evict", "reset") and access.tier == "gpu":
                self._state[(*at, access.key)] = EVICTED if access.op == "evict" else RESET
            self._keep(access, access.key, reason)

    def _why(self, access: Access, key: Key) -> str:
        state = self._state.get((access.node, access.group, key))
        if state == RESET:
            return "reset"
        if state is not None:
            return "evicted"
        before = (access.node, access.group, access.parent or 0)
        return "divergence" if self._state.get(before) == RESIDENT and before in self._parents else "compulsory"

    def _stored(self, access: Access, key: Key) -> None:
        at = (access.node, access.group)
        self._state[(*at, key)] = RESIDENT
        self._parents.add((*at, access.parent or 0))
        if not self._kept(key):
            return
        taken, job = self._taken.get((*at, access.block), (access.t, access.job))
        self._lines.append(self._line(access, "alloc", taken, key, job, full=access.t / 1e9, tokens=access.tokens))

    def _loose(self, access: Access) -> None:
        """The last reference to a block that never filled went. It is kept or not as its place and time say."""
        place = (access.node, access.group, access.block)
        taken, job = self._taken.get(place, (access.t, access.job))
        if self._kept(hash((*place, taken))):
            self._lines.append(self._line(access, "alloc", taken, None, job, tokens=access.tokens))
            self._lines.append(self._line(access, "free", access.t, None, job, tokens=access.tokens))

    def _keep(self, access: Access, key: Key, reason: str) -> None:
        if self._kept(key):
            self._lines.append(self._line(access, access.op, access.t, key, access.job, reason=reason, tokens=access.tokens))

    def _kept(self, key: Key) -> bool:
        return (hash((key,)) & (PLACES - 1)) < self._below

    def _line(
        self,
        access: Access,
        op: str,
        t: Nanos,
        key: Key | None,
        job: int,
        reason: str = "",
        tokens: int = 0,
        full: float | None = None,
    ) -> CacheAccess:
        name = "" if key is None else f"{key & (1 << 64) - 1:016x}"
        return CacheAccess(
            t=t / 1e9, op=op, key=name, group=access.group, job=None if job < 0 else job, block=access.block, tier=access.tier,
            node=access.node, reason=reason, again=access.again, tokens=tokens, full=full,
        )  # fmt: skip
