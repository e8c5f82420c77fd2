"""Tiers over each other: how a block gets into one, and where it goes when it has to leave.

Where every tier holds a copy of what is above it (`through`), what is still held above is the last to leave, and nothing has
to be written for it. Otherwise a block that leaves goes to the next tier, unless that has it or the admission refuses it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Literal

from kvbench.core import Nanos
from kvbench.engine import BlockInfo, Key
from kvbench.engine.admission import Admission
from kvbench.engine.level import Copy, Level, across, idle
from kvbench.engine.store import Line
from kvbench.engine.tape import Tape


class Stack:
    """`levels`, nearest to the device first. persist: what the first was not asked for so long is copied to the second, and so is
    there already when it leaves."""

    def __init__(
        self,
        levels: Sequence[Level],
        through: bool,
        admission: Admission,
        persist: Nanos | None = None,
        tape: Tape | None = None,
    ) -> None:
        self.levels, self.through, self.admission = list(levels), through, admission
        self.device: dict[Key, BlockInfo] = {}  # what the device holds
        self._persist, self._tape = persist, tape
        self._idle: OrderedDict[Key, Nanos] = OrderedDict()  # of the first level: since when not used, longest first
        self._groups: dict[int, int] = {}  # of a pool, for the tape

    def pooled(self, pool: int, group: int) -> None:
        """Group `group` is the first of pool `pool`."""
        self._groups[pool] = group

    def depth(self, name: Key) -> int | None:
        """The first level that has it."""
        return next((depth for depth, level in enumerate(self.levels) if level.has(name)), None)

    def put(self, depth: int, name: Key, copy: Copy, lines: Sequence[Line], now: Nanos) -> bool:
        """Write a copy to a level over `lines`; it arrives after `copy.since`. False where it was dropped."""
        level = self.levels[depth]
        if not level.accepts(copy.size, now, lines):
            level.dropped += 1
            return False
        for gone, left in level.victims(copy.size, partial(self._held_above, depth)):
            self._leave(depth, gone, left, now)
        at = max(across(lines, copy.size, copy.size, now), copy.since + idle([level.writes], copy.size))
        if not level.put(name, copy.arriving(at)):
            return False
        if not self._held_above(depth, name):
            level.policy.free(name)
        if depth == 0:
            self._rest(name, now)
        return True

    def down(self, depth: int, name: Key, copy: Copy, lines: Sequence[Line], now: Nanos) -> bool:
        """As `put`, of what comes from above."""
        went = self.put(depth, name, copy, lines, now)
        if went:
            self.note("spill", copy, self.levels[depth])
        return went

    def fill(self, name: Key, copy: Copy, lines: Sequence[Line], now: Nanos) -> bool:
        """A copy in every level that lacks it, each written from the one above; over `lines` into the first. Whether that has it
        now."""
        since = copy.since
        for depth, level in enumerate(self.levels):
            if name not in level.index:
                self.down(depth, name, copy.arriving(since), [*([] if depth else lines), level.writes], now)
            if name in level.index:
                since = level.index[name].since
        return name in self.levels[0].index

    def rewrite(self, name: Key, copy: Copy, line: Line, now: Nanos) -> bool:
        """Write a copy to every level, whether or not it is there. Whether the first took it."""
        took = False
        for depth, level in enumerate(self.levels):
            lines = [level.writes] if depth else [line, level.writes]
            if name not in level.index:
                went = self.down(depth, name, copy, lines, now)
            elif went := level.accepts(copy.size, now, lines):
                across(lines, copy.size, copy.size, now)
                level.rewrite(name)
            else:
                level.dropped += 1
            took = took or (went and not depth)
        return took

    def _held_above(self, depth: int, name: Key) -> bool:
        """Whether a level should hold the block because the one above it does."""
        return self.through and name in (self.levels[depth - 1].index if depth else self.device)

    def _leave(self, depth: int, name: Key, copy: Copy, now: Nanos) -> None:
        """A level gave up a block."""
        if depth == 0:
            self._idle.pop(name, None)
        below = depth + 1
        if self.through:
            self.unheld(below, name)
        elif below < len(self.levels):
            if name in self.levels[below].index:
                self.levels[below].touch(name)
            elif self.admission.admits(name, now):
                self.down(below, name, copy, [self.levels[below].writes], now)
        if not any(name in level.index for level in self.levels[below:]):
            self.note("evict", copy, self.levels[depth])

    def unheld(self, depth: int, name: Key) -> None:
        """Nobody above level `depth` holds the block any more."""
        if depth < len(self.levels) and name in self.levels[depth].index:
            self.levels[depth].policy.free(name)

    def touch(self, name: Key, now: Nanos) -> None:
        """The device gave up a block that the first level has."""
        self.levels[0].touch(name)
        self._rest(name, now)

    def move_up(self, depth: int, name: Key) -> None:
        """The block goes up to the device. It leaves the level where `moves` says so."""
        level = self.levels[depth]
        level.use(name)
        if level.moves:
            level.remove(name)
            self._idle.pop(name, None)
        elif not self.through:
            level.policy.free(name)

    def _rest(self, name: Key, now: Nanos) -> None:
        if self._persist is not None:
            self._idle[name] = now
            self._idle.move_to_end(name)

    def persist(self, now: Nanos) -> None:
        """Write down what had been idle long enough by `now`, at the time when it had been."""
        while self._persist is not None and self._idle:
            name, since = next(iter(self._idle.items()))
            due = since + self._persist
            if due > now:
                return
            del self._idle[name]
            first, below = self.levels[:2]
            if name in first.index and name not in below.index and self.admission.admits(name, due):
                self.down(1, name, first.index[name], [below.writes], due)

    def note(
        self, op: Literal["hit", "spill", "restore", "evict"], copy: Copy, level: Level, job: int = -1, again: bool = False
    ) -> None:
        if self._tape is not None:
            self._tape.note(op, copy.key, self._groups[copy.pool], job, tier=level.name, again=again)

    def clear(self) -> None:
        for level in self.levels:
            level.clear()
        self._idle.clear()
        self.device.clear()

    def check(self) -> None:
        """Assert the invariants of every tier. Slow: for tests."""
        for level in self.levels:
            level.check()
        assert all(name in self.levels[0].index for name in self._idle), "a block that left is waited for"
