"""`kvbench agent` as users run it: a process on the fake library, a whole run beside it, a real database, its exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbench.cli import app
from kvbench.sink.standing import Standing
from tests.collect.fake_nvml import Fake, library
from tests.sink.servers import TOOLS, Influxd, Rude
from tests.sink.servers import running as database
from tests.stub.stub import DONE, FIN, C, Stub, U, stream
from tests.whole import ROOT, against, kvbench, served

pytest.importorskip("pynvml")
ANSWER = stream(C("a") + C("b") + FIN + U(8, 2) + DONE)


def settings(folder: Path, fake: str = "count 4\n", nvml: bool = True) -> dict[str, str]:
    state = folder / "state"
    state.write_text(fake)
    found = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    return found | {
        "LD_LIBRARY_PATH": str(library() if nvml else folder), "KVBENCH_FAKE_NVML": str(state), "XDG_STATE_HOME": str(folder),
    }  # fmt: skip


class Process:
    """A running agent; `url`, and what it says."""

    def __init__(self, folder: Path, *options: str, fake: str = "count 4\n") -> None:
        command = [sys.executable, "-m", "kvbench", "agent", "--listen", "127.0.0.1:0", *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, cwd=ROOT, env=settings(folder, fake), text=True, **pipes)  # type: ignore[call-overload]
        self.first = self.process.stdout.readline()
        found = re.search(r"http://\S+?(?=/metrics)", self.first)
        if found is None:
            raise AssertionError(self.process.communicate()[1])
        self.url = found.group()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return str(answer.read().decode())

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """(exit code, stderr)."""
        self.process.send_signal(number)
        said = self.process.communicate(timeout=20)[1]
        return self.process.returncode, said


@contextmanager
def agent(folder: Path, *options: str, fake: str = "count 4\n") -> Iterator[Process]:
    found = Process(folder, *options, fake=fake)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.process.kill()
            found.process.communicate()


def test_a_whole_run_has_the_other_machines_gpus_on_its_clock(tmp_path: Path) -> None:
    with agent(tmp_path, "--gpu-ids", "0,2", "--sampling-rate", "10/s", fake="count 4\ngpu2.power 500000\n") as found:
        assert "2 GPUs every 100 ms" in found.first
        collect = f"collect: [{{kind: agent, url: '{found.url}', every: 500ms, required: true}}]"
        run = against(Stub(ANSWER), served("{shape: constant, rate: 10/s}", "{steady: {for: 2s}}", also=collect), tmp_path)
        code, said = found.end()
    assert (code, said) == (143, "")
    (facts,) = [json.loads((run.directory / "manifest.json").read_text())["collectors"][0]]
    assert (facts["source"], facts["error"], facts["agent"]["every_s"]) == ("agent", None, 0.1)
    assert abs(facts["clock"]["offset_s"]) <= facts["clock"]["error_s"] + 0.01  # the same machine's clock
    fine = [row for row in run.lines("samples.jsonl") if row["name"] == "gpu_power_w" and row["labels"]]
    second = [row["t"] for row in fine if row["labels"]["gpu"] == "2"]
    assert second == sorted(set(second))
    assert len(second) >= 17
    assert {row["value"] for row in fine if row["labels"]["gpu"] == "2"} == {500.0}
    assert {row["labels"]["gpu"] for row in fine} == {"0", "2"}
    joined = [row for row in run.lines("samples.jsonl") if row["name"] == "gpu_power_w" and not row["labels"]]
    assert {row["value"] for row in joined} == {800.0}
    assert any(row["values"].get("gpu_memory_mean") == pytest.approx(0.02) for row in run.lines("windows.jsonl"))
    (row,) = run.summary["telemetry"]["collectors"]
    assert (row["source"], row["state"], row["gaps"]) == ("agent", "worked", 0)


def inside(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[int, str]:
    """(exit code, output) of an agent that does not begin, in this process: one of its own would take seconds."""
    monkeypatch.setenv("KVBENCH_FAKE_NVML", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    Fake(folder / "state")
    listen = [] if "--listen" in options else ["--listen", "127.0.0.1:0"]
    result = CliRunner().invoke(app, ["agent", *listen, *options])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--sampling-rate", "100"], "--sampling-rate|not a sampling rate"),
        (["--sampling-rate", "1ms"], "GPUs are read every 20 ms to"),
        (["--sampling-rate", "0/s"], "GPUs are read every"),
        (["--keep", "1s"], "--keep 1s"),
        (["--gpu-ids", ","], "names no GPU"),
        (["--gpu-ids", "9"], "--gpu-ids: 9 is no GPU of this machine; it has 0"),
        (["--listen", "9400"], "is not an address"),
        (["--listen", "127.0.0.1:99999"], "is not an address"),
        (["--listen", "192.0.2.1:0"], "cannot be had"),
        (["--influx-bucket", "b"], "go with --influx"),
        (["--influx", "nowhere"], "--influx: 'nowhere' is not an address"),
        (["--influx", "http://127.0.0.1:1", "--influx-token-env", "NONE_SUCH"], "NONE_SUCH"),
        (["--influx", "http://127.0.0.1:1", "--influx-disk", "5"], "not a size"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, options: list[str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = inside(tmp_path, monkeypatch, *options)
    assert code == 2, said
    assert re.search(text, said)
    assert "Traceback" not in said


def test_without_nvml_it_says_so_and_offers_the_machine_alone(tmp_path: Path) -> None:
    said = kvbench("agent", "--listen", "127.0.0.1:0", env=settings(tmp_path, nvml=False))
    assert said.returncode == 2
    assert "no libnvidia-ml.so.1" in said.stderr
    assert "--gpu-ids none" in said.stderr
    with agent(tmp_path, "--gpu-ids", "none", "--listen", "0.0.0.0:0") as found:
        time.sleep(0.3)  # the first reading of the machine's CPU takes 0.1 s
        page = found.get("/metrics")
        assert "kvbench_host_cpu " in page
        assert "kvbench_gpu" not in page
        assert json.loads(found.get("/health"))["gpus"] == []
        code, text = found.end(signal.SIGINT)
    assert code == 130
    assert "nothing protects port" in text  # since it listens to all


@pytest.mark.skipif(not (TOOLS / "influxd").exists(), reason="the test set-up fetches influxd")
def test_every_reading_is_in_a_real_influxd_also_after_it_was_away(tmp_path: Path) -> None:
    """The agent begins while the database is away; what waits is delivered when it comes."""
    server = Influxd(tmp_path / "db")
    options = ["--influx", server.url, "--influx-mode", "v1", "--gpu-ids", "0,1", "--sampling-rate", "100ms"]
    with agent(tmp_path, *options) as found:
        time.sleep(1.0)
        with database(server):
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline and not server.count("kvbench_gpu", "gpu_power_w"):
                time.sleep(0.1)
            code, said = found.end()
            rows = server.rows("SELECT gpu_power_w, gpu_memory FROM kvbench_gpu WHERE gpu = '1'")
            tags = server.rows("SELECT gpu_power_w, run, host, uuid, source FROM kvbench_gpu LIMIT 1")
    assert code == 143
    assert "does not take points yet" in said
    times = sorted({row["time"] for row in rows if row["gpu_power_w"] is not None})
    assert len(times) >= 10
    assert max(b - a for a, b in pairwise(times)) < 1e9, "the readings from before the database came are there too"
    assert {row["gpu_power_w"] for row in rows} >= {300.0}
    assert tags[0]["source"] == "agent"
    assert tags[0]["run"].startswith("agent-")
    assert not list(tmp_path.glob("kvbench-agent/spool/*/0*.lp"))  # all delivered


def test_a_database_that_refuses_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Rude(lambda lines, posts: (401, {}, b'{"error":"no"}')) as rude:
        code, said = inside(tmp_path, monkeypatch, "--influx", rude.url, "--influx-mode", "v1")
    assert code == 2
    assert "no token, since token_env names no variable" in said


@pytest.mark.alone
def test_eight_gpus_every_100_ms_cost_little_of_a_core(tmp_path: Path) -> None:
    """All of the agent: thread, ring, HTTP. Most of the thread's is the fake reading its state file."""
    with agent(tmp_path, fake="count 8\n") as found:

        def counted() -> dict[str, float]:
            lines = (line.split() for line in found.get("/metrics").splitlines() if not line.startswith("#"))
            return {name.removeprefix("kvbench_agent_"): float(value) for name, value in lines if "{" not in name}

        time.sleep(1.0)
        before, began = counted(), time.perf_counter()
        time.sleep(10.0)
        after, spent = counted(), time.perf_counter() - began
        found.end()
    whole, thread = (after[name] - before[name] for name in ("cpu_seconds_total", "nvml_cpu_seconds_total"))
    readings = after["readings_total"] - before["readings_total"]
    print(f"{whole / spent:.2%} of a core, of it {thread / spent:.2%} the NVML thread: {readings:.0f} readings in {spent:.1f} s")
    print(f"ring {after['ring_bytes'] / (spent + 1) / 1e3:.0f} kB/s, {after['memory_bytes'] / 1e6:.0f} MB resident")
    assert readings >= 90
    assert whole / spent < 0.05


def test_the_spool_of_an_agent_is_bounded_and_survives_it(tmp_path: Path) -> None:
    """What waits is refused beyond the bound and counted; the next agent delivers what waited; what is settled is deleted."""
    spool = Standing(tmp_path / "spool", 10_000)
    line = b"m v=1 1\n" * 100
    for _ in range(12):
        spool.append(line)
    with pytest.raises(OSError, match="wait for the database"):
        spool.append(line)
    spool.ack(spool.read(800))
    spool.append(line)  # there is room again
    spool.release()
    again = Standing(tmp_path / "spool", 10_000)
    assert again.lines - again.acked == 1300  # nothing was settled: sending 100 of them twice changes nothing
    again.release()


def test_what_the_database_has_for_good_leaves_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.sink.spool.SEGMENT", 1000)
    monkeypatch.setattr("kvbench.sink.spool.SETTLED", 0.0)
    spool = Standing(tmp_path, 10_000)
    for _ in range(100):
        spool.append(b"m v=1 1\n" * 100)
        while data := spool.read(500):
            spool.ack(data)
        assert len(list(tmp_path.glob("*.lp"))) <= 3
    assert (spool.lines, spool.acked) == (10_000, 10_000)
    spool.release()
