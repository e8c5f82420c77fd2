"""A server that the run starts itself: its output in a file, waited for, watched, and ended with everything that it started."""

import asyncio
import ctypes
import errno
import os
import re
import signal
import stat
import subprocess
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

import psutil
from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvbench.clock import Clock
from kvbench.collect.serverlog import SECRET
from kvbench.core import Event, Seconds
from kvbench.spec import fault
from kvbench.target import Target, TargetUnreachable
from kvbench.units import Span, duration

GRACE: Final[Seconds] = 10.0  # from SIGTERM to SIGKILL
LOOK: Final[Seconds] = 0.2  # between two looks whether it answers, or is gone
TAIL: Final = 1 << 14  # bytes of its output that are searched for the last lines
LINES: Final = 8
MARK: Final = "KVBENCH_LAUNCHED"  # in the environment of everything that it starts, by which all of it is found again
_VARIABLE = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*")
_KEY = re.compile(r"(?:^|_)(?:token|key|apikey|passwd|credentials?|authorization|cookie)s?$|secret|password", re.IGNORECASE)
_FLAG = re.compile(r"--?[a-z0-9_.-]*(?:api[-_]?key|token|secret|password)(=.*)?", re.IGNORECASE | re.DOTALL)


class Launch(BaseModel):
    """Starts the server with the run, and ends it after the run."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    command: list[str] = Field(
        min_length=1,
        max_length=1000,
        description="program and arguments, without a shell; an argument $NAME is read from the environment",
    )
    ready: Span = Field(300.0, le=86400, description="how long it may take until it answers")
    env: dict[str, str] = Field({}, description="further environment variables; a value $NAME is read from the environment")
    log: Path | None = Field(None, description="file to which its output is appended; left out: server.log in the run directory")

    @field_validator("command")
    @classmethod
    def _plain(cls, value: list[str]) -> list[str]:
        if not value[0] or value[0].startswith("-") or any("\0" in part for part in value):
            fault((), "begins with a program: [vllm, serve, my-model, --port, '8000']")
        for at, part in enumerate(value):
            flag = _FLAG.fullmatch(part)
            if flag and (flag[1] or not value[at + 1 : at + 2] or not value[at + 1].startswith(("$", "-"))):
                fault((at,), "a secret does not stand in a scenario: write its value as an argument of its own, $NAME")
        return value

    @field_validator("env")
    @classmethod
    def _no_secrets(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in text:
                fault((name,), "not an environment variable")
            if _KEY.search(name) and not _VARIABLE.fullmatch(text):
                fault((name,), "a secret comes from the environment: write its value as $NAME")
        return value


class Server:
    """One launched process and what it started. `log`: its output. `session`: of nsys, where it runs under that; `unprofiled`:
    why it does not, where it should."""

    session = unprofiled = ""

    def __init__(self, clock: Clock, log: Path, secrets: Sequence[str] = (), last: Callable[[], Awaitable[None]] | None = None):
        self.clock, self.log = clock, log
        self.secrets = secrets
        self._last = last  # awaited before it is ended
        self._mark = token_hex(8)
        self._process: subprocess.Popen[bytes] | None = None
        self._told = False
        self._from = 0

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Raises TargetUnreachable where there is no such program, or no place for its output."""
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            descriptor, self._from = _appended(self.log)
        except OSError as error:
            why = error.strerror or error
            raise TargetUnreachable(f"cannot launch {command[0]!r}: its output cannot go to {self.log}: {why}") from None
        try:
            with open(descriptor, "ab") as out:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                    env={**os.environ, **env, MARK: self._mark},
                    preexec_fn=_end_with_parent if _PRCTL else None,  # noqa: PLW1509 - one system call
                )  # fmt: skip
        except OSError as error:
            raise TargetUnreachable(f"cannot launch {command[0]!r}: {error.strerror or error}") from None

    async def ready(self, answers: Callable[[], Awaitable[bool]], patience: Seconds) -> None:
        """Wait until `answers`. Raises TargetUnreachable, with its last lines, where it ends or does not within `patience`."""
        until = self.clock.now() + patience
        while (code := self.code) is None:
            left = until - self.clock.now()
            if left <= 0:
                raise TargetUnreachable(f"the launched server did not answer within {duration(patience)}; {self.last_words()}")
            with suppress(TimeoutError):
                if await asyncio.wait_for(answers(), left) and self.code is None:
                    return
            await asyncio.sleep(min(LOOK, max(0.0, left)))
        stay = " (it has to stay in the foreground)" if code == 0 else ""
        raise TargetUnreachable(f"the launched server {ended(code)} before it answered{stay}; {self.last_words()}")

    def rival(self, ports: Collection[int]) -> str:
        """Who else listens at one of these ports of this machine, where it is a server that another run launched; "" where none
        is known. Only of those can be told that they are not in front of ours, as a proxy or a container's forwarder is."""
        with suppress(psutil.Error, OSError):  # not every system lets everyone look
            for one in psutil.net_connections("tcp"):
                port = one.laddr.port if one.laddr and one.status == psutil.CONN_LISTEN else None
                if port in ports and one.pid is not None and _mark(one.pid) not in ("", self._mark):
                    return f"port {port} belongs to process {one.pid}, which another run of kvbench launched"
        return ""

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def last_words(self) -> str:
        """Its last lines, and where all of them are."""
        lines = self.tail()
        said = "it said nothing" if not lines else "it said last:\n  " + "\n  ".join(lines) + "\n"
        return f"{said} ({self.log})"

    def tail(self) -> list[str]:
        """The last lines of its output, without secrets."""
        with suppress(OSError), open(self.log, "rb") as file:
            file.seek(max(self._from, os.fstat(file.fileno()).st_size - TAIL))
            text = file.read(TAIL).decode(errors="replace")
            for secret in self.secrets:
                text = text.replace(secret, "***")
            shown = (line.rstrip().rpartition("\r")[2] for line in text.split("\n"))  # of a progress bar its last state
            lines = [line for line in shown if line.strip()]
            return [SECRET.sub(r"\1[...]", line)[-300:] for line in lines[-LINES:]]
        return []

    def moved(self, log: Path) -> None:
        """Its output is to be found at `log` from now on; where it cannot be moved there it stays."""
        with suppress(OSError):
            self.log.rename(log)
            self.log = log

    def events(self) -> Iterator[Event]:
        """That it is gone, once."""
        if (code := self.code) is not None and not self._told:
            self._told = True
            data = {"code": code, "reason": f"the launched server {ended(code)}", "lines": self.tail(), "log": str(self.log)}
            yield Event(t=self.clock.now(), kind="server_exit", data=data)

    async def end(self) -> None:
        """SIGTERM to all of it, SIGKILL to what is left after GRACE. Returns within that and a little."""
        if self._process is None:
            return
        self._told = True
        if self._last is not None:
            await self._last()
        until, told = self.clock.now() + GRACE, False
        while there := self._there():
            late = self.clock.now() > until
            if not told or late:
                for one in there:
                    with suppress(psutil.Error):
                        one.send_signal(signal.SIGKILL if late else signal.SIGTERM)
            told = True
            if self.clock.now() > until + 2:
                break  # in the kernel's hands: it can do no more than this
            await asyncio.sleep(0.05 if not late else 0.2)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.1)
        self._process = None

    def _there(self) -> list[psutil.Process]:
        """What is alive of it: in its group, marked by its environment, or a child of such. Titles may hide the mark, and nsys
        puts what it launches into a session of its own."""
        assert self._process is not None
        self._process.poll()  # reaps it
        group, mark = self._process.pid, (MARK, self._mark)
        found: dict[int, psutil.Process] = {}
        others: list[tuple[int, psutil.Process]] = []
        for one in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if one.status() == psutil.STATUS_ZOMBIE:
                    continue
                if os.getpgid(one.pid) == group or mark in _environment(one):
                    found[one.pid] = one
                else:
                    others.append((one.ppid(), one))
        grown = True
        while grown:
            more = {one.pid: one for parent, one in others if parent in found and one.pid not in found}
            found |= more
            grown = bool(more)
        return list(found.values())


