"""What captures disturbed is left out of the headline: which requests, how much time, and rates as if it had not been."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.core import Event, Record
from kvbench.report.captures import cuts
from kvbench.report.cuts import Cuts
from kvbench.report.files import RunFiles, load
from kvbench.report.summary import summarise
from kvbench.report.write import finish
from tests.report.build import record, write

NSIGHT = {"collectors": [{"source": "nsight", "required": False, "error": None}]}


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
    def over(number: int, due: float, end: float | None) -> Record:
        return Record(id=number, due_ns=round(due * 1e9), end_ns=None if end is None else round(end * 1e9))

    records = [over(0, 8, 9.9), over(1, 9, 10.5), over(2, 11, 11.5), over(3, 11.9, 14), over(4, 12, 13), over(5, 5, None)]
    assert Cuts.of([(10, 12)]).caught(records) == {1, 2, 3, 5}
    assert Cuts.of([]).caught(records) == frozenset()


def profile(state: str, t: float = 0.0, **data: Any) -> Event:
    return Event(t=t, kind="profile", data={"state": state, **data})


def test_what_disturbed_is_what_has_a_start_and_an_end_or_was_cut_off() -> None:
    events = [
        profile("opened", start=1.0), profile("closed", start=1.0, end=2.0), profile("failed", reason="it did not begin"),
        profile("failed", start=4.0, end=6.0), profile("skipped", reason="no room"), profile("opened", start=8.0),
        Event(t=9.0, kind="signal"),
    ]  # fmt: skip
    assert cuts(RunFiles(Path("."), events=events)).spans == ((1.0, 2.0), (4.0, 6.0), (8.0, 9.0))


def test_figures_are_those_of_a_run_without_that_time(tmp_path: Path) -> None:
    """2 requests/s of 11 tokens in 0.3 s; within the capture, 5 to 9 s, each takes 3 s."""
    records = [record(k, k / 2, **({"ttft": 2.8} if 5 <= k / 2 < 9 else {})) for k in range(40)]
    told = [profile("opened", 5.0, start=5.0), profile("closed", 9.0, start=5.0, end=9.0, file="capture-1.nsys-rep", ranges=64)]
    summary = summarise(load(write(tmp_path / "run", records, steady=(0, 20), events=told, manifest=NSIGHT)))
    assert summary["headline"]["n"] == 32
    assert summary["headline"]["seconds"] == pytest.approx(16)
    assert summary["headline"]["cohort"] == "requests due in steady (8 met by captures left out)"
    assert summary["captures"]["left_out"] == {"requests": 8, "seconds": pytest.approx(4)}
    assert summary["latency"]["e2e"]["max"] == pytest.approx(0.3)
    assert summary["rates"]["offered"]["value"] == pytest.approx(32 / 16)
    late = sum(9 <= (r.end_ns or 0) / 1e9 < 20 for r in records if 5 <= r.due_ns / 1e9 < 9)
    assert summary["rates"]["ok"]["n"] == 32 + late  # their ends lie in time that counts
    inside = [t / 1e9 for r in records for t in r.token_ns if not 5 <= t / 1e9 < 9 and t / 1e9 < 20]
    assert summary["tokens"]["output_rate"]["value"] == pytest.approx(len(inside) / 16)
    assert summary["tokens"]["input_rate"]["value"] == pytest.approx(256 * (32 + late) / 16)
    (row,) = summary["captures"]["windows"]
    assert row["command"] == f"kvbench profile {tmp_path}/run/capture-1.nsys-rep --run {tmp_path}/run"
    checks = {check["check"]: check for check in summary["verdict"]["checks"]}
    assert checks["captured"]["text"] == "windows of a profiler: 1; a profiled run is no baseline"


def test_a_capture_over_all_of_steady_leaves_nothing_to_say(tmp_path: Path) -> None:
    records = [record(k, k / 2) for k in range(20)]
    told = [profile("opened", 0.0, start=0.0), profile("closed", 11.0, start=0.0, end=11.0)]
    summary = finish(write(tmp_path / "run", records, events=told, manifest=NSIGHT))
    assert summary["headline"]["n"] == 0
    assert summary["rates"]["ok"]["value"] is None
    assert summary["tokens"]["input_rate"]["value"] is None


def test_a_run_without_a_profiler_is_as_it_was(tmp_path: Path) -> None:
    summary = summarise(load(write(tmp_path / "run", [record(k, k / 2) for k in range(20)])))
    assert summary["captures"] == {
        "profiled": False,
        "why_none": None,
        "windows": [],
        "left_out": {"requests": 0, "seconds": 0.0},
    }
    assert not any("capture" in line or "profiler" in line for line in summary["warnings"])


def test_a_trigger_that_was_never_met_is_named(tmp_path: Path) -> None:
    collect = [{"kind": "nsight", "trigger": "ttft_p99: > 800ms"}]
    manifest = {"collectors": [{"source": "nsight", "required": False}]}
    run = write(tmp_path / "run", [record(k, k / 2) for k in range(20)], manifest=manifest, scenario={"collect": collect})
    assert "no capture window was opened: its trigger (ttft_p99: > 800ms) was never met" in summarise(load(run))["warnings"]
