"""A server's own log, followed while the run goes on: memory running out, preemptions, restarts, pauses, each with its line."""

import os
import re
import stat
from collections import Counter, deque
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvbench import profile
from kvbench.clock import Clock
from kvbench.collect import Collector, CollectorError, Emit, Place
from kvbench.collect.beat import Beat
from kvbench.collect.logrules import LogRule, first
from kvbench.collect.scrape import unhurried
from kvbench.core import Event, Sample, Window
from kvbench.units import Span

MOST: Final = 1 << 20  # bytes read at once; what is beyond waits for the next reading
LONGEST: Final = 4096  # characters of a line that are looked at
SHOWN: Final = 500  # characters of it that are kept
KEY: Final = 8  # characters from which a part of a header may be a key
TOLD: Final = 20  # events of one rule that are told in one reading; the rest are counted
KEYED = (  # every repetition is bounded: a line of blanks behind such a word must not take long
    r"((?:api[_-]?key|authorization|token|password|secret)\w{0,40}['\"]?\s{0,8}(?:[:= ]|%3D)\s{0,8}(?:b?['\"])?"
    r"(?:(?:bearer|basic|token)\s{1,8})?|bearer\s{1,8})(?:\w{1,24}\()?['\"\[(]{0,8}[^\s'\",\])]{6,}"
)
PLAIN = r"(?<=://)[^\s/@]{1,200}(?=@)|\b(?:sk-|hf_|gh[opsu]_|xox[abp]-)[\w-]{8,}"  # a login in an address; keys by their form
SECRET: Final = re.compile(f"(?i){KEYED}|{PLAIN}")


class ServerLog(BaseModel):
    """Follows the log of a server from the run's start on, through rotation, and tells what its rules know."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    file: Path | None = Field(None, description="the log file; left out: the output of the server that target.launch starts")
    rules: list[LogRule] = Field([], max_length=100, description="rules of your own, asked before the profiles'")
    profiles: list[str] = Field(["vllm", "sglang", "llama-cpp", "pytorch"], description="names of profiles/logs")
    every: Span = Field(0.2, ge=0.05, description="how often the file is looked at; a line's time is that of the reading")
    required: bool = Field(False, description="true: losing it makes the run invalid")

    @field_validator("profiles")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        for name in names:
            profile.read("logs", name)
        return names

    def build(self, place: Place) -> Collector:
        file = self.file or place.server_log
        return ServerLogCollector(self, place.clock, file, [*place.headers.values(), *place.secrets])


class ServerLogCollector:
    """Events of kind `server_log` (rule, level, line, values), and a counter `log_<rule>_total` per rule that matched: told when
    it does, and once a second from then on, so that each window has its increase."""

    source = "server_log"

    def __init__(self, spec: ServerLog, clock: Clock, file: Path | None, hidden: Collection[str] = ()) -> None:
        self.clock, self.required, self.file = clock, spec.required, file
        known = [LogRule.model_validate(rule) for name in spec.profiles for rule in profile.read("logs", name)["rules"]]
        self.rules = [*spec.rules, *known]
        self.beat = Beat(self.source, clock, spec.every, self._read)
        self.counts: Counter[str] = Counter()
        self.lines = 0
        self._read_at = 0.0
        self._descriptor, self._file = -1, (0, 0)
        self._rest = b""
        self._lines: deque[bytes] = deque()  # read, and not looked at yet
        self._secrets = [part for value in hidden for part in value.split() if len(part) >= KEY]

    async def open(self) -> dict[str, Any]:
        if self.file is None:
            raise CollectorError("no file to follow: give `file`, or let target.launch start the server")
        try:
            self._reopen()
            os.lseek(self._descriptor, 0, os.SEEK_END)  # what was said before the run is not the run's
        except OSError as error:
            raise CollectorError(f"cannot read {self.file}: {error.strerror}") from None
        return {"file": str(self.file), "rules": len(self.rules), "every": self.beat.every}

    def _reopen(self) -> None:
        assert self.file is not None
        descriptor = os.open(self.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise OSError(22, "not a regular file")
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._file, self._rest = descriptor, (found.st_dev, found.st_ino), b""

    def start(self, emit: Emit) -> None:
        self.emit = emit
        self.beat.start(emit)

    def tell(self, item: Event | Window) -> None:
        return

    async def stop(self) -> None:
        await self.beat.stop()
        self._split(b"\n")  # a last line without its end
        at, told = self.clock.now(), Counter[str]()
        for _ in self._take(at, told):
            pass
        if told:
            self._count(at, told)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    async def _read(self) -> None:
        """What was written since the reading before; after a rotation, the rest of the old file and all of the new one."""
        at, told = self.clock.now(), Counter[str]()
        await unhurried(self._take(at, told))  # what a reading that was broken off has left
        while data := os.read(self._descriptor, MOST):
            self._split(data)
            await unhurried(self._take(at, told))
        self._turn(at)
        await unhurried(self._take(at, told))
        for name, n in told.items():
            if n > TOLD:
                self._tell(at, {"rule": name, "more": n - TOLD, "why": f"only {TOLD} of one rule are told per reading"})
        self._count(at, told)

    def _count(self, at: float, told: "Counter[str]") -> None:
        """What is told of a rule begins with 0, at the reading before its first match."""
        again = int(at) > int(self._read_at)
        for name, n in self.counts.items():
            if n == told[name]:
                self.emit(Sample(t=self._read_at, name=f"log_{name}_total", value=0, source=self.source))
            if again or told[name]:
                self.emit(Sample(t=at, name=f"log_{name}_total", value=n, source=self.source))
        self._read_at = at

    def _turn(self, at: float) -> None:
        """Follow the name to another file, or back to the start of one that was cut off."""
        assert self.file is not None
        try:
            named = os.stat(self.file)
        except FileNotFoundError:
            return  # between two files of a rotation
        here = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        if (named.st_dev, named.st_ino) != self._file:
            self._split(os.read(self._descriptor, MOST) + b"\n")  # its last line may have no end
            self._reopen()
        elif named.st_size < here:
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            self._rest = b""
        else:
            return
        self._tell(at, {"rule": "rotated", "level": "note"})
        self._split(os.read(self._descriptor, MOST))

    def _split(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[:LONGEST]  # nobody looks at more of a line
        self._lines += lines

    def _take(self, at: float, told: "Counter[str]") -> Iterator[None]:
        """Look at what was read, line by line."""
        while self._lines:
            yield
            raw = self._lines.popleft()
            self.lines += 1
            line = raw[:LONGEST].decode(errors="replace").rstrip()
            match = first(self.rules, line)
            if match is None:
                continue
            name = match.rule.name
            self.counts[name] += 1
            told[name] += 1
            if told[name] <= TOLD:
                text = {"rule": name, "level": match.rule.level, "line": self._blotted(line), "number": self.lines}
                values = {key: self._blotted(one) if isinstance(one, str) else one for key, one in match.values.items()}
                self._tell(at, {**text, "values": values} if values else text)

    def _tell(self, at: float, data: dict[str, Any]) -> None:
        self.emit(Event(t=at, kind="server_log", data=data))

    def _blotted(self, line: str) -> str:
        """Servers print their arguments, and with them keys; the one that we ask them with too."""
        for secret in self._secrets:
            line = line.replace(secret, "[...]")
        return SECRET.sub(r"\1[...]", line[: 2 * SHOWN])[:SHOWN]