class Launched:
    """`inner` on a server that the run launched: its end is an event, and the server ends with it."""

    def __init__(self, inner: Target, server: Server) -> None:
        self.inner, self.server = inner, server
        self.open, self.encode, self.send = inner.open, inner.encode, inner.send
        self.gauges, self.nodes, self.accesses = inner.gauges, inner.nodes, inner.accesses

    def events(self) -> list[Event]:
        return [*self.inner.events(), *self.server.events()]

    async def aclose(self) -> None:
        try:
            await self.inner.aclose()
        finally:
            await self.server.end()


def ended(code: int) -> str:
    """How a process ended, for people."""
    if code >= 0:
        return f"exited with code {code}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _appended(path: Path) -> tuple[int, int]:
    """(descriptor, size) of the file that output is appended to. Never waits: opening a pipe would, until someone reads it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    found = os.fstat(descriptor)
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISCHR(found.st_mode)):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a file")
    os.set_blocking(descriptor, True)
    return descriptor, found.st_size


def _environment(one: psutil.Process) -> Any:
    try:
        return one.environ().items()
    except (psutil.Error, OSError):
        return ()


def _mark(pid: int) -> str:
    """The mark of the run that launched this process, "" where none did."""
    with suppress(psutil.Error, OSError):
        return str(psutil.Process(pid).environ().get(MARK, ""))
    return ""


def _prctl() -> Any:
    """prctl, where there is one (Linux)."""
    try:
        return ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None


_PRCTL = _prctl()


def _end_with_parent() -> None:
    """In the child: be sent SIGTERM when kvbench is killed outright, so that no server is left on a GPU."""
    _PRCTL(1, signal.SIGTERM)
