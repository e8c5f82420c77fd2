"""What was collected beside the requests: each source with its readings, gaps and cost, and what happened on the machines."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType

from kvbench import units
from kvbench.core import Event
from kvbench.losses import whose
from kvbench.report import captures
from kvbench.report.files import RunFiles
from kvbench.report.text import block, pairs

ACCOUNT = ("readings", "failures", "gaps", "longest_gap_s", "every_s", "cost_s")
HAPPENED = ("server_log", "allocator")  # kinds of events that machines tell of
MISSED = ("lost", "broken", "unknown", "restarts", "blind", "unresolved")  # of KV events: what the account counts beside the good
MOST = 6  # names in a row for people


def telemetry(files: RunFiles) -> dict[str, Any]:
    """collectors: by source what they could and could not tell; happened: counts of what they saw; sinks: their accounts."""
    crew = files.manifest.get("collectors") or ()
    said: dict[int, list[Event]] = {}
    for event in files.all("collector"):
        said.setdefault(whose(event.data, crew), []).append(event)
    rows = [_collector(told, said.get(at, [])) for at, told in enumerate(crew)]
    happened = Counter(str(event.data.get("rule") or event.data.get("what")) for kind in HAPPENED for event in files.all(kind))
    for event in files.all("server_log"):
        happened[str(event.data.get("rule"))] += int(event.data.get("more") or 1) - 1
    return {"collectors": rows, "happened": dict(happened), "sinks": [event.data for event in files.all("sink")]}


def _collector(told: Mapping[str, Any], said: list[Event]) -> dict[str, Any]:
    last = {event.data.get("state"): event.data for event in said}
    end, lost = last.get("stopped", {}), last.get("lost", {}).get("reason")
    silent = [event.data for event in said if event.data.get("state") == "unsupported"]
    return {
        "source": told.get("source"),
        "required": bool(told.get("required")),
        "state": _state(told, lost, end),
        "reason": told.get("error") or told.get("absent") or lost,
        **{name: end.get(name) for name in ACCOUNT},
        "missed": {name: n for name in MISSED if (n := last.get("account", {}).get(name))},
        "unsupported": {str(data.get("metric")): data.get("reason") for data in silent},
        "facts": {key: value for key, value in told.items() if key not in ("source", "required", "error")},
    }


def _state(told: Mapping[str, Any], lost: Any, end: Mapping[str, Any]) -> str:
    if told.get("error"):
        return "not started"
    return "absent" if told.get("absent") else "lost" if lost else "worked" if end else "cut off"


def shown(summary: Mapping[str, Any], width: int) -> RenderableType:
    """The block of the terminal; nothing where nothing was collected."""
    told = [*rows(summary["telemetry"]), *captures.rows(summary["captures"])]
    return block("Telemetry", pairs(told)) if told else Group()


def rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, text) for people."""
    for row in found["collectors"]:
        yield str(row["source"]), _line(row)
    if found["happened"]:
        told = sorted(found["happened"].items(), key=lambda pair: -pair[1])
        yield "log", ", ".join(f"{name} {n:,}" for name, n in told[:MOST]) + (", ..." if len(told) > MOST else "")
    for sink in found["sinks"]:
        yield f"{sink.get('sink')}", f"{sink.get('delivered'):,} of {sink.get('points'):,} points delivered to {sink.get('to')}"


def _line(row: Mapping[str, Any]) -> str:
    if row["state"] in ("not started", "lost", "absent"):
        return f"{row['state']}: {row['reason']}"
    if row["readings"] is None:
        return row["state"] if row["state"] == "worked" else "cut off: the run ended without its account"
    parts = [f"{row['readings']:,} readings"]
    if row["every_s"]:
        parts[0] += f", one per {units.duration(row['every_s'])}"
    if row["gaps"]:
        parts.append(f"{row['gaps']} gaps, the longest {units.duration(row['longest_gap_s'])}")
    if row["missed"]:
        parts.append(", ".join(f"{n:,} {name}" for name, n in row["missed"].items()))
    if row["cost_s"] is not None and row["readings"]:
        parts.append(f"at most {units.duration(row['cost_s'] / row['readings'])} of our CPU each")
    if row["unsupported"]:
        parts.append(f"not told: {', '.join(list(row['unsupported'])[:MOST])}")
    return "; ".join(parts)
