"""target.launch: the server is started, waited for, watched, and ended with all that it started, on every path."""

import asyncio
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
import yaml

from kvbench.launch import Launch
from kvbench.scenario import ScenarioError, load
from kvbench.target import TargetUnreachable
from tests.whole import Whole, finished, kvbench, play

SMALL = Path(__file__).parent / "stub/small.py"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scenario(*asked: str, steady: str = "1s", also: str = "", **launch: Any) -> str:
    """A scenario that launches the small server with `asked`, and loads it with 20 requests/s."""
    port = free_port()
    spec = {"command": [sys.executable, str(SMALL), str(port), *asked], "ready": "20s", **launch}
    target = {"kind": "http", "url": f"http://127.0.0.1:{port}", "model": "m", "tokenizer": "words", "launch": spec}
    rest = {"workload": {"arrivals": {"shape": "constant", "rate": "20/s"}, "prompt": 8, "output": 2}}
    phases = {"steady": {"for": steady}, "drain": {"for": "1s"}}
    return yaml.safe_dump({"name": "case", "target": target, **rest, "phases": phases}) + also


def ran(text: str, folder: Path) -> Whole:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return finished(runner.run(play(text, folder)))


def alive(pids: Path) -> list[int]:
    there = [pid for pid in map(int, pids.read_text().split()) if psutil.pid_exists(pid)]
    return [pid for pid in there if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_a_launched_server_is_loaded_logged_and_ended_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    run = ran(
        scenario("brood=1", "say=hello from the server", f"pids={pids}", "late=0.5", also="collect: [{kind: server_log}]"),
        tmp_path,
    )
    assert run.summary["outcomes"]["ok"] == 20
    assert len(pids.read_text().split()) == 3
    assert alive(pids) == []  # also the child in a session of its own
    assert "hello from the server" in (run.directory / "server.log").read_text()
    assert [event for event in run.lines("events.jsonl") if event["kind"] == "server_exit"] == []
    (collector,) = run.summary["telemetry"]["collectors"]
    assert (collector["state"], collector["facts"]["file"]) == ("worked", str(run.directory / "server.log"))


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.launch.GRACE", 0.5)
    pids = tmp_path / "pids"
    began = time.monotonic()
    ran(scenario("deaf=1", f"pids={pids}"), tmp_path)
    assert alive(pids) == []
    assert time.monotonic() - began < 10


def test_one_that_dies_in_the_run_is_an_event_with_its_last_lines(tmp_path: Path) -> None:
    run = ran(scenario("die=0.7", steady="2s"), tmp_path)
    (event,) = [event for event in run.lines("events.jsonl") if event["kind"] == "server_exit"]
    assert event["data"]["code"] == 3
    assert event["data"]["lines"] == ["fatal: told to"]
    assert run.summary["outcomes"]["failed"] > 5
    assert any("exited with code 3" in line for line in run.summary["warnings"])


@pytest.mark.parametrize(
    ("asked", "ready", "says"),
    [
        (("refuse=1", "say=no such model: x"), "20s", ["exited with code 1 before it answered", "no such model: x"]),
        (("late=60", "say=loading"), "500ms", ["did not answer within 500 ms", "loading"]),
    ],
)
def test_one_that_never_answers_is_told_of_with_its_last_lines(
    tmp_path: Path, asked: tuple[str, ...], ready: str, says: list[str]
) -> None:
    pids = tmp_path / "pids"
    with pytest.raises(TargetUnreachable) as caught:
        ran(scenario(*asked, f"pids={pids}", ready=ready), tmp_path)
    assert all(text in str(caught.value) for text in says), caught.value
    assert not pids.exists() or alive(pids) == []


@pytest.mark.slow
def test_the_exit_code_of_one_that_dies_at_once_is_6(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(scenario("refuse=1"))
    done = kvbench("run", file, "--out", tmp_path / "results")
    assert done.returncode == 6, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_flood_of_output_disturbs_nothing_and_only_its_end_is_read(tmp_path: Path) -> None:
    began = time.monotonic()
    run = ran(scenario("flood=30", "die=1.5", steady="2s"), tmp_path)
    (event,) = [event for event in run.lines("events.jsonl") if event["kind"] == "server_exit"]
    assert event["data"]["lines"][-1] == "fatal: told to"
    assert len(event["data"]["lines"]) == 8
    assert run.summary["outcomes"]["ok"] > 15
    assert time.monotonic() - began < 15


def test_someone_elses_server_at_the_address_is_not_measured(tmp_path: Path) -> None:
    text = scenario()
    port = yaml.safe_load(text)["target"]["launch"]["command"][2]
    other = subprocess.Popen([sys.executable, SMALL, port])
    try:
        wait_for(int(port))
        with pytest.raises(TargetUnreachable, match="answers there already"):
            ran(text, tmp_path)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_no_program_and_no_place_for_its_log(tmp_path: Path) -> None:
    text = yaml.safe_load(scenario())
    text["target"]["launch"]["command"] = ["kvbench-no-such-program"]
    with pytest.raises(TargetUnreachable, match="cannot launch 'kvbench-no-such-program': No such file"):
        ran(yaml.safe_dump(text), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["waiting", "running"])
def test_a_signal_ends_the_server_too(tmp_path: Path, number: signal.Signals, when: str) -> None:
    pids, file = tmp_path / "pids", tmp_path / "scenario.yaml"
    file.write_text(scenario("brood=1", f"pids={pids}", *(["late=60"] if when == "waiting" else []), steady="60s", ready="50s"))
    command = [sys.executable, "-m", "kvbench", "run", str(file), "--out", str(tmp_path / "results"), "-q"]
    process = subprocess.Popen(command, cwd=Path(__file__).parent.parent, stderr=subprocess.PIPE)
    try:
        until = time.monotonic() + 30
        ready = pids.exists if when == "waiting" else (lambda: list(tmp_path.glob("results/*/events.jsonl")))
        while not ready() and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(0.5)
        process.send_signal(number)
        assert process.wait(25) == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    finally:
        process.kill()
        process.communicate()
    assert alive(pids) == []


def wait_for(port: int) -> None:
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)


# ---- what may stand in a scenario


@pytest.mark.parametrize(
    ("launch", "says"),
    [
        ({"command": []}, "at least 1 item"),
        ({"command": ["--port", "1"]}, "begins with a program"),
        ({"command": ["x", "--api-key", "abc123"]}, "a secret does not stand in a scenario"),
        ({"command": ["x", "--api-key=abc123"]}, "a secret does not stand in a scenario"),
        ({"command": ["x"], "env": {"HF_TOKEN": "hf_abc"}}, "a secret comes from the environment"),
        ({"command": ["x"], "env": {"A-B": "1"}}, "not an environment variable"),
        ({"command": ["x"], "ready": 5}, "has no unit"),
    ],
)
def test_what_is_refused(launch: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Launch.model_validate(launch, context={"text": True})


def test_what_only_looks_like_a_secret_is_not_refused() -> None:
    plain = {
        "command": ["vllm", "--tokenizer", "x", "--max-tokens", "5", "--api-key", "$K"],
        "env": {"TOKENIZERS_PARALLELISM": "false"},
    }
    Launch.model_validate(plain)


def test_secrets_reach_the_server_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "s3cr3t-value-1")
    code = "import os, sys; print('key is', os.environ['SOME_KEY'], sys.argv[1]); sys.exit(1)"
    text = yaml.safe_load(scenario())
    text["target"]["launch"] |= {"command": [sys.executable, "-c", code, "$MY_SECRET"], "env": {"SOME_KEY": "$MY_SECRET"}}
    with pytest.raises(TargetUnreachable) as caught:
        ran(yaml.safe_dump(text), tmp_path)
    assert "key is *** ***" in str(caught.value)
    monkeypatch.delenv("MY_SECRET")
    with pytest.raises(ScenarioError, match=r"target\.launch\.command: the environment variable MY_SECRET is not set"):
        ran(yaml.safe_dump(text), tmp_path)


def test_a_target_from_the_command_line_takes_the_place_of_a_launch(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(scenario())
    assert load(file).target.launch is not None
    assert load(file, (), "http://127.0.0.1:1").target.launch is None
