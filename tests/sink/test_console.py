"""The views a person watches: what they say, how often they draw, and that nothing they meet can end a run."""

import asyncio
import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvbench.core import Event, Sample, Window
from kvbench.sink.console import VIEWS, Live, Plain, Quiet, bar, spark
from kvbench.sink.latest import Latest
from tests.whole import simulated

TOTALS = {"offered": 1234, "done": 1200, "inflight": 30, "held": 1, "shed": 3}


class Wall:
    """A wall clock that tests move by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def start(phase: str = "steady", seconds: float = 600.0) -> Event:
    return Event(t=10.0, kind="phase_start", data={"phase": phase, "phase_kind": phase, "bounds": {"seconds": seconds}})


def window(end: float, **values: float | None) -> Window:
    counts = {"offered": 30, "ok": 28, "tokens_out": 5000, "failed": 0, "timeout": 0}
    return Window(
        start=end - 10,
        end=end,
        counts=counts,
        values={"ttft_p50": 0.12, "ttft_p99": 0.8, "response_ttft_p50": 0.13, "response_ttft_p99": 0.9, **values},
    )


def console(width: int = 80, **options: Any) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, **options), out


def picture(view: Live) -> str:
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(view.picture(TOTALS))
    return out.getvalue()


def fed(total: int = 3) -> Live:
    view = Live(console(force_terminal=True)[0], total, Wall())
    view.write(start())
    for end in range(20, 60):
        view.write(window(float(end)))
        view.write(Sample(t=float(end), name="kv_usage", value=0.5 + end / 200, source="target"))
        view.write(Sample(t=float(end), name="running", value=12.0, source="target"))
    return view


def test_live_shows_phase_time_counts_first_tokens_and_cache() -> None:
    text = picture(fed())
    for part in ("steady", "1/3", "49 s of 10m00s", "offered 1,234", "done 1,200", "held 1", "shed 3", "p50 120 ms", "p99 800 ms",
                 "from due 130 ms / 900 ms",
                 "offered 3/s", "ok 2.8/s", "500 tok/s", "79.5 %", "running 12", "█"):  # fmt: skip
        assert part in text, part
    assert max(len(line) for line in text.splitlines()) <= 80
    assert len(text.splitlines()) <= 7


def test_live_draws_at_most_eight_times_a_second_of_wall_time() -> None:
    wall = Wall()
    screen, out = console(force_terminal=True, color_system=None)
    view = Live(screen, 1, wall)
    drawn = []
    for step in range(1000):  # 10 s of wall time in steps of 10 ms
        wall.now = step * 0.01
        before = out.tell()
        view.refresh(TOTALS)
        drawn.append(out.tell() > before)
    assert drawn[0]  # the first at once
    assert 60 <= sum(drawn) <= 81


def test_live_is_cheap() -> None:
    wall, view = Wall(), fed()
    view.wall = wall
    view.refresh(TOTALS)
    start = time.process_time()
    for step in range(1, 101):
        wall.now = step * 0.2
        view.refresh(TOTALS)
    assert (time.process_time() - start) / 100 < 3e-3


def test_plain_says_a_line_at_once_and_then_every_ten_seconds() -> None:
    wall = Wall()
    screen, out = console()
    view = Plain(screen, 2, wall)
    view.write(start())
    view.write(window(20.0, kv_usage_mean=0.25))
    for step in range(410):  # 41 s
        wall.now = step * 0.1
        view.refresh(TOTALS)
    lines = out.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[0] == (
        "[20 s] steady 1/2 | 10 s of 10m00s | offered 1,234 done 1,200 inflight 30 held 1 shed 3"
        " | ttft p50 120 ms p99 800 ms | kv 25 %"
    )
    assert "\x1b" not in out.getvalue()


def test_news_is_told_at_once() -> None:
    screen, out = console()
    view = Plain(screen, 1, Wall())
    view.write(Event(t=42.0, kind="stop", data={"rule": "r", "reason": "kv_usage is 95 %"}))
    assert out.getvalue() == "[42 s] stop: kv_usage is 95 %\n"
    live = fed()
    live.write(Event(t=60.0, kind="signal", data={"signal": "SIGINT"}))
    assert "signal: SIGINT" in picture(live)


def test_quiet_says_nothing() -> None:
    screen, out = console()
    view = Quiet(screen, 1, Wall())
    view.write(start())
    view.refresh(TOTALS)
    asyncio.run(view.aclose())
    assert out.getvalue() == ""


class Gone(io.StringIO):
    """The reader of the pipe has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


