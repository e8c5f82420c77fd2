"""A run directory as one dict of strict JSON: every number with its n, and null with a reason where there is none."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvbench import __version__, units
from kvbench.core import Record, Seconds
from kvbench.evidence import Evidence
from kvbench.report import (
    accounting,
    budgets,
    cache,
    control,
    devices,
    energy,
    first_uses,
    latency,
    notes,
    outcome,
    server,
    tokens,
)
from kvbench.report.accesses import accesses
from kvbench.report.baseline import baseline
from kvbench.report.captures import captures, cuts
from kvbench.report.changes import changes
from kvbench.report.features import features
from kvbench.report.files import RunFiles
from kvbench.report.intervals import describe
from kvbench.report.latency import Cohort
from kvbench.report.levels import levels
from kvbench.report.machine import machine
from kvbench.report.phases import Headline, Phase, headline, phases
from kvbench.report.snapshots import snapshots
from kvbench.report.telemetry import telemetry
from kvbench.report.watched import watched
from kvbench.stop import Rule
from kvbench.verdict import judge

BRIEF = ("ttft", "response_ttft", "e2e", "tpot")  # latencies shown per class and per phase


def summarise(files: RunFiles) -> dict[str, Any]:
    """Everything the report says. Raises AccountingError where requests contradict each other."""
    found = phases(files)
    apart = first_uses.first_uses(files)
    head = headline(found, apart, cuts(files))
    seed = int(files.manifest.get("seed") or 0)
    cohort, every = Cohort(head.records), Cohort(files.records)
    arrivals, rates = tokens.Arrivals(files.records), tokens.Rates(files.records)
    base, cached = baseline(files, found), accesses(files)
    summary: dict[str, Any] = {
        "kvbench": __version__,
        "run": _run(files),
        "stop": outcome.stop(files, found),
        "accounting": accounting.account(files, found),
        "self_check": accounting.self_check(files.records),
        "headline": _headline(head),
        "outcomes": outcomes(head.records),
        "failures": accounting.failures(files.records),
        "rates": rates.without(head.cuts).within(*_span(head), _requested(found), seed),
        "latency": latency.table(cohort, seed),
        "goodput": latency.goodput(cohort, _slos(files), head.seconds, seed),
        "streaming": latency.streaming(cohort),
        "pacing": latency.pacing(files.records) | _gate(files),
        "tokens": _tokens(files, head, arrivals, seed),
        "engine": cache.engine(files.samples, head.start, head.end),
        **machine(files.samples, head.start, head.end, files.manifest.get("target") or {}),
        "told": cache.told(head.records),
        "server": server.server(files),
        "cache": cached,
        "energy": _energy(files, head, arrivals, rates, base),
        "devices": {},
        "harm": notes.harm(files),
        "telemetry": telemetry(files),
        "captures": captures(files, found, head),
        "first_uses": first_uses.table(files, apart, seed),
        "features": features(head.records, cached),
        "classes": _classes(cohort, files, seed),
        "phases": [_phase(phase, every, rates, arrivals) for phase in found],
        "baseline": base,
        "levels": levels(files, found, rates),
        "watch": watched(files),
        "changes": changes(files, found),
        "snapshots": snapshots(files),
        "target": _target(files),
        "tokenizer": _tokenizer(files),
        "host": files.manifest.get("host") or {},
    }
    server.name(files, summary["engine"])
    summary["devices"] = devices.devices(files.samples, head.start, head.end, summary["engine"])
    summary["control"] = control.control(files, found, head, summary, None)
    summary["verdict"] = judge(_evidence(files, every, len(head.records), summary["latency"]["ttft"]["p50"]))
    summary["budgets"] = budgets.evaluate(files.scenario.get("budget") or {}, summary)
    summary["stop_rules"] = _rules(files)
    summary["rates"]["requested"]["note"] = _requested_note(found, head)
    code, why = outcome.exit_code(summary)
    summary["exit"] = {"code": code, "reason": why}
    summary["warnings"] = notes.warnings(summary, files)
    summary["next"] = notes.next_steps(summary)
    return dict(strict(summary))


def strict(value: Any) -> Any:
    """`value` as strict JSON takes it: a number that is not finite becomes null, a key text, a NumPy number a plain one."""
    if isinstance(value, Mapping):
        return {str(key): strict(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def outcomes(records: list[Record]) -> dict[str, Any]:
    """Counts and shares of a cohort: finished = ok + failed + timeout + rejected."""
    row = accounting.tally(records)
    finished = row["ok"] + row["failed"] + row["timeout"] + row["rejected"]
    came = finished + row["shed"] + row["dropped"]
    bad = finished - row["ok"]
    return row | {
        "finished": finished,
        "error_rate": bad / finished if finished else None,
        "success_rate": row["ok"] / finished if finished else None,
        "rejection_rate": row["rejected"] / finished if finished else None,
        "shed_rate": row["shed"] / came if came else None,
        "drop_rate": row["dropped"] / came if came else None,
        "reason": None if finished else "no request finished",
    }


def _run(files: RunFiles) -> dict[str, Any]:
    kept = ("name", "started", "clock", "seed", "nonce", "argv", "kvbench")
    row = {name: files.manifest.get(name) for name in kept}
    row["recorded_by"] = row.pop("kvbench")
    row["directory"] = str(files.directory)
    row["partial"] = files.last("run_end") is None or files.last("signal") is not None
    row["missing_files"], row["torn_lines"], row["damaged_lines"] = files.missing, files.torn, files.damaged
    return row


def _headline(head: Headline) -> dict[str, Any]:
    where = {"start": head.start, "end": head.end, "seconds": head.seconds}
    return {"cohort": head.cohort, "n": len(head.records), "interval": "steady, as long as it truly ran", **where}


def _span(head: Headline) -> tuple[Seconds, Seconds]:
    """The headline's interval on the axis without its cuts."""
    return head.cuts.at(head.start), head.cuts.at(head.end)


