"""Can this run be trusted? One table of checks: how each is measured, where DEGRADED and INVALID begin, what to do about it.

Shedding by a law is a result, not a defect, and appears nowhere here. A scenario overrides a threshold with
`verdict: {lag_p99: {degraded: 10ms, invalid: null}}` (null: this check never gives that level).
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvbench import units
from kvbench.core import Seconds
from kvbench.counted import count_mismatch, recompute_in_hits, server_requests
from kvbench.evidence import (
    Evidence,
    Measure,
    client_cpu,
    clock_steps,
    dropped_share,
    loop_lag_p99,
    p99,
    prefix_hits,
    resets_unconfirmed,
    sent_share,
    steady_requests,
    unanswered,
    workers_lost,
)
from kvbench.losses import captured, collector_gap, collectors_lost, gpus_lost, messages_lost, required_lost, sink_loss

Limit = float | Callable[[Evidence], float] | None


@dataclass(frozen=True)
class Check:
    """One row of the table. A value on the `worse` side of a limit gives that level; both limits None: noted, never judged."""

    title: str
    unit: Literal["s", "share", "count"]
    measure: Callable[[Evidence], Measure]
    worse: Literal[">", ">=", "<"]
    degraded: Limit
    invalid: Limit
    advice: str
    embedded: str = ""  # the advice where the target is the embedded engine, if it is another


def judge(evidence: Evidence) -> dict[str, Any]:
    """The verdict, its reasons (each with number and advice), every check with its outcome, and what was not measured."""
    rows = [_row(name, check, evidence) for name, check in checks(evidence.scenario.get("verdict") or {}).items()]
    reasons = [row for row in rows if row["level"] in ("INVALID", "DEGRADED")]
    reasons.sort(key=lambda row: row["level"] != "INVALID")
    verdict = reasons[0]["level"] if reasons else "VALID"
    missing = [{"check": row["check"], "title": row["title"], "reason": row["reason"]} for row in rows if row["value"] is None]
    return {"verdict": verdict, "reasons": reasons, "checks": rows, "not_measured": missing}


def checks(overrides: Mapping[str, Any]) -> dict[str, Check]:
    """The table with a scenario's thresholds in it. Raises ValueError for an unknown check, level or unit."""
    table = dict(CHECKS)
    for name, levels in overrides.items():
        if name not in table:
            near = difflib.get_close_matches(name, table, 1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"verdict: there is no check {name!r}{hint} (known: {', '.join(table)})")
        unknown = set(levels) - {"degraded", "invalid"}
        if unknown:
            raise ValueError(f"verdict.{name}: unknown key {sorted(unknown)[0]!r} (allowed: degraded, invalid)")
        check = table[name]
        limits = {"degraded": check.degraded, "invalid": check.invalid}
        limits |= {level: _limit(name, check, value) for level, value in levels.items()}
        table[name] = replace(check, degraded=limits["degraded"], invalid=limits["invalid"])
    return table


def _limit(name: str, check: Check, value: Any) -> float | None:
    """A threshold as a scenario writes it, or as a manifest repeats it (a number in base units)."""
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    if check.unit == "s":
        return units.parse(str(value), units.DURATIONS, "a duration", "10ms")
    if check.unit == "share":
        return units.parse(str(value), units.SHARES, "a share", "99%")
    raise ValueError(f"verdict.{name}: {value!r} is not a count")


def _row(name: str, check: Check, evidence: Evidence) -> dict[str, Any]:
    found = check.measure(evidence)
    limits = {level: limit(evidence) if callable(limit) else limit for level, limit in _levels(check)}
    row: dict[str, Any] = {
        "check": name, "title": check.title, "unit": check.unit, "value": found.value, "n": found.n,
        "reason": found.reason or None, "worse": check.worse, "degraded": limits["DEGRADED"], "invalid": limits["INVALID"],
        "level": None, "text": None, "advice": None,
    }  # fmt: skip
    if found.value is None:
        return row
    crossed = [level for level in ("INVALID", "DEGRADED") if _worse(found.value, check.worse, limits[level])]
    noted = check.degraded is None and check.invalid is None
    row["level"] = crossed[0] if crossed else "NOTED" if noted else "OK"
    beyond = {">": "above", ">=": "at or above", "<": "below"}[check.worse]
    limit = amount(limits[crossed[0]], check.unit) if crossed else ""
    just = "just " if limit == amount(found.value, check.unit) and found.value != limits[crossed[0]] else ""
    limit = f", {just}{beyond} {limit}" if crossed else ""
    beside = f"; {found.note}" if found.note else ""
    row["text"] = f"{check.title}: {amount(found.value, check.unit)}{limit}{beside}"
    embedded = (evidence.scenario.get("target") or {}).get("kind") == "sim" and check.embedded
    row["advice"] = (embedded or check.advice) if crossed else None
    return row


def _levels(check: Check) -> tuple[tuple[str, Limit], ...]:
    return ("DEGRADED", check.degraded), ("INVALID", check.invalid)


