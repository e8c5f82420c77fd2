"""Every load shape against what it claims: one suite over the dict, so that a new shape is tested by being in it."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from kvbench.workload.arrivals import ARRIVALS
from kvbench.workload.schedule import Schedule

UNTIL = 120.0  # seconds of shape time looked at
EVERY = sorted(ARRIVALS)
CHOICE = [name for name in EVERY if ARRIVALS[name].model_fields.get("process")]  # shapes with a choice of process


def shape(name: str, **more: Any) -> Any:
    cls: Any = ARRIVALS[name]
    return cls.model_validate({**cls.example, **more}, context={"text": True})


def dues(arrivals: Any, seed: int, until: float = UNTIL, level: float = 1.0) -> np.ndarray:
    schedule = Schedule(arrivals, np.random.default_rng(seed), level)
    return np.array(list(itertools.takewhile(lambda due: due < until, iter(schedule.pop, math.inf))))


CASES = [  # every shape under every process it has
    (name, process)
    for name in EVERY
    for process in (("poisson", "deterministic") if name in CHOICE else (ARRIVALS[name].process,))
]


def with_process(name: str, process: str) -> Any:
    return shape(name, process=process) if name in CHOICE else shape(name)


@pytest.mark.parametrize("name", EVERY)
def test_exposure_is_the_integral_of_rate_plus_impulses(name: str) -> None:
    """A shape that has impulses says how many requests they brought before t (`impulses`); the rest is the rate's."""
    arrivals = shape(name)
    impulses = getattr(arrivals, "impulses", lambda t: 0)
    assert arrivals.exposure(0.0) == arrivals.exposure(-1.0) == 0
    for a, b in itertools.pairwise(np.arange(0, UNTIL + 0.5, 0.5)):
        edges = np.linspace(a, b, 501)
        rates = np.array([arrivals.rate(t) for t in (edges[1:] + edges[:-1]) / 2])
        assert (rates >= 0).all()
        # the midpoint rule misses at most a cell's jump of the rate at each kink
        kinks = np.abs(np.diff(rates)).sum() * 0.001
        grown = arrivals.exposure(b) - arrivals.exposure(a)
        assert grown == pytest.approx(rates.sum() * 0.001 + impulses(b) - impulses(a), abs=1e-6 + kinks)
        assert grown >= -1e-9


@pytest.mark.parametrize("name", EVERY)
def test_rate_stays_within_its_peak(name: str) -> None:
    arrivals = shape(name)
    for until in (0.3, 7.0, 25.0, UNTIL):
        most = max(arrivals.rate(t) for t in np.linspace(0, until, 1000, endpoint=False))
        assert most <= arrivals.peak(until) * (1 + 1e-12)
        assert arrivals.peak(until) <= arrivals.peak()


@pytest.mark.parametrize(("name", "process"), CASES)
def test_dues_are_nondecreasing_reproducible_and_seeded(name: str, process: str) -> None:
    arrivals = with_process(name, process)
    once, again, other = dues(arrivals, 1), dues(with_process(name, process), 1), dues(arrivals, 2)
    assert len(once) > 100
    assert (np.diff(once) >= 0).all()
    assert once[0] >= 0
    assert (once == again).all()
    assert (len(once) == len(other) and (once == other).all()) == (process == "deterministic")


@pytest.mark.parametrize(("name", "process"), CASES)
@pytest.mark.parametrize("level", [0.37, 1.5])
def test_counts_follow_the_exposure(name: str, process: str, level: float) -> None:
    """Deterministic: exact to one request. Poisson: within 4 sigma in every interval, summed over seeds. Else: the mean."""
    arrivals = with_process(name, process)
    edges = np.arange(0, UNTIL + 10, 10)
    expected = level * np.diff([arrivals.exposure(t) for t in edges])
    seeds = 1 if process == "deterministic" else 8
    counts = sum(np.histogram(dues(arrivals, seed, UNTIL + 10, level), edges)[0] for seed in range(seeds))
    if process == "deterministic":
        assert (np.abs(counts - expected) <= 1).all()
    elif process == "poisson":
        assert (np.abs(counts - seeds * expected) <= 4 * np.sqrt(seeds * expected)).all()
    else:
        assert counts.sum() == pytest.approx(seeds * expected.sum(), rel=0.1)


