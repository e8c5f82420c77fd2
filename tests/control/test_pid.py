"""PID by hand-worked numbers, on a first-order plant, and what a scenario may say of it."""

import itertools
import math
from typing import Any

import pytest

from kvbench.control.pid import Pid
from kvbench.core import Window
from tests.control.plant import Lag, play

HELD = {"held": 3}
FREE = {"held": 0}


def seen(end: float, usage: float, admitted: float, counts: dict[str, int] = HELD) -> Window:
    return Window(
        start=end - 1, end=end, counts=counts, values={"kv_usage_last": usage, "admitted_rate": admitted}, age={"kv_usage": 0.0}
    )  # fmt: skip


def pid(**settings: Any) -> Pid:
    return Pid.model_validate({"setpoint": 0.8, "nominal": 10.0, "kv_limit": 1.0, "td": 0.0, **settings})


def test_the_first_rate_is_the_admitted_one_and_one_second_of_integral() -> None:
    """Bumpless: whatever the error, v begins at what is let in. kp 0.5, ti 5: 10 x 0.5 x 1/5 x (1 - 0.4/0.8) = 0.5 more."""
    law = pid(kp=0.5, ti=5.0).arm(None)
    assert law.update(seen(1, 0.4, 6.0, FREE)).rate == pytest.approx(6.5)


def test_parts_by_hand() -> None:
    """kp 0.5, ti 5, td 2, n 4, b 0.6, h 1, nominal 10; usage 0.4, 0.48, 0.56: y 0.5, 0.6, 0.7 with the gate holding requests.

    P = 10 x 0.5 x (0.6 - y): 0.5, 0, -0.5. I begins at 6 - 0.5 = 5.5 and gains 10 x 0.5 x (1 - y) / 5: 6.0, 6.4, 6.7.
    D = (2 D - 10 x 0.5 x 2 x 4 x dy) / (2 + 4): 0, -4/6, (-8/6 - 4)/6 = -8/9.
    """
    law = pid(kp=0.5, ti=5.0, td=2.0, n=4.0, b=0.6).arm(None)
    rates = [law.update(seen(end, usage, 6.0, HELD if end > 1 else FREE)).rate for end, usage in ((1, 0.4), (2, 0.48), (3, 0.56))]
    assert rates == pytest.approx([6.5, 6.4 - 2 / 3, 6.2 - 8 / 9])
    assert law.state() == pytest.approx(
        {"share": 1, "error": 0.3, "nominal": 10, "p": -0.5, "i": 6.7, "d": -8 / 9, "v": 6.2 - 8 / 9}
    )


def test_back_calculation_by_hand() -> None:
    """tt 4. Second 1: v = 6.5. Then only 2/s come and nothing is held, so that twice as much would do as well:
    I += 10 x 0.5 x 0.5 / 5 + (2 x 2 - 6.5) / 4 = -0.125."""
    law = pid(kp=0.5, ti=5.0, tt=4.0).arm(None)
    law.update(seen(1, 0.4, 6.0, FREE))
    i = law.state()["i"]
    law.update(seen(2, 0.4, 2.0, FREE))
    assert law.state()["i"] - i == pytest.approx(-0.125)
    law.update(seen(3, 0.4, 2.0, HELD))  # while the gate holds requests, the limit is what was let in: no correction
    assert law.state()["i"] - i == pytest.approx(-0.125 + 0.5)


def test_a_change_of_the_set_point_weight_leaves_the_steady_state() -> None:
    for b in (0.0, 0.5, 1.0):
        played = play(pid(b=b, kp=0.5, ti=8.0).arm(None), Lag(gain=0.1, tau=8), [20.0] * 200, lambda y: {"kv_usage_last": y})
        assert played.signal[-1] == pytest.approx(0.8, abs=1e-3)
        assert played.rate[-1] == pytest.approx(8.0, abs=0.05)


