"""One run: the phases in order, a tick a second (fold, window, stop rules, live view), a clean end whatever happens."""

import asyncio
import gc
import math
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.clock import Clock
from kvbench.control.gate import Gate
from kvbench.core import Event, Nanos, Record, Sample, Seconds
from kvbench.crew import Crew
from kvbench.driver import Driver
from kvbench.journal import Journal
from kvbench.metrics.slots import Slots
from kvbench.metrics.window import window
from kvbench.phases import Phase
from kvbench.pilot import Controls, Pilot
from kvbench.pulse import Pulse
from kvbench.scribe import Scribe
from kvbench.signals import listening
from kvbench.sink import Store, View
from kvbench.target import Target

TICK: Seconds = 1.0
PAUSE: Seconds = 1e-3  # between two parts of the work on ended records
GRACE: Seconds = 5.0  # how long cancelled requests may take to write their ends


@dataclass(frozen=True)
class Setup:
    """Everything a run is made of, composed from a scenario."""

    target: Target
    phases: Sequence[Phase]
    controls: Controls = field(default_factory=Controls)
    sinks: Sequence[Store] = ()
    view: View | None = None
    crew: Crew | None = None  # collectors, opened
    length: Seconds = 10.0  # of a sliding window
    slide: Seconds = 1.0
    slos: dict[str, dict[str, Seconds]] = field(default_factory=dict)  # class -> per-request limits


