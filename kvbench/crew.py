"""The collectors of one run: opened before it, started with it, stopped after its last request. None can break the run."""

import asyncio
from collections.abc import Sequence
from typing import Any

from kvbench.clock import Clock
from kvbench.collect import Collector, CollectorError, Emit, Listener
from kvbench.core import Event, Seconds, Window

PATIENCE: Seconds = 15.0  # for a collector to open, and to stop


class Crew:
    """`facts`: what each collector told when it was opened, by its source; those that could not work are told of as well."""

    def __init__(self, clock: Clock, collectors: Sequence[Collector]) -> None:
        self.clock = clock
        self.facts: list[dict[str, Any]] = []
        self._working: list[Collector] = []
        self._hired = collectors
        self._emit: Emit | None = None

    async def open(self) -> None:
        """All at once. Raises CollectorError where a required one cannot work; another is left out, and said so."""
        results = await asyncio.gather(*(self._open(each) for each in self._hired))
        for collector, (facts, why) in zip(self._hired, results, strict=True):
            self.facts.append({"source": collector.source, "required": collector.required, "error": why or None, **facts})
            if not why:
                self._working.append(collector)
        for collector, (_, why) in zip(self._hired, results, strict=True):
            if why and collector.required:
                await self.stop()
                raise CollectorError(f"the required collector {collector.source} cannot work: {why}")

    async def _open(self, collector: Collector) -> tuple[dict[str, Any], str]:
        try:
            return await asyncio.wait_for(collector.open(), PATIENCE), ""
        except CollectorError as error:
            why = str(error)
        except TimeoutError:
            why = f"it did not open within {PATIENCE:g} s"
        except Exception as error:  # a fault of ours must not cost the user the run
            why = f"internal error: {type(error).__name__}: {error}"
        await self._stop(collector)
        return {}, why

    @property
    def listeners(self) -> list[Listener]:
        """Those that want to hear of every request."""
        return [each for each in self._working if isinstance(each, Listener)]

    def start(self, emit: Emit) -> None:
        """The run's clock is at 0."""
        self._emit = emit
        for collector in list(self._working):
            try:
                collector.start(emit)
                self._say(collector, "started")
            except Exception as error:
                self._lose(collector, error)

    def tell(self, item: Event | Window) -> None:
        for collector in list(self._working):
            try:
                collector.tell(item)
            except Exception as error:
                self._lose(collector, error)

    async def stop(self) -> None:
        working, self._working = self._working, []
        await asyncio.gather(*(self._stop(collector) for collector in working))

    async def _stop(self, collector: Collector) -> None:
        try:
            await asyncio.wait_for(collector.stop(), PATIENCE)
        except TimeoutError:
            self._say(collector, "lost", reason=f"it did not stop within {PATIENCE:g} s: its last readings are missing")
        except Exception as error:
            self._say(collector, "lost", reason=f"internal error: {type(error).__name__}: {error}")

    def _lose(self, collector: Collector, error: Exception) -> None:
        self._working.remove(collector)
        self._say(collector, "lost", reason=f"internal error: {type(error).__name__}: {error}")

    def _say(self, collector: Collector, state: str, **data: Any) -> None:
        if self._emit is not None:
            told = {"source": collector.source, "state": state, "required": collector.required, **data}
            self._emit(Event(t=self.clock.now(), kind="collector", data=told))
