"""The load level, what the watch decided and the snapshots, from events with known numbers."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbench.core import Event, Window
from kvbench.report.files import load
from kvbench.report.summary import summarise
from tests.report.build import gauges, record, write

STRESS = {"phase": "stress", "phase_kind": "stress"}


def at(t: float, kind: str, **data: Any) -> Event:
    return Event(t=t, kind=kind, data=data)


def rung(t: float, level: float, why: str = "the next rung") -> Event:
    return at(t, "level", phase="stress", level=level, why=why)


def climbed(path: Path, *events: Event, end: str = "duration", until: float = 150.0) -> dict[str, Any]:
    """Steady for 60 s at 1/s; stress from 60 s: 1/s, from 90 s on 1.2/s, from 120 s on 1.4/s, every request ok 0.3 s later."""
    steady = [record(k, float(k)) for k in range(60)]
    due = [60.0 + k for k in range(30)] + [90 + k / 1.2 for k in range(36)] + [120 + k / 1.4 for k in range(42)]
    stress = [record(60 + k, t, phase="stress", measured=False) for k, t in enumerate(due) if t < until]
    told = [at(60.0, "phase_start", **STRESS), *events, at(until, "phase_end", **STRESS, reason=end, offered=len(stress))]
    samples = gauges({"kv_usage": [0.3] * 60 + [0.5] * 30 + [0.6] * 30 + [0.9] * 30})
    run = write(path / "run", steady + stress, steady=(0.0, 60.0), offered=60, events=told, samples=samples)
    return summarise(load(run))


def test_a_rule_ends_stress_and_that_is_its_purpose(tmp_path: Path) -> None:
    """A stop rule at 130 s, 10 s into level 1.4: 1.2 was held, at 36 requests in 30 s."""
    stop = at(130.0, "stop", rule="kv_usage >= 90 %", reason="kv_usage is 91 %", **STRESS)
    found = climbed(tmp_path, rung(90.0, 1.2), rung(120.0, 1.4), stop, end="stop rule: kv_usage is 91 %", until=130.0)
    stress = found["levels"]["stress"]
    assert (stress["held"], stress["highest"], stress["ended_at"]) == (1.2, 1.4, 1.4)
    assert stress["offered_rate"] == pytest.approx(36 / 30)
    assert stress["ok_rate"] == pytest.approx(36 / 30, abs=1 / 30)
    assert stress["ended"] == "stop rule: kv_usage is 91 %"
    rows = found["levels"]["rungs"]
    assert [(row["level"], row["seconds"], row["held"]) for row in rows] == [
        (1, 60, True),
        (1, 30, True),
        (1.2, 30, True),
        (1.4, 10, False),
    ]
    assert [row["kv_usage"]["max"] for row in rows] == [0.3, 0.5, 0.6, 0.9]
    reason = "stress ended at level 1.4 by kv_usage is 91 %, which is its purpose; the run is whole"
    assert found["exit"] == {"code": 0, "reason": reason}
    assert found["stop"]["kind"] == "rule"


def test_the_statistics_are_of_steady_and_stress_has_a_row_of_its_own(tmp_path: Path) -> None:
    found = climbed(tmp_path, rung(90.0, 1.2), rung(120.0, 1.4))
    assert found["headline"]["n"] == 60
    assert found["rates"]["offered"]["value"] == pytest.approx(1.0)
    phases = {row["name"]: row for row in found["phases"]}
    assert phases["stress"]["outcomes"]["offered"] == 30 + 36 + 42
    assert phases["stress"]["rates"]["offered"]["value"] == pytest.approx(108 / 90)


def test_the_end_of_the_ladder_holds_its_last_rung(tmp_path: Path) -> None:
    found = climbed(tmp_path, rung(90.0, 1.2), rung(120.0, 1.4), end="level 1.4 held for 30 s: the ladder's end")
    assert found["levels"]["stress"]["held"] == 1.4
    assert found["stop"]["reason"] == "level 1.4 held for 30 s: the ladder's end"
    assert found["exit"]["reason"].startswith("stress ended: level 1.4 held for 30 s: the ladder's end, which is")


def test_a_level_that_fell_was_not_held(tmp_path: Path) -> None:
    """Up to 1.4, down to 1.2 again: the second 1.2 lasts to the end and is the best."""
    found = climbed(tmp_path, rung(90.0, 1.4), rung(120.0, 1.2, "ttft_p50 is 2 s"))
    assert [(row["level"], row["held"], row["ended"]) for row in found["levels"]["rungs"][1:]] == [
        (1.0, True, "the next rung"), (1.4, False, "ttft_p50 is 2 s"), (1.2, True, "duration"),
    ]  # fmt: skip
    assert found["levels"]["stress"]["held"] == 1.2


def test_no_level_is_said(tmp_path: Path) -> None:
    bare = summarise(load(write(tmp_path / "run", [record(0, 0.0)])))["levels"]
    assert (bare["rungs"], bare["last"], bare["reason"]) == ([], 1.0, "the level was 1 all the time")
    assert bare["stress"] == {"held": None, "reason": "no stress phase ran"}
    stop = at(65.0, "stop", rule="r", reason="ttft_p99 is 9 s", **STRESS)
    stress = climbed(tmp_path / "2", stop, end="stop rule: ttft_p99 is 9 s", until=65.0)["levels"]["stress"]
    assert (stress["held"], stress["reason"]) == (None, "no level was held: level 1 ended by stop rule: ttft_p99 is 9 s")


def test_decisions_of_the_watch_are_listed_and_healthy_windows_counted(tmp_path: Path) -> None:
    numbers = {"metric": "ttft_p50", "value": 1.2, "expected": 0.1, "sigma": 0.02, "z": 55.0, "n": 30, "start": 10.0, "end": 20.0}
    events = [at(10.0 * k, "watch", phase="steady", action="healthy", level=1.0) for k in range(1, 6)]
    events += [at(20.0, "watch", phase="steady", action="rollback", level=1.0, to=0.8, **numbers)]
    spec = {"watch": {"metrics": ["ttft_p50"], "sigma": 3, "action": "rollback"}}
    found = summarise(load(write(tmp_path / "run", [record(0, 0.0)], events=events, scenario=spec)))["watch"]
    assert found["counts"] == {"healthy": 5, "rollback": 1}
    assert [(row["t"], row["action"], row["z"], row["to"]) for row in found["decisions"]] == [(20.0, "rollback", 55.0, 0.8)]
    assert found["skipped"] == {}  # the run's end did not tell
    bare = summarise(load(write(tmp_path / "bare", [record(0, 0.0)])))["watch"]
    assert (bare["decisions"], bare["reason"]) == ([], "the scenario has no watch")


def test_a_snapshot_is_a_row(tmp_path: Path) -> None:
    window = Window(
        start=0.0, end=5.0, counts={"offered": 5, "held": 2}, values={"ttft_p99": 0.4, "offered_rate": 1.0}, n={"ttft_p99": 5}
    )
    event = at(5.0, "snapshot", phase="steady", window=msgspec.to_builtins(window))
    (row,) = summarise(load(write(tmp_path / "run", [record(0, 0.0)], events=[event])))["snapshots"]["rows"]
    assert (row["start"], row["end"], row["phase"]) == (0.0, 5.0, "steady")
    assert (row["values"]["ttft_p99"], row["n"]["ttft_p99"], row["values"]["goodput"], row["counts"]["held"]) == (0.4, 5, None, 2)
