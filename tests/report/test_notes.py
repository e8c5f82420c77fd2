"""What to do next: what gave way first, and nothing where nothing did."""

from pathlib import Path
from typing import Any

import pytest

from kvbench.core import Event
from kvbench.report.files import load
from kvbench.report.summary import summarise
from tests.report.build import gauges, lost, own, record, write

STRESS = {"phase": "stress", "phase_kind": "stress"}
SLO = {"workload": {"classes": {"default": {"slo": {"ttft": 0.2}}}}}
ROOM = "there is room: raise the load (a stair shows where it ends)"


def advice(path: Path, usage: list[float], waiting: list[float], ttft: float = 0.1, **more: list[float]) -> list[str]:
    """Ten seconds of 200/s with one reading a second of each gauge."""
    records = [record(k, k * 0.005, ttft=ttft, tokens=2) for k in range(2000)]
    samples = [*gauges({"kv_usage": usage, "waiting": waiting, **more}), *own(10, cpu=0.2, loop_lag_p99=0.001)]
    found = summarise(load(write(path / "run", records, samples=samples, scenario=SLO)))
    return [str(line) for line in found["next"]]


def test_a_moment_of_waiting_is_no_queue(tmp_path: Path) -> None:
    assert advice(tmp_path, [0.488] * 10, [0.0] * 5 + [2.0] + [0.0] * 4) == [ROOM]


def test_a_queue_that_nobody_felt_is_no_advice(tmp_path: Path) -> None:
    """5 waiting at 200/s is 25 ms of a ttft of 100 ms."""
    assert advice(tmp_path, [0.5] * 10, [5.0] * 10) == []


@pytest.mark.parametrize(("waiting", "ttft"), [(30.0, 0.1), (2.0, 0.3)])  # 150 ms of waiting; every answer over its limit
def test_a_queue_that_was_felt_is(tmp_path: Path, waiting: float, ttft: float) -> None:
    (line,) = advice(tmp_path, [0.5] * 10, [waiting] * 10, ttft)
    assert line.startswith(f"requests queued at the server ({waiting:.3g} on average) with 50 % of the KV cache free: compute")


def test_a_law_that_holds_the_cache_nearly_full_is_not_short_of_it(tmp_path: Path) -> None:
    assert advice(tmp_path, [0.94] * 10, [0.0] * 10) == []


@pytest.mark.parametrize(
    ("usage", "more", "told"),
    [
        ([0.5] * 8 + [0.96, 0.5], {}, "11.1 % of the time above 95 %"),
        ([0.94] * 10, {"preemptions_total": [0.0] * 9 + [3.0]}, "3 preemptions"),
    ],
)
def test_the_cache_was_short(tmp_path: Path, usage: list[float], more: dict[str, list[float]], told: str) -> None:
    (line,) = advice(tmp_path, usage, [0.0] * 10, **more)
    assert line == f"the KV cache was short ({told}): lower the rate, shorten contexts, or give it more memory"


def climbed(path: Path, usage: float, waiting: float, fell: bool) -> dict[str, Any]:
    """Steady at 30 % for 10 s, 10 s of stress at level 1, ten at 1.2 with these readings, and where it fell ten at 1 again."""
    records = [record(k, k * 0.005, tokens=2) for k in range(2000)]
    records += [record(2000 + k, 10 + k * 0.1, phase="stress", measured=False, tokens=2) for k in range(300)]
    events = [
        Event(t=10.0, kind="phase_start", data=STRESS),
        Event(t=20.0, kind="level", data=STRESS | {"level": 1.2, "why": "the next rung"}),
        *([Event(t=30.0, kind="level", data=STRESS | {"level": 1.0, "why": "ttft_p50"})] if fell else []),
        Event(t=40.0, kind="phase_end", data=STRESS | {"reason": "level 1 is kept: no try is allowed", "offered": 300}),
    ]
    read = {"kv_usage": [0.3] * 20 + [usage] * 9 + [0.3] * 10, "waiting": [0.0] * 20 + [waiting] * 9 + [0.0] * 10}
    samples = [*gauges(read), *own(40, cpu=0.2, loop_lag_p99=0.001)]
    return summarise(load(write(path / "run", records, offered=2000, events=events, samples=samples)))


def test_where_stress_ended_is_judged_at_the_level_that_failed(tmp_path: Path) -> None:
    (memory,) = climbed(tmp_path / "a", 0.99, 5.0, fell=True)["next"]
    assert memory.startswith("the KV cache was short at level 1.2 (")
    (compute,) = climbed(tmp_path / "b", 0.6, 5.0, fell=True)["next"]
    assert compute.startswith("requests queued at the server at level 1.2 (")
    assert climbed(tmp_path / "c", 0.6, 0.0, fell=True)["next"] == []
    whole = climbed(tmp_path / "d", 0.6, 0.0, fell=False)
    assert (whole["levels"]["stress"]["failed"], whole["next"]) == (None, [ROOM])


def test_an_end_that_names_its_level_names_it_once(tmp_path: Path) -> None:
    assert climbed(tmp_path, 0.99, 5.0, fell=True)["stop"]["purpose"] == "stress ended: level 1 is kept: no try is allowed"


def test_what_was_shed_is_counted_in_thousands(tmp_path: Path) -> None:
    records = [record(k, k * 0.005, tokens=2) for k in range(500)] + [lost(500 + k, 3.0, "shed") for k in range(2129)]
    assert any(
        line.startswith("shed by the limits: 2,129.") for line in summarise(load(write(tmp_path / "run", records)))["next"]
    )


def test_limits_of_classes_that_only_an_epoch_has_count(tmp_path: Path) -> None:
    """50 of the epoch's class take 0.3 s to their first token, and may take 0.2 s."""
    records = [record(k, k * 0.1) for k in range(50)] + [record(50 + k, 5 + k * 0.1, ttft=0.3, cls="late") for k in range(50)]
    epochs = [{"for": 5}, {"for": 5, "classes": {"late": {"slo": {"ttft": 0.2}}}}]
    found = summarise(load(write(tmp_path / "run", records, scenario={"phases": {"steady": {"epochs": epochs}}})))
    assert (found["goodput"]["value"], found["goodput"]["slo"]["late"]) == (0.5, {"ttft": 0.2})
    assert found["classes"]["late"]["goodput"]["value"] == 0
