"""Statistics against numpy and scipy, and what an interval promises: that it holds the truth as often as it says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from kvbench.metrics.names import QUANTILES
from kvbench.report import intervals

ORDER = ("min", "p50", "p90", "p95", "p99", "p999", "max")


@settings(max_examples=80, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_quantiles_are_numpys_inverted_cdf_and_never_cross(values: list[float]) -> None:
    found = intervals.describe(np.array(values))
    for name, q in QUANTILES.items():
        assert found[name] == np.quantile(values, q, method="inverted_cdf")
    row = [found[name] for name in ORDER]
    assert row == sorted(row)
    assert found["min"] <= found["mean"] <= found["max"]
    assert found["n"] == len(values)


@pytest.mark.parametrize("n", [5, 30, 100, 999, 1000, 20_000])
@pytest.mark.parametrize("q", [0.5, 0.9, 0.99, 0.999])
def test_quantile_interval_is_the_binomial_one(n: int, q: float) -> None:
    ordered = np.arange(1.0, n + 1)  # the k-th order statistic is k
    low, high = intervals.quantile_interval(ordered, q)
    below, above = int(stats.binom.ppf(0.025, n, q)), int(stats.binom.ppf(0.975, n, q)) + 1
    assert low == (below if below >= 1 else None)
    assert high == (above if above <= n else None)


def test_quantile_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    truth = stats.expon.ppf(0.9)
    held = 0
    for _ in range(400):
        low, high = intervals.quantile_interval(np.sort(rng.exponential(size=200)), 0.9)
        held += low is not None and high is not None and low <= truth <= high
    assert held >= 0.93 * 400  # at least 95 %, less what 400 trials leave to chance


def test_p99_of_few_values_has_no_upper_bound() -> None:
    low, high = intervals.quantile_interval(np.arange(100.0), 0.99)
    assert low is not None
    assert high is None


def test_bootstrap_agrees_with_the_standard_error_of_independent_values() -> None:
    values = np.random.default_rng(2).exponential(size=4000)
    found = intervals.ratio_interval(values, np.ones(4000), seed=3)
    assert found is not None
    width = 2 * 1.96 * values.std() / np.sqrt(4000)
    assert found[1] - found[0] == pytest.approx(width, rel=0.15)
    assert found[0] < values.mean() < found[1]
    assert found == intervals.ratio_interval(values, np.ones(4000), seed=3)  # seeded


def test_bootstrap_is_wider_where_neighbours_resemble_each_other() -> None:
    """AR(1) with coefficient 0.8: the mean's true standard error is sqrt((1 + 0.8) / (1 - 0.8)) = 3 times the naive one."""
    rng = np.random.default_rng(4)
    noise, values = rng.normal(size=8000), np.zeros(8000)
    for k in range(1, 8000):
        values[k] = 0.8 * values[k - 1] + noise[k]
    found = intervals.ratio_interval(values, np.ones(8000))
    assert found is not None
    naive = 2 * 1.96 * values.std() / np.sqrt(8000)
    assert 2.0 < (found[1] - found[0]) / naive < 3.3


def test_mean_over_gaps_resamples_requests_not_gaps() -> None:
    """Ten requests of 100 equal gaps each are ten facts, not a thousand."""
    means = np.linspace(0.01, 0.02, 10)
    found = intervals.describe_gaps(np.repeat(means, 100), list(means * 100), [100] * 10)
    assert found["mean"] == pytest.approx(0.015)
    low, high = found["interval"]["mean"]
    assert high - low > 0.003  # 1,000 independent gaps would give 0.0004
    assert "p99" not in found["interval"]


def test_too_little_says_why() -> None:
    assert intervals.ratio_interval(np.ones(9), np.ones(9)) is None
    none = intervals.describe(np.zeros(0))
    assert none["p50"] is None
    assert none["n"] == 0
    assert none["reason"] == "no sample"


@pytest.mark.parametrize(("n", "supported"), [(999, False), (1000, True)])
def test_p99_is_supported_from_a_thousand(n: int, supported: bool) -> None:
    assert intervals.describe(np.arange(float(n)))["supported"]["p99"] is supported
