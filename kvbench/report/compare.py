"""Runs of one scenario under several laws, side by side: the measures of docs/metrics.md, Control, on the same offered load.

Only open-loop load can be the same under every law. Before anything is compared, the steady requests of all runs are held against
each other: due at the same times after their phase began, of the same class and prefix group, asked for the same tokens. Where a
run ended early, as long as all of them went on; the figures of such a run are of another span, and never marked as the best.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvbench import units
from kvbench.core import Record, Seconds
from kvbench.report import control
from kvbench.report.captures import cuts
from kvbench.report.control import Aim, aim_of
from kvbench.report.files import RunFiles
from kvbench.report.first_uses import first_uses
from kvbench.report.loops import amount
from kvbench.report.phases import Phase, headline, phases
from kvbench.report.summary import strict
from kvbench.report.text import block, count, plain

EXACT: Seconds = 1e-6  # due times nearer than this are the same: phases may begin at other instants, and times are rounded
Summary = Mapping[str, Any]


class OfferError(ValueError):
    """The laws were not offered the same requests, so their figures cannot be compared."""


@dataclass(frozen=True)
class Measure:
    """One row of the table. unit: "signal" is that of what the laws hold. better: which end is the best, "" where neither."""

    title: str
    unit: Literal["s", "share", "/s", "", "signal"]
    better: Literal["low", "high", ""]
    read: Callable[[Summary, Summary], Mapping[str, Any]]
    """Of a run's summary and its control: {"value", "reason"}."""


def compare(runs: Mapping[str, tuple[Summary, RunFiles]]) -> dict[str, Any]:
    """The whole comparison as strict JSON. `runs` by law, the scenario's own first: all are held to its aim, where it has one.

    Raises OfferError where the offered requests differ.
    """
    files = {law: each for law, (_, each) in runs.items()}
    offered = same_offer(files)
    aim = next((aim for aim in map(aim_of, files.values()) if aim is not None), None)
    longest = max(summary["headline"]["seconds"] for summary, _ in runs.values())
    rows = {law: _row(summary, each, aim, longest) for law, (summary, each) in runs.items()}
    for name, measure in MEASURES.items():
        _mark(name, measure, rows)
    first = next(iter(files.values()))
    held = {"signal": aim.signal, "set_point": aim.set_point, "unit": aim.unit} if aim else None
    facts = {"scenario": first.manifest.get("name"), "seed": first.manifest.get("seed"), "clock": first.manifest.get("clock")}
    return dict(strict({**facts, "aim": held, "offered": offered, "laws": rows}))


def same_offer(runs: Mapping[str, RunFiles]) -> dict[str, Any]:
    """How many steady requests every run was offered alike, over how long, and a digest of them. Raises OfferError."""
    steady = {law: [phase for phase in phases(files) if phase.kind == "steady"] for law, files in runs.items()}
    first, *others = steady
    digest, n, seconds = hashlib.sha256(), 0, 0.0
    for number, phase in enumerate(steady[first]):
        alike = [steady[law][number] for law in others if number < len(steady[law])]
        if len(alike) < len(others):
            break
        span = min(each.seconds for each in (phase, *alike))
        mine = _offer(phase, span)
        for law, other in zip(others, alike, strict=True):
            _same(phase.name, (first, mine), (law, _offer(other, span)))
        digest.update(msgspec.json.encode([(round(due, 4), what) for due, what in mine]))
        n, seconds = n + len(mine), seconds + span
    if not n:
        raise OfferError("no steady request is on record under every law: there is nothing to compare")
    return {"n": n, "seconds": seconds, "digest": digest.hexdigest()[:16]}


def _offer(phase: Phase, span: Seconds) -> list[tuple[Seconds, tuple[Any, ...]]]:
    """(due since the phase began, what was asked) of the requests due within `span`."""
    due = [(record.due_ns / 1e9 - phase.start, _asked(record)) for record in phase.records]
    return [(at, what) for at, what in due if at < span - EXACT]


def _asked(record: Record) -> tuple[Any, ...]:
    return record.cls, record.group, record.turn, record.asked_in, record.asked_out, sorted(record.sampling.items())


def _same(phase: str, mine: tuple[str, list[Any]], other: tuple[str, list[Any]]) -> None:
    (first, these), (law, those) = mine, other
    for k, (one, two) in enumerate(zip(these, those, strict=False), 1):
        if abs(one[0] - two[0]) > EXACT or one[1] != two[1]:
            told = " against ".join(f"due at {at:.6f} s, {what[3]} tokens in, {what[4]} out" for at, what in (one, two))
            raise OfferError(f"{first} and {law} were not offered the same: request {k} of {phase} is {told}; {ADVICE}")
    if len(these) != len(those):
        raise OfferError(f"{first} was offered {len(these)} requests in {phase}, {law} {len(those)}; {ADVICE}")


ADVICE = "laws compare on open-loop arrivals only: no closed loop, no sessions, and no watch that moves the level (action: mark)"


def _row(summary: Summary, files: RunFiles, aim: Aim | None, longest: Seconds) -> dict[str, Any]:
    found = phases(files)
    held = control.control(files, found, headline(found, first_uses(files), cuts(files)), summary, aim)
    seconds = summary["headline"]["seconds"]
    return {
        "directory": str(files.directory),
        "control": files.scenario.get("control"),
        "verdict": summary["verdict"]["verdict"],
        "exit": summary["exit"],
        "steady_seconds": seconds,
        "cut": longest - seconds > 1,
        "holds": aim is not None and aim_of(files) == aim,
        "told": held["told"],
        "measures": {name: {**measure.read(summary, held), "best": False} for name, measure in MEASURES.items()},
    }


