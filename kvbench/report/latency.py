"""Latencies, pacing and goodput of a cohort. Formulas are metrics/request.py's; latencies are of requests that ended ok."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.core import Nanos, Record, Seconds
from kvbench.metrics import request
from kvbench.metrics.names import QUANTILES
from kvbench.report.intervals import Floats, describe, describe_gaps, nothing, ratio_interval

COALESCED = 1.5  # token-bearing events per network read above which gaps between events are the network's, not the server's
SECOND: Nanos = 10**9
LATE: Nanos = 20_000_000  # after its release, from which a send is part of a catch-up
CENSORED = ("ttft", "response_ttft", "ttfc", "e2e", "response")  # what a request without an end says something about


class Cohort:
    """Requests in order of due time, with every per-request number as a column (seconds, NaN where not measured)."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.columns = request.columns(records)
        self.ok: NDArray[np.bool_] = np.array([r.outcome == "ok" for r in records], dtype=bool)

    def values(self, name: str, mask: NDArray[np.bool_] | None = None) -> Floats:
        """What was measured of one metric, in its own population: ended ok, or every request for numbers about this tool."""
        column = self.columns[name]
        chosen = ~np.isnan(column)
        if request.FORMULAS[name].server:
            chosen &= self.ok
        return np.asarray(column[chosen if mask is None else chosen & mask])

    def only(self, members: Sequence[bool]) -> "Cohort":
        """Some of the requests, their columns with them."""
        part = object.__new__(Cohort)
        chosen = np.array(members, dtype=bool)
        part.records = [r for r, member in zip(self.records, members, strict=True) if member]
        part.columns = {name: column[chosen] for name, column in self.columns.items()}
        part.ok = self.ok[chosen]
        return part


def table(cohort: Cohort, seed: int) -> dict[str, Any]:
    """Every latency metric with its statistics; where requests timed out or were cut off by the end
    of the run, beside it the quantiles that count them too."""
    found: dict[str, Any] = {}
    endless = any(unanswered(record) for record in cohort.records)
    for name, formula in request.FORMULAS.items():
        values = cohort.values(name)
        population = "ended ok" if formula.server else "every request that got so far"
        row = describe(values, "s", seed) if len(values) else nothing(_why_none(cohort, name))
        found[name] = {**row, "population": population}
        if name in CENSORED and endless:
            found[name]["with_timeouts"] = _with_timeouts(cohort, name)
    found |= gaps(cohort, seed)
    n = len(cohort.values("tpot"))
    rough = sum(request.approximate(r) for r, ok in zip(cohort.records, cohort.ok, strict=True) if ok and len(r.token_ns) > 1)
    found["tpot"]["approximate"] = min(rough, n)
    return found


def _why_none(cohort: Cohort, name: str) -> str:
    if not request.FORMULAS[name].server:
        return "nothing was sent"
    if not cohort.ok.any():
        return "no request ended ok"
    streamed = any(record.streamed for record, ok in zip(cohort.records, cohort.ok, strict=True) if ok)
    return "no request had the tokens for it" if streamed else "not streaming"


def unanswered(record: Record) -> bool:
    """Sent, and given up: by a timeout, or because the run ended."""
    return record.outcome == "timeout" or (record.outcome == "cancelled" and record.sent_ns is not None)


def _with_timeouts(cohort: Cohort, name: str) -> dict[str, Any]:
    """Quantiles over ended ok, timed out and cut off. One that timed out took at least as long as we waited, and sorts last. One
    that the end of the run cut off is right-censored at its age: the last few of a healthy run say little, a crowd that waits
    longer than any answer took sorts last too."""
    formula = request.FORMULAS[name]
    column = cohort.columns[name]
    known = [float(column[k]) for k in np.flatnonzero(cohort.ok & ~np.isnan(column))]
    ages: dict[str, list[Seconds]] = {"timeout": [], "cancelled": []}
    for k, record in enumerate(cohort.records):
        if not unanswered(record):
            continue
        if formula.at != "done" and not np.isnan(column[k]):
            known.append(float(column[k]))  # its first token came; what is missing is the rest
            continue
        since = record.due_ns if formula.since == "due" else record.sent_ns or record.release_ns or record.due_ns
        ages[record.outcome].append(((record.end_ns or since) - since) / 1e9)
    timeouts, cut = len(ages["timeout"]), len(ages["cancelled"])
    values, reached = _reached(np.array(known), np.array(ages["cancelled"]), timeouts)
    row: dict[str, Any] = {"n": len(known) + timeouts + cut, "timeouts": timeouts, "cancelled": cut, "at_least": []}
    for label, q in QUANTILES.items():
        at = int(np.searchsorted(reached, q - 1e-10))
        row[label] = float(values[at]) if at < len(values) else max([*known, *ages["timeout"], *ages["cancelled"]])
        if at == len(values):
            row["at_least"].append(label)
    return row


def _reached(known: Floats, ages: Floats, beyond: int) -> tuple[Floats, Floats]:
    """Kaplan-Meier: (values in order, share of all requests at or below each). `ages` are right-censored there, `beyond` more lie
    above every value. Without ages the share of the k-th of n is k / n."""
    values = np.sort(known)
    over = len(ages) - np.searchsorted(np.sort(ages), values)  # still waiting at that value
    at_risk = np.arange(len(values), 0, -1) + over + beyond
    return values, np.asarray(1 - np.cumprod(1 - 1 / at_risk), np.float64)


