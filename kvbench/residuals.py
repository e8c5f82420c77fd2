"""What a metric should be under this load, and how far from it a healthy window strays: a robust regression on the load.

Load is the offered rate of the window and of the time before it (smoothed: a server's cache and queue lag what is offered). A
straight line, fitted by Huber's weights, carries the expectation to loads never seen. Its residuals in the windows nearest in
load correct it (median) and give the spread (MAD, or that of the bad side alone where it is wider), so that neither a bend nor
noise that grows with load is an anomaly. The interval is widened for few windows (Student's t; those alike their neighbours in
time count for less), for leverage, and by all of what the line adds beyond the loads that were seen.
"""

import math
from collections import deque
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbench.core import Seconds, Window
from kvbench.metrics.names import Name

Floats = NDArray[np.float64]
LAGS: tuple[Seconds, ...] = (20.0, 60.0)  # time constants of the smoothed rates: residence times of short and long answers
KEPT = 720  # windows a model remembers: two hours of 10 s
NEAR = 40  # windows nearest in load whose residuals count
MAD = 1.482602218505602  # 1 / norm.ppf(0.75): makes the MAD a sigma under normal noise
TENTH = 1.2815515655446004  # norm.ppf(0.9): sigmas beyond which a tenth of normal noise lies on one side
AFRESH = 1.2  # a window the fit has not seen lies further out than those it was made of, and loads that shift add to that
EFFICIENCY = 0.37  # of the MAD beside the standard deviation: so many degrees of freedom a window
HUBER = 1.345  # in sigmas: 95 % efficient under normal noise
RIDGE = 1.0  # a prior of one window's weight on every standardised slope: none is believed before it is seen


class Expected(NamedTuple):
    """What a healthy window shows under this load, in the metric's unit; `z`: how many sigmas worse the value is, and the `sigma`
    that this is worth near `value`; `n`: windows it was learned from."""

    value: float
    sigma: float
    z: float
    n: int


class Load:
    """The offered load as the model sees it. `next` takes the windows in order."""

    def __init__(self) -> None:
        self._smooth: list[float] | None = None

    def next(self, window: Window) -> Floats:
        """Roots of requests/s [1 + len(LAGS)]: of this window, and smoothed. A root's Poisson noise is alike at all rates."""
        rate = float(window.values.get("offered_rate") or 0.0)
        length = window.end - window.start
        if self._smooth is None:
            self._smooth = [rate] * len(LAGS)
        for i, lag in enumerate(LAGS):
            self._smooth[i] += (rate - self._smooth[i]) * -math.expm1(-length / lag)
        return np.array([math.sqrt(each) for each in (rate, *self._smooth)])


class Residuals:
    """One metric's model. The caller decides which windows are healthy and may be learned."""

    def __init__(self, name: Name, sigma: float) -> None:
        self.name: Final = name
        self._limit = sigma  # at which the tail has to be right
        self._bend, self._back = scale(name)
        self._sign = {"low": 1.0, "high": -1.0, "": 0.0}[name.of.better]
        self._loads: deque[Floats] = deque(maxlen=KEPT)
        self._values: deque[float] = deque(maxlen=KEPT)
        self._fit: _Fit | None = None

    @property
    def n(self) -> int:
        return len(self._values)

    def learn(self, load: Floats, value: float, n: int) -> None:
        self._loads.append(load)
        self._values.append(self._bend(value))
        self._fit = None

    def judge(self, load: Floats, value: float, n: int) -> Expected:
        """`value` held against what was learned; at least two windows were."""
        if self._fit is None:
            self._fit = _Fit(np.array(self._loads), np.array(self._values), self._sign)
        middle, spread, dof = self._fit.at(load)
        expected = self._back(middle)
        least = self._bend(expected + resolution(self.name, expected)) - self._bend(expected)
        spread = AFRESH * max(spread, least) * _student(self._limit, dof)
        far = (self._bend(value) - middle) / spread
        sigma = abs(self._back(middle + spread) - expected)
        return Expected(expected, sigma, far * self._sign if self._sign else abs(far), self.n)


class Shares:
    """A share of requests (errors, sheds): binomial, its rate learned from healthy windows, uncertain as long as they are few."""

    def __init__(self, name: Name, sigma: float) -> None:
        self.name: Final = name
        self.n = 0
        self._bad, self._all = 0.5, 1.0  # Jeffreys' prior, as half a bad request of one
        self._high = name.of.better == "high"

    def learn(self, load: Floats, value: float, n: int) -> None:
        self.n += 1
        self._bad += n * (1 - value if self._high else value)
        self._all += n

    def judge(self, load: Floats, value: float, n: int) -> Expected:
        """The chance of at least so many bad requests of `n`, as sigmas of a normal."""
        bad = round(n * (1 - value if self._high else value))
        good = max(self._all - self._bad, 0.5)
        share, whole = self._bad / (self._bad + good), self._bad + good
        spread = math.sqrt(share * (1 - share) * (whole + n) / (whole + 1) / n)
        z = -NormalDist().inv_cdf(min(max(_chance(bad, n, self._bad, good), 1e-300), 1 - 1e-12))
        return Expected(1 - share if self._high else share, spread, z, self.n)


Model = Residuals | Shares


