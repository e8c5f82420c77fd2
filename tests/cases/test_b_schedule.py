"""Group B (offered load is not what was asked for), as far as the schedule alone decides it; end to end is tested elsewhere."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from kvbench.workload.arrivals import ARRIVALS
from kvbench.workload.schedule import Schedule, TraceSchedule


def schedule(name: str, rate: Any, seed: int = 0, **at: float) -> Schedule:
    cls: Any = ARRIVALS[name]
    return Schedule(cls.model_validate({"rate": rate}, context={"text": True}), np.random.default_rng(seed), **at)


def test_b01_constant_200_per_second_ends_at_9_995() -> None:
    """An absolute schedule: no sum of gaps that could drift."""
    constant = schedule("constant", "200/s")
    dues = [constant.pop() for _ in range(2000)]
    assert dues[-1] == pytest.approx(9.995, abs=1e-9)
    assert dues == pytest.approx([k / 200 for k in range(2000)], abs=1e-9)
    assert constant.due == pytest.approx(10.0, abs=1e-9)  # the 2,001st is outside [0, 10)


def test_b01_poisson_gaps_keep_a_mean_of_5_ms_and_are_not_rescaled() -> None:
    """Mean and spread 5 ms; the time 2,000 requests take varies from seed to seed as sqrt(2000) gaps, so nothing was rescaled."""
    ends = []
    for seed in range(50):
        poisson = schedule("poisson", "200/s", seed)
        dues = np.array([poisson.pop() for _ in range(2000)])
        gaps = np.diff(dues, prepend=0.0)
        assert gaps.mean() == pytest.approx(0.005, rel=4 / np.sqrt(2000))
        assert gaps.std() == pytest.approx(0.005, rel=0.15)
        ends.append(dues[-1])
    assert np.std(ends) == pytest.approx(0.005 * np.sqrt(2000), rel=0.4)


def test_b15_a_start_in_the_future_is_waited_for() -> None:
    assert schedule("constant", "5/s", start=1.0).due == 1.0


def test_b15_equal_and_out_of_order_stamps_are_due_at_once() -> None:
    """Stamps 0, 2, 2, 1, 3: the equal one and the one out of order are due together with their predecessor, in file order."""
    trace = TraceSchedule([0.0, 2.0, 2.0, 1.0, 3.0], start=1.0)
    assert [trace.pop() for _ in range(5)] == [1.0, 3.0, 3.0, 3.0, 4.0]
    assert TraceSchedule([-0.5, 0.0]).due == 0.0


def test_b16_a_quarter_per_second_sends_at_0_and_4_s() -> None:
    slow = schedule("constant", "0.25/s")
    assert [slow.pop(), slow.pop(), slow.due] == pytest.approx([0.0, 4.0, 8.0])


@pytest.mark.parametrize("name", ["constant", "poisson"])
@pytest.mark.parametrize("rate", ["inf", float("inf")])
def test_b16_an_infinite_rate_is_all_at_once(name: str, rate: Any) -> None:
    burst = schedule(name, rate)
    assert [burst.pop() for _ in range(1000)] == [0.0] * 1000


@pytest.mark.parametrize("name", ["constant", "poisson"])
@pytest.mark.parametrize("rate", ["0/s", "-1/s", 0, -1])
def test_b16_zero_and_negative_rates_are_refused(name: str, rate: Any) -> None:
    with pytest.raises(ValidationError, match="rate") as caught:
        schedule(name, rate)
    assert caught.value.errors()[0]["loc"] == ("rate",)


def test_b16_an_exponent_is_a_number() -> None:
    """A bare 1e3 lacks its unit, as every bare number does; with it, 1,000 requests fall into one second."""
    fast = schedule("constant", "1e3/s")
    assert sum(fast.pop() < 1 for _ in range(1100)) == 1000
    with pytest.raises(ValidationError, match="no unit"):
        schedule("constant", 1e3)


def test_b17_a_poisson_count_bound_and_a_time_bound_meet_by_chance() -> None:
    """5/s for 20 s and 100 requests: over seeds either bound comes first about as often, so both must be reported."""
    ends = []
    for seed in range(20):
        poisson = schedule("poisson", "5/s", seed)
        ends.append([poisson.pop() for _ in range(100)][-1])
    count_first = sum(end < 20 for end in ends)
    assert 3 <= count_first <= 17
    assert np.mean(ends) == pytest.approx(20, abs=4 * 2 / np.sqrt(20))  # sigma of one: sqrt(100) x 0.2 s
