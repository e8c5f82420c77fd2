"""The load level: rungs on time, a fall to the last healthy level, holds, tries by halves, and an end that says why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.level import Ladder, Level, Move, Retreat

LADDER = Ladder(step=0.2, every=60.0, max=2.0)


def climb(level: Level, until: float, since: float = 0.0, healthy: bool = True) -> list[tuple[float, float]]:
    """(time, level) of every move, ticking once a second, a healthy window every 10 s."""
    moves = []
    for second in range(int(since) + 1, int(until) + 1):
        if (move := level.tick(float(second))) is not None:
            moves.append((float(second), move.level))
        if healthy and second % 10 == 0 and level.moved <= second - 10:
            level.healthy(float(second))
    return moves


def on_ladder(until: float, retreat: Retreat | None = None, ladder: Ladder = LADDER) -> Level:
    level = Level(retreat)
    level.begin(0.0, ladder)
    climb(level, until)
    return level


def test_a_run_starts_at_level_1_and_steady_never_moves_it() -> None:
    level = Level()
    level.begin(0.0, None)
    assert climb(level, 1000) == []
    assert (level.value, level.done) == (1.0, "")


def test_rungs_come_on_time_and_the_ladder_ends_after_its_last_rung_was_held() -> None:
    level = Level()
    level.begin(100.0, Ladder(step=0.5, every=30.0, max=2.25))
    assert climb(level, 219, since=100) == [(130.0, 1.5), (160.0, 2.0), (190.0, 2.25)]
    assert level.done == ""
    assert level.tick(220.0) is None
    assert level.done == "level 2.25 held for 30 s: the ladder's end"
    assert level.tick(1000.0) is None


def test_rungs_do_not_wait_for_a_watch() -> None:
    level = Level()
    level.begin(0.0, LADDER)
    assert climb(level, 130, healthy=False) == [(60.0, 1.2), (120.0, 1.4)]


@pytest.mark.parametrize(
    ("ladder", "rungs", "seconds"),
    [
        (Ladder(0.5, 30.0, 2.0), [(0.0, 1.0), (30.0, 1.5), (60.0, 2.0)], 90.0),
        (Ladder(0.4, 10.0, 2.0), [(0.0, 1.0), (10.0, 1.4), (20.0, 1.8), (30.0, 2.0)], 40.0),
        (Ladder(0.1, 60.0, 1.3), [(0.0, 1.0), (60.0, 1.1), (120.0, 1.2), (180.0, 1.3)], 240.0),
    ],
)
def test_a_ladder_tells_its_rungs(ladder: Ladder, rungs: list[tuple[float, float]], seconds: float) -> None:
    assert [(at, round(level, 9)) for at, level in ladder.rungs()] == rungs
    assert ladder.seconds == pytest.approx(seconds)
    level = Level()
    level.begin(0.0, ladder)
    assert climb(level, seconds) == rungs[1:]
    assert level.done


def test_a_fall_on_the_ladder_goes_back_to_the_last_healthy_rung() -> None:
    level = on_ladder(185)
    assert level.value == pytest.approx(1.6)
    move = level.fall(190.0, "ttft_p50 is 2 s")
    assert isinstance(move, Move)
    assert move.level == level.value == pytest.approx(1.4)
    assert move.why == "ttft_p50 is 2 s"
    assert move.data["from"] == pytest.approx(1.6)
    assert move.data["until"] == 250.0


def test_the_level_at_which_it_fell_is_not_the_last_healthy_one_although_it_was_healthy() -> None:
    level = on_ladder(239)  # 1.6 since 180, found healthy several times
    assert level.fall(239.5, "") is not None
    assert level.value == pytest.approx(1.4)


def test_a_rung_of_the_very_second_is_not_what_the_window_before_it_saw() -> None:
    level = on_ladder(119)
    assert level.tick(120.0) is not None  # to 1.4
    level.healthy(120.0)  # of the window [110, 120), at 1.2
    assert (level.at(120.0), level.at(121.0)) == (1.2, 1.4)
    assert level.fall(150.0, "") is not None
    assert level.value == 1.2
    other = on_ladder(119)
    other.tick(120.0)
    assert other.fall(120.0, "") is not None  # 1.2 was ill, and so 1.4 is no better
    assert other.value == 1.0


def test_without_a_lower_healthy_level_it_falls_one_step() -> None:
    level = Level(Retreat(step=0.25))
    level.begin(0.0, None)
    level.healthy(50.0)  # at level 1 itself
    assert level.fall(60.0, "") is not None
    assert level.value == pytest.approx(0.75)


def test_falls_in_a_row_shrink_the_level_by_the_step_and_never_to_nothing() -> None:
    level = Level(Retreat(step=0.2, hold=10.0, tries=4))
    level.begin(0.0, None)
    found = [move.level for second in range(0, 200, 10) if (move := level.fall(float(second), "")) is not None]
    assert found == pytest.approx([0.8, 0.64, 0.512, 0.4096])
    assert level.spent == "level 0.4096 is kept: 4 falls in a row did not help"
    assert level.fall(1000.0, "") is None
    level.healthy(1010.0)
    assert climb(level, 2000, since=1010) == []


def test_nothing_moves_before_the_hold_is_over() -> None:
    level = on_ladder(185)
    level.fall(190.0, "")
    assert level.fall(200.0, "") is None
    assert climb(level, 249, since=200) == []
    assert level.value == pytest.approx(1.4)


def test_after_the_hold_nothing_rises_without_a_healthy_window() -> None:
    level = on_ladder(185)
    level.fall(190.0, "")
    assert climb(level, 600, since=190, healthy=False) == []
    level.healthy(600.0)
    move = level.tick(601.0)
    assert move is not None
    assert move.level == pytest.approx(1.5)  # half of the ladder's step
    assert (move.data["try"], move.data["tries"]) == (1, 3)


def test_a_window_out_of_line_puts_the_rise_off() -> None:
    level = on_ladder(185)
    level.fall(190.0, "")
    level.healthy(240.0)
    level.doubt()
    assert level.tick(251.0) is None
    level.healthy(260.0)
    assert level.tick(261.0) is not None


def test_it_tries_again_by_half_the_step_each_time_and_then_keeps_the_level() -> None:
    """An edge at 1.44: every level above falls, every one below is healthy."""
    level, rises, falls = Level(Retreat(hold=60.0, tries=3)), [], []
    level.begin(0.0, LADDER)
    for second in range(1, 2000):
        if (move := level.tick(float(second))) is not None:
            rises.append(round(move.level, 4))
        if second % 10 or level.moved > second - 10 or level.done:
            continue
        if level.value < 1.44:
            level.healthy(float(second))
        elif (move := level.fall(float(second), "past the edge")) is not None:
            falls.append(round(move.level, 4))
    assert rises == [1.2, 1.4, 1.6, 1.5, 1.45, 1.425, 1.45]  # 1.4 + 0.1, + 0.05, + 0.025 twice
    assert falls == [1.4, 1.4, 1.4, 1.425]
    assert level.done == level.spent == "level 1.425 is kept: 3 returns after a fall fell again"


def test_steady_climbs_back_to_where_it_was_and_no_further() -> None:
    level = Level(Retreat(step=0.2, hold=30.0, tries=3))
    level.begin(0.0, None)
    level.fall(100.0, "")
    assert climb(level, 1000, since=100) == [(130.0, 0.9), (160.0, 1.0)]
    assert level.spent == ""


def test_no_tries_means_that_the_first_fall_is_the_last_move() -> None:
    level = Level(Retreat(tries=0))
    level.begin(0.0, None)
    assert level.fall(10.0, "") is not None
    assert level.spent == "level 0.8 is kept: no try is allowed"
    assert climb(level, 500, since=10) == []


def test_a_stress_phase_starts_its_own_search_where_steady_left_the_level() -> None:
    level = Level(Retreat(hold=10.0, tries=1))
    level.begin(0.0, None)
    level.fall(10.0, "")
    assert level.fall(30.0, "") is None
    assert level.spent
    level.begin(100.0, LADDER)
    assert level.spent == ""
    assert climb(level, 230, since=100) == [(160.0, 1.0), (220.0, 1.2)]


def test_an_epoch_keeps_what_the_one_before_it_found() -> None:
    level = Level(Retreat(hold=60.0))
    level.begin(0.0, None)
    level.fall(90.0, "")
    level.begin(100.0, None)
    assert level.moved == 100.0
    assert climb(level, 149, since=100) == []
    assert climb(level, 151, since=149) == [(150.0, 0.9)]


@given(st.lists(st.sampled_from(["healthy", "fall", "doubt", "wait"]), max_size=200), st.integers(0, 4), st.booleans())
def test_no_flapping_whatever_the_windows_say(windows: list[str], tries: int, stress: bool) -> None:
    """A hold between a fall and the next move, at most `tries` tries, the level always above 0 and within the ladder."""
    level, last = Level(Retreat(step=0.3, hold=45.0, tries=tries)), -100.0
    level.begin(0.0, Ladder(0.3, 30.0, 2.0) if stress else None)
    attempts, before = set(), 1.0
    for number, window in enumerate(windows):
        for second in range(number * 10 + 1, number * 10 + 11):
            if (move := level.tick(float(second))) is not None:
                assert second >= last + 45.0 - 1e-6
                assert move.level > before
                attempts |= {move.data["try"]} if "try" in move.data else set()
                before = move.level
        now = (number + 1) * 10.0
        if window == "healthy":
            level.healthy(now)
        elif window == "doubt":
            level.doubt()
        elif window == "fall" and (move := level.fall(now, "")) is not None:
            assert now >= last + 45.0 - 1e-6
            assert 0 < move.level < before
            last, before = now, move.level
    assert len(attempts) <= tries
    assert 0 < level.value <= (2.0 if stress else 1.0)
