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
    assert dict(rows(summary["telemetry"]))["nvml"] == "50 readings, one per 100 ms; 1 ms of our CPU each in the mean"
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
    behind = Event(t=5.0, kind="sink", data={"state": "behind", "sink": "influx", "to": "u", "reason": "503", "waiting": 40})
    assert summed(tmp_path / "more", [], [behind, sink], sinks=[{"kind": "influx"}])["telemetry"] == summary["telemetry"]
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


def test_a_lost_gpu_is_in_the_verdict_and_in_the_facts(tmp_path: Path) -> None:
    """Read by two collectors it is one GPU."""
    events = [
        said(source, "gpu_lost", t=7.0, gpu=3, uuid="GPU-3", metric="every metric", reason="GPU is lost")
        for source in ("nvml", "agent")
    ]
    gpus = [{"gpu": str(n), "uuid": f"GPU-{n}", "lost": None} for n in (2, 3)]
    crew = [{"source": "nvml", "required": True, "gpus": gpus}, {"source": "agent", "required": True, "agent": {"gpus": gpus}}]
    summary = summed(tmp_path, crew, events)
    found = check(summary, "gpus_lost")
    assert (found["value"], found["level"]) == (1, "DEGRADED")
    assert "GPU 3 (GPU-3) at 7 s: GPU is lost" in found["text"]
    own, other = summary["telemetry"]["collectors"]
    assert own["facts"]["gpus"] == other["facts"]["agent"]["gpus"] == [gpus[0], gpus[1] | {"lost": "GPU is lost", "at": 7.0}]
    assert dict(rows(summary["telemetry"]))["nvml"].endswith("GPU GPU-3 lost at 7 s: GPU is lost")


def test_a_source_that_is_lost_tells_its_account_too(tmp_path: Path) -> None:
    account = {"readings": 3, "failures": 57, "gaps": 1, "longest_gap_s": 58.5, "every_s": 1.0, "cost_s": 0.003}
    events = [said("prometheus", "lost", reason="silent"), said("prometheus", "stopped", **account)]
    summary = summed(tmp_path, [{"source": "prometheus", "required": True}], events)
    assert check(summary, "required_lost")["level"] == "INVALID"
    told = "lost: silent; 3 readings, one per 1 s; 57 failed; 1 gap, the longest 58.5 s; 1 ms of our CPU each in the mean"
    assert dict(rows(summary["telemetry"]))["prometheus"] == told


def test_a_period_that_was_made_longer_is_told_from_its_first(tmp_path: Path) -> None:
    account = {"readings": 5, "failures": 0, "gaps": 0, "longest_gap_s": 0, "every_s": 3.2, "every_first_s": 0.05, "cost_s": None}
    stopped = said("nvml", "stopped", **account)
    summary = summed(tmp_path, [{"source": "nvml", "required": False}], [stopped])
    assert dict(rows(summary["telemetry"]))["nvml"] == "5 readings, every 50 ms at first, 3.2 s at the end"


def test_kv_events_tell_messages_and_those_that_are_lost_are_in_the_verdict(tmp_path: Path) -> None:
    counted = {"messages": 340, "lost": 12, "replayed": 3, "restarts": 0, "broken": 0, "blind": 2}
    events = [said("kv_events", "missed", t=3.0, messages=n, first=5) for n in (8, 4)]
    events += [said("kv_events", "stopped", readings=900, failures=0, gaps=0, longest_gap_s=0, every_s=0.2, cost_s=0.5)]
    summary = summed(tmp_path, [{"source": "kv_events", "required": False}], [*events, said("kv_events", "account", **counted)])
    found = check(summary, "messages_lost")
    assert (found["value"], found["level"]) == (12, "DEGRADED")
    told = "340 messages, 12 lost, 3 replayed, 0 restarts; 2 blind; 500 ms of our CPU in all"
    assert dict(rows(summary["telemetry"]))["kv_events"] == told


def test_what_happened_is_counted_those_that_were_only_counted_too(tmp_path: Path) -> None:
    events = [Event(t=1.0, kind="server_log", data={"rule": "preemption", "line": "x"}) for _ in range(20)]
    events.append(Event(t=1.0, kind="server_log", data={"rule": "preemption", "more": 300}))
    events.append(Event(t=2.0, kind="allocator", data={"what": "num_ooms", "more": 1}))
    found = summed(tmp_path, [], events)["telemetry"]
    assert found["happened"] == {"preemption": 320, "num_ooms": 1}
    assert list(rows(found)) == [("log", "preemption 320"), ("PyTorch", "num_ooms 1")]


def test_nothing_was_asked_for_and_nothing_is_missing(tmp_path: Path) -> None:
    summary = summed(tmp_path, [], [])
    assert list(rows(summary["telemetry"])) == []
    for name in ("collector_gap", "collectors_lost", "required_lost", "sink_loss", "gpus_lost", "messages_lost"):
        assert check(summary, name)["reason"] == "none was asked for"


def test_reuse_distance_is_a_feature_where_cache_accesses_are_on_record() -> None:
    from kvbench.report.features import reuse

    row = {"n": 3, "p50": 1.0, "p90": 4.0, "p99": 4.0, "mean": 2.0, "max": 4.0, "reason": None}
    found = reuse({"groups": {"0": {"reuse_distance": row}, "1": {"reuse_distance": {"n": 0}}}})
    assert found["value"] == {"0": {"p50": 1.0, "p90": 4.0, "p99": 4.0, "n": 3}}
    assert reuse(None)["value"] is None
    assert reuse({"groups": {"0": {"reuse_distance": {"n": 0}}}})["reason"] == "no block was used twice"
