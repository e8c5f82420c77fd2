"""InfluxDB's line protocol: text, numbers and instants in the form that every server that takes it reads alike.

`measurement,tag=value field=1.5,count=2i 1700000000000000000`: one point a line. Parsers differ in how they read a backslash in
a tag, so none is written there; a line feed ends a line even within quotes, so it becomes a space.
"""

import math
import re
from collections import deque

from kvbench.core import Nanos

LONGEST_TAG = 256  # characters of a tag's value
LONGEST_TEXT = 1024  # characters of a string field
INT64 = 2**63
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
    """A float field, whatever Python calls the number: 0 and 0.5 are of one type. "" for NaN and infinities."""
    try:
        value = float(value)
    except OverflowError:
        return ""
    return repr(value) if math.isfinite(value) else ""


def count(value: int) -> str:
    """An integer field. "" beyond 64 bits."""
    return f"{value}i" if -INT64 <= value < INT64 else ""


def nanos(wall: float) -> Nanos:
    """Seconds since 1970 as nanoseconds, to the microsecond that a float of them holds."""
    return round(wall * 1e6) * 1000


class Moments:
    """Gives every point of one series an instant of its own: a second one at the same instant would overwrite the first.

    The same points in the same order get the same instants, so that a replay overwrites what it repeats. Remembers the last
    `depth` of them; what is older than those, or taken, goes right after the newest.
    """

    def __init__(self, depth: int) -> None:
        self._recent: deque[Nanos] = deque(maxlen=depth)
        self._depth = depth
        self._newest = self._forgotten = -INT64

    def at(self, ns: Nanos) -> Nanos:
        """`ns`, or one nanosecond after the newest where it is taken or may be."""
        recent = self._recent
        if ns > self._newest:
            self._newest = ns
        elif ns <= self._forgotten or ns in recent:
            self._newest = ns = self._newest + 1
        if len(recent) == self._depth and recent[0] > self._forgotten:
            self._forgotten = recent[0]
        recent.append(ns)
        return ns
