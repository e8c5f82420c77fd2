"""Buckets of equal relative width for durations: a quantile within 1 % of the exact one, zero kept apart, counts that add.

A quantile here is the order statistic of rank ceil(q n) (the inverse of the empirical distribution, no interpolation), also with
weights and with right-censored values (Kaplan and Meier 1958, where it is the smallest t with S(t) <= 1 - q). Buckets suit live
windows; a report, which has every value, uses `order_statistic` and is exact at any n.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]

STEPS = 64  # buckets per doubling; the middle of one is within 1/128 of every value in it: 0.8 %
OCTAVES = 47  # 1 ns to 39 hours; longer values share the last bucket, whose quantile is then the exact maximum
BUCKETS = 1 + OCTAVES * STEPS
ERROR = 1 / (2 * STEPS)
_SHIFT = 52 - STEPS.bit_length() + 1  # of a float64, the exponent and the first six bits of the fraction remain
_ONE = 1023 * STEPS
# Bucket 0 is zero (and what is below 1 ns). Bucket 1 + 64 e + k holds [2^e (1 + k/64), 2^e (1 + (k+1)/64)) ns.
_LOWER = np.ldexp(1 + np.tile(np.arange(STEPS), OCTAVES) / STEPS, np.repeat(np.arange(OCTAVES), STEPS))
MIDDLES = np.concatenate([[0.0], _LOWER + np.ldexp(ERROR, np.repeat(np.arange(OCTAVES), STEPS))])
MIDDLES[-1] = np.inf


def buckets(nanos: NDArray[np.float64]) -> NDArray[np.int64]:
    """Bucket of each duration (ns, >= 0); shape kept. It is the float's own exponent and six bits of fraction."""
    index: NDArray[np.int64] = np.ascontiguousarray(nanos, np.float64).view(np.int64) >> _SHIFT
    index -= _ONE - 1
    return np.clip(index, 0, BUCKETS - 1, out=index)


class Quantile(NamedTuple):
    """In ns. lower_bound: the curve does not come down to q, and `value` is the largest age."""

    value: float
    lower_bound: bool = False


class Curve:
    """Quantiles of `observed` and, where there are any, of `censored` (Kaplan-Meier): counts [BUCKETS] of values and
    of ages (lower bounds), at least one in all.

    low, high: extremes of the observed; oldest: the largest age (ns; -inf with none). Of a value and an age in one bucket the
    value is taken first, so that the age is still at risk, as is usual.
    """

    def __init__(self, observed: Counts, censored: Counts, low: float, high: float, oldest: float) -> None:
        self.low, self.high, self.oldest = low, high, oldest
        self._upto = np.cumsum(observed)
        self._survival: NDArray[np.float64] | None = None
        if censored.any():
            at_risk = np.cumsum((observed + censored)[::-1])[::-1]
            self._survival = np.cumprod(1.0 - observed / np.maximum(at_risk, 1), dtype=np.float64)

    def quantile(self, q: float) -> Quantile:
        if self._survival is None:
            rank = max(1, math.ceil(q * int(self._upto[-1]) - 1e-9))
            return self._middle(int(np.searchsorted(self._upto, rank)))
        reached = self._survival <= 1 - q + 1e-12
        if reached.any():
            return self._middle(int(np.argmax(reached)))
        return Quantile(max(self.oldest, self.high), lower_bound=True)

    def _middle(self, bucket: int) -> Quantile:
        return Quantile(float(min(max(MIDDLES[bucket], self.low), self.high)))


def order_statistic(ordered: NDArray[np.float64], q: float) -> float:
    """The exact quantile of values in ascending order [n], n >= 1."""
    return float(ordered[max(1, math.ceil(q * len(ordered) - 1e-9)) - 1])


def supported(q: float, n: int) -> bool:
    """Whether n values carry the quantile q: at least ten beyond it on average."""
    return n * (1 - q) >= 10 - 1e-9


def least(q: float) -> int:
    """The fewest values that carry the quantile q < 1."""
    return math.ceil((10 - 1e-9) / (1 - q))
