"""A server's KV events over ZMQ (vLLM's stream), folded with what we asked it into cache.jsonl: a real server's cache metrics.

The publisher numbers its messages. What is missing in between is asked of its replay endpoint, and counted where that has it no
longer; a number that falls means a new publisher, whose cache is empty.
"""

import asyncio
from collections import deque
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvbench.clock import Clock
from kvbench.collect import Collector, CollectorError, Emit, Place
from kvbench.collect.beat import Beat
from kvbench.collect.kvframes import Batch, Change, read
from kvbench.collect.residents import Asked, Residents
from kvbench.core import Event, Record, Request, Seconds, Window

LOOK: Seconds = 0.2  # between two looks at the socket, whose descriptor tells of changes only
LATE: Seconds = 1.0  # how long after its moment an event may still come
PATIENCE: Seconds = 2.0  # for a replay
SKEW: Seconds = 2.0  # of events, later than their own time, beyond which the server's clock is taken to be behind ours
AHEAD: Seconds = 0.01  # the same before it
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


class KvEventsCollector:
    """Look-ups need the prompts' token ids (`tokenizer: ids`, `api: completions`); else only what comes and goes is told."""

    source = "kv_events"

    def __init__(self, spec: KvEvents, place: Place) -> None:
        self.spec, self.place, self.required = spec, place, spec.required
        self.clock: Clock = place.clock
        self.residents = Residents()
        self.messages = self.lost = self.replayed = self.restarts = self.broken = self.unknown = self.blind = 0
        self._expected: int | None = None
        self._ahead: deque[tuple[int, bytes]] = deque()  # came behind a hole that a replay is asked to fill
        self._delay: Seconds = float("inf")  # the least of a message behind its own time
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
            name: getattr(self, name) for name in ("messages", "lost", "replayed", "restarts", "broken", "unknown", "blind")
        }
        self._say(
            "account", **counted, unresolved=self.residents.unresolved, clock_offset_s=self._offset if self.messages else None
        )

    # ---- requests

    def began(self, request: Request, record: Record) -> None:
        self._live[request.id] = self.clock.now()

    def ended(self, request: Request, record: Record) -> None:
        began, now = self._live.pop(request.id), self.clock.now()
        if record.n_in is None:
            return  # never answered: whether it was looked up is not known
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
        while True:
            try:
                frames = self._socket.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                break
            self._frame(frames)
            if not self.messages % 64:
                await asyncio.sleep(0)
        settled = self.clock.now() - LATE
        self._settle(settled)
        under_way = (*self._live.values(), *(asked.sent for asked in self._over))
        for line in self.residents.until(min(settled, *under_way, settled)):
            self.emit(line)

    def _frame(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            self.broken += 1
            return
        number = int.from_bytes(frames[1], "big")
        if self._expected is None or number == self._expected:
            self._take(number, frames[2])
        elif self._replaying is not None:
            self._ahead.append((number, frames[2]))
        elif number < self._expected:
            self._restarted(number, frames[2])
        else:
            self._missing(number, frames[2])

    def _restarted(self, number: int, payload: bytes) -> None:
        """Another publisher: nothing of the old one's cache is there any more."""
        self.restarts += 1
        self._say("restarted", expected=self._expected, number=number)
        for node in sorted(self.residents.nodes):
            self.residents.change(self.clock.now(), node, Change("cleared"))
        self._take(number, payload)

    def _missing(self, number: int, payload: bytes) -> None:
        assert self._expected is not None
        self._ahead.append((number, payload))
        if self.spec.replay is None:
            self._give_up()
        else:
            self._replaying = asyncio.ensure_future(self._replay(self._expected, number))

    def _give_up(self) -> None:
        """Go on behind the hole."""
        while self._ahead:
            number, payload = self._ahead.popleft()
            self._hole(number)
            if number == self._expected:
                self._take(number, payload)

    def _hole(self, number: int) -> None:
        """What is missing before `number` is lost for good."""
        missed = number - (self._expected or 0)
        if missed > 0:
            self.lost += missed
            self._say("missed", messages=missed, first=self._expected)
            self._expected = number

    async def _replay(self, first: int, until: int) -> None:
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
                self._hole(at)
                if at == self._expected:
                    self.replayed += 1
                    self._take(at, payload)
        except (self._zmq.ZMQError, ValueError) as error:
            self._say("failing", reason=f"replay from {self.spec.replay}: {error}")
        finally:
            socket.close(0)
            self._replaying = None
            self._give_up()

    def _take(self, number: int, payload: bytes) -> None:
        self._expected = number + 1
        self.messages += 1
        try:
            batch = read(payload)
        except ValueError as error:
            self.broken += 1
            if self.broken == 1:
                self._say("failing", reason=str(error))
            return
        self.unknown += batch.ignored
        at = self._time(batch)
        for change in batch.changes:
            self.residents.change(at, batch.rank, change)

    def _time(self, batch: Batch) -> Seconds:
        """The batch's own time on the run's clock; where the two machines' clocks disagree, moved so that none comes early."""
        at, now = batch.time - self.clock.wall, self.clock.now()
        self._delay = min(self._delay, now - at)
        return min(now, at + self._offset)

    @property
    def _offset(self) -> Seconds:
        return 0.0 if -AHEAD <= self._delay <= SKEW else self._delay

    def _say(self, state: str, **data: Any) -> None:
        self.emit(Event(t=self.clock.now(), kind="collector", data={"source": self.source, "state": state, **data}))
