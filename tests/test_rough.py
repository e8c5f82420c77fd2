"""Rough handling: signals at a bad moment, servers that never end or repeat a secret, content that runs out, lines that lie."""

import asyncio
import importlib
import json
import signal
import socket
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from rich.console import Console

from kvbench.core import Event
from kvbench.report import render
from kvbench.report import write as pages
from kvbench.report.accounting import AccountingError
from kvbench.report.files import LINES, load
from kvbench.report.summary import summarise
from kvbench.scenario import ScenarioError
from kvbench.target import TargetUnreachable, discover
from tests.report.build import own, record, write
from tests.stub.stub import DONE, FIN, C, Reply, Stub, U, answer_json, delta, sse, stream
from tests.whole import ROOT, against, instant, served, simulated

KEY = "a-key-that-nobody-may-read"
QUICK = "{steady: {for: 200ms}, drain: {for: 1s}}"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
SIM = """
name: rough
target: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090}
workload: {arrivals: ARRIVALS, WORKLOAD}
phases: {steady: {for: 60s}, drain: {for: 5s}}
"""

# ---- signals


def start(scenario: Path, out: Path, *before: str) -> subprocess.Popen[str]:
    command = [*before, sys.executable, "-m", "kvbench", "run", str(scenario), "--out", str(out), "-q"]
    pipe = subprocess.PIPE
    kept = signal.getsignal(signal.SIGHUP)
    if not before:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what a child inherits, also where the tests themselves run under nohup
    try:
        return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    finally:
        signal.signal(signal.SIGHUP, kept)


def wait_for(out: Path, pattern: str) -> None:
    end = time.perf_counter() + 20
    while not any(path.stat().st_size for path in out.glob(pattern)):
        assert time.perf_counter() < end, f"no {pattern} in {out}"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("numbers", "code"),
    [([signal.SIGINT] * 2, 130), ([signal.SIGTERM] * 2, 143), ([signal.SIGHUP], 143)],
    ids=["int", "term", "hup"],
)
def test_a_signal_and_its_echo_leave_a_whole_partial_report(numbers: list[signal.Signals], code: int, tmp_path: Path) -> None:
    """A terminal and a supervisor both say it; a terminal that goes away says SIGHUP."""
    with instant(20, 20_000) as url:
        text = served("{shape: poisson, rate: 100/s}", "{steady: {for: 30s}, drain: {for: 5s}}")
        (tmp_path / "s.yaml").write_text(text.replace("{url}", url))
        process = start(tmp_path / "s.yaml", tmp_path / "out")
        wait_for(tmp_path / "out", "*/windows.jsonl")
        for number in numbers:
            process.send_signal(number)
        said = process.communicate(timeout=20)[0]
    assert (process.returncode, "Traceback" in said) == (code, False), said
    (directory,) = (tmp_path / "out").iterdir()
    assert json.loads((directory / "summary.json").read_text())["stop"]["signal"] == numbers[0].name
    assert not list(directory.glob("*.part"))


def test_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    with instant(2) as url:
        text = served("{shape: constant, rate: 50/s}", "{steady: {for: 2s}, drain: {for: 1s}}")
        (tmp_path / "s.yaml").write_text(text.replace("{url}", url))
        process = start(tmp_path / "s.yaml", tmp_path / "out", "nohup")
        wait_for(tmp_path / "out", "*/windows.jsonl")
        process.send_signal(signal.SIGHUP)
        said = process.communicate(timeout=20)[0]
    (directory,) = (tmp_path / "out").iterdir()
    assert json.loads((directory / "summary.json").read_text())["stop"]["reason"] == "duration", said


