"""The measures of docs/metrics.md, Control, against arithmetic done by hand."""

from pathlib import Path
from typing import Any

import pytest

from kvbench.core import Event, Sample, Window
from kvbench.report.files import load
from kvbench.report.summary import summarise
from tests.report.build import MANIFEST, gauges, lost, record, write

PID = {"law": "pid", "signal": "kv_usage", "setpoint": 0.8}
STEP = [0.2] * 10 + [0.96] * 5 + [0.8] * 45  # of kv_usage at 1, 2, ..., 60 s


def control(path: Path, **run: Any) -> dict[str, Any]:
    records = run.pop("records", [record(k, float(k)) for k in range(40)])
    block = {"control": run.pop("control", PID), **run.pop("scenario", {})}
    found = summarise(load(write(path / "run", records, steady=(0.0, 60.0), scenario=block, **run)))
    return dict(found["control"])


def test_a_step_by_hand(tmp_path: Path) -> None:
    """Each reading holds for a second, the last (at the end) for none: 59 s. |error|: 10 x 0.6 + 5 x 0.16 = 6.8."""
    found = control(tmp_path, samples=gauges({"kv_usage": STEP}))
    assert (found["law"], found["signal"], found["set_point"], found["band"]) == ("pid", "kv_usage", 0.8, 0.05)
    assert found["iae"]["value"] == pytest.approx(6.8)
    assert found["iae"]["unit"] == "share x s"
    assert found["mean_error"]["value"] == pytest.approx(6.8 / 59)
    assert found["overshoot"]["value"] == pytest.approx(0.16)
    assert found["settling"]["value"] == pytest.approx(16.0)  # the first reading in the band for good
    assert found["settling"]["after"] == "the start of steady"
    assert found["in_band"]["value"] == pytest.approx(44 / 59)
    assert found["time_above"]["value"] == pytest.approx(5 / 59)
    assert found["overshoot"]["n"] == found["iae"]["n"] == 60


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        ([0.8] * 44 + [0.9], "never: outside the band at the end, after the start of steady at 0 s"),
        ([0.9] * 40 + [0.8] * 5, "never: in the band only for the last 4 s, after the start of steady at 0 s"),
    ],
)
def test_never_settled_says_why(tmp_path: Path, tail: list[float], reason: str) -> None:
    found = control(tmp_path, samples=gauges({"kv_usage": STEP[:15] + tail}))["settling"]
    assert (found["value"], found["reason"]) == (None, reason)


def test_settling_starts_at_the_last_disturbance(tmp_path: Path) -> None:
    """A fault of 20 s to 30 s throws the signal out until 34 s; then the level moves at 40 s and it is back at 43 s."""
    readings = [0.8] * 20 + [0.99] * 13 + [0.8] * 6 + [0.7] * 3 + [0.8] * 18
    faults = [Event(t=t, kind="fault", data={"kind": "slow", "edge": edge}) for t, edge in ((20.0, "begin"), (30.0, "end"))]
    samples = gauges({"kv_usage": readings})
    level = Event(t=40.0, kind="level", data={"level": 0.8, "why": "it fell", "phase": "steady"})
    moved = control(tmp_path, samples=samples, events=[*faults, level])["settling"]
    assert (moved["value"], moved["since"], moved["after"]) == (pytest.approx(3.0), 40.0, "a change of level")
    readings = [0.8] * 20 + [0.99] * 13 + [0.8] * 27
    fault = control(tmp_path / "2", samples=gauges({"kv_usage": readings}), events=faults)["settling"]
    assert (fault["value"], fault["since"], fault["after"]) == (pytest.approx(4.0), 30.0, "the end of the fault slow")


def test_a_queue_has_a_band_of_a_quarter(tmp_path: Path) -> None:
    """8 +- 2 waiting. |error| x s: 30 x 4 + 29 x 1."""
    law = {"law": "queue_feedback", "target_queue": 8}
    found = control(tmp_path, control=law, samples=gauges({"waiting": [12.0] * 30 + [7.0] * 30}))
    assert (found["signal"], found["set_point"], found["band"], found["unit"]) == ("waiting", 8.0, 2.0, "")
    assert found["settling"]["value"] == pytest.approx(31.0)
    assert (found["iae"]["value"], found["iae"]["unit"]) == (pytest.approx(149.0), "requests x s")
    assert found["overshoot"]["value"] == pytest.approx(4.0)


def test_ttft_is_read_from_the_windows(tmp_path: Path) -> None:
    windows = [
        Window(start=t - 10.0, end=float(t), counts={}, values={"ttft_p50": 0.5 if t > 20 else None}) for t in range(10, 60)
    ]
    found = control(tmp_path, control={"law": "pid", "signal": "ttft", "setpoint": 0.4}, windows=windows)
    assert found["overshoot"] == {"value": pytest.approx(0.1), "n": 39, "unit": "s", "reason": None}
    assert found["mean_error"]["value"] == pytest.approx(0.1)


def test_what_the_law_did_is_told(tmp_path: Path) -> None:
    law = [Sample(t=float(t), name="law_rate", value=v, source="law") for t, v in enumerate([None, 2.0, 4.0, 9.0, 1.0], 1)]
    records = [record(k, float(k)) for k in range(40)] + [lost(40 + k, 40.0 + k, "shed") for k in range(10)]
    run = write(tmp_path / "run", records, steady=(0.0, 60.0), scenario={"control": PID}, samples=law)
    text = (run / "events.jsonl").read_text()
    told = '"inflight":0,"law":{"updates":60,"stale":7,"fallbacks":0}'
    (run / "events.jsonl").write_text(text.replace('"inflight":0', told))
    summary = summarise(load(run))
    found = summary["control"]
    assert found["law_rate"] == {
        "n": 5,
        "unlimited": 1,
        "unit": "requests/s",
        "min": 1.0,
        "mean": 4.0,
        "max": 9.0,
        "reason": None,
    }
    assert found["told"] == {"updates": 60, "stale": 7, "fallbacks": 0}
    assert found["shed_share"]["value"] == pytest.approx(0.2)
    assert "the law pid held still, its signal missing or stale, at 7 of 60 decisions" in summary["warnings"]


def test_no_law_and_no_signal_are_null_with_a_reason(tmp_path: Path) -> None:
    found = control(tmp_path, control={"law": "none"}, samples=gauges({"kv_usage": STEP}))
    assert found["reason"] == "the law none holds no signal at a set-point"
    assert all(found[name]["value"] is None and found[name]["reason"] for name in ("settling", "overshoot", "iae"))
    assert found["time_above"]["value"] == pytest.approx(5 / 59)  # needs no law
    assert found["law_rate"]["reason"] == "no decision of a law is on record"
    silent = control(tmp_path / "2")
    assert silent["settling"]["reason"] == "no reading of kv_usage in steady"
    assert silent["time_above"]["reason"] == "not exposed by the target"
    old = summarise(load(write(tmp_path / "old", [record(0, 0.0)], manifest=MANIFEST)))["control"]
    assert (old["law"], old["reason"]) == (None, "the manifest names no law")


def test_two_engines_are_not_one_signal(tmp_path: Path) -> None:
    samples = [Sample(t=1.0, name="kv_usage", value=0.8, source="prometheus", labels={"engine": e}) for e in "01"]
    assert control(tmp_path, samples=samples)["iae"]["reason"] == "2 series of kv_usage: which one the law read is not known"
