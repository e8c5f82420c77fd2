"""Warm-up on demand: which requests paid for their prefix, by hand."""

from pathlib import Path
from typing import Any

import pytest

from kvbench.core import Record
from kvbench.report.files import load
from kvbench.report.summary import summarise
from tests.report.build import lost, ns, record, write
from tests.whole import simulated


def summary(path: Path, records: list[Record], policy: str = "on_demand") -> dict[str, Any]:
    return summarise(load(write(path / "run", records, scenario={"phases": {"warmup": {"policy": policy}}})))


GROUPS = [
    record(0, 0.0, ttft=1.0, group=1),  # the first of group 1: its first token at 1.0 s
    record(1, 0.5, ttft=0.9, group=1),  # sent at 0.5 s, before that: a first use too
    record(2, 1.0, ttft=0.1, group=1),  # sent at 1.0 s: warm
    record(3, 2.0, ttft=0.8, group=2),  # group 2
    record(4, 2.5, ttft=0.7, group=1, cls="other"),  # another class has prefixes of its own
    record(5, 3.0, ttft=0.2, group=1),  # warm
    record(6, 4.0, ttft=0.3),  # no prefix group: nothing to warm
    lost(7, 4.5, "failed", "http_500", group=3),  # no answer ever came to group 3
    lost(8, 5.0, "shed", group=4),  # never sent: it used nothing, and goodput counts it
]


def test_first_uses_by_hand(tmp_path: Path) -> None:
    """Of nine: 0, 1, 3, 4 and 7 stand apart (four groups); 2, 5, 6 and 8 are the headline."""
    found = summary(tmp_path, GROUPS)
    apart = found["first_uses"]
    assert (apart["n"], apart["groups"], apart["reason"]) == (5, 4, None)
    assert (apart["ttft"]["n"], apart["ttft"]["mean"]) == (4, pytest.approx((1.0 + 0.9 + 0.8 + 0.7) / 4))
    assert (apart["outcomes"]["ok"], apart["outcomes"]["failed"]) == (4, 1)
    assert found["headline"]["n"] == 4
    assert found["headline"]["cohort"] == "requests due in steady (5 first uses stand apart)"
    assert found["latency"]["ttft"]["mean"] == pytest.approx((0.1 + 0.2 + 0.3) / 3)
    assert (found["outcomes"]["shed"], found["outcomes"]["failed"]) == (1, 0)
    assert found["accounting"]["total"]["offered"] == 9  # nothing leaves the accounts
    assert found["phases"][0]["outcomes"]["offered"] == 9


def test_under_another_policy_nothing_is_kept_apart(tmp_path: Path) -> None:
    found = summary(tmp_path, GROUPS, "none")
    assert found["headline"]["n"] == 9
    assert found["first_uses"]["n"] is None
    assert found["first_uses"]["reason"].endswith("this run's policy is none")


def test_a_group_is_warm_from_its_first_ok_answer_on(tmp_path: Path) -> None:
    """The first answer fails after its first token at 0.2 s; the second, ok, begins at 1.3 s. Not streamed: at its end."""
    records = [
        record(0, 0.0, ttft=0.2, group=1, outcome="failed", cause="truncated"),
        record(1, 1.0, ttft=0.3, group=1),
        record(2, 1.2, ttft=0.3, group=1),
        record(3, 1.4, ttft=0.3, group=1),
        record(4, 0.0, tokens=0, group=2, streamed=False, done_ns=ns(2.0), end_ns=ns(2.0), n_out=50, reads=0),
        record(5, 1.9, ttft=0.3, group=2),
        record(6, 2.1, ttft=0.3, group=2),
    ]
    assert summary(tmp_path, records)["first_uses"]["n"] == 5


ENGINE = """
seed: 7
target: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090}
workload: {arrivals: {shape: constant, rate: 20/s}, prompt: 64, output: 8, prefixes: {groups: 3, tokens: 512, share: 80%}}
phases: {warmup: {policy: on_demand}, steady: {for: 10s}, drain: {for: 10s}}
"""


def test_on_the_engine_what_stands_apart_is_what_met_a_cold_prefix(tmp_path: Path) -> None:
    """Three groups at 20/s: their first uses find nothing in the cache, and all that the headline counts find their prefix."""
    run = simulated(ENGINE, tmp_path)
    began: dict[int, int] = {}
    for each in run.records:
        if each.group is not None:
            began[each.group] = min(each.first_ns, began.get(each.group, each.first_ns))
    apart = {each.id for each in run.records if each.group is not None and each.sent_ns < began[each.group]}
    assert run.summary["first_uses"]["n"] == len(apart) >= 3
    assert run.summary["headline"]["n"] == 200 - len(apart)
    assert not any(each.cached for each in run.records if each.id in apart)
    assert {each.cached for each in run.records if each.group is not None and each.id not in apart} == {512}
    warm = run.summary["latency"]["ttft"]
    assert run.summary["first_uses"]["ttft"]["mean"] > 2 * warm["mean"]
    assert warm["n"] == 200 - len(apart)
