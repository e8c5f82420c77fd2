"""The collectors of one run: opened before it, started with it, stopped after its last request. None can break the run."""

import asyncio
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from kvbench.clock import Clock
from kvbench.collect import Collector, CollectorError, Emit, Listener
from kvbench.core import CacheAccess, Event, Sample, Seconds, Window

PATIENCE: Seconds = 15.0  # for a collector to open, and to stop


class Crew:
    """`facts`: what each collector told when it was opened, in their order; those that could not work are told of as well.

    Where several collectors share a source, their events of kind `collector` say which one it is (`collector`, its place in
    `facts`). A reading of the whole target comes from the first that has it: the same of another would be mixed into one series
    with it, so it is labelled `collector`, and stays out of the windows.
    """

    def __init__(self, clock: Clock, collectors: Sequence[Collector]) -> None:
        self.clock = clock
        self.facts: list[dict[str, Any]] = []
        self._working: list[Collector] = []
        self._hired = collectors
        self._opened: list[Collector] = []  # to be stopped, also where they were lost meanwhile
        sources = [each.source for each in collectors]
        self._first = [sources.index(source) for source in sources]  # per place: of the first that shares its source
        self._alone = [sources.count(source) == 1 for source in sources]
        self._speakers: dict[str, int] = {}  # places, of a name's readings without labels
        self._emit: Emit | None = None

    async def open(self) -> None:
        """All at once. Raises CollectorError where a required one cannot work; another is left out, and said so."""
        try:
            results = await asyncio.gather(*(self._open(each) for each in self._hired))
        except BaseException:  # a signal: the run is not to be
            await asyncio.gather(*(self._stop(each) for each in self._hired))
            raise
        for collector, (facts, why) in zip(self._hired, results, strict=True):
            self.facts.append({"source": collector.source, "required": collector.required, "error": why or None, **facts})
            if not why:
                self._working.append(collector)
                self._opened.append(collector)
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
        for collector, told in zip(self._hired, self.facts, strict=False):  # compose.py may have told of one that is absent
            if told["error"]:
                self._say(collector, "not_started", reason=told["error"])
        for collector in list(self._working):
            try:
                collector.start(partial(self._hear, self._place(collector)))
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
        opened, self._opened, self._working = self._opened, [], []
        await asyncio.gather(*(self._stop(collector) for collector in opened))

    async def _stop(self, collector: Collector) -> None:
        try:
            await asyncio.wait_for(collector.stop(), PATIENCE)
        except TimeoutError:
            self._say(collector, "lost", reason=f"it did not stop within {PATIENCE:g} s: its last readings are missing")
        except CollectorError as error:
            self._say(collector, "lost", reason=str(error))
        except Exception as error:
            self._say(collector, "lost", reason=f"internal error: {type(error).__name__}: {error}")

    def _lose(self, collector: Collector, error: Exception) -> None:
        self._working.remove(collector)
        self._say(collector, "lost", reason=f"internal error: {type(error).__name__}: {error}")

    def _hear(self, place: int, item: Sample | Event | CacheAccess) -> None:
        """What the collector at this place says, so that nobody takes it for another's. Called for every reading."""
        assert self._emit is not None
        if not math.isfinite(item.t):  # of a peer's clock that says nonsense; no line of the run's files may hold it
            item = replace(item, t=self.clock.now())
        elif item.t < 0:  # taken just before the start; the run has no time before it
            item = replace(item, t=0.0)
        if isinstance(item, Sample) and item.value is not None and not math.isfinite(item.value):
            item = replace(item, value=None)
        if isinstance(item, Event) and item.kind == "collector":
            item = replace(item, data={**item.data, **self._which(place)})
        elif isinstance(item, Sample) and self._shares(place, item):
            item = replace(item, labels={**item.labels, "collector": str(place)})
        self._emit(item)

    def _shares(self, place: int, sample: Sample) -> bool:
        """Another collector tells the same series, and did so first. Who has no value speaks for nobody."""
        if sample.labels:
            return self._first[place] != place
        if sample.value is not None:
            self._speakers.setdefault(sample.name, place)
        return self._speakers.get(sample.name, place) != place

    def _which(self, place: int) -> dict[str, int]:
        return {} if self._alone[place] else {"collector": place}

    def _place(self, collector: Collector) -> int:
        return next(at for at, each in enumerate(self._hired) if each is collector)

    def _say(self, collector: Collector, state: str, **data: Any) -> None:
        if self._emit is not None:
            told = {
                "source": collector.source,
                "state": state,
                "required": collector.required,
                **self._which(self._place(collector)),
                **data,
            }
            self._emit(Event(t=self.clock.now(), kind="collector", data=told))
