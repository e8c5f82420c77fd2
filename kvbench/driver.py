"""When a request is due: pass the gate, send it, file its record. One timer for everything that falls due; one await per request.

A phase offers requests from one of two sources: an open-loop schedule (arrivals do not wait for answers) or closed users (each
waits for its answer, thinks, and asks again). Session turns follow their own previous turn in both.
"""

import asyncio
import itertools
import math
from collections.abc import Callable

from kvbench.clock import Clock
from kvbench.control.gate import Gate
from kvbench.core import LEFT, Limits, Nanos, OutcomeName, Record, Request, Seconds
from kvbench.crowd import Crowd
from kvbench.source import Source
from kvbench.target import Target

BATCH = 256  # ended records filed at once: one fold a second would stall the loop for 100 ms at 15,000 requests/s,
HELD: Nanos = 50_000_000  # and on a real clock after this long, so that no part of the work on a batch takes 1 ms at 1,000/s
STEP: Seconds = 1e-9  # the clock's own step: what is due within it is due
BREATH: Seconds = 1e-3  # from a user's question without an answer to the next: refusals that cost no time would stop the clock
SLICE: Seconds = 2e-3  # what fell due meanwhile is offered for at most this long at a time, so that sends go out in between


class Driver:
    """Drives one target. `file` receives batches of ended records; `live` holds those in flight; `through` is set while a phase
    has nothing more to offer and nothing of it waits or runs.

    Accounting, at every moment (see `check`): offered = admitted + stayed + waiting, and admitted = over + in flight, where
    stayed counts shed, dropped and withdrawn.
    """

    def __init__(self, clock: Clock, target: Target, gate: Gate, file: Callable[[list[Record]], None]) -> None:
        self.clock, self.target, self.gate, self.file = clock, target, gate, file
        self.live: dict[int, Record] = {}
        self.offered = self.admitted = self.stayed = self.over = 0
        self.shed = 0  # of those that stayed
        self.through = asyncio.Event()
        self.failure: asyncio.Future[None] = clock.loop.create_future()  # an exception of ours; the run watches it
        self._ended: list[Record] = []  # not yet filed
        self._held: float = math.inf if clock.virtual else HELD
        self._tasks: dict[asyncio.Task[None], None] = {}  # in order of launch: what is cancelled ends in one order every time
        self._timer = clock.timer(self._wake)
        self._crowd = Crowd()
        self._dropped = itertools.count(-1, -1)  # ids of what was never built: its class was not drawn
        self._source: Source | None = None
        self._phase, self._measured = "", True
        self._end: Seconds = 0.0
        self._left: float = 0  # how many more this phase may offer
        self._fill_at: Seconds = math.inf  # when there is content to build again

    def prepare(self, source: Source, requests: float, most: int) -> None:
        """Build content before the clock matters: what falls due in the first seconds, or up to `most` in a closed loop."""
        source.prepare(self.target.encode, min(most, requests))

    def begin(self, phase: str, source: Source, end: Seconds, requests: float = math.inf, *, measured: bool = True) -> None:
        """Offer from `source` until `end` or until `requests` were offered. Of what is due later only turns of sessions are
        kept, for a measured phase that follows a measured one: an epoch."""
        if not (measured and self._measured):
            self._crowd.clear()
        self._phase, self._source, self._end, self._left, self._measured = phase, source, end, requests, measured
        self.through.clear()
        self._crowd.muster(source.wanted, self.clock.now())
        self._wake()

    def relevel(self, level: float) -> None:
        """Offer `level` times what the source's shape says, from now on."""
        if self._source is not None:
            self._source.relevel(level, self.clock.now())
            self._crowd.muster(self._source.wanted, self.clock.now())
            self._wake()

    def relimit(self, limits: Limits) -> None:
        """The gate's limits from now on; what the present ones have allowed by now still goes."""
        self._wake()
        self.gate.relimit(limits, self.clock.now())
        self._wake()

    def end(self) -> None:
        """The phase is over. What fell due and could not be offered in time is dropped, what waits at the gate is withdrawn."""
        now = self.clock.now()
        source, self._source = self._source, None
        while source is not None and self._left > 0 and source.due <= now and source.due < self._end:
            assert source.schedule is not None
            self._drop(source.schedule.pop(), now)
        self._crowd.disperse()
        for request, record in self.gate.withdraw():
            self._stay(request, record, "withdrawn", now)
        self._timer.cancel()
        self._see_through()

    def unanswered(self) -> list[Record]:
        """What is in flight, and what waits at the gate (known by its due time alone)."""
        return [*self.live.values(), *(record for _, record in self.gate.waiting())]

    def cancel(self) -> None:
        """End everything in flight; each record says cancelled."""
        for task in self._tasks:
            task.cancel()

    async def settle(self) -> None:
        """Wait for what is in flight to write its end, then file what is left."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        for record in list(self.live.values()):  # cancelled before its task took a step, so the target never saw it
            record.outcome, record.end_ns = "cancelled", self.clock.ns()
            self._over(Request(id=record.id, tokens=0, max_tokens=0), record)
        self.flush()

    def flush(self) -> None:
        """File what has ended."""
        if self._ended:
            batch, self._ended = self._ended, []
            self.file(batch)

    def close(self) -> None:
        self._timer.close()

    def check(self) -> None:
        """The accounting identity (DESIGN section 3)."""
        assert self.offered == self.admitted + self.stayed + len(self.gate), "offered != admitted + stayed + waiting"
        assert self.admitted == self.over + len(self.live), "admitted != over + in flight"

    # ---- falling due

    def _wake(self) -> None:
        """An exception in a timer callback would only be logged, and the run would hang."""
        try:
            self._offer_due()
        except BaseException as error:
            self.fail(error)

    def _offer_due(self) -> None:
        source, now = self._source, self.clock.now() + STEP
        limit = min(now, math.nextafter(self._end, -math.inf))
        self._pump(limit)
        if source is None:
            return
        soon = math.inf if self.clock.virtual else now + SLICE
        while self._left > 0 and self.clock.now() < soon and (due := min(source.due, self._crowd.due)) <= limit:
            if source.due <= due:
                assert source.schedule is not None
                request = source.take(self.target.encode, source.schedule.pop())
            else:
                request = self._crowd.pop() or self._asked(source, due)
            if request is not None and (passed := self._offer(request, due)) is not None:
                self._launch(*passed)
        if self._left <= 0:
            self._crowd.clear()
        self._arm(source)
        if source.schedule is not None and not self.clock.virtual:
            self.clock.loop.call_soon(self._fill, source)  # after the sends that were just launched
        self._see_through()

    def _arm(self, source: Source) -> None:
        when = min(self.gate.wake(self.clock.now()), min(source.due, self._crowd.due) if self._left > 0 else math.inf)
        when = min(when if when < self._end else math.inf, self._fill_at)
        if math.isfinite(when):
            self._timer.at(when)
        else:
            self._timer.cancel()

    def _fill(self, source: Source) -> None:
        if source is self._source:
            try:
                self._fill_at = source.fill(self.target.encode, self.clock.now, self._end, self._left)
            except BaseException as error:
                self.fail(error)
            self._arm(source)

    def _pump(self, now: Seconds) -> None:
        released, shed = self.gate.pump(now)
        for (request, record), at in released:
            self._admit(record, at)
            self._launch(request, record)
        for (request, record), at in shed:
            self._stay(request, record, "shed", at)

    # ---- one request

    def _offer(self, request: Request, due: Seconds) -> tuple[Request, Record] | None:
        """To the gate. What passes at once is returned, to be sent."""
        record = self._record(request, due)
        if not self.gate.enter((request, record), due):
            return None
        self._admit(record, due)
        return request, record

    def _asked(self, source: Source, due: Seconds) -> Request | None:
        """A user's next question."""
        request = source.take(self.target.encode, due)
        if request is not None:
            request.user = True
        return request

    def _record(self, request: Request, due: Seconds) -> Record:
        self.offered += 1
        self._left -= 1
        if request.user:
            self._crowd.asking.add(request.id)
        request.due, request.phase, request.measured = due, self._phase, self._measured
        return Record(
            id=request.id, cls=request.cls, phase=self._phase, measured=self._measured, session=request.session,
            turn=request.turn, group=request.group, due_ns=self._stamp(due), asked_in=request.tokens,
            asked_out=request.max_tokens, sampling=request.sampling, token_ns=[],
        )  # fmt: skip

    def _stamp(self, at: Seconds) -> Nanos:
        return min(round(at * 1e9), self.clock.ns())  # what is due within STEP goes now, and nothing goes before it is due

    def _admit(self, record: Record, at: Seconds) -> None:
        record.release_ns = self._stamp(at)
        self.admitted += 1
        self.live[record.id] = record

    def _launch(self, request: Request, record: Record) -> None:
        task = self.clock.loop.create_task(self._serve(request, record))
        self._tasks[task] = None
        task.add_done_callback(self._served)

    async def _serve(self, request: Request, record: Record) -> None:
        """Send, and where a closed user asks again at once, go on in the same task: a task per request would cost a tenth."""
        following: tuple[Request, Record] | None = (request, record)
        while following is not None:
            request, record = following
            try:
                await self.target.send(request, record)
            except asyncio.CancelledError:
                self._over(request, record)
                raise
            following = self._over(request, record)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)

    def _over(self, request: Request, record: Record) -> tuple[Request, Record] | None:
        """The answer has ended: make room, let its user or session go on, file it. Returns what may go at once."""
        assert record.outcome in LEFT, f"request {record.id} ended without an outcome"
        del self.live[record.id]
        self.over += 1
        self.gate.leave((record.end_ns or 0) / 1e9)
        if record.retry_after and record.outcome == "rejected":
            self.gate.hold(record.retry_after, self.clock.now())
        self._crowd.asking.discard(request.id)
        following = self._next(request, record) if self._source is not None and record.outcome != "cancelled" else None
        record.text = None
        self._file(record)
        if len(self.gate):
            self._wake()
        self._see_through()
        return following

    def _next(self, request: Request, record: Record) -> tuple[Request, Record] | None:
        source, end = self._source, (record.end_ns or 0) / 1e9
        assert source is not None
        follow = source.content.follow(request, record) if request.session is not None else None
        if follow is not None:
            follow[1].body, follow[1].user = self.target.encode(follow[1]), request.user
            return self._ask(source, end + follow[0], follow[1])
        if source.users is not None and request.user and self._crowd.goes_on():
            soonest = 0.0 if record.outcome == "ok" else record.due_ns / 1e9 + BREATH
            return self._ask(source, max(end + source.users.pause(source.rng), soonest), None)
        return None

    def _ask(self, source: Source, due: Seconds, request: Request | None) -> tuple[Request, Record] | None:
        """Due now: pass the gate and return it, to go on in the caller's task. Due later, or not at all: None."""
        if self._left <= 0 or (due >= self._end and request is None):
            return None
        if due > self.clock.now() + STEP or due >= self._end:
            self._crowd.push(due, request)
            self._wake()
            return None
        request = request or self._asked(source, due)
        return self._offer(request, due) if request is not None else None

    def _drop(self, due: Seconds, now: Seconds) -> None:
        """The tool was too slow for it: offered by the schedule, never built."""
        record = self._record(Request(id=next(self._dropped), cls="", tokens=0, max_tokens=0), due)
        record.outcome, record.end_ns = "dropped", round(now * 1e9)
        record.release_ns = None if len(self.gate) else record.due_ns  # no limit held it: it was the tool's to send
        self.stayed += 1
        self._file(record)

    def _stay(self, request: Request, record: Record, outcome: OutcomeName, at: Seconds) -> None:
        """It never left: shed by a limit or withdrawn at the end of its phase. Its session ends; a closed user asks again."""
        record.outcome, record.end_ns = outcome, round(at * 1e9)
        self.stayed += 1
        self.shed += outcome == "shed"
        self._crowd.asking.discard(request.id)
        self._file(record)
        source = self._source
        if source is None:
            return
        if request.session is not None:
            source.content.follow(request, record)
        if source.users is not None and request.user and self._left > 0 and self._crowd.goes_on():
            again = max(at + source.users.pause(source.rng), record.due_ns / 1e9 + BREATH)
            self._crowd.push(again, None)

    def _file(self, record: Record) -> None:
        ended = self._ended
        ended.append(record)
        if len(ended) >= BATCH or (record.end_ns or 0) - (ended[0].end_ns or 0) > self._held:
            self.flush()

    def _see_through(self) -> None:
        source = self._source
        more = source is not None and self._left > 0 and (bool(self._crowd.later) or math.isfinite(source.due))
        if not (more or self.live or len(self.gate)):
            self.through.set()

    def fail(self, error: BaseException) -> None:
        """An error of ours, or of the disk: whoever watches `failure` ends the run."""
        if not self.failure.done():
            self.failure.set_exception(error)
