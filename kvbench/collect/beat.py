"""A reading every so often, on an absolute grid, with its gaps and its own cost on record: what every polling collector needs."""

import asyncio
import math
from collections.abc import Awaitable, Callable

from kvbench.clock import Clock, cpu_time
from kvbench.collect import Emit
from kvbench.core import Event, Seconds

LATE = 3  # periods after which a missing reading is a gap
GONE = 10  # periods, and at least so many seconds, of silence up to the end after which a source is lost
SEVERAL = 2  # readings tried, of which not one came: lost as well


class Beat:
    """Awaits `read` at every multiple of `every`; a beat that is still reading skips the next, so it never runs twice at once.

    A reading fails by raising OSError or TimeoutError with a text for the user; others are internal errors, after which there are
    no more. `cost` is the CPU time of this process that passed inside `read`, an upper bound of what it took itself. `longest`:
    of its gaps, 0 where there is none.
    """

    def __init__(self, source: str, clock: Clock, every: Seconds, read: Callable[[], Awaitable[None]]) -> None:
        self.source, self.clock, self.every, self.read = source, clock, every, read
        self.readings = self.failures = self.gaps = 0
        self.cost: Seconds = 0.0
        self.longest: Seconds = 0.0
        self._last: Seconds = 0.0
        self._why = ""
        self._task: asyncio.Task[None] | None = None

    def start(self, emit: Emit) -> None:
        self._emit = emit
        self._last = self.clock.now()
        self._task = asyncio.ensure_future(self._run())

    @property
    def answering(self) -> bool:
        """The latest reading came."""
        return not self._why

    async def stop(self) -> None:
        """One last reading, and the accounts. Nothing where it was never started."""
        if self._task is None:
            return
        alive, self._task = self._task, None
        if alive.done():
            return  # lost, and said so
        alive.cancel()
        await asyncio.wait({alive})
        await self._once()
        if self._why:
            self._silent_to_the_end(self.clock.now())
        told = {"readings": self.readings, "failures": self.failures, "gaps": self.gaps, "longest_gap_s": self.longest}
        self._say("stopped", every_s=self.every, cost_s=self.cost, **told)

    async def _run(self) -> None:
        while True:
            try:
                await self._once()
            except Exception as error:
                self._say("lost", reason=f"internal error: {type(error).__name__}: {error}", readings=self.readings)
                return
            await self.clock.sleep_until((math.floor(self.clock.now() / self.every + 1e-6) + 1) * self.every)

    async def _once(self) -> None:
        before = cpu_time()
        try:
            await self.read()
        except (OSError, TimeoutError) as error:
            self.failures += 1
            if not self._why:
                self._why = str(error) or type(error).__name__
                self._say("failing", reason=self._why)
            return
        finally:
            self.cost += cpu_time() - before
        now = self.clock.now()
        if now - self._last > LATE * self.every:
            self._silent(now)
        elif self._why:
            self._say("back", after=self._why)
        self.readings += 1
        self._last, self._why = now, ""

    def _silent_to_the_end(self, now: Seconds) -> None:
        """Nothing came any more that would have told of it."""
        silence = now - self._last
        if silence > LATE * self.every:
            self._silent(now)
        if not self.readings and self.failures >= SEVERAL:
            self._say("lost", reason=f"none of {self.failures} readings came: {self._why}", readings=0)
        elif silence >= max(GONE * self.every, GONE):
            self._say("lost", reason=f"silent for the last {silence:.1f} s: {self._why}", readings=self.readings)

    def _silent(self, until: Seconds) -> None:
        self.gaps += 1
        self.longest = max(self.longest, until - self._last)
        self._say("gap", start=self._last, end=until, periods=(until - self._last) / self.every, reason=self._why)

    def _say(self, state: str, **data: object) -> None:
        self._emit(Event(t=self.clock.now(), kind="collector", data={"source": self.source, "state": state, **data}))
