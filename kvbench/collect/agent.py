"""`kvbench agent` on another machine: its page while the run goes on, its fine readings on the run's clock, and its clock."""

import asyncio
import math
from typing import Annotated, Any
from urllib.parse import urlsplit

import aiohttp
from pydantic import BaseModel, ConfigDict, Field

from kvbench.clock import Clock, stopwatch, wall_time
from kvbench.collect import Collector, CollectorError, Emit, Place
from kvbench.collect.beat import LATE, Beat
from kvbench.collect.exposition import Page, Reader
from kvbench.collect.fleet import Fleet
from kvbench.collect.peer import Bearing, Line, Peer
from kvbench.collect.scrape import SLICE, Scrape, unhurried
from kvbench.core import Event, Nanos, Sample, Seconds, Window
from kvbench.units import Span

OFTEN: Seconds = 120.0  # between two fetches at most; half of what the agent keeps where that is less
REST: Seconds = 0.005  # after each slice of work on fine readings while the run goes on, so that it takes a twentieth of the loop
MARGIN: Seconds = 30.0  # readings may be told that much later than they were taken
AT_ONCE: Seconds = 60.0  # of fine readings in one answer
PATIENCE: Seconds = 6.0  # for the last fetch
PAGE: Seconds = 3.0  # for its page
TIMES = ("start", "end", "last")  # what an event of the agent calls instants
PREFIX = "kvbench_"


