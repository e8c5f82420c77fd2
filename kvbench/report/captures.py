"""Windows of a profiler in a run: what came of each, what it disturbed, and how its file is read.

A capture slows the server. Requests due or in flight while one was being opened, was open or was being closed leave the headline
cohort, and that time the headline's rates and throughput. Rows of phases, gauges and energy are of the whole time.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from kvbench import units
from kvbench.core import Seconds
from kvbench.report.cuts import Cuts
from kvbench.report.files import RunFiles
from kvbench.report.phases import Headline, Phase


def cuts(files: RunFiles) -> Cuts:
    """What captures disturbed. One that was opened and has no end on record did until the files end."""
    known = [(event.data["start"], event.data["end"]) for event in files.all("profile") if _bounded(event.data)]
    ended = {start for start, _ in known}
    opened: list[Any] = [event.data.get("start") for event in files.all("profile") if event.data.get("state") == "opened"]
    return Cuts.of([*known, *((float(start), files.end) for start in opened if _number(start) and start not in ended)])


def captures(files: RunFiles, found: list[Phase], head: Headline) -> dict[str, Any]:
    """profiled: a profiler was at work in this run. windows: one per capture or refusal. left_out: of steady, requests and s."""
    steady = [record for phase in found if phase.kind == "steady" for record in phase.records]
    told = [told for told in files.manifest.get("collectors") or () if told.get("source") == "nsight" and not told.get("error")]
    return {
        "profiled": bool(told),
        "why_none": _why_none(files) if told and not files.all("profile") else None,
        "windows": [_window(event.data, event.t, files) for event in files.all("profile") if event.data.get("state") != "opened"],
        "left_out": {
            "requests": len(head.cuts.caught(steady)) if head.cuts.spans else 0,
            "seconds": head.end - head.start - head.seconds,
        },
    }


def _why_none(files: RunFiles) -> str:
    """What a window waited for, where none was opened."""
    spec: Mapping[str, Any] = next((each for each in files.scenario.get("collect") or () if each.get("kind") == "nsight"), {})
    if spec.get("trigger"):
        return f"its trigger ({spec['trigger']}) was never met"
    return "the run ended before its time came"


def _window(data: Mapping[str, Any], t: Seconds, files: RunFiles) -> dict[str, Any]:
    """What the event says, as far as it makes sense: its file may be damaged."""
    row: dict[str, Any] = {"t": t}
    for name, makes_sense in KEPT.items():
        row[name] = data.get(name) if makes_sense(data.get(name)) else None
    row["command"] = None
    if row["file"]:
        path = files.directory / str(row["file"])
        row["command"] = f"kvbench profile {shlex.quote(str(path))} --run {shlex.quote(str(files.directory))}"
    return row


def rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, text) for people, one per window."""
    for row in found["windows"]:
        why = row["trigger"] or {}
        asked = why.get("why") or why.get("trigger") or (f"at {units.duration(why['at'])} of steady" if "at" in why else "")
        if row["state"] != "closed":
            yield "capture", f"{row['state']} at {units.duration(row['t'])} ({asked}): {row['reason']}"
            continue
        counted = f"{row['ranges']:,} ranges" if row["ranges"] is not None else "ranges not counted"
        where = row["file"] or "a file of the server's"
        span = " to ".join(units.duration(row[name]) for name in ("start", "end"))
        yield "capture", f"{where}, {span}, {counted} ({asked})"
        if row["command"]:
            yield "", row["command"]


def notes(found: Mapping[str, Any]) -> Iterator[str]:
    """What a reader has to know of them."""
    left = found["left_out"]
    if left["seconds"] > 0:
        yield (
            f"captures took {units.duration(left['seconds'])} of steady: {left['requests']:,} requests due or in flight then, "
            "and that time, are left out of the headline and its rates; rows of phases, gauges and energy hold them"
        )
    if found["profiled"]:
        yield "a profiler was attached: this run is no baseline for others, and leaves no baseline.json"
    if found["profiled"] and not found["windows"]:
        yield f"no capture window was opened: {found['why_none']}"
    for row in found["windows"]:
        if row["state"] != "closed" or (row["reason"] and not row["ranges"] and row["file"]):
            yield f"capture {row['state']} at {units.duration(row['t'])}: {row['reason']}"


def _bounded(data: Mapping[str, Any]) -> bool:
    return data.get("state") in ("closed", "failed") and _number(data.get("start")) and _number(data.get("end"))


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _count(value: Any) -> bool:
    return isinstance(value, int) and _number(value)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _reason(value: Any) -> bool:
    return isinstance(value, dict) and ("at" not in value or _number(value["at"]))


KEPT: Final[Mapping[str, Callable[[Any], bool]]] = {
    "state": _text, "start": _number, "end": _number, "file": _text, "bytes": _count, "ranges": _count, "reason": _text,
    "trigger": _reason,
}  # fmt: skip
