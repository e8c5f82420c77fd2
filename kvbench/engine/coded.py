"""The KV memory of layer groups whose codecs take time, or need sequences of some length.

A sequence shorter than a group's `least` is not encoded there: each block it fills takes `wide` of the pool's blocks, its own and
others *beside* it. They go back when the sequence comes to that length, or ends: what it leaves is encoded. Its length is what is
known of it, so a prompt that is long enough is encoded from its first block on, however it is cut into chunks. What a sequence
finds is encoded already. Blocks reserved for the answer serve as blocks beside until the answer needs them.
"""

from collections.abc import Iterable, Sequence

from kvbench.core import Nanos
from kvbench.engine import Below
from kvbench.engine.cache import Cache, furthest
from kvbench.engine.encoder import Encoder
from kvbench.engine.holding import Found, Group, Holding, Table
from kvbench.engine.pool import Pool
from kvbench.engine.tape import Tape


class CodedCache(Cache):
    """A cache over groups that have a pool each. `staging`: bytes that may wait for the background encoder."""

    def __init__(
        self, groups: Sequence[Group], below: Below | None, tape: Tape | None, retain_tokens: int, staging: float
    ) -> None:
        super().__init__(groups, below, tape, retain_tokens)
        self.encoder = Encoder(self.groups, staging)
        self.peak = 0.0  # bytes of referenced blocks and of what waits to be encoded, the most at once since start or reset

    def find(self, holding: Holding, most: int) -> Found:
        """As Cache.find. The last known token is never looked for."""
        holding.length = most + 1
        return super().find(holding, most)

    def fits(self, holding: Holding, found: Found, tokens: int) -> bool:
        """Whether there is room for the most that the sequence takes on its way to `tokens` tokens."""
        for group, table, count, lower in zip(self.groups, holding.tables, found.counts, found.lower, strict=True):
            need = lower + group.wanted(tokens, holding.length, count + lower)
            if need + group.pool.unreferenced(table.chain.keys[:count]) > group.pool.free:
                return False
        return True

    def lacks(self, holding: Holding, tokens: int, computed: int) -> bool:
        return any(
            _more(group, table, tokens, max(tokens, holding.length)) > group.pool.free
            for group, table in zip(self.groups, holding.tables, strict=True)
        )

    def enter(self, holding: Holding, found: Found, most: int, again: bool = False) -> Nanos:
        ready = super().enter(holding, found, most, again)
        for table in holding.tables:
            table.came = len(table.blocks)
        return ready

    def reserve(self, holding: Holding, tokens: int) -> None:
        """As Cache.reserve, with what lies beside the blocks until the sequence is long enough."""
        super().reserve(holding, tokens)
        for group, table in zip(self.groups, holding.tables, strict=True):
            table.beside += group.pool.allocate(max(0, _more(group, table, tokens, holding.length)), holding.job)

    def grow(self, holding: Holding, tokens: int, computed: int) -> None:
        """As Cache.grow. Tokens that a sequence computes one at a time are encoded as their block fills: they do not wait."""
        known = max(holding.length, tokens)
        edge = 1 << 62
        for at, (group, table) in enumerate(zip(self.groups, holding.tables, strict=True)):
            if holding.length < group.least <= known:
                self._encode(group, table)
            start = max(computed, table.published * group.block)
            self.fresh = 0
            edge = min(edge, self._extend(at, table, tokens, holding.job, computed))
            if known < group.least:
                table.beside += group.pool.allocate(max(0, _more(group, table, tokens, known)), holding.job)
                edge = min(edge, group.least)
            elif group.encode:
                self.debt += self.fresh * group.encode if group.encoding == "sync" else 0.0
                if tokens > max(start, computed + 1):
                    self.encoder.made(at, tokens - start)
        holding.edge, holding.length = edge, known
        self._note(0.0)

    def _encode(self, group: Group, table: Table) -> None:
        """What the sequence filled of the group, too short until now, is encoded. Where steps do that, the next one pays."""
        if group.encoding == "sync":
            self.debt += (table.published - table.came) * group.encode
        group.pool.release(table.beside)
        table.beside = []

    def release(self, holding: Holding, tokens: int) -> None:
        for group, table in zip(self.groups, holding.tables, strict=True):
            if holding.length < group.least:
                self._encode(group, table)
            table.came = 0
        super().release(holding, tokens)

    def _steps(self, pool: Pool, holdings: Sequence[tuple[Holding, int]], most: int) -> int:
        """As Cache._steps, and no further than to where a sequence is long enough: its blocks are counted anew then."""
        at, group = next((at, group) for at, group in enumerate(self.groups) if group.pool is pool)
        crossings = [group.least - 1 - computed for held, computed in holdings if held.length < group.least]
        if not crossings:
            return super()._steps(pool, holdings, most)
        most = min(most, *crossings)
        rows = [(held.tables[at], computed, held.length) for held, computed in holdings]

        def fits(steps: int) -> bool:
            more = [_more(group, table, computed + steps, max(known, computed + steps)) for table, computed, known in rows]
            return sum([blocks for blocks in more if blocks > 0]) <= pool.free

        return furthest(1, most, fits)

    def usable_tokens(self) -> int:
        return min(group.longest() for group in self.groups)

    def owed(self, lasts: float) -> float:
        debt = super().owed(lasts) + self.encoder.step(self._now / 1e9, lasts)
        self._note(self.encoder.staged)
        return debt

    def _note(self, staged: float) -> None:
        self.peak = max(self.peak, sum([group.pool.referenced * group.bytes for group in self.groups]) + staged)

    def gauges(self) -> dict[str, float]:
        """Bytes on each device: what waits to be encoded, the most in the step in progress; the peak of KV memory so far."""
        return {"staged_bytes": self.encoder.staged, "kv_peak_bytes": self.peak}

    def reset(self) -> bool:
        done = super().reset()
        if done:
            self.peak = 0.0
        return done

    def check(self, holdings: Iterable[Holding]) -> None:
        holdings = list(holdings)
        super().check(holdings)
        self.encoder.check()
        assert self.debt >= 0, "encoding that was never done is given back"
        for held in holdings:
            for group, table in zip(self.groups, held.tables, strict=True):
                own = len(table.blocks) - table.came + len(table.beside)
                assert held.length < group.least or not table.beside, "a long sequence has blocks beside its own"
                assert held.length >= group.least or own >= group.wide * (table.published - table.came), (
                    "a raw block is too narrow"
                )


def _more(group: Group, table: Table, tokens: int, known: int) -> int:
    """Blocks that the sequence lacks for its way to `tokens` tokens, being `known` tokens long; negative where it has more."""
    return group.wanted(tokens, known, table.came) - (len(table.blocks) - table.came + len(table.beside))


def is_coded(groups: Sequence[Group]) -> bool:
    return any(group.encode or group.least for group in groups)