def _requested(found: list[Phase]) -> float | None:
    """Requests/s that the plan asked of steady, where it says how many it expects."""
    steady = [phase for phase in found if phase.kind == "steady"]
    counts = [(phase.planned.get("expected"), phase.planned.get("seconds")) for phase in steady]
    if not counts or any(count is None or not seconds for count, seconds in counts):
        return None
    return float(sum(count or 0 for count, _ in counts) / sum(seconds or 0 for _, seconds in counts))


def _requested_note(found: list[Phase], head: Headline) -> str | None:
    """What keeps the requested rate from being comparable with the others."""
    if any(record.turn for record in head.records):
        return "conversations begun; each turn is a request"
    planned = sum(phase.planned.get("seconds") or 0 for phase in found if phase.kind == "steady")
    return f"over all {units.duration(planned)} planned" if planned - (head.end - head.start) > 1 else None


def _slos(files: RunFiles) -> dict[str, dict[str, Seconds]]:
    """The limits of every class: the workload's, and those that only epochs of steady have."""
    steady = (files.scenario.get("phases") or {}).get("steady") or {}
    parts = [files.scenario.get("workload") or {}, *(steady.get("epochs") or ())]
    classes = {name: spec for part in parts for name, spec in (part.get("classes") or {}).items()}
    return {name: (spec or {}).get("slo") or {} for name, spec in classes.items()}


def _tokens(files: RunFiles, head: Headline, arrivals: tokens.Arrivals, seed: int) -> dict[str, Any]:
    return {
        "by_source": tokens.sources(head.records),
        "prompt": tokens.asked(head.records, "n_in", "asked_in"),
        "output": tokens.asked(head.records, "n_out", "asked_out"),
        "output_rate": arrivals.without(head.cuts).throughput(*_span(head), seed),
        "input_rate": tokens.input_throughput(files.records, head.start, head.end, head.cuts),
        "of_failed": sum(r.n_out or len(r.token_ns) for r in head.records if r.outcome != "ok"),
    }


