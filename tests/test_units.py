"""Quantities as people read them."""

import pytest

from kvbench.units import duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9994, "999 ms"), (0.9996, "1 s"), (0.0009994, "999 us"), (0.0009996, "1 ms"), (59.94, "59.9 s"), (3725, "1h02m05s")],
)
def test_a_duration_near_the_next_unit_is_written_in_it(seconds: float, text: str) -> None:
    """Three digits; 0.9996 s must not become 1e+03 ms."""
    assert duration(seconds) == text
