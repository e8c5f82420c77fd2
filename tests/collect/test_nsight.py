"""Capture windows: when they open, every failure of nsys bounded and told, and a report that leaves out what they met."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.clock import Clock, VirtualLoop
from kvbench.collect import Place
from kvbench.collect.moments import Moments, read_trigger
from kvbench.collect.nsight import NO_RANGES, Nsight, NsightCollector
from kvbench.collect.profiler import ProfilerError
from kvbench.collect.session import Session
from kvbench.core import Event, Window
from kvbench.scenario import ScenarioError, load
from tests.collect.fake_nsys import FakeNsys
from tests.test_launch import ran, scenario
from tests.whole import ROOT, Whole

REAL = ROOT / ".venv/tools/nsys/target-linux-x64/nsys"


def phase(what: str, t: float, name: str = "steady", kind: str = "steady", seconds: float | None = None) -> Event:
    bounds = {"seconds": seconds} if seconds is not None else {}
    return Event(t=t, kind=f"phase_{what}", data={"phase": name, "phase_kind": kind, "start": t, "bounds": bounds})


def window(start: float, end: float, n: int = 1000, **values: float) -> Window:
    return Window(start=start, end=end, counts={}, values=values, n=dict.fromkeys(values, n))


# ---- when


def test_a_condition_is_read_from_windows_of_steady_alone() -> None:
    moments = Moments("steady", read_trigger({"ttft_p99": "> 800ms"}))
    slow = {"ttft_p99": 0.9}
    assert moments.tell(window(0, 10, **slow)) is None  # nothing has begun
    moments.tell(phase("start", 5, "warmup", "warmup"))
    assert moments.tell(window(5, 15, **slow)) is None
    moments.tell(phase("end", 20, "warmup", "warmup"))
    moments.tell(phase("start", 20, seconds=60))
    assert moments.tell(window(15, 25, **slow)) is None  # half of it is warm-up
    assert moments.tell(window(20, 30, ttft_p99=0.7)) is None
    assert moments.tell(window(20, 30, n=99, **slow)) is None  # one request decides a p99 of fewer than 100
    found = moments.tell(window(21, 31, **slow))
    assert found is not None
    assert (found["metric"], found["value"], found["n"], found["trigger"]) == ("ttft_p99", 0.9, 1000, "ttft_p99 > 800 ms")
    moments.tell(phase("end", 80))
    assert moments.tell(window(70, 80, **slow)) is None


def test_a_condition_with_for_has_to_hold_at_every_window() -> None:
    moments = Moments("steady", read_trigger({"kv_usage": ">= 90%", "for": 2.0}))
    moments.tell(phase("start", 0))
    seen = [
        moments.tell(window(t - 1, t, kv_usage_mean=value)) for t, value in ((1, 0.95), (2, 0.8), (3, 0.95), (4, 0.9), (5, 0.91))
    ]
    assert [found is not None for found in seen] == [False, False, False, False, True]


def test_preemptions_and_anomalies_ask_for_a_window() -> None:
    moments = Moments("steady", read_trigger("preemptions"))
    moments.tell(phase("start", 0))
    assert moments.tell(window(0, 10, n=2, preemptions_total_rate=0.9)) is None
    assert moments.tell(window(0, 10, n=2, preemptions_total_rate=1.0)) is not None
    moments = Moments("steady", read_trigger("anomaly"))
    moments.tell(phase("start", 0))
    assert moments.tell(Event(t=1, kind="watch", data={"action": "flag", "metric": "ttft_p50"})) is None
    found = moments.tell(Event(t=1, kind="watch", data={"action": "anomaly", "metric": "ttft_p50", "value": 2.0, "z": 5.0}))
    assert found is not None
    assert (found["metric"], found["z"]) == ("ttft_p50", 5.0)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"trigger": {"ttft_p99": "800ms"}}, "needs a comparison"),
        ({"trigger": {"ttft_p95": "> 800ms"}}, "windows hold no ttft_p95"),
        ({"trigger": {"ttfx_p99": "> 800ms"}}, "unknown metric"),
        ({"trigger": {"ttft_p99": "> 800ms", "over": 5.0}}, "over is no part of a trigger"),
        ({"trigger": "storm"}, "write preemptions, anomaly"),
        ({"trigger": "anomaly", "after": 5.0}, "one of `at`, `after` and `trigger`"),
        ({"through": "session"}, "needs the name"),
        ({"through": "server", "session": "x"}, "belongs to through: session"),
        ({"for": 61.0}, "less than or equal to 60"),
        ({"most": 0}, "greater than or equal to 1"),
    ],
)
def test_what_is_refused(spec: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Nsight.model_validate(spec)


# ---- one run of the collector, in virtual time


class Stage:
    """A profiler that notes when it was called, and fails as it is told to."""

    def __init__(self, clock: Clock, fail: dict[int, str] | None = None, takes: float = 1.0) -> None:
        self.clock, self.fail, self.takes = clock, fail or {}, takes
        self.calls: list[tuple[str, float]] = []

    async def open(self) -> dict[str, Any]:
        return {}

    async def begin(self, stem: Path) -> None:
        self.calls.append(("begin", self.clock.now()))
        if self.fail.get(sum(call == "begin" for call, _ in self.calls)) == "begin":
            raise ProfilerError("it does not begin", begun=False)

    async def end(self, stem: Path) -> Path | None:
        self.calls.append(("end", self.clock.now()))
        await self.clock.sleep_until(self.clock.now() + self.takes)
        if self.fail.get(sum(call == "begin" for call, _ in self.calls)) == "end":
            raise ProfilerError("it left no file")
        return None

    async def abandon(self) -> None:
        self.calls.append(("abandon", self.clock.now()))

    async def close(self) -> None:
        self.calls.append(("close", self.clock.now()))


def staged(
    spec: dict[str, Any], script: list[tuple[float, Any]], fail: dict[int, str] | None = None, takes: float = 1.0
) -> tuple[list[tuple[str, float]], list[Event]]:
    """Tell the collector of `script` ((when, event or window)), then stop it: the profiler's calls, and what was told."""
    told: list[Event] = []

    async def work() -> list[tuple[str, float]]:
        clock = Clock(asyncio.get_running_loop())
        stage = Stage(clock, fail, takes)
        collector = NsightCollector(Nsight.model_validate(spec), Place(clock, Path("/nowhere")), stage)
        await collector.open()
        collector.start(told.append)
        for at, item in script:
            await clock.sleep_until(at)
            collector.tell(item)
        await collector.stop()
        return stage.calls

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work()), [event for event in told if event.kind == "profile"]


