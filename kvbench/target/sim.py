"""The embedded engine as a target: in virtual time an hour of load takes seconds, in real time it paces like a server.

The engine has no clock; one timer, armed at engine.wake(), hands its spans to the records. Stamps are the engine's own times. A
future resolves when the loop has reached the end of its request, never before.
"""

import asyncio
import hashlib
import math
from dataclasses import dataclass
from typing import Any

from kvbench.clock import Clock
from kvbench.core import CacheAccess, Event, Message, Nanos, Record, Request, Seconds, Segment
from kvbench.engine import Done, Job, Machine, Span
from kvbench.engine.log import Log
from kvbench.engine.readings import LEVELS

REFUSALS = {
    "empty": "prompt and answer have at least one token each",
    "context_too_long": "prompt and answer are longer than the model's context",
    "kv_too_small": "prompt and answer need more KV blocks than the pool has",
    "refused": "refused by a fault of the scenario (target.faults)",
    "node_lost": "the node that worked on it was lost (a fault of the scenario)",
    "oom": "KV memory ran out and its blocks were taken, once more than max_preemptions allows (target.settings)",
    "full": "refused: max_waiting requests wait already (target.settings)",
}
BUSY = ("refused", "full")
"""What is answered as a server's 503."""

SILENCE: Nanos = 600 * 10**9  # how long a request waits on an engine that will never go on: a client's timeout of 600 s


@dataclass(slots=True)
class _Live:
    record: Record
    job: Job
    over: asyncio.Future[None]


class Sim:
    """Sends every request to one machine. Of the sampling only `n` and `beam_width` matter; answers have max_tokens tokens.

    An engine that hangs for good (a fault without an end) would keep virtual time going for ever where a phase waits for answers:
    there, and only there, a request times out after SILENCE.
    """

    def __init__(self, engine: Machine, clock: Clock, log: Log | None = None) -> None:
        self.engine, self.clock, self._log = engine, clock, log
        self._live: dict[int, _Live] = {}
        self._timer = clock.timer(self._wake)
        self._hung: Nanos | None = None  # since when the engine has work that it will never go on with

    async def open(self) -> dict[str, Any]:
        return self.engine.facts() | {"cache_log": self._log.share if self._log is not None else None}

    def encode(self, request: Request) -> bytes:
        return b""

    async def send(self, request: Request, record: Record) -> None:
        now = self._pump()
        record.sent_ns = record.written_ns = now
        record.connect_ns = 0
        job = asked(request)
        refused = self.engine.submit(job, now / 1e9)
        if refused in BUSY:
            record.status = 503
            record.outcome, record.cause, record.error, record.end_ns = "rejected", "http_503", REFUSALS[refused], now
            return
        if refused:
            record.outcome, record.cause, record.error, record.end_ns = "failed", refused, REFUSALS[refused], now
            return
        live = _Live(record, job, self.clock.loop.create_future())
        self._live[request.id] = live
        self._arm()
        try:
            await live.over
        except asyncio.CancelledError:
            self._cancel(live)
            raise

    def _cancel(self, live: _Live) -> None:
        now = self._pump()
        if self._live.pop(live.job.id, None) is None:
            return  # it had ended by now: the record says how
        self._count(live.record, self.engine.progress(live.job.id))
        live.record.outcome, live.record.end_ns = "cancelled", now
        self.engine.cancel(live.job.id, now / 1e9)
        self._arm()

    def _pump(self) -> Nanos:
        """Hand out what has happened by now, and set the timer for what happens next. Returns now."""
        now = self.clock.ns()
        for span in self.engine.advance(now / 1e9):
            self._deliver(span)
        self._arm()
        return now

    def _wake(self) -> None:
        now = self._pump()
        while self._live and math.isinf(self.engine.wake()) and self._patience() <= now:
            live = next(iter(self._live.values()))
            self._cancel(live)
            live.record.outcome, live.record.cause = "timeout", "first" if live.record.first_ns is None else "idle"
            if not live.over.done():
                live.over.set_result(None)

    def _arm(self) -> None:
        wake = self.engine.wake()
        if self._live and math.isinf(wake):
            wake = self._patience() / 1e9
        if math.isinf(wake):
            self._timer.cancel()
        else:
            self._timer.at(wake)

    def _patience(self) -> Nanos:
        """When the oldest request gives up: SILENCE after it was sent, or after the engine came to a stop."""
        self._hung = self.clock.ns() if self._hung is None else self._hung
        return SILENCE + max(self._hung, next(iter(self._live.values())).record.sent_ns or 0)

    def _deliver(self, span: Span) -> None:
        times, self._hung = span.times, None
        choices: dict[int, list[int]] = {}  # of jobs with several answers
        for job_id, choice in span.tokens:
            live = self._live[job_id]
            if live.job.n > 1:
                choices.setdefault(job_id, []).append(choice)
            else:
                _stamp(live.record, times)
        for job_id, got in choices.items():
            record = self._live[job_id].record
            _stamp(record, [time for time in times for _ in got])
            record.token_choice = (record.token_choice or []) + got * len(times)
        for done in span.done:
            self._end(done, times[-1])

    def _end(self, done: Done, at: Nanos) -> None:
        live = self._live.pop(done.id)
        record = live.record
        self._count(record, done)
        record.end_ns = at
        if done.failed:
            record.outcome, record.cause, record.error = "failed", done.failed, REFUSALS[done.failed]
        else:
            record.done_ns, record.outcome, record.finish = at, "ok", "length"
        if not live.over.done():
            live.over.set_result(None)

    def _count(self, record: Record, done: Done) -> None:
        record.n_in, record.n_out, record.source = done.n_in, done.n_out, "engine"
        record.cached, record.preempted = done.cached, done.preempted

    def gauges(self, now: Seconds) -> dict[str, float]:
        """The engine's gauges at the clock's time (`now` is at most that), counters with the suffix _total."""
        self._pump()
        return _named(self.engine.gauges())

    def nodes(self, now: Seconds) -> list[dict[str, float]]:
        return [_named(node) for node in self.engine.gauges_by_node()]

    def events(self) -> list[Event]:
        """The faults that began or ended since the last call, at their own times: {kind, edge, ...} of each."""
        self._pump()
        passed, self.engine.passed = self.engine.passed, []
        return [Event(t=edge.at / 1e9, kind="fault", data=edge.told()) for edge in passed]

    def accesses(self) -> list[CacheAccess] | None:
        if self._log is None:
            return None
        self._pump()
        return self._log.take()

    async def aclose(self) -> None:
        self._timer.close()
        self.engine.close()


