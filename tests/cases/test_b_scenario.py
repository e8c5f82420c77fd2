"""Group B, the parts that a scenario decides: the plan printed before a run (B14), load values as users write them (B16)."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvbench import compose
from kvbench.cli.check import check
from kvbench.forecast import forecast
from kvbench.scenario import Scenario, ScenarioError, load

TEXT = """\
target: {kind: "null"}
workload: {arrivals: {shape: constant, rate: 5/s}, prompt: 10, output: 1}
phases:
  warmup: {policy: fixed, requests: 3}
  steady: {requests: 100}
"""


def scenario(tmp_path: Path, *overrides: str) -> Scenario:
    path = tmp_path / "b.yaml"
    path.write_text(TEXT)
    return load(path, overrides)


def test_b14_every_phase_has_its_own_bound_and_the_plan_says_so(tmp_path: Path) -> None:
    """Requests and time of each phase stand in the plan before anything is sent; the first does not take the next one's count."""
    plan = forecast(scenario(tmp_path))
    assert [(phase["name"], phase["requests"]) for phase in plan["phases"]] == [("warmup", 3), ("steady", 100)]
    assert [phase["seconds"] for phase in plan["phases"]] == pytest.approx([0.4, 19.8])  # the last is due at (n - 1) / 5 s
    app = typer.Typer()
    app.command()(check)
    printed = CliRunner().invoke(app, [str(tmp_path / "b.yaml")])
    assert printed.exit_code == 0
    warmup, steady = (
        next(line.split() for line in printed.output.splitlines() if name in line) for name in ("warmup ", "steady ")
    )
    assert warmup[:4] == ["warmup", "400", "ms", "3"]
    assert steady[:4] == ["steady", "19.8", "s", "100"]


def test_b14_epochs_are_bounded_one_by_one(tmp_path: Path) -> None:
    epochs = "{epochs: [{for: 10s, arrivals: {shape: constant, rate: 1/s}}, {for: 10s, arrivals: {shape: constant, rate: 3/s}}]}"
    plan = forecast(scenario(tmp_path, f"phases.steady={epochs}"))
    assert [phase["requests"] for phase in plan["phases"]] == [3, 10, 30]


def due(tmp_path: Path, rate: str, until: float, *overrides: str) -> list[float]:
    found = scenario(tmp_path, f"workload.arrivals.rate={rate}", *overrides)
    schedule = compose.build_phases(found, None)[-1].source(0.0).schedule
    assert schedule is not None
    times = []
    while schedule.due < until and len(times) < 5000:
        times.append(schedule.pop())
    return times


def test_b16_fractional_and_large_rates(tmp_path: Path) -> None:
    assert due(tmp_path, "0.25/s", 8.0) == pytest.approx([0.0, 4.0], abs=1e-9)
    assert len(due(tmp_path, "1.1/s", 99.9)) == 110
    thousand = due(tmp_path, "1e3/s", 1.0)
    assert (len(thousand), thousand[-1]) == (1000, pytest.approx(0.999))


def test_b16_infinity_is_all_at_once_and_needs_a_count(tmp_path: Path) -> None:
    found = scenario(tmp_path, "workload.arrivals.rate=inf")
    schedule = compose.build_phases(found, None)[-1].source(0.0).schedule
    assert schedule is not None
    assert [schedule.pop() for _ in range(100)] == [0.0] * 100
    assert forecast(found)["phases"][-1]["requests"] == 100
    with pytest.raises(ScenarioError, match="say how many with `requests`"):
        scenario(tmp_path, "workload.arrivals.rate=inf", "phases.steady={for: 5s}")


@pytest.mark.parametrize("rate", ["0/s", "-1/s", "nan/s", "-inf", "0", "-1", "1.1", "''", "1e999/s"])
def test_b16_rates_that_are_none_are_refused_before_any_traffic(rate: str, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"^--set workload\.arrivals\.rate=.*: workload\.arrivals\.rate: "):
        scenario(tmp_path, f"workload.arrivals.rate={rate}")
