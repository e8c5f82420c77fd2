"""How long will an answer be? Who reserves memory ahead knows what a server knows: how long answers of that kind were before."""

from bisect import bisect_left, insort
from collections import deque
from math import ceil

LEAST = 20  # answers of a class before its history is believed
WINDOW = 1000  # of a class's answers the last so many count: traffic changes


class Lengths:
    """Answer lengths by class of traffic (Job.cls), of choices that ended with all their tokens."""

    def __init__(self, quantile: float) -> None:
        self.quantile = quantile
        self._recent: dict[str, deque[int]] = {}
        self._sorted: dict[str, list[int]] = {}

    def ended(self, cls: str, tokens: int) -> None:
        """An answer of `tokens` tokens is complete."""
        recent, ordered = self._recent.setdefault(cls, deque()), self._sorted.setdefault(cls, [])
        if len(recent) == WINDOW:
            del ordered[bisect_left(ordered, recent.popleft())]
        recent.append(tokens)
        insort(ordered, tokens)

    def predict(self, cls: str, most: int) -> int:
        """Tokens of the next answer, at most `most`: the quantile of the class's history by nearest rank; `most` until LEAST
        of its answers have ended."""
        ordered = self._sorted.get(cls, ())
        if len(ordered) < LEAST:
            return most
        return min(most, ordered[max(0, ceil(self.quantile * len(ordered)) - 1)])
