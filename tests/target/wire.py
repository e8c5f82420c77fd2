"""Ways to put bytes before the HTTP target: into an Answer at stated times, into a Connection without a socket, over loopback."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import uvloop

from kvbench.clock import Clock
from kvbench.core import Message, Record, Request
from kvbench.target.answer import Answer
from kvbench.target.connection import NEVER, Connection, Timeouts
from kvbench.target.http import HttpTarget
from tests.stub.stub import Reply, Seen, Stub

MS = 1_000_000


def render(request: Request) -> dict[str, Any]:
    return {"messages": [{"role": message.role, "content": message.text} for message in request.messages]}


def ask(number: int = 0, **fields: Any) -> tuple[Request, Record]:
    fields = {"tokens": 8, "max_tokens": 16, "messages": (Message(text="hello"),)} | fields
    return Request(id=number, **fields), Record(id=number)


def read(events: Iterable[tuple[float, bytes]], event_stream: bool = True) -> Record:
    """A 200 whose body arrives as (ms, bytes), sent at 0; the body's end comes with the last bytes. Keeps the text."""
    record = Record(id=0, sent_ns=0)
    answer = Answer(record, keep_text=True)
    answer.start(200, event_stream, b"")
    last = 0.0
    for last, data in events:
        answer.feed(data, round(last * MS))
    answer.end(round(last * MS))
    return record


class Loose:
    """A transport that leads nowhere."""

    aborted = False

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_extra_info(self, name: str) -> object:
        return self  # an "ssl_object": so writes go through the transport

    def write(self, data: bytes) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.aborted = True


def cut(pieces: Iterable[bytes], eof: bool = True) -> tuple[Record, Connection]:
    """The bytes of a whole HTTP response, read in `pieces`, then the end of the connection."""
    loop = asyncio.new_event_loop()
    try:
        connection = Connection(Clock(loop), Timeouts(), [], set())
        connection.connection_made(Loose())  # type: ignore[arg-type]  # as much of a transport as is used
        record = Record(id=0)
        connection.start(b"POST", Answer(record, keep_text=True), NEVER)
        for piece in pieces:
            if connection.answer is not None:
                connection.data_received(piece)
        if eof:
            connection.connection_lost(None)
        return record, connection
    finally:
        loop.close()


def over_loopback(
    script: Reply | Callable[[Seen], Reply],
    play: Callable[[HttpTarget, Stub], Awaitable[Any]],
    stub: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Run `play(target, stub)` on uvloop with a stub that follows `script` and a target that points at it."""

    async def main() -> Any:
        async with Stub(script, **(stub or {})) as server:
            options.setdefault("urls", [server.url])
            options["urls"] = [url.replace("PORT", str(server.port)) for url in options["urls"]]
            target = HttpTarget(Clock(asyncio.get_running_loop()), render=render, model="m", **options)
            try:
                return await asyncio.wait_for(play(target, server), 20)
            finally:
                await target.aclose()

    return uvloop.run(main())


def one(script: Reply | Callable[[Seen], Reply], **options: Any) -> Record:
    """The record of a single request."""

    async def play(target: HttpTarget, stub: Stub) -> Record:
        request, record = ask()
        await target.send(request, record)
        return record

    result: Record = over_loopback(script, play, **options)
    return result
