"""Launched servers and profilers that nobody means: signals at bad moments, rivals at the port, disks that are full, captures of
someone else, files that make no sense. And the headline of a run with captures, reckoned a second time."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from aiohttp import web
from typer.testing import CliRunner

from kvbench.cli import app
from kvbench.clock import Clock, VirtualLoop
from kvbench.collect import Place
from kvbench.collect.nsight import Nsight, NsightCollector
from kvbench.collect.profiler import ProfilerError
from kvbench.collect.serverlog import ServerLog
from kvbench.collect.session import Session, call
from kvbench.collect.startstop import StartStop
from kvbench.core import Event, Window
from kvbench.journal import Journal, JournalError
from kvbench.launch import MARK, Server
from kvbench.nsys.account import profiled
from kvbench.nsys.align import aligned
from kvbench.nsys.events import read
from kvbench.nsys.source import opened
from kvbench.report import captures, notes
from kvbench.scenario import ScenarioError
from kvbench.signals import SignalError
from kvbench.target import TargetUnreachable
from tests.collect.fake_nsys import FakeNsys
from tests.collect.test_nsight import STEADY, Stage, phase, window
from tests.nsys.made import UTC, Made, tiny
from tests.test_launch import SMALL, alive, free_port, ran, scenario
from tests.whole import ROOT

# ---- a server that the run starts


def test_a_signal_while_collectors_open_ends_the_server_and_no_run_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(30)

    monkeypatch.setattr("kvbench.compose.open_crew", never)
    pids = tmp_path / "pids"
    with pytest.raises(SignalError) as caught:
        ran(scenario(f"pids={pids}", "brood=1"), tmp_path)
    assert caught.value.code == 130
    assert alive(pids) == []
    assert not list(tmp_path.glob("results/*/manifest.json"))


def test_a_signal_stops_collectors_that_were_being_opened(tmp_path: Path) -> None:
    """The crew's own part of it: each is stopped, also the one that was not open yet."""
    from kvbench.crew import Crew

    async def work() -> list[str]:
        clock, stopped = Clock(asyncio.get_running_loop()), []

        class Slow(NsightCollector):
            async def open(self) -> dict[str, Any]:
                await asyncio.sleep(10)
                return {}

            async def stop(self) -> None:
                stopped.append(self.source)

        place = Place(clock, tmp_path)
        crew = Crew(clock, [Slow(Nsight(), place, Stage(clock))])
        opening = asyncio.ensure_future(crew.open())
        await asyncio.sleep(1)
        opening.cancel()
        await asyncio.wait({opening})
        assert opening.cancelled()
        return stopped

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(work()) == ["nsight"]


def test_a_disk_that_is_full_before_the_run_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise JournalError(28, "no space")

    monkeypatch.setattr(Journal, "manifest", full)
    pids = tmp_path / "pids"
    with pytest.raises(JournalError):
        ran(scenario(f"pids={pids}", "brood=1"), tmp_path)
    assert alive(pids) == []


def test_the_server_of_another_run_that_was_faster_is_not_measured(tmp_path: Path) -> None:
    text = scenario("late=20")
    port = yaml.safe_load(text)["target"]["launch"]["command"][2]
    other = subprocess.Popen([sys.executable, SMALL, port, "late=0.6"], env={**os.environ, MARK: "another"})
    try:
        with pytest.raises(TargetUnreachable, match=f"belongs to process {other.pid}, which another run of kvbench launched"):
            ran(text, tmp_path)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_whoever_no_run_launched_may_stand_in_front_of_the_server(tmp_path: Path) -> None:
    """A proxy, or what forwards a port into a container."""
    with socket.create_server(("127.0.0.1", 0)) as ours:
        assert Server(SimpleNamespace(now=time.monotonic), tmp_path / "log").rival({ours.getsockname()[1]}) == ""  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["pipe", "directory", "nowhere"])
