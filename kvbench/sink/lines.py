"""InfluxDB's line protocol: text, numbers and instants in the form that every server that takes it reads alike.

`measurement,tag=value field=1.5,count=2i 1700000000000000000`: one point a line. Parsers differ in how they read a backslash in
a tag, so none is written there; a line feed ends a line even within quotes, so it becomes a space.
"""

import math
import re

from kvbench.core import Nanos

LONGEST_TAG = 256  # characters of a tag's value
LONGEST_TEXT = 1024  # characters of a string field
INT64 = 2**63
RECENT = 1 << 16  # points whose instants are remembered at least, so that none lands on another's
_CONTROL = re.compile(r"[\x00-\x1f\x7f\u2028\u2029]+")
_SPECIAL = re.compile(r"([,= ])")


def tag(value: str) -> str:
    """A tag's value (or a key) as it is stored: no backslashes, control characters or spaces at its ends, at most 256 long."""
    return _CONTROL.sub(" ", value.replace("\\", "/"))[:LONGEST_TAG].strip(" ")


def escaped(stored: str) -> str:
    """What `tag` gave, as a line holds it."""
    return _SPECIAL.sub(r"\\\1", stored) if _SPECIAL.search(stored) else stored


def text(value: str) -> str:
    """A string field with its quotes."""
    cut = value if len(value) <= LONGEST_TEXT else value[: LONGEST_TEXT - 1] + "…"
    return '"' + _CONTROL.sub(" ", cut).replace("\\", "\\\\").replace('"', '\\"') + '"'


def number(value: float) -> str:
    """A float field, whatever Python calls the number: 0 and 0.5 are of one type. "" for NaN and infinities, which no server takes."""
    value = float(value)
    return repr(value) if math.isfinite(value) else ""


def count(value: int) -> str:
    """An integer field. "" beyond 64 bits."""
    return f"{value}i" if -INT64 <= value < INT64 else ""


class Moments:
    """Gives every point an instant that no other recent point of its series has: a second one would overwrite the first.

    The same points in the same order get the same instants, so that a replay overwrites what it repeats. Remembers the last
    65,536 to 131,072 points.
    """

    def __init__(self) -> None:
        self._recent: dict[tuple[str, Nanos], Nanos] = {}  # a taken instant -> how far from it the next free one may be
        self._older = self._recent

    def at(self, series: str, ns: Nanos) -> Nanos:
        """`ns`, or the nearest later instant that is free."""
        key, at = (series, ns), ns
        step = self._recent.get(key) or self._older.get(key)
        while step:
            at += step
            step = self._recent.get((series, at)) or self._older.get((series, at))
        if at != ns:
            self._recent[key] = at + 1 - ns
        self._recent[series, at] = 1
        if len(self._recent) > RECENT:
            self._older, self._recent = self._recent, {}
        return at
