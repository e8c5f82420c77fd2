"""Inputs nobody means: answers that cost no time, servers that lie, terminals that are gone, files that are someone else's."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvbench.report.files import load
from kvbench.target.http import _retry_after
from kvbench.target.sse import LONGEST, SseParser
from tests.report.build import record, write
from tests.target.wire import read
from tests.whole import ROOT, kvbench, simulated

CLOSED = """
name: refused
target: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090}
workload:
  arrivals: {shape: closed, concurrency: 3}
  prompt: {dist: fixed, value: PROMPT}
  output: {dist: fixed, value: 10}
control: {law: none, CONTROL}
phases: {steady: {for: 1s}, drain: {for: 1s}}
"""
GOOD = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n'


@pytest.mark.parametrize(("prompt", "control"), [(900_000, "inflight: 8"), (64, "inflight: 1, patience: 1ns")])
def test_closed_users_whose_questions_come_to_nothing_at_once_let_time_pass(prompt: int, control: str, tmp_path: Path) -> None:
    """Refused or shed in the instant they are asked: without a breath the run would never reach its end, nor see a signal."""
    whole = simulated(CLOSED.replace("PROMPT", str(prompt)).replace("CONTROL", control), tmp_path)
    total = whole.summary["accounting"]["total"]
    assert 3 <= total["offered"] <= 3 * 1000 + 3
    assert whole.summary["stop"]["kind"] == "bound"


@pytest.mark.parametrize("value", [b"9" * 400, b"9" * 20, b"86401", b"Mon, 01 Jan 9999 00:00:00 GMT", b"-3", b"soon"])
def test_a_retry_after_beyond_reason_is_none(value: bytes) -> None:
    assert _retry_after(value) is None


@pytest.mark.parametrize("count", ["-5", "9" * 30, "9" * 19, "1.5", '"12"', "NaN", "true"])
def test_a_usage_that_counts_nothing_is_a_malformed_event(count: str) -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":%s}}\n\n' % count.encode()
    found = read([(1, GOOD + usage + b"data: [DONE]\n\n")])
    assert (found.outcome, found.cause, found.n_in) == ("failed", "malformed", None)


@pytest.mark.parametrize("index", ["-1", "9" * 30])
def test_a_choice_index_that_is_none_is_a_malformed_event(index: str) -> None:
    found = read([(1, GOOD.replace(b'"index":0', b'"index":' + index.encode()) + GOOD)])
    assert (found.outcome, found.token_choice) == ("failed", None)


def test_a_long_event_costs_what_its_length_costs() -> None:
    """10 MB in reads of 64 KiB: joined again at each read that would be 800 MB copied and searched."""
    parser, piece = SseParser(), b"x" * 65536
    start = time.perf_counter()
    assert parser.feed(b"data: ") == []
    for _ in range(160):
        assert parser.feed(piece) == []
    assert parser.feed(b"\n") == []
    assert parser.feed(b"\n") == [piece * 160]
    assert time.perf_counter() - start < 1


def test_an_event_without_an_end_fails_its_request_and_is_not_kept() -> None:
    found = read([(1, b"data: "), *((2, b"x" * (1 << 20)) for _ in range((LONGEST >> 20) + 2)), (3, b"\n\n" + GOOD)])
    assert (found.outcome, found.cause, found.malformed) == ("failed", "malformed", 1)
    assert found.error == "malformed: an event without an end"


@pytest.mark.parametrize(
    "change",
    [
        {"scenario": 5}, {"scenario": {"workload": "x"}}, {"scenario": {"verdict": [1]}}, {"scenario": {"stop": 5}},
        {"scenario": {"workload": {"classes": {"a": 5}}}}, {"phases": 5}, {"phases": [1]}, {"seed": [1]}, {"target": "x"},
        {"tokenizer": 5}, {"host": [1]},
    ],
)  # fmt: skip
def test_someone_elses_manifest_is_refused_where_it_is_read(change: dict[str, Any], tmp_path: Path) -> None:
    directory = write(tmp_path / "run", [record(0, 1.0)])
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(manifest | change))
    with pytest.raises(ValueError, match="manifest"):
        load(directory)


@pytest.mark.parametrize("name", ["123", "ünï: [cödé"])
def test_out_is_a_path_whatever_yaml_makes_of_it(name: str, tmp_path: Path) -> None:
    done = kvbench("run", ROOT / "scenarios/smoke.yaml", "-q", "--set", "phases.steady.for=12s", "--out", name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / name).iterdir())) == 1


@pytest.mark.parametrize("stdout", ["closed pipe", "/dev/full"])
def test_the_exit_code_is_the_runs_whoever_reads_stdout(stdout: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvbench", "run", str(ROOT / "scenarios/smoke.yaml"), "--out", str(tmp_path)]
    command += ["--set", "budget.ttft_p50=1ns"]
    if stdout == "closed pipe":
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
        process.stderr.close()
        process.wait(60)
    else:
        with open(stdout, "w") as full:
            process = subprocess.Popen(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
            said = process.communicate(timeout=60)[1]
    assert (process.returncode, "Traceback" in said) == (3, False), said


def test_names_that_the_terminal_cannot_show_end_nothing(tmp_path: Path) -> None:
    directory = write(tmp_path / "ünï", [record(number, number / 10) for number in range(40)])
    done = kvbench("report", directory, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, "?n?" in done.stdout) == (0, True), done.stderr
