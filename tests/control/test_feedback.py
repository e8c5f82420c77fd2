"""Queue feedback on a queue that integrates: near the target, without swinging, from any start."""

import itertools

import pytest

from kvbench.control.feedback import MODES, QueueFeedback
from tests.control.plant import Played, Queue, play


def held(mode: str, served: float = 10.0, offered: float = 30.0, start: float = 30.0, **settings: float) -> Played:
    law = QueueFeedback.model_validate({"mode": mode, "target_queue": 8, **settings}).arm(offered)
    return play(law, Queue(served), [offered] * 400, lambda y: {"waiting_last": y}, start)


def test_gradient_holds_the_queue_at_its_target() -> None:
    """Steady is served x (1 + gain x (1 - q / 8)) = 10 with served = 10: the queue at its target, the rate at 10/s."""
    played = held("gradient")
    assert played.signal[-1] == pytest.approx(8, abs=0.5)
    assert played.rate[-1] == pytest.approx(10, abs=0.05)


def test_gradient_does_not_swing() -> None:
    """Once there it stays: the last 200 s differ by less than one request."""
    last = held("gradient").signal[-200:]
    assert max(last) - min(last) < 1


def test_aimd_saws_around_the_target() -> None:
    """Up by 5 % of the first rate a second, down by 30 % at once: between empty and a bounded height, serving all it can."""
    played = held("aimd", start=10.0)
    assert max(played.signal[200:]) < 40
    assert min(played.signal[200:]) <= 8
    assert sum(played.entered[200:]) / 200 == pytest.approx(10, rel=0.1)
    drops = [b / a for a, b in itertools.pairwise(played.rate[200:]) if b < a]
    assert drops == pytest.approx([0.7] * len(drops))
    assert len(drops) >= 3


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("scale", [0.1, 10.0])
def test_capacity_does_not_matter(mode: str, scale: float) -> None:
    """Rates and queue ten times, or a tenth: the same curve."""
    one = held(mode)
    other = held(mode, served=10 * scale, offered=30 * scale, start=30 * scale, target_queue=8 * scale)
    assert [y / scale for y in other.signal] == pytest.approx(one.signal, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("mode", sorted(MODES))
def test_nothing_winds_up_while_too_little_is_offered(mode: str) -> None:
    """Five minutes at half of what is served, then three times as much: the queue is no higher than it was at first."""
    law = QueueFeedback.model_validate({"mode": mode}).arm(10.0)
    load = [30.0] * 200 + [5.0] * 300 + [30.0] * 200
    played = play(law, Queue(10.0), load, lambda y: {"waiting_last": y}, start=30.0)
    assert played.rate[499] == pytest.approx(played.rate[250]), "the lull leaves the rate alone"
    assert max(played.signal[500:]) <= max(played.signal[:200])
    assert max(played.signal[520:]) < 40


def test_a_rate_that_has_begun_is_not_jumped_from() -> None:
    law = QueueFeedback(gain=1.0).arm(10.0)
    played = play(law, Queue(10.0), [10.0] * 3, lambda y: {"waiting_last": 8.0})
    assert played.rate == pytest.approx([10.0] * 3)
