"""An OpenAI-compatible server over HTTP/1.1: which connection carries a request, what is tried again, what is never tried again.

Connections are kept alive and reused, last used first; there is no limit on their number. Redirects are not followed.
"""

import asyncio
import email.utils
import itertools
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC
from typing import Any, Literal

from kvbench.clock import Clock, wall_time
from kvbench.core import CacheAccess, Event, Nanos, Record, Request, Seconds
from kvbench.target import TargetUnreachable
from kvbench.target.answer import Answer, blot
from kvbench.target.connection import NEVER, Connection, Timeouts, limit_ns
from kvbench.target.discover import discover, opened, tokenize
from kvbench.target.openai import PATHS, body
from kvbench.target.origin import ConnectError, Origin
from kvbench.target.reset import Proof, reset

STALE_WITHIN: Nanos = 1_000_000_000  # a kept-alive connection that closes later than this after a send was in use, not stale
LONGEST: Seconds = 86_400.0  # of a Retry-After that is believed
_SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?")
SECRET = 8  # a header value at least this long may be one, and is blotted out where a server repeats it
HEADERS = {"User-Agent": "kvbench", "Content-Type": "application/json", "Accept-Encoding": "identity"}


class HttpTarget:
    """Sends requests to `urls` in turn.

    render: a request's prompt as {"messages": [...]} or {"prompt": text or token ids}. key: the secret itself, sent as a bearer
    token and shown nowhere. chunk_usage: ask for usage in every chunk (vLLM's continuous_usage_stats). retries: how often a
    request that met 429, 503 or a failed connection is tried again, after the server's Retry-After or else `backoff` seconds,
    doubled each time; service latency then runs from the first attempt. keep_text: collect every answer's text, not only those
    that a session needs. counts: connections made, reconnects after a stale one, streams whose last event was unterminated.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        urls: Sequence[str],
        render: Callable[[Request], Mapping[str, Any]],
        model: str,
        api: Literal["chat", "completions"] = "chat",
        stream: bool = True,
        chunk_usage: bool = False,
        headers: Mapping[str, str] | None = None,
        key: str | None = None,
        ca_file: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        timeouts: Timeouts | None = None,
        retries: int = 0,
        backoff: Seconds = 0.5,
        keep_text: bool = False,
    ) -> None:
        if not urls:
            raise ValueError("urls: at least one is needed")
        if api not in PATHS:
            raise ValueError(f"api: {api!r} is not one of {', '.join(PATHS)}")
        if retries < 0:
            raise ValueError(f"retries: {retries} is out of range: at least 0")
        if backoff < 0:
            raise ValueError(f"backoff: {backoff} is out of range: at least 0 s")
        self.clock, self.render, self.model = clock, render, model
        self.timeouts = timeouts or Timeouts()
        self.retries, self.backoff, self.keep_text = retries, backoff, keep_text
        self.counts = {"connections": 0, "reconnects": 0, "unterminated": 0}
        self.headers = dict(headers or {}) | ({"Authorization": f"Bearer {key}"} if key else {})
        self._secrets = ([key] if key else []) + [value for value in (headers or {}).values() if len(value) >= SECRET]
        self._tls = _tls(ca_file) if any(url.startswith("https:") for url in urls) else None
        self._origins = [Origin(url, PATHS[api], HEADERS | self.headers, self._tls) for url in urls]
        self._turn = itertools.cycle(self._origins)
        self._chat = api == "chat"
        self._options: dict[str, Any] = {"stream": stream}
        if stream:
            self._options["stream_options"] = {"include_usage": True} | ({"continuous_usage_stats": True} if chunk_usage else {})
        self._limits = self.timeouts if stream else self.timeouts.model_copy(update={"first": float("inf")})
        self._total = limit_ns(self.timeouts.total)
        self._extra = dict(extra_body or {})
        self._proof: Proof | None = None  # of a cold cache, where one was asked for

    async def open(self) -> dict[str, Any]:
        """Facts of the servers behind the urls. Raises TargetUnreachable where one of them does not answer."""
        try:
            facts = await discover([origin.base for origin in self._origins], self.model, self.headers, self._tls)
        except TargetUnreachable as error:
            raise TargetUnreachable(blot(str(error), self._secrets)) from None
        return dict(_blotted(facts, self._secrets))

    async def tokenize_probe(self, text: str) -> list[int] | None:
        """The server's own tokens for `text` by vLLM's /tokenize; None where the first url has no such thing. On the chat API
        those of a message, so that the chat template is counted; of the bare text where the server cannot say that."""
        forms: list[dict[str, Any]] = [{"prompt": text}]
        if self._chat:
            forms.insert(0, {"messages": [{"role": "user", "content": text}]})
        for form in forms:
            tokens = await tokenize(self._origins[0].base, self.model, form, self.headers, self._tls)
            if tokens is not None:
                return tokens
        return None

    async def reset(self, asked: str, servers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Empty the servers' prefix caches (`asked`: how, see reset.RESETS, or auto), and watch over the first requests that they
        were empty. Facts for the manifest. Raises TargetUnreachable where a server refuses or does not answer."""
        try:
            async with opened(self.headers, self._tls) as session:
                rows = [await reset(session, server, asked) for server in servers]
        except TargetUnreachable as error:
            raise TargetUnreachable(blot(str(error), self._secrets)) from None
        self._proof = Proof(self.clock, rows, lambda: opened(self.headers, self._tls))
        unsure = [row for row in rows if not row["believed"]]
        lines = [f"{row['url']}: {row['endpoint']} {row['why']}; the first requests decide" for row in unsure]
        return dict(_blotted({"asked": asked, "servers": rows, "warnings": lines}, self._secrets))

    def nodes(self, now: Seconds) -> list[dict[str, float]]:
        return []

    def events(self) -> list[Event]:
        """What happened at the target since the last call: the proof of a reset."""
        return self._proof.events() if self._proof is not None else []

    def accesses(self) -> list[CacheAccess] | None:
        return None

    def encode(self, request: Request) -> bytes:
        return body(request, self.model, self.render(request), self._options, self._extra)

    def gauges(self, now: Seconds) -> dict[str, float]:
        return {}

    async def aclose(self) -> None:
        if self._proof is not None:
            await self._proof.aclose()
        for origin in self._origins:
            for connection in list(origin.alive):
                connection.abandon("cancelled", "closed", "the run is over")
                connection.close()
        await asyncio.sleep(0)  # the loop closes the sockets

    async def send(self, request: Request, record: Record) -> None:
        """sent_ns, written_ns and connect_ns are the first attempt's; status, error and every token are the last's."""
        entered = self.clock.ns()
        until = entered + self._total if self._total < NEVER else NEVER
        origin = next(self._turn)
        record.url = origin.base
        content = request.body or self.encode(request)
        payload = b"%b%d\r\n\r\n%b" % (origin.head, len(content), content)
        answer = Answer(record, self.keep_text or request.session is not None, self._secrets)
        try:
            await self._attempt(origin, payload, answer, entered, until)
            while record.outcome != "ok" and record.attempts <= self.retries and _may_retry(record):
                wait = record.retry_after if answer.retry_after else None
                if wait is None:
                    wait = self.backoff * 2 ** (record.attempts - 1)
                again = self.clock.ns() + round(wait * 1e9)
                if again >= until:
                    return
                record.throttled += record.outcome == "rejected"
                record.attempts += 1
                _forget(record)
                answer = Answer(record, answer.keeps_text, self._secrets)
                await self.clock.sleep_until(again / 1e9)
                await self._attempt(origin, payload, answer, entered, until)
        except asyncio.CancelledError:
            if not record.outcome:  # it was connecting, or waiting for another try
                answer.stop(self.clock.ns(), "cancelled", "")
            raise

    async def _attempt(self, origin: Origin, payload: bytes, answer: Answer, entered: Nanos, until: Nanos) -> None:
        """One try; and a second on a fresh connection where a kept-alive one proves to have been closed already."""
        record = answer.record
        if origin.idle:
            connection = origin.idle.pop()  # connect_ns stays 0
            await self._exchange(connection, payload, answer, until)
            if record.cause != "disconnected" or (record.end_ns or 0) - connection.since > STALE_WITHIN:
                return
            # Closed before a byte of an answer came: nobody took the request, so it starts again, and so do its stamps.
            self.counts["reconnects"] += 1
            record.stale = True
            _forget(record)
            if record.attempts == 1:
                record.sent_ns = record.written_ns = None
        self.counts["connections"] += 1
        patience = min(self.timeouts.connect, (until - self.clock.ns()) / 1e9 if until < NEVER else float("inf"))
        try:
            connection = await origin.connect(self.clock, self._limits, patience)
        except ConnectError as failure:
            now = self.clock.ns()
            answer.stop(now, failure.outcome, "total" if now >= until else failure.cause, failure.text)
            return
        if record.sent_ns is None:
            record.connect_ns = self.clock.ns() - entered
        await self._exchange(connection, payload, answer, until)

    async def _exchange(self, connection: Connection, payload: bytes, answer: Answer, until: Nanos) -> None:
        try:
            await connection.start(payload, answer, until)
        except asyncio.CancelledError:
            connection.abandon("cancelled", "", "")
            raise
        self.counts["unterminated"] += answer.unterminated
        if answer.retry_after:
            answer.record.retry_after = _retry_after(answer.retry_after)
        if self._proof is not None and answer.record.outcome == "ok":
            self._proof.count()


