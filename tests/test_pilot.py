"""The pilot in a whole run on virtual time: the law's limits hold, the level scales what is offered, phases end as it says."""

import asyncio
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.clock import Clock, VirtualLoop
from kvbench.control.pid import Pid
from kvbench.core import Limits, Record, Seconds, Window
from kvbench.journal import Journal
from kvbench.level import Ladder
from kvbench.metrics.slots import Slots
from kvbench.phases import Phase
from kvbench.pilot import Controls
from kvbench.report.files import RunFiles, load
from kvbench.run import Run, Setup
from kvbench.source import Source
from kvbench.stop import Rule
from kvbench.workload.arrivals import Constant
from kvbench.workload.schedule import Closed, Schedule
from tests.test_driver import Plain, Scripted


class Halving:
    """A law that has seen `calls` windows and lets half as much in each time."""

    def __init__(self) -> None:
        self.windows: list[Window] = []

    def update(self, window: Window) -> Limits:
        self.windows.append(window)
        return Limits(rate=8.0 / 2 ** len(self.windows), burst=1.0, patience=0.5)

    def state(self) -> dict[str, float]:
        return {"calls": float(len(self.windows))}

    def told(self) -> dict[str, Any]:
        return {"updates": len(self.windows)}


class Enough:
    """Ends its phase at a time of its own."""

    def __init__(self, at: Seconds) -> None:
        self.at = at

    def check(self, slots: Slots, now: Seconds, live: Sequence[Record]) -> str | None:
        return f"enough at {now:g}" if now >= self.at else None


def rate(per_second: float, content: Plain | None = None) -> Any:
    content = content or Plain()
    return lambda start: Source(content, Schedule(Constant(rate=per_second), np.random.default_rng(0), start=start))


def fly(
    folder: Path, phases: Sequence[Phase], controls: Controls, service: float = 0.25, server: type[Scripted] = Scripted
) -> tuple[Run, RunFiles]:
    async def work() -> Run:
        clock = Clock(asyncio.get_running_loop())
        target = server(clock, lambda k: service)
        run = Run(Setup(target=target, phases=phases, controls=controls), clock, Journal(folder))
        await run.execute()
        return run

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work()), load(folder)


def test_the_laws_limits_hold_from_its_tick_on_and_are_written_down(tmp_path: Path) -> None:
    law = Halving()
    _, files = fly(tmp_path, [Phase("steady", "steady", rate(10), seconds=4)], Controls(law=law, over=2))
    released = [r.release_ns / 1e9 for r in files.records if r.release_ns is not None]
    per_second = [sum(second < at <= second + 1 for at in released) for second in range(4)]
    assert per_second[0] == 10  # 0.1, 0.2, ... 1.0: no law yet; the one at 0 is outside, the one at 1.0 came before the tick
    assert per_second[1:] == [4, 2, 1]  # 4/s, 2/s, 1/s
    rates = [(s.t, s.value) for s in files.samples if s.source == "law" and s.name == "law_rate"]
    assert rates == [(1, 4.0), (2, 2.0), (3, 1.0), (4, 0.5)] or rates == [(1, 4.0), (2, 2.0), (3, 1.0)]
    end = files.last("run_end")
    assert end is not None
    assert end.data["law"] == {"updates": len(rates)}


def test_a_law_is_asked_every_period_about_its_span_and_never_about_the_time_before_it_held(tmp_path: Path) -> None:
    law = Halving()
    phases = [
        Phase("warmup", "warmup", rate(10), seconds=5, controlled=False),
        Phase("steady", "steady", rate(10), seconds=9),
    ]
    _, files = fly(tmp_path, phases, Controls(law=law, every=2, over=6))
    assert [(w.start, w.end) for w in law.windows][:4] == [(5, 7), (5, 9), (5, 11), (7, 13)]
    warm = [r for r in files.records if r.phase == "warmup"]
    assert len(warm) == 50
    assert all(r.release_ns == r.due_ns for r in warm)


class Mute(Scripted):
    """Its KV usage rises by 1 % a second from 30 %; from 10.5 to 20.5 s it does not say."""

    def gauges(self, now: Seconds) -> dict[str, float]:
        return {} if 10.5 < now < 20.5 else {"kv_usage": 0.3 + now / 100}


def test_a_law_holds_still_while_its_signal_is_stale_and_goes_on_when_it_comes_back(tmp_path: Path) -> None:
    """Last read at 10 s; at 13 s that is 3 s old, the most that counts: the rate stands from 14 s until it is read at 21 s."""
    law = Pid(setpoint=0.8, start=5.0).arm(10.0)
    _, files = fly(tmp_path, [Phase("steady", "steady", rate(50), seconds=30)], Controls(Limits(rate=5.0), law), server=Mute)
    rates = {s.t: s.value for s in files.samples if s.name == "law_rate"}
    assert all(rates[t] == rates[13.0] for t in range(14, 21))
    moving = [*range(1, 14), *range(20, 29)]
    assert all(rates[t + 1] != rates[t] for t in moving if t != 13)
    end = files.last("run_end")
    assert end is not None
    assert (end.data["law"]["updates"], end.data["law"]["stale"]) == (len(rates), 7)


def test_a_law_without_its_signal_leaves_the_limits_and_says_so(tmp_path: Path) -> None:
    law = Pid(setpoint=0.8, start=5.0).arm(10.0)
    _, files = fly(tmp_path, [Phase("steady", "steady", rate(50), seconds=30)], Controls(Limits(rate=5.0), law))
    assert {s.value for s in files.samples if s.name == "law_rate"} == {5.0}
    end = files.last("run_end")
    assert end is not None
    assert end.data["law"]["stale"] == end.data["law"]["updates"] >= 29