def test_a_signal_before_the_run_ends_it_with_a_word_and_no_directory(tmp_path: Path) -> None:
    """The server was asked what it is, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        (tmp_path / "s.yaml").write_text(served("{shape: constant, rate: 5/s}", QUICK).replace("{url}", url))
        process = start(tmp_path / "s.yaml", tmp_path / "out")
        silent.settimeout(20)
        with silent.accept()[0] as asked:
            asked.recv(10)
            process.send_signal(signal.SIGTERM)
            said = process.communicate(timeout=20)[0]
    assert (process.returncode, said.strip()) == (143, "interrupted by SIGTERM before the run began")
    assert not (tmp_path / "out").exists()


def test_a_signal_while_the_report_is_written_waits_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = []
    verb = importlib.import_module("kvbench.cli.run")  # the name in kvbench.cli is the verb's function

    def report(directory: Path, console: Console) -> int:
        signal.raise_signal(signal.SIGTERM)
        done.append(directory)
        return 0

    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(verb, "_report", report)
    try:
        assert verb._undisturbed(tmp_path, Console(file=StringIO())) == 143
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    assert done == [tmp_path]


# ---- servers


@pytest.mark.parametrize("endless", [b"X-Y: " + b"z" * 60_000 + b"\r\n", b"z" * 60_000], ids=["headers", "one header"])
def test_a_head_without_an_end_fails_its_request_and_is_not_kept(endless: bytes, tmp_path: Path) -> None:
    steps = [(0.0, HEAD + b"X: "), *((float(k), endless) for k in range(1, 9))]
    whole = against(Stub(Reply(steps, framing="raw", after="hang")), served("{shape: constant, rate: 5/s}", QUICK), tmp_path)
    assert [(each.outcome, each.cause) for each in whole.records] == [("failed", "protocol")]
    assert "headers without an end" in whole.records[0].error


def test_many_informational_answers_are_not_a_head_without_an_end(tmp_path: Path) -> None:
    body = C("a") + FIN + U(8, 2) + DONE
    answer = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 1000 + HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    whole = against(Stub(Reply([(0, answer)], framing="raw")), served("{shape: constant, rate: 5/s}", QUICK), tmp_path)
    assert [each.outcome for each in whole.records] == ["ok"]


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
def test_a_compressed_answer_says_that_it_is(kind: str, tmp_path: Path) -> None:
    reply = Reply([(0, b"\x1f\x8b\x08\0\0\0\0\0\0\0")], headers=(("Content-Type", kind), ("Content-Encoding", "gzip")))
    (failed,) = against(Stub(reply), served("{shape: constant, rate: 5/s}", QUICK), tmp_path).records
    assert (failed.outcome, failed.cause) == ("failed", "encoded")
    assert failed.error.startswith("the body is gzip-encoded")


def test_a_finish_reason_is_as_short_as_a_complaint(tmp_path: Path) -> None:
    reply = stream(C("a"), sse(delta({}, "stop" * 100_000)), DONE)
    (record,) = against(Stub(reply), served("{shape: constant, rate: 5/s}", QUICK), tmp_path).records
    assert (record.outcome, record.finish) == ("ok", "stop" * 75)


@pytest.mark.parametrize(
    "reply",
    [
        stream(C("a"), sse(delta({}, f"{KEY}!")), DONE),
        answer_json({"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": KEY}]}),
        answer_json({"error": {"message": f"no such key: {KEY}", "code": KEY}}, 401),
    ],
    ids=["stream", "json", "401"],
)
def test_a_key_that_the_server_repeats_is_in_no_file(reply: Reply, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUGH_KEY", KEY)
    listed = answer_json({"data": [{"id": f"m-{KEY}", "owned_by": KEY}]}, headers=(("Server", KEY),))
    text = served("{shape: constant, rate: 5/s}", QUICK, target="key_env: ROUGH_KEY")
    whole = against(Stub(reply, gets=listed), text, tmp_path)
    assert len(whole.records) == 1
    assert [path.name for path in whole.directory.iterdir() if KEY in path.read_text()] == []


def test_a_server_that_says_nothing_is_named_with_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "PATIENCE", aiohttp.ClientTimeout(total=0.1))

    async def ask() -> None:
        async with Stub(answer_json({}), gets=Reply(framing="raw", after="hang")) as stub:
            await discover.discover([stub.url], "m", {}, None)

    with pytest.raises(TargetUnreachable, match=r"/v1/models: silent for 0\.1 s"):
        asyncio.run(ask())


# ---- content


@pytest.mark.parametrize("arrivals", ["{shape: constant, rate: 2/s}", "{shape: closed, concurrency: 3}"])
def test_a_trace_among_classes_that_is_used_up_ends_its_phase(arrivals: str, tmp_path: Path) -> None:
    rows = [{"timestamp": 500 * k, "input_length": 100, "output_length": 5, "hash_ids": [k]} for k in range(6)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    classes = "{a: {weight: 50%, trace: {file: t.jsonl, format: mooncake}}, b: {weight: 50%, prompt: 10, output: 3}}"
    whole = simulated(SIM.replace("ARRIVALS", arrivals).replace("WORKLOAD", f"classes: {classes}"), tmp_path)
    assert [each.outcome for each in whole.records if each.cls == "a"] == ["ok"] * 6
    assert "all 6 arrivals are used" in whole.summary["stop"]["reason"]


@pytest.mark.parametrize("also", ['"n": "two"', '"n": 1000000000', '"n": 0', '"n": 1.5', '"user": "\\ud800"'])
def test_a_recorded_prompt_that_cannot_be_asked_is_refused_with_its_line(also: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('\n{"messages": [{"role": "user", "content": "x"}], ' + also + "}\n")
    text = SIM.replace("ARRIVALS", "{shape: constant, rate: 2/s}")
    with pytest.raises(ScenarioError, match=r"p\.jsonl:2"):
        simulated(text.replace("WORKLOAD", "source: {file: p.jsonl, format: openai}, output: 4"), tmp_path)


# ---- reports


LIES: list[Any] = [None, "x", -1, 9e307, 10**400, [None]]


def paths(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key and the first two of every list, at any depth."""
    inner = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree[:2])) if isinstance(tree, list) else []
    return [path for key, value in inner for path in ((*at, key), *paths(value, (*at, key)))]


