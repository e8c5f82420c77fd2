"""A server's own log, followed while the run goes on: memory running out, preemptions, restarts, pauses, each with its line."""

import asyncio
import os
import re
import stat
from collections import Counter
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvbench import profile
from kvbench.clock import Clock
from kvbench.collect import Collector, CollectorError, Emit, Place
from kvbench.collect.beat import Beat
from kvbench.collect.logrules import LogRule, first
from kvbench.core import Event, Sample, Window
from kvbench.units import Span

MOST: Final = 1 << 20  # bytes read at once; what is beyond waits for the next reading
LONGEST: Final = 4096  # characters of a line that are looked at
TOLD: Final = 20  # events of one rule that are told in one reading; the rest are counted
KEYED = r"(?i)((?:api[_-]?key|authorization|token|password|secret)\w*['\"]?\s*[:= ]\s*|bearer\s+)"
SECRET: Final = re.compile(KEYED + r"(?:bearer\s+)?['\"\[(]*[^\s'\",\])]{6,}")


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
        return ServerLogCollector(self, place.clock, file)


class ServerLogCollector:
    """Events of kind `server_log` (rule, level, line, values), and a counter `log_<rule>_total` per rule that matched."""

    source = "server_log"

    def __init__(self, spec: ServerLog, clock: Clock, file: Path | None) -> None:
        self.clock, self.required, self.file = clock, spec.required, file
        known = [LogRule.model_validate(rule) for name in spec.profiles for rule in profile.read("logs", name)["rules"]]
        self.rules = [*spec.rules, *known]
        self.beat = Beat(self.source, clock, spec.every, self._read)
        self.counts: Counter[str] = Counter()
        self.lines = 0
        self._descriptor, self._inode = -1, 0
        self._rest = b""

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
        self._descriptor, self._inode, self._rest = descriptor, found.st_ino, b""

    def start(self, emit: Emit) -> None:
        self.emit = emit
        self.beat.start(emit)

    def tell(self, item: Event | Window) -> None:
        return

    async def stop(self) -> None:
        await self.beat.stop()
        if self._rest:
            self._take(b"\n", self.clock.now(), Counter())  # a last line without its end
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    async def _read(self) -> None:
        """What was written since the reading before; after a rotation, the rest of the old file and all of the new one."""
        at, told = self.clock.now(), Counter[str]()
        while data := os.read(self._descriptor, MOST):
            self._take(data, at, told)
            await asyncio.sleep(0)
        self._turn(at, told)
        for name, n in told.items():
            if n > TOLD:
                self._tell(at, {"rule": name, "more": n - TOLD, "why": f"only {TOLD} of one rule are told per reading"})
            self.emit(Sample(t=at, name=f"log_{name}_total", value=self.counts[name], source=self.source))

    def _turn(self, at: float, told: "Counter[str]") -> None:
        """Follow the name to another file, or back to the start of one that was cut off."""
        assert self.file is not None
        try:
            named = os.stat(self.file)
        except FileNotFoundError:
            return  # between two files of a rotation
        here = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        if named.st_ino != self._inode:
            self._reopen()
        elif named.st_size < here:
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            self._rest = b""
        else:
            return
        self._tell(at, {"rule": "rotated", "level": "note"})
        self._take(os.read(self._descriptor, MOST), at, told)

    def _take(self, data: bytes, at: float, told: "Counter[str]") -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-MOST:]
        for raw in lines:
            self.lines += 1
            line = raw[:LONGEST].decode(errors="replace").rstrip()
            match = first(self.rules, line)
            if match is None:
                continue
            name = match.rule.name
            self.counts[name] += 1
            told[name] += 1
            if told[name] <= TOLD:
                text = {"rule": name, "level": match.rule.level, "line": _blotted(line)[:500], "number": self.lines}
                self._tell(at, {**text, "values": match.values} if match.values else text)

    def _tell(self, at: float, data: dict[str, Any]) -> None:
        self.emit(Event(t=at, kind="server_log", data=data))


def _blotted(line: str) -> str:
    """Servers print their arguments, and with them keys."""
    return SECRET.sub(r"\1[...]", line)
