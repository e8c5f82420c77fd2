"""What the server counted over the run, against what this client counted; evidence.py measures the client alone.

The server's counts are the prometheus collector's totals: from before the first request to after the last answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvbench.core import Event, Record
from kvbench.evidence import Evidence, Measure

NONE = "no server counters were collected"


def totals(events: Sequence[Event]) -> Mapping[str, Any] | None:
    """What collectors of server metrics told at their end; None where none did. Of several the first that has a metric counts."""
    told = [event.data for event in events if event.kind == "collector" and event.data.get("state") == "totals"]
    if not told:
        return None
    metrics = {name: row for data in reversed(told) for name, row in data["metrics"].items()}
    ends = {"start": min(data["start"] for data in told), "end": max(data["end"] for data in told)}
    return {**told[0], **ends, "complete": all(data["complete"] for data in told), "metrics": metrics}


def server_requests(evidence: Evidence) -> Measure:
    """Share of the requests that ended at the server which this run did not send. Every try of ours counts as one of them."""
    count, why = _count(evidence, "finished_total")
    if count is None:
        return Measure(None, 0, why)
    ours = sum(record.attempts for record in _sent(evidence))
    beyond = max(0.0, count - ours)
    return Measure(beyond / count if count else 0.0, round(count), note=f"{count:,.0f} ended there, {ours:,} were sent from here")


def count_mismatch(evidence: Evidence) -> Measure:
    """The furthest that one of the server's counts (requests, prompt tokens, tokens generated) lies outside of what ours allow.

    Ours allow what the requests that ended ok came to, and as much as was sent. Tokens counted by events are not compared, nor
    is what a restart took away.
    """
    found = list(_compared(evidence))
    if not found:
        return Measure(None, 0, _count(evidence, "finished_total")[1] or "the server restarted, or counts nothing that we do")
    name, off, server, ours = max(found, key=lambda row: row[1])
    return Measure(off, len(found), note=f"{name}: {server:,.0f} by the server, {ours:,.0f} by the answers")


def _compared(evidence: Evidence) -> Iterator[tuple[str, float, float, float]]:
    """(which count, how far off as a share of ours, the server's, ours)."""
    sent = _sent(evidence)
    ok = [record for record in sent if record.outcome == "ok"]
    others = sum(record.attempts for record in sent) - len(ok)
    foreign = server_requests(evidence).value
    usage = all(record.source == "usage" for record in ok)
    again = (_count(evidence, "preemptions_total")[0] or 0) > 0  # some servers count a prompt once more when it is computed again
    prompts, tokens = (sum(r.n_in or 0 for r in ok), sum(r.n_out or 0 for r in ok)) if usage else (0, 0)
    any_number = float("inf")
    rows = (
        ("requests", "finished_total", len(ok), len(ok) + others),
        ("prompt tokens", "prompt_tokens_total", prompts, any_number if others or again else prompts),
        ("tokens generated", "generation_tokens_total", tokens, any_number if others else tokens),
    )
    metrics = (totals(evidence.events) or {}).get("metrics", {})
    for name, metric, ours, most in rows:
        count, _ = _count(evidence, metric)
        if count is None or not ours or metrics[metric]["resets"] or metrics[metric]["gone"]:
            continue
        above = 0.0 if foreign is None or foreign > 0 else count - most  # others' requests explain any surplus
        yield name, max(0.0, ours - count, above) / ours, count, ours


def recompute_in_hits(evidence: Evidence) -> Measure:
    """Preemptions under the server's hit rate: servers have counted what a preempted request looks up again as its hits."""
    if (evidence.manifest.get("target") or {}).get("kind") == "sim":
        return Measure(None, 0, "the embedded engine counts recompute apart")
    preempted, why = _count(evidence, "preemptions_total")
    if preempted is None:
        return Measure(None, 0, why)
    hits, why = _count(evidence, "hit_tokens_total")
    if hits is None:
        return Measure(None, 0, why)
    note = "its hit rate may count what preempted requests looked up again" if preempted else ""
    return Measure(preempted, round(preempted), note=note)


def _count(evidence: Evidence, metric: str) -> tuple[float | None, str]:
    """A total of the server's, or None and why."""
    told = totals(evidence.events)
    if told is None:
        return None, NONE
    if not told["complete"]:
        return None, "the server's last page did not come: what it counted at the end is not known"
    if any((record.sampling or {}).get("n", 1) != 1 for record in evidence.records):
        return None, "requests asked for several answers, which servers count in different ways"
    row = told["metrics"].get(metric)
    if row is None:
        return None, f"the server does not expose {metric}"
    return row["value"], row["reason"] or ""


def _sent(evidence: Evidence) -> list[Record]:
    return [record for record in evidence.records if record.sent_ns is not None]
