"""All that lies under one replica's device, as its cache sees it: what comes up and when, what goes down.

How blocks get into tiers and leave them is stack.py's; what users decide is in tiers.py and docs/engine/tiers.md.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kvbench.core import Nanos, Seconds
from kvbench.engine import BlockInfo, Key
from kvbench.engine.level import Copy, across, eta, ident, idle
from kvbench.engine.stack import Stack
from kvbench.engine.store import Line

if TYPE_CHECKING:
    from kvbench.engine.holding import Group
    from kvbench.engine.pool import Pool


class Rules(NamedTuple):
    """When blocks move."""

    write: Literal["write_through", "write_back", "selective"]
    restore: Literal["always", "cheaper"]
    spill: Literal["recompute", "swap", "cheaper"]
    sequences: Literal["delta", "whole"]
    prefetch: int


class _Block(NamedTuple):
    """Of a group."""

    pool: int
    bytes: float  # on all devices together, each value once
    tokens: int
    share: float  # of all layers, that the group has


class Hierarchy:
    """`up` and `down` are the link between devices and host. `copies`: bytes that a tier keeps of a block / bytes that one device
    holds of it. recompute(before, tokens): seconds to compute `tokens` tokens after `before` others."""

    def __init__(
        self, stack: Stack, rules: Rules, up: Line, down: Line, copies: float, recompute: Callable[[int, int], Seconds]
    ) -> None:
        self.stack, self.rules, self.up, self.down = stack, rules, up, down
        self.levels = stack.levels
        self.prefetch = rules.prefetch
        self.swapped = 0  # blocks written because their sequence was preempted
        self.new = self.whole = 0  # blocks written from the device, and what rewriting whole sequences would have written
        self._copies, self._recompute = copies, recompute
        self._pools: list[Pool] = []
        self._of: list[_Block] = []
        self._loading: dict[Key, Nanos] = {}  # when blocks that come up will be on the device
        self._due: deque[tuple[Nanos, Key]] = deque()  # the same in the order in which they were asked for
        self._fresh: set[Key] = set()  # written from the device for a sequence that has not ended

    def attach(self, groups: "Sequence[Group]") -> None:
        """What lies above. Called once, before anything else: what their pools give up comes here from now on."""
        layers = max(group.last for group in groups)
        for at, group in enumerate(groups):
            if group.pool not in self._pools:
                group.pool.evicted_to = partial(self._evicted, len(self._pools), at)
                self.stack.pooled(len(self._pools), at)
                self._pools.append(group.pool)
            share = (group.last - group.first + 1) / layers
            self._of.append(_Block(self._pools.index(group.pool), group.bytes * self._copies, group.pool.tokens, share))

    def found(self, group: int, keys: Sequence[Key], start: int, now: Nanos) -> int:
        """How many leading `keys`, which follow `start` blocks, would come up from below. Counts nothing."""
        of, depths = self._of[group], []
        for key in keys:
            depth = self.stack.depth(ident(of.pool, key))
            if depth is None:
                break
            depths.append(depth)
        return len(depths) if self.rules.restore == "always" else self._worth(of, depths, start, now)

    def _worth(self, of: _Block, depths: Sequence[int], start: int, now: Nanos) -> int:
        """So many of the leading blocks that loading them saves most against computing the group's layers of them. Of blocks from
        one level in a row either all or none."""
        best, saved = 0, 0.0
        total = [0.0] * len(self.levels)
        for at, depth in enumerate(depths, 1):
            total[depth] += of.bytes
            if at < len(depths) and depths[at] == depth:
                continue
            loads = [
                eta([level.reads, self.up], size, of.bytes, now) for level, size in zip(self.levels, total, strict=True) if size
            ]
            ready = max(*loads, self.up.arrival(sum(total), now))
            saving = of.share * self._recompute(start * of.tokens, at * of.tokens) - (ready - now) / 1e9
            if saving > saved:
                best, saved = at, saving
        return best

    def entered(
        self, group: int, keys: Sequence[Key], device: int, upto: int, tokens: int, job: int, again: bool, now: Nanos
    ) -> Nanos:
        """An admission looked for `keys`: the first `device` were on the device, those before `upto` come up, the others are
        missing. Returns when all found are on the device. again: no hits, it is not the first admission of the job. Of the
        `tokens` that all groups have each counts where a group's layers of it come from, by their share."""
        self._tend(now)
        of, ready = self._of[group], now
        wanted: list[list[Key]] = [[] for _ in self.levels]
        for at, key in enumerate(keys):
            name = ident(of.pool, key)
            if at < device:
                self.stack.admission.seen(name, now)
                ready = max(ready, self._loading.get(name, now))
            elif at >= upto:
                for level in self.levels:
                    level.policy.miss(name)
            elif (depth := self.stack.depth(name)) is not None:
                wanted[depth].append(name)
                if not again:
                    self.levels[depth].hits += of.share * max(0, min(of.tokens, tokens - at * of.tokens))
        for depth, names in enumerate(wanted):
            if names:
                ready = max(ready, self._load(depth, of, names, job, again, now))
        return ready

    def _load(self, depth: int, of: _Block, names: Sequence[Key], job: int, again: bool, now: Nanos) -> Nanos:
        """Begin to load blocks of one level. Returns when they are on the device; what is still being written comes later."""
        level = self.levels[depth]
        lines, here = [level.reads, self.up], max(level.index[name].since for name in names)
        ready = max(across(lines, len(names) * of.bytes, of.bytes, now), here + idle(lines, of.bytes))
        for name in names:
            self.stack.admission.seen(name, now)
            self._loading[name] = ready
            self._due.append((ready, name))
            self.stack.note("hit", level.index[name], level, job, again)
            self.stack.note("restore", level.index[name], level, job)
            self.stack.move_up(depth, name)
        return ready

    def stored(self, group: int, key: Key, block: BlockInfo, now: Nanos) -> None:
        """A block of the device is full and has its key."""
        of = self._of[group]
        name = ident(of.pool, key)
        self._remember(name, block)
        came = self._loading.get(name)
        if came is None:
            self.stack.admission.seen(name, now)
        if self.rules.write != "write_through" or name in self.levels[0].index:
            return
        if came is not None:  # it passed the tiers above the one it came from
            self.stack.fill(name, Copy(of.pool, key, of.bytes, came, block), [], now)
        elif self.rules.sequences == "delta" and self.stack.fill(
            name, Copy(of.pool, key, of.bytes, now, block), [self.down], now
        ):
            self._fresh.add(name)

    def _remember(self, name: Key, block: BlockInfo) -> None:
        device = self.stack.device
        device[name] = block
        if len(device) > 1024 + 2 * sum(len(pool.index) for pool in self._pools):  # some left without being evicted
            for gone in device.keys() - {ident(at, key) for at, pool in enumerate(self._pools) for key in pool.index}:
                del device[gone]
                self.stack.unheld(0, gone)

    def _evicted(self, pool: int, group: int, key: Key) -> None:
        """The device gave up `key`."""
        now, name = self._pools[pool].now, ident(pool, key)
        self._tend(now)
        self._loading.pop(name, None)
        copy = self._copy(self._of[group], name, key, now)
        self.stack.device.pop(name, None)
        if self.rules.write == "write_through":
            self.stack.unheld(0, name)
        elif name in self.levels[0].index:
            self.stack.touch(name, now)
        elif self.stack.admission.admits(name, now):
            self.new += self.stack.down(0, name, copy, [self.down, self.levels[0].writes], now)

    def _copy(self, of: _Block, name: Key, key: Key, now: Nanos) -> Copy:
        return Copy(of.pool, key, of.bytes, now, self.stack.device.get(name) or BlockInfo(key, 0, of.tokens))

    def ended(self, group: int, keys: Sequence[Key], now: Nanos) -> None:
        """A sequence is over that held these full blocks."""
        self._tend(now)
        of = self._of[group]
        self.whole += len(keys)
        for key in keys:
            name = ident(of.pool, key)
            if self.rules.sequences == "whole":
                self.new += self.stack.rewrite(name, self._copy(of, name, key, now), self.down, now)
            elif name in self._fresh:
                self._fresh.remove(name)
                self.new += 1

    def preempted(self, keys: Sequence[Sequence[Key]], tokens: int, now: Nanos) -> None:
        """A sequence of `tokens` tokens, which held these full blocks of each group, loses its place on the device."""
        if self.rules.spill == "recompute":
            return
        self._tend(now)
        out: list[tuple[Key, Copy]] = []
        for of, mine in zip(self._of, keys, strict=True):
            named = [(ident(of.pool, key), key) for key in mine]
            out += [(name, self._copy(of, name, key, now)) for name, key in named if self.stack.depth(name) is None]
        back = sum(len(mine) * of.bytes for of, mine in zip(self._of, keys, strict=True))
        if self.rules.spill == "cheaper" and self._swap(out, back, now) >= self._recompute(0, tokens):
            return
        for name, copy in out:
            self.swapped += self.stack.down(0, name, copy, [self.down, self.levels[0].writes], now)

    def _swap(self, out: Sequence[tuple[Key, Copy]], back: float, now: Nanos) -> Seconds:
        """How long `out` takes to go down and `back` bytes to come up, both after what is queued by now."""
        level, block = self.levels[0], max(of.bytes for of in self._of)
        goes = eta([self.down, level.writes], sum(copy.size for _, copy in out), block, now) - now if out else 0
        return (goes + eta([level.reads, self.up], back, block, now) - now) / 1e9

    def ahead(self, group: int, keys: Sequence[Key], now: Nanos) -> None:
        """A waiting sequence will ask for `keys`, the first of them not on the device: they come up to the first level by now."""
        self._tend(now)
        of, first = self._of[group], self.levels[0]
        left = first.capacity / 2  # no more, or they would push each other out
        for key in keys:
            name = ident(of.pool, key)
            depth = self.stack.depth(name)
            left -= of.bytes
            if depth is None or left < 0:
                return
            if depth:
                level = self.levels[depth]
                copy = level.index[name]
                self.stack.note("restore", copy, level)
                self.stack.move_up(depth, name)
                if not self.stack.put(0, name, copy, [level.reads, first.writes], max(now, copy.since)):
                    return

    def _tend(self, now: Nanos) -> None:
        """What was due by `now`: loads that arrived, blocks that have been idle long enough to be written down."""
        while self._due and self._due[0][0] <= now:
            at, name = self._due.popleft()
            if self._loading.get(name) == at:
                del self._loading[name]
        self.stack.persist(now)

    def clear(self, now: Nanos) -> None:
        """Forget everything: a reset of the prefix cache."""
        self.stack.clear()
        self._loading.clear()
        self._due.clear()
        self._fresh.clear()

    def slow(self, tier: str, factor: float) -> None:
        """`tier` moves bytes at 1 / factor of its rates from now on."""
        next(level for level in self.levels if level.name == tier).scale(1 / factor)

    def fast(self, tier: str, factor: float) -> None:
        next(level for level in self.levels if level.name == tier).scale(factor)

    def gauges(self, now: Nanos) -> dict[str, float]:
        """hit_tokens_<tier>, tier_<tier>_..., <tier>_dwpd and _life_years, swapped_blocks, delta_saving."""
        told = {"swapped_blocks": float(self.swapped)}
        for level in self.levels:
            told |= level.gauges(now)
        return told | ({"delta_saving": 1 - self.new / self.whole} if self.whole else {})

    def facts(self) -> dict[str, Any]:
        return {**{level.name: level.facts() for level in self.levels}, **self.rules._asdict()}

    def close(self) -> None:
        for level in self.levels:
            level.close()

    def check(self) -> None:
        """Assert the invariants. Slow: for tests."""
        self.stack.check()