def model(name: Name, sigma: float) -> Model:
    """The model of a metric. hit_rate counts tokens, which come in lumps: no binomial."""
    kind = Shares if name.of.kind == "ratio" and name.metric != "hit_rate" else Residuals
    return kind(name, sigma)


def unexplained(loads: Floats, values: Floats) -> tuple[Floats, float]:
    """(what load does not explain of `values` [windows], in their own scale; the share of windows that tell something new)."""
    fit = _Fit(loads, values, 1.0)
    return fit.left, fit.news


def _chance(least: int, n: int, bad: float, good: float) -> float:
    """Of at least `least` bad in `n` under the beta-binomial law (Skellam), whose share has the density Beta(bad, good)."""
    if least <= 0:
        return 1.0
    log = math.lgamma
    term = math.exp(
        (log(n + 1) - log(least + 1) - log(n - least + 1))
        + (log(least + bad) + log(n - least + good) - log(n + bad + good))
        + (log(bad + good) - log(bad) - log(good))
    )
    total = term
    for k in range(least, n):
        term *= (n - k) / (k + 1) * (bad + k) / (good + n - k - 1)
        total += term
    return min(1.0, total)


class _Fit:
    """The line and the residuals of what was learned. sign: 1 where more is worse, -1 where less is, 0 where both are."""

    def __init__(self, loads: Floats, values: Floats, sign: float) -> None:
        self.sign = sign
        self.low, self.high = loads.min(axis=0), loads.max(axis=0)
        self.centre, width = loads.mean(axis=0), loads.std(axis=0)
        self.width = np.where(width > 1e-6, width, 1.0)
        self.x = (loads - self.centre) / self.width
        self.line, self.inverse = self._huber(np.column_stack([np.ones(len(values)), self.x]), values)
        self.left = values - self.line[0] - self.x @ self.line[1:]
        self.news = _news(self.left)

    def at(self, load: Floats) -> tuple[float, float, float]:
        """(expectation, sigma, degrees of freedom) under `load`, in the model's scale. Where one side is worse, a load below all
        that were seen is taken as the lowest: no server is worse for being asked less."""
        load = np.maximum(load, self.low) if self.sign else load
        x = (load - self.centre) / self.width
        inside = (np.clip(load, self.low, self.high) - self.centre) / self.width
        near = np.argsort(((self.x - inside) ** 2).sum(axis=1), kind="stable")[:NEAR]
        middle = float(np.median(self.left[near]))
        left = self.left[near] - middle
        spread = max(MAD * float(np.median(np.abs(left))), float(np.quantile(left * self.sign, 0.9)) / TENTH)
        row = np.concatenate([[1.0], x])
        leverage = float(row @ self.inverse @ row)
        beyond = float((x - inside) @ self.line[1:])
        dof = max(1.0, EFFICIENCY * (len(near) * self.news - 1))
        return float(row @ self.line) + middle, math.hypot(spread * math.sqrt(1 + leverage), beyond), dof

    def _huber(self, rows: Floats, values: Floats) -> tuple[Floats, Floats]:
        """Ridge regression, reweighted thrice: a window far off counts in proportion to how near it is."""
        prior = RIDGE * np.diag([0.0, *np.ones(rows.shape[1] - 1)])
        weights: NDArray[np.floating[Any]] = np.ones(len(values))
        for _ in range(4):
            inverse: NDArray[np.floating[Any]] = np.linalg.inv(rows.T @ (rows * weights[:, None]) + prior)
            line: NDArray[np.floating[Any]] = inverse @ (rows.T @ (weights * values))
            left = values - rows @ line
            scale = max(MAD * float(np.median(np.abs(left - np.median(left)))), 1e-9)
            weights = 1 / np.maximum(1.0, np.abs(left) / (HUBER * scale))
        return np.asarray(line, np.float64), np.asarray(inverse, np.float64)


def _news(left: Floats) -> float:
    """The share of windows that tell something new: (1 - r) / (1 + r), r the autocorrelation of their ranks within [0, 0.8]."""
    ranks = np.unique(left, return_inverse=True)[1].astype(float)
    ranks -= ranks.mean()
    total = float(ranks @ ranks)
    r = min(0.8, max(0.0, float(ranks[1:] @ ranks[:-1]) / total)) if total else 0.0
    return (1 - r) / (1 + r)


def scale(name: Name) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """The scale in which a metric's noise is most alike at all loads, and the way back: logarithms of latencies, roots else."""
    if name.of.kind == "latency":
        return (lambda value: math.log(max(value, 1e-6))), math.exp
    return (lambda value: math.sqrt(max(value, 0.0))), (lambda value: max(value, 0.0) ** 2)


def resolution(name: Name, value: float) -> float:
    """What a metric can tell apart near `value`: 2 % of it, and not less than 1 ms, 1 %, 0.1/s or half a count."""
    return max(0.02 * value, {"s": 1e-3, "share": 0.01, "/s": 0.1}.get(name.of.unit, 0.5))


def _student(sigma: float, dof: float) -> float:
    """How much further than under the normal `sigma` lies under Student's t (Cornish and Fisher's expansion)."""
    s = sigma * sigma
    return 1 + (s + 1) / (4 * dof) + (5 * s * s + 16 * s + 3) / (96 * dof * dof)
