"""Does a column of token counts follow a power law, from where on, and would something else fit its tail better?

The method of Clauset, Shalizi and Newman, "Power-law distributions in empirical data", SIAM Review 51 (2009), for integers:
p(x) = x^-alpha / zeta(alpha, xmin) for x >= xmin; alpha by maximum likelihood, xmin by the least Kolmogorov-Smirnov distance, a
p-value by refitting samples drawn from the fit, and Vuong's test (Econometrica 57, 1989) against other laws on the same tail.
Two departures, in the data and in the samples alike: xmin is sought on at most CANDIDATES quantiles instead of on all values
(for speed), and only where at least TAIL values and a TAIL_SHARE of all remain (a law of the last few requests makes no traffic;
any smooth tail looks like a power law if cut far enough out).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize
from scipy.special import log_ndtr, zeta

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CANDIDATES = 60  # values of xmin tried
TAIL = 50  # fewest values at or above xmin; below, estimates of alpha are biased (section 3.3 of the paper)
TAIL_SHARE = 0.1  # and the least share of all values
ALPHA = (1.0001, 25.0)  # the range searched; beyond it the tail is a cut-off and no power law
REJECT = 0.1  # the paper's: a power law with p below this is ruled out
_TABLE = 2**16  # sampled exactly this far above xmin, by rounding the continuous law beyond (error below 1e-9 there)


@dataclass(frozen=True)
class Rival:
    """Another law fitted to the same tail. gap: mean log-likelihood of a value under the power law less that under this law;
    ratio: Vuong's normalised form of it, above 0 where the power law is the likelier; p: the chance of so large a ratio where
    neither is better."""

    name: str
    parameters: dict[str, float]
    gap: float
    ratio: float
    p: float


@dataclass(frozen=True)
class Fit:
    """A power law fitted to the `tail` values >= xmin of n. se: standard error of alpha, xmin taken as known. p: None without
    bootstraps."""

    alpha: float
    se: float
    xmin: int
    ks: float
    n: int
    tail: int
    largest: int
    at_bound: bool
    bootstraps: int
    p: float | None
    rivals: tuple[Rival, ...]

    @property
    def rejected(self) -> bool:
        """Whether the data rule a power law out: p below 0.1, or an exponent at the edge of the range searched."""
        return self.at_bound or (self.p is not None and self.p < REJECT)

    @property
    def better(self) -> Rival | None:
        """The rival that beats the power law with p < 0.1, the likeliest if several do."""
        ahead = [rival for rival in self.rivals if rival.ratio < 0 and rival.p < REJECT]
        return min(ahead, key=lambda rival: rival.gap, default=None)


@dataclass(frozen=True)
class _Tail:
    """The best power law in a sample and what it left: distinct values from xmin on, and how often each occurs."""

    alpha: float
    xmin: int
    ks: float
    values: Ints
    counts: Ints


def fit_power_law(x: ArrayLike, bootstraps: int = 100, seed: int = 0, xmin: int | None = None) -> Fit:
    """Fit the tail of positive integers x, from `xmin` on if given. `bootstraps` refits give p to about 0.5 / sqrt(bootstraps).

    Raises ValueError where x (or its part from xmin on) is not positive integers, too few (< TAIL) or all the same.
    """
    sample = _positive(x)
    if xmin is not None:
        _positive(sample[sample >= xmin])
    best = _search(sample, xmin)
    n, tail = len(sample), int(best.counts.sum())
    rng = np.random.default_rng(seed)
    body = sample[sample < best.xmin]
    worse = 0
    for _ in range(bootstraps):
        fresh = rng.binomial(n, tail / n)  # a share of the sample follows the law, the rest is drawn from the body
        drawn = sample_power_law(best.alpha, best.xmin, fresh, rng)
        drawn = np.concatenate([drawn, rng.choice(body, n - fresh)]) if len(body) else drawn
        worse += _search(drawn, xmin).ks >= best.ks
    return Fit(
        alpha=best.alpha,
        se=_standard_error(best.alpha, best.xmin, tail),
        xmin=best.xmin,
        ks=best.ks,
        n=n,
        tail=tail,
        largest=int(sample.max()),
        at_bound=best.alpha > ALPHA[1] - 0.01,
        bootstraps=bootstraps,
        p=worse / bootstraps if bootstraps else None,
        rivals=tuple(_vuong(best, *rival(best.values, best.counts)) for rival in RIVALS.values()),
    )


def _positive(x: ArrayLike) -> Ints:
    values = np.asarray(x)
    if values.ndim != 1 or len(values) < TAIL:
        raise ValueError(f"{values.size} values: fitting a tail needs at least {TAIL} in one column")
    if not np.issubdtype(values.dtype, np.integer) or values.min() < 1:
        raise ValueError("values must be whole numbers of at least 1")
    if values.min() == values.max():
        raise ValueError(f"all {len(values)} values are {values[0]}: there is nothing to fit; use {{dist: fixed}}")
    return values.astype(np.int64)


def _search(sample: Ints, xmin: int | None) -> _Tail:
    """xmin and alpha of the least KS distance among the candidates, or at the first value from the given xmin on."""
    values, counts = np.unique(sample, return_counts=True)
    above = counts[::-1].cumsum()[::-1]  # sample values >= values[i]
    usable = np.flatnonzero(above >= max(TAIL, TAIL_SHARE * above[0]))[: len(values) - 1]
    if xmin is not None:
        usable = np.searchsorted(values, [xmin])
    elif len(usable) > CANDIDATES:  # quantiles of the sample, not of its distinct values
        at = np.searchsorted(-above[usable], -above[usable[0]] * (1 - np.linspace(0, 1, CANDIDATES)), "left")
        usable = np.unique(usable[np.minimum(at, len(usable) - 1)])
    logs = (counts * np.log(values))[::-1].cumsum()[::-1]
    alphas = mle(values[usable].astype(float), logs[usable] / above[usable])
    distances = [_ks(values[i:], counts[i:], alpha) for i, alpha in zip(usable, alphas, strict=True)]
    at_best = int(np.argmin(distances))
    i = usable[at_best]
    return _Tail(float(alphas[at_best]), int(values[i]), distances[at_best], values[i:], counts[i:])


def mle(xmin: Floats, mean_log: Floats) -> Floats:
    """Maximum-likelihood alpha for each tail: its xmin and its mean of ln x. Bisection on the slope of the log-likelihood."""
    low, high = np.full(len(xmin), ALPHA[0]), np.full(len(xmin), ALPHA[1])
    step = 1e-5
    for _ in range(40):  # 24 / 2^40: to 1e-10
        middle = (low + high) / 2
        slope = np.log(zeta(middle + step, xmin) / zeta(middle - step, xmin)) / (2 * step)
        rises = -slope > mean_log  # the likelihood still rises with alpha
        low, high = np.where(rises, middle, low), np.where(rises, high, middle)
    found: Floats = (low + high) / 2
    return found


def _ks(values: Ints, counts: Ints, alpha: float) -> float:
    """Largest distance between the two distribution functions, on both sides of every jump of the sample's."""
    ours = np.concatenate([[0.0], counts.cumsum()]) / counts.sum()
    reach = zeta(alpha, values.astype(float))  # times P(X >= x)
    after = np.abs(1 - (reach - np.exp(-alpha * np.log(values))) / reach[0] - ours[1:])  # zeta(a, x + 1) = zeta(a, x) - x^-a
    before = np.abs(1 - reach / reach[0] - ours[:-1])
    return float(max(after.max(), before.max()))