def test_a_ladder_raises_what_is_offered_rung_by_rung_and_its_end_ends_the_phase(tmp_path: Path) -> None:
    phases = [
        Phase("steady", "steady", rate(10), seconds=10),
        Phase("stress", "stress", rate(10), ladder=Ladder(step=0.5, every=10, max=2.0)),
        Phase("drain", "drain", seconds=5),
    ]
    _, files = fly(tmp_path, phases, Controls())
    levels = [(e.t, e.data["level"]) for e in files.all("level")]
    assert levels == [(20, 1.5), (30, 2.0)]
    due = sorted(r.due_ns / 1e9 for r in files.records)
    assert [sum(a <= at < a + 10 for at in due) for a in (0, 10, 20, 30)] == [100, 100, 150, 200]
    ends = {e.data["phase"]: e.data["reason"] for e in files.all("phase_end")}
    assert ends["stress"].startswith("level 2 held for 10 s")
    assert all(r.measured == (r.phase == "steady") for r in files.records)


def test_the_level_scales_users_of_a_closed_loop_and_nobody_is_lost_between_phases(tmp_path: Path) -> None:
    closed = Closed.model_validate({"concurrency": 4})
    source = lambda start: Source(Plain(), users=closed, rng=np.random.default_rng(0))  # noqa: E731 - a phase's own builder
    phases = [
        Phase("steady", "steady", source, seconds=10.1),  # ends while four are in flight
        Phase("stress", "stress", source, ladder=Ladder(step=0.5, every=10, max=1.5)),
    ]
    _, files = fly(tmp_path, phases, Controls())
    edges = sorted([(r.sent_ns, 1) for r in files.records] + [(r.end_ns, -1) for r in files.records])
    most, now = {}, 0
    for at, step in edges:
        now += step
        most[int(at / 1e9)] = max(most.get(int(at / 1e9), 0), now)
    assert {most[s] for s in range(1, 20)} == {4}
    assert {most[s] for s in range(22, 28)} == {6}


def test_a_phase_ends_when_its_test_says_enough(tmp_path: Path) -> None:
    phases = [
        Phase("warmup", "warmup", rate(10), seconds=60, until=lambda start: Enough(start + 3)),
        Phase("steady", "steady", rate(10), seconds=2),
    ]
    _, files = fly(tmp_path, phases, Controls())
    assert [(e.data["phase"], e.data["reason"]) for e in files.all("phase_end")] == [
        ("warmup", "enough at 3"),
        ("steady", "duration"),
    ]


def test_an_idle_phase_waits_its_time(tmp_path: Path) -> None:
    phases = [Phase("idle", "baseline", seconds=7), Phase("steady", "steady", rate(10), seconds=2)]
    _, files = fly(tmp_path, phases, Controls())
    assert next((e.data["phase"], e.t, e.data["reason"]) for e in files.all("phase_end")) == ("idle", 7, "duration")
    assert min(r.due_ns for r in files.records) == 7_000_000_000


@pytest.mark.parametrize(("kind", "code"), [("steady", 5), ("stress", 0)])
def test_a_stop_rule_is_a_failure_in_steady_and_the_purpose_of_stress(kind: Any, code: int, tmp_path: Path) -> None:
    from kvbench.report.outcome import exit_code
    from kvbench.report.write import finish

    rule = Rule.model_validate({"ttft_p50": "> 100ms", "over": "5s", "min_requests": 0}, context={"text": True})
    content = Plain()  # numbers its requests through the whole run
    phases = [Phase("steady", "steady", rate(100, content), seconds=12)]
    if kind == "stress":
        phases.append(Phase("stress", "stress", rate(100, content), ladder=Ladder(1.0, 10, 3)))
    phases.append(Phase("drain", "drain", seconds=5))

    class Slow(Scripted):
        async def send(self, request: Any, record: Record) -> None:
            await super().send(request, record)
            record.first_ns = record.end_ns

    async def work() -> None:
        clock = Clock(asyncio.get_running_loop())
        begins = 12.0 if kind == "stress" else 4.0
        target = Slow(clock, lambda k: 0.05 if k < begins * 100 else 0.2)
        await Run(Setup(target=target, phases=phases, controls=Controls(rules=[rule])), clock, Journal(tmp_path)).execute()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work())
    summary = finish(tmp_path)
    assert summary["stop"]["phase"] == kind
    assert summary["stop"]["reason"].startswith("ttft_p50 is ")
    assert exit_code(summary)[0] == code, exit_code(summary)
    assert [e.data["phase"] for e in load(tmp_path).all("phase_end")][-1] == "drain"


def test_snapshots_cover_the_phase_without_overlap(tmp_path: Path) -> None:
    _, files = fly(tmp_path, [Phase("steady", "steady", rate(10), seconds=30, snapshot=10)], Controls())
    shots = [e.data["window"] for e in files.all("snapshot")]
    assert [(s["start"], s["end"], s["counts"]["offered"]) for s in shots] == [(0, 10, 100), (10, 20, 100), (20, 30, 100)]


def test_accounting_holds_through_every_move(tmp_path: Path) -> None:
    law = Halving()
    phases = [Phase("steady", "steady", rate(40), seconds=10), Phase("stress", "stress", rate(40), ladder=Ladder(1, 5, 3))]
    run, files = fly(tmp_path, phases, Controls(law=law, limits=Limits(inflight=3, patience=0.4)))
    run.driver.check()
    counts = {name: sum(r.outcome == name for r in files.records) for name in ("ok", "cancelled", "shed", "withdrawn", "dropped")}
    assert sum(counts.values()) == len(files.records) == run.driver.offered
    assert counts["shed"] > 0
    assert math.isclose(sum(1 for _ in itertools.chain(files.records)), run.driver.admitted + run.driver.stayed)