@pytest.mark.parametrize("scale", [0.2, 2.0, 200.0])
def test_gains_fit_any_capacity(scale: float) -> None:
    """The same law on servers that take 0.2, 2 and 200/s at the set-point: the same curve, to the last digits."""
    law = Pid(setpoint=0.8).arm(scale)
    small = play(law, Lag(gain=0.8 / scale, tau=8), [3 * scale] * 120, lambda y: {"kv_usage_last": y}, start=scale)
    one = play(Pid(setpoint=0.8).arm(1.0), Lag(gain=0.8, tau=8), [3.0] * 120, lambda y: {"kv_usage_last": y}, start=1.0)
    assert small.signal == pytest.approx(one.signal, rel=1e-9)
    assert max(one.signal) - 0.8 < 0.05
    assert all(abs(y - 0.8) < 0.02 for y in one.signal[60:])


@pytest.mark.parametrize("wrong", [0.2, 5.0])
def test_a_load_far_from_the_capacity_costs_a_while_not_the_hold(wrong: float) -> None:
    """The load's mean is a fifth, or five times, of what the server takes: the nominal rate finds its way there."""
    law = Pid(setpoint=0.8).arm(10 * wrong)
    played = play(law, Lag(gain=0.08, tau=8), [30.0] * 600, lambda y: {"kv_usage_last": y}, start=10.0)
    assert all(abs(y - 0.8) < 0.02 for y in played.signal[-200:])
    assert law.state()["nominal"] == pytest.approx(10, rel=0.05)


def test_a_lull_with_and_without_anti_windup() -> None:
    """Lag of 8 s, 60 s in which too little is offered. With back-calculation the signal returns as after a step; without, the
    integral of the lull has to be paid back above the set-point."""
    load = [15.0] * 120 + [2.0] * 60 + [15.0] * 120

    def over(**settings: Any) -> float:
        played = play(pid(kp=0.8, ti=8.0, **settings).arm(None), Lag(gain=0.08, tau=8), load, lambda y: {"kv_usage_last": y})
        return max(played.signal[180:]) - 0.8

    with_it, without = over(), over(tt=math.inf)
    print(f"overshoot after a 60 s lull: {with_it:+.3f}, without anti-windup {without:+.3f}")
    assert with_it <= 0.02
    assert without >= 0.15


def test_the_slew_rate_bounds_every_change() -> None:
    law = pid(kp=2.0, ti=6.0, slew=0.1).arm(None)
    played = play(law, Lag(gain=0.06, tau=4), [15.0] * 40 + [1.0] * 20 + [15.0] * 40, lambda y: {"kv_usage_last": y})
    steps = [abs(b - a) for a, b in itertools.pairwise(played.rate)]
    assert max(steps) == pytest.approx(1.0)  # 10 % of the nominal 10/s
    assert not any(step > 1.0 + 1e-9 for step in steps)


def test_another_signal_is_held_at_its_own_set_point() -> None:
    """Service ttft, 0.1 s for each request/s with a lag of 5 s: 0.6 s at 6/s."""
    law = Pid.model_validate({"signal": "ttft", "setpoint": "600ms"}, context={"text": True}).arm(6.0)
    played = play(law, Lag(gain=0.1, tau=5, top=10), [20.0] * 120, lambda y: {"ttft_p50": y}, start=6.0)
    assert played.signal[-1] == pytest.approx(0.6, abs=0.01)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"setpoint": 0.8}, "has no unit"),
        ({"setpoint": "800ms"}, "unknown unit 'ms'"),
        ({"signal": "ttft", "setpoint": "80%"}, "unknown unit '%'"),
        ({"signal": "waiting", "setpoint": "8s"}, "a number of requests"),
        ({"signal": "waiting", "setpoint": 0}, "above zero"),
        ({"setpoint": "0%"}, "above zero"),
        ({"setpoint": "95%"}, "not below kv_limit"),
        ({"setpoint": "80%", "ti": "500ms"}, "at least"),
        ({"setpoint": "80%", "min": "5/s", "max": "2/s"}, "above max"),
        ({"signal": "response_ttft", "setpoint": "1s"}, "'kv_usage', 'waiting', 'ttft' or 'gpu_memory'"),
        ({}, "Field required"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Pid.model_validate(settings, context={"text": True})


def test_set_points_in_their_units() -> None:
    written = (("kv_usage", "80%", 0.8), ("waiting", 8, 8.0), ("ttft", "800ms", 0.8), ("gpu_memory", "85%", 0.85))
    for signal, text, value in written:
        assert Pid.model_validate({"signal": signal, "setpoint": text}, context={"text": True}).setpoint == pytest.approx(value)
