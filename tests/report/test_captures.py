"""What captures disturbed is left out of the headline: which requests, how much time, and rates as if it had not been."""

import numpy as np
import pytest

from kvbench.core import Record
from kvbench.report.cuts import Cuts


def test_intervals_are_joined_in_order() -> None:
    assert Cuts.of([(5, 6), (1, 2), (1.5, 3), (3, 4), (8, 8)]).spans == ((1, 4), (5, 6))


@pytest.mark.parametrize(("t", "there"), [(0, 0), (10, 10), (11, 10), (12, 10), (13, 11), (22, 18), (30, 26)])
def test_the_axis_without_cuts(t: float, there: float) -> None:
    assert Cuts.of([(10, 12), (20, 22)]).at(t) == pytest.approx(there)


def test_instants_inside_go_and_those_after_move_up() -> None:
    cuts = Cuts.of([(10, 12)])
    times = np.array([9.0, 10.0, 11.9, 12.0, 15.0])
    assert cuts.kept(times).tolist() == [True, False, False, True, True]
    assert cuts.squeezed(times).tolist() == [9.0, 10.0, 13.0]


def test_requests_due_or_in_flight_inside_are_caught() -> None:
    def record(number: int, due: float, over: float | None) -> Record:
        return Record(id=number, due_ns=round(due * 1e9), end_ns=None if over is None else round(over * 1e9))

    records = [
        record(0, 8, 9.9),
        record(1, 9, 10.5),
        record(2, 11, 11.5),
        record(3, 11.9, 14),
        record(4, 12, 13),
        record(5, 5, None),
    ]
    assert Cuts.of([(10, 12)]).caught(records) == {1, 2, 3, 5}
    assert Cuts.of([]).caught(records) == frozenset()