def test_no_place_for_its_output_is_told_of_as_that_and_never_waited_for(tmp_path: Path, kind: str) -> None:
    log = tmp_path / "log"
    if kind == "pipe":
        os.mkfifo(log)
    elif kind == "directory":
        log.mkdir()
    else:
        log = Path("/proc/none/log")
    with pytest.raises(TargetUnreachable, match=f"its output cannot go to {log}: "):
        ran(scenario(log=str(log)), tmp_path)


def test_answers_after_the_servers_end_are_another_servers(tmp_path: Path) -> None:
    ended = Event(
        t=1.0, kind="server_exit", data={"reason": "the launched server exited with code 1", "lines": ["address in use"]}
    )
    sent = [SimpleNamespace(outcome="ok", sent_ns=at * 10**9) for at in (0, 2, 3)]
    files: Any = SimpleNamespace(all=lambda kind: [ended] if kind == "server_exit" else [], records=sent)
    lines = notes._ended(files)
    assert "address in use" in lines[0]
    assert lines[1].startswith("2 requests sent after that were answered: by another server")


def test_progress_bars_hide_no_last_words(tmp_path: Path) -> None:
    """nsys draws one when the server has died under it."""
    log = tmp_path / "log"
    log.write_text("fatal: told to\n" + "".join(f"\r[1/1] [{at}%] capture-1.nsys-rep" for at in range(100)) + "\nGenerated:\r\n")
    server = Server(SimpleNamespace(now=time.monotonic), log)  # type: ignore[arg-type]
    assert server.tail() == ["fatal: told to", "[1/1] [99%] capture-1.nsys-rep", "Generated:"]


def test_a_secret_of_the_launch_is_not_in_events_of_its_log(tmp_path: Path) -> None:
    log, told = tmp_path / "server.log", []
    log.touch()

    async def work() -> None:
        place = Place(Clock(asyncio.get_running_loop()), tmp_path, server_log=log, secrets=("zq-93-plainvalue",))
        collector = ServerLog.model_validate({"rules": [{"name": "told", "match": "says", "values": "(?P<what>zq.*)"}]}).build(
            place
        )
        await collector.open()
        collector.start(told.append)
        log.write_text("it says zq-93-plainvalue\n")
        await asyncio.sleep(0.3)
        await collector.stop()

    asyncio.run(work())
    events = [item.data for item in told if isinstance(item, Event) and item.kind == "server_log"]
    assert [event["line"][:7] for event in events] == ["it says"]
    assert "zq-93" not in json.dumps(events)


# ---- nsys, and captures of someone else


def staged(
    stage: type[Stage], spec: dict[str, Any], script: list[tuple[float, Any]]
) -> tuple[list[tuple[str, float]], list[Event]]:
    told: list[Any] = []

    async def work() -> list[tuple[str, float]]:
        clock = Clock(asyncio.get_running_loop())
        profiler = stage(clock)
        collector = NsightCollector(Nsight.model_validate(spec), Place(clock, Path("/nowhere")), profiler)
        collector.start(told.append)
        for at, item in script:
            await clock.sleep_until(at)
            collector.tell(item)
        await collector.stop()
        return profiler.calls

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work()), [event for event in told if event.kind == "profile"]


class Full(Stage):
    async def end(self, stem: Path) -> Path | None:
        raise OSError(28, "No space left on device")


def test_a_full_disk_costs_the_capture_and_is_told() -> None:
    calls, told = staged(Full, {"after": 10.0, "for": 5.0}, STEADY)
    assert [call for call, _ in calls] == ["begin", "abandon", "begin", "abandon", "close"]
    failed = [event.data for event in told if event.data["state"] == "failed"]
    assert [(data["start"], data["end"]) for data in failed] == [(30, 35), (35, 40)]  # both are left out of the figures
    assert all("No space left" in data["reason"] for data in failed)


