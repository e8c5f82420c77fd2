"""One HTTP/1.1 connection: writes a request, stamps what comes back before looking at it, and keeps four time limits.

One future per request, no task and no timer per token. Stamps are taken at the top of `data_received`, before any parsing.
"""

import asyncio
import os
from collections.abc import Callable
from typing import cast

import httptools
from pydantic import BaseModel, ConfigDict, Field

from kvbench.clock import Clock
from kvbench.core import Nanos, OutcomeName
from kvbench.target.answer import REJECTED, Answer
from kvbench.units import Span

NEVER = 1 << 62
HEAD = 1 << 18  # bytes in a row without a byte of the body: a head, or what is sent before and after it, that does not end
GRACE = 1_000_000_000  # ns that the end of the body may lag behind [DONE]
INF = float("inf")


class Timeouts(BaseModel):
    """How long to wait for what: an overloaded server may still answer, a run against a hung one ends all the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    connect: Span = Field(default=10.0, description="for a connection, name resolution and TLS included")
    first: Span = Field(default=600.0, description="from the first byte sent to the first token-bearing event (streams only)")
    idle: Span = Field(default=300.0, description="between two reads once the answer has begun; comments count as life")
    total: Span = Field(default=INF, description="for the whole request, connecting, retries and their waits included")


def limit_ns(seconds: float) -> Nanos:
    return NEVER if seconds == INF else round(seconds * 1e9)


class Connection(asyncio.Protocol):
    """Idle (`answer` is None; it then sits in `idle`, unless lost) or busy with one request. In `alive` as long as it is open.

    since: when the present request was written.
    """

    def __init__(self, clock: Clock, timeouts: Timeouts, idle: list["Connection"], alive: set["Connection"]) -> None:
        self.clock, self.timeouts, self._idle_pool, self._alive = clock, timeouts, idle, alive
        self.lost = False
        self.heard: Nanos = 0  # the last read of the present answer; 0: none yet
        self._bare = 0  # bytes since the last one of the body
        self.answer: Answer | None = None
        self._fd = -1
        self._body: list[bytes] = []
        self.on_body: Callable[[bytes], None] = self._body.append  # called by httptools: C to C, no Python frame
        self._headers: dict[bytes, bytes] = {}
        self.on_header: Callable[[bytes, bytes], None] = self._headers.__setitem__
        self._parser = httptools.HttpResponseParser(self)
        self._complete = self._keep = self._draining = False
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at: Nanos = NEVER
        self._first, self._idle = limit_ns(timeouts.first), limit_ns(timeouts.idle)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own transports do not inherit from asyncio's
        self._alive.add(self)
        self.transport.set_write_buffer_limits(high=0)  # so that resume_writing means: all of it has left
        if transport.get_extra_info("ssl_object") is None:
            self._fd = transport.get_extra_info("socket").fileno()

    def start(self, payload: bytes, answer: Answer, until: Nanos) -> asyncio.Future[None]:
        """Send `payload`; the future is done when `answer` has ended one way or another. `until`: the total limit's instant."""
        self.answer, self._done = answer, self.clock.loop.create_future()
        done, record = self._done, answer.record
        self.since = now = self.clock.ns()
        self._until, self.heard, self._bare, self._complete = until, 0, 0, False
        self._headers.clear()
        if record.sent_ns is None:
            record.sent_ns = now
        left = 0
        if self._fd >= 0:  # uvloop writes at the end of its iteration; this write is now
            try:
                left = os.write(self._fd, payload)
            except BlockingIOError:
                left = 0
            except OSError as error:
                self._broken(error)
                return done
        if left < len(payload):
            self._draining = True
            self.transport.write(memoryview(payload)[left:] if left else payload)
        if not self._draining:
            record.written_ns = record.written_ns or self.clock.ns()
        elif not self.transport.get_write_buffer_size():
            self.resume_writing()
        self._arm(min(now + self._first, until))
        return done

    def resume_writing(self) -> None:
        self._draining = False
        if self.answer is not None and self.answer.record.written_ns is None:
            self.answer.record.written_ns = self.clock.ns()

    def data_received(self, data: bytes) -> None:
        now = self.clock.ns()
        answer = self.answer
        if answer is None:  # nothing was asked
            self.close()
            return
        if not self.heard:
            self._arm(now + self._idle)
        self.heard = now
        body = self._body
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._keep = False
            if not self._complete:
                answer.stop(now, "failed", "protocol", f"not HTTP/1.1: {error}")
                self._finish()
                return
        if body:
            answer.feed(body[0] if len(body) == 1 else b"".join(body), now)
            body.clear()
            self._bare = 0
        else:
            self._bare += len(data)
        if self._complete:
            answer.end(now)
            self._finish()
        elif self._bare > HEAD:
            self.abandon("failed", "protocol", f"not HTTP/1.1: {self._bare} bytes of headers without an end")
        elif answer.finished:
            self._arm(now + GRACE)

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self.answer is not None:
            stream = self.header(b"content-type").lower().startswith(b"text/event-stream")
            self.answer.start(status, stream, self.header(b"retry-after") if status in REJECTED else b"")
            coding = self.header(b"content-encoding")
            if coding and coding.lower() != b"identity":
                self.answer.encoded(coding.decode("latin-1"))

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # 100 Continue and its kind announce; the answer follows
            self._headers.clear()
            return
        self._complete = True
        self._keep = bool(self._parser.should_keep_alive())  # says False once this callback has returned

    def header(self, name: bytes) -> bytes:
        """A response header by its lower-case name; b"" where it is absent."""
        value = self._headers.get(name)
        if value is None:
            value = next((v for k, v in self._headers.items() if k.lower() == name), b"")
        return value

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._alive.discard(self)
        if self.answer is not None:
            self._broken(exc)
        elif self in self._idle_pool:
            self._idle_pool.remove(self)
        if self._alarm is not None:
            self._alarm.cancel()

    def _broken(self, exc: Exception | None) -> None:
        """The connection went away under a request. For an answer that is delimited by the close, that is its end."""
        answer = self.answer
        assert answer is not None
        self._keep = False
        delimited = self.header(b"content-length") or self.header(b"transfer-encoding")
        if exc is None and answer.status and not delimited:
            answer.end(self.clock.ns())
        else:
            cause = "truncated" if self.heard else "disconnected"
            answer.stop(self.clock.ns(), "failed", cause, f"connection lost: {exc or 'closed by the server'}")
        self._finish()

    def abandon(self, outcome: OutcomeName, cause: str, why: str) -> None:
        """Stop waiting: the request gets `outcome`, the connection is closed since the rest of the answer is still to come."""
        if self.answer is not None:
            self._keep = False
            self.answer.stop(self.clock.ns(), outcome, cause, why)
            self._finish()

    def _finish(self) -> None:
        """The answer has ended: back to the pool where HTTP allows it, and wake the sender."""
        self.answer = None
        if self._keep and not self._draining and not self.lost:
            self._idle_pool.append(self)
        else:
            self.close()
        if not self._done.done():
            self._done.set_result(None)

    def close(self) -> None:
        self.lost = True
        if self._alarm is not None:
            self._alarm.cancel()
        self.transport.abort()

    def _limit(self) -> tuple[Nanos, str]:
        """The limit that runs out next, as (when, which)."""
        answer = self.answer
        assert answer is not None
        if answer.finished:
            return self.heard + GRACE, "grace"
        limits = [(self._until, "total")]
        if not answer.record.token_ns:
            limits.append((self.since + self._first, "first"))
        if self.heard:
            limits.append((self.heard + self._idle, "idle"))
        return min(limits)

    def _arm(self, when: Nanos) -> None:
        """Have the alarm ring at `when` or before. It outlives the request: under load it is set once per limit, not per send."""
        if when >= self._alarm_at or when >= NEVER:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = when
        self._alarm = self.clock.loop.call_later(max(0, when - self.clock.ns()) / 1e9, self._ring)

    def _ring(self) -> None:
        self._alarm, self._alarm_at = None, NEVER
        if self.answer is None:
            return
        when, which = self._limit()
        if when > self.clock.ns():
            self._arm(when)
        else:
            seconds = {"total": self.timeouts.total, "first": self.timeouts.first, "idle": self.timeouts.idle}.get(which)
            self.abandon("timeout", which, f"no {_WAITED[which]} within {seconds:g} s" if seconds else "")


_WAITED = {"total": "end of the answer", "first": "token", "idle": "byte", "grace": "end of the body"}
