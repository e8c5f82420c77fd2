"""The virtual loop jumps exactly; the real timer never fires early."""

import asyncio

import pytest
import uvloop

from kvbench.clock import Clock, VirtualLoop


def test_virtual_time_jumps_to_the_next_timer_exactly() -> None:
    async def work() -> list[float]:
        clock = Clock(asyncio.get_running_loop())
        seen = []
        for k in range(1, 2001):
            await clock.sleep_until(k * 0.1)
            seen.append(clock.now())
        return seen

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        seen = runner.run(work())
    assert seen == [round(k * 0.1 * 1e9) / 1e9 for k in range(1, 2001)]


def test_virtual_clock_restarts_at_zero() -> None:
    async def work() -> tuple[float, float]:
        clock = Clock(asyncio.get_running_loop())
        await clock.sleep_until(2.5)
        clock.start()
        at_zero = clock.now()
        await clock.sleep_until(1.25)
        return at_zero, clock.now()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(work()) == (0.0, 1.25)


def test_a_deadlock_in_virtual_time_is_an_error() -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner, pytest.raises(RuntimeError, match="nothing is scheduled"):
        runner.run(work())


def test_threads_are_refused_in_virtual_time() -> None:
    async def work() -> None:
        await asyncio.get_running_loop().run_in_executor(None, int)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner, pytest.raises(RuntimeError, match="threads"):
        runner.run(work())


@pytest.mark.parametrize("factory", [uvloop.new_event_loop, asyncio.new_event_loop, VirtualLoop])
def test_a_timer_never_fires_early_and_can_be_re_armed(factory: type) -> None:
    async def work() -> list[float]:
        clock = Clock(asyncio.get_running_loop())
        fired: list[float] = []
        timer = clock.timer(lambda: fired.append(clock.now()))
        timer.at(0.5)
        timer.at(0.010)  # replaces the first setting
        await clock.sleep_until(0.030)
        timer.at(0.040)
        timer.cancel()
        await clock.sleep_until(0.050)
        timer.close()
        return fired

    with asyncio.Runner(loop_factory=factory) as runner:
        fired = runner.run(work())
    assert len(fired) == 1
    assert 0.010 <= fired[0] < 0.030