def _worse(value: float, side: str, limit: float | None) -> bool:
    if limit is None:
        return False
    return value < limit if side == "<" else value >= limit if side == ">=" else value > limit


def amount(value: float | None, unit: str) -> str:
    """A value in its unit, for people."""
    if value is None:
        return "-"
    if unit in ("s", "share"):
        return units.duration(value) if unit == "s" else units.share(value)
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.3g}"


def _lag_limit(floor: Seconds, ceiling: Seconds, part: float) -> Callable[[Evidence], float]:
    """Lag matters as far as it shows beside TTFT: a share of its median, within bounds."""
    return lambda evidence: min(ceiling, max(floor, part * (evidence.ttft_p50 or 0.0)))


CHECKS: dict[str, Check] = {
    "sent_share": Check(
        "sent / released, worst 10 s", "share", sent_share, "<", 0.99, 0.95,
        "the client could not send what was due: lower the rate, shorten prompts, or load from more machines"),
    "lag_p99": Check(
        "send lag p99", "s", lambda evidence: p99(evidence.lags), ">",
        _lag_limit(0.5e-3, 5e-3, 0.05), _lag_limit(5e-3, 50e-3, 0.25),
        "requests left late: give the client a core of its own, or lower the rate"),
    "loop_lag_p99": Check(
        "event-loop lag p99", "s", loop_lag_p99, ">", 10e-3, 100e-3,
        "the client was stalled, so its latencies are too long: free its CPU, or lower the rate"),
    "client_cpu": Check(
        "client CPU, busiest 10 s", "share", client_cpu, ">", 0.80, 0.95,
        "the client is the bottleneck: lower the rate or load from more machines"),
    "connect_p99": Check(
        "wait for a connection p99", "s", lambda evidence: p99(evidence.connects), ">", 5e-3, 50e-3,
        "connections are not kept open or the server accepts slowly: check keep-alive, the backlog and the network"),
    "dropped_share": Check(
        "dropped by the tool", "share", dropped_share, ">", 0.0, 0.01,
        "the tool gave up on due requests: lower the rate, or raise its limits (kvbench doctor)"),
    "steady_requests": Check(
        "requests in steady", "count", steady_requests, "<", 1000, 30,
        "run longer: tail percentiles need 1,000 requests (p99) or more"),
    "unanswered": Check(
        "sent in steady, without an end when the run ended", "share", unanswered, ">", 0.01, 0.10,
        "these are missing from every share of errors: lengthen drain where the oldest is younger than a slow answer takes; "
        "older, and the server hangs"),
    "prefix_hits": Check(
        "prefix hits of first requests", "share", prefix_hits, ">=", 0.01, 0.10,
        "the cache was not cold: empty it before the run (target.reset), restart the server, or keep the nonce on",
        "the engine starts empty, so these found what this run had put there, or files of an earlier one: keep the nonce on, and "
        "give target.tiers.ssd.real a directory of its own"),
    "resets_unconfirmed": Check(
        "cache resets not confirmed", "count", resets_unconfirmed, ">", 0, None,
        "nothing shows that the cache was emptied: ask for cached tokens in the answers, or restart the server"),
    "server_requests": Check(
        "server's requests beyond ours", "share", server_requests, ">", 0.01, 0.10,
        "someone else loads this server: take it out of rotation"),
    "collector_gap": Check(
        "longest gap of a collector, in periods", "count", collector_gap, ">", 3, None,
        "readings are missing there: free the machine it runs on, or read less often"),
    "collectors_lost": Check(
        "collectors lost", "count", collectors_lost, ">", 0, None,
        "what it would have told is missing: mend it, or take it out of the scenario"),
    "required_lost": Check(
        "required collectors lost", "count", required_lost, ">", None, 0,
        "the scenario says that the run is worth nothing without it: mend it and run again"),
    "gpus_lost": Check(
        "GPUs lost", "count", gpus_lost, ">", 0, None,
        "dmesg says why (Xid); what they served was served by fewer, and power and energy lack them from then on"),
    "messages_lost": Check(
        "messages that no collector got", "count", messages_lost, ">", 0, None,
        "what they told is missing: give `replay` and let the server keep more (kv_events), or the agent (--keep)"),
    "sink_loss": Check(
        "points that no database has", "share", sink_loss, ">", 0.0, None,
        "kvbench export DIR --influx URL --resume delivers them from the run directory"),
    "captured": Check("windows of a profiler", "count", captured, ">", None, None, ""),
    "count_mismatch": Check(
        "client total against server counter", "share", count_mismatch, ">", 0.02, 0.20,
        "one of the two counts is wrong: compare with the server's log"),
    "workers_lost": Check(
        "load workers lost", "count", workers_lost, ">", None, 0,
        "the offered load was not what was asked: run again"),
    "clock_steps": Check("wall-clock steps", "count", clock_steps, ">", None, None, ""),
    "recompute_in_hits": Check(
        "recompute inside the server's hit rate", "count", recompute_in_hits, ">", None, None, ""),
}  # fmt: skip
