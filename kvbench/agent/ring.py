"""The latest readings as the JSON lines that are asked for: no older than `keep`, and no more than so many bytes."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from kvbench.core import Seconds

MOST = 256 << 20  # bytes


class Ring:
    """Lines in the order of their telling, numbered without gaps: who has 7 and 9 knows that 8 was there.

    `{"n": 8, "t": seconds since 1970, "labels": {...}, "values": {name: number or null}}`, or `"event": {"kind", "data"}` in
    place of labels and values. Two lines need not be in order of t: machine and GPUs are read apart.
    """

    def __init__(self, keep: Seconds, most: int = MOST) -> None:
        self.keep, self.most = keep, most
        self.count = self.bytes = 0
        self._lines: deque[tuple[float, bytes]] = deque()

    def values(self, t: float, labels: Mapping[str, str], values: Mapping[str, float | None]) -> None:
        self._add(t, {"labels": labels, "values": values})

    def event(self, t: float, kind: str, data: Mapping[str, Any]) -> None:
        self._add(t, {"event": {"kind": kind, "data": data}})

    def _add(self, t: float, what: dict[str, Any]) -> None:
        self.count += 1
        line = msgspec.json.encode({"n": self.count, "t": round(t, 6), **what}) + b"\n"
        self._lines.append((t, line))
        self.bytes += len(line)
        while self._lines[0][0] < t - self.keep or self.bytes > self.most:
            self.bytes -= len(self._lines.popleft()[1])

    def between(self, since: float, until: float) -> list[bytes]:
        """The lines with t in [since, until)."""
        return [line for t, line in self._lines if since <= t < until]

    @property
    def reach(self) -> Seconds:
        """How far it goes back from its newest line."""
        return self._lines[-1][0] - self._lines[0][0] if self._lines else 0.0
