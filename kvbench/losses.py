"""What collectors and sinks missed, as the verdict measures it: gaps in readings, lost sources, points not delivered."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvbench import units
from kvbench.core import Event
from kvbench.evidence import Evidence, Measure


def hired(evidence: Evidence) -> list[Mapping[str, Any]]:
    """The collectors of the run, as the manifest tells of them."""
    return list(evidence.manifest.get("collectors") or ())


def whose(said: Mapping[str, Any], crew: Sequence[Mapping[str, Any]]) -> int:
    """Which of the collectors (its place in the manifest) an event is of, -1: none. Those that share a source say it."""
    first = next((at for at, told in enumerate(crew) if told.get("source") == said.get("source")), -1)
    return int(said.get("collector", first))


def collector_gap(evidence: Evidence) -> Measure:
    """The longest silence of a polling collector, in its own periods."""
    gaps = list(_said(evidence, "gap"))
    if not hired(evidence):
        return Measure(None, 0, "none was asked for")
    if not gaps:
        return Measure(0.0, len(hired(evidence)))
    worst = max(gaps, key=lambda event: float(event.data.get("periods") or 0))
    start, end = (units.duration(worst.data.get(edge)) for edge in ("start", "end"))
    note = f"{worst.data.get('source')}, from {start} to {end}" + (f": {why}" if (why := worst.data.get("reason")) else "")
    return Measure(float(worst.data.get("periods") or 0), len(gaps), note=note)


def collectors_lost(evidence: Evidence) -> Measure:
    """Collectors that could not begin, or stopped for good."""
    return _lost(evidence, required=False)


def required_lost(evidence: Evidence) -> Measure:
    """The same of those that the scenario requires."""
    return _lost(evidence, required=True)


def _lost(evidence: Evidence, required: bool) -> Measure:
    everyone = hired(evidence)
    crew = {at: told for at, told in enumerate(everyone) if bool(told.get("required")) is required}
    if not crew:
        return Measure(None, 0, "none was asked for")
    why = {at: str(told["error"]) for at, told in crew.items() if told.get("error")}
    why |= {at: str(e.data.get("reason")) for e in _said(evidence, "lost") if (at := whose(e.data, everyone)) in crew}
    note = "; ".join(f"{crew[at].get('source')}: {reason}" for at, reason in sorted(why.items()))
    return Measure(len(why), len(crew), note=note)


def gpus_lost(evidence: Evidence) -> Measure:
    """GPUs that fell off the bus while the run went on, each once, whoever read it."""
    if not hired(evidence):
        return Measure(None, 0, "none was asked for")
    gone = {str(event.data.get("uuid")): event for event in reversed(list(_said(evidence, "gpu_lost")))}
    told = [f"GPU {e.data.get('gpu')} ({uuid}) at {units.duration(e.t)}: {e.data.get('reason')}" for uuid, e in gone.items()]
    return Measure(len(gone), len(gone), note="; ".join(reversed(told)))


def messages_lost(evidence: Evidence) -> Measure:
    """Messages of KV events, and an agent's fine readings, that were gone before they were asked for."""
    if not hired(evidence):
        return Measure(None, 0, "none was asked for")
    lost = {"kv_events": 0, "agent": 0}
    for state, name in (("missed", "messages"), ("fine", "missed")):
        for event in _said(evidence, state):
            source = str(event.data.get("source"))
            lost[source] = lost.get(source, 0) + int(event.data.get(name) or 0)
    note = ", ".join(f"{source} {n:,}" for source, n in lost.items() if n)
    return Measure(sum(lost.values()), len(hired(evidence)), note=note)


def sink_loss(evidence: Evidence) -> Measure:
    """Points that a sink was given and no database has, as a share, the worst sink."""
    told = [event.data for event in evidence.events if event.kind == "sink" and "points" in event.data]
    if not evidence.scenario.get("sinks"):
        return Measure(None, 0, "none was asked for")
    if not told:
        return Measure(None, 0, "the run ended before its sinks were closed: kvbench export --resume delivers the rest")
    shares = [(1 - (data.get("delivered") or 0) / data["points"], data) for data in told if data.get("points")]
    if not shares:
        return Measure(0.0, 0)
    share, worst = max(shares, key=lambda pair: pair[0])
    return Measure(max(0.0, share), int(worst["points"]), note=" ".join(worst.get("notes") or ()) if share > 0 else "")


def captured(evidence: Evidence) -> Measure:
    """Windows that a profiler opened."""
    if not any(told.get("source") == "nsight" and not told.get("error") for told in hired(evidence)):
        return Measure(None, 0, "no profiler was at work")
    opened = sum(event.kind == "profile" and event.data.get("state") == "opened" for event in evidence.events)
    return Measure(opened, opened, note="a profiled run is no baseline")


def _said(evidence: Evidence, state: str) -> Iterator[Event]:
    return (event for event in evidence.events if event.kind == "collector" and event.data.get("state") == state)
