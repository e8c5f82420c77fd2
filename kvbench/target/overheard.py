"""A target with listeners: collectors that need to know which prompt was asked when, and what the answer said of it."""

from collections.abc import Sequence
from typing import Any

from kvbench.collect import Listener
from kvbench.core import CacheAccess, Event, Record, Request, Seconds
from kvbench.target import Target


class Overheard:
    """`inner`, with every request told of before it is sent and when it is over."""

    def __init__(self, inner: Target, listeners: Sequence[Listener]) -> None:
        self.inner, self.listeners = inner, listeners

    async def open(self) -> dict[str, Any]:
        return await self.inner.open()

    def encode(self, request: Request) -> bytes:
        return self.inner.encode(request)

    async def send(self, request: Request, record: Record) -> None:
        for listener in self.listeners:
            listener.began(request, record)
        try:
            await self.inner.send(request, record)
        finally:
            for listener in self.listeners:
                listener.ended(request, record)

    def gauges(self, now: Seconds) -> dict[str, float]:
        return self.inner.gauges(now)

    def nodes(self, now: Seconds) -> list[dict[str, float]]:
        return self.inner.nodes(now)

    def events(self) -> list[Event]:
        return self.inner.events()

    def accesses(self) -> list[CacheAccess] | None:
        return self.inner.accesses()

    async def aclose(self) -> None:
        await self.inner.aclose()
