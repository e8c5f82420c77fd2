"""The load level: the multiplier on the offered rate, and its rules for going up and down.

A ladder raises it rung by rung. A watch that finds an anomaly makes it fall to the last level that was healthy. Then it holds:
nothing rises before the hold is over and a window at this level was healthy. Then it tries again with half the step, and half of
that after the next fall, a stated number of times; after that it stays where it is and says so. Synchronous, without a clock.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvbench.core import Seconds

CLOSE = 1e-9  # levels nearer than this are one: rungs are sums of steps
SHORT = 1e-6  # seconds: a rung that is due this soon is due now
BLANK = 30  # windows in a row that say nothing: after a fall on a ladder no more is waited for than so many


@dataclass(frozen=True)
class Ladder:
    """`step` more every `every` seconds until `max`: levels, 1 being the scenario's own load."""

    step: float
    every: Seconds
    max: float

    def rungs(self, start: float = 1.0) -> Iterator[tuple[Seconds, float]]:
        """(seconds after the phase's start, level from then on) while nothing falls, from `start` to the top."""
        number, level = 0, min(start, self.max)
        yield 0.0, level
        while level < self.max - CLOSE:
            number += 1
            level = min(self.max, start + number * self.step)
            yield number * self.every, level

    @property
    def seconds(self) -> Seconds:
        """How long it takes from level 1 until the top has been held for `every`, while nothing falls."""
        return self.every * sum(1 for _ in self.rungs())


@dataclass(frozen=True)
class Retreat:
    """How the level falls and tries again: one step down where no healthy level is known, `hold` seconds before the next move,
    at most `tries` tries."""

    step: float = 0.2
    hold: Seconds = 60.0
    tries: int = 3


class Move(NamedTuple):
    """The level from now on, why, and the numbers behind it."""

    level: float
    why: str
    data: dict[str, Any]


class Level:
    """The level of one run. `moved`: when it last changed or a phase began. `done`: why a ladder has ended, "" while it goes on.
    `spent`: why it will not move by itself any more after falls, "" while it may."""

    def __init__(self, retreat: Retreat | None = None) -> None:
        self.retreat = retreat or Retreat()
        self.value = 1.0
        self.moved: Seconds = 0.0
        self._before = 1.0  # the value until then
        self.done = self.spent = ""
        self._ladder: Ladder | None = None
        self._goal = 1.0  # where it climbs to
        self._step = self.retreat.step  # of the next rise
        self._due: Seconds = math.inf  # the next rise, at the earliest
        self._held: Seconds = -math.inf  # no fall and no rise before this
        self._good: list[float] = []  # levels with a healthy window, not found anomalous since
        self._well = False  # a healthy window at this level since the last move or anomaly
        self._fallen = False  # since the search began
        self._climbing = False  # risen since the last fall: that rise was a try
        self._tried = 0
        self._row = 0  # falls since the last healthy window
        self._blank = 0  # windows that said nothing since the last that did

    def begin(self, now: Seconds, ladder: Ladder | None) -> None:
        """A steady or stress phase starts at the present level. A ladder starts a search of its own; steady goes on as it was."""
        self.moved, self._before, self.done, self._ladder = now, self.value, "", ladder
        if ladder is not None:
            self._goal, self._step, self._due = max(ladder.max, self.value), ladder.step, now + ladder.every
            self._held, self.spent = -math.inf, ""
            self._fallen = self._climbing = False
            self._tried = self._row = 0

    def tick(self, now: Seconds) -> Move | None:
        """What is due by `now`: a rung, or another try once the hold is over and the windows are healthy."""
        if self.done or self.spent or now < self._due - SHORT or (self._fallen and not self._well):
            return None
        if self.value >= self._goal - CLOSE:
            if self._ladder is not None:
                self.done = f"level {self.value:.4g} held for {self._ladder.every:g} s: the ladder's end"
            self._due = math.inf
            return None
        if not self._fallen:
            why, data = "the next rung", {}
        else:
            self._tried += not self._climbing
            self._climbing = True
            why, data = "healthy after a fall: up again", {"try": self._tried, "tries": self.retreat.tries}
        self._due = now + (self._ladder.every if self._ladder is not None else self.retreat.hold)
        return self._move(now, min(self._goal, self.value + self._step), why, {"step": self._step} | data)

    def at(self, end: Seconds) -> float:
        """The level in force until `end`, the end of a window: a rung of that very instant is not in it."""
        return self.value if self.moved < end else self._before

    def healthy(self, now: Seconds) -> None:
        """The watch saw a healthy window that ends now and lies wholly at one level."""
        level, self._row, self._blank = self.at(now), 0, 0
        self._well = level == self.value
        if level not in self._good:
            self._good.append(level)

    def doubt(self) -> None:
        """The watch saw a window out of line: after a fall nothing rises before the next healthy one."""
        self._well, self._blank = False, 0

    def blank(self) -> None:
        """The watch saw a window that says nothing. A ladder that fell waits for a healthy one, but has to end some time."""
        self._blank += 1
        if self._ladder is not None and self._fallen and not (self.spent or self._well) and self._blank >= BLANK:
            self._give_up(f"{self._blank} windows in a row could not be judged after its fall")

    def fall(self, now: Seconds, why: str) -> Move | None:
        """To the highest lower level known healthy, else one step down, and hold. None while held, or with the tries used up."""
        self._well = False
        if self.spent or now < self._held - SHORT:
            return None
        if self._row >= max(1, self.retreat.tries):
            self._give_up(f"{self._row} falls in a row did not help")
            return None
        self._row += 1
        ill = self.at(now)
        self._good = [level for level in self._good if level < ill - CLOSE]
        step = self._ladder.step if self._ladder is not None else self.retreat.step
        # levels below 1 shrink by the share, so that no number of falls reaches 0
        lower = max(self._good, default=ill - min(step * min(1.0, ill), ill / 2))
        self._fallen, self._climbing = True, False
        self._held = self._due = now + self.retreat.hold
        self._step = step / 2 ** (self._tried + 1)
        data = {"known": bool(self._good), "until": self._held, "tried": self._tried, "tries": self.retreat.tries}
        move = self._move(now, lower, why, data)
        if self._tried >= self.retreat.tries:
            returns = f"{self._tried} return{'s' if self._tried > 1 else ''} after a fall fell again"
            self._give_up(returns if self._tried else "no try is allowed")
        return move

    def _give_up(self, why: str) -> None:
        self.spent = f"level {self.value:.4g} is kept: {why}"
        if self._ladder is not None:
            self.done = self.spent

    def _move(self, now: Seconds, level: float, why: str, data: dict[str, Any]) -> Move:
        self._before, self.value = self.value, round(level, 9)
        self.moved, self._well, self._blank = now, False, 0
        return Move(self.value, why, {"from": self._before} | data)
