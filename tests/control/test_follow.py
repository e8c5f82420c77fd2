"""What laws that follow a signal share: the ceiling of KV usage, the start, what is counted."""

import pytest

from kvbench.control.feedback import QueueFeedback
from kvbench.control.law import SIGNALS, Ceiling
from kvbench.control.pid import Pid
from kvbench.core import Window


def seen(end: float, usage: float | None, age: float = 0.0, **values: float | None) -> Window:
    known: dict[str, float | None] = {"kv_usage_last": usage, "waiting_last": 0.0, "admitted_rate": 5.0}
    return Window(start=end - 5, end=end, counts={"held": 1}, values=known | values, age={"kv_usage": age, "waiting": age})


def shares(usages: list[float], limit: float = 0.9, taper: float = 0.1) -> list[float]:
    ceiling = Ceiling(limit, 1.0, taper)
    return [ceiling.look(seen(float(at), usage)) for at, usage in enumerate(usages)]


def test_the_share_falls_over_the_room_before_the_limit() -> None:
    assert shares([0.79]) == [1.0]
    assert shares([0.85]) == pytest.approx([0.5])
    assert shares([0.9]) == [0.0]
    assert shares([1.0]) == [0.0]


def test_a_usage_that_rises_counts_as_it_will_be_one_period_on() -> None:
    """0.70 to 0.78: 0.86 comes next, of which (0.9 - 0.86) / 0.1 is left. A fall is no reason to let in more."""
    assert shares([0.70, 0.78]) == pytest.approx([1.0, 0.4])
    assert shares([0.86, 0.85]) == pytest.approx([0.4, 0.5])


def test_a_stale_reading_leaves_the_ceiling_as_it_was() -> None:
    ceiling = Ceiling(0.9, 1.0)
    assert ceiling.look(seen(1.0, 0.95)) == 0
    assert ceiling.look(seen(2.0, 0.2, age=3.5)) == 0
    assert ceiling.look(seen(3.0, None)) == 0
    assert ceiling.look(seen(4.0, 0.2)) == 1


def test_a_server_that_tells_no_kv_usage_has_no_ceiling() -> None:
    law = QueueFeedback(target_queue=8).arm(5.0)
    rates = [law.update(seen(float(at), None, waiting_last=8.0)).rate for at in range(1, 6)]
    assert rates == pytest.approx([5.0] * 5)


def test_the_gate_opens_again_though_the_followed_signal_is_gone() -> None:
    """While the gate is shut nothing gets a first token, so ttft is missing; the KV usage alone reopens it."""
    law = Pid.model_validate({"signal": "ttft", "setpoint": 0.5}).arm(5.0)
    open_rate = law.update(seen(1.0, 0.5, ttft_p50=0.5)).rate
    assert law.update(seen(2.0, 0.97, ttft_p50=0.5)).rate == 0
    assert law.update(seen(3.0, 0.97)).rate == 0
    assert law.update(seen(4.0, 0.3)).rate == pytest.approx(open_rate)
    assert law.told() == {"updates": 4, "stale": 2, "saturated": 0, "shut": 2}


def test_until_there_is_a_signal_the_start_holds() -> None:
    law = Pid(setpoint=0.8, start=2.0).arm(5.0)
    assert law.update(seen(1.0, None)).rate == 2
    assert law.update(seen(2.0, 0.8, admitted_rate=0.0)).rate == 2  # nothing was let in: no rate to go on from
    assert law.update(seen(3.0, 0.8, admitted_rate=2.0)).rate == pytest.approx(2.0)  # at the set-point: as it was
    assert Pid(setpoint=0.8).limits().rate == float("inf")
    assert Pid(setpoint=0.8, max=3.0).limits().rate == 3


def test_the_age_at_which_a_signal_is_stale() -> None:
    """Two control periods and a second: at 1 s that is 3 s, at 5 s 11 s. Latencies are our own and have no age."""
    for every, age, read in ((1.0, 3.0, True), (1.0, 3.1, False), (5.0, 11.0, True), (5.0, 11.1, False)):
        assert (SIGNALS["kv_usage"].read(seen(1.0, 0.5, age=age), every) is not None) is read
    assert SIGNALS["ttft"].read(seen(1.0, 0.5, age=100.0, ttft_p50=0.2), 1.0) == 0.2
