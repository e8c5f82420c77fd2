"""Time for a run: a real clock paced by timerfd, or a virtual loop that jumps to the next timer instead of waiting.

Everything in a run reads time here. `time.*` appears nowhere else, except for the wall-clock anchor in the manifest.
"""

import asyncio
import ctypes
import os
import selectors
import time
from collections.abc import Callable
from typing import Any, Protocol

from kvbench.core import Nanos, Seconds


class Timer(Protocol):
    """One re-armable alarm. `at` replaces an earlier setting; the callback runs on the loop, never before its time."""

    def at(self, when: Seconds) -> None: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


def stopwatch() -> Nanos:
    """Real nanoseconds from some zero, whatever loop runs: for how long real I/O took."""
    return time.perf_counter_ns()


class Clock:
    """The run's clock: 0 when started. Real loops read perf_counter, a VirtualLoop its own time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.virtual = isinstance(loop, VirtualLoop)
        self._raw: Callable[[], Nanos] = loop.time_ns if isinstance(loop, VirtualLoop) else time.perf_counter_ns
        self.origin: Nanos = 0
        self.wall = 0.0  # seconds since 1970 at 0: the anchor that places a run among other logs
        self.start()

    def start(self) -> None:
        """Make this instant 0. Called once more when everything is built, just before the first phase."""
        self.origin += self.ns()
        self.wall = wall_time()

    def ns(self) -> Nanos:
        """Nanoseconds since the start of the run."""
        return self._raw() - self.origin

    def now(self) -> Seconds:
        return (self._raw() - self.origin) / 1e9

    def timer(self, callback: Callable[[], None]) -> Timer:
        if not self.virtual and _LIBC is not None:
            return _FdTimer(self, callback)
        return _LoopTimer(self, callback)

    async def sleep_until(self, when: Seconds) -> None:
        """Return at `when` or, where the machine is late, after it; at once when it is past."""
        if when <= self.now():
            await asyncio.sleep(0)
            return
        reached = asyncio.Event()
        timer = self.timer(reached.set)
        timer.at(when)
        try:
            await reached.wait()
        finally:
            timer.close()


def wall_time() -> float:
    """Seconds since 1970: the anchor that places a run among other logs. Not for measuring."""
    return time.time()


def cpu_time() -> Seconds:
    """CPU seconds this process has used."""
    return time.process_time()


def thread_time() -> Seconds:
    """CPU seconds this thread has used."""
    return time.thread_time()


class _LoopTimer:
    """loop.call_at, re-checked after waking: uvloop's clock moves in 1 ms steps and fires up to 0.4 ms early."""

    def __init__(self, clock: Clock, callback: Callable[[], None]) -> None:
        self.clock, self.callback = clock, callback
        self.when: Seconds = 0.0
        self.handle: asyncio.TimerHandle | None = None

    def at(self, when: Seconds) -> None:
        self.cancel()
        self.when = when
        loop = self.clock.loop
        if self.clock.virtual:
            self.handle = loop.call_at((self.clock.origin + round(when * 1e9)) / 1e9, self.fire)
        else:
            self.handle = loop.call_later(max(0.0, when - self.clock.now()), self.fire)

    def fire(self) -> None:
        self.handle = None
        left = self.when - self.clock.now()
        if left > 1e-9:
            self.handle = self.clock.loop.call_later(left, self.fire)
        else:
            self.callback()

    def cancel(self) -> None:
        if self.handle is not None:
            self.handle.cancel()
            self.handle = None

    def close(self) -> None:
        self.cancel()


class _FdTimer:
    """Linux timerfd on CLOCK_MONOTONIC (perf_counter's clock), absolute: half the lateness of call_at for less CPU."""

    def __init__(self, clock: Clock, callback: Callable[[], None]) -> None:
        assert _LIBC is not None
        self.clock, self.callback = clock, callback
        self.fd = _LIBC.timerfd_create(1, 0o4000 | 0o2000000)  # CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed: too many open files? (see kvbench doctor)")
        clock.loop.add_reader(self.fd, self.fire)

    def at(self, when: Seconds) -> None:
        self._set(max(1, self.clock.origin + round(when * 1e9)))

    def _set(self, when_ns: Nanos) -> None:
        spec = (ctypes.c_long * 4)(0, 0, when_ns // 10**9, when_ns % 10**9)
        _LIBC.timerfd_settime(self.fd, 1, spec, None)  # 1: absolute

    def fire(self) -> None:
        try:
            os.read(self.fd, 8)
        except BlockingIOError:
            return
        self.callback()

    def cancel(self) -> None:
        if self.fd >= 0:
            self._set(0)

    def close(self) -> None:
        if self.fd >= 0:
            self.clock.loop.remove_reader(self.fd)
            os.close(self.fd)
            self.fd = -1


def _libc() -> Any:
    """The C library where it has timerfd (Linux), else None."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return libc if hasattr(libc, "timerfd_create") else None
    except OSError:
        return None


_LIBC = _libc()


class _Jump(selectors.DefaultSelector):
    """A selector that never blocks: it polls, and where nothing is ready it moves the virtual clock by the timeout."""

    def __init__(self, loop: "VirtualLoop") -> None:
        super().__init__()
        self.virtual = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout != 0:
            self.virtual.jump(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in virtual time. An hour of timers passes as fast as their callbacks run.

    Raises RuntimeError when nothing is scheduled (a deadlock would otherwise hang for ever); threads are refused, since virtual
    time does not wait for them.
    """

    def __init__(self) -> None:
        self._virtual_ns: Nanos = 0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self._virtual_ns / 1e9

    def time_ns(self) -> Nanos:
        return self._virtual_ns

    def jump(self, timeout: float | None) -> None:
        heap: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]  # the heap that BaseEventLoop sleeps on
        if timeout is None or not heap:
            raise RuntimeError("virtual time: nothing is scheduled, so nothing can ever happen (a task waits for ever)")
        self._virtual_ns = max(self._virtual_ns, round(heap[0].when() * 1e9))

    def run_in_executor(self, *_: Any) -> Any:  # type: ignore[override]  # refuses whatever it is given
        raise RuntimeError("virtual time does not wait for threads")