STEADY = [(20.0, phase("start", 20.0, seconds=100)), (120.0, phase("end", 120.0))]


def test_windows_open_by_the_clock_of_their_phase_and_never_overlap() -> None:
    calls, told = staged({"at": [10.0, 12.0, 40.0, 97.0], "for": 5.0}, STEADY)
    assert calls == [("begin", 30), ("end", 35), ("begin", 60), ("end", 65), ("close", 120)]
    closed = [(event.data["start"], event.data["end"]) for event in told if event.data["state"] == "closed"]
    assert closed == [(30, 36), (60, 66)]
    skipped = [(event.t, event.data["reason"]) for event in told if event.data["state"] == "skipped"]
    assert skipped == [(32, "another window is open"), (117, "3 s are left of the phase, and a window needs 7 s")]


def test_triggers_rest_between_windows_and_stop_at_most() -> None:
    slow = [(20.0 + t, window(19.0 + t, 20.0 + t, ttft_p99=1.0)) for t in range(1, 100)]
    calls, told = staged(
        {"trigger": {"ttft_p99": "> 800ms"}, "for": 5.0, "apart": 10.0, "most": 2}, [STEADY[0], *slow, STEADY[1]]
    )
    assert [at for call, at in calls if call == "begin"] == [21, 37]  # 27 + 10 of rest
    assert [event.data["trigger"]["value"] for event in told if event.data["state"] == "opened"] == [1.0, 1.0]


