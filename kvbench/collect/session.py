"""Nsight Systems' command line: one session, by its name, and no other. Every call is bounded; no exit code is believed alone.

Verified on 2022.4, 2023.4 and 2024.2: `start` with an unknown session makes a new one and succeeds, `stop` succeeds without a
file, a missing importer leaves a .qdstrm and success, `shutdown` ends the server unless told not to.
"""

import asyncio
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

import psutil

from kvbench.collect import CollectorError
from kvbench.collect.profiler import ProfilerError
from kvbench.core import Seconds
from kvbench.nsys.source import installed

ASK: Final[Seconds] = 5.0  # for an answer about versions and sessions; 0.05 s as a rule
START: Final[Seconds] = 10.0  # 0.2 s as a rule
LOOK: Final[Seconds] = 0.02  # between two looks whether it has ended
STOP: Final[Seconds] = 60.0  # writes and imports the file: 1 to 2 s for 8,000 ranges
COLLECTING: Final = "Collection"  # a session's state while a window is open in it
MISSING: Final = "nsys was not found: install Nsight Systems, or give its path with `nsys`"


def program(given: str) -> str:
    """The nsys to be used: the scenario's, else what is installed. Raises CollectorError."""
    found = given or installed()
    if found is None:
        raise CollectorError(MISSING)
    return found


async def call(
    command: Sequence[str], patience: Seconds, what: str = "", env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run nsys; its exit code and what it said. Raises ProfilerError where it cannot be run or does not end; it is killed then.

    Its output goes to a file: a daemon that it leaves would hold a pipe open. `what`: the command's name, for the error;
    `env`: variables beside our own.
    """
    what = what or f"{Path(command[0]).name} {command[1]}"
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed below, and errors of what follows are others
    except OSError as error:
        raise ProfilerError(f"`{what}` cannot be run: no place for its output: {error.strerror or error}", begun=False) from None
    with file as out:
        try:
            process = _spawned(command, out, {**os.environ, **(env or {})})
        except OSError as error:
            raise ProfilerError(f"{command[0]} cannot be run: {error.strerror or error}", begun=False) from None
        loop = asyncio.get_running_loop()
        until = loop.time() + patience
        try:
            while (code := process.poll()) is None:
                if loop.time() > until:
                    raise ProfilerError(f"`{what}` did not end within {patience:g} s and was killed")
                await asyncio.sleep(LOOK)
        finally:
            if process.poll() is None:
                _killed(process)
        out.seek(0)
        return code, out.read(1 << 20).decode(errors="replace")


def _spawned(command: Sequence[str], out: IO[bytes], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """By vfork, which holds the loop for a millisecond: uvloop forks, which takes 25 ms of a process as large as a run's."""
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=env)


def _killed(process: subprocess.Popen[bytes]) -> None:
    """End it with all that it called, also in a group of its own: an nsys that hangs would be left."""
    with suppress(psutil.Error):
        for one in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.Error):
                one.kill()
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(1)


async def launching(nsys: str, session: str, trace: str) -> list[str]:
    """What goes before a server's command, so that it runs under `session`. Raises CollectorError where nsys does not run."""
    found = program(nsys)
    await _version(found)
    return [
        found, "launch", f"--session-new={session}", f"--trace={trace}", "--trace-fork-before-exec=true",
        *(["--cuda-graph-trace=node"] if "cuda" in trace.split(",") else []),
    ]  # fmt: skip


async def dismissed(nsys: str, session: str) -> None:
    """End a session that we launched, and not its server."""
    with suppress(ProfilerError, CollectorError):
        await call([program(nsys), "shutdown", f"--session={session}", "--kill=none"], ASK)


class Session:
    """A running session `name`: a server that was launched under it, by us or by someone else."""

    def __init__(self, nsys: str, name: str) -> None:
        self.nsys, self.name = nsys, name

    async def open(self) -> dict[str, Any]:
        self.nsys = program(self.nsys)
        version = await _version(self.nsys)
        try:
            known = await self._sessions()
        except ProfilerError as error:
            raise CollectorError(str(error)) from None
        if self.name not in known:
            there = f"there are {', '.join(known)}" if known else "there is none"
            raise CollectorError(
                f"nsys has no session {self.name!r} ({there}): start the server with `nsys launch --session-new={self.name} ...` "
                "as this user on this machine"
            )
        return {"nsys": version, "session": self.name}

    async def begin(self, stem: Path) -> None:
        state = (await self._sessions()).get(self.name)
        if state is None:  # a start would make a new one, and say nothing
            raise ProfilerError(f"the nsys session {self.name!r} is gone: the server has ended, or left it", begun=False)
        if state == COLLECTING:  # and what is tried after a start that hangs would end it
            raise ProfilerError(f"the nsys session {self.name!r} is collecting already, and not for us", begun=False)
        code, said = await self._call(
            "start", "--sample=none", "--cpuctxsw=none", f"--output={stem}", "--force-overwrite=true", patience=START
        )
        if code:
            raise ProfilerError(f"`nsys start` failed with exit code {code}: {last(said)}", begun=False)

    async def end(self, stem: Path) -> Path | None:
        code, said = await self._call("stop", patience=STOP)
        for suffix in (".nsys-rep", ".qdrep"):
            file = stem.with_name(stem.name + suffix)
            if file.is_file() and file.stat().st_size:
                return file
        if stem.with_name(stem.name + ".qdstrm").is_file():
            raise ProfilerError("nsys left a raw .qdstrm: its importer is missing (host-linux-x64 beside target-linux-x64)")
        failed = f" with exit code {code}" if code else ", told of success"
        raise ProfilerError(f"`nsys stop` ended{failed} and left no file: {last(said)}")

    async def abandon(self) -> None:
        """Where our window may be open: a session that collects nothing refuses, and nothing changes."""
        with suppress(ProfilerError):
            if self.name in await self._sessions():
                await self._call("stop", patience=START)

    async def close(self) -> None:
        """Whoever launched the session ends it: our own launch does, after the run."""

    async def _call(self, verb: str, *options: str, patience: Seconds) -> tuple[int, str]:
        return await call([self.nsys, verb, f"--session={self.name}", *options], patience)

    async def _sessions(self) -> dict[str, str]:
        """The state of each running one by its name: the third and the last column of the list."""
        code, said = await call([self.nsys, "sessions", "list"], ASK)
        if code:
            raise ProfilerError(f"`nsys sessions list` failed with exit code {code}: {last(said)}", begun=False)
        return {words[-1]: words[2] for line in said.splitlines() if len(words := line.split()) > 3 and words[0].isdigit()}


async def _version(nsys: str) -> str:
    try:
        code, said = await call([nsys, "--version"], ASK)
    except ProfilerError as error:
        raise CollectorError(f"{error}. {MISSING}" if "cannot be run" in str(error) else str(error)) from None
    if code:
        raise CollectorError(f"{nsys} --version failed with exit code {code}: {last(said)}")
    return last(said).removeprefix("NVIDIA Nsight Systems version ")


def last(said: str) -> str:
    """The last line of what was said, without progress bars."""
    lines = [line.strip() for line in said.replace("\r", "\n").splitlines()]
    told = [line for line in lines if line and not line.startswith("[")]
    return told[-1][:300] if told else "it said nothing"