class Run:
    """Drives `setup` on `clock` into `journal`. After `execute`: `reason` (why it ended), `interrupted` (the signal, or None)."""

    def __init__(self, setup: Setup, clock: Clock, journal: Journal) -> None:
        self.setup, self.clock, self.journal = setup, clock, journal
        self.slots = Slots(slos=setup.slos)
        self.gate = Gate(setup.controls.limits)
        self.driver = Driver(clock, setup.target, self.gate, self._file)
        self.scribe = Scribe(journal, self.slots, setup.sinks, setup.view, setup.crew)
        self.pilot = Pilot(setup.controls, self.slots, self.driver, self.scribe.tell)
        self.reason = ""
        self.interrupted: signal.Signals | None = None
        self._phase: Phase | None = None
        self._tokens = 0  # output tokens of ended requests in this phase
        self._holds = 0  # of the gate, that are on record
        self._filing: deque[Iterator[None]] = deque()  # batches of ended records still being folded and written
        self._halt = asyncio.Event()  # a stop rule, a bound on tokens or a signal ended the phase

    async def execute(self) -> None:
        """Run every phase. Errors of ours and of the disk are raised after what is in flight was ended and filed."""
        first = self.setup.phases[0]
        source = first.source(0.0) if first.source is not None else None
        if source is not None and not self.clock.virtual:
            most = 32768 if source.users is not None else 4096
            self.driver.prepare(source, first.requests, most)
            rehearse(self.setup)
            gc.collect()
            gc.freeze()
        listening(self.clock.loop, self._interrupt)
        self.clock.start()
        self.pulse = Pulse(self.clock)
        anchor = {} if self.clock.virtual else {"wall": self.clock.wall}  # virtual: the manifest's, so that events repeat
        self._event("run_start", **anchor, phases=[phase.plan() for phase in self.setup.phases])
        self._gauge(0.0)  # counters grow from here
        if self.setup.crew is not None:
            self.setup.crew.start(self.scribe.take)
        ticks = asyncio.ensure_future(self._tick())
        work = asyncio.ensure_future(self._run_phases(source))
        try:
            await asyncio.wait({ticks, work, self.driver.failure}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._finish(ticks, work)
        for done in (work, ticks, self.driver.failure):
            if done.done() and not done.cancelled() and (error := done.exception()) is not None:
                raise error

    # ---- phases

    async def _run_phases(self, first: Any) -> None:
        for phase in self.setup.phases:
            if self.interrupted or (self.reason and phase.kind != "drain"):
                continue
            start = 0.0 if first is not None else self.clock.now()
            source = first or (phase.source(start) if phase.source is not None else None)
            first = None
            await self._run_phase(phase, source, start)
        self.reason = self.reason or "completed"

    async def _run_phase(self, phase: Phase, source: Any, start: Seconds) -> None:
        """`start` is the zero of the phase's shape: what is due in [start, start + seconds) is the phase's, to the nanosecond."""
        end = start + phase.seconds
        before = self.driver.offered
        self._phase, self._tokens = phase, 0
        self._halt.clear()
        self._event("phase_start", phase=phase.name, phase_kind=phase.kind, start=start, bounds=phase.bounds())
        self.pilot.begin(phase, start)
        if source is not None:
            self.driver.begin(phase.name, source, end, phase.requests, measured=phase.kind == "steady")
            self.pilot.begun()
        reason = await self._phase_end(phase, source, end)
        waiting = len(self.gate)
        self.pilot.end()
        self.driver.end()
        self._phase = None
        ledger = {"offered": self.driver.offered - before, "withdrawn": waiting, "inflight": len(self.driver.live)}
        self._event("phase_end", phase=phase.name, phase_kind=phase.kind, reason=reason, start=start, **ledger)

    async def _phase_end(self, phase: Phase, source: Any, end: Seconds) -> str:
        """Wait for the first of: the phase's time, its count (offered and over), the end of its content, a halt."""
        idle = source is None and phase.kind != "drain"  # waits for its time, with nothing to be through with
        events = (self._halt,) if idle else (self._halt, self.driver.through)
        tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(event.wait()) for event in events]
        if math.isfinite(end):
            tasks.append(asyncio.ensure_future(self.clock.sleep_until(end)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        if self._halt.is_set():
            return "tokens" if self._tokens >= phase.tokens else self.reason or self.pilot.enough
        if self.driver.through.is_set() and not idle:
            if source is not None and source.used_up:
                return str(source.used_up)
            return "drained" if phase.kind == "drain" else "count" if math.isfinite(phase.requests) else "schedule ended"
        return "duration"

    # ---- once a second

    async def _tick(self) -> None:
        at, slid = TICK, 0.0
        while True:
            await self.clock.sleep_until(at)
            self.driver.flush()
            for _ in range(10 if self._filing else 0):
                await asyncio.sleep(PAUSE)  # several short stalls delay fewer sends than a long one
            self._account(at)
            await asyncio.sleep(0)
            live = self.driver.unanswered()
            if at - slid >= self.setup.slide - 1e-9:
                slid = at
                self.scribe.tell(window(self.slots, max(0.0, at - self.setup.length), at, live, at))
            self._steer(at, live)
            self.journal.flush()
            if self.setup.view is not None:
                self.setup.view.refresh(self.totals())
            at += TICK
            if at < self.clock.now() - 10 * TICK:  # the machine slept: the windows in between hold nothing
                at = math.floor(self.clock.now())

    def _account(self, at: Seconds) -> None:
        """Bring the slots up to `at`: ended records, new tokens of live ones, the target's gauges, our own state."""
        self.driver.flush()
        self._catch_up()
        self._gauge(at)
        self.slots.peek(list(self.driver.live.values()), round(at * 1e9))
        self.driver.check()
        for name, value in self.pulse.read(at).items():
            self.slots.gauge(name, at, value)
            self.scribe.tell(Sample(t=at, name=name, value=value, source="kvbench"))
        self.slots.close(at)

    def _gauge(self, at: Seconds) -> None:
        for name, value in self.setup.target.gauges(at).items():
            self.slots.gauge(name, at, value)
            self.scribe.tell(Sample(t=at, name=name, value=value, source="target"))
        for node, read in enumerate(self.setup.target.nodes(at)):
            for name, value in read.items():
                self.scribe.tell(Sample(t=at, name=name, value=value, source="node", labels={"node": str(node)}))
        self._hear()

    def _hear(self) -> None:
        """What happened at the target, and whether the gate was closed for it."""
        for event in self.setup.target.events():
            self.scribe.tell(event)
        accesses = self.setup.target.accesses()
        if accesses is not None:
            self.journal.accesses(accesses)
        if self.gate.holds > self._holds:
            self._holds = self.gate.holds
            until = self.gate.open_at
            self._event("gate_hold", seconds=until - self.clock.now(), until=until, holds=self.gate.holds)

    def _steer(self, at: Seconds, live: Sequence[Record]) -> None:
        if self.reason:
            return
        self.pilot.tick(at, live)
        if self.pilot.stopped:
            self._stop(self.pilot.stopped)
        elif self.pilot.enough:
            self._halt.set()

    def _file(self, records: list[Record]) -> None:
        self._filing.append(self._parts(records))
        if self.clock.virtual:
            self._catch_up()
        elif len(self._filing) == 1:
            self.clock.loop.call_later(PAUSE, self._file_on)
        phase = self._phase
        if phase is not None:
            self._tokens += sum(record.n_out or 0 for record in records)
            if self._tokens >= phase.tokens:
                self._halt.set()

    def _parts(self, records: list[Record]) -> Iterator[None]:
        """The work on a batch of ended records, in parts between which the loop may send and stamp."""
        yield from self.slots.folding(records)
        self.scribe.file(records)

    def _file_on(self) -> None:
        """One part of the oldest batch; the next after a pause, in which sends go out."""
        try:
            if self._filing and next(self._filing[0], self) is self:
                self._filing.popleft()
        except OSError as error:
            self.driver.fail(error)
            return
        if self._filing:
            self.clock.loop.call_later(PAUSE, self._file_on)

    def _catch_up(self) -> None:
        """All that is left of every batch."""
        while self._filing:
            for _ in self._filing[0]:
                pass
            self._filing.popleft()

    # ---- ending

    def _stop(self, reason: str) -> None:
        self.reason = reason
        self._halt.set()

    def _interrupt(self, number: signal.Signals) -> None:
        """End the run in order."""
        self.interrupted = number
        self._event("signal", signal=number.name)
        self._stop(f"interrupted by {number.name}")

    async def _finish(self, ticks: "asyncio.Future[None]", work: "asyncio.Future[None]") -> None:
        """Cancel what is in flight, file everything, close. Raises nothing that would hide the first error."""
        for task in (ticks, work):
            task.cancel()
        await asyncio.wait({ticks, work})
        inflight = len(self.driver.live)
        self.driver.cancel()
        try:
            await asyncio.wait_for(self.driver.settle(), GRACE)
            self._catch_up()
            if self.setup.crew is not None:
                await self.setup.crew.stop()
            now = self.clock.now()
            self.slots.close(now)
            self._hear()
            self._event("run_end", reason=self.reason or "internal error", inflight=inflight, **self._ledger())
        finally:
            if self.setup.crew is not None:
                await self.setup.crew.stop()
            self.driver.close()
            self.pulse.close()
            await self.setup.target.aclose()
            await self.scribe.aclose(self.clock.now())

    def _ledger(self) -> dict[str, Any]:
        """The accounts at the end, and what the rules and the slots could not use."""
        driver, slots = self.driver, self.slots
        unread = {str(guard.rule): [guard.unread, guard.checks, guard.why] for guard in self.pilot.guards if guard.unread}
        counts = {"offered": driver.offered, "admitted": driver.admitted, "stayed": driver.stayed}
        counts |= self.gate.told() | self.pilot.told()
        return counts | {"unread": unread, "late": slots.late, "early": slots.early, "out_of_range": slots.out_of_range}

    def totals(self) -> dict[str, int]:
        """Requests so far. Offered is the sum of the others: done is over by any outcome, held waits at the gate, shed gave up
        there, unsent (told where there are any) was dropped or withdrawn."""
        driver = self.driver
        unsent = driver.stayed - driver.shed
        return {"offered": driver.offered, "done": driver.over, "inflight": len(driver.live), "held": len(self.gate),
                "shed": driver.shed, **({"unsent": unsent} if unsent else {})}  # fmt: skip

    def _event(self, kind: str, **data: Any) -> None:
        self.scribe.tell(Event(t=self.clock.now(), kind=kind, data=data))


def rehearse(setup: Setup) -> None:
    """Run the fold once on made-up data: numpy's first calls import code, and that must not happen in the middle of a run."""
    slots = Slots(slos=setup.slos)
    second: Nanos = 10**9
    record = Record(id=0, outcome="ok", token_ns=[second, 2 * second], n_in=1, n_out=2, source="events")
    record.release_ns = record.sent_ns = record.written_ns = 0
    record.first_ns = record.content_ns = second
    record.done_ns = record.end_ns = 2 * second
    slots.peek([record], second)
    slots.fold([record] * 2)
    slots.close(4.0)
    window(slots, 0.0, 4.0, [], 4.0)
    for rule in setup.controls.rules:
        rule.arm().check(slots, 4.0, [])