def test_the_end_of_the_phase_closes_a_window_and_so_does_the_end_of_the_run() -> None:
    counted = [(0.0, phase("start", 0.0)), (12.0, phase("end", 12.0)), (30.0, phase("start", 30.0, "drain", "drain"))]
    calls, _ = staged({"after": 10.0, "for": 5.0}, counted)
    assert calls == [("begin", 10), ("end", 12), ("close", 30)]
    calls, told = staged({"after": 10.0, "for": 5.0}, [(0.0, phase("start", 0.0)), (11.0, window(1, 11))])
    assert calls == [("begin", 10), ("end", 11), ("close", 12)]
    assert told[-1].data["state"] == "closed"


def test_what_the_run_did_not_come_to_is_told() -> None:
    _, told = staged({"at": [10.0, 30.0, 50.0], "for": 5.0, "most": 1}, [(0.0, phase("start", 0.0)), (40.0, window(30, 40))])
    skipped = [(event.data["trigger"]["at"], event.data["reason"]) for event in told if event.data["state"] == "skipped"]
    assert skipped == [(30, "as many windows as may be (most: 1) were opened"), (50, "the run was over before it")]


def test_a_window_that_does_not_close_is_told_of_and_the_run_ends() -> None:
    calls, told = staged({"after": 10.0, "for": 5.0}, [(0.0, phase("start", 0.0)), (12.0, phase("end", 12.0))], takes=1000)
    assert calls[-1] == ("close", 21)
    assert (told[-1].data["state"], told[-1].data["end"]) == ("failed", 21)


def test_a_failure_is_tried_once_more_and_two_are_the_end_of_it() -> None:
    calls, told = staged({"at": [10.0, 50.0], "for": 5.0}, STEADY, fail={1: "end"})
    assert calls == [
        ("begin", 30),
        ("end", 35),
        ("abandon", 36),
        ("begin", 36),
        ("end", 41),
        ("begin", 70),
        ("end", 75),
        ("close", 120),
    ]
    assert [event.data["state"] for event in told] == ["opened", "failed", "opened", "closed", "opened", "closed"]
    calls, told = staged({"at": [10.0, 50.0], "for": 5.0}, STEADY, fail={1: "begin", 2: "begin"})
    assert calls == [("begin", 30), ("begin", 30), ("close", 120)]  # nothing of ours was open: nothing is abandoned
    assert [event.data["state"] for event in told] == ["failed", "failed"]
    assert "end" not in told[0].data  # and nothing was disturbed


# ---- whole runs against a fake nsys


def profiled(fake: FakeNsys, folder: Path, *asked: str, steady: str = "4s", name: str = "nsight", **spec: Any) -> Whole:
    collect = {"kind": name, "nsys": str(fake.program), "after": "500ms", "for": "500ms", **spec}
    return ran(scenario(*asked, steady=steady, also=yaml.safe_dump({"collect": [collect]})), folder)


def events(run: Whole, kind: str) -> list[dict[str, Any]]:
    return [event["data"] for event in run.lines("events.jsonl") if event["kind"] == kind]


def test_a_launched_server_runs_under_nsys_and_its_window_is_left_out(tmp_path: Path) -> None:
    fake = FakeNsys(tmp_path / "fake")
    run = profiled(fake, tmp_path)
    verbs = fake.verbs()
    assert verbs[:2] == ["--version", "launch"]
    assert [verb for verb in verbs if verb in ("start", "stop", "shutdown")] == ["start", "stop", "shutdown"]
    assert fake.calls[-1].endswith("--kill=none")
    (closed,) = [data for data in events(run, "profile") if data["state"] == "closed"]
    assert (closed["ranges"], closed["file"]) == (64, "capture-1.nsys-rep")
    steady = next(row for row in run.summary["phases"] if row["kind"] == "steady")
    assert steady["start"] < closed["start"] < closed["end"] < steady["end"]

    start, end = closed["start"], closed["end"]
    met = [r for r in run.records if r.phase == "steady" and r.due_ns / 1e9 < end and r.end_ns / 1e9 >= start]
    assert len(met) >= 8
    assert run.summary["headline"]["n"] == 80 - len(met)
    assert run.summary["headline"]["seconds"] == pytest.approx(4 - (end - start), abs=0.01)
    assert f"{len(met)} met by captures left out" in run.summary["headline"]["cohort"]
    ended = [r for r in run.records if r.phase == "steady" and not start <= r.end_ns / 1e9 < end]
    assert run.summary["rates"]["ok"]["value"] == pytest.approx(len(ended) / (4 - (end - start)), rel=0.03)
    assert run.summary["captures"]["left_out"]["requests"] == len(met)
    assert run.summary["captures"]["windows"][0]["command"].startswith("kvbench profile ")
    checks = {row["check"]: row for row in run.summary["verdict"]["checks"]}
    assert (checks["captured"]["value"], checks["captured"]["level"]) == (1, "NOTED")
    assert "no baseline" in " ".join(run.summary["warnings"])


