"""Capture windows of Nsight Systems in a run: opened in steady, by the clock or when something is wrong, closed before drain."""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from shutil import which
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from kvbench.collect import Collector, CollectorError, Emit, Place
from kvbench.collect.moments import Moments, Trigger, read_trigger
from kvbench.collect.profiler import Profiler, ProfilerError
from kvbench.collect.session import Session, call, last, launching, program
from kvbench.collect.startstop import StartStop, body
from kvbench.core import Event, Seconds, Window
from kvbench.units import Duration, Span, duration

MARGIN: Final[Seconds] = 2.0  # between the end of a window and that of its phase: closing writes a file
SLACK: Final[Seconds] = 0.1  # by which a window may begin late and still be what was asked for
STOPPING: Final[Seconds] = 9.0  # for a window that is open when the run ends
COUNTING: Final[Seconds] = 60.0
COUNT: Final = (  # in a process of its own, at the lowest priority: the load goes on
    "import json, sys; from pathlib import Path; from kvbench.nsys.account import ranges; "
    "print(json.dumps(ranges(Path(sys.argv[1]))))"  # [ranges, layers, [what nsys warned of]]
)
NO_RANGES: Final = (
    "no NVTX range is in it, so no layer can be told apart: start vLLM with --enable-layerwise-nvtx-tracing, SGLang with "
    "--enable-layerwise-nvtx-marker, both without CUDA graphs; Python's nvtx from 0.2.12 on records nothing under nsys up to "
    "2024.2"
)
HERE: Final = "the file lies where the server's own nsys writes it; its ranges are counted by `kvbench profile FILE`"
_TRIGGER = WithJsonSchema(
    {
        "description": "preemptions, anomaly, or a condition as a stop rule's: {ttft_p99: '> 800ms'}",
        "anyOf": [{"enum": ["preemptions", "anomaly"]}, {"type": "object"}],
    }
)


class Nsight(BaseModel):
    """Captures some seconds of the server with Nsight Systems under load. What these disturb is left out of the figures."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    through: Literal["launch", "session", "server"] | None = Field(
        None,
        description="launch: the server that target.launch starts runs under nsys; session: a session of yours; server: its own "
        "/start_profile. Left out: the session where one is named, else launch where there is one, else server",
    )
    session: str | None = Field(
        None, pattern=r"^[A-Za-z0-9._-]{1,64}$", description="name of a running session, of `nsys launch --session-new=NAME`"
    )
    phase: str = Field("steady", description="where windows open: steady, or one epoch of it by its name")
    at: Annotated[list[Duration], Field(min_length=1, max_length=100)] | None = Field(
        None, description="when windows open, from the phase's start"
    )
    after: Span | None = Field(None, description="the same for a single window; 10s where nothing else says when")
    trigger: Annotated[Trigger, BeforeValidator(read_trigger), _TRIGGER] | None = Field(
        None, description="what opens a window: preemptions (one a second), anomaly (of `watch`), or a condition as a stop rule's"
    )
    length: Span = Field(5.0, alias="for", le=60, description="how long a window stays open; files grow with it")
    apart: Duration = Field(30.0, description="triggered windows: at least so long from the end of one to the next")
    most: Annotated[int, Field(ge=1, le=20)] = Field(3, description="windows in a run, not counting a second try")
    trace: str = Field("cuda,nvtx", pattern=r"^[a-z0-9,-]+$", description="through launch: what nsys traces")
    nsys: str = Field("", description="the nsys to call; left out: the one on PATH, or where NVIDIA's packages put it")
    required: bool = Field(False, description="true: losing it makes the run invalid")

    @model_validator(mode="after")
    def _one_way(self) -> "Nsight":
        if sum(given is not None for given in (self.at, self.after, self.trigger)) > 1:
            raise ValueError("give one of `at`, `after` and `trigger`")
        if self.through == "session" and self.session is None:
            raise ValueError("through: session needs the name: `session: NAME`")
        if self.session is not None and self.through not in (None, "session"):
            raise ValueError(f"`session` belongs to through: session, not to {self.through}")
        return self

    @property
    def launches(self) -> bool:
        """The server that the run launches is to run under nsys."""
        return self.session is None and self.through in (None, "launch")

    async def prefix(self, session: str) -> list[str]:
        """What goes before its command then. Raises CollectorError."""
        return await launching(self.nsys, session, self.trace)

    def times(self) -> list[Seconds]:
        """When windows open, from the phase's start; none where a trigger opens them."""
        return sorted(self.at or ([] if self.trigger is not None else [self.after or 10.0]))

    def build(self, place: Place) -> Collector:
        launched = bool(place.session or place.unprofiled)
        if self.session is not None:
            return NsightCollector(self, place, Session(self.nsys, self.session))
        if self.launches and launched:
            return NsightCollector(self, place, Session(self.nsys, place.session))
        return NsightCollector(self, place, StartStop(place.urls, place.headers, body(place.facts)))


