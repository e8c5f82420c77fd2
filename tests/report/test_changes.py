"""Change points: found where a metric left its level, not where load explains it, and with the event that explains the rest."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.core import Event, Sample, Window
from kvbench.report.changes import changes, pelt
from kvbench.report.files import RunFiles
from kvbench.report.phases import Phase

STEADY = [Phase("steady", "steady", 0.0, 600.0)]


def files(shift: float = 1.0, at: int = 40, load: Any = 8.0, events: list[Event] | None = None, **more: Any) -> RunFiles:
    """60 windows of 10 s; ttft_p50 is 100 ms with 5 % noise, times `shift` from window `at` on; load by window or constant."""
    rng = np.random.default_rng(3)
    windows = []
    for i in range(60):
        rate = load(i) if callable(load) else load
        ttft = 0.1 * (rate / 8.0) * rng.lognormal(0, 0.05) * (shift if i >= at else 1.0)
        values: dict[str, float | None] = {"offered_rate": float(rate), "ttft_p50": float(ttft)}
        windows.append(Window(start=10.0 * i, end=10.0 * i + 10, counts={}, values=values, n={"ttft_p50": 50}))
    return RunFiles(Path("."), windows=more.pop("windows", windows), events=events or [], **more)


def brute(values: Any, penalty: float, least: int) -> list[int]:
    """Every segmentation, by dynamic programming without pruning."""
    n = len(values)
    best: list[tuple[float, list[int]]] = [(-penalty, []), *((float("inf"), []) for _ in range(n))]
    for end in range(least, n + 1):
        for start in range(end - least + 1):
            part = values[start:end]
            cost = best[start][0] + float(((part - part.mean()) ** 2).sum()) + penalty
            if cost < best[end][0]:
                best[end] = (cost, [*best[start][1], start])
    return best[n][1][1:]


@pytest.mark.parametrize("seed", range(8))
def test_pelt_cuts_where_an_exhaustive_search_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=60) + np.repeat(rng.normal(0, 3, size=6), 10)
    assert pelt(values, 8.0) == brute(values, 8.0, 3)


def test_pelt_finds_a_step_to_the_window_and_nothing_in_noise() -> None:
    rng = np.random.default_rng(1)
    noise = rng.normal(size=200)
    assert pelt(noise, 3 * np.log(200)) == []
    assert pelt(noise + 6 * (np.arange(200) >= 77), 3 * np.log(200)) == [77]


def test_a_change_is_marked_with_its_time_and_both_levels() -> None:
    (mark,) = changes(files(2.0), STEADY)["marks"]
    assert (mark["t"], mark["metric"], mark["n_before"], mark["n_after"]) == (400.0, "ttft_p50", 40, 20)
    assert mark["before"] == pytest.approx(0.1, rel=0.05)
    assert mark["after"] == pytest.approx(0.2, rel=0.05)
    assert mark["explained_by"] is None


def test_a_run_that_stays_is_not_marked() -> None:
    assert changes(files(), STEADY)["marks"] == []


def test_a_wave_of_load_is_no_change_and_a_fault_on_it_is() -> None:
    def wave(i: int) -> float:
        return float(8 + 5 * np.sin(2 * np.pi * i / 12))

    assert changes(files(load=wave), STEADY)["marks"] == []
    assert [mark["t"] for mark in changes(files(2.0, load=wave), STEADY)["marks"]] == [400.0]


@pytest.mark.parametrize(
    ("event", "what"),
    [
        (Event(t=398.0, kind="fault", data={"kind": "slow", "edge": "begin", "factor": 2.0}), "the fault slow begin"),
        (Event(t=391.0, kind="level", data={"level": 1.2, "from": 1.0}), "the level moved from 1 to 1.2"),
        (Event(t=400.0, kind="phase_start", data={"phase": "stress"}), "the phase stress began"),
        (Event(t=405.0, kind="gate_hold", data={"seconds": 3.0}), "the gate was closed by Retry-After"),
        (Event(t=399.0, kind="fault", data={}), "fault"),
    ],
)
def test_an_event_nearby_explains_it(event: Event, what: str) -> None:
    (mark,) = changes(files(2.0, events=[event]), STEADY)["marks"]
    assert mark["explained_by"] == {"kind": event.kind, "t": event.t, "what": what}


@pytest.mark.parametrize("t", [300.0, 411.0])
def test_an_event_long_before_or_after_does_not(t: float) -> None:
    (mark,) = changes(files(2.0, events=[Event(t=t, kind="fault", data={})]), STEADY)["marks"]
    assert mark["explained_by"] is None


def test_of_several_the_most_telling_explains_it() -> None:
    events = [Event(t=400.0, kind="level", data={"level": 1.2, "from": 1.0}), Event(t=390.0, kind="fault", data={})]
    (mark,) = changes(files(2.0, events=events), STEADY)["marks"]
    assert mark["explained_by"]["kind"] == "fault"


@pytest.mark.parametrize(("after", "kind"), [(4.0, "law"), (7.9, None)])
def test_a_law_that_lets_in_less_explains_it(after: float, kind: str | None) -> None:
    samples = [Sample(t=float(t), name="law_rate", value=8.0 if t < 385 else after, source="law") for t in range(600)]
    (mark,) = changes(files(2.0, samples=samples), STEADY)["marks"]
    assert (mark["explained_by"] or {}).get("kind") == kind


def test_overlapping_windows_and_those_of_other_phases_are_left_out() -> None:
    whole = files(2.0)
    doubled = [each for w in whole.windows for each in (w, Window(start=w.start + 5, end=w.end + 5, counts={}, values={}, n={}))]
    phases = [
        Phase("warmup", "warmup", 0.0, 100.0),
        Phase("steady", "steady", 100.0, 500.0),
        Phase("drain", "drain", 500.0, 600.0),
    ]
    found = changes(files(2.0, windows=doubled), phases)
    assert found["windows"] == 40
    assert [(mark["t"], mark["n_before"], mark["n_after"]) for mark in found["marks"]] == [(400.0, 30, 10)]


def test_too_few_windows_are_said() -> None:
    found = changes(files(2.0), [Phase("steady", "steady", 0.0, 110.0)])
    assert found["marks"] == []
    assert found["skipped"]["ttft_p50"] == "11 windows with enough behind them; 12 are the fewest"
    assert "0 windows" in found["skipped"]["kv_usage_mean"]


def test_a_run_without_windows_is_no_error() -> None:
    assert changes(files(windows=[]), [])["marks"] == []


def test_what_is_watched_is_looked_at_too() -> None:
    found = changes(files(manifest={"scenario": {"watch": {"metrics": ["kv_usage", "ttft_p90"]}}}), STEADY)
    assert "ttft_p90" in found["skipped"]
    assert "kv_usage" not in found["skipped"]  # as its mean