def test_a_window_that_fits_to_the_second_opens() -> None:
    class Late(VirtualLoop):
        """Timers are a little late, as real ones are."""

        def call_at(self, when: float, *rest: Any, **more: Any) -> Any:
            return super().call_at(when + 0.003, *rest, **more)

    async def work() -> list[str]:
        clock, told = Clock(asyncio.get_running_loop()), []
        collector = NsightCollector(
            Nsight.model_validate({"after": 10.0, "for": 5.0}), Place(clock, Path("/nowhere")), Stage(clock)
        )
        collector.start(told.append)
        collector.tell(phase("start", 0.0, seconds=17))
        await clock.sleep_until(18)
        await collector.stop()
        return [event.data["state"] for event in told if isinstance(event, Event) and event.kind == "profile"]

    with asyncio.Runner(loop_factory=Late) as runner:
        assert runner.run(work()) == ["opened", "closed"]


def test_a_capture_is_not_the_cause_of_the_next() -> None:
    """Its own slowness lies in windows of 10 s that end after it."""
    slow = [(20.0 + t, window(10.0 + t, 20.0 + t, ttft_p99=1.0)) for t in range(10, 60)]
    spec = {"trigger": {"ttft_p99": "> 800ms"}, "for": 5.0, "apart": 0.0, "most": 3}
    calls, _ = staged(Stage, spec, [STEADY[0], *slow, (90.0, STEADY[1][1])])
    assert [at for call, at in calls if call == "begin"] == [30, 46, 62]  # the capture of 30 was over at 36


def test_a_phase_that_never_comes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"collect\[0\]\.phase: steady-2: windows open in steady.*it has no epochs"):
        ran(scenario(also=yaml.safe_dump({"collect": [{"kind": "nsight", "phase": "steady-2"}]})), tmp_path)


def test_nothing_that_nsys_started_outlives_it(tmp_path: Path) -> None:
    """Reading a capture calls nsys in a session of its own, which a signal to the group does not reach."""
    pid = tmp_path / "pid"
    spawn = "import subprocess as s; p = s.Popen(['sleep', '60'], start_new_session=True)"
    code = f"{spawn}; open({str(pid)!r}, 'w').write(str(p.pid)); p.wait()"
    with pytest.raises(ProfilerError, match=r"did not end within 0\.7 s"):
        asyncio.run(call([sys.executable, "-c", code], 0.7))
    number = int(pid.read_text())
    assert not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def test_no_room_for_what_nsys_says_is_a_failed_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nonexistent")
    with pytest.raises(ProfilerError, match="no place for its output") as caught:
        asyncio.run(call(["true"], 1.0, "true"))
    assert not caught.value.begun


def test_a_session_that_collects_for_someone_else_is_left_alone(tmp_path: Path) -> None:
    fake = FakeNsys(tmp_path / "fake")
    fake.session("theirs")
    fake.program.write_text(fake.program.read_text().replace("Launched ", "Collection "))
    with pytest.raises(ProfilerError, match="is collecting already, and not for us") as caught:
        asyncio.run(Session(str(fake.program), "theirs").begin(tmp_path / "stem"))
    assert not caught.value.begun
    assert fake.verbs() == ["sessions"]


@pytest.mark.parametrize(("statuses", "ended"), [((500, 500), []), ((200, 500), [0]), ((200, 200), [0, 1])])
def test_a_profile_that_a_server_refused_is_not_ended(statuses: tuple[int, int], ended: list[int], tmp_path: Path) -> None:
    """It refuses since someone else's runs."""
    asked: list[int] = []

    async def work() -> None:
        def server(which: int, status: int) -> web.Application:
            async def start(_: web.Request) -> web.Response:
                return web.Response(status=status, text="Profiling is already in progress")

            async def stop(_: web.Request) -> web.Response:
                asked.append(which)
                return web.Response()

            place = web.Application()
            place.router.add_post("/start_profile", start)
            place.router.add_post("/stop_profile", stop)
            return place

        runners, urls = [], []
        for which, status in enumerate(statuses):
            place = server(which, status)
            runner = web.AppRunner(place)
            await runner.setup()
            port = free_port()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            runners.append(runner)
            urls.append(f"http://127.0.0.1:{port}")
        profiler = StartStop(urls, {}, None)
        if max(statuses) > 299:
            with pytest.raises(ProfilerError, match="already in progress") as caught:
                await profiler.begin(tmp_path / "stem")
            assert caught.value.begun is bool(ended)
            await profiler.abandon()
        else:
            await profiler.begin(tmp_path / "stem")
            await profiler.end(tmp_path / "stem")
        await profiler.close()
        for runner in runners:
            await runner.cleanup()

    asyncio.run(work())
    assert sorted(asked) == ended


