"""Why a run ended, and the exit code that follows from all that is known of it."""

from collections.abc import Mapping
from typing import Any

from kvbench import units
from kvbench.report.files import RunFiles
from kvbench.report.phases import Phase

SIGNALS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 143}
SPOKE = {"rule": "a stop rule", "watch": "the watch"}  # who ends a phase before its own end
GUARDED = ("baseline", "warmup", "steady")  # a stop rule that ends one of these is a failure; ending stress is its purpose


def stop(files: RunFiles, found: list[Phase]) -> dict[str, Any]:
    """What ended the run: signal, rule, error, killed (nothing on record says), or the bound that steady or stress reached.

    purpose: how a stress phase found its end, which is what it is for; None where there was none, or it did not come that far.
    """
    end, rule, signal = files.last("run_end"), files.last("stop"), files.last("signal")
    steady = [phase for phase in found if phase.kind == "steady"]
    bounded = [phase for phase in found if phase.kind in ("steady", "stress")]
    row: dict[str, Any] = {
        "kind": "bound",
        "reason": (bounded[-1].reason if bounded else None) or "completed",
        "by": None,
        "rule": None,
        "phase": None,
        "phase_kind": None,
        "signal": None,
        "seconds": files.end,
        "last": bounded[-1].name if bounded else None,
        "last_seconds": bounded[-1].seconds if bounded else None,
        "steady_seconds": steady[-1].end - steady[0].start if steady else None,
        "purpose": None,
    }
    if end is not None and end.data.get("reason") == "internal error":
        row |= {"kind": "error", "reason": "internal error"}
    elif signal is not None:
        row |= {"kind": "signal", "reason": f"interrupted by {signal.data.get('signal')}", "signal": signal.data.get("signal")}
    elif rule is not None:
        row |= {name: rule.data.get(name) for name in ("rule", "reason", "phase", "phase_kind")}
        row |= {"kind": "rule", "by": rule.data.get("by", "rule")}
    elif end is None:
        row |= {"kind": "killed", "reason": "the files end without the end of the run: it was killed, or still goes on"}
    if row["kind"] in ("bound", "rule") and bounded and bounded[-1].kind == "stress":
        row["purpose"] = _purpose(row, _level(files))
    return row


def _purpose(row: dict[str, Any], level: float) -> str:
    """How stress ended. The level's own reason names it: once is enough."""
    if row["kind"] == "rule":
        by = "the watch: " if row["by"] == "watch" else ""
        return f"stress ended at level {level:.4g} by {by}{row['reason']}"
    named = row["reason"].startswith(f"level {level:.4g} ")
    return f"stress ended{'' if named else f' at level {level:.4g}'}: {row['reason']}"


def ended(stopped: Mapping[str, Any]) -> str:
    """What ended the run, as a reader would say it."""
    if stopped["kind"] == "rule":
        return f"{SPOKE[stopped['by']]} ended {stopped['phase']}: {stopped['reason']}"
    if stopped["kind"] == "bound" and stopped["reason"] in BOUNDS:
        return BOUNDS[stopped["reason"]].format(phase=stopped["last"], time=units.duration(stopped["last_seconds"]))
    return str(stopped["purpose"] or stopped["reason"])


BOUNDS = {
    "duration": "{phase} ran its {time}",
    "count": "{phase} offered all its requests",
    "tokens": "{phase} reached its tokens",
    "schedule ended": "{phase} came to the end of its arrivals",
}
"""What is said of the bounds that end a phase in the ordinary way."""


def _level(files: RunFiles) -> float:
    """The load level at the end of the run."""
    moved = files.last("level")
    return float(moved.data["level"]) if moved is not None else 1.0


def exit_code(summary: dict[str, Any]) -> tuple[int, str]:
    """(code, why) in the order of precedence: 130/143, 1, 6, 5, 4, 3, 0. Code 2 belongs to scenarios that never became a run."""
    stopped, outcomes, verdict = summary["stop"], summary["accounting"]["total"], summary["verdict"]
    if stopped["kind"] == "signal":
        return SIGNALS.get(str(stopped["signal"]), 130), str(stopped["reason"])
    if stopped["kind"] in ("error", "killed"):
        return 1, str(stopped["reason"])
    if not summary["self_check"]["ok"]:
        return 1, f"internal error: negative durations {summary['self_check']['negative_durations']}"
    if outcomes["unrecorded"]:
        return 1, f"internal error: {outcomes['unrecorded']} offered requests have no record"
    if outcomes["ok"] == 0:
        return 6, f"no request succeeded: {outcomes['offered']:,} offered, {outcomes['admitted']:,} admitted, 0 ok"
    if stopped["kind"] == "rule" and stopped["phase_kind"] in GUARDED:
        return 5, ended(stopped)
    if verdict["verdict"] == "INVALID":
        return 4, f"the run is invalid: {'; '.join(r['text'] for r in verdict['reasons'] if r['level'] == 'INVALID')}"
    failed = [budget for budget in summary["budgets"] if budget["status"] != "pass"]
    if failed:
        return 3, f"{len(failed)} of {len(summary['budgets'])} budgets not met: {'; '.join(b['text'] for b in failed)}"
    purpose = f"{stopped['purpose']}, which is its purpose; " if stopped["purpose"] else ""
    return 0, f"{purpose}the run is whole" + (" and every budget is met" if summary["budgets"] else "")