def _standard_error(alpha: float, xmin: int, tail: int) -> float:
    """1 / sqrt(tail * (zeta''/zeta - (zeta'/zeta)^2)): the Fisher information of one value is the curvature of ln zeta."""
    step = 1e-3
    at = np.log(zeta(np.array([alpha - step, alpha, alpha + step]), float(xmin)))
    return float(1 / math.sqrt(tail * (at[0] - 2 * at[1] + at[2]) / step**2))


def sample_power_law(alpha: float, xmin: int, size: int, rng: np.random.Generator) -> Ints:
    """`size` draws of the discrete power law, by inverting its distribution function."""
    u = 1 - rng.random(size)  # (0, 1]
    near = min(_TABLE, 64 * xmin + 1024)
    survival = zeta(alpha, np.arange(xmin + 1, xmin + near + 1, dtype=float)) / zeta(alpha, float(xmin))  # P(X > x), falling
    out = xmin + np.searchsorted(-survival, -u, "left")
    far = out >= xmin + near
    edge = xmin + near
    limit = float(2**53)
    out[far] = np.minimum((edge - 0.5) * (u[far] / survival[-1]) ** (-1 / (alpha - 1)) + 0.5, limit).astype(np.int64)
    return out.astype(np.int64)


def lognormal_tail(values: Ints, counts: Ints) -> tuple[str, dict[str, float], Floats]:
    """Lognormal rounded to integers and cut at the least value: (name, {mu, sigma}, log-probability of each value)."""
    logs = np.log(values)
    mean = float(np.average(logs, weights=counts))
    spread = max(1e-3, float(np.sqrt(np.average((logs - mean) ** 2, weights=counts))))

    def log_p(theta: Floats) -> Floats:
        mu, sigma = theta[0], math.exp(theta[1])
        low, high = (np.log(values - 0.5) - mu) / sigma, (np.log(values + 0.5) - mu) / sigma
        flip = low > 0  # the mirror image keeps the difference of two near-ones apart
        low, high = np.where(flip, -high, low), np.where(flip, -low, high)
        top = log_ndtr(high)
        found: Floats = top + np.log(-np.expm1(np.minimum(log_ndtr(low) - top, -1e-300)))
        found -= log_ndtr(-(math.log(values[0] - 0.5) - mu) / sigma)
        return found

    # a lognormal whose mu runs to -inf is a power law: mu is held within 30 of the tail
    bounds = [(math.log(values[0]) - 30, float(logs[-1])), (math.log(1e-3), math.log(30))]

    def loss(theta: Floats) -> float:
        return -float(np.average(log_p(theta), weights=counts))

    best = minimize(loss, np.array([mean, math.log(spread)]), bounds=bounds)
    return "lognormal", {"mu": float(best.x[0]), "sigma": math.exp(best.x[1])}, log_p(best.x)


