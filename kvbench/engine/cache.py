"""The KV memory of one replica: one block pool per layer group, and the tiers below. Stands between the batch and the pools.

Layers that share a block table are a *group*: by default all of them are one. A prefix counts as found as far as every group has
it; where some groups have more, only the layers up to the highest missing one are computed for those tokens.
"""

from collections.abc import Callable, Iterable, Sequence

from kvbench.core import Nanos, Segment
from kvbench.engine import Below, BlockInfo
from kvbench.engine.chain import Chain, root
from kvbench.engine.holding import Found, Group, Holding, Table
from kvbench.engine.pool import NOTHING, Pool
from kvbench.engine.tape import Tape


class Cache:
    """All that the batch asks of KV memory. `debt` is time the memory system made the engine wait: the next step takes it."""

    def __init__(
        self, groups: Sequence[Group], below: Below | None = None, tape: Tape | None = None, retain_tokens: int = 0
    ) -> None:
        self.groups = list(groups)
        self.below, self.tape, self.retain_tokens = below, tape, retain_tokens
        self.layers = max(group.last for group in groups)
        self.pools = list({id(group.pool): group.pool for group in groups}.values())
        self.windows: tuple[int, ...] = ()  # of its groups, each once
        self.debt = 0.0  # seconds
        self.fresh = 0  # blocks that got content which nobody had; whoever counts them sets it to 0
        self.when: Callable[[int], Nanos] | None = None  # of the sequence that grows: when it came to a token; None: now
        self._now: Nanos = 0
        self._shared = len(self.pools) < len(self.groups)
        if below is not None:
            below.attach(self.groups)

    @property
    def now(self) -> Nanos:
        return self._now

    @now.setter
    def now(self, now: Nanos) -> None:
        self._now = now
        for pool in self.pools:
            pool.now = now
        if self.tape is not None:
            self.tape.now = now

    def open(self, segments: Iterable[Segment], job: int, salt: int = 0) -> Holding:
        """A sequence's holding, empty. Groups with pools of their own and equal blocks share one chain of keys."""
        segments = tuple(segments)
        chains: dict[tuple[int, int], Chain] = {}
        tables = []
        for at, group in enumerate(self.groups):
            apart, block = (at if self._shared else 0), group.block
            chain = chains.get((block, apart)) or Chain(segments, block, root(salt, apart))
            chains[block, apart] = chain
            tables.append(Table(chain))
        return Holding(tables, job)

    def find(self, holding: Holding, most: int) -> Found:
        """What there is of the first `most` tokens. Counts nothing: admission may fail."""
        counts, lower, device, whole = [], [], most, most
        for at, (group, table) in enumerate(zip(self.groups, holding.tables, strict=True)):
            block = group.pool.tokens
            full = most // block
            keys = table.chain.upto(full)
            count = group.pool.found(keys, full)
            more = self.below.found(at, keys[count:full], count, self._now) if self.below is not None and count < full else 0
            counts.append(count)
            lower.append(more)
            device = min(device, count * block)
            whole = min(whole, (count + more) * block)
        device = min(device, whole)
        return Found(whole, whole - device, tuple(counts), tuple(lower))

    def fits(self, holding: Holding, found: Found, tokens: int) -> bool:
        """Whether there is room for `tokens` tokens, what was found among them, for a sequence that holds nothing yet."""
        need: dict[int, int] = {}
        for group, table, count, lower in zip(self.groups, holding.tables, found.counts, found.lower, strict=True):
            pool = group.pool
            blocks = max(lower, -(-tokens // pool.tokens) - count) + pool.unreferenced(table.chain.keys[:count])
            need[id(pool)] = need.get(id(pool), 0) + blocks
        return all(need[id(pool)] <= pool.free for pool in self.pools)

    def lacks(self, holding: Holding, tokens: int, computed: int) -> bool:
        """Whether some pool has too few blocks for the sequence to grow from `computed` to `tokens` tokens."""
        if len(self.groups) == 1:
            pool = self.groups[0].pool
            return -(-tokens // pool.tokens) - len(holding.tables[0].blocks) > pool.free
        need: dict[int, int] = {}
        for group, table in zip(self.groups, holding.tables, strict=True):
            pool = group.pool
            need[id(pool)] = need.get(id(pool), 0) + max(0, -(-tokens // pool.tokens) - len(table.blocks))
        return any(need[id(pool)] > pool.free for pool in self.pools)

    def enter(self, holding: Holding, found: Found, most: int, again: bool = False) -> Nanos:
        """Reference what was found and begin to load what lies below. Tells policies and tape of every full block of the first
        `most` tokens that is missing. Returns when everything found is on the device."""
        ready, job = self._now, holding.job
        for group, table, count in zip(self.groups, holding.tables, found.counts, strict=True):
            table.blocks = group.pool.take(table.chain.keys[:count], job, again)
            table.published = count
        for at, (group, table) in enumerate(zip(self.groups, holding.tables, strict=True)):
            pool, keys = group.pool, table.chain.keys
            upto = found.counts[at] + found.lower[at]
            for number in range(upto, most // pool.tokens):
                pool.policy.miss(keys[number])
                if self.tape is not None:
                    self.tape.note("miss", keys[number], at, job, parent=table.chain.parent(number), again=again)
            if self.below is not None:
                full = keys[: most // pool.tokens]
                ready = max(ready, self.below.entered(at, full, found.counts[at], upto, found.tokens, job, again, self._now))
        for at, (table, count, more) in enumerate(zip(holding.tables, found.counts, found.lower, strict=True)):
            if more:
                self._extend(at, table, (count + more) * self.groups[at].pool.tokens, job, 0)
        holding.partial = self._partial(found)
        return ready

    def reserve(self, holding: Holding, tokens: int) -> None:
        """Take blocks for `tokens` tokens ahead of their steps; windows and states need none. `fits` was asked for as many."""
        for group, table in zip(self.groups, holding.tables, strict=True):
            if group.window is None and not group.state:
                table.blocks += group.pool.allocate(max(0, -(-tokens // group.block) - len(table.blocks)), holding.job)

    def count(self, found: Found, prompt: int) -> None:
        """A job's look-up, for the hit rate of each group."""
        for group, count, lower in zip(self.groups, found.counts, found.lower, strict=True):
            group.lookups += prompt
            group.hits += (count + lower) * group.block
            group.device += count * group.block

    def _partial(self, found: Found) -> list[tuple[int, float]]:
        """Beyond what every group has: up to which token which share of the layers is missing."""
        if len(self.groups) == 1:
            return []
        ends = [(count + more) * g.pool.tokens for count, more, g in zip(found.counts, found.lower, self.groups, strict=True)]
        spans = []
        for upto in sorted(set(ends)):
            if upto > found.tokens:
                highest = max(g.last for g, end in zip(self.groups, ends, strict=True) if end < upto)
                spans.append((upto, highest / self.layers))
        return spans

    def grow(self, holding: Holding, tokens: int, computed: int) -> None:
        """Allocate up to `tokens` tokens and publish every block they fill. `computed`: tokens before the last step
        that does it. The caller has checked that there is room."""
        edge = 1 << 62
        for at, table in enumerate(holding.tables):
            edge = min(edge, self._extend(at, table, tokens, holding.job, computed))
        holding.edge = edge

    def _extend(self, at: int, table: Table, tokens: int, job: int, computed: int) -> int:
        """As `grow` for one group. Returns its next edge."""
        pool, blocks = self.groups[at].pool, table.blocks
        block = pool.tokens
        need = -(-tokens // block) - len(blocks)
        for _ in range(need):
            self._stamp(len(blocks) * block + 1)
            blocks += pool.allocate(1, job)
        full = tokens // block
        if full > table.published:
            keys, parent = table.chain.upto(full), table.chain.parent
            for number in range(table.published, full):
                key, before = keys[number], parent(number)
                self._stamp((number + 1) * block)
                own = blocks[number]
                blocks[number] = pool.publish(own, key, before, number, job)
                if blocks[number] == own:
                    self.fresh += 1
                if self.below is not None:
                    self.below.stored(at, key, BlockInfo(before, number, block), self._now)
            table.published = full
        return min((full + 1) * block, len(blocks) * block + 1)

    def _stamp(self, token: int) -> None:
        """Steps are handed out many at a time: what the tape is told next happened when the sequence came to `token`."""
        if self.when is not None and self.tape is not None:
            self.tape.now = self.when(token)

    def release(self, holding: Holding, tokens: int) -> None:
        """Give back everything; `tokens` are the sequence's computed ones. What it published stays resident."""
        for group, table in zip(self.groups, holding.tables, strict=True):
            valid = table.valid(tokens, group.block) if self.tape is not None else NOTHING
            group.pool.release(table.blocks[table.passed :] if table.passed else table.blocks, valid)
            if tokens < self.retain_tokens:
                group.pool.discard(table.chain.keys[: table.published])
            table.blocks, table.published, table.passed = [], 0, 0
        holding.edge = 1
        holding.partial = []
        holding.sought = False

    def ended(self, holding: Holding) -> None:
        """The sequence is over; it still holds its blocks."""
        if self.below is not None:
            for at, table in enumerate(holding.tables):
                self.below.ended(at, table.chain.keys[: table.published], self._now)

    def spill(self, holding: Holding, tokens: int) -> None:
        """The sequence, of `tokens` computed tokens, is preempted; it still holds its blocks."""
        if self.below is not None:
            self.below.preempted([table.chain.keys[: table.published] for table in holding.tables], tokens, self._now)

    def ahead(self, holding: Holding, most: int) -> None:
        """A sequence waits that will ask for its first `most` tokens: what of them is below may come nearer, once."""
        if self.below is None or holding.sought:
            return
        holding.sought = True
        for at, (group, table) in enumerate(zip(self.groups, holding.tables, strict=True)):
            full = most // group.pool.tokens
            keys = table.chain.upto(full)
            self.below.ahead(at, keys[group.pool.found(keys, full) : full], self._now)

    def steps_in_room(self, holdings: Sequence[tuple[Holding, int]], most: int) -> int:
        """How many decode steps, at most `most`, all can take together before blocks run out, given (holding, computed tokens) of
        each. At least 1: it is planned."""
        for pool in self.pools:
            most = self._steps(pool, holdings, most)
        return most

    def _steps(self, pool: Pool, holdings: Sequence[tuple[Holding, int]], most: int) -> int:
        block, free = pool.tokens, pool.free
        mine = [at for at, group in enumerate(self.groups) if group.pool is pool]
        slack = [len(held.tables[at].blocks) * block - computed for held, computed in holdings for at in mine]

        def fits(steps: int) -> bool:
            return sum(-(-(steps - left) // block) for left in slack if steps > left) <= free

        return furthest(1, most, fits)

    def usable_tokens(self) -> int:
        """Tokens of the longest sequence that fits when nothing else is there."""
        return min(
            pool.usable // sum(group.pool is pool for group in self.groups) * pool.tokens for pool in self.pools
        )  # fmt: skip

    def capacity(self) -> int:
        """KV memory in tokens, as the engine tells it."""
        return self.usable_tokens()

    def owed(self, lasts: float) -> float:
        """Seconds that the step which begins now, and would last `lasts`, takes longer for the memory system's sake."""
        debt, self.debt = self.debt, 0.0
        return debt

    def gauges(self) -> dict[str, float]:
        """What only some caches can tell."""
        return {}

    def reset(self) -> bool:
        """Empty the prefix cache, tiers included. False, and nothing done, while a sequence or a fault holds blocks."""
        if any(pool.referenced for pool in self.pools):
            return False
        self.clear()
        return True

    def clear(self) -> None:
        """Forget all content that no sequence holds, in every tier."""
        for pool in self.pools:
            pool.clear()
        if self.below is not None:
            self.below.clear(self._now)
        if self.tape is not None:
            self.tape.note("reset", None)

    def share(self, of: str) -> float:
        """Share of the pools' bytes that is "referenced" by live sequences and faults, or that is in the "index"."""
        total = used = 0.0
        for pool in self.pools:
            size = self.block_bytes(pool)
            total += pool.usable * size
            used += (pool.referenced if of == "referenced" else len(pool.index)) * size
        return used / total

    def block_bytes(self, pool: Pool) -> float:
        """Bytes of a block of `pool` on each device."""
        return next(group.bytes for group in self.groups if group.pool is pool)

    def check(self, holdings: Iterable[Holding]) -> None:
        """Assert the invariants of every pool, given what each live sequence holds. Slow: for tests."""
        holdings = list(holdings)
        for pool in self.pools:
            pool.check(
                table.blocks[table.passed :] + table.beside
                for held in holdings
                for group, table in zip(self.groups, held.tables, strict=True)
                if group.pool is pool
            )
        for held in holdings:
            for group, table in zip(self.groups, held.tables, strict=True):
                assert table.published <= len(table.blocks), "more blocks published than held"
                resident = [group.pool.index.get(key) for key in table.chain.keys[table.passed : table.published]]
                assert not any(table.blocks[: table.passed]), "a block out of the window is held"
                assert resident == table.blocks[table.passed : table.published], "a published block is not the index's"


def furthest(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, where `least` does and all below one that fits do too."""
    if fits(most):
        return most
    low, high = least, most  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
