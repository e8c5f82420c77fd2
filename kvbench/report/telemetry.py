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

ACCOUNT = ("readings", "failures", "gaps", "longest_gap_s", "every_s", "every_first_s", "cost_s")
HAPPENED = ("server_log", "allocator")  # kinds of events that machines tell of
PYTORCH = ("num_alloc_retries", "num_ooms")  # what the second tells of
COUNTED = ("messages", "lost", "replayed", "restarts")  # of KV events: what their account says before anything else
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
    sinks = [event.data for event in files.all("sink") if "points" in event.data]
    return {"collectors": rows, "happened": dict(happened), "sinks": sinks}


def _collector(told: Mapping[str, Any], said: list[Event]) -> dict[str, Any]:
    last = {event.data.get("state"): event.data for event in said}
    end, lost = last.get("stopped", {}), last.get("lost", {}).get("reason")
    silent = [event.data for event in said if event.data.get("state") == "unsupported"]
    gone = {str(e.data.get("uuid")): {"lost": e.data.get("reason"), "at": e.t} for e in said if e.data.get("state") == "gpu_lost"}
    account = last.get("account", {})
    return {
        "source": told.get("source"),
        "required": bool(told.get("required")),
        "state": _state(told, lost, end),
        "reason": told.get("error") or told.get("absent") or lost,
        **{name: end.get(name) for name in ACCOUNT},
        "messages": {name: account.get(name) for name in COUNTED} if account else None,
        "missed": {name: n for name in MISSED if (n := account.get(name))},
        "gpus_lost": [{"uuid": uuid, **of} for uuid, of in gone.items()],
        "unsupported": {str(data.get("metric")): data.get("reason") for data in silent},
        "facts": _facts(told, gone),
    }


def _facts(told: Mapping[str, Any], gone: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What it told at its start, but of its GPUs which were lost since."""
    facts = {key: value for key, value in told.items() if key not in ("source", "required", "error")}
    if isinstance(facts.get("agent"), dict):
        facts["agent"] = _facts(facts["agent"], gone)
    if isinstance(facts.get("gpus"), list):
        facts["gpus"] = [gpu | gone.get(str(gpu.get("uuid")), {}) for gpu in facts["gpus"]]
    return facts


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
    told = sorted(found["happened"].items(), key=lambda pair: -pair[1])
    for title, some in (
        ("log", [pair for pair in told if pair[0] not in PYTORCH]),
        ("PyTorch", [p for p in told if p[0] in PYTORCH]),
    ):
        if some:
            yield title, ", ".join(f"{name} {n:,}" for name, n in some[:MOST]) + (", ..." if len(some) > MOST else "")
    for sink in found["sinks"]:
        yield f"{sink.get('sink')}", f"{sink.get('delivered'):,} of {sink.get('points'):,} points delivered to {sink.get('to')}"


def _line(row: Mapping[str, Any]) -> str:
    if row["state"] in ("not started", "absent"):
        return f"{row['state']}: {row['reason']}"
    said = [f"lost: {row['reason']}"] if row["state"] == "lost" else []
    if row["readings"] is not None:
        said += _account(row)
    elif not said:
        said.append("worked" if row["state"] == "worked" else "cut off: the run ended without its account")
    said += [f"GPU {gpu['uuid']} lost at {units.duration(gpu['at'])}: {gpu['lost']}" for gpu in row["gpus_lost"]]
    return "; ".join(said)


def _account(row: Mapping[str, Any]) -> Iterator[str]:
    counted = row["messages"]
    if counted is not None:  # how often we looked at the socket says nothing of what came
        yield ", ".join(f"{n or 0:,} {name}" for name, n in counted.items())
    else:
        yield f"{row['readings']:,} readings" + _pace(row)
    if row["failures"]:
        yield f"{row['failures']:,} failed"
    if row["gaps"]:
        yield f"{row['gaps']} {'gap' if row['gaps'] == 1 else 'gaps'}, the longest {units.duration(row['longest_gap_s'])}"
    if missed := [f"{n:,} {name}" for name, n in row["missed"].items() if name not in (counted or ())]:
        yield ", ".join(missed)
    if row["cost_s"] is not None and counted is not None:
        yield f"{units.duration(row['cost_s'])} of our CPU in all"
    elif row["cost_s"] is not None and row["readings"]:
        yield f"{units.duration(row['cost_s'] / row['readings'])} of our CPU each in the mean"
    if row["unsupported"]:
        yield f"not told: {', '.join(list(row['unsupported'])[:MOST])}"


def _pace(row: Mapping[str, Any]) -> str:
    every, first = row["every_s"], row["every_first_s"]
    if not every:
        return ""
    if first is not None and first != every:  # it was made rarer, since readings took long
        return f", every {units.duration(first)} at first, {units.duration(every)} at the end"
    return f", one per {units.duration(every)}"