class NsightCollector:
    """Events of kind `profile`, one per window and step: state opened, closed, failed or skipped; the trigger with its numbers;
    file, bytes, ranges and reason of what came of it. start, end: what the capture disturbed, from the call that opened it to the
    return of the one that closed it; absent where nothing was captured."""

    source = "nsight"

    def __init__(self, spec: Nsight, place: Place, profiler: Profiler) -> None:
        self.spec, self.place, self.profiler = spec, place, profiler
        self.clock, self.required = place.clock, spec.required
        self.moments = Moments(spec.phase, spec.trigger)
        self.windows = self.files = 0
        self.lost = ""
        self._emit: Emit | None = None
        self._over = asyncio.Event()  # the phase is over: no window stays open
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.Task[None] | None = None
        self._rested: Seconds = 0.0
        self._disturbed: Seconds = 0.0  # until when a capture was
        self._due = spec.times()
        self._crowded = False  # a trigger met too little time, and that was told

    async def open(self) -> dict[str, Any]:
        if self.place.unprofiled and self.spec.launches:
            raise CollectorError(self.place.unprofiled)
        when = str(self.spec.trigger) if self.spec.trigger is not None else self.spec.times()
        return {**await self.profiler.open(), "when": when, "for": self.spec.length, "most": self.spec.most}

    def start(self, emit: Emit) -> None:
        self._emit = emit

    def tell(self, item: Event | Window) -> None:
        wanted = self.moments.tell(item)
        if self.moments.stay is None:
            self._over.set()
        elif isinstance(item, Event) and item.kind == "phase_start":
            self._over.clear()
            if self._timer is None:
                self._timer = asyncio.ensure_future(self._by_the_clock())
        if wanted is not None:
            self._wanted(wanted)

    async def stop(self) -> None:
        self.moments.stay = None
        self._over.set()
        if self._timer is not None:
            self._timer.cancel()
            for at in self._due:
                self._tell("skipped", reason="the run was over before it", trigger={"at": at})
        if self._task is not None and not self._task.done():
            await asyncio.wait({self._task}, timeout=STOPPING)
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=1.0)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.profiler.close(), 1.0)
        if self._emit is not None and not self.lost:
            self._say("stopped", windows=self.windows)
        self._emit = None

    async def _by_the_clock(self) -> None:
        while self._due:
            await self.clock.sleep_until((self.moments.zero or 0.0) + self._due[0])
            self._wanted({"at": self._due.pop(0)})

    # ---- one window

    def _wanted(self, why: dict[str, Any]) -> None:
        """Open a window, or say why not."""
        scheduled = "at" in why
        if self._emit is None or self.lost:
            return
        now, stay = self.clock.now(), self.moments.stay
        busy = self._task is not None and not self._task.done()
        if not scheduled and (busy or stay is None or now < self._rested or self.windows >= self.spec.most):
            return  # what triggers holds on for a while, and once is enough
        if not scheduled and why.get("start", now) < self._disturbed:
            return  # a capture slows the server: it would be the cause of the next
        refused = self._no_room(now)
        if busy:
            refused = "another window is open"
        elif self.windows >= self.spec.most:
            refused = f"as many windows as may be (most: {self.spec.most}) were opened"
        if refused:
            if scheduled or not self._crowded:
                self._tell("skipped", reason=refused, trigger=why)
            self._crowded = True
            return
        self.windows += 1
        self._task = asyncio.ensure_future(self._captured(why))

    def _no_room(self, now: Seconds) -> str:
        """Why a window does not fit into what is left of the phase; "" where it does."""
        stay = self.moments.stay
        if stay is None:
            return "the phase is over"
        needed, left = self.spec.length + MARGIN, stay.end - now
        return (
            f"{duration(max(0.0, left))} are left of the phase, and a window needs {duration(needed)}"
            if left < needed - SLACK
            else ""
        )

    async def _captured(self, why: dict[str, Any]) -> None:
        """A window, and where nothing came of it a second one."""
        try:
            if not await self._window(why) or self._no_room(self.clock.now()):
                return
            failed = await self._window({**why, "again": True})
            if failed and failed != NO_RANGES:
                self.lost = f"two captures in a row failed: {failed}"
                self._say("lost", reason=self.lost)
        finally:
            self._rested = self.clock.now() + self.spec.apart

    async def _window(self, why: dict[str, Any]) -> str:
        """Open, wait, close, look. "", or what was wrong."""
        self.files += 1
        stem = self.place.directory / f"capture-{self.files}"
        start, begun = self.clock.now(), False
        told: dict[str, Any] = {"trigger": why}
        try:
            await self.profiler.begin(stem)
            begun = True
            self._tell("opened", start=start, **told)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), self.spec.length)
            path = await self.profiler.end(stem)
        except (ProfilerError, OSError) as error:
            if begun or not isinstance(error, ProfilerError) or error.begun:
                await self.profiler.abandon()
                self._disturbed = self.clock.now()
                told |= {"start": start, "end": self._disturbed}
            self._tell("failed", reason=str(error), **told)
            return str(error)
        except asyncio.CancelledError:
            late = f"it was not closed within {STOPPING:g} s of the run's end"
            self._tell("failed", reason=late, start=start, end=self.clock.now(), **told)
            raise
        self._disturbed = self.clock.now()
        told |= {"start": start, "end": self._disturbed, "file": path.name if path is not None else None}
        ranges, reason = None, "the run ended before its ranges were counted"
        try:
            ranges, reason = await self._count(path)
        finally:
            size = None
            with suppress(OSError):
                size = path.stat().st_size if path is not None else None
            self._tell("closed", **told, bytes=size, ranges=ranges, reason=reason or None)
        return NO_RANGES if ranges == 0 else ""

    async def _count(self, path: Path | None) -> tuple[int | None, str]:
        """(NVTX ranges in the file, what there is to say about that)."""
        if path is None:
            return None, HERE
        nice = [found, "-n", "19"] if (found := which("nice")) else []
        command = [*nice, sys.executable, "-c", COUNT, str(path)]
        try:
            nsys = program(self.spec.nsys)
            folder = Path(which(nsys) or nsys).parent  # where a capture's reader finds the same one
            path_there = f"{folder}:{os.environ.get('PATH', '')}"
            with tempfile.TemporaryDirectory(prefix="kvbench-count-") as room:  # not left behind where it is killed
                code, said = await call(command, COUNTING, "counting ranges", {"PATH": path_there, "TMPDIR": room})
            count, _, notes = json.loads(said.strip().splitlines()[-1]) if code == 0 else (None, 0, [last(said)])
        except (ProfilerError, CollectorError, ValueError, IndexError, OSError) as error:
            return None, f"its ranges could not be counted: {error}"
        if count is None:
            return None, f"its ranges could not be counted: {notes[0]}"
        return count, "; ".join([*([] if count else [NO_RANGES]), *notes[:3]])

    def _tell(self, state: str, **data: Any) -> None:
        if self._emit is not None:
            self._emit(Event(t=self.clock.now(), kind="profile", data={"state": state, **data}))

    def _say(self, state: str, **data: Any) -> None:
        if self._emit is not None:
            told: Mapping[str, Any] = {"source": self.source, "state": state, "required": self.required, **data}
            self._emit(Event(t=self.clock.now(), kind="collector", data=dict(told)))
