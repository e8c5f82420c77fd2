"""What the verdict looks at and how each of its checks is measured. verdict.py holds the table with the thresholds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench import units
from kvbench.core import LEFT, Event, Record, Sample, Seconds

Floats = NDArray[np.float64]
SPAN: Seconds = 10.0  # shortest span of the sent/released and CPU checks
SPAN_RELEASES = 200
STEP: Seconds = 0.05  # of the wall clock within a second: slewing by NTP stays far below it
GRACE: Seconds = 1.0  # a send this long after the span's end still belongs to it


@dataclass(frozen=True)
class Evidence:
    """What the checks look at. lags and connects: seconds, of every request that was sent, as metrics/request.py defines them."""

    records: Sequence[Record]
    samples: Sequence[Sample]
    events: Sequence[Event]
    manifest: Mapping[str, Any]
    steady: int  # requests due in steady
    lags: Floats
    connects: Floats
    ttft_p50: Seconds | None

    @property
    def virtual(self) -> bool:
        return self.manifest.get("clock") == "virtual"

    @property
    def scenario(self) -> Mapping[str, Any]:
        return self.manifest.get("scenario") or {}


@dataclass(frozen=True)
class Measure:
    """A value with its n, or None with the reason."""

    value: float | None
    n: int = 0
    reason: str = ""
    note: str = ""  # what belongs beside the value in a text


def sent_share(evidence: Evidence) -> Measure:
    """Sent / released over the worst span of at least 10 s and 200 releases; a send within 1 s after its end counts.

    A request that never left because the server refused the connection, or because the run ended, is not the tool's debt.
    """
    pairs = sorted(
        (r.release_ns, r.sent_ns if r.sent_ns is not None else 2**62)
        for r in evidence.records
        if r.release_ns is not None and (r.sent_ns is not None or r.outcome == "dropped")
    )
    if not pairs:
        return Measure(None, 0, "nothing was released")
    released, sent = (np.array(column, np.float64) / 1e9 for column in zip(*pairs, strict=True))
    end = released[-1]
    worst: float | None = None
    for start in np.arange(math.floor(released[0]), math.floor(end) + 1.0):
        first = int(np.searchsorted(released, start))
        if first + SPAN_RELEASES > len(released):
            break
        stop = max(start + SPAN, math.floor(released[first + SPAN_RELEASES - 1]) + 1.0)
        if stop > math.ceil(end + 1e-9):
            break
        last = int(np.searchsorted(released, stop))
        ratio = float(np.count_nonzero(sent[first:last] < stop + GRACE) / (last - first))
        worst = ratio if worst is None else min(worst, ratio)
    if worst is None:
        return Measure(None, len(pairs), f"no span of {SPAN:g} s holds {SPAN_RELEASES} releases")
    return Measure(worst, len(pairs))


def p99(values: Floats) -> Measure:
    """p99, or of fewer than 1,000 values the highest quantile they support (n >= 10 / (1 - q)): one late send of fifty
    does not void a run."""
    n = len(values)
    if not n:
        return Measure(None, 0, "nothing was sent")
    return Measure(float(np.quantile(values, min(0.99, max(0.5, 1 - 10 / n)), method="inverted_cdf")), n)


def loop_lag_p99(evidence: Evidence) -> Measure:
    """p99 over the run's seconds of each second's own p99."""
    if evidence.virtual:
        return Measure(None, 0, "virtual time: the client cannot be late")
    lags = [value for _, value in _own(evidence, "loop_lag_p99")]
    if not lags:
        return Measure(None, 0, "the run recorded no loop lag")
    return Measure(float(np.quantile(lags, 0.99, method="inverted_cdf")), len(lags))


def client_cpu(evidence: Evidence) -> Measure:
    """The largest mean over 10 s of this process's CPU share of one core."""
    if evidence.virtual:
        return Measure(None, 0, "virtual time: the client's CPU bounds the wall time, not the load")
    readings = _own(evidence, "cpu")
    if not readings or readings[-1][0] - readings[0][0] < SPAN - 1:
        return Measure(None, len(readings), f"less than {SPAN:g} s of CPU readings")
    times, shares = (np.array(column) for column in zip(*readings, strict=True))
    ends = np.searchsorted(times, times + SPAN)
    total = np.concatenate([[0.0], np.cumsum(shares)])
    whole = times <= times[-1] - (SPAN - 1)
    starts = np.arange(len(times))[whole]
    return Measure(float(((total[ends[whole]] - total[starts]) / (ends[whole] - starts)).max()), len(readings))


def _own(evidence: Evidence, name: str) -> list[tuple[Seconds, float]]:
    """What the run said of itself, once a second."""
    return [(s.t, s.value) for s in evidence.samples if s.source == "kvbench" and s.name == name and s.value is not None]


def clock_steps(evidence: Evidence) -> Measure:
    """Seconds in which the wall clock moved against the run's own by more than STEP."""
    drift = [value for _, value in _own(evidence, "wall_drift")]
    if len(drift) < 2:
        return Measure(None, 0, "virtual time has no wall clock" if evidence.virtual else "the wall clock was not watched")
    return Measure(int(np.count_nonzero(np.abs(np.diff(drift)) > STEP)), len(drift))


def dropped_share(evidence: Evidence) -> Measure:
    n = len(evidence.records)
    return Measure(sum(r.outcome == "dropped" for r in evidence.records) / n, n) if n else Measure(None, 0, "nothing was offered")