def asked(request: Request) -> Job:
    """The request as an engine's job."""
    sampling = request.sampling
    return Job(
        request.id, _content(request), request.max_tokens, _choices(sampling), _salt(sampling), int(sampling.get("priority", 0)),
        request.cls,
    )  # fmt: skip


def _named(gauges: dict[str, float]) -> dict[str, float]:
    return {name if name.startswith(LEVELS) else f"{name}_total": value for name, value in gauges.items()}


def _stamp(record: Record, times: list[Nanos]) -> None:
    if record.first_ns is None:
        record.first_ns = record.content_ns = times[0]
    record.token_ns.extend(times)
    record.reads += len(times)


def _choices(sampling: dict[str, Any]) -> int:
    """How many answers are generated: beam search keeps beam_width of them alive."""
    return max(int(sampling.get("n", 1)), int(sampling.get("beam_width", 1)), 1)


def _salt(sampling: dict[str, Any]) -> int:
    """vLLM's cache_salt: requests of different salts share nothing. 0 without one."""
    salt = sampling.get("cache_salt")
    return 0 if salt is None else int.from_bytes(hashlib.blake2b(str(salt).encode(), digest_size=7).digest(), "big")


def _content(request: Request) -> tuple[Segment, ...]:
    """The prompt as segments. A user's own text is one segment keyed by the text, as long as the request says."""
    segments = tuple(request.segments())
    return segments or ((_text_key(request.messages), request.tokens),)


def _text_key(messages: tuple[Message, ...]) -> int:
    digest = hashlib.blake2b(digest_size=7)  # below 2**60, as every workload key
    for message in messages:
        digest.update(repr((message.role, message.text, message.raw)).encode())
    return int.from_bytes(digest.digest(), "big")
