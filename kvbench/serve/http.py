"""HTTP/1.1 as a server speaks it: whole requests in, whole or streamed responses out. No coroutine per request.

A client that does not read what it asked for is cut off once UNREAD bytes wait for it, and one whose request is not whole
PATIENCE after it began (or the connection did). A request that follows another on the same connection before its answer is over
waits in the socket.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import unquote_to_bytes

import httptools

from kvbench.core import Seconds

BODY = 64 << 20  # bytes of a request's body
HEAD = 64 << 10  # bytes of its target and headers
PATIENCE: Seconds = 60.0  # for a request's last byte
UNREAD = 8 << 20  # bytes written that a client has not taken
REASONS = {
    200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 413: "Content Too Large",
    500: "Internal Server Error", 503: "Service Unavailable",
}  # fmt: skip
JSON = "application/json"


@dataclass(slots=True)
class Asked:
    """One request, whole."""

    method: str = ""
    path: str = ""  # without the query
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""
    keep: bool = True  # the client may ask again on this connection


def _path(target: bytes) -> str:
    """Of a request's target, which may be a whole URL (as to a proxy), with what is %-encoded decoded."""
    try:
        path = httptools.parse_url(target).path
    except httptools.HttpParserError:
        path = target
    return unquote_to_bytes(path or b"/").decode("latin-1")


class Connection(asyncio.Protocol):
    """One client. `serve(asked, connection)` is called with each request and sees that respond(), or begin() and in time
    end(), is. `answered(asked, status)` is called when an answer to it begins.

    gone: called once, where the client leaves before its answer is over.
    """

    def __init__(
        self,
        serve: Callable[[Asked, "Connection"], None],
        alive: set["Connection"],
        answered: Callable[[Asked, int], None] = lambda asked, status: None,
    ) -> None:
        self._serve, self._alive, self._answered = serve, alive, answered
        self.gone: Callable[[], None] | None = None
        self._asked = Asked()
        self._target: list[bytes] = []
        self._body: list[bytes] = []
        self._size = self._head = 0  # bytes of the present request's body and head
        self._waiting: deque[Asked] = deque()  # whole requests that nobody has seen
        self._busy = self._lost = False
        self._keep = True
        self._now: Asked | None = None  # what is being answered
        self._parser = httptools.HttpRequestParser(self)
        self._begun = False  # a request is here in part
        self._late: asyncio.TimerHandle | None = None  # when that has to end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own transports do not inherit from asyncio's
        self._alive.add(self)
        self._expect()

    def _expect(self) -> None:
        self._whole()
        self._late = asyncio.get_running_loop().call_later(PATIENCE, self.transport.abort)

    def _whole(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._whole()
        self._alive.discard(self)
        gone, self.gone = self.gone, None
        if gone is not None:
            gone()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "no protocol but HTTP/1.1 is spoken here")
        except httptools.HttpParserError as error:
            self._refuse(413 if self._size > BODY else 400, str(error.__context__ or error))
        else:
            self._next()

    def on_message_begin(self) -> None:
        self._asked, self._target, self._body = Asked(), [], []
        self._size = self._head = 0
        self._begun = True
        self._expect()

    def on_url(self, url: bytes) -> None:
        self._target.append(url)
        self._limit(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._asked.headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        self._limit(len(name) + len(value))

    def _limit(self, more: int) -> None:
        self._head += more
        if self._head > HEAD:
            raise ValueError(f"the head is longer than {HEAD} bytes")  # reaches data_received as the parser's own error

    def on_headers_complete(self) -> None:
        if self._asked.headers.get("expect", "").lower() == "100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > BODY:
            raise ValueError(f"the body is longer than {BODY} bytes")
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._begun = False
        self._whole()
        asked = self._asked
        asked.method = self._parser.get_method().decode()
        asked.path = _path(b"".join(self._target))
        asked.body, asked.keep = b"".join(self._body), self._parser.should_keep_alive()
        self._waiting.append(asked)

    def _next(self) -> None:
        """Serve what is here, one at a time; more is left in the socket meanwhile."""
        while self._waiting and not self._busy and not self._lost:
            self._now = asked = self._waiting.popleft()
            self._busy, self._keep = True, asked.keep
            self._serve(asked, self)
        if self._waiting:
            self.transport.pause_reading()
            self._whole()  # what has begun behind it cannot end meanwhile

    def _refuse(self, status: int, why: str) -> None:
        """Answer what cannot be understood, and hang up."""
        if self._busy or self.transport.is_closing():  # in the middle of another answer nothing can be said
            self.transport.abort()
            return
        self._busy, self._keep = True, False
        self.respond(status, b'{"detail":"' + why.replace('"', "'").encode("ascii", "replace") + b'"}')

    def respond(self, status: int, body: bytes, kind: str = JSON, headers: Mapping[str, str] | None = None) -> None:
        """A whole response; to HEAD its head alone, or the client would take the rest for the next one."""
        if not self._lost:
            more = {"content-length": str(len(body)), "content-type": kind, **(headers or {})}
            bare = self._now is not None and self._now.method == "HEAD"
            self.transport.write(self._top(status, more) + (b"" if bare else body))
        self._over()

    def begin(self) -> None:
        """The head of a stream of events."""
        more = {"content-type": "text/event-stream; charset=utf-8", "transfer-encoding": "chunked"}
        self.transport.write(self._top(200, more))

    def send(self, events: bytes) -> None:
        """Part of a stream. A client that has left, or does not read, is told to `gone`, not here."""
        if self._lost:
            return
        self.transport.write(b"%x\r\n%b\r\n" % (len(events), events))
        if self.transport.get_write_buffer_size() > UNREAD:
            self.transport.abort()

    def end(self) -> None:
        """The stream is whole."""
        if not self._lost:
            self.transport.write(b"0\r\n\r\n")
        self._over()

    def _top(self, status: int, headers: Mapping[str, str]) -> bytes:
        if self._now is not None:
            self._answered(self._now, status)
        lines = [
            f"HTTP/1.1 {status} {REASONS[status]}",
            "server: kvbench",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        if not self._keep:
            lines.append("connection: close")
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"

    def _over(self) -> None:
        self.gone, self._now, self._busy = None, None, False
        if self._lost:
            return
        if not self._keep:
            self.transport.close()
        elif self._waiting:
            self.transport.resume_reading()
            if self._begun:
                self._expect()
            asyncio.get_running_loop().call_soon(self._next)
