"""A target that answers at once: what remains in a run's figures against it is this tool's own cost."""

from typing import Any

from kvbench.clock import Clock
from kvbench.core import CacheAccess, Event, Record, Request, Seconds


class NullTarget:
    """Answers every request within the call, with `max_tokens` token events at one instant."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    async def open(self) -> dict[str, Any]:
        return {"kind": "null"}

    def encode(self, request: Request) -> bytes:
        return b""

    async def send(self, request: Request, record: Record) -> None:
        now = self.clock.ns()
        count = request.max_tokens
        record.sent_ns = record.written_ns = record.done_ns = record.end_ns = now
        record.n_in, record.n_out, record.source = request.tokens, count, "engine"
        record.finish, record.outcome = "length", "ok"
        if count:
            record.first_ns = record.content_ns = now
            record.token_ns.extend([now] * count)
            record.reads = 1

    def gauges(self, now: Seconds) -> dict[str, float]:
        return {}

    def nodes(self, now: Seconds) -> list[dict[str, float]]:
        return []

    def events(self) -> list[Event]:
        return []

    def accesses(self) -> list[CacheAccess] | None:
        return None

    async def aclose(self) -> None:
        return None
