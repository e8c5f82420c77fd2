"""Work that may never return (a call into a driver, the opening of a file), in a thread that does not outlive the process."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def aside(work: Callable[[], T]) -> T:
    """What `work` returns or raises. Where nobody waits any more the thread goes on alone, and ends with the process:
    asyncio.to_thread would keep the process from ending until it is through."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # None only where T is

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            pass  # the loop is closed, and nobody waits

    threading.Thread(target=run, name="kvbench-aside", daemon=True).start()
    return await done
