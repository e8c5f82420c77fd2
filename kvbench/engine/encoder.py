"""KV between the step that computes it and its codec: raw bytes that wait beside the pools, and when steps wait for room there.

A step computes its layers one after the other, each in an equal part of its time; a layer's KV of all the step's new tokens is
there when the layer is. *sync*: the step encodes all of it at its end, so that until then all of it waits. *async*: one encoder
in the background takes layer by layer in the order in which they were computed, beside later layers and steps and at no cost to
them, and a layer's bytes are free when all of it is encoded. A layer for which the staging memory has no room is computed later;
one that is larger than that memory waits until nothing else is there.
"""

from collections import deque
from collections.abc import Sequence

from kvbench.core import Seconds
from kvbench.engine.holding import Group


class Encoder:
    """The encoders of one device. `cap`: bytes that may wait for the one in the background."""

    def __init__(self, groups: Sequence[Group], cap: float) -> None:
        self.groups, self.cap = groups, cap
        self.staged = 0.0  # bytes: the most that waits at once in the step in progress, or in the last one
        self._made = [0] * len(groups)  # tokens of each group that the next step computes
        self._queue: deque[tuple[float, Seconds]] = deque()  # bytes of a layer, and what is left of its encoding
        self._waiting = 0.0  # bytes in the queue
        self._at: Seconds = 0.0  # the time of both

    def made(self, group: int, tokens: int) -> None:
        """The step that is being planned computes `tokens` tokens of layer group `group`, to be encoded."""
        self._made[group] += tokens

    def step(self, begin: Seconds, lasts: Seconds) -> Seconds:
        """The step that was planned begins, and would last `lasts`. Returns how much longer it waits for staging memory."""
        self._drain(begin)
        self.staged = self._waiting
        if not any(self._made):
            return 0.0
        layer, at, held, waits = lasts / max(group.last for group in self.groups), begin, 0.0, 0.0
        for group, tokens in zip(self.groups, self._made, strict=True):
            layers = group.last - group.first + 1
            size, seconds = tokens * group.raw / layers, tokens * group.encode / group.block / layers
            for _ in range(layers):
                at += layer
                self._drain(at)
                if group.encoding == "sync":
                    held += size
                elif tokens:
                    late = self._enqueue(size, seconds)
                    at, waits = at + late, waits + late
                self.staged = max(self.staged, held + self._waiting)
        self._made = [0] * len(self.groups)
        return waits

    def _enqueue(self, size: float, seconds: Seconds) -> Seconds:
        """Put a layer behind what waits, when there is room for it. Returns how long that takes."""
        late = 0.0
        while self._queue and self._waiting + size > self.cap:
            late += self._queue[0][1]
            self._drain(self._at + self._queue[0][1])
        self._queue.append((size, seconds))
        self._waiting += size
        return late

    def _drain(self, to: Seconds) -> None:
        """Encode until `to`."""
        time, self._at = to - self._at, to
        while self._queue:
            size, left = self._queue[0]
            if left > time:
                self._queue[0] = size, left - time
                return
            time -= left
            self._queue.popleft()
            self._waiting -= size
        self._waiting = 0.0

    def check(self) -> None:
        """Assert the invariants. Slow: for tests."""
        total = sum(size for size, _ in self._queue)
        assert abs(self._waiting - total) < 1, "staged bytes are miscounted"
        assert total <= self.cap or len(self._queue) == 1, "more bytes staged than there is room for"
        assert not any(self._made), "a step was planned and never begun"
