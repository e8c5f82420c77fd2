"""Load shapes against numbers worked out by hand, and what they refuse."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from kvbench.workload.arrivals import ARRIVALS, Burst, Constant, Gamma, Pareto, Poisson, Ramp, Stair, Wave
from kvbench.workload.chaos import Chaos, Regimes
from kvbench.workload.schedule import Schedule


def take(arrivals: Any, count: int, **at: float) -> list[float]:
    schedule = Schedule(arrivals, np.random.default_rng(1), **at)
    return [schedule.pop() for _ in range(count)]


def test_constant_is_k_over_rate() -> None:
    assert take(Constant(rate=4), 5) == [0, 0.25, 0.5, 0.75, 1.0]
    assert take(Constant(rate=4), 3, start=10.0, level=2.0) == [10, 10.125, 10.25]


@pytest.mark.parametrize("cls", [Constant, Poisson])
def test_an_infinite_rate_is_everything_at_once(cls: Any) -> None:
    assert take(cls.model_validate({"rate": "inf"}, context={"text": True}), 5000, start=3.0) == [3.0] * 5000


def test_ramp_by_hand() -> None:
    """0 to 10/s over 10 s brings 50 requests (a triangle), then 10/s; request 2 comes at sqrt(4) s, since t^2 / 2 = 2."""
    ramp = Ramp(start=0, end=10, over=10, process="deterministic")
    assert ramp.exposure(10) == 50
    assert ramp.exposure(12) == 70
    assert take(ramp, 51)[2] == pytest.approx(2.0, abs=1e-9)
    assert take(ramp, 53)[50:] == pytest.approx([10.0, 10.1, 10.2])
    assert Ramp(start=10, end=2, over=10).exposure(20) == 80


def test_a_ramp_down_to_zero_ends() -> None:
    """20 to 0/s over 10 s brings 100 requests, numbers 0 to 99, and no more."""
    schedule = Schedule(Ramp(start=20, end=0, over=10, process="deterministic"), np.random.default_rng(1))
    dues = [schedule.pop() for _ in range(100)]
    assert dues[99] == pytest.approx(10 - 1.0, abs=1e-6)  # one request of exposure is left: (10 - t)^2 = 1
    assert schedule.due >= 10
    assert schedule.ahead(3) == math.inf


def test_burst_instants_are_exact_and_shared() -> None:
    burst = Burst(requests=100, every=0.1, first=0.3)
    dues = take(burst, 1000)
    assert [len(list(group)) for _, group in itertools.groupby(dues)] == [100] * 10
    assert dues[::100] == [0.3 + k * 0.1 for k in range(10)]
    assert burst.exposure(0.3) == 0
    assert burst.exposure(0.3001) == 100


def test_a_burst_starts_at_zero_and_can_stand_alone() -> None:
    schedule = Schedule(Burst(requests=3), np.random.default_rng(1), start=5.0)
    assert [schedule.pop() for _ in range(3)] == [5.0] * 3
    assert schedule.due == math.inf
    with pytest.raises(ValueError, match="nothing is due"):
        schedule.pop()


def test_burst_over_background() -> None:
    """2/s and 10 more at 0, 5, 10: 10 at once, then every half second; exposure 20 is reached just before the burst at 5 s."""
    dues = take(Burst(requests=10, every=5, background=2), 41)
    assert dues[:10] == [0.0] * 10
    assert dues[10:20] == pytest.approx(np.arange(10) / 2, abs=1e-9)
    assert dues[20:30] == pytest.approx([5.0] * 10, abs=1e-9)
    assert dues[40] == pytest.approx(10.0, abs=1e-9)


def test_a_level_scales_a_burst() -> None:
    assert take(Burst(requests=10, every=5), 31, level=1.5)[::15] == [0.0, 5.0, 10.0]


def test_stair_is_compounded_and_capped() -> None:
    """+20 % every 300 s from 10/s: 10, 12, 14.4, 17.28, then held at 20; 300 x (10 + 12 + 14.4) requests by 900 s."""
    stair = Stair(start=10, step=0.2, every=300, max=20)
    assert [stair.rate(t) for t in (0, 299.9, 300, 600, 900, 1200, 9000)] == pytest.approx([10, 10, 12, 14.4, 17.28, 20, 20])
    assert stair.exposure(900) == pytest.approx(300 * 36.4)
    assert stair.exposure(1300) == pytest.approx(300 * (10 + 12 + 14.4 + 17.28) + 100 * 20)
    assert stair.peak() == 20
    assert stair.peak(600) == pytest.approx(14.4)
    free = Stair(start=10, step=0.2, every=300)
    assert free.peak() == math.inf
    assert free.exposure(1e9) == math.inf  # beyond floats, and no error


def test_wave_by_hand() -> None:
    """Mean 3/s, 80 %, 120 s: crest 5.4/s at 30 s, trough 0.6/s at 90 s, the mean over a period; half a period has
    mean x (T/2 + amplitude x T / pi) = 3 x (60 + 30.558)."""
    wave = Wave(mean=3, amplitude=0.8, period=120)
    assert [wave.rate(t) for t in (0, 30, 60, 90)] == pytest.approx([3, 5.4, 3, 0.6])
    assert wave.exposure(120) == pytest.approx(360)
    assert wave.exposure(60) == pytest.approx(3 * (60 + 0.8 * 120 / math.pi))
    assert Wave(mean=3, amplitude=0.8, period=120, phase=30).rate(0) == pytest.approx(5.4)
    assert wave.peak() == pytest.approx(5.4)
    assert wave.peak(10) == pytest.approx(wave.rate(10))


def test_a_wave_that_touches_zero_is_crossed() -> None:
    """Amplitude 100 %: the rate is 0 at 90 s of each 120; request 360 is still the one at the end of the period."""
    assert take(Wave(mean=3, amplitude=1, period=120, process="deterministic"), 361)[360] == pytest.approx(120, abs=1e-6)


def test_gamma_and_pareto_gaps() -> None:
    rng = np.random.default_rng(2)
    gamma = np.fromiter(itertools.islice(Gamma(rate=5, cv=3).gaps(rng), 200_000), float)
    assert gamma.mean() == pytest.approx(1, abs=4 * 3 / math.sqrt(200_000))
    assert gamma.std() / gamma.mean() == pytest.approx(3, rel=0.05)
    pareto = np.fromiter(itertools.islice(Pareto(rate=5, tail=1.5).gaps(rng), 200_000), float)
    assert pareto.min() == pytest.approx(1 / 3, rel=1e-3)  # (tail - 1) / tail
    assert 1 / np.log(pareto / pareto.min()).mean() == pytest.approx(1.5, rel=0.02)  # Hill's estimator over all of it


def test_chaos_is_bounded_seeded_and_the_same_in_any_order() -> None:
    chaos, again = (Chaos(min=2, max=50, every=10, lengths=Regimes(every=60), seed=3) for _ in range(2))
    times = np.linspace(0, 5000, 3001)
    rates = np.array([chaos.rate(t) for t in times])
    assert [again.rate(t) for t in times[::-1]] == list(rates[::-1])
    assert (rates >= 2).all()
    assert (rates <= 50).all()
    assert (rates == 2).mean() > 0.02  # lulls
    assert (rates == 50).mean() > 0.002  # spikes, five times shorter
    factors = {chaos.regime(t) for t in times}
    assert 40 < len(factors) < 160  # 5000 s / 60 s spells, about 83
    assert 0.5 <= min(factors) < 0.7 < 1.4 < max(factors) <= 2
    assert [Chaos(min=2, max=50, every=10, seed=4).rate(t) for t in times] != list(rates)
    assert Chaos(min=2, max=50, every=10).regime(17.0) == 1.0


def test_chaos_mean_dwell_and_shares() -> None:
    chaos = Chaos(min=2, max=50, every=10, spikes=0.3, lulls=0.2)
    chaos.rate(100_000.0)
    walk = chaos.rates
    values, dwells = np.array(walk.values), np.diff(walk.knots)
    assert (values == 50).mean() == pytest.approx(0.3, abs=0.02)
    assert (values == 2).mean() == pytest.approx(0.2, abs=0.02)
    assert dwells[values == 50].mean() == pytest.approx(2, rel=0.1)
    assert dwells[values < 50].mean() == pytest.approx(10, rel=0.05)
    # log-uniform on [2, 50]: the median of the others is sqrt(2 x 50)
    assert np.median(values[(values > 2) & (values < 50)]) == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize(
    ("name", "spec", "field", "says"),
    [
        ("constant", {"rate": "0/s"}, "rate", "more than 0"),
        ("constant", {"rate": "-1/s"}, "rate", "more than 0"),
        ("constant", {"rate": 5}, "rate", "no unit"),
        ("constant", {"rate": float("nan")}, "rate", "unit"),
        ("constant", {}, "rate", "required"),
        ("gamma", {"rate": "5/s", "cv": 0}, "cv", "greater than 0"),
        ("gamma", {"rate": "inf", "cv": 1}, "rate", "not a rate"),
        ("gamma", {"rate": "5/s", "cv": float("nan")}, "cv", "finite"),
        ("pareto", {"rate": "5/s", "tail": 1}, "tail", "greater than or equal to 1.1"),
        ("pareto", {"rate": "5/s", "tail": 1.0000001}, "tail", "greater than or equal to 1.1"),
        ("ramp", {"start": "0/s", "end": "0/s", "over": "5s"}, None, "above 0"),
        ("ramp", {"start": 0, "end": "5/s", "over": "5s"}, "start", "no unit"),
        ("ramp", {"start": "-1/s", "end": "5/s", "over": "5s"}, "start", "more than 0"),
        ("ramp", {"start": "1/s", "end": "5/s", "over": "0s"}, "over", "more than 0"),
        ("burst", {"requests": 0}, "requests", "greater than or equal to 1"),
        ("burst", {"requests": 5, "every": "0s"}, "every", "more than 0"),
        ("stair", {"start": "5/s", "step": "0%", "every": "5s"}, "step", "greater than 0"),
        ("stair", {"start": "5/s", "step": "5%", "every": "5s", "max": "4/s"}, None, "max: 4/s is below start: 5/s"),
        ("wave", {"mean": "5/s", "amplitude": "101%", "period": "5s"}, "amplitude", "less than or equal to 1"),
        ("wave", {"mean": "5/s", "amplitude": "10%", "period": "5s", "proces": "poisson"}, "proces", "not permitted"),
        (
            "wave",
            {"mean": "5/s", "amplitude": "10%", "period": "5s", "process": "random"},
            "process",
            "'poisson' or 'deterministic'",
        ),
        ("chaos", {"min": "5/s", "max": "4/s", "every": "5s"}, None, "min: 5/s is above max: 4/s"),
        ("chaos", {"min": "1/s", "max": "4/s", "every": "5s", "spikes": "60%", "lulls": "50%"}, None, "add up to 110%"),
    ],
)
def test_refusals_name_field_and_range(name: str, spec: dict[str, Any], field: str | None, says: str) -> None:
    cls: Any = ARRIVALS[name]
    with pytest.raises(ValidationError) as caught:
        cls.model_validate(spec, context={"text": True})
    (error,) = caught.value.errors()
    assert error["loc"] == ((field,) if field else ())
    assert says in error["msg"]
