"""Bucket quantiles against exact order statistics, and the survival curve against a hand-made one and SciPy's."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.metrics import histogram
from kvbench.metrics.histogram import BUCKETS, Curve, buckets, order_statistic, supported

durations = st.lists(st.one_of(st.just(0), st.integers(1, 10**13)), min_size=1, max_size=200)
QS = (0.0, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)


def counts(values: Sequence[float]) -> np.ndarray:
    return np.bincount(buckets(np.array(values, float)), minlength=BUCKETS)


def quantile(values: Sequence[float], q: float) -> float:
    return Curve(counts(values), counts([]), min(values), max(values), -math.inf).quantile(q).value


@given(durations)
@settings(deadline=None)
def test_every_quantile_is_within_one_percent_and_in_order(values: list[int]) -> None:
    low, high = min(values), max(values)
    ordered = np.sort(np.array(values, float))
    got = [quantile(values, q) for q in QS]
    for q, value in zip(QS, got, strict=True):
        exact = np.quantile(ordered, q, method="inverted_cdf")
        assert order_statistic(ordered, q) == exact
        assert abs(value - exact) <= 0.01 * exact
    assert got == sorted(got)
    assert low <= got[0]
    assert got[-1] <= high


@given(durations, durations)
@settings(deadline=None)
def test_counts_add(a: list[int], b: list[int]) -> None:
    assert (counts(a) + counts(b) == counts(a + b)).all()


def test_zero_has_its_own_bucket_and_the_last_one_gives_the_maximum() -> None:
    assert buckets(np.array([0.0, 1.0, 2.0**60])).tolist() == [0, 1, BUCKETS - 1]
    assert quantile([0, 0, 5], 0.5) == 0
    assert quantile([1e3, 3e18, 4e18], 0.6) == 4e18


def test_l05_p99_of_fifty_is_the_maximum_and_never_above_it() -> None:
    values = [float(k) for k in range(547, 597)]
    assert quantile(values, 0.99) <= 596
    assert quantile(values, 1.0) <= 596
    assert order_statistic(np.array(values), 0.99) == 596


def test_a_quantile_is_supported_by_ten_values_beyond_it() -> None:
    assert [supported(0.99, n) for n in (999, 1000)] == [False, True]
    assert [supported(0.5, n) for n in (19, 20)] == [False, True]


def curve(seen: list[float], ages: list[float]) -> Curve:
    return Curve(
        counts(seen), counts(ages), min(seen, default=math.inf), max(seen, default=-math.inf), max(ages, default=-math.inf)
    )


def test_survival_by_hand() -> None:
    # values 10, 30, 50; ages 20, 20, 60. S(10) = 5/6; at 30 three are at risk: S = 5/6 x 2/3 = 5/9; at 50: x 1/2 = 5/18
    c = curve([10, 30, 50], [20, 20, 60])
    near = [c.quantile(q) for q in (1 / 6, 4 / 9, 13 / 18)]
    assert [value for value, _ in near] == pytest.approx([10, 30, 50], rel=0.01)
    assert not any(bound for _, bound in near)
    assert c.quantile(0.73) == (60, True)  # 1 - 5/18 = 0.722: the curve stays above


def test_a_hung_server_is_its_largest_age_at_least() -> None:
    assert curve([], [1e9, 7e9]).quantile(0.5) == (7e9, True)
    old = curve([9e9], [1e9] * 50).quantile(0.99)
    assert old.value == pytest.approx(9e9)
    assert not old.lower_bound


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=60),
    st.lists(st.integers(1, 60), max_size=60),
    st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9, 0.99]),
)
@settings(deadline=None)
def test_the_curve_is_scipys(seen: list[int], aged: list[int], q: float) -> None:
    values, ages = [1.05**k * 1000 for k in seen], [1.05**k * 1000 for k in aged]  # 5 % apart: never two in one bucket
    sf = scipy.stats.ecdf(scipy.stats.CensoredData(uncensored=values, right=ages)).sf
    margin = np.abs(np.asarray(sf.probabilities) - (1 - q))
    if (margin < 1e-9).any() and (margin[margin < 1e-9] > 0).any():
        return  # on the step itself rounding decides
    below = np.nonzero(np.asarray(sf.probabilities) <= 1 - q)[0]
    got = curve(values, ages).quantile(q)
    if len(below):
        assert got.value == pytest.approx(sf.quantiles[below[0]], rel=0.01)
        assert not got.lower_bound
    else:
        assert got == (max(values + ages), True)


def test_the_middle_of_a_bucket_is_within_the_promised_error() -> None:
    edges = np.geomspace(1, 2e13, 100_000)
    assert np.abs(histogram.MIDDLES[buckets(edges)] / edges - 1).max() <= histogram.ERROR + 1e-12 < 0.01
