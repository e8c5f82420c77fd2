"""Which blocks are worth a write to a tier: all of them, those used before, or those used often of late."""

from typing import Protocol

from kvbench.core import Nanos
from kvbench.engine import Key

REMEMBERED = 1 << 20  # blocks whose uses are remembered; beyond that the one first seen is forgotten
MOST = 1 << 20  # a count does not grow beyond: it would take for ever to fall


class Admission(Protocol):
    """Told of every use of a block: when it was computed, found on the device, or came up from a tier."""

    def seen(self, key: Key, now: Nanos) -> None: ...

    def admits(self, key: Key, now: Nanos) -> bool:
        """Whether `key` may be written to a tier that lacks it. Counts nothing."""


class Everything:
    """No filter."""

    def seen(self, key: Key, now: Nanos) -> None:
        """Nothing to learn."""

    def admits(self, key: Key, now: Nanos) -> bool:
        return True


class Frequency:
    """Dynamo's filter: a count begins at 1, doubles with each further use and falls by 1 every `decay`; `least` admits.

    A count that fell to 0 is forgotten.
    """

    def __init__(self, least: int, decay: Nanos) -> None:
        self.least, self.decay = least, decay
        self._counts: dict[Key, tuple[int, int]] = {}  # count, and the number of the period in which it was so

    def _count(self, key: Key, now: Nanos) -> int:
        count, period = self._counts.get(key, (0, 0))
        return max(0, count - (now // self.decay - period))

    def seen(self, key: Key, now: Nanos) -> None:
        count = min(2 * self._count(key, now), MOST) or 1
        self._counts[key] = count, now // self.decay
        if len(self._counts) > REMEMBERED:
            del self._counts[next(iter(self._counts))]

    def admits(self, key: Key, now: Nanos) -> bool:
        return self._count(key, now) >= self.least


class Presence:
    """Whatever was used at least twice, however long ago."""

    def __init__(self) -> None:
        self._twice: dict[Key, bool] = {}

    def seen(self, key: Key, now: Nanos) -> None:
        self._twice[key] = key in self._twice
        if len(self._twice) > REMEMBERED:
            del self._twice[next(iter(self._twice))]

    def admits(self, key: Key, now: Nanos) -> bool:
        return self._twice.get(key, False)
