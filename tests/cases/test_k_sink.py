"""Group K of the open cases, the result sink: what k6 and influxdb-client lost, doubled, rejected or slowed down."""

import asyncio
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbench.core import Record, Sample, Window
from kvbench.report.files import load
from kvbench.sink import SinkPlace
from kvbench.sink.influx import Influx
from tests.sink.servers import Influxd, Rude, running
from tests.whole import ROOT, instant, simulated

MS = 1_000_000
TOGETHER = """\
name: together
target: {kind: sim, model: llama-3.1-8b, hardware: h100}
workload: {arrivals: {shape: constant, rate: 20/s}, prompt: 32, output: 16}
phases: {steady: {for: 10s}, drain: {for: 1m}}
sinks: [{kind: influx, url: "URL", mode: v1, requests: true}]
"""


def test_k01_a_thousand_requests_in_one_millisecond_are_a_thousand_points(tmp_path: Path) -> None:
    """Equal tags, and an instant of which ten at a time are equal to the nanosecond: stored by key as every InfluxDB does."""
    with running(Influxd(tmp_path / "db")) as server:
        sink = Influx(url=server.url, mode="v1", requests=True).build(SinkPlace(tmp_path, "run", 1.7e9))
        for n in range(1000):
            sink.write(Record(id=n, outcome="ok", end_ns=5 * MS + n // 10))
        _close(sink)
        rows = server.rows("SELECT id FROM kvbench_request")
    assert sorted(row["id"] for row in rows) == list(range(1000))
    assert max(row["time"] for row in rows) - min(row["time"] for row in rows) < MS
    assert sink.told()["delivered"] == 1000


def test_k01_the_database_has_as_many_requests_as_the_report(tmp_path: Path) -> None:
    with running(Influxd(tmp_path / "db")) as server:
        whole = simulated(TOGETHER.replace("URL", server.url), tmp_path)
        held = server.count("kvbench_request", "id")
    assert held == whole.summary["outcomes"]["ok"] == len(whole.records) > 150


def test_k02_the_last_batch_arrives_when_a_run_ends_at_once(tmp_path: Path) -> None:
    with Rude() as rude:
        sink = Influx(url=rude.url, mode="v1").build(SinkPlace(tmp_path, "run", 1.7e9))
        for n in range(2501):
            sink.write(Sample(t=n / 1000, name="x", value=float(n)))
        _close(sink)
    assert sum(" x=" in line for line in rude.lines) == sink.told()["delivered"] == 2501


def test_k02_the_last_batch_arrives_when_ctrl_c_ends_a_run(tmp_path: Path) -> None:
    with instant("4", "2000") as url, Rude() as rude:
        text = SERVED.replace("URL", url).replace("RATE", "500").replace("LENGTH", "60s")
        text += f'sinks: [{{kind: influx, url: "{rude.url}", mode: v1, requests: true}}]\n'
        (tmp_path / "s.yaml").write_text(text)
        command = [sys.executable, "-m", "kvbench", "run", str(tmp_path / "s.yaml"), "--quiet", "--out", str(tmp_path / "out")]
        run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            for _ in range(600):
                if len(rude.posts) > 8 or run.poll() is not None:
                    break
                time.sleep(0.05)
            run.send_signal(signal.SIGINT)
            _, said = run.communicate(timeout=30)
        finally:
            run.kill()
    files = load(next((tmp_path / "out").iterdir()))
    assert run.returncode == 130, said
    assert len(files.records) > 200
    ids = [int(line.split(" measured=")[1].split(",id=")[1].split("i")[0]) for line in rude.lines if "kvbench_request" in line]
    assert sorted(ids) == sorted(record.id for record in files.records)


def test_k02_what_was_not_delivered_is_counted(tmp_path: Path) -> None:
    with Rude(lambda lines, n: (204, {}, b"") if n == 1 else (503, {}, b"")) as rude:
        sink = Influx(url=rude.url, mode="v1", drain=0.2).build(SinkPlace(tmp_path, "run", 1.7e9))
        for n in range(2501):
            sink.write(Sample(t=n / 1000, name="x", value=float(n)))
        _close(sink)
    assert "2,501 of 2,501 points were not delivered" in sink.told()["notes"][-1]


def test_k03_nan_costs_its_field_and_nothing_else(tmp_path: Path) -> None:
    with running(Influxd(tmp_path / "db")) as server:
        sink = Influx(url=server.url, mode="v1").build(SinkPlace(tmp_path, "run", 1.7e9))
        values = {"ttft_p50": math.nan, "tpot_p50": math.inf, "e2e_p50": 1.2}
        sink.write(Window(start=0.0, end=1.0, counts={}, values=values))
        sink.write(Sample(t=1.0, name="only", value=math.nan))
        sink.write(Sample(t=1.0, name="usage", value=0))
        sink.write(Sample(t=2.0, name="usage", value=0.5))
        _close(sink)
        windows = server.rows("SELECT * FROM kvbench_window")
        usage = [row["usage"] for row in server.rows("SELECT usage FROM kvbench_server")]
        keys = server.rows("SHOW FIELD KEYS FROM kvbench_server")
    assert [{name for name in row if "p50" in name} for row in windows] == [{"e2e_p50"}]
    assert (windows[0]["e2e_p50"], usage) == (1.2, [0, 0.5])
    assert [(row["fieldKey"], row["fieldType"]) for row in keys] == [("usage", "float")], "one type all run, and no field `only`"
    told = sink.told()
    assert (told["skipped_fields"], told["points"], told["refused"]) == (3, 3, 0)


SERVED = """\
name: observed
seed: 5
target: {kind: http, url: "URL", model: m, tokenizer: words}
workload: {arrivals: {shape: constant, rate: RATE/s}, prompt: 8, output: 4}
phases: {steady: {for: LENGTH}, drain: {for: 5s}}
"""
SINKS = {"off": None, "on": 0.0, "slow": 2.0}  # seconds of a write to the database


def observed(folder: Path, rate: int, seconds: int, kind: str) -> dict[str, float]:
    """One run in a process of its own: achieved rate, p99 of ttft, of response and of lateness, in seconds."""
    delay = SINKS[kind]
    folder.mkdir(parents=True)
    with instant("4", "20000", "100000") as url, Rude() as rude:  # 100 ms to the first token, 20 ms to each further one
        text = SERVED.replace("URL", url).replace("RATE", str(rate)).replace("LENGTH", f"{seconds}s")
        if delay is not None:
            text += f'sinks: [{{kind: influx, url: "{rude.url}", mode: v1, drain: 1s}}]\n'
            rude.script = lambda lines, n: (time.sleep(delay if n > 1 else 0.0), (204, {}, b""))[1]
        (folder / "s.yaml").write_text(text)
        command = [sys.executable, "-m", "kvbench", "run", str(folder / "s.yaml"), "--quiet", "--out", str(folder / "out")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode in (0, 4), done.stdout + done.stderr  # 4: a noisy machine made the run invalid
        posts = len(rude.posts)
    directory = next((folder / "out").iterdir())
    files = load(directory)
    assert (posts > 1) == (delay is not None)
    ok = [record for record in files.records if record.outcome == "ok"]
    begin, end = min(r.sent_ns or 0 for r in ok), max(r.sent_ns or 0 for r in ok)  # an answer's way is no part of its rate

    def p99(values: Iterator[float]) -> float:
        return sorted(values)[int(0.99 * len(ok))]

    return {
        "rate": (len(ok) - 1) / ((end - begin) / 1e9),
        "ttft_p99": p99((r.first_ns - r.sent_ns) / 1e9 for r in ok if r.first_ns and r.sent_ns),
        "response_p99": p99((r.done_ns - r.due_ns) / 1e9 for r in ok if r.done_ns),
        "lag_p99": p99((r.sent_ns - r.due_ns) / 1e9 for r in ok if r.sent_ns is not None),
    }


@pytest.mark.alone
def test_k06_a_database_of_two_seconds_a_write_holds_no_request_up(tmp_path: Path) -> None:
    """The short form: a write on the hot path would make requests two seconds late."""
    found = observed(tmp_path / "slow", 200, 3, "slow")
    assert found["rate"] == pytest.approx(200, rel=0.03)
    assert found["lag_p99"] < 0.2, found


@pytest.mark.slow
@pytest.mark.alone
def test_k06_a_sink_changes_neither_rate_nor_p99(tmp_path: Path) -> None:
    """Five rounds of off, on, and on with a database of 2 s a write: the median ratio to its round's run without one."""
    rounds: list[dict[str, dict[str, float]]] = []
    for n in range(5):
        order = [*SINKS][n % 3 :] + [*SINKS][: n % 3]  # what comes first on a machine that slows down is not always the same
        rounds.append({kind: observed(tmp_path / f"{kind}-{n}", 200, 10, kind) for kind in order})
        print(rounds[-1])
    for kind in ("on", "slow"):
        for name in ("rate", "ttft_p99", "response_p99"):
            ratio = statistics.median(found[kind][name] / found["off"][name] for found in rounds)
            print(f"{kind} / off, {name}: {ratio:.4f}")
            assert ratio == pytest.approx(1.0, abs=0.03), (kind, name, rounds)


def _close(sink: Any) -> None:
    asyncio.run(sink.aclose())