def _energy(files: RunFiles, head: Headline, arrivals: tokens.Arrivals, rates: tokens.Rates, base: Any) -> dict[str, Any]:
    came = arrivals.throughput(head.start, head.end, 0)["n"]
    ok = rates.within(head.start, head.end, None, 0)["ok"]["n"]
    target = files.manifest.get("target") or {}
    idle = (
        target.get("idle_power") if target.get("kind") == "sim" else ((base or {}).get("power") or {}).get("idle", {}).get("mean")
    )
    return energy.energy(files.samples, head.start, head.end, came, ok, target, idle)


def _brief(cohort: Cohort) -> dict[str, Any]:
    """A row of statistics without intervals."""
    row: dict[str, Any] = {}
    for name in BRIEF:
        found = describe(cohort.values(name))
        row[name] = {key: found.get(key) for key in ("n", "mean", "p50", "p99", "max", "supported", "reason")}
    return row


def _classes(cohort: Cohort, files: RunFiles, seed: int) -> dict[str, Any]:
    slos = _slos(files)
    found = {}
    for name in sorted({record.cls for record in cohort.records}):
        part = cohort.only([record.cls == name for record in cohort.records])
        good = latency.goodput(part, {name: slos.get(name, {})}, 0.0, seed)
        found[name] = {"outcomes": outcomes(list(part.records)), "latency": _brief(part), "goodput": good}
    return found


def _phase(phase: Phase, every: Cohort, rates: tokens.Rates, arrivals: tokens.Arrivals) -> dict[str, Any]:
    """One phase or epoch. Its requests are those due in it; its rates count events at their own time, over its true length."""
    part = every.only([record.phase == phase.name for record in every.records])
    return {
        "name": phase.name,
        "kind": phase.kind,
        "start": phase.start,
        "end": phase.end,
        "seconds": phase.seconds,
        "reason": phase.reason,
        "outcomes": outcomes(list(part.records)),
        "rates": rates.within(phase.start, phase.end, None, 0),
        "output_rate": arrivals.throughput(phase.start, phase.end, 0),
        "latency": _brief(part),
        "pacing": latency.pacing(part.records),
    }


def _gate(files: RunFiles) -> dict[str, Any]:
    """What the gate counted: requests that its bucket held back since this tool was late, and how long servers closed it."""
    end = files.last("run_end")
    return {name: end.data.get(name) if end is not None else None for name in ("postponed", "holds", "closed")}


def _target(files: RunFiles) -> dict[str, Any]:
    """The facts that the manifest has; of a cache that was emptied also what its counters said of the first requests."""
    facts, check = dict(files.manifest.get("target") or {}), files.last("reset_check")
    if facts.get("reset"):
        facts["reset"] = facts["reset"] | {"check": check.data | {"t": check.t} if check is not None else None}
    return facts


def _tokenizer(files: RunFiles) -> dict[str, Any]:
    found = files.manifest.get("tokenizer") or {}
    return dict(found) or {"kind": None, "reason": "the manifest names none"}


def _rules(files: RunFiles) -> list[dict[str, Any]]:
    """Every stop rule; of one that found no value at some checks the run's end says at how many, of how many, and why."""
    end = files.last("run_end")
    told = (end.data.get("unread") or {}) if end is not None else {}
    rules = [str(Rule.model_validate(rule)) for rule in files.scenario.get("stop") or []]
    rows = [(rule, *told.get(rule, (0, None, None))) for rule in rules]
    return [{"rule": rule, "unread": unread, "checks": checks, "why": why} for rule, unread, checks, why in rows]


def _evidence(files: RunFiles, every: Cohort, steady: int, ttft_p50: Seconds | None) -> Evidence:
    return Evidence(
        records=files.records,
        samples=files.samples,
        events=files.events,
        manifest=files.manifest,
        steady=steady,
        lags=every.values("lag"),
        connects=every.values("connect"),
        ttft_p50=ttft_p50,
    )
