"""A server's KV events over ZMQ (vLLM's stream), folded with what we asked it into cache.jsonl: a real server's cache metrics.

The publisher numbers its messages. What is missing in between is asked of its replay endpoint, and counted where that has it no
longer; a number that falls means a new publisher, whose cache is empty.
"""

import asyncio
import math
from collections import deque
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvbench.clock import Clock, stopwatch
from kvbench.collect import Collector, CollectorError, Emit, Place
from kvbench.collect.beat import Beat
from kvbench.collect.kvframes import Batch, Change, read
from kvbench.collect.residents import Asked, Residents
from kvbench.collect.scrape import SLICE
from kvbench.core import Event, Record, Request, Seconds, Window

LOOK: Seconds = 0.2  # between two looks at the socket, whose descriptor tells of changes only
LATE: Seconds = 1.0  # how long after its moment an event may still come
PATIENCE: Seconds = 2.0  # for a replay
SKEW: Seconds = 2.0  # of events, later than their own time, beyond which the server's clock is taken to be behind ours
AHEAD: Seconds = 0.01  # the same before it
STEP: Seconds = 10.0  # further behind its own time than any message before: the server's clock was set
EVER: Seconds = 1e9  # further from ours no clock is
AGAIN = 64  # messages of a publisher that are remembered, so that one which comes twice is known
MARK: Final = 100_000  # messages that wait here before ZMQ drops some


class KvEvents(BaseModel):
    """What a server's KV cache stores and evicts: start it with --kv-events-config, and name the same endpoint here."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    endpoint: str = Field(description="such as tcp://127.0.0.1:5557")
    bind: bool = Field(
        False, description="true: wait there for the publisher, as vLLM needs it whose endpoint names a host and no *"
    )
    replay: str | None = Field(None, description="the publisher's replay endpoint: asked for messages that were lost on the way")
    topic: str = Field("", description="only messages whose topic begins so")
    required: bool = Field(False, description="true: losing it makes the run invalid")

    @field_validator("endpoint", "replay")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("tcp://", "ipc://")):
            raise ValueError(f"{value!r} is not an address: write tcp://HOST:PORT or ipc://FILE")
        return value

    def build(self, place: Place) -> Collector:
        return KvEventsCollector(self, place)


Sender = tuple[bytes, int]
"""A publisher by its topic and rank: each numbers its messages."""


class Stream:
    """One publisher's numbers: the next one, and the latest messages by a hash."""

    def __init__(self, number: int) -> None:
        self.expected = number
        self.seen: deque[tuple[int, int]] = deque(maxlen=AGAIN)


