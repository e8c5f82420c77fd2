"""When each phase ran, which requests are its own, and which of them make the headline."""

from dataclasses import dataclass, field
from typing import Any

from kvbench.core import Record, Seconds
from kvbench.report.cuts import NONE, Cuts
from kvbench.report.files import RunFiles


@dataclass
class Phase:
    """One phase, or one epoch of steady. A request belongs to the phase in which it was due, whenever it ended.

    offered: the driver's own count, None where the phase has no end on record. reason: why it ended.
    """

    name: str
    kind: str
    start: Seconds
    end: Seconds
    offered: int | None = None
    reason: str | None = None
    planned: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)

    @property
    def seconds(self) -> Seconds:
        return self.end - self.start


@dataclass
class Headline:
    """The cohort: requests due in steady, followed to their end. The interval of rates and throughput: steady as it truly ran,
    without `cuts`, which `seconds` leaves out."""

    cohort: str
    records: list[Record]
    start: Seconds
    end: Seconds
    cuts: Cuts = NONE

    @property
    def seconds(self) -> Seconds:
        return self.cuts.at(self.end) - self.cuts.at(self.start)


def phases(files: RunFiles) -> list[Phase]:
    """The phases in order of their start, with their requests in order of due time."""
    found = _timeline(files)
    planned = {entry.get("name"): entry for entry in files.manifest.get("phases") or []}
    by_name = {phase.name: phase for phase in found}
    for record in sorted(files.records, key=lambda r: (r.due_ns, r.id)):
        if record.phase not in by_name:  # the events are lost: the records alone say that it ran
            kind = str(planned.get(record.phase, {}).get("kind", record.phase))
            by_name[record.phase] = Phase(record.phase, kind, record.due_ns / 1e9, record.due_ns / 1e9)
            found.append(by_name[record.phase])
        phase = by_name[record.phase]
        phase.records.append(record)
        phase.end = max(phase.end, record.due_ns / 1e9)
    for phase in found:
        phase.planned = planned.get(phase.name, {})
    return sorted(found, key=lambda phase: phase.start)


def _timeline(files: RunFiles) -> list[Phase]:
    """Phases as the events tell them. One without an end ran until the last thing on record."""
    found: list[Phase] = []
    for event in files.events:
        name = str(event.data.get("phase", ""))
        if event.kind == "phase_start":
            start = float(event.data.get("start", event.t))  # the event itself is written a little later
            found.append(Phase(name, str(event.data.get("phase_kind", name)), start, files.end))
        elif event.kind == "phase_end":
            for phase in found:
                if phase.name == name and phase.reason is None:
                    offered = event.data.get("offered")
                    phase.end, phase.offered = event.t, offered if isinstance(offered, int) else None
                    phase.reason = str(event.data.get("reason", "ended"))
    return found


def headline(found: list[Phase], apart: frozenset[int] = frozenset(), cuts: Cuts = NONE) -> Headline:
    """Steady where it ran; else every measured request, and the name says so. `apart`: ids of requests that do not count; `cuts`:
    time that does not, with the requests caught in it."""
    steady = [phase for phase in found if phase.kind == "steady"]
    if steady:
        every = [record for phase in steady for record in phase.records]
        warm = [record for record in every if record.id not in apart]
        caught = cuts.caught(warm) if cuts.spans else frozenset()
        records = [record for record in warm if record.id not in caught]
        left = [f"{len(every) - len(warm):,} first uses stand apart"] if len(every) > len(warm) else []
        left += [f"{len(caught):,} met by captures left out"] if caught else []
        named = "requests due in steady" + (f" ({', '.join(left)})" if left else "")
        return Headline(named, records, steady[0].start, steady[-1].end, cuts)
    rest = [phase for phase in found if any(record.measured for record in phase.records)]
    if not rest:
        return Headline("no measured request", [], 0.0, 0.0)
    records = [record for phase in rest for record in phase.records if record.measured]
    return Headline("all measured requests (steady did not run)", records, rest[0].start, rest[-1].end)