def _mark(name: str, measure: Measure, rows: Mapping[str, dict[str, Any]]) -> None:
    """Mark the best of one measure; nothing where fewer than two can be compared, or all are alike. How well a set-point was held
    is between the laws that hold it, where there are two: another law may be nearer by chance, and is never marked."""
    whole = [row for row in rows.values() if not row["cut"]]
    held = [row for row in whole if row["holds"] or name not in control.TRACKED]
    cells = [row["measures"][name] for row in (held if len(held) > 1 else whole)]
    known = [cell["value"] for cell in cells if cell["value"] is not None]
    if not measure.better or len(known) < 2 or min(known) == max(known):
        return
    best = min(known) if measure.better == "low" else max(known)
    for row in held:
        row["measures"][name]["best"] = row["measures"][name]["value"] == best


def table(found: Mapping[str, Any]) -> RenderableType:
    """Measures down, laws across, the best of each marked; below it what limits the comparison."""
    laws, aim, offered = found["laws"], found["aim"], found["offered"]
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    grid.add_column("", no_wrap=True, style="dim")
    for law in laws:
        grid.add_column(Text(plain(law)), justify="right", no_wrap=True)
    for name, measure in MEASURES.items():
        cells = [row["measures"][name] for row in laws.values()]
        if any(cell["value"] is not None for cell in cells):
            unit = (aim or {}).get("unit") if measure.unit == "signal" else measure.unit
            grid.add_row(_title(name, measure, aim), *(_cell(cell, unit) for cell in cells))
    grid.add_row("verdict", *(row["verdict"] for row in laws.values()))
    grid.add_row("exit code", *(str(row["exit"]["code"]) for row in laws.values()))
    held = f"held to {aim['signal']} {amount(aim['set_point'], aim['unit'])}; " if aim else ""
    same = f"the same {offered['n']:,} requests over {units.duration(offered['seconds'])} of steady"
    lines = [Text(f"* best of its row. {held}{same} (digest {offered['digest']})", style="dim")]
    lines += [Text(note) for note in _notes(laws)]
    return block("Laws", Group(grid, *lines))


def _title(name: str, measure: Measure, aim: Mapping[str, Any] | None) -> str:
    """With the unit that its cells do not show: those of a time or a share do."""
    unit = (aim or {}).get("unit") or "requests"
    if name == "iae":
        return f"{measure.title}, {unit} x s"
    return f"{measure.title}, requests" if measure.unit == "signal" and unit == "requests" else measure.title


def _cell(cell: Mapping[str, Any], unit: str | None) -> Text:
    value = cell["value"]
    said = "-" if value is None else f"{count(value)}/s" if unit == "/s" else amount(value, unit)
    return Text(said + ("*" if cell["best"] else " "), style="bold green" if cell["best"] else "")


def _notes(laws: Mapping[str, Any]) -> list[str]:
    """Runs that ended early, and why a law never settled."""
    lines = []
    for law, row in laws.items():
        if row["cut"]:
            lines.append(f"{law}: steady ended after {units.duration(row['steady_seconds'])}: {row['exit']['reason']}")
        never = row["measures"]["settling"]
        if never["value"] is None and never["reason"] and never["reason"].startswith("never"):
            lines.append(f"{law}: settled {never['reason']}")
    return lines


def _held(name: str) -> Callable[[Summary, Summary], Mapping[str, Any]]:
    return lambda summary, held: {key: held[name].get(key) for key in ("value", "reason")}


def _of(read: Callable[[Summary], Mapping[str, Any]], key: str) -> Callable[[Summary, Summary], Mapping[str, Any]]:
    def one(summary: Summary, held: Summary) -> Mapping[str, Any]:
        row = read(summary)
        return {"value": row.get(key), "reason": row.get("reason")}

    return one


def _told(name: str) -> Callable[[Summary, Summary], Mapping[str, Any]]:
    return lambda summary, held: {"value": held["told"].get(name), "reason": f"this law does not count {name}"}


MEASURES: dict[str, Measure] = {
    "goodput": Measure("goodput", "share", "high", _of(lambda summary: summary["goodput"], "value")),
    "goodput_rate": Measure("goodput rate", "/s", "high", _of(lambda summary: summary["goodput"], "rate")),
    "settling": Measure("settling time", "s", "low", _held("settling")),
    "overshoot": Measure("overshoot", "signal", "low", _held("overshoot")),
    "iae": Measure("integral of |error|", "", "low", _held("iae")),
    "mean_error": Measure("mean |error|", "signal", "low", _held("mean_error")),
    "in_band": Measure("time in band", "share", "high", _held("in_band")),
    "time_above": Measure("time above 95 % KV", "share", "low", _held("time_above")),
    "preemptions": Measure("preemptions", "", "low", _held("preemptions")),
    "shed_share": Measure("shed", "share", "low", _held("shed_share")),
    "ok_rate": Measure("ok rate", "/s", "high", _of(lambda summary: summary["rates"]["ok"], "value")),
    "ttft_p99": Measure("ttft p99", "s", "low", _of(lambda summary: summary["latency"]["ttft"], "p99")),
    "response_ttft_p99": Measure(
        "response_ttft p99", "s", "low", _of(lambda summary: summary["latency"]["response_ttft"], "p99")
    ),
    "stale": Measure("held still, stale", "", "", _told("stale")),
    "fallbacks": Measure("fell back", "", "", _told("fallbacks")),
}
"""What laws are compared by, in the order of the table."""
