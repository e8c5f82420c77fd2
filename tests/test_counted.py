"""The server's counts against ours: each row of the verdict at its thresholds, and where there is nothing to compare."""

from typing import Any

import pytest

from kvbench.core import Event, Record
from kvbench.counted import count_mismatch, recompute_in_hits, server_requests, totals
from kvbench.evidence import Evidence, Measure
from tests.test_verdict import evidence, level


def answered(number: int, outcome: str = "ok", **more: Any) -> Record:
    given = {"n_in": 10, "n_out": 5, "source": "usage", "sent_ns": number, "outcome": outcome} | more
    return Record(id=number, **given)


def told(start: float = -0.1, **counts: float | None) -> Event:
    rows = {name: {"value": value, "reason": None, "resets": 0, "gone": 0} for name, value in counts.items()}
    data = {"source": "prometheus", "state": "totals", "start": start, "end": 9.0, "complete": True, "metrics": rows}
    return Event(t=9.0, kind="collector", data=data)


def found(records: list[Record], *events: Event, **manifest: Any) -> Evidence:
    return evidence(records=records, events=list(events), manifest={"clock": "real", "scenario": {}, **manifest})


HUNDRED = [answered(number) for number in range(100)]


@pytest.mark.parametrize(("count", "expected"), [(100, "OK"), (101, "OK"), (102, "DEGRADED"), (112, "INVALID"), (90, "OK")])
def test_requests_of_others(count: float, expected: str) -> None:
    """1 of 101 is just below 1 %; 2 of 102 above it; 12 of 112 above 10 %."""
    assert level("server_requests", records=HUNDRED, events=[told(finished_total=count)]) == expected


@pytest.mark.parametrize(
    ("counts", "off"),
    [
        ({"finished_total": 100, "prompt_tokens_total": 1000, "generation_tokens_total": 500}, 0),
        ({"finished_total": 100, "prompt_tokens_total": 900, "generation_tokens_total": 500}, 0.1),
        ({"finished_total": 100, "prompt_tokens_total": 1000, "generation_tokens_total": 600}, 0.2),
        ({"finished_total": 50, "prompt_tokens_total": 1000}, 0.5),
        ({"finished_total": 150, "prompt_tokens_total": 1500, "generation_tokens_total": 750}, 0),  # others: they explain it all
    ],
)
def test_counts_that_disagree(counts: dict[str, float], off: float) -> None:
    assert count_mismatch(found(HUNDRED, told(**counts))).value == pytest.approx(off)


def test_what_did_not_end_ok_may_have_been_counted_or_not() -> None:
    records = [*HUNDRED, answered(100, "timeout", n_out=None), answered(101, "failed", attempts=3)]
    for finished in (100, 104):
        event = told(finished_total=finished, generation_tokens_total=520)
        assert count_mismatch(found(records, event)).value == 0
        assert server_requests(found(records, event)).value == 0
    assert count_mismatch(found(records, told(finished_total=100, generation_tokens_total=250))).value == 0.5


def test_tokens_counted_by_events_and_recomputed_prompts_are_not_compared() -> None:
    events = [answered(number, source="events") for number in range(100)]
    assert count_mismatch(found(events, told(finished_total=100, generation_tokens_total=1))).value == 0
    again = told(finished_total=100, prompt_tokens_total=1300, preemptions_total=3)
    assert count_mismatch(found(HUNDRED, again)).value == 0


@pytest.mark.parametrize("measure", [server_requests, count_mismatch, recompute_in_hits])
def test_without_counts_there_is_no_value(measure: Any) -> None:
    nothing: Measure = measure(found(HUNDRED))
    assert (nothing.value, nothing.reason) == (None, "no server counters were collected")
    several = [answered(0, sampling={"n": 4})]
    counts = {"finished_total": 4, "preemptions_total": 0, "hit_tokens_total": 0}
    assert "several answers" in measure(found(several, told(**counts))).reason
    assert measure(found(HUNDRED, told())).value is None


def test_a_restart_takes_the_comparison_away() -> None:
    event = told(finished_total=40)
    event.data["metrics"]["finished_total"]["resets"] = 1
    assert count_mismatch(found(HUNDRED, event)).value is None


def test_a_last_page_that_did_not_come_takes_it_away_too() -> None:
    event = told(finished_total=40)
    event.data["complete"] = False
    for measure in (server_requests, count_mismatch, recompute_in_hits):
        assert "last page did not come" in measure(found(HUNDRED, event)).reason


def test_recompute_in_hits_is_noted() -> None:
    counts = {"preemptions_total": 3.0, "hit_tokens_total": 50.0}
    row = recompute_in_hits(found(HUNDRED, told(**counts)))
    assert (row.value, bool(row.note)) == (3, True)
    assert level("recompute_in_hits", records=HUNDRED, events=[told(**counts)]) == "NOTED"
    assert recompute_in_hits(found(HUNDRED, told(**counts), target={"kind": "sim"})).reason == (
        "the embedded engine counts recompute apart"
    )


def test_of_two_collectors_each_metric_is_the_firsts() -> None:
    both = totals([told(-0.5, finished_total=1), told(-0.1, finished_total=2, gpu_energy_j_total=7)])
    assert both is not None
    assert {name: row["value"] for name, row in both["metrics"].items()} == {"finished_total": 1, "gpu_energy_j_total": 7}
    assert (both["start"], both["end"]) == (-0.5, 9.0)
