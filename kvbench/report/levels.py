"""The load level over time, rung by rung: how long each was held, what it offered, and how a stress phase came to its end.

A rung is a stretch of one phase at one level. It was *held* when the level went up from it, or when it was the last of a phase
that ended in the ordinary way; it was not when the level fell, or a stop rule or a signal or the end of the files cut it short.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.core import Seconds
from kvbench.report import cache
from kvbench.report.files import RunFiles
from kvbench.report.phases import Phase
from kvbench.report.tokens import Rates

LEVELLED = ("steady", "stress")
CUT = ("stop", "signal")  # events that end a phase before its own end


@dataclass
class Rung:
    """why: what brought the level here. ended: what ended the rung, None where the files end first."""

    phase: Phase
    level: float
    start: Seconds
    end: Seconds
    why: str
    ended: str | None = None
    held: bool = False


def levels(files: RunFiles, found: Sequence[Phase], rates: Rates) -> dict[str, Any]:
    """Every rung, and what came of stress. `reason` where the level was 1 all the time."""
    climbed = rungs(files, found)
    stress = [rung for rung in climbed if rung.phase.kind == "stress"]
    moved = bool(stress or files.all("level"))
    return {
        "rungs": [_row(rung, files, rates) for rung in climbed] if moved else [],
        "last": climbed[-1].level if climbed else None,
        "stress": _stress(stress, files, rates) if stress else {"held": None, "reason": "no stress phase ran"},
        "reason": None if moved else "the level was 1 all the time",
    }


def rungs(files: RunFiles, found: Sequence[Phase]) -> list[Rung]:
    """In order of time; the level that one phase leaves is where the next begins."""
    level, climbed = 1.0, []
    for phase in (each for each in found if each.kind in LEVELLED):
        rung = Rung(phase, level, phase.start, phase.end, "the phase began")
        for event in files.all("level"):
            if event.data["phase"] != phase.name:
                continue
            level, why = event.data["level"], event.data["why"]
            rung.end, rung.ended, rung.held = event.t, why, level > rung.level
            climbed.append(rung)
            rung = Rung(phase, level, event.t, phase.end, why)
        rung.ended, rung.held = phase.reason, phase.reason is not None and not _cut_short(files, phase)
        climbed.append(rung)
    return climbed


def _cut_short(files: RunFiles, phase: Phase) -> bool:
    """A rule, the watch or a signal ended it; the events of both stand before the phase's end."""
    return any(event.kind in CUT and phase.start <= event.t <= phase.end for event in files.events)


def _row(rung: Rung, files: RunFiles, rates: Rates) -> dict[str, Any]:
    usage = cache.gauge(files.samples, "kv_usage", rung.start, rung.end)
    return {
        "phase": rung.phase.name, "kind": rung.phase.kind, "level": rung.level, "start": rung.start, "end": rung.end,
        "seconds": rung.end - rung.start, "why": rung.why, "ended": rung.ended, "held": rung.held,
        **_rates(rung, rates), "kv_usage": {name: usage.get(name) for name in ("mean", "max", "n", "reason")},
    }  # fmt: skip


def _rates(rung: Rung, rates: Rates) -> dict[str, Any]:
    """Requests/s due and ended ok while the rung lasted; null where it had no length."""
    seconds = rung.end - rung.start
    counts = {name: rates.count(name, rung.start, rung.end) for name in ("offered", "ok")}
    return {f"{name}_rate": n / seconds if seconds > 0 else None for name, n in counts.items()} | {"n": counts}


def _stress(stress: Sequence[Rung], files: RunFiles, rates: Rates) -> dict[str, Any]:
    """The highest level that was held, with its rates; the highest that was tried; how the phase ended; what failed."""
    held = [rung for rung in stress if rung.held]
    best = max(held, key=lambda rung: (round(rung.level, 9), rung.end - rung.start), default=None)  # of equal ones the longest
    last = stress[-1]
    why = last.ended or "the files end before it did"
    row = {"highest": max(rung.level for rung in stress), "ended_at": last.level, "ended": why}
    row["failed"] = _failed([rung for rung in stress if not rung.held and (best is None or rung.level > best.level)], files)
    if best is None:
        return row | {"held": None, "reason": f"no level was held: level {last.level:.4g} ended by {why}"}
    return row | {"held": best.level, "seconds": best.end - best.start, **_rates(best, rates), "reason": None}


def _failed(above: Sequence[Rung], files: RunFiles) -> dict[str, Any] | None:
    """What the server said of itself at the last level that was not held, above every one that was; None where there is none."""
    if not above:
        return None
    engine = cache.engine(files.samples, above[-1].start, above[-1].end)
    return {"level": above[-1].level} | {name: engine[name] for name in ("kv_usage", "waiting", "preemptions_total")}