@pytest.mark.parametrize(
    ("mode", "says", "begun"),
    [
        ("failing", "`nsys start` failed with exit code 1: Configuring is not allowed in this state.", False),
        ("hanging", "`nsys start` did not end within 0.5 s and was killed", True),
        ("lying", "`nsys stop` ended, told of success and left no file", True),
        ("raw", "importer is missing", True),
        ("slow", "`nsys stop` did not end within 0.6 s and was killed", True),
    ],
)
def test_every_failure_of_nsys_is_bounded_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, says: str, begun: bool
) -> None:
    monkeypatch.setattr("kvbench.collect.session.START", 0.5)
    monkeypatch.setattr("kvbench.collect.session.STOP", 0.6)
    fake = FakeNsys(tmp_path / "fake", mode)
    fake.session("s")

    async def work() -> None:
        session = Session(str(fake.program), "s")
        await session.begin(tmp_path / "stem")
        await session.end(tmp_path / "stem")

    with pytest.raises(ProfilerError) as caught:
        asyncio.run(asyncio.wait_for(work(), 10))
    assert says in str(caught.value)
    assert caught.value.begun is begun


def test_a_session_that_is_gone_is_not_started_anew(tmp_path: Path) -> None:
    fake = FakeNsys(tmp_path / "fake")
    with pytest.raises(ProfilerError, match="the nsys session 's' is gone"):
        asyncio.run(Session(str(fake.program), "s").begin(tmp_path / "stem"))
    assert fake.verbs() == ["sessions"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["failing", "lying", "hanging", "slow"])
def test_an_nsys_that_fails_costs_the_capture_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr("kvbench.collect.session.START", 1.0)
    monkeypatch.setattr("kvbench.collect.session.STOP", 1.0)
    fake = FakeNsys(tmp_path / "fake", mode)
    began = time.monotonic()
    run = profiled(fake, tmp_path, steady="10s")
    assert time.monotonic() - began < 30
    assert run.summary["outcomes"]["ok"] > 50
    failed = [data for data in events(run, "profile") if data["state"] == "failed"]
    assert len(failed) == 2, failed
    assert fake.verbs().count("start") == 2  # one retry
    (row,) = [row for row in run.summary["telemetry"]["collectors"] if row["source"] == "nsight"]
    assert row["state"] == "lost"
    assert run.summary["verdict"]["verdict"] in ("DEGRADED", "INVALID")
    assert any(line.startswith("capture failed") for line in run.summary["warnings"])


@pytest.mark.slow
def test_a_capture_without_ranges_is_tried_again_and_told_with_advice(tmp_path: Path) -> None:
    fake = FakeNsys(tmp_path / "fake", "empty")
    run = profiled(fake, tmp_path, steady="8s")
    closed = [data for data in events(run, "profile") if data["state"] == "closed"]
    assert [data["ranges"] for data in closed] == [0, 0]
    assert NO_RANGES in closed[1]["reason"]
    assert fake.verbs().count("start") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "says"), [("broken", "under nsys the launched server exited with code 1"), ("dead", "did not end")]
)
def test_a_server_that_does_not_start_under_nsys_runs_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, says: str
) -> None:
    monkeypatch.setattr("kvbench.collect.session.ASK", 0.5)
    run = profiled(FakeNsys(tmp_path / "fake", mode), tmp_path, steady="1s")
    (row,) = [row for row in run.summary["telemetry"]["collectors"] if row["source"] == "nsight"]
    assert (row["state"], says in row["reason"]) == ("not started", True), row
    assert run.summary["headline"]["n"] == 20
    assert not run.summary["captures"]["profiled"]