def replaced(tree: Any, at: tuple[Any, ...], value: Any) -> Any:
    copy = msgspec.json.decode(msgspec.json.encode(tree))
    where = copy
    for key in at[:-1]:
        where = where[key]
    where[at[-1]] = value
    return copy


@pytest.mark.parametrize("name", [name for name in LINES if name != "windows.jsonl"])
def test_no_line_of_a_run_can_break_its_report(name: str, tmp_path: Path) -> None:
    """Any field as anything: the line counts as damaged, or is read; nothing is raised but that the requests do not add up."""
    told = {"rule": "r", "reason": "r", "phase": "steady", "phase_kind": "steady"}
    rule = "success_rate < 90 % (over 10 s)"
    extra = [
        Event(t=1.0, kind="stop", data=told),
        Event(t=1.0, kind="signal", data={"signal": "SIGINT"}),
        Event(t=3.0, kind="phase_start", data={"phase": "steady-2", "phase_kind": "steady", "start": 3.0}),
        Event(t=9.0, kind="run_end", data={"reason": "completed", "unread": {rule: [1, 2, "few"]}}),
    ]
    known: dict[str, Any] = {"token_n": list(range(1, 12)), "token_choice": [0] * 11, "sampling": {"n": 2, "temperature": 0.5}}
    full = record(0, 1.0, session=1, group=1, cached=3, reasoning=1, **known)
    rules = {"stop": [{"success_rate": "< 90%", "over": "10s"}]}
    directory = write(tmp_path / "run", [full, record(1, 2.0)], events=extra, samples=own(3, loop_lag=0.001), scenario=rules)
    lines = (directory / name).read_text().splitlines()
    damaged = 0
    kinds: dict[str, tuple[int, Any]] = {}  # one line of each shape is enough
    for number, line in enumerate(lines):
        tree = json.loads(line)
        kinds.setdefault(tree.get("kind") or tree.get("name") or "record", (number, tree))
    for number, tree in kinds.values():
        for path in paths(tree):
            for lie in LIES:
                changed = [*lines[:number], json.dumps(replaced(tree, path, lie)), *lines[number + 1 :]]
                (directory / name).write_text("\n".join(changed) + "\n")
                files = load(directory)
                damaged += files.damaged.get(name, 0)
                try:
                    summary = summarise(files)
                except AccountingError:
                    continue
                if lie == "x":
                    pages.as_json(summary, files)
                    render.terminal(summary, Console(file=StringIO()))
    assert damaged > 5
