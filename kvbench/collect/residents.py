"""Which blocks a server's KV cache held when, from its KV events and from what we asked it: the lines of cache.jsonl.

Events tell what is stored and what leaves, not what is looked up. A look-up is known from our side: the prompt, and how many of
its tokens the answer says were cached. When it happened is told by the first block that it had to store, else by its sending.
Changes and look-ups are put on one time axis and replayed once nothing earlier can come, so that the reason of each miss is that
of its moment (docs/metrics.md: reset, divergence, compulsory, evicted; the first that applies).
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvbench.collect.kvframes import Change
from kvbench.core import CacheAccess, Seconds

RESIDENT, EVICTED, RESET = 1, 2, 3
ENTER, CHANGE, LEAVE = 0, 1, 2  # at one instant and place a request looks up before it stores
LAST = 1 << 62  # behind all changes of an instant

At = tuple[int, int]  # (node, group)


class Asked(NamedTuple):
    """A request that was answered. prompt: its token ids; cached: tokens found, as the answer says; None: it does not say."""

    id: int
    sent: Seconds
    ended: Seconds
    prompt: Sequence[int]
    cached: int | None


@dataclass
class Visit:
    """A look-up in one group, and all blocks that the request holds until it leaves: the prompt's, and the answer's."""

    job: int
    at: At
    keys: list[str]
    hits: int | None
    held: list[str] = field(default_factory=list)


class Residents:
    """Feed `change` and `asked` as they come in any order; `until(t)` gives the lines before t, in order of time, once."""

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}  # group -> tokens per block, of groups with full attention
        self._next: dict[tuple[At, str | None, tuple[int, ...]], str] = {}  # (parent, tokens) -> key, as first told
        self._after: dict[tuple[At, str | None], dict[str, tuple[int, ...]]] = defaultdict(dict)  # key -> tokens, by parent
        self._stored: dict[tuple[At, str], list[Seconds]] = defaultdict(list)
        self._line: list[tuple[Seconds, int, int, int, tuple[At, Change] | Visit]] = []  # a heap: instant, place in it, order
        self._count = 0
        self._places: dict[tuple[At, str, Seconds], int] = {}  # of what was stored, among the changes of its instant
        self._state: dict[tuple[At, str], int] = {}
        self._parents: set[tuple[At, str | None]] = set()
        self._users: dict[tuple[At, str], int] = {}
        self.nodes: Final[set[int]] = {0}
        self.unresolved = 0  # look-ups whose blocks no event told of

    # ---- as it comes

    def change(self, t: Seconds, node: int, change: Change) -> None:
        at, before = (node, change.group), change.parent
        self.nodes.add(node)
        if change.kind == "stored" and change.tier == "gpu":
            if change.full and change.keys:
                self.blocks[change.group] = change.block
            for key, tokens in zip(change.keys, change.tokens, strict=True):
                self._next[(at, before, tokens)] = key
                self._after[(at, before)][key] = tokens
                self._stored[(at, key)].append(t)
                self._places.setdefault((at, key, t), self._count + 1)
                before = key
        self._push(t, self._count + 1, CHANGE, (at, change))

    def asked(self, asked: Asked) -> None:
        """A request is over: its look-up in each group, on the node that stored for it, or that could have."""
        for group, block in sorted(self.blocks.items()):
            full = max(0, len(asked.prompt) - 1) // block  # its last token is always computed
            found = {node: self._keys((node, group), asked.prompt, block, full) for node in sorted(self.nodes)}
            node = max(found, key=lambda n: (len(self._mine((n, group), found[n], asked)), len(found[n]), -n))
            at, keys = (node, group), found[node]
            if len(keys) < full:
                self.unresolved += 1
                continue
            hits = None if asked.cached is None else min(full, asked.cached // block)
            when, place = self._when(at, keys, hits or 0, asked)
            visit = Visit(asked.id, at, keys, hits)
            visit.held = keys + self._own(at, keys[-1] if keys else None, tuple(asked.prompt[full * block :]), when, asked.ended)
            self._push(when, place, ENTER, visit)
            self._push(max(when, asked.ended), LAST, LEAVE, visit)

    def _keys(self, at: At, prompt: Sequence[int], block: int, full: int) -> list[str]:
        keys: list[str] = []
        before: str | None = None
        for place in range(full):
            before = self._next.get((at, before, tuple(prompt[place * block : (place + 1) * block])))
            if before is None:
                break
            keys.append(before)
        return keys

    def _own(self, at: At, last: str | None, rest: tuple[int, ...], start: Seconds, end: Seconds) -> list[str]:
        """The blocks behind the prompt's full ones that were stored in [start, end]: they begin with the rest of the prompt."""
        held: dict[str, None] = {}  # a server may say that a block follows itself
        behind: list[str | None] = [last]
        while behind:
            before = behind.pop()
            for key, tokens in self._after.get((at, before), {}).items():
                if key in held or tokens[: len(rest)] != rest:
                    continue
                if any(start <= t <= end for t in self._stored[(at, key)]):
                    held[key] = None
                    behind.append(key)
            rest = ()
        return list(held)

    def _when(self, at: At, keys: Sequence[str], hits: int, asked: Asked) -> tuple[Seconds, int]:
        """When it looked up, and where among the changes of that instant: requests of one step come in their own order. What it
        did not find it had to store, at once; what it found was there, whoever had stored that."""
        stored = [(t, self._places[(at, key, t)]) for key in keys[hits:] for t in self._times(at, key, asked)]
        there = (self._stored[(at, key)][0] for key in keys[:hits])
        return min(stored, default=(min(max([asked.sent, *there]), asked.ended), LAST))

    def _mine(self, at: At, keys: Sequence[str], asked: Asked) -> list[Seconds]:
        """When blocks of this chain were stored while the request was under way."""
        return [t for key in keys for t in self._times(at, key, asked)]

    def _times(self, at: At, key: str, asked: Asked) -> list[Seconds]:
        return [t for t in self._stored[(at, key)] if asked.sent <= t <= asked.ended]

    def _push(self, t: Seconds, place: int, order: int, item: tuple[At, Change] | Visit) -> None:
        self._count += 1
        heapq.heappush(self._line, (t, place, order, self._count, item))

    # ---- in order of time

    def until(self, t: Seconds) -> Iterator[CacheAccess]:
        while self._line and self._line[0][0] < t:
            now, _, order, _, item = heapq.heappop(self._line)
            if isinstance(item, Visit):
                yield from self._enter(now, item) if order == ENTER else self._leave(now, item)
            else:
                yield from self._changed(now, *item)

    def _changed(self, t: Seconds, at: At, change: Change) -> Iterator[CacheAccess]:
        node, group = at
        if change.kind == "cleared":
            for place, state in self._state.items():
                if state == RESIDENT and place[0][0] == node:
                    self._state[place] = RESET
            yield CacheAccess(t=t, op="reset", node=node)
            return
        stored, before = change.kind == "stored", change.parent
        for key in change.keys:
            place = (at, key)
            if change.tier != "gpu":
                yield CacheAccess(t=t, op="spill" if stored else "evict", key=key, group=group, node=node, tier=change.tier)
                continue
            self._state[place] = RESIDENT if stored else EVICTED
            if stored:
                self._parents.add((at, before))
                before = key
                yield CacheAccess(t=t, op="alloc", key=key, group=group, node=node, tokens=change.block, full=t)
            else:
                yield CacheAccess(t=t, op="evict", key=key, group=group, node=node)

    def _enter(self, t: Seconds, visit: Visit) -> Iterator[CacheAccess]:
        (node, group), before = visit.at, None
        hits = visit.hits if visit.hits is not None else self._leading(visit)
        for place, key in enumerate(visit.keys):
            op, reason = ("hit", "") if place < hits else ("miss", self._why(visit.at, key, before))
            yield CacheAccess(t=t, op=op, key=key, group=group, node=node, job=visit.job, reason=reason)
            before = key
        for key in visit.held:
            self._users[(visit.at, key)] = self._users.get((visit.at, key), 0) + 1

    def _leading(self, visit: Visit) -> int:
        """How many blocks are there, where the answer does not say how many were found."""
        missing = (place for place, key in enumerate(visit.keys) if self._state.get((visit.at, key)) != RESIDENT)
        return next(missing, len(visit.keys))

    def _leave(self, t: Seconds, visit: Visit) -> Iterator[CacheAccess]:
        node, group = visit.at
        for key in reversed(visit.held):
            place = (visit.at, key)
            self._users[place] -= 1
            if not self._users[place]:
                del self._users[place]
                yield CacheAccess(t=t, op="free", key=key, group=group, node=node, job=visit.job, tokens=self.blocks[group])

    def _why(self, at: At, key: str, before: str | None) -> str:
        state = self._state.get((at, key))
        if state == RESET:
            return "reset"
        if state is not None:
            return "evicted"  # or stored by another request in the same step
        known = before is None or self._state.get((at, before)) == RESIDENT
        return "divergence" if known and before is not None and (at, before) in self._parents else "compulsory"
