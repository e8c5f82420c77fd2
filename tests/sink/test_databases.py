"""Real influxd 1.6.7 and VictoriaMetrics: what they hold of a run is what its directory holds, whatever happened on the way."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvbench.cli import app
from kvbench.core import Record, Sample
from kvbench.replay import began
from kvbench.report.files import load
from kvbench.sink import SinkError, SinkPlace
from kvbench.sink.database import V1
from kvbench.sink.influx import Influx
from kvbench.sink.lines import nanos
from kvbench.sink.points import Points
from tests.sink.servers import Influxd, Victoria, running
from tests.whole import ROOT, instant, simulated

SUNK = """\
name: sunk
seed: 3
target: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090}
workload:
  arrivals: {shape: poisson, rate: 4/s}
  prompt: 200
  output: 40
phases: {steady: {for: 12s}, drain: {for: 1m}}
sinks: [{kind: influx, url: "URL", mode: MODE, requests: true, tags: {lab: here}}]
"""


@pytest.fixture(scope="module")
def influxd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Influxd]:
    with running(Influxd(tmp_path_factory.mktemp("influxd"))) as server:
        yield server


@pytest.fixture(scope="module")
def victoria(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victoria]:
    with running(Victoria(tmp_path_factory.mktemp("victoria"))) as server:
        yield server


def sunk(url: str, mode: str) -> str:
    return SUNK.replace("URL", url).replace("MODE", mode)


def wall(directory: Path) -> int:
    return nanos(began(load(directory)))


def same_windows(directory: Path, rows: list[dict[str, Any]]) -> None:
    """Each window is there once, at its time, with every count and value that was measured, and nothing else."""
    windows = load(directory).windows
    assert len(rows) == len(windows)
    zero = wall(directory)
    for row, window in zip(sorted(rows, key=lambda row: row["time"]), windows, strict=True):
        told = window.counts | {name: value for name, value in window.values.items() if value is not None}
        assert row["time"] == zero + round(window.end * 1e9)
        fields = {name: value for name, value in row.items() if value is not None}
        for name in ("time", "run", "scenario", "model", "engine", "lab"):
            fields.pop(name, None)
        assert fields == told | {"t": window.end, "window_s": window.end - window.start}


def test_influxd_holds_the_windows_requests_samples_and_events_of_a_run(influxd: Influxd, tmp_path: Path) -> None:
    whole = simulated(sunk(influxd.url, "v1"), tmp_path)
    run, files = whole.directory.name, load(whole.directory)
    same_windows(whole.directory, influxd.rows(f"SELECT * FROM kvbench_window WHERE run = '{run}'"))
    requests = influxd.rows(f"SELECT id, n_out, ttft, outcome FROM kvbench_request WHERE run = '{run}'")
    assert len(requests) == len(files.records) > 30
    for row in requests:
        record = whole.records[row["id"]]
        assert (row["n_out"], row["outcome"]) == (record.n_out, record.outcome)
        assert row["ttft"] == pytest.approx((record.first_ns - record.sent_ns) / 1e9, rel=1e-12)
    usage = influxd.rows(f"SELECT kv_usage FROM kvbench_server WHERE run = '{run}' AND source = 'target'")
    assert [row["kv_usage"] for row in usage] == [s.value for s in files.samples if s.name == "kv_usage" and s.source == "target"]
    told = influxd.rows(f"SELECT text, kind FROM kvbench_event WHERE run = '{run}'")
    assert sorted(row["kind"] for row in told) == sorted(e.kind for e in files.events if e.kind != "sink")
    ledger = files.all("sink")[0].data
    assert (ledger["remaining"], ledger["lost"], ledger["refused"], ledger["complete"]) == (0, 0, 0, True)
    assert ledger["delivered"] == ledger["points"] >= len(files.windows) + len(files.records)


@pytest.mark.parametrize("mode", [pytest.param("v1", marks=pytest.mark.slow), "v2"])
def test_victoria_metrics_holds_the_windows_of_a_run(victoria: Victoria, tmp_path: Path, mode: str) -> None:
    whole = simulated(sunk(victoria.url, mode), tmp_path)
    run, windows, zero = whole.directory.name, load(whole.directory).windows, wall(whole.directory)
    series = victoria.export(f'{{__name__=~"kvbench_window_.*",run="{run}"}}')
    held = {one["metric"]["__name__"].removeprefix("kvbench_window_"): one for one in series}
    expected: dict[str, list[tuple[int, float]]] = {}
    for window in windows:
        told = window.counts | window.values | {"t": window.end, "window_s": window.end - window.start}
        for name, value in told.items():
            if value is not None:
                expected.setdefault(name, []).append(((zero + round(window.end * 1e9)) // 10**6, float(value)))
    assert set(held) == set(expected)
    for name, points in expected.items():
        assert [at for at, _ in points] == held[name]["timestamps"], name
        for (_, value), kept in zip(points, held[name]["values"], strict=True):
            assert math.isclose(value, kept, rel_tol=1e-11, abs_tol=1e-15), name


def test_an_export_later_is_the_same_points(influxd: Influxd, tmp_path: Path) -> None:
    """A run that had a sink, exported again, also where what the sink noted is damaged: nothing is doubled."""
    whole = simulated(sunk(influxd.url, "v1"), tmp_path)
    run = whole.directory.name
    before = influxd.rows(f"SELECT * FROM kvbench_window WHERE run = '{run}'")
    counted = len(influxd.rows(f"SELECT t FROM kvbench_event WHERE run = '{run}'"))
    assert exported(whole.directory, influxd.url, "--resume") == (0, f"nothing was missing in {influxd.url}/write?db=kvbench\n")
    assert exported(whole.directory, influxd.url)[0] == 0
    assert influxd.rows(f"SELECT * FROM kvbench_window WHERE run = '{run}'") == before
    assert len(influxd.rows(f"SELECT id FROM kvbench_request WHERE run = '{run}'")) == len(whole.records)
    assert len(influxd.rows(f"SELECT t FROM kvbench_event WHERE run = '{run}'")) == counted
    next(whole.directory.rglob("sink.json")).write_text('{"run": "x"}')
    assert exported(whole.directory, influxd.url, "--mode", "v1", "--requests")[0] == 0
    held = influxd.rows(f"SELECT id FROM kvbench_request WHERE run = '{run}' AND lab !~ /./")
    assert len(held) == len(whole.records), "without the tags that only the note knew"


def exported(directory: Path, url: str, *options: str) -> tuple[int, str]:
    """Exit code and output of `kvbench export` in this process."""
    found = CliRunner().invoke(app, ["export", str(directory), "--influx", url, *options])
    return found.exit_code, found.output


def test_influxd_itself_about_bad_lines(influxd: Influxd) -> None:
    """What the sink takes for granted of 400: the good lines of the batch are stored."""
    database = V1(influxd.url, "kvbench", None, 5.0)
    reply = database.post(b"raw,run=b a=1 1\nraw,run=b a=oops 2\nraw,run=b a=3 3\n")
    assert (reply.status, reply.partial) == (400, True)
    assert "raw,run=b a=oops 2" in reply.said
    assert influxd.count("raw", "a") == 2
    conflict = database.post(b"raw,run=b a=4i 4\nraw,run=b a=5 5\n")
    assert conflict.partial
    assert "dropped=1" in conflict.said
    assert influxd.count("raw", "a") == 3
    database.close()
    missing = V1(influxd.url, "nope", None, 5.0)
    assert missing.post(b"raw a=1 1\n").status == 404
    missing.close()


def test_influxd_has_no_v2_address_and_the_sink_says_so(influxd: Influxd, tmp_path: Path) -> None:
    with pytest.raises(SinkError, match=r"InfluxDB before 1\.8 needs mode: v1"):
        Influx(url=influxd.url).build(SinkPlace(tmp_path, "r", 1e9))


@pytest.mark.slow
def test_a_body_that_influxd_refuses_for_its_length_arrives_in_parts(tmp_path: Path) -> None:
    server = Influxd(tmp_path / "db")
    server.most = 20_000
    with running(server):
        whole = simulated(sunk(server.url, "v1"), tmp_path)
        same_windows(whole.directory, server.rows("SELECT * FROM kvbench_window"))
        assert server.count("kvbench_request", "id") == len(whole.records)


def test_every_field_keeps_one_type(influxd: Influxd) -> None:
    """A gauge of 0, then of 0.5; a latency that is a whole second: influxd refuses a second type for ever."""
    points, database = Points("types", 1.7e9, {}), V1(influxd.url, "kvbench", None, 5.0)
    lines = [points.line(Sample(t=float(n), name="mixed", value=value)) for n, value in enumerate((0, 0.5, 1, 10**9))]
    lines += [points.line(Record(id=n, due_ns=0, release_ns=0, sent_ns=0, first_ns=n * 10**9, end_ns=n)) for n in range(3)]
    assert database.post(("\n".join(lines) + "\n").encode()).ok
    database.close()


REAL = """\
name: killed
seed: 5
target: {kind: http, url: "URL", model: m, tokenizer: words}
workload: {arrivals: {shape: constant, rate: 50/s}, prompt: 8, output: 4}
phases: {steady: {for: 60s}, drain: {for: 5s}}
windows: {length: 2s, slide: 1s}
sinks: [{kind: influx, url: "DB", mode: MODE, requests: true}]
"""


def killed_in_an_outage(server: Any, mode: str, folder: Path, up: float, down: float) -> Path:
    """A run to which the database is lost after `up` seconds and which is killed `down` seconds later; returns its directory."""
    with instant("4", "2000") as url:
        (folder / "s.yaml").write_text(REAL.replace("URL", url).replace("DB", server.url).replace("MODE", mode))
        command = [sys.executable, "-m", "kvbench", "run", str(folder / "s.yaml"), "--quiet", "--out", str(folder / "out")]
        run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            directory = _begun(run, folder / "out")
            time.sleep(up)
            server.kill()
            time.sleep(down)
            os.kill(run.pid, signal.SIGKILL)
        finally:
            run.kill()
            run.communicate()
    return directory


def _begun(run: "subprocess.Popen[bytes]", out: Path) -> Path:
    for _ in range(600):
        found = [path.parent for path in out.glob("*/windows.jsonl") if path.stat().st_size]
        if found:
            return found[0]
        assert run.poll() is None, run.communicate()[1]
        time.sleep(0.05)
    raise AssertionError("the run did not begin")


def test_nothing_is_missing_or_doubled_after_an_outage_and_a_kill(tmp_path: Path) -> None:
    server = Influxd(tmp_path / "db")
    try:
        server.start()
        directory = killed_in_an_outage(server, "v1", tmp_path, 1.2, 1.2)
        server.start()
        before = server.count("kvbench_request", "id")
        code, said = exported(directory, server.url, "--resume")
        files = load(directory)
        assert code == 0, said
        assert 0 < before < len(files.records), "some of it was in the database, and some was not"
        _whole_in(server, directory)
        assert exported(directory, server.url, "--resume")[1].startswith("nothing was missing")
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.alone
def test_nothing_is_missing_or_doubled_after_ten_seconds_without_influxd(tmp_path: Path) -> None:
    """The database comes back after 10 s, the client goes on; then it is killed in a second outage."""
    server = Influxd(tmp_path / "db")
    with instant("4", "2000") as url:
        (tmp_path / "s.yaml").write_text(REAL.replace("URL", url).replace("DB", server.url).replace("MODE", "v1"))
        server.start()
        command = [sys.executable, "-m", "kvbench", "run", str(tmp_path / "s.yaml"), "--quiet", "--out", str(tmp_path / "out")]
        run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            directory = _begun(run, tmp_path / "out")
            time.sleep(5)
            server.kill()
            time.sleep(10)
            server.start()
            time.sleep(13)  # an acknowledgement counts for good after 10 s
            _recent(server)
            server.kill()
            time.sleep(5)
            os.kill(run.pid, signal.SIGKILL)
        finally:
            run.kill()
            run.communicate()
        try:
            server.start()
            code, said = exported(directory, server.url, "--resume")
            assert code == 0, said
            files = load(directory)
            total = sum(map(len, (files.windows, files.events, files.records))) + sum(s.value is not None for s in files.samples)
            assert 0 < int(said.split()[1].replace(",", "")) < total, "what was acknowledged long before is not sent again"
            _whole_in(server, directory)
        finally:
            server.kill()


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("mode", ["v1", "v2"])
def test_nothing_is_missing_or_doubled_in_victoria_metrics(tmp_path: Path, mode: str) -> None:
    server = Victoria(tmp_path / "db")
    try:
        server.start()
        directory = killed_in_an_outage(server, mode, tmp_path, 5.0, 10.0)
        server.start()
        assert exported(directory, server.url, "--resume")[0] == 0
        windows = load(directory).windows
        held = server.export(f'{{__name__="kvbench_window_t",run="{directory.name}"}}')
        assert held[0]["values"] == [window.end for window in windows]
    finally:
        server.kill()


def _recent(server: Influxd) -> None:
    rows = server.rows("SELECT LAST(t) FROM kvbench_window")
    assert time.time() - rows[0]["time"] / 1e9 < 5, "after an outage it catches up"


def _whole_in(server: Influxd, directory: Path) -> None:
    """Every line of the journal is one point, and no other is there."""
    files = load(directory)
    same_windows(directory, server.rows("SELECT * FROM kvbench_window"))
    assert sorted(row["id"] for row in server.rows("SELECT id FROM kvbench_request")) == sorted(r.id for r in files.records)
    assert sorted(row["kind"] for row in server.rows("SELECT t, kind FROM kvbench_event")) == sorted(e.kind for e in files.events)
    read = {s.name for s in files.samples if s.value is not None}
    for name in read:
        values = [row[name] for row in server.rows(f'SELECT "{name}" FROM kvbench_server')]
        assert sorted(values) == sorted(s.value for s in files.samples if s.name == name and s.value is not None), name