# ---- the figures of a run with captures, from its files by another way


def test_the_headline_is_what_is_left_without_the_captures(tmp_path: Path) -> None:
    fake = FakeNsys(tmp_path / "fake")
    text = yaml.safe_load(scenario("slow=0.04,0"))
    text["phases"] = {"steady": {"requests": 90}, "drain": {"for": "1s"}}
    text["workload"] |= {"arrivals": {"shape": "closed", "concurrency": 2}, "slo": {"e2e": "60ms"}}
    text["collect"] = [{"kind": "nsight", "nsys": str(fake.program), "at": ["300ms", "1200ms"], "for": "200ms"}]
    run = ran(yaml.safe_dump(text), tmp_path)

    told = run.lines("events.jsonl")
    cuts = [(event["data"]["start"], event["data"]["end"]) for event in told if event["data"].get("state") == "closed"]
    (over,) = [event for event in told if event["kind"] == "phase_end" and event["data"]["phase_kind"] == "steady"]
    begin, end = over["data"]["start"], over["t"]
    assert len(cuts) == 2
    assert begin < cuts[0][0] < cuts[0][1] < cuts[1][0] < cuts[1][1] < end
    seconds = end - begin - sum(stop - start for start, stop in cuts)

    def counts(t: float) -> bool:
        return begin <= t < end and not any(start <= t < stop for start, stop in cuts)

    requests = run.lines("requests.jsonl")
    met = [r for r in requests if any(r["due_ns"] / 1e9 < stop and r["end_ns"] / 1e9 >= start for start, stop in cuts)]
    cohort = [r for r in requests if r["phase"] == "steady" and r not in met]
    ended = [r for r in requests if r["outcome"] == "ok" and counts(r["end_ns"] / 1e9)]
    head, rates = run.summary["headline"], run.summary["rates"]
    assert 40 < len(cohort) < 88
    assert (head["n"], run.summary["captures"]["left_out"]["requests"]) == (len(cohort), len(met))
    assert head["seconds"] == pytest.approx(seconds, rel=1e-9)
    assert rates["ok"]["value"] == pytest.approx(len(ended) / seconds, rel=1e-9)
    assert rates["offered"]["value"] == pytest.approx(sum(counts(r["due_ns"] / 1e9) for r in requests) / seconds, rel=1e-9)
    e2e = np.array([(r["end_ns"] - r["sent_ns"]) / 1e9 for r in cohort])
    good = int(np.count_nonzero(e2e <= 0.06))
    assert run.summary["goodput"]["good"] == pytest.approx(good, abs=1)
    assert run.summary["goodput"]["rate"] == pytest.approx(run.summary["goodput"]["good"] / seconds, rel=1e-9)
    row = run.summary["latency"]["ttft"]
    ttft = np.array([(r["first_ns"] - r["sent_ns"]) / 1e9 for r in cohort])
    assert row["n"] == len(cohort)
    assert row["p50"] == pytest.approx(np.quantile(ttft, 0.5), rel=0.02)
    assert row["mean"] == pytest.approx(ttft.mean(), rel=0.01)


