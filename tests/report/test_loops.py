"""What a person reads of law, level, watch and snapshots; whole, and of every prefix of the files."""

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kvbench.core import Event, Sample, Window
from kvbench.report import html, render
from kvbench.report.files import load
from kvbench.report.summary import summarise
from kvbench.report.write import as_json
from tests.report.build import gauges, record, write

FILES = ("requests.jsonl", "events.jsonl", "windows.jsonl", "samples.jsonl")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with everything: on demand, pid, a watch that rolls back, a snapshot, a fault, a Retry-After, stress ended."""
    steady, stress = {"phase": "steady", "phase_kind": "steady"}, {"phase": "stress", "phase_kind": "stress"}
    records = [record(k, float(k), ttft=0.5 if k < 4 else 0.1, group=k % 4) for k in range(60)]
    records += [record(60 + k, 60.0 + k, phase="stress", measured=False) for k in range(30)]
    window = Window(
        start=0.0, end=30.0, counts={"offered": 30}, n={"ttft_p50": 30},
        values={"offered_rate": 1.0, "ok_rate": 0.9, "ttft_p50": 0.123, "kv_usage_mean": 0.61, "error_rate": 0.0},
    )  # fmt: skip
    seen = {"metric": "ttft_p50", "value": 1.234, "expected": 0.1, "sigma": 0.02, "z": 56.7, "n": 30, "start": 30.0, "end": 40.0}
    events = [
        Event(t=30.0, kind="snapshot", data={"phase": "steady", "window": msgspec.to_builtins(window)}),
        Event(t=40.0, kind="watch", data={"action": "rollback", "level": 1.0, "to": 0.8, **seen, **steady}),
        Event(t=40.0, kind="level", data={"level": 0.8, "why": "ttft_p50 is 1.23 s", "from": 1.0, **steady}),
        Event(t=45.0, kind="gate_hold", data={"until": 47.0, "holds": 1, "closed": 2.0}),
        Event(t=46.0, kind="fault", data={"kind": "slow", "edge": "end", "at": 36.0, "for": 10.0, "factor": 4}),
        Event(t=50.0, kind="watch", data={"action": "healthy", "level": 0.8, **steady}),
        Event(t=60.0, kind="phase_start", data=stress),
        Event(t=75.0, kind="level", data={"level": 1.0, "why": "the next rung", "from": 0.8, **stress}),
        Event(t=90.0, kind="stop", data={"rule": "r", "reason": "kv_usage is 91 %", **stress}),
        Event(t=90.0, kind="phase_end", data={"reason": "stop rule: kv_usage is 91 %", "offered": 30, **stress}),
    ]
    law = [Sample(t=float(t), name="law_rate", value=2.0 + t / 60, source="law") for t in range(1, 61)]
    level = [Sample(t=float(t), name="level", value=0.8 if 40 <= t < 75 else 1.0, source="kvbench") for t in range(1, 91)]
    return write(
        tmp_path / "run", records, offered=60, steady=(0.0, 60.0), events=events, windows=[window],
        samples=[*gauges({"kv_usage": [0.5] * 10 + [0.8] * 50}), *law, *level],
        scenario={
            "control": {"law": "pid", "signal": "kv_usage", "setpoint": 0.8}, "phases": {"warmup": {"policy": "on_demand"}},
            "watch": {"metrics": ["ttft_p50"], "action": "rollback"},
        },
    )  # fmt: skip


def printed(summary: dict[str, Any], width: int = 80) -> str:
    out = io.StringIO()
    render.terminal(summary, Console(file=out, width=width))
    return out.getvalue()


def test_the_terminal_shows_the_loops_within_its_width(run: Path) -> None:
    text = printed(summarise(load(run)))
    flat = " ".join(text.split())
    for part in (
        "First uses", "4 requests of 4 prefix groups, kept apart: ttft p50 500 ms",
        "pid holds kv_usage at 80 %", "0 s after the end of the fault slow at 46 s, to within 5 % of it", "overshoot 0 %",
        "2.017 to 3/s, mean 2.508/s", "shed 0 %",
        "held up to level 0.8 (1/s offered,", "ended at 1: stop rule: kv_usage is 91 %",
        "healthy 1", "rollback: ttft_p50 1.23 s against 100 ms, 56.7 sigma away (n 30); level 1 to 0.8",
        "Snapshots", "61 %", "stress ended at level 1 by kv_usage is 91 %",
    ):  # fmt: skip
        assert part in flat, part
    assert max(len(line) for line in text.splitlines()) <= 80


def test_the_page_has_tracks_and_tables_of_them(run: Path) -> None:
    files = load(run)
    page = html.page(summarise(files), files)
    for part in ("Rate that the law lets in", "Load level", "<h2>Control</h2>", "<h2>Watch</h2>", "<h2>Snapshots</h2>",
                 "first uses: 4 requests", "56.7 sigma"):  # fmt: skip
        assert part in page, part


def test_a_run_without_them_shows_none_of_them(tmp_path: Path) -> None:
    files = load(write(tmp_path / "bare", [record(k, float(k)) for k in range(5)]))
    summary = summarise(files)
    pages = printed(summary) + html.page(summary, files)
    for title in ("Control", "Load level", "Watch", "Snapshots", "First uses", "Rate that the law"):
        assert title not in pages, title


def test_every_prefix_of_the_files_is_shown(run: Path) -> None:
    """Cut anywhere, as kill -9 leaves them: no part of the report fails, and the JSON stays strict."""
    whole = {name: (run / name).read_bytes() for name in FILES}
    for part in range(24):
        for name, data in whole.items():
            (run / name).write_bytes(data[: len(data) * part // 23])
        files = load(run)
        summary = summarise(files)
        assert printed(summary)
        assert html.page(summary, files)
        json.loads(as_json(summary, files), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("level", {"level": "high", "why": "", "phase": "steady"}), ("level", {"level": -1.0, "why": "", "phase": "steady"}),
        ("level", {}), ("watch", {"metric": "ttft_p50"}), ("watch", {"action": "anomaly", "value": "much"}),
        ("snapshot", {"window": {}}), ("snapshot", {"window": {"start": 0, "end": 5, "counts": {}, "values": {"ttft_p50": "x"}}}),
        ("gate_hold", {"until": -3}), ("fault", {"kind": "slow"}), ("run_end", {"law": [1, 2]}),
        ("run_end", {"watch": {"skipped": {"ttft_p50": "often"}}}),
        ("run_end", {"watch": {"skipped": {"ttft_p50": [7, "n=12"]}}}),
    ],
)  # fmt: skip
def test_a_damaged_event_is_dropped_and_counted(run: Path, kind: str, data: dict[str, Any]) -> None:
    line = msgspec.json.encode(Event(t=20.0, kind=kind, data=data)) + b"\n"
    (run / "events.jsonl").write_bytes(line + (run / "events.jsonl").read_bytes())
    files = load(run)
    assert files.damaged == {"events.jsonl": 1}
    assert printed(summarise(files))


def test_odd_but_whole_numbers_are_shown(run: Path) -> None:
    """A metric that this version does not know, a law that tells text where numbers were, a watch without numbers."""
    odd = [
        Event(t=20.0, kind="watch", data={"action": "anomaly", "metric": "novel_p42", "value": 1.5, "phase": "steady"}),
        Event(t=21.0, kind="watch", data={"action": "gave_up", "why": "level 0.8 is kept: 3 falls in a row did not help"}),
    ]
    skipped = b'{"ttft_p50":{"settling":3,"fewer than 20 requests":1004}}'
    watch = b'"watch":{"judged":{"kv_usage":9},"skipped":' + skipped + b"}"
    end = b'"inflight":0,"law":{"updates":"many","stale":null},' + watch
    told = (run / "events.jsonl").read_bytes().replace(b'"inflight":0', end)
    (run / "events.jsonl").write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in odd) + told)
    files = load(run)
    text = " ".join(printed(summarise(files)).split())
    assert files.damaged == {}
    assert "anomaly: novel_p42 1.5" in text
    assert "gave up; level 0.8 is kept" in text
    assert "the watch gave up" in text
    assert "ttft_p50 was not judged in 1,007 windows: fewer than 20 requests 1,004, settling 3" in text


def test_of_many_decisions_the_last_are_shown(tmp_path: Path) -> None:
    """The one that ended the run is among them."""
    told = [Event(t=10.0 * k, kind="watch", data={"action": "flag" if k < 12 else "stop", "level": 1.0}) for k in range(1, 13)]
    text = printed(
        summarise(load(write(tmp_path / "run", [record(0, 0.0)], events=told, scenario={"watch": {"action": "stop"}})))
    )
    assert "2m00s  stop; level 1" in text
    assert "40 s  flag" not in text
    assert "and 4 more earlier decisions: see summary.json" in text
