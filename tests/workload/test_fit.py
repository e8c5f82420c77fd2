"""Power-law fits: known exponents come back, other laws are told apart, and the likelihood is the one scipy would maximise."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import zeta

from kvbench.workload.fit import CANDIDATES, exponential_tail, fit_lognormal, fit_power_law, lognormal_tail, mle, sample_power_law
from kvbench.workload.traces import read

DATA = Path(__file__).parents[1] / "data/traces"


def pareto(alpha: float, xmin: int, size: int, seed: int) -> np.ndarray:
    """Discrete power-law draws made without our code: numpy's Zipf sampler, what lies below xmin thrown away."""
    rng = np.random.default_rng(seed)
    out: list[np.ndarray] = []
    while sum(map(len, out)) < size:
        draws = rng.zipf(alpha, 10 * size)
        out.append(draws[draws >= xmin])
    return np.concatenate(out)[:size]


@pytest.mark.parametrize(("alpha", "xmin"), [(1.8, 5), (2.5, 1), (3.5, 3)])
def test_a_known_exponent_comes_back_within_its_standard_error(alpha: float, xmin: int) -> None:
    fits = [fit_power_law(pareto(alpha, xmin, 1000, seed), bootstraps=0, xmin=xmin) for seed in range(10)]
    z = np.array([(fit.alpha - alpha) / fit.se for fit in fits])
    assert abs(z.mean()) < 4 / math.sqrt(10)  # no bias beyond four standard errors of the mean
    assert 0.35 < z.std() < 1.8  # and the standard errors are of the right size: 99.9 % range of a chi of 9 degrees
    assert np.abs(z).max() < 4


def test_the_start_of_the_tail_is_found() -> None:
    rng = np.random.default_rng(3)
    body = rng.integers(1, 40, 1000)
    fit = fit_power_law(np.concatenate([body, pareto(2.3, 40, 1000, 7)]), bootstraps=40, seed=1)
    assert 36 <= fit.xmin <= 60
    assert abs(fit.alpha - 2.3) < 4 * fit.se
    assert not fit.rejected
    assert fit.better is None
    assert (fit.n, fit.largest >= fit.xmin, fit.at_bound) == (2000, True, False)


def test_the_exponent_is_the_one_that_maximises_the_zeta_likelihood() -> None:
    for alpha, xmin in ((1.5, 1), (2.2, 7), (6.0, 100)):
        x = sample_power_law(alpha, xmin, 500, np.random.default_rng(8))
        mean_log = float(np.log(x).mean())

        def loss(a: float, xmin: int = xmin, mean_log: float = mean_log) -> float:
            return math.log(zeta(a, xmin)) + a * mean_log

        best = minimize_scalar(loss, bounds=(1.01, 20), method="bounded", options={"xatol": 1e-9})
        assert mle(np.array([float(xmin)]), np.array([mean_log]))[0] == pytest.approx(best.x, abs=1e-5)


def test_the_ks_distance_is_the_largest_gap_between_the_distribution_functions() -> None:
    x = pareto(2.0, 2, 300, 6)
    fit = fit_power_law(x, bootstraps=0, xmin=2)
    grid = np.arange(2, x.max() + 1)
    model = np.cumsum(grid**-fit.alpha) / zeta(fit.alpha, 2)
    sample = np.searchsorted(np.sort(x), grid, "right") / len(x)
    assert fit.ks == pytest.approx(np.abs(model - sample).max(), abs=1e-9)


def test_draws_follow_the_law_near_and_far() -> None:
    alpha, xmin, n = 1.6, 3, 200_000
    x = sample_power_law(alpha, xmin, n, np.random.default_rng(2))
    assert x.min() == xmin
    for k in (xmin + 1, 10, 1000, 1300, 50_000):  # the table ends at 3 + 64 * 3 + 1024
        p = zeta(alpha, k) / zeta(alpha, xmin)
        assert abs((x >= k).mean() - p) < 5 * math.sqrt(p * (1 - p) / n)


def test_lognormal_lengths_are_rejected() -> None:
    x = np.maximum(1, np.rint(np.random.default_rng(5).lognormal(math.log(150), 1.0, 5000))).astype(int)
    fit = fit_power_law(x, bootstraps=20)
    assert fit.rejected
    assert fit.p is not None
    assert fit.p < 0.1
    assert fit.better is not None
    assert fit.better.name == "lognormal"
    whole = fit_lognormal(x)
    assert whole.median == pytest.approx(150, rel=0.05)
    assert whole.sigma == pytest.approx(1.0, rel=0.05)
    assert whole.ks < 0.02


def test_exponential_lengths_are_rejected_and_named() -> None:
    x = np.random.default_rng(5).geometric(1 / 200, 3000)
    fit = fit_power_law(x, bootstraps=20, xmin=50)
    assert fit.rejected
    rival = next(r for r in fit.rivals if r.name == "exponential")
    assert rival.parameters["rate"] == pytest.approx(-math.log(1 - 1 / 200), rel=0.1)
    assert rival.ratio < 0
    assert rival.p < 1e-6


def test_a_true_power_law_is_rarely_rejected() -> None:
    rejected = sum(fit_power_law(pareto(2.5, 4, 200, seed), bootstraps=10, seed=seed).rejected for seed in range(8))
    assert rejected <= 4  # p is uniform under the law: 1 of 8 expected, 5 or more with a chance below 1e-3


def test_rivals_are_probabilities_on_the_tail() -> None:
    values = np.arange(7, 20_000)
    counts = np.where(values < 500, 2000, 0)
    for rival in (lognormal_tail, exponential_tail):
        _, _, log_p = rival(values, counts)
        assert np.exp(log_p).sum() == pytest.approx(1.0, abs=1e-6)  # the rest lies beyond the last value


def test_the_same_seed_gives_the_same_answer() -> None:
    x = pareto(2.2, 1, 500, 1)
    assert fit_power_law(x, 10, seed=4) == fit_power_law(x, 10, seed=4)


def test_many_distinct_values_are_searched_on_a_grid() -> None:
    x = np.unique(np.random.default_rng(0).integers(1, 10**6, 20_000))
    assert len(x) > 100 * CANDIDATES
    assert fit_power_law(x, bootstraps=0).tail >= 0.1 * len(x)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        ([1, 2, 3], "3 values: fitting a tail needs at least 50"),
        ([7] * 60, "all 60 values are 7"),
        ([0, *range(1, 60)], "whole numbers of at least 1"),
        ([1.5] * 60, "whole numbers of at least 1"),
    ],
)
def test_what_cannot_be_fitted_is_refused(x: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fit_power_law(x)


def test_a_start_beyond_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match="fitting a tail needs at least 50"):
        fit_power_law(range(1, 100), xmin=90)


def test_real_lengths_can_be_fitted() -> None:
    lengths = [row.n_out for row in read(DATA / "azure_conv.csv").rows]
    fit = fit_power_law(lengths, bootstraps=10)
    assert fit.xmin in lengths
    assert fit.tail == sum(n >= fit.xmin for n in lengths)