class KvEventsCollector:
    """Look-ups need the prompts' token ids (`tokenizer: ids`, `api: completions`); else only what comes and goes is told."""

    source = "kv_events"

    def __init__(self, spec: KvEvents, place: Place) -> None:
        self.spec, self.place, self.required = spec, place, spec.required
        self.clock: Clock = place.clock
        self.residents = Residents()
        self.messages = self.lost = self.replayed = self.restarts = self.broken = self.unknown = self.blind = self.repeated = 0
        self._streams: dict[Sender, Stream] = {}
        self._ahead: deque[tuple[int, Batch]] = deque()  # came behind a hole that a replay is asked to fill
        self._asking: Stream | None = None  # whose hole that is
        self._delay: Seconds = float("inf")  # the least of a message behind its own time
        self._answered = 0
        self._live: dict[int, Seconds] = {}
        self._over: deque[Asked] = deque()  # answered, while events of theirs may still be on their way
        self._beat = Beat(self.source, self.clock, LOOK, self._look)
        self._context: Any = None
        self._replaying: asyncio.Task[None] | None = None

    # ---- its life

    async def open(self) -> dict[str, Any]:
        try:
            import zmq  # an extra
        except ImportError:
            raise CollectorError("KV events need the package pyzmq: pip install -e '.[events]'") from None
        self._zmq: Any = zmq
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(MARK)
        self._socket.setsockopt(zmq.SUBSCRIBE, self.spec.topic.encode())
        try:
            (self._socket.bind if self.spec.bind else self._socket.connect)(self.spec.endpoint)
        except zmq.ZMQError as error:
            raise CollectorError(f"{self.spec.endpoint}: {error}: is the address right, and with bind: true, free?") from None
        return {"endpoint": self.spec.endpoint, "bind": self.spec.bind, "replay": self.spec.replay}

    def start(self, emit: Emit) -> None:
        self.emit = emit
        self._beat.start(emit)

    def tell(self, item: Event | Window) -> None:
        return

    async def stop(self) -> None:
        """Wait a moment for events that are still on their way, then tell all."""
        if self._context is None:
            return
        if hasattr(self, "emit"):
            await self.clock.sleep_until(self.clock.now() + 2 * LOOK)
            await self._beat.stop()
            self._account()
        if self._replaying is not None:
            self._replaying.cancel()
        self._context.destroy(linger=0)
        self._context = None

    def _account(self) -> None:
        self._give_up()
        self._settle(float("inf"))
        for line in self.residents.until(float("inf")):
            self.emit(line)
        counted = {
            name: getattr(self, name)
            for name in ("messages", "lost", "replayed", "restarts", "broken", "unknown", "blind", "repeated")
        }
        self._say(
            "account",
            **counted,
            unresolved=self.residents.unresolved,
            clock_offset_s=self._offset if math.isfinite(self._delay) else None,
        )
        if self._answered and not self.messages:
            self._say("lost", reason=self._nothing())

    def _nothing(self) -> str:
        """Why a run whose requests were answered has no message."""
        if self.broken:
            return f"{self.broken} messages came, and none is of vLLM's form: is this the server's endpoint for KV events?"
        asked = f"no message came while {self._answered:,} requests were answered"
        return f"{asked}: is this the server's endpoint, are bind and topic right, and are prompts longer than a block?"

    # ---- requests

    def began(self, request: Request, record: Record) -> None:
        self._live[request.id] = self.clock.now()

    def ended(self, request: Request, record: Record) -> None:
        began, now = self._live.pop(request.id), self.clock.now()
        if record.n_in is None:
            return  # never answered: whether it was looked up is not known
        self._answered += 1
        prompt = self.place.prompt(request)
        if prompt is None or len(prompt) != record.n_in:
            self.blind += 1
            return
        sent = began if record.sent_ns is None else record.sent_ns / 1e9
        self._over.append(Asked(request.id, sent, now, prompt, record.cached))

    def _settle(self, until: Seconds) -> None:
        """What was looked up by requests that had ended before `until`."""
        while self._over and self._over[0].ended < until:
            self.residents.asked(self._over.popleft())

    # ---- messages

    async def _look(self) -> None:
        began = stopwatch()
        while True:
            try:
                frames = self._socket.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                break
            self._frame(frames)
            if stopwatch() - began > SLICE:
                await asyncio.sleep(0)
                began = stopwatch()
        settled = self.clock.now() - LATE
        self._settle(settled)
        under_way = (*self._live.values(), *(asked.sent for asked in self._over))
        for line in self.residents.until(min(settled, *under_way, settled)):
            self.emit(line)

    def _frame(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            self.broken += 1
            return
        number, batch = int.from_bytes(frames[1], "big"), self._batch(frames[2])
        if batch is None:
            for stream in self._streams.values():  # whose it is nobody knows; it is none that is missing
                stream.expected += number == stream.expected
            return
        sender = frames[0], batch.rank
        stream = self._streams.setdefault(sender, Stream(number))
        mark = number, hash(frames[2])
        if mark in stream.seen:
            self.repeated += 1
            return
        stream.seen.append(mark)
        if number == stream.expected:
            self._take(stream, number, batch)
        elif self._asking is stream:
            self._ahead.append((number, batch))
        elif number < stream.expected:
            self._restarted(stream, number, batch)
        else:
            self._missing(stream, number, batch)

    def _batch(self, payload: bytes) -> Batch | None:
        try:
            return read(payload)
        except ValueError as error:
            self.broken += 1
            if self.broken == 1:
                self._say("failing", reason=str(error))
            return None

    def _restarted(self, stream: Stream, number: int, batch: Batch) -> None:
        """Another publisher: nothing of the old one's cache is there any more."""
        self.restarts += 1
        self._say("restarted", expected=stream.expected, number=number, rank=batch.rank)
        self.residents.change(self.clock.now(), batch.rank, Change("cleared"))
        self._take(stream, number, batch)

    def _missing(self, stream: Stream, number: int, batch: Batch) -> None:
        if self.spec.replay is None or self._asking is not None:
            self._hole(stream, number)
            self._take(stream, number, batch)
            return
        self._ahead.append((number, batch))
        self._asking = stream
        self._replaying = asyncio.ensure_future(self._replay(stream, stream.expected, number))

    def _give_up(self) -> None:
        """Go on behind the hole."""
        stream, self._asking = self._asking, None
        while self._ahead and stream is not None:
            number, batch = self._ahead.popleft()
            self._hole(stream, number)
            if number == stream.expected:
                self._take(stream, number, batch)

    def _hole(self, stream: Stream, number: int) -> None:
        """What is missing before `number` is lost for good."""
        missed = number - stream.expected
        if missed > 0:
            self.lost += missed
            self._say("missed", messages=missed, first=stream.expected)
            stream.expected = number

    async def _replay(self, stream: Stream, first: int, until: int) -> None:
        """Ask for the messages from `first` on; those before `until` are what was missing."""
        socket = self._context.socket(self._zmq.DEALER)
        try:
            socket.connect(self.spec.replay)
            socket.send_multipart((b"", first.to_bytes(8, "big")))
            end = self.clock.now() + PATIENCE
            while self.clock.now() < end:
                try:
                    *_, number, payload = socket.recv_multipart(self._zmq.NOBLOCK)
                except self._zmq.Again:
                    await asyncio.sleep(LOOK / 10)
                    continue
                at = int.from_bytes(number, "big", signed=True)
                if at < 0 or at >= until:
                    break
                batch = self._batch(payload)
                self._hole(stream, at)
                if at == stream.expected and batch is not None:
                    self.replayed += 1
                    self._take(stream, at, batch)
        except (self._zmq.ZMQError, ValueError) as error:
            self._say("failing", reason=f"replay from {self.spec.replay}: {error}")
        finally:
            socket.close(0)
            self._replaying = None
            self._give_up()

    def _take(self, stream: Stream, number: int, batch: Batch) -> None:
        stream.expected = number + 1
        self.messages += 1
        self.unknown += batch.ignored
        at = self._time(batch)
        for change in batch.changes:
            self.residents.change(at, batch.rank, change)

    def _time(self, batch: Batch) -> Seconds:
        """The batch's own time on the run's clock; where the two machines' clocks disagree, moved so that none comes early."""
        at, now = batch.time - self.clock.wall, self.clock.now()
        delay = now - at
        if abs(delay) > EVER:
            return now  # no time at all
        if not self._delay <= delay <= self._delay + STEP:
            self._delay = delay
        return min(now, at + self._offset)

    @property
    def _offset(self) -> Seconds:
        return 0.0 if -AHEAD <= self._delay <= SKEW else self._delay

    def _say(self, state: str, **data: Any) -> None:
        self.emit(Event(t=self.clock.now(), kind="collector", data={"source": self.source, "state": state, **data}))
