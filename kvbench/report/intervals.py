"""Statistics with how sure they are: exact order statistics, their 95 % intervals, and a block bootstrap for means and rates.

Quantile q of n values is the smallest value with at least q of them at or below it (an observed value, never a blend), so
min <= p50 <= ... <= max always. Its interval comes from the binomial count of values below the true quantile (David and
Nagaraja, Order Statistics, 7.1) and takes the values as independent; where they are not (gaps within one stream) there is none.
A mean's interval resamples blocks of consecutive requests, so that a slow minute counts as one thing that happened, not many.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from kvbench.metrics.histogram import order_statistic, supported
from kvbench.metrics.names import QUANTILES

Floats = NDArray[np.float64]
STATISTICS = ("mean", *QUANTILES, "min", "max")
RESAMPLES = 1000
FEWEST = 10  # values (or seconds) below which a bootstrap interval would be a guess


def quantile_interval(ordered: Floats, q: float, level: float = 0.95) -> list[float | None]:
    """Two order statistics that hold the true quantile with at least `level`; None on a side that n values cannot bound."""
    n = len(ordered)
    low = int(_binomial_quantile((1 - level) / 2, n, q)) - 1
    high = int(_binomial_quantile((1 + level) / 2, n, q))
    return [float(ordered[low]) if low >= 0 else None, float(ordered[high]) if high < n else None]


def _binomial_quantile(p: float, n: int, q: float) -> float:
    """Smallest k with P(Binomial(n, q) <= k) >= p. scipy.special, since scipy.stats costs half a second to import."""
    k = max(0.0, math.ceil(float(special.bdtrik(p, n, q))))
    return k - 1 if k > 0 and float(special.bdtr(k - 1, n, q)) >= p else k


def ratio_interval(sums: Floats, counts: Floats, seed: int = 0) -> list[float] | None:
    """95 % interval of sum(sums) / sum(counts) by a circular block bootstrap; rows in order of time. None below FEWEST rows.

    A mean of one value per request has counts of 1; a mean over gaps has a request's gaps in `sums` and how many in `counts`;
    a rate has one row per second. Blocks hold about n^(1/3) rows.
    """
    n = len(sums)
    if n < FEWEST:
        return None
    size = max(1, math.ceil(n ** (1 / 3)))
    blocks = math.ceil(n / size)
    starts = np.random.default_rng(seed).integers(0, n, size=(RESAMPLES, blocks))
    drawn = [_block_sums(rows, size)[starts].sum(axis=1) for rows in (sums, counts)]
    whole = drawn[1] > 0
    if not whole.any():
        return None
    low, high = np.quantile(drawn[0][whole] / drawn[1][whole], [0.025, 0.975])
    return [float(low), float(high)]


def _block_sums(rows: Floats, size: int) -> Floats:
    """Sum of `size` rows from each row on, past the end from the beginning."""
    total: Floats = np.concatenate([np.zeros(1), np.cumsum(np.concatenate([rows, rows[:size]]))])
    return np.asarray(total[size : size + len(rows)] - total[: len(rows)])


def nothing(reason: str, unit: str = "s") -> dict[str, Any]:
    """A statistic that was not measured: every value null, and why."""
    return {"unit": unit, "n": 0, **dict.fromkeys(STATISTICS), "supported": {}, "interval": {}, "reason": reason}


def describe(values: Floats, unit: str = "s", seed: int = 0) -> dict[str, Any]:
    """Every statistic of one value per request (in order of time)."""
    if not len(values):
        return nothing("no sample", unit)
    ordered = np.sort(values)
    found = _points(ordered, unit)
    found["interval"] = {name: quantile_interval(ordered, q) for name, q in QUANTILES.items()}
    found["interval"]["mean"] = ratio_interval(values, np.ones(len(values)), seed)
    return found


def describe_gaps(values: Floats, sums: Sequence[float], counts: Sequence[int], unit: str = "s", seed: int = 0) -> dict[str, Any]:
    """The same for values that come many to a request: `sums` and `counts` per request carry the mean's interval."""
    if not len(values):
        return nothing("no sample", unit)
    found = _points(np.sort(values), unit)
    found["interval"] = {"mean": ratio_interval(np.asarray(sums, float), np.asarray(counts, float), seed)}
    found["interval_note"] = "no interval for quantiles: the gaps of one stream are not independent"
    return found


def _points(ordered: Floats, unit: str) -> dict[str, Any]:
    n = len(ordered)
    return {
        "unit": unit,
        "n": n,
        "mean": float(np.clip(ordered.mean(), ordered[0], ordered[-1])),  # rounding may put the mean of equal values beside them
        **{name: order_statistic(ordered, q) for name, q in QUANTILES.items()},
        "min": float(ordered[0]),
        "max": float(ordered[-1]),
        "supported": {name: supported(q, n) for name, q in QUANTILES.items()},
    }