def test_no_nsys_is_a_warning_unless_it_is_required(tmp_path: Path) -> None:
    fake = FakeNsys(tmp_path / "fake")
    fake.program.unlink()
    run = profiled(fake, tmp_path, steady="1s")
    assert sum("collector nsight" in line and "cannot be run" in line for line in run.summary["warnings"]) == 1
    with pytest.raises(ScenarioError, match="required collector nsight cannot work"):
        profiled(fake, tmp_path, steady="1s", required=True)


@pytest.mark.slow
def test_a_session_of_someone_else_is_used_and_left_as_it_was(tmp_path: Path) -> None:
    fake = FakeNsys(tmp_path / "fake")
    fake.session("theirs")
    run = profiled(fake, tmp_path, session="theirs")
    assert [data["state"] for data in events(run, "profile")] == ["opened", "closed"]
    assert not {"launch", "shutdown"} & set(fake.verbs())
    assert all("theirs" in call for call in fake.calls if call.split()[0] in ("start", "stop"))
    assert (fake.folder / "session").exists()


@pytest.mark.slow
def test_an_unknown_session_is_never_started(tmp_path: Path) -> None:
    fake = FakeNsys(tmp_path / "fake")
    fake.session("theirs")
    run = profiled(fake, tmp_path, steady="1s", session="mine")
    assert any("no session 'mine' (there are theirs)" in line for line in run.summary["warnings"])
    assert "start" not in fake.verbs()


# ---- the real one


@pytest.mark.skipif(not REAL.exists(), reason="no Nsight Systems here: sh .ci/nsys.sh .venv/tools/nsys unpacks one")
@pytest.mark.slow
def test_a_trigger_captures_one_window_of_layers_with_real_nsys(tmp_path: Path) -> None:
    pytest.importorskip("nvtx")
    collect = {"kind": "nsight", "nsys": str(REAL), "trigger": {"ttft_p50": "> 50ms"}, "for": "2s", "most": 1}
    also = yaml.safe_dump({"collect": [collect], "windows": {"length": "2s"}})
    run = ran(scenario("nvtx=1", "slow=0.1,80", steady="14s", also=also), tmp_path)
    (opened,) = [data for data in events(run, "profile") if data["state"] == "opened"]
    (closed,) = [data for data in events(run, "profile") if data["state"] == "closed"]
    assert opened["trigger"]["value"] > 0.05
    steady = next(row for row in run.summary["phases"] if row["kind"] == "steady")
    assert steady["start"] < closed["start"] < closed["end"] < steady["end"]
    assert (run.directory / closed["file"]).stat().st_size == closed["bytes"] > 0
    served = [r for r in run.records if closed["start"] <= r.sent_ns / 1e9 < closed["start"] + 2.5]
    assert closed["ranges"] % 32 == 0
    assert 0.6 * len(served) <= closed["ranges"] / 32 <= 1.1 * len(served)
    caught = {r.id for r in run.records if r.due_ns / 1e9 < closed["end"] and r.end_ns / 1e9 >= closed["start"]}
    assert run.summary["headline"]["n"] == 280 - len(caught)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"second": {}}, r"collect\[1\]: a second nsight"),
        ({"trigger": "anomaly"}, r"collect\[0\]\.trigger: anomaly: nothing looks for one"),
        ({"through": "launch"}, r"collect\[0\]\.through: launch: target\.launch starts no server"),
    ],
)
def test_what_could_never_open_is_refused_at_its_key(tmp_path: Path, spec: dict[str, Any], says: str) -> None:
    file = tmp_path / "scenario.yaml"
    specs = [{}, {}] if "second" in spec else [spec]
    file.write_text(scenario(also=yaml.safe_dump({"collect": [{"kind": "nsight", **one} for one in specs]})))
    with pytest.raises(ScenarioError, match=says):
        load(file, (), "http://127.0.0.1:1")
