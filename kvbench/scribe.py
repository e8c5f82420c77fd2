"""Everything that is said of a run goes through here once: to its journal, to the sinks and the view; events and windows to the
collectors too."""

from collections.abc import Sequence
from typing import Any

from kvbench.core import CacheAccess, Event, Record, Sample, Seconds, Window
from kvbench.crew import Crew
from kvbench.journal import Journal
from kvbench.metrics.names import METRICS
from kvbench.metrics.slots import Slots
from kvbench.sink import Sink, Store, View

NAMED = "log_"  # counters that are named after rules, which users may write: of no fixed list


class Scribe:
    """`tell` is what the run says itself, `take` what its collectors say: their fleet-wide readings also go into the slots."""

    def __init__(self, journal: Journal, slots: Slots, stores: Sequence[Store], view: View | None, crew: Crew | None) -> None:
        self.journal, self.slots, self.crew = journal, slots, crew
        self._stores = stores
        self._behind: list[dict[str, Any]] = [{} for _ in stores]  # as each was when it began to be
        self._all: Sequence[Sink] = [*stores, view] if view is not None else stores

    def tell(self, item: Event | Window | Sample) -> None:
        self.journal.write(item)
        for sink in self._all:
            sink.write(item)
        if self.crew is not None and not isinstance(item, Sample):
            self.crew.tell(item)
        if isinstance(item, Window):
            self._look_at_stores(item.end)

    def _look_at_stores(self, now: Seconds) -> None:
        """A store that begins or ceases to be behind is an event."""
        for at, store in enumerate(self._stores):
            found, before = store.behind(), self._behind[at]
            if bool(found) is not bool(before):
                self._behind[at] = found
                data = {"state": "behind", **found} if found else {"state": "back", "sink": before["sink"], "to": before["to"]}
                self.tell(Event(t=now, kind="sink", data=data))

    def take(self, item: Sample | Event | CacheAccess) -> None:
        if isinstance(item, CacheAccess):
            self.journal.accesses([item])
            return
        if isinstance(item, Sample) and not item.labels and (item.name in METRICS or item.name.startswith(NAMED)):
            self.slots.gauge(item.name, item.t, item.value)
        self.tell(item)

    def file(self, records: list[Record]) -> None:
        """Ended records."""
        self.journal.file(records)
        for sink in self._stores:
            for record in records:
                sink.write(record)

    async def aclose(self, now: Seconds) -> None:
        """Close all; what each store could not deliver is on record."""
        try:
            for sink in self._all:
                await sink.aclose()
            for store in self._stores:
                self.journal.write(Event(t=now, kind="sink", data=store.told()))
        finally:
            self.journal.close()