@pytest.mark.parametrize(("name", "process"), [pair for pair in CASES if pair[1] == "poisson"])
def test_poisson_is_poisson(name: str, process: str) -> None:
    """Exposure at the dues is a unit Poisson process: exponential gaps, dispersion index 1, no autocorrelation.

    At impulses the position within the jump is unknown, so shapes with impulses are looked at through their counts alone.
    """
    arrivals = with_process(name, process)
    runs = [np.array([arrivals.exposure(t) for t in dues(arrivals, seed)]) for seed in range(5)]
    if not np.isin(0.0, np.concatenate([np.diff(run) for run in runs])).any():
        gaps = np.concatenate([np.diff(run, prepend=0.0) for run in runs])
        assert stats.kstest(gaps, "expon").pvalue > 1e-4
        lagged = np.corrcoef(gaps[:-1], gaps[1:])[0, 1]
        assert abs(lagged) < 4 / math.sqrt(len(gaps))
    edges = np.arange(0, UNTIL, 2.0)
    expected = np.diff([arrivals.exposure(t) for t in edges])
    counts = np.array([np.histogram(dues(arrivals, seed), edges)[0] for seed in range(16)])
    dispersion = ((counts - expected) ** 2)[:, expected > 0] / expected[expected > 0]
    # chi-square over its degrees of freedom: mean 1, variance 2 + 1/mu per cell
    spread = math.sqrt((2 + 1 / expected[expected > 0]).mean() / dispersion.size)
    assert abs(dispersion.mean() - 1) < 4 * spread


@pytest.mark.parametrize("name", [name for name in EVERY if name not in CHOICE])
def test_gaps_have_the_claimed_law(name: str) -> None:
    arrivals = shape(name)
    gaps = np.fromiter(itertools.islice(arrivals.gaps(np.random.default_rng(3)), 100_001), float)[1:]
    law = {
        "deterministic": None,
        "poisson": stats.expon(),
        "gamma": stats.gamma(1 / getattr(arrivals, "cv", 1) ** 2, scale=getattr(arrivals, "cv", 1) ** 2),
        "pareto": stats.pareto(getattr(arrivals, "tail", 2), scale=1 - 1 / getattr(arrivals, "tail", 2)),
    }[arrivals.process]
    if law is None:
        assert (gaps == 1).all()
        return
    assert law.mean() == pytest.approx(1)
    assert stats.kstest(gaps, law.cdf).pvalue > 1e-4
    assert abs(np.corrcoef(np.log(gaps)[:-1], np.log(gaps)[1:])[0, 1]) < 4 / math.sqrt(len(gaps))


@pytest.mark.parametrize(("name", "process"), CASES)
def test_asking_ahead_and_releveling_to_the_same_level_change_nothing(name: str, process: str) -> None:
    """Split invariance: however the run is cut up, the dues are those of the run in one piece."""
    arrivals = with_process(name, process)
    whole = dues(arrivals, 5, 60.0)
    schedule = Schedule(arrivals, np.random.default_rng(5))
    pieces: list[float] = []
    for cut in np.arange(0, 60.0, 3.3):
        schedule.relevel(1.0, cut)
        schedule.relevel(1.0, cut)
        peeked = [schedule.ahead(k) for k in range(5)]
        assert peeked[0] == schedule.due
        before = len(pieces)
        while schedule.due <= min(cut + 3.3, 60.0):
            pieces.append(schedule.pop())
        assert peeked[: len(pieces) - before] == pieces[before : before + 5]
    # a nanosecond: solved from the last change on, a due time is another rounding of the same number
    assert pieces[: len(whole)] == pytest.approx(whole, abs=2e-9)


@pytest.mark.parametrize(("name", "process"), CASES)
def test_a_pause_delays_by_the_exposure_it_takes_away(name: str, process: str) -> None:
    """Level 1 until 20 s, 0 until 30 s, then 2: each request comes where the exposure left over reaches its mark."""
    arrivals = with_process(name, process)
    pause, resume = (arrivals.exposure(t) for t in (20.0, 30.0))

    def progress(t: float) -> float:
        return arrivals.exposure(min(t, 20.0)) if t < 30.0 else pause + 2 * (arrivals.exposure(t) - resume)

    schedule = Schedule(arrivals, np.random.default_rng(9))
    schedule.relevel(0.0, 20.0)
    taken = []
    while schedule.due <= 20.0:
        taken.append(schedule.pop())
    assert schedule.due == schedule.ahead(7) == math.inf
    schedule.relevel(2.0, 30.0)
    assert schedule.due >= 30.0
    while schedule.due < 60.0:
        taken.append(schedule.pop())
    marks = itertools.accumulate(arrivals.gaps(np.random.default_rng(9)))
    for due, mark in zip(taken, marks, strict=False):
        assert progress(due - 2e-9) - 1e-6 <= mark <= progress(due + 2e-9) + 1e-6
    assert taken[-1] > 50.0
    if process == "deterministic":
        assert len(taken) == pytest.approx(progress(60.0), abs=1)


@pytest.mark.parametrize("name", EVERY)
def test_a_shape_survives_being_written_down(name: str) -> None:
    arrivals = shape(name)
    assert type(arrivals).model_validate(arrivals.model_dump()) == arrivals
    assert type(arrivals).__doc__
    assert all(field.description for field in type(arrivals).model_fields.values())