def _blotted(facts: Any, secrets: Sequence[str]) -> Any:
    """What a server says of itself, without the secrets it repeats there."""
    if isinstance(facts, dict):
        return {_blotted(name, secrets): _blotted(fact, secrets) for name, fact in facts.items()}
    if isinstance(facts, list):
        return [_blotted(fact, secrets) for fact in facts]
    return blot(facts, secrets) if isinstance(facts, str) else facts


def _tls(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError, for a file that holds no certificates, is one
        raise ValueError(f"ca_file: {ca_file!r} cannot be used: {error}") from None


def _may_retry(record: Record) -> bool:
    """Refused for now, or never taken: 429, 503, no connection, or one that was lost before a byte of an answer."""
    return record.outcome == "rejected" or record.cause == "disconnected" or record.cause.startswith("connect")


def _forget(record: Record) -> None:
    """What an attempt that brought no token has left in the record, before the next one."""
    record.outcome, record.cause, record.error = "", "", ""
    record.status = record.end_ns = record.done_ns = None


def _retry_after(value: bytes) -> Seconds | None:
    """A Retry-After header, in seconds from now: a number or an HTTP date. None where there is none or it makes no sense."""
    text = value.decode("latin-1").strip()
    try:
        seconds = float(text) if _SECONDS.fullmatch(text) else _moment(text) - wall_time()
    except (ValueError, OverflowError):
        return None
    return max(0.0, seconds) if seconds <= LONGEST else None


def _moment(text: str) -> float:
    """An HTTP date as seconds since 1970. Such dates are of GMT, also where they do not say so."""
    date = email.utils.parsedate_to_datetime(text)
    return (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()