def steady_requests(evidence: Evidence) -> Measure:
    return Measure(evidence.steady, evidence.steady)


def unanswered(evidence: Evidence) -> Measure:
    """Share of what was sent in steady that had no end when drain and the run were over; beside it the oldest one's wait."""
    if any(event.kind == "signal" for event in evidence.events):
        return Measure(None, 0, "a signal ended the run, and with it what was in flight")
    sent = [r for r in evidence.records if r.measured and r.sent_ns is not None]
    if not sent:
        return Measure(None, 0, "nothing was sent in steady")
    waits = [((r.end_ns or 0) - (r.sent_ns or 0)) / 1e9 for r in sent if r.outcome == "cancelled"]
    note = f"the oldest had waited {units.duration(max(waits))}" if waits else ""
    return Measure(len(waits) / len(sent), len(sent), note=note)


def prefix_hits(evidence: Evidence) -> Measure:
    """Cached share of the prompt tokens of requests that should find nothing, by their own counts of cached tokens; where none
    tells, by the server's counters over the first requests, which a run with target.reset reads.

    What the server counts beyond the tokens asked for is its chat template: the same in every request, and no sign of a warm
    cache.
    """
    why = _warm_on_purpose(evidence)
    if why:
        return Measure(None, 0, why)
    firsts, _ = _firsts(evidence)
    told = [r for r in firsts if r.outcome in LEFT and r.cached is not None and r.n_in]
    if not told:
        return counted_hits(evidence)
    return Measure(sum(max(0, (r.cached or 0) - _template(r)) for r in told) / sum(r.n_in or 0 for r in told), len(told))


def counted_hits(evidence: Evidence) -> Measure:
    """The same share by the server's counters, from the reset until the first requests had ended. They count every request:
    those that may share are taken off as if all of their prompts had been hits, so the share is the least there can have been."""
    check = next((event for event in reversed(evidence.events) if event.kind == "reset_check"), None)
    if check is None:
        return Measure(None, 0, "no answer told its cached tokens" + (", nor a counter" if _reset(evidence) else ""))
    if check.data.get("hits") is None:
        return Measure(None, 0, f"no answer told its cached tokens; {check.data.get('reason')}")
    firsts, others = ([r for r in part if (r.sent_ns or 0) / 1e9 < check.t] for part in _firsts(evidence))
    shared = sum(r.n_in or r.asked_in for r in others)
    looked_up = check.data["queries"] - shared
    if looked_up <= 0:
        return Measure(None, 0, "the first requests share prompts: the server's counters cannot tell whose hits they count")
    hits = check.data["hits"] - shared - sum(_template(r) for r in firsts)
    return Measure(max(0.0, hits) / looked_up, len(firsts))


def _template(record: Record) -> int:
    return max(0, record.n_in - record.asked_in) if record.n_in else 0


def _reset(evidence: Evidence) -> Mapping[str, Any]:
    """What came of target.reset; empty where none was asked for."""
    found = (evidence.manifest.get("target") or {}).get("reset")
    return found if isinstance(found, dict) else {}


def _warm_on_purpose(evidence: Evidence) -> str:
    """Why no request of this run need find an empty cache; "" where some must."""
    if evidence.manifest.get("nonce") in (None, "", False) and not _reset(evidence):
        return "the nonce is off: this run may start with a warm cache on purpose"
    workload = evidence.scenario.get("workload") or {}
    if (workload.get("arrivals") or {}).get("shape") == "trace":
        return "a replayed trace shares content that no record names"
    return ""


def _firsts(evidence: Evidence) -> tuple[list[Record], list[Record]]:
    """Requests that were sent, in order: those that should find nothing in the cache, the first of each prefix group and of each
    session; and the others. Among these are classes replayed from a trace or from real prompts, whose content no record names,
    and the standard prompts of the baseline. Of requests sent at one instant the first is the one that was served first."""
    classes = (evidence.scenario.get("workload") or {}).get("classes") or {}
    own = {name for name, spec in classes.items() if not (spec and (spec.get("trace") or spec.get("source")))}
    seen: set[tuple[str, int]] = set()
    firsts: list[Record] = []
    others: list[Record] = []
    for record in sorted((r for r in evidence.records if r.sent_ns is not None), key=_served):
        key = (record.cls, record.group) if record.group is not None else None
        first = (record.cls in own or not classes) and record.turn == 0 and key not in seen
        (firsts if first else others).append(record)
        if key is not None:
            seen.add(key)
    return firsts, others


def _served(record: Record) -> tuple[int, float, int]:
    return record.sent_ns or 0, math.inf if record.first_ns is None else record.first_ns, record.id


def resets_unconfirmed(evidence: Evidence) -> Measure:
    """Servers that were asked to empty their cache and said neither yes nor no, where no request or counter shows it either."""
    servers = _reset(evidence).get("servers") or []
    unsure = sum(not server.get("believed") for server in servers)
    proven = unsure and prefix_hits(evidence).value is not None
    return Measure(0 if proven else unsure, len(servers))


def workers_lost(evidence: Evidence) -> Measure:
    if evidence.manifest.get("workers", 1) == 1:
        return Measure(None, 0, "one process: there is none to lose")
    return Measure(sum(event.kind == "worker_lost" for event in evidence.events), evidence.manifest["workers"])
