"""The contract of every target: what `send` promises, whoever answers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import uvloop

from kvbench.clock import Clock
from kvbench.core import Record
from kvbench.target import Target
from kvbench.target.http import HttpTarget
from kvbench.target.null import NullTarget
from tests.stub.stub import DONE, FIN, C, Reply, Stub, U
from tests.target.wire import ask, render

Opened = Callable[[Clock], AbstractAsyncContextManager[Target]]


@asynccontextmanager
async def null(clock: Clock) -> AsyncIterator[Target]:
    target = NullTarget(clock)
    yield target
    await target.aclose()


@asynccontextmanager
async def http(clock: Clock) -> AsyncIterator[Target]:
    steps = [(float(i), C("x")) for i in range(16)] + [(16.0, FIN + U(8, 16) + DONE)]
    async with Stub(Reply(steps)) as stub:
        target = HttpTarget(clock, urls=[stub.url], render=render, model="m")
        yield target
        await target.aclose()


TARGETS: dict[str, Opened] = {"null": null, "http": http}


def with_target(name: str, play: Callable[[Target], object]) -> object:
    async def main() -> object:
        async with TARGETS[name](Clock(asyncio.get_running_loop())) as target:
            return await play(target)  # type: ignore[misc]  # play is a coroutine function

    return uvloop.run(main())


@pytest.mark.parametrize("name", TARGETS)
def test_a_record_is_complete_and_its_stamps_are_in_order(name: str) -> None:
    async def play(target: Target) -> Record:
        request, record = ask()
        request.body = target.encode(request)
        await target.send(request, record)
        return record

    record = with_target(name, play)
    assert isinstance(record, Record)
    assert (record.outcome, record.n_in, record.n_out) == ("ok", 8, 16)
    stamps = [record.sent_ns, record.written_ns, record.first_ns, *record.token_ns, record.done_ns, record.end_ns]
    assert None not in stamps
    assert stamps == sorted(stamps)  # type: ignore[type-var]  # none is None
    assert (record.first_ns, record.done_ns) == (record.token_ns[0], record.token_ns[-1])
    assert len(record.token_ns) == 16


@pytest.mark.parametrize("name", TARGETS)
def test_many_at_once_do_not_mix(name: str) -> None:
    async def play(target: Target) -> list[Record]:
        pairs = [ask(number) for number in range(200)]
        await asyncio.gather(*(target.send(*pair) for pair in pairs))
        return [record for _, record in pairs]

    records = with_target(name, play)
    assert isinstance(records, list)
    assert all(record.outcome == "ok" and len(record.token_ns) == 16 for record in records)


def test_cancelling_marks_the_record_and_closes_the_connection() -> None:
    async def main() -> tuple[Record, int, int]:
        async with Stub(Reply([(5, C("x"))], after="hang")) as stub:
            target = HttpTarget(Clock(asyncio.get_running_loop()), urls=[stub.url], render=render, model="m")
            request, record = ask()
            task = asyncio.ensure_future(target.send(request, record))
            while not record.token_ns:  # noqa: ASYNC110 - a record has no event to wait for
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            alive = sum(len(origin.alive) for origin in target._origins)
            await asyncio.sleep(0.01)
            left = len(asyncio.all_tasks()) - 1 - len(stub.tasks)
            await target.aclose()
            return record, alive, left

    record, alive, left = uvloop.run(main())
    assert (record.outcome, len(record.token_ns), record.n_out) == ("cancelled", 1, 1)
    assert record.end_ns is not None
    assert left == 0
    assert alive <= 1  # aborted: the loop closes the socket on its next turn


def test_cancelling_while_connecting_and_while_waiting_to_retry() -> None:
    async def main() -> list[Record]:
        records = []
        async with Stub(Reply(status=503, framing="length")) as stub:
            target = HttpTarget(
                Clock(asyncio.get_running_loop()), urls=[stub.url], render=render, model="m", retries=9, backoff=60
            )
            for turns in (1, 400):
                request, record = ask()
                task = asyncio.ensure_future(target.send(request, record))
                for _ in range(turns):
                    await asyncio.sleep(0.0005)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                records.append(record)
            await target.aclose()
        return records

    for record in uvloop.run(main()):
        assert record.outcome == "cancelled"
        assert record.end_ns is not None