class Agent(BaseModel):
    """GPUs and host of another machine through `kvbench agent` there."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    url: Annotated[str, Field(pattern=r"^https?://[^/\s?#@]+/?$")] = Field(
        description="its address, such as http://gpu-host:9400"
    )
    every: Span = Field(1.0, ge=0.1, description="how often its page is read, for windows and stop rules")
    fine: bool = Field(True, description="false: only what its page says, not every reading it took")
    required: bool = Field(False, description="true: losing it makes the run invalid")

    def build(self, place: Place) -> Collector:
        return AgentCollector(self, place.clock)


class AgentCollector:
    """Samples `gpu_*` of all GPUs without labels, from its page; each GPU's (gpu, uuid) and the machine's (`host_*`, host) with
    labels: from its fine readings, or from its page where these are not wanted."""

    source = "agent"

    def __init__(self, spec: Agent, clock: Clock) -> None:
        self.spec, self.clock, self.required = spec, clock, spec.required
        self.beat = Beat(self.source, clock, spec.every, self._read)
        self.lines = self.samples = self.missed = self.restarts = 0
        self.cost: Seconds = 0.0  # of the loop's time, for fine readings
        self._session: aiohttp.ClientSession | None = None
        self._zero: Nanos = 0  # of the run, by the stopwatch; 0: not started
        self._fetch: asyncio.Task[None] | None = None
        self._why = ""  # the latest fetch failed
        self._stamp = 0.0  # of the latest reading on the page
        self._down: set[str] = set()
        self._gone_all = False  # every GPU is lost
        self._held: dict[int, float] = {}  # numbers of lines that were seen -> their t, as long as they may come again
        self._bottom = self._top = self._counted = 0  # the smallest and the largest number; how many lines there were

    async def open(self) -> dict[str, Any]:
        self._session = aiohttp.ClientSession()
        self.peer = Peer(self._session, self.spec.url)
        self._scrape = Scrape(self._session, f"{self.peer.url}/metrics", self.clock, PAGE, {})
        self._reader = Reader(None)
        self.fleet = Fleet([urlsplit(self.spec.url).netloc])
        try:
            self.told = await self.peer.health()
            if self.told["status"] != "ok":
                raise CollectorError(f"{self.peer.url}: {self.told['reason']}")
            self.bearing = self._first = await self.peer.bearing()
            await unhurried(self.fleet.take(0, (await self._scrape.read(self._reader)).page))
        except OSError as error:
            raise CollectorError(str(error)) from None
        ours = round(wall_time() * 1e9) - stopwatch()
        told = {key: value for key, value in self.told.items() if key not in ("status", "reason", "pid")}
        seen = {"offset_s": (self.bearing.offset - ours) / 1e9, "error_s": self.bearing.error / 1e9}
        return {"url": self.peer.url, "every": self.spec.every, "fine": self.spec.fine, "clock": seen, "agent": told}

    def start(self, emit: Emit) -> None:
        self.emit = emit
        self._zero = stopwatch() - self.clock.ns()
        self._fetched = (self._zero + self.bearing.offset) / 1e9  # by the agent's clock: all before is here
        for gpu in self.told["gpus"]:
            for group, why in gpu["unsupported"].items():
                self._say("unsupported", metric=f"{group} of GPU {gpu['gpu']}", reason=why, gpu=int(gpu["gpu"]), uuid=gpu["uuid"])
        self.beat.start(emit)

    def tell(self, item: Event | Window) -> None:
        return

    async def stop(self) -> None:
        """The last page, the last fine readings, the clock once more, and the account."""
        if self._session is None:
            return
        if self._zero:
            await self.beat.stop()
            if self._fetch is not None:
                self._fetch.cancel()
                await asyncio.gather(self._fetch, return_exceptions=True)
            await self._finish()
        session, self._session = self._session, None
        await session.close()

    async def _finish(self) -> None:
        before = self._first
        try:
            async with asyncio.timeout(PATIENCE):
                if self.spec.fine:
                    await self._take_fine(0.0)
                else:
                    await self._look(await self.peer.bearing())
        except (OSError, TimeoutError) as error:
            since, why = self._run(self._fetched * 1e9, self.bearing), str(error) or f"not fetched within {PATIENCE:g} s"
            what = "its clock was not read again"
            if self.spec.fine:
                which = f"its fine readings from {since:.1f} s on" if since >= 0.05 else "all its fine readings"
                what = f"{which} are missing"
            self._say("lost", reason=f"{what}: {why}")
        now, ours = self.bearing, round(self.clock.wall * 1e9) - self._zero
        told = {"offset_s": (now.offset - ours) / 1e9, "error_s": now.error / 1e9}
        if before.instance == now.instance:
            told |= {"drift_s": (now.offset - before.offset) / 1e9, "over_s": (now.at - before.at) / 1e9}
        self._say("clock", **told)
        if self.spec.fine:
            self._account()

    def _account(self) -> None:
        told = {"lines": self.lines, "samples": self.samples, "missed": self.missed + self._gone(), "restarts": self.restarts}
        self._say("fine", **told, cost_s=self.cost)

    # ---- its page

    async def _read(self) -> None:
        scraped = await self._scrape.read(self._reader)
        page = scraped.page
        instance = next((dict(row.labels).get("instance") for row in page.rows.get(f"{PREFIX}agent_info", ())), None)
        if instance != self.bearing.instance:
            await self._look(await self.peer.bearing())
        await unhurried(self.fleet.take(0, page))
        self._tell_page(page, scraped.at)
        due = min(OFTEN, self.told["keep_s"] / 2)
        ahead = (stopwatch() + self.bearing.offset) / 1e9 - self._fetched
        if self._fetch is not None and self._fetch.done():
            self._fetch = self._fetch.result()  # raises what was no failure of the agent's
        if self.spec.fine and ahead >= due and self._fetch is None:
            self._fetch = asyncio.ensure_future(self._fetch_quietly())

    def _tell_page(self, page: Page, at: Seconds) -> None:
        """OSError where the agent answers and its driver does not."""
        stamps = page.rows.get(f"{PREFIX}agent_reading_timestamp_seconds")
        if stamps and not math.isfinite(stamps[0].value):
            raise OSError(f"{self.peer.url}: it says that its GPUs were read at {stamps[0].value}")
        if stamps:
            stamp, at = stamps[0].value, max(0.0, self._run(stamps[0].value * 1e9, self.bearing))
            if self._lost_gpus(page):
                return
            if stamp == self._stamp:
                late = self.clock.now() - at
                if late > LATE * max(self.spec.every, self.told["every_s"]):
                    raise OSError(f"{self.peer.url}: its GPUs have not been read for {late:.1f} s")
                return
            self._stamp = stamp
        for reading in self.fleet.readings():
            if not reading.labels:
                self._sample(at, reading.name, reading.value, {})
        events, self.fleet.events = self.fleet.events, []
        for data in events:
            self._say(**data)
        if not self.spec.fine:
            self._tell_rows(page, at)

    def _tell_rows(self, page: Page, at: Seconds) -> None:
        for name, rows in page.rows.items():
            short = name.removeprefix(PREFIX)
            for row in rows if short.startswith(("gpu_", "host_")) and short != "gpu_up" else ():
                labels = dict(row.labels) if short.startswith("gpu_") else {"host": str(self.told.get("host"))}
                self._sample(at, short, row.value, labels)

    def _lost_gpus(self, page: Page) -> bool:
        """All of them are lost: there will be no more readings, and nobody waits for them."""
        rows = page.rows.get(f"{PREFIX}gpu_up", ())
        down = {row.labels for row in rows if not row.value}
        for labels in down:
            gpu = {"gpu": "", "uuid": "", **dict(labels)}
            if gpu["gpu"].isdecimal() and gpu["uuid"] not in self._down:
                self._down.add(gpu["uuid"])
                told = {"metric": "every metric", "reason": "the agent lost it", "gpu": int(gpu["gpu"]), "uuid": gpu["uuid"]}
                self._say("gpu_lost", **told)
                if not self.spec.fine:  # else its fine readings have it
                    self._sample(self.clock.now(), "gpu_alive", None, gpu)
        gone = bool(rows) and len(down) == len(rows)
        if gone and not self._gone_all:
            self._say("lost", reason="the agent lost every GPU", readings=self.beat.readings)
        self._gone_all = gone
        return gone

    # ---- its fine readings

    async def _fetch_quietly(self) -> None:
        """While the run goes on: what fails is tried again at the next page."""
        try:
            await self._take_fine(REST)
        except OSError as error:
            if not self._why:
                self._say("failing", reason=str(error), what="fine readings")
            self._why = str(error)
        else:
            self._why = ""

    async def _take_fine(self, rest: Seconds) -> None:
        """All that the agent has told until now."""
        before = self.bearing
        await self._look(await self.peer.bearing())
        now = self.bearing
        before = before if before.instance == now.instance else now
        until, margin = (now.at + now.offset) / 1e9, MARGIN
        while self._fetched < until:
            upto = min(until, self._fetched + AT_ONCE)
            await self._file(await self.peer.lines(now.instance, self._fetched - margin, upto), before, now, rest)
            self._fetched, margin = upto, 0.0
            self._held = {n: t for n, t in self._held.items() if t >= upto - MARGIN - 1}

    async def _file(self, lines: list[bytes], before: Bearing, now: Bearing, rest: Seconds) -> None:
        began = stopwatch()
        for raw in lines:
            line = self.peer.line(raw)
            if line.n not in self._held:
                self._held[line.n] = line.t
                self._top, self._counted = max(self._top, line.n), self._counted + 1
                self._bottom = line.n if self._counted == 1 else min(self._bottom, line.n)
                self._tell_line(line, self._run(line.t * 1e9, before, now))
            spent = stopwatch() - began
            if spent > SLICE:
                self.cost += spent / 1e9
                await asyncio.sleep(rest)
                began = stopwatch()
        self.cost += (stopwatch() - began) / 1e9

    def _tell_line(self, line: Line, at: Seconds) -> None:
        if at < 0:
            return  # before the run
        self.lines += 1
        if line.event is None:
            for name, value in line.values.items():
                self._sample(at, name, value, line.labels)
            self.samples += len(line.values)
            return
        data = {key: self._run(value * 1e9, self.bearing) if key in TIMES else value for key, value in line.event["data"].items()}
        told = ("gpu_lost", "stopped", "lost") if self._gone_all else ("gpu_lost", "stopped")
        if data.get("state") not in told:  # the page has told it; its own account is not ours
            self.emit(Event(t=at, kind=line.event["kind"], data=data))

    # ---- its clock

    def _run(self, theirs: float, before: Bearing, now: Bearing | None = None) -> Seconds:
        """The agent's ns since 1970 on the run's clock; between two bearings as if its clock had drifted evenly."""
        offset = float(before.offset)
        if now is not None and now.at > before.at:
            share = (theirs - before.at - before.offset) / (now.at - before.at + now.offset - before.offset)
            offset += (now.offset - before.offset) * min(1.0, max(0.0, share))
        return (theirs - offset - self._zero) / 1e9

    async def _look(self, now: Bearing) -> None:
        """Take a bearing; where it is another agent's, what the one before had not been asked for is gone."""
        if now.instance == self.bearing.instance:
            self.bearing = now
            return
        self.told = await self.peer.health()
        if now.instance == self.bearing.instance:
            return  # the page and a fetch found out at once
        lost_from = self._run(self._fetched * 1e9, self.bearing)
        self.missed, self.restarts = self.missed + self._gone(), self.restarts + 1
        self.bearing = self._first = now
        self._held, self._top, self._counted = {}, 0, 0
        self._fetched = float(self.told["started"])
        begins = self._run(self._fetched * 1e9, now)
        self._say("restarted", reason="the agent was restarted", offset_error_s=now.error / 1e9)
        if self.spec.fine:
            why = "the agent was restarted: what it had read since the last fetch is gone"
            self._say("gap", start=lost_from, end=begins, periods=(begins - lost_from) / self.spec.every, reason=why)

    def _gone(self) -> int:
        """Lines that had left the agent's memory before they were fetched."""
        return self._top - self._bottom + 1 - self._counted if self._counted else 0

    def _sample(self, at: Seconds, name: str, value: float | None, labels: dict[str, str]) -> None:
        self.emit(Sample(t=at, name=name, value=value, source=self.source, labels=labels))

    def _say(self, state: str, **data: Any) -> None:
        self.emit(Event(t=self.clock.now(), kind="collector", data={"source": self.source, "state": state, **data}))
