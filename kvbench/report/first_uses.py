"""Warm-up on demand: a prefix group is warm once the first answer that carried it has begun. What was sent before is a first use.

First uses pay for a prefix that every later request of the group finds in the cache. Under the policy `on_demand` they leave the
headline cohort and stand in a row beside it; under every other policy they are not told apart.
"""

from collections.abc import Sequence
from typing import Any

from kvbench.core import Nanos, Record
from kvbench.report.accounting import tally
from kvbench.report.files import RunFiles
from kvbench.report.intervals import describe
from kvbench.report.latency import Cohort

POLICY = "on_demand"
SHOWN = ("ttft", "response_ttft")
Group = tuple[str, int]  # (class, prefix group)


def first_uses(files: RunFiles) -> frozenset[int]:
    """Ids of the requests that are kept apart; none where warm-up has another policy."""
    if _policy(files) != POLICY:
        return frozenset()
    warm = warmed(files.records)
    return frozenset(record.id for record in files.records if _cold(record, warm))


def warmed(records: Sequence[Record]) -> dict[Group, Nanos]:
    """When each group's first ok answer began: its first token, or its end where it did not stream."""
    found: dict[Group, Nanos] = {}
    for record in records:
        began = record.first_ns if record.first_ns is not None else record.done_ns
        if record.group is not None and record.outcome == "ok" and began is not None:
            key = record.cls, record.group
            found[key] = min(began, found.get(key, began))
    return found


def _cold(record: Record, warm: dict[Group, Nanos]) -> bool:
    """Sent before its group was warm. What never left, and what has no group, used nothing for the first time."""
    if record.group is None or record.sent_ns is None:
        return False
    since = warm.get((record.cls, record.group))
    return since is None or record.sent_ns < since


def table(files: RunFiles, apart: frozenset[int], seed: int) -> dict[str, Any]:
    """The row of the steady requests that were kept apart: how many, of how many groups, how they ended, when tokens came."""
    policy = _policy(files)
    if policy != POLICY:
        told = f"this run's policy is {policy}" if policy else "the manifest names no policy"
        return {"n": None, "reason": f"only warm-up on demand keeps first uses apart; {told}"}
    them = [record for record in files.records if record.id in apart and record.measured]
    cohort = Cohort(them)
    return {
        "n": len(them),
        "groups": len({(record.cls, record.group) for record in them}),
        "outcomes": tally(them),
        **{name: describe(cohort.values(name), "s", seed) for name in SHOWN},
        "reason": None if them else "no request carried the prefix of a group that was not warm",
    }


def _policy(files: RunFiles) -> str | None:
    """The warm-up policy by its name; None where the manifest does not say."""
    warmup = (files.scenario.get("phases") or {}).get("warmup") or {}
    return warmup.get("policy")
