"""KV memory of models whose layers do not all attend to everything: sliding windows, and linear layers with one state a sequence.

As in vLLM (v1/core, read, not copied): groups of layers with a block table each share one pool of equal blocks. A window group
gives back blocks that fell wholly out of its window before a step takes new ones; they stay cached. A hit is the longest prefix
of which every full group has all blocks and every window group those of the last `window - 1` tokens. A model with linear
layers never hits: their state is kept at a sequence's end only, and vLLM turns prefix caching off there.
"""

import math
from collections.abc import Iterable, Sequence

from kvbench.core import Nanos
from kvbench.engine import Below, Policy
from kvbench.engine.cache import Cache, furthest
from kvbench.engine.holding import Found, Group, Holding, Table
from kvbench.engine.pool import NOTHING, Pool
from kvbench.engine.sequence import Sequence as Answer
from kvbench.engine.tape import Tape
from kvbench.profile import EngineProfile, Layout, Model, layout

_NEVER = 1 << 62  # tokens


class HybridCache(Cache):
    """A cache over the groups of one layout, in one pool. `inflight`: tokens of a sequence that one step computes, most;
    `longest`: tokens of the longest sequence allowed."""

    def __init__(
        self, groups: Sequence[Group], cut: Layout, inflight: int, longest: int, tape: Tape | None = None, retain_tokens: int = 0
    ) -> None:
        super().__init__(groups, None, tape, retain_tokens)
        self.windows = tuple(sorted({group.window for group in groups if group.window is not None}))
        self._cut, self._inflight, self._longest = cut, inflight, longest
        self._hashed = not any(group.state for group in groups)
        self._aligned = math.lcm(*(group.block for group in groups))
        self._most = [one.blocks(_NEVER, inflight) for one in cut.groups]

    def find(self, holding: Holding, most: int) -> Found:
        """What there is of the first `most` tokens: the longest prefix on which all groups agree."""
        tokens, before = (most // self._aligned * self._aligned if self._hashed else 0), -1
        while tokens != before:
            before = tokens
            for group, table in zip(self.groups, holding.tables, strict=True):
                tokens = self._reach(group, table, tokens)
        counts = tuple(tokens // group.block for group in self.groups)
        return Found(tokens, 0, counts, (0,) * len(counts))

    def _reach(self, group: Group, table: Table, most: int) -> int:
        """The longest prefix of at most `most` tokens that ends where blocks of all groups end, and of which the group has what
        it needs."""
        block, full = group.block, most // group.block
        keys = table.chain.upto(full)
        if group.window is None:
            return group.pool.found(keys, full) * block // self._aligned * self._aligned
        tail = -(-(group.window - 1) // block)
        end, run = full, 0  # blocks before `end` are there, `run` of them
        for at in range(full - 1, -1, -1):
            if run >= tail:
                break
            if keys[at] in group.pool.index:
                run += 1
            else:
                end, run = at * block // self._aligned * self._aligned // block, 0
                if end < at:  # a prefix cannot end here: go on below the last place where it can
                    return self._reach(group, table, end * block)
        return end * block

    def fits(self, holding: Holding, found: Found, tokens: int) -> bool:
        """Whether there is room for the most that a sequence of `tokens` tokens holds at once on its way there."""
        need = 0
        for at, (group, table, count) in enumerate(zip(self.groups, holding.tables, found.counts, strict=True)):
            if group.state:
                need += 1
                continue
            first = group.first_needed(found.tokens)
            blocks = -(-tokens // group.block) - first
            if group.window is not None:
                blocks = min(blocks, self._most[at])
            need += max(0, blocks - (count - first)) + group.pool.unreferenced(table.chain.keys[first:count])
        return need <= self.groups[0].pool.free

    def lacks(self, holding: Holding, tokens: int, computed: int) -> bool:
        """As Cache.lacks. What fell out of windows is given back first."""
        need = 0
        for group, table in zip(self.groups, holding.tables, strict=True):
            self._slide(group, table, computed)
            wanted = 1 if group.state else -(-tokens // group.block)
            need += max(0, wanted - len(table.blocks))
        return need > self.groups[0].pool.free

    def enter(self, holding: Holding, found: Found, most: int, again: bool = False) -> Nanos:
        """As Cache.enter. Of a window group only the blocks that are still needed are referenced."""
        for at, (group, table, count) in enumerate(zip(self.groups, holding.tables, found.counts, strict=True)):
            if group.state:
                continue
            first = group.first_needed(found.tokens)
            table.blocks = [0] * first + group.pool.take(table.chain.keys[first:count], holding.job, again)
            table.published, table.passed = count, first
            keys = table.chain.upto(most // group.block if self._hashed else 0)
            for number in range(count, len(keys) and most // group.block):
                group.pool.policy.miss(keys[number])
                if self.tape is not None:
                    parent = table.chain.parent(number)
                    self.tape.note("miss", keys[number], at, holding.job, parent=parent, again=again)
        return self._now

    def _extend(self, at: int, table: Table, tokens: int, job: int, computed: int) -> int:
        """As Cache._extend, block by block: a window's blocks come back while new ones are taken."""
        group, blocks = self.groups[at], table.blocks
        if group.state:
            if not blocks:
                blocks += group.pool.allocate(1, job, (at, group.block))
            return _NEVER
        while (here := len(blocks) * group.block) < tokens:
            self._publish(group, table, here, job)
            self._slide(group, table, min(here, computed))
            self._stamp(here + 1)
            blocks += group.pool.allocate(1, job, (at, group.block))
        self._publish(group, table, tokens, job)
        self._slide(group, table, computed)
        edge = min((tokens // group.block + 1) * group.block, len(blocks) * group.block + 1)
        return edge if group.window is None else min(edge, (table.passed + 1) * group.block + group.window)

    def _publish(self, group: Group, table: Table, tokens: int, job: int) -> None:
        """The blocks that the first `tokens` tokens fill get their keys."""
        full = tokens // group.block
        if not self._hashed or full <= table.published:
            return
        keys = table.chain.upto(full)
        for number in range(table.published, full):
            self._stamp((number + 1) * group.block)
            table.blocks[number] = group.pool.publish(
                table.blocks[number], keys[number], table.chain.parent(number), number, job
            )  # fmt: skip
        table.published = full

    def _slide(self, group: Group, table: Table, computed: int) -> None:
        """Give back the blocks that no token after the `computed` first attends to: null blocks take their places."""
        first = min(group.first_needed(computed), len(table.blocks))
        if first > table.passed:
            gone = table.blocks[table.passed : first]
            table.blocks[table.passed : first] = [0] * len(gone)
            table.passed = first
            group.pool.release(gone, dict.fromkeys(gone, group.block) if self.tape is not None else NOTHING)

    def steps_in_room(self, holdings: Sequence[tuple[Holding, int]], most: int) -> int:
        """As Cache.steps_in_room, and no further than to where a sequence outgrows a window: steps grow alike until then.

        Blocks that come back on the way are not counted on: the next steps are planned with them.
        """
        crossings = [window - computed for window in self.windows for _, computed in holdings if computed + 1 < window]
        most = min([most, *crossings])
        free = self.groups[0].pool.free
        tables = [(at, group.block) for at, group in enumerate(self.groups) if not group.state]
        slack = [(len(held.tables[at].blocks) * block - computed, block) for held, computed in holdings for at, block in tables]

        def fits(steps: int) -> bool:
            return sum(-(-(steps - left) // block) for left, block in slack if steps > left) <= free

        return furthest(1, most, fits)

    def usable_tokens(self) -> int:
        """Tokens of the longest sequence, up to the longest allowed, that fits when nothing else is there."""
        usable = self.groups[0].pool.usable
        return furthest(0, self._longest, lambda tokens: self._cut.request_blocks(tokens, self._inflight) <= usable)

    def capacity(self) -> int:
        return self._cut.tokens(self.groups[0].pool.usable + 1, self._longest, self._inflight)


def attended(windows: Iterable[int], sequences: Sequence[Answer], step: int) -> tuple[int, ...]:
    """Tokens that decoding sequences attend to within each window, summed, in the `step`-th of steps that begin now."""
    return tuple(sum([min(window, s.computed + step) for s in sequences]) for window in windows)


def one_pool(model: Model, count: int, engine: EngineProfile, blocks: int, policy: Policy, tape: Tape | None) -> list[Group]:
    """The model's groups on each of `count` devices, over one empty pool of `blocks` blocks, the null block included."""
    cut = layout(model, engine.block, count)
    tokens = max((part.block for part in cut.groups if part.kind != "linear"), default=engine.block)
    pool = Pool(blocks, tokens, policy, retain=round(engine.retain * 1e9), tape=tape)
    if len(cut.groups) == 1 and cut.groups[0].kind == "full":
        return [Group("all", pool, 1, model.layers, engine.block * model.kv_token_bytes(count))]
    groups, last = [], 0
    for number, part in enumerate(cut.groups, 1):
        block = tokens if part.kind == "linear" else part.block
        linear = part.kind == "linear"
        groups.append(
            Group(
                f"{part.kind}_{number}", pool, last + 1, last + part.layers, cut.block_bytes,
                window=part.window, state=linear, block=block,
            )
        )  # fmt: skip
        last += part.layers
    return groups


def is_hybrid(groups: Sequence[Group]) -> bool:
    return any(group.state or group.window is not None for group in groups)


def hybrid_cache(
    groups: Sequence[Group], model: Model, count: int, engine: EngineProfile, tape: Tape | None, below: Below | None
) -> HybridCache:
    """The cache of `groups`, which `one_pool` made. ValueError where tiers are to lie below it."""
    if below is not None:
        raise ValueError(f"{model.name} has layers that are not full attention: tiers below the device cannot hold their KV here")
    longest = engine.limit(model)
    inflight = longest if engine.prefill == "whole" else engine.max_num_batched_tokens
    return HybridCache(groups, layout(model, engine.block, count), inflight, longest, tape, engine.retain_tokens)
