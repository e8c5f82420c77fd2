"""A scriptable server on loopback that keeps its own log: what it saw and what it did, for tests to hold a client against.

Each request gets the `Reply` that the script returns for it. Steps are (milliseconds after the request was read, bytes); each is
one write. The notation of the cases: C("x") answer text, R("x") reasoning, ROLE, FIN, U(prompt, completion), DONE.
"""

import asyncio
import json
import ssl
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from socket import SO_LINGER, SOL_SOCKET
from typing import Any


def sse(event: Any) -> bytes:
    return b"data: " + (event if isinstance(event, bytes) else json.dumps(event, ensure_ascii=False).encode()) + b"\n\n"


def delta(fields: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}], **more}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def C(text: str, **more: Any) -> bytes:  # noqa: N802 - the notation of the cases
    return sse(delta({"content": text}, **more))


def R(text: str) -> bytes:  # noqa: N802 - the notation of the cases
    return sse(delta({"reasoning_content": text}))


def U(prompt: int, completion: int) -> bytes:  # noqa: N802 - the notation of the cases
    return sse({"choices": [], "usage": usage(prompt, completion)})


ROLE = sse(delta({"role": "assistant", "content": ""}))
FIN = sse(delta({}, "stop"))
DONE = b"data: [DONE]\n\n"
STREAM = (("Content-Type", "text/event-stream; charset=utf-8"),)
JSON = (("Content-Type", "application/json"),)


@dataclass(frozen=True)
class Reply:
    """steps: (ms, bytes). framing: chunked, length (Content-Length of all steps), close (delimited by the close), raw (steps are
    the bytes on the wire, head and all). after: keep, close, rst (at the last step), hang (silence, no end of the body)."""

    steps: Iterable[tuple[float, bytes]] = ()
    status: int = 200
    headers: tuple[tuple[str, str], ...] = STREAM
    framing: str = "chunked"
    after: str = "keep"


def stream(*events: bytes, at: float = 0) -> Reply:
    """All events in one write."""
    return Reply(steps=[(at, b"".join(events))])


def answer_json(body: Any, status: int = 200, headers: tuple[tuple[str, str], ...] = JSON) -> Reply:
    return Reply([(0, json.dumps(body).encode())], status, headers, "length")


@dataclass
class Seen:
    """One request as the stub saw it: the number-th of its method, from 0. Times are perf_counter nanoseconds."""

    number: int
    connection: int
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    received: int
    writes: list[int] = field(default_factory=list)

    def json(self) -> Any:
        return json.loads(self.body)


def _script(told: "Reply | Callable[[Seen], Reply]") -> Callable[[Seen], Reply]:
    return (lambda seen: told) if isinstance(told, Reply) else told


class Stub:
    """`async with Stub(script) as stub:` serves on 127.0.0.1 at `stub.url`. script: Seen -> Reply for each POST, or one Reply.

    gets: the same for each GET, by which a client asks what this server is; it has nothing to say of itself unless told.
    refuse(connection number): connections to reset on arrival. idle: seconds after which a quiet connection is closed.
    """

    def __init__(
        self,
        script: Reply | Callable[[Seen], Reply],
        *,
        gets: Reply | Callable[[Seen], Reply] = answer_json({}, 404),
        refuse: Callable[[int], bool] = lambda number: False,
        idle: float | None = None,
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.scripts = {"POST": _script(script), "GET": _script(gets)}
        self.refuse, self.idle, self.tls, self.host = refuse, idle, tls, host
        self.log: list[Seen] = []
        self.counts: Counter[str] = Counter()  # requests by method
        self.connections = self.in_flight = self.max_in_flight = 0
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def posts(self) -> list[Seen]:
        return [seen for seen in self.log if seen.method == "POST"]

    async def __aenter__(self) -> "Stub":
        loop = asyncio.get_running_loop()
        self.server = await loop.create_server(lambda: _Peer(self), self.host, 0, ssl=self.tls, backlog=4096)
        self.port = self.server.sockets[0].getsockname()[1]
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"{'https' if self.tls else 'http'}://{host}:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class _Peer(asyncio.Protocol):
    """One accepted connection: collects a request, plays its reply, then looks at what came meanwhile."""

    def __init__(self, stub: Stub) -> None:
        self.stub = stub
        self.buffer = bytearray()
        self.playing = False
        self.quiet: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.number = self.stub.connections
        self.stub.connections += 1
        if self.stub.refuse(self.number):
            self.reset()
        self.wait()

    def wait(self) -> None:
        if self.stub.idle is not None:
            self.quiet = asyncio.get_running_loop().call_later(self.stub.idle, self.transport.close)

    def reset(self) -> None:
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if not self.playing:
            self.next_request()

    def next_request(self) -> None:
        head, blank, rest = bytes(self.buffer).partition(b"\r\n\r\n")
        if not blank:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", 0))
        if len(rest) < length:
            return
        self.buffer = bytearray(rest[length:])
        method, path, _ = first.split(" ", 2)
        seen = Seen(self.stub.counts[method], self.number, method, path, headers, rest[:length], time.perf_counter_ns())
        self.stub.log.append(seen)
        self.stub.counts[method] += 1
        if self.quiet is not None:
            self.quiet.cancel()
        self.playing = True
        task = asyncio.get_running_loop().create_task(self.play(self.stub.scripts[method](seen), seen))
        self.stub.tasks.add(task)
        task.add_done_callback(self.stub.tasks.discard)

    async def play(self, reply: Reply, seen: Seen) -> None:
        self.stub.in_flight += 1
        self.stub.max_in_flight = max(self.stub.max_in_flight, self.stub.in_flight)
        try:
            steps = list(reply.steps)
            head = f"HTTP/1.1 {reply.status} X\r\n" + "".join(f"{name}: {value}\r\n" for name, value in reply.headers)
            if reply.framing == "chunked":
                head += "Transfer-Encoding: chunked\r\n"
            elif reply.framing == "length":
                head += f"Content-Length: {sum(len(data) for _, data in steps)}\r\n"
            pending = b"" if reply.framing == "raw" else head.encode() + b"\r\n"
            for at, data in steps:
                late = at / 1e3 - (time.perf_counter_ns() - seen.received) / 1e9
                if late > 0:
                    await asyncio.sleep(late)
                seen.writes.append(time.perf_counter_ns())
                self.transport.write(pending + (b"%x\r\n%b\r\n" % (len(data), data) if reply.framing == "chunked" else data))
                pending = b""
            if reply.after == "hang":
                await asyncio.sleep(3600)
            if reply.after == "rst":
                self.reset()
            self.transport.write(pending + (b"0\r\n\r\n" if reply.framing == "chunked" and reply.after == "keep" else b""))
            if reply.after == "close" or reply.framing == "close":
                self.transport.close()
        finally:
            self.stub.in_flight -= 1
            self.playing = False
        self.wait()
        if self.buffer:
            self.next_request()
