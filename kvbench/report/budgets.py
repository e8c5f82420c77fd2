"""Limits for the whole run, each with its value, its n and a verdict. One without samples is not evaluated, and that fails.

Latencies are held to their limits with what got no answer counted in: a request that timed out, or that was in flight when the
run ended, took at least as long as we waited, so a quantile that falls among them cannot meet an upper limit, however short the
wait was.
"""

from collections.abc import Mapping
from typing import Any

from kvbench.metrics import Stat, names
from kvbench.metrics.histogram import supported
from kvbench.metrics.names import Name
from kvbench.stop import Budget

RATES = {"offered_rate": "offered", "admitted_rate": "admitted", "sent_rate": "sent", "ok_rate": "ok"}


def evaluate(budget: Mapping[str, Any], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Judge every line of a scenario's budget (as the manifest holds it)."""
    spec = Budget.model_validate(budget)
    stats = {line.name: stat(line.metric, summary) for line in spec.lines}
    rows = []
    for line, verdict in zip(spec.lines, spec.judge(stats), strict=True):
        status, reason, found = verdict.verdict, verdict.reason, stats[line.name]
        least = ">= " if found.lower_bound else ""
        text = f"{line.name} {least}{names.show(found.value, line.metric)}, limit {verdict.limit} (n {found.n:,})"
        if status == "not evaluated":
            text = f"{line.name} not evaluated: {reason} (limit {verdict.limit})"
        elif reason:
            text += f"; {reason}"
        rows.append({
            "name": line.name, "compare": line.compare, "limit": line.limit, "unit": line.metric.of.unit,
            "value": found.value, "n": found.n, "status": status, "low_confidence": verdict.low_confidence,
            "reason": reason or None, "text": text,
        })  # fmt: skip
    return rows


def stat(name: Name, summary: Mapping[str, Any]) -> Stat:
    """One statistic of the whole run, as the report shows it."""
    if name.metric == "hit_rate":
        return _hit_rate(summary)
    return READERS[name.of.kind](name, summary)


def _latency(name: Name, summary: Mapping[str, Any]) -> Stat:
    row = summary["latency"][name.metric]
    counted = row.get("with_timeouts")
    if counted and name.quantile is not None:
        enough = supported(name.quantile, counted["n"])
        return Stat(counted[name.statistic], counted["n"], enough, name.statistic in counted["at_least"])
    if not row["n"]:
        return Stat(None, 0, reason=row["reason"])
    return Stat(row[name.statistic], row["n"], row["supported"].get(name.statistic, True))


def _gauge(name: Name, summary: Mapping[str, Any]) -> Stat:
    row = summary["engine"].get(name.metric, {"reason": "not exposed by the target"})
    value = row.get(name.statistic or "mean")
    return Stat(value, row.get("n", 0), reason="" if value is not None else row["reason"])


def _counter(name: Name, summary: Mapping[str, Any]) -> Stat:
    row = summary["engine"].get(name.metric, {"value": None, "reason": "not exposed by the target"})
    if row["value"] is None:
        return Stat(None, 0, reason=row["reason"])
    if name.statistic == "last":
        return Stat(row["last"], row["n"])
    seconds = summary["headline"]["seconds"]
    if name.statistic == "rate":
        return Stat(row["value"] / seconds, row["n"]) if seconds else Stat(None, 0, reason="the interval is empty")
    return Stat(row["value"], row["n"])


def _ratio(name: Name, summary: Mapping[str, Any]) -> Stat:
    if name.metric == "goodput":
        row = summary["goodput"]
        return Stat(row["value"], row["n"], reason=row.get("reason") or "")
    if name.metric == "oom_rate":
        row = summary["engine"].get("oom_rate", {"value": None, "n": 0, "reason": "not exposed by the target"})
        return Stat(row["value"], row["n"], reason=row["reason"] or "")
    outcomes = summary["outcomes"]
    return Stat(outcomes[name.metric], outcomes["finished"], reason=outcomes["reason"] or "")


def _rate(name: Name, summary: Mapping[str, Any]) -> Stat:
    if name.metric == "goodput_rate":
        row = summary["goodput"]
        return Stat(row.get("rate"), row["n"], reason=row.get("reason") or "")
    tokens = name.metric.removesuffix("s_rate").removesuffix("_token")  # input or output
    row = summary["rates"][RATES[name.metric]] if name.metric in RATES else summary["tokens"][f"{tokens}_rate"]
    return Stat(row["value"], row["n"], reason=row.get("reason") or "")


def _count(name: Name, summary: Mapping[str, Any]) -> Stat:
    return Stat(None, 0, reason=f"{name} is of an instant, not of a run")


def _hit_rate(summary: Mapping[str, Any]) -> Stat:
    """The target's own counters where it has them, else what the answers told."""
    engine, told = summary["engine"]["hit_rate"], summary["told"]
    if engine["value"] is not None:
        return Stat(engine["value"], engine["n"])
    return Stat(told["hit_rate"], told["prompt_tokens"] or 0, reason=told["reason"] or "")


READERS = {"latency": _latency, "gauge": _gauge, "counter": _counter, "ratio": _ratio, "rate": _rate, "count": _count}