ODD = [
    Event(t=1.0, kind="phase_start", data={"phase": None, "bounds": {"seconds": "long"}}), Event(t=1.0, kind="phase_start"),
    Event(t=1.0, kind="stop"), Sample(t=1.0, name="kv_usage", value=None), Sample(t=1.0, name="kv_usage", value=7.5),
    Window(start=0, end=0, counts={}, values={}), Window(start=0, end=10, counts={}, values={"ttft_p50": None, "ttft_p99": None}),
    Window(start=0, end=10, counts={"offered": -3}, values={"ttft_p99": float("inf")}),
]  # fmt: skip


@pytest.mark.parametrize("name", list(VIEWS))
@pytest.mark.parametrize("file", [io.StringIO, Gone], ids=["whole", "broken pipe"])
def test_nothing_a_view_meets_is_raised_into_the_run(name: str, file: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.dup2", lambda *_: None)  # rich would close this process's own stdout
    wall = Wall()
    view = VIEWS[name](Console(file=file(), force_terminal=True, width=40), 0, wall)
    for item in ODD:
        view.write(item)
        wall.now += 60
        view.refresh({})
    view.refresh(TOTALS)
    asyncio.run(view.aclose())


def test_windows_that_overlap_are_not_added_up() -> None:
    latest = Latest(1)
    for end in (10.0, 11.0, 12.0):
        latest.take(window(end))
    assert latest.rates["offered"] == 3.0


def test_bars_and_sparklines() -> None:
    assert bar(0.5, 8) == "████░░░░"
    assert bar(7.0, 4) == "████"
    assert bar(0.25, 4, utf8=False) == "#---"
    assert spark(Latest(1).past["ok"]) == ""
    latest = Latest(1)
    latest.past["ok"].extend([0.0, 1.0, 2.0])
    assert spark(latest.past["ok"]) == " ▄█"


def test_the_level_and_what_the_law_lets_in_are_shown() -> None:
    view = fed()
    assert "control" not in picture(view)
    view.write(Sample(t=60.0, name="level", value=1.4, source="kvbench"))
    view.write(Sample(t=60.0, name="law_rate", value=3.456, source="law"))
    line = next(line for line in picture(view).splitlines() if "control" in line)
    for part in ("level 1.4", "law 3.46/s"):
        assert part in line
    assert picture(view).count("held") == 1
    view.write(Sample(t=61.0, name="law_rate", value=None, source="law"))  # the law let go
    assert "law no limit" in picture(view)


def test_a_level_without_a_law_names_no_law() -> None:
    view = fed()
    view.write(Sample(t=60.0, name="level", value=1.4, source="kvbench"))
    line = next(line for line in picture(view).splitlines() if "control" in line)
    assert "level 1.4" in line
    assert "law" not in line


def test_plain_lines_tell_them_too() -> None:
    screen, out = console()
    view = Plain(screen, 2, Wall())
    view.write(Sample(t=60.0, name="law_rate", value=3.0, source="law"))
    view.refresh(TOTALS)
    assert out.getvalue().rstrip().endswith("held 1 shed 3 | law 3/s")


@pytest.mark.parametrize(
    ("kind", "data", "told"),
    [
        ("level", {"level": 0.8, "why": "ttft_p50 is 2 s"}, "[9 s] level: 0.8, ttft_p50 is 2 s\n"),
        ("watch", {"action": "rollback", "metric": "ttft_p50"}, "[9 s] watch: rollback ttft_p50\n"),
        ("watch", {"action": "healthy"}, ""),
        ("watch", {"action": "anomaly", "metric": "ttft_p50", "value": 2.0, "expected": 0.8, "z": 4.0},
         "[9 s] watch: anomaly ttft_p50 is 2 s, 800 ms expected\n"),
        ("watch", {"action": "anomaly", "value": 2.0, "expected": 0.8}, "[9 s] watch: anomaly\n"),
        ("watch", {"action": "anomaly", "metric": "kv_usage", "value": 0.95, "expected": 0.5},
         "[9 s] watch: anomaly kv_usage is 95 %, 50 % expected\n"),
        ("gate_hold", {"until": 12.5}, "[9 s] gate_hold: Retry-After closed the gate until 12.5 s\n"),
        ("gate_hold", {}, "[9 s] gate_hold\n"), ("level", {}, "[9 s] level\n"), ("watch", {}, "[9 s] watch\n"),
        ("fault", {"kind": "slow", "edge": "begin"}, "[9 s] fault: slow begins\n"),
        ("collector", {"source": "nvml", "state": "failing", "reason": "mute"}, "[9 s] collector: nvml failing: mute\n"),
        ("collector", {"source": "nvml", "state": "back", "after": "no answer"}, "[9 s] collector: nvml back\n"),
        ("collector", {"source": "agent", "state": "gap", "start": 2.0, "end": 7.5, "reason": ""},
         "[9 s] collector: agent no reading from 2 s to 7.5 s\n"),
        ("collector", {"source": "nvml", "state": "gpu_lost", "gpu": 1, "reason": "gone"},
         "[9 s] collector: nvml GPU 1 lost: gone\n"),
        ("collector", {"source": "nvml", "state": "started"}, ""), ("collector", {"source": "nvml", "state": "stopped"}, ""),
        ("sink", {"sink": "influx", "to": "db", "state": "behind", "reason": "503", "waiting": 12},
         "[9 s] sink: db behind, 12 points wait: 503\n"),
        ("sink", {"sink": "influx", "to": "db", "state": "back"}, "[9 s] sink: db back\n"),
        ("sink", {"sink": "influx", "points": 100}, ""),
        ("level", {"level": "high"}, "[9 s] level\n"), ("snapshot", {"window": {}}, ""),
    ],
)  # fmt: skip
def test_decisions_are_news_and_healthy_windows_are_not(kind: str, data: dict[str, Any], told: str) -> None:
    screen, out = console()
    Plain(screen, 1, Wall()).write(Event(t=9.0, kind=kind, data=data))
    assert out.getvalue() == told


CROWDED = """
target: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090}
workload: {arrivals: {shape: burst, requests: 40, every: 10s}, prompt: 64, output: 64}
control: {law: bucket, rate: 2/s, burst: 5, patience: 4s}
phases:
  steady:
    epochs:
      - {for: 12s, arrivals: {shape: burst, requests: 40, every: 10s}}
      - {for: 12s, arrivals: {shape: constant, rate: 1/s}}
"""


def test_the_counts_add_up_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 at once 5 are let in at once and 8 within 4 s; the others give up, or are withdrawn as their epoch ends."""
    seen: list[dict[str, int]] = []

    class Counting(Quiet):
        def refresh(self, totals: Mapping[str, int]) -> None:
            seen.append(dict(totals))

    monkeypatch.setitem(VIEWS, "quiet", Counting)
    run = simulated(CROWDED, tmp_path)
    assert len(seen) > 20
    for totals in seen:
        assert totals["offered"] == sum(count for name, count in totals.items() if name != "offered"), totals
    assert any(totals["held"] for totals in seen)
    total = run.summary["accounting"]["total"]
    assert (seen[-1]["shed"], seen[-1]["unsent"]) == (total["shed"], total["withdrawn"])
    assert total["shed"] == 27  # of the first burst; the second has 2 s, which let in 3 more: at 12 s the epoch is over
    assert total["withdrawn"] == 32
