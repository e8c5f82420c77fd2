"""The least a streaming client can do: closed loop, one JSON decode and one stamp per event, nothing kept but the stamps.

usage: python tests/bench/bare_client.py REQUESTS USERS TOKENS PORT     prints requests/s
What a whole kvbench run is held against: no schedule, gate, windows or journal here.
"""

import asyncio
import gc
import json
import sys
import time
from typing import Any

import httptools
import msgspec
import uvloop

REQUESTS, USERS, TOKENS, PORT = (int(each) for each in sys.argv[1:5])


class Delta(msgspec.Struct):
    content: str | None = None


class Choice(msgspec.Struct):
    delta: Delta | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    choices: list[Choice] | None = None
    usage: dict[str, Any] | None = None


decode = msgspec.json.Decoder(Chunk).decode


def body(number: int) -> bytes:
    """A request built for this send, as every client must."""
    content = [{"role": "user", "content": f"{number} hello world, please tell me a story about it"}]
    options = {"model": "m", "messages": content, "max_tokens": TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps(options).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(data) + data


class User(asyncio.Protocol):
    """One connection that asks again as soon as its answer has ended."""

    kept: list[tuple[float, list[float], dict[str, Any] | None]] = []
    asked = 0

    def __init__(self, over: asyncio.Future[None]) -> None:
        self.over = over

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def ask(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.rest, self.stamps, self.usage = b"", [], None
        self.sent = time.perf_counter()
        self.transport.write(body(User.asked))

    def data_received(self, data: bytes) -> None:
        self.now = time.perf_counter()
        self.parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        events = (self.rest + data if self.rest else data).split(b"\n\n")
        self.rest = events.pop()
        for event in events:
            if event.startswith(b"data: {"):
                chunk = decode(event[6:])
                if chunk.choices and chunk.choices[0].delta and chunk.choices[0].delta.content:
                    self.stamps.append(self.now)
                elif chunk.usage:
                    self.usage = chunk.usage

    def on_message_complete(self) -> None:
        User.kept.append((self.sent, self.stamps, self.usage))
        if User.asked < REQUESTS:
            User.asked += 1
            asyncio.get_running_loop().call_soon(self.ask)
        elif len(User.kept) == REQUESTS:
            self.over.set_result(None)


async def main() -> None:
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    users = [(await loop.create_connection(lambda: User(over), "127.0.0.1", PORT))[1] for _ in range(USERS)]
    gc.freeze()
    began = time.perf_counter()
    for user in users:
        User.asked += 1
        user.ask()
    await over
    assert sum(len(stamps) for _, stamps, _ in User.kept) == REQUESTS * TOKENS
    print(f"{REQUESTS / (time.perf_counter() - began):.0f}")


uvloop.run(main())
