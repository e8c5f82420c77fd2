"""What collectors and sinks did, in the report and in the verdict."""

from pathlib import Path
from typing import Any

import pytest

from kvbench.core import Event
from kvbench.report.files import load
from kvbench.report.summary import summarise
from kvbench.report.telemetry import rows
from tests.report.build import MANIFEST, record, write


def said(source: str, state: str, t: float = 5.0, **data: Any) -> Event:
    return Event(t=t, kind="collector", data={"source": source, "state": state, **data})


def summed(tmp_path: Path, collectors: list[dict[str, Any]], events: list[Event], **scenario: Any) -> dict[str, Any]:
    manifest = MANIFEST | {"collectors": collectors, "scenario": MANIFEST["scenario"] | scenario}
    records = [record(k, k * 0.005) for k in range(1200)]
    return summarise(load(write(tmp_path / "run", records, events=events, manifest=manifest)))


def check(summary: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in summary["verdict"]["checks"] if row["check"] == name)


def test_an_account_is_a_line(tmp_path: Path) -> None:
    stopped = said("nvml", "stopped", readings=50, failures=0, gaps=0, longest_gap_s=0.2, every_s=0.1, cost_s=0.05)
    summary = summed(tmp_path, [{"source": "nvml", "required": False, "driver": "550"}], [stopped])
    (row,) = summary["telemetry"]["collectors"]
    assert (row["state"], row["readings"], row["facts"]) == ("worked", 50, {"driver": "550"})
    assert dict(rows(summary["telemetry"]))["nvml"] == "50 readings, one per 100 ms; at most 1 ms of our CPU each"
    assert check(summary, "collector_gap")["value"] == 0


@pytest.mark.parametrize(("periods", "level"), [(2.5, "OK"), (3.5, "DEGRADED")])
def test_a_gap_of_more_than_three_periods_degrades(tmp_path: Path, periods: float, level: str) -> None:
    gap = said("prometheus", "gap", start=3.0, end=3.0 + periods, periods=periods, reason="refused")
    summary = summed(tmp_path, [{"source": "prometheus", "required": False}], [gap])
    found = check(summary, "collector_gap")
    assert (found["value"], found["level"]) == (periods, level)
    assert "prometheus, from 3 s to" in found["text"]


@pytest.mark.parametrize(
    ("required", "name", "level"), [(False, "collectors_lost", "DEGRADED"), (True, "required_lost", "INVALID")]
)
@pytest.mark.parametrize("how", ["before", "during"])
def test_a_lost_collector_degrades_and_a_required_one_invalidates(
    tmp_path: Path, required: bool, name: str, level: str, how: str
) -> None:
    crew = [{"source": "nvml", "required": required, "error": "no driver" if how == "before" else None}]
    events = [said("nvml", "lost", reason="no driver")] if how == "during" else []
    summary = summed(tmp_path, crew, events)
    found = check(summary, name)
    assert (found["value"], found["level"]) == (1, level)
    assert "nvml: no driver" in found["text"]
    assert summary["exit"]["code"] == (4 if required else 0)


def test_points_that_no_database_has_are_told_with_the_way_to_deliver_them(tmp_path: Path) -> None:
    note = "influx: 40 of 100 points were not delivered: kvbench export DIR --influx URL --resume"
    sink = Event(
        t=9.0, kind="sink", data={"sink": "influx", "to": "u", "points": 100, "delivered": 60, "complete": False, "notes": [note]}
    )
    summary = summed(tmp_path, [], [sink], sinks=[{"kind": "influx"}])
    found = check(summary, "sink_loss")
    assert (found["value"], found["level"]) == (0.4, "DEGRADED")
    assert note in summary["next"]
    assert dict(rows(summary["telemetry"]))["influx"] == "60 of 100 points delivered to u"


@pytest.mark.parametrize("source", ["device", {"0": "system"}])
def test_a_gpu_that_shares_the_systems_memory_is_said_to(tmp_path: Path, source: object) -> None:
    summary = summed(tmp_path, [{"source": "nvml", "required": False, "memory_source": source}], [])
    told = "GPU 0 has no memory of its own: gpu_memory, and every rule on it, is of the system's memory"
    assert (told in summary["warnings"]) == (source != "device")


def test_a_gpu_that_was_lost_is_warned_of(tmp_path: Path) -> None:
    lost = said("nvml", "gpu_lost", t=7.0, gpu=3, uuid="GPU-3", metric="every metric", reason="GPU is lost", last=6.9)
    summary = summed(tmp_path, [{"source": "nvml", "required": True}], [lost])
    told = [line for line in summary["warnings"] if "GPU 3" in line]
    assert told == ["GPU 3 was lost at 7 s: GPU is lost; what all GPUs draw is without it from then on"]


def test_what_happened_is_counted_those_that_were_only_counted_too(tmp_path: Path) -> None:
    events = [Event(t=1.0, kind="server_log", data={"rule": "preemption", "line": "x"}) for _ in range(20)]
    events.append(Event(t=1.0, kind="server_log", data={"rule": "preemption", "more": 300}))
    events.append(Event(t=2.0, kind="allocator", data={"what": "num_ooms", "more": 1}))
    found = summed(tmp_path, [], events)["telemetry"]
    assert found["happened"] == {"preemption": 320, "num_ooms": 1}


def test_nothing_was_asked_for_and_nothing_is_missing(tmp_path: Path) -> None:
    summary = summed(tmp_path, [], [])
    assert list(rows(summary["telemetry"])) == []
    for name in ("collector_gap", "collectors_lost", "required_lost", "sink_loss"):
        assert check(summary, name)["reason"] == "none was asked for"


def test_reuse_distance_is_a_feature_where_cache_accesses_are_on_record() -> None:
    from kvbench.report.features import reuse

    row = {"n": 3, "p50": 1.0, "p90": 4.0, "p99": 4.0, "mean": 2.0, "max": 4.0, "reason": None}
    found = reuse({"groups": {"0": {"reuse_distance": row}, "1": {"reuse_distance": {"n": 0}}}})
    assert found["value"] == {"0": {"p50": 1.0, "p90": 4.0, "p99": 4.0, "n": 3}}
    assert reuse(None)["value"] is None
    assert reuse({"groups": {"0": {"reuse_distance": {"n": 0}}}})["reason"] == "no block was used twice"