@pytest.mark.parametrize("key", ["trigger", "start", "end", "file", "bytes", "ranges", "reason", "state"])
def test_damaged_events_of_captures_end_no_report(key: str, tmp_path: Path) -> None:
    whole = {
        "state": "closed",
        "start": 1.0,
        "end": 2.0,
        "file": "c",
        "bytes": 5,
        "ranges": 3,
        "reason": None,
        "trigger": {"at": 1.0},
    }
    for value in (None, "x", 5, [], {"at": "x"}, {"why": 7}, True):
        event = Event(t=2.0, kind="profile", data={**whole, key: value})
        files: Any = SimpleNamespace(directory=tmp_path, manifest={}, end=3.0, all=lambda _, event=event: [event])
        head: Any = SimpleNamespace(cuts=captures.cuts(files), start=0.0, end=3.0, seconds=2.0)
        found = captures.captures(files, [], head)
        assert [*captures.rows(found), *captures.notes(found)]


# ---- kvbench profile


def test_a_pipe_is_no_capture_and_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "capture.sqlite"
    os.mkfifo(pipe)
    done = CliRunner().invoke(app, ["profile", str(pipe)])
    assert (done.exit_code, "is not a file" in done.output) == (2, True)


def test_the_capture_is_not_overwritten_by_what_is_said_of_it(tmp_path: Path) -> None:
    file, link = tiny(tmp_path / "c.sqlite"), tmp_path / "link"
    link.symlink_to(file)
    before = file.read_bytes()
    done = CliRunner().invoke(app, ["profile", str(file), "--json", str(link)])
    assert (done.exit_code, "is the capture itself" in done.output) == (2, True)
    assert file.read_bytes() == before


def test_spans_of_centuries_are_damaged_rows_and_no_sum_overflows(tmp_path: Path) -> None:
    made = Made(tmp_path / "long.sqlite")
    for thread in range(8):
        made.range("DecoderLayer_1", -(2**61), 2**62 - 5, thread=thread)
        made.kernel("k", 0, -(2**61), 2**62 - 9, thread=thread)
    made.range("DecoderLayer_1", 0, 1000)
    for _ in range(3):
        made.insert("CUPTI_ACTIVITY_KIND_MEMCPY", start=1, end=2, bytes=2**62, copyKind=1, deviceId=0, streamId=1)
    with opened(made.done()) as tables:
        told = profiled(read(tables))
    assert (told["ranges"]["damaged"], told["ranges"]["count"]) == (8, 1)
    assert told["layers"][0]["cpu"]["total"] == 1e-6
    assert told["memory"][0]["bytes"] > 0
    assert told["kernels"] == []


def test_windows_without_length_are_no_part_of_a_run(tmp_path: Path) -> None:
    made = Made(tmp_path / "c.sqlite")
    made.insert("TARGET_INFO_SESSION_START_TIME", utcEpochNs=UTC)
    made.range("DecoderLayer_1", 0, 10**9)
    with opened(made.done()) as tables:
        capture = read(tables)
    windows = [Window(start=a, end=b, counts={}, values={}, n={}) for a, b in ((0.5, 0.5), (0.0, 1.0), (0.9, 0.2))]
    assert [row["covered"] for row in aligned(capture, UTC / 1e9, windows, [])["windows"]] == [1.0]


def test_a_reader_that_has_read_enough_changes_no_exit_code(tmp_path: Path) -> None:
    made = Made(tmp_path / "many.sqlite")
    made.ranges((f"DecoderLayer_{i}", i * 10, i * 10 + 5) for i in range(3000)).done()
    command = f"{sys.executable} -m kvbench profile {made.path} | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_signal_during_an_export_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    nsys, pid, room = tmp_path / "nsys", tmp_path / "pid", tmp_path / "room"
    room.mkdir()
    nsys.write_text(f"#!/bin/sh\necho $$ >{pid}\nexec sleep 60\n")
    nsys.chmod(0o755)
    (tmp_path / "c.nsys-rep").write_text("a capture")
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(room)}
    command = [sys.executable, "-m", "kvbench", "profile", str(tmp_path / "c.nsys-rep")]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE)
    try:
        until = time.monotonic() + 20
        while not (pid.exists() and pid.read_text().strip()) and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(10) == code
    finally:
        process.kill()
        process.communicate()
    assert not psutil.pid_exists(int(pid.read_text()))
    assert list(room.glob("kvbench-nsys-*")) == []
