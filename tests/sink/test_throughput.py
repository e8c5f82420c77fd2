"""The sink's speed, as a ratio within one run (`python -m tests.bench.sink` prints it with more points)."""

from pathlib import Path

import pytest

from tests.bench.sink import race
from tests.sink.servers import Victoria, running


@pytest.mark.alone
def test_three_times_the_points_of_the_batching_writer_with_point(tmp_path: Path) -> None:
    with running(Victoria(tmp_path)) as server:
        rates = {name: max(found) for name, found in race(server, 1, 40_000).items()}
    print({name: f"{rate:,.0f} points/s" for name, rate in rates.items()})
    assert rates["kvbench sink"] >= 3 * rates["batching writer with Point"], rates
