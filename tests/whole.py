"""Whole runs for tests: a scenario's text in, its summary, records and exit code out. Real loop or virtual, in this process."""

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from kvbench.cli.run import record
from kvbench.clock import VirtualLoop
from kvbench.report.files import load as load_run
from kvbench.report.outcome import exit_code
from kvbench.report.write import finish
from kvbench.scenario import load
from tests.stub.stub import Stub

ROOT = Path(__file__).parent.parent


@dataclass
class Whole:
    """A finished run."""

    directory: Path
    summary: dict[str, Any]
    code: int
    why: str

    @property
    def records(self) -> list[Any]:
        return sorted(load_run(self.directory).records, key=lambda each: each.id)

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / name).read_text().splitlines()]


def finished(directory: Path) -> Whole:
    summary = finish(directory)
    code, why = exit_code(summary)
    return Whole(directory, summary, code, why)


SERVED = """\
name: case
seed: 7
target: {kind: http, url: "{url}", model: m, tokenizer: words, TARGET}
workload: {arrivals: ARRIVALS, prompt: 8, output: 2, WORKLOAD}
phases: PHASES
"""


def served(arrivals: str, phases: str, *, target: str = "", workload: str = "", also: str = "") -> str:
    """A scenario against a server at {url}: prompts of 8 words, answers of 2 tokens. Every part is YAML; `target` and `workload`
    are further keys of theirs, `also` of the scenario."""
    parts = {"ARRIVALS": arrivals, "PHASES": phases, "TARGET": target, "WORKLOAD": workload}
    return re.sub("[A-Z]{6,}", lambda word: parts[word[0]], SERVED) + also + "\n"


async def play(text: str, folder: Path, *sets: str) -> Path:
    """Run a scenario's text on the running loop, quietly; returns the run directory."""
    file = folder / "scenario.yaml"
    file.write_text(text)
    return await record(load(file, [*sets, f"out={folder / 'results'}"]), Console(file=StringIO()), True)


def against(stub: Stub, text: str, folder: Path, *sets: str, also: Callable[[], Awaitable[None]] | None = None) -> Whole:
    """Run against a stub in the same loop. `text` holds {url} where the stub's address goes; `also` runs beside the run."""

    async def work() -> Path:
        async with stub:
            beside = asyncio.ensure_future(also()) if also is not None else None
            directory = await play(text.replace("{url}", stub.url), folder, *sets)
            if beside is not None:
                beside.cancel()
            return directory

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return finished(runner.run(work()))


def simulated(text: str, folder: Path, *sets: str) -> Whole:
    """Run on the embedded engine in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return finished(runner.run(play(text, folder, *sets)))


def kvbench(*arguments: str | Path, cwd: Path = ROOT, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it."""
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "120"} | options.pop("env", {})
    command = [sys.executable, "-m", "kvbench", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=options.pop("timeout", 120))


@contextmanager
def instant(*arguments: str | int | Path) -> Iterator[str]:
    """The compiled stub with `tokens [delay_us [first_us]] [--log FILE]`; yields its URL."""
    binary = Path(tempfile.gettempdir()) / f"kvbench-instant-{os.getuid()}"
    source = ROOT / "tests/stub/instant.c"
    if not binary.exists() or binary.stat().st_mtime < source.stat().st_mtime:
        part = binary.with_name(f"{binary.name}.{os.getpid()}")
        subprocess.run(["gcc", "-O2", "-Wall", "-o", part, source], check=True)
        part.replace(binary)
    process = subprocess.Popen([binary, "0", *map(str, arguments)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().split()[-1]}"
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