def gaps(cohort: Cohort, seed: int) -> dict[str, Any]:
    """icl and itl: many values to a request."""
    chunks: dict[str, list[Floats]] = {"icl": [], "itl": []}
    for record, ok in zip(cohort.records, cohort.ok, strict=True):
        if not ok:
            continue
        icl = np.array(request.icl(record))
        if len(icl):
            chunks["icl"].append(icl)
        if record.token_n is None and not request.approximate(record):
            itl: Floats = icl  # each event is one token: the same gaps
        else:
            pairs = np.array(request.itl(record) or np.zeros((0, 2)))
            itl = np.repeat(pairs[:, 0], pairs[:, 1].astype(int)) if len(pairs) else np.zeros(0)
        if len(itl):
            chunks["itl"].append(itl)
    reason = {"icl": _why_none(cohort, "tpot"), "itl": "events are not tokens here, and there is no usage per chunk: see icl"}
    found = {}
    for name, parts in chunks.items():
        if not parts:
            found[name] = nothing(reason[name])
        else:
            sums, counts = [float(part.sum()) for part in parts], [len(part) for part in parts]
            found[name] = describe_gaps(np.concatenate(parts), sums, counts, "s", seed)
        found[name]["population"] = "gaps of requests that ended ok"
    return found


def streaming(cohort: Cohort) -> dict[str, Any]:
    """What the stream's own form says about how far token times can be believed."""
    ok = [record for record, ended in zip(cohort.records, cohort.ok, strict=True) if ended]
    carried = [record for record in ok if record.reads]
    events, reads = sum(len(r.token_ns) for r in carried), sum(r.reads for r in carried)
    per_read = events / reads if reads else None
    stall, where = 0.0, None
    for record in cohort.records:
        longest = max(request.icl(record), default=0.0)
        if longest > stall:
            stall, where = longest, record.id
    return {
        "events_per_read": per_read,
        "events_per_read_reason": None if reads else "no network reads were counted",
        "coalesced": per_read is not None and per_read > COALESCED,
        "not_streaming": sum(not r.streamed for r in ok),
        "no_visible_output": sum(r.streamed and r.first_ns is None for r in ok),
        "malformed": sum(r.malformed for r in cohort.records),
        "ignored": sum(r.ignored for r in cohort.records),
        "replaced_utf8": sum(r.replaced for r in cohort.records),
        "longest_stall": {"value": stall if where is not None else None, "request": where, "unit": "s"},
    }


def goodput(cohort: Cohort, slos: Mapping[str, Mapping[str, Seconds]], seconds: Seconds, seed: int) -> dict[str, Any]:
    """Ended ok within every limit of its class / offered. Shed, dropped and failed requests stand in the denominator."""
    limits = {name: {k: v for k, v in (slo or {}).items() if v is not None} for name, slo in slos.items()}
    if not any(limits.values()):
        return {"value": None, "reason": "no class states an slo", "n": len(cohort.records), "slo": {}}
    if not cohort.records:
        return {"value": None, "reason": "nothing was offered", "n": 0, "slo": limits}
    good = np.array([request.meets(record, limits.get(record.cls, {})) for record in cohort.records], dtype=float)
    return {
        "value": float(good.mean()),
        "n": len(good),
        "good": int(good.sum()),
        "interval": ratio_interval(good, np.ones(len(good)), seed),
        "rate": float(good.sum()) / seconds if seconds > 0 else None,
        "slo": limits,
    }


def pacing(records: Sequence[Record]) -> dict[str, Any]:
    """How sends fell: the most within any 100 ms, and within any second beside the most that were due then; how many waited at
    the gate, left late by this tool's doing (a catch-up), or met a server that asked for a pause."""
    sent = np.sort(np.array([r.sent_ns for r in records if r.sent_ns is not None], dtype=np.int64))
    due = np.sort(np.array([r.due_ns for r in records], dtype=np.int64))
    lags = [r.sent_ns - r.release_ns - r.connect_ns for r in records if r.sent_ns is not None and r.release_ns is not None]
    pauses = [r.retry_after for r in records if r.retry_after is not None]
    return {
        "max_sends_per_100ms": _most(sent, SECOND // 10),
        "max_sends_per_second": _most(sent, SECOND),
        "max_due_per_second": _most(due, SECOND),
        "blocked_at_gate": sum((r.end_ns or r.due_ns if r.release_ns is None else r.release_ns) > r.due_ns for r in records),
        "late_sends": sum(lag > LATE for lag in lags),
        "longest_lag": max(lags, default=0) / SECOND,
        "asked_to_wait": len(pauses),
        "longest_wait_asked": max(pauses, default=None),
        "throttled_attempts": sum(r.throttled for r in records),
        "retried": sum(r.attempts > 1 for r in records),
        "stale_connections": sum(r.stale for r in records),
    }


def _most(times: NDArray[np.int64], span: Nanos) -> int:
    """The most of the sorted `times` within any half-open span."""
    return int((np.searchsorted(times, times + span) - np.arange(len(times))).max()) if len(times) else 0