def exponential_tail(values: Ints, counts: Ints) -> tuple[str, dict[str, float], Floats]:
    """Geometric from the least value on: p(x) = (1 - e^-rate) e^(-rate (x - xmin)); its maximum likelihood is in closed form."""
    beyond = values - values[0]
    rate = math.log1p(1 / float(np.average(beyond, weights=counts)))
    return "exponential", {"rate": rate}, math.log(-math.expm1(-rate)) - rate * beyond


def _vuong(best: _Tail, name: str, parameters: dict[str, float], theirs: Floats) -> Rival:
    ours = -best.alpha * np.log(best.values) - math.log(zeta(best.alpha, float(best.xmin)))
    gap, n = ours - theirs, int(best.counts.sum())
    mean = float(np.average(gap, weights=best.counts))
    spread = math.sqrt(float(np.average((gap - mean) ** 2, weights=best.counts)))
    ratio = math.sqrt(n) * mean / spread if spread > 0 else 0.0
    return Rival(name, parameters, mean, ratio, math.erfc(abs(ratio) / math.sqrt(2)))


@dataclass(frozen=True)
class Whole:
    """A lognormal fitted to all values. ks: its distance from them."""

    median: float
    sigma: float
    ks: float


def fit_lognormal(x: ArrayLike) -> Whole:
    """Median and sigma of ln x by maximum likelihood over all values, and the KS distance. Raises as fit_power_law."""
    values, counts = np.unique(_positive(x), return_counts=True)
    logs = np.log(values)
    mu = float(np.average(logs, weights=counts))
    sigma = math.sqrt(float(np.average((logs - mu) ** 2, weights=counts)))
    model = np.exp(log_ndtr((np.log(values + 0.5) - mu) / sigma))
    ours = counts.cumsum() / counts.sum()
    return Whole(math.exp(mu), sigma, float(np.abs(model - ours).max()))


RIVALS = {"lognormal": lognormal_tail, "exponential": exponential_tail}
