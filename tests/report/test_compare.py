"""Laws side by side on made runs: the same offer or an error, and the best of each measure."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvbench.core import Record
from kvbench.report.compare import OfferError, compare, same_offer, table
from kvbench.report.files import load
from kvbench.report.summary import summarise
from tests.report.build import gauges, lost, record, write

SLO = {"workload": {"classes": {"default": {"slo": {"response_ttft": 0.3}}}}}
PID = {"law": "pid", "signal": "kv_usage", "setpoint": 0.8}


def ran(path: Path, law: str, records: list[Record], usage: float = 0.8, **run: Any) -> tuple[Any, Any]:
    control = PID if law == "pid" else {"law": law}
    samples = gauges({"kv_usage": [usage] * 60})
    directory = write(path / law, records, scenario=SLO | {"control": control}, samples=samples, **{"steady": (0.0, 60.0), **run})
    files = load(directory)
    return summarise(files), files


def both(path: Path, pid: list[Record], none: list[Record], **run: Any) -> dict[str, Any]:
    return compare({"pid": ran(path, "pid", pid), "none": ran(path, "none", none, 0.98, **run)})


FAST = [record(k, k * 1.0) for k in range(60)]


def test_every_law_is_held_to_the_same_aim_and_the_best_is_marked(tmp_path: Path) -> None:
    """none answers half of the same requests too late, with the cache at 98 %."""
    slow = [record(k, k * 1.0, ttft=0.5 if k % 2 else 0.1) for k in range(60)]
    found = both(tmp_path, FAST, slow)
    assert found["aim"] == {"signal": "kv_usage", "set_point": 0.8, "unit": "share"}
    assert (found["offered"]["n"], found["offered"]["seconds"]) == (60, 60.0)
    cells = {name: {law: row["measures"][name] for law, row in found["laws"].items()} for name in ("goodput", "overshoot", "iae")}
    assert (cells["goodput"]["pid"]["value"], cells["goodput"]["none"]["value"]) == (1.0, 0.5)
    assert (cells["overshoot"]["pid"]["value"], cells["overshoot"]["none"]["value"]) == (0.0, pytest.approx(0.18))
    assert cells["iae"]["none"]["value"] == pytest.approx(0.18 * 59)
    assert all(pair["pid"]["best"] and not pair["none"]["best"] for pair in cells.values())
    shed = {law: row["measures"]["shed_share"] for law, row in found["laws"].items()}
    assert not any(cell["best"] for cell in shed.values())  # alike: nothing to mark
    out = io.StringIO()
    Console(file=out, width=80).print(table(found))
    text = out.getvalue()
    assert "100 %*" in text
    assert "none: settled never: outside the band at the end" in " ".join(text.split())
    assert max(len(line) for line in text.splitlines()) <= 80


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            [*FAST[:30], record(30, 30.5), *FAST[31:]],
            "request 31 of steady is due at 30.000000 s, 256 tokens in, 11 out against due",
        ),
        (
            [*FAST[:30], record(30, 30.0, asked_in=255), *FAST[31:]],
            "256 tokens in, 11 out against due at 30.000000 s, 255 tokens in",
        ),
        ([*FAST[:30], record(30, 30.0, cls="chat"), *FAST[31:]], "request 31 of steady"),
        ([*FAST[:30], record(30, 30.0, group=4), *FAST[31:]], "request 31 of steady"),
        (FAST[:59], "pid was offered 60 requests in steady, none 59"),
    ],
)
def test_another_offer_is_an_error(tmp_path: Path, other: list[Record], told: str) -> None:
    with pytest.raises(OfferError) as error:
        both(tmp_path, FAST, other)
    assert told in str(error.value)
    assert "no closed loop, no sessions" in str(error.value)


def test_phases_may_begin_at_other_times(tmp_path: Path) -> None:
    """A dynamic warm-up lets steady begin 7.3 s later under one law: due times count from there."""
    later = [record(k, 7.3 + k * 1.0) for k in range(60)]
    files = {"pid": ran(tmp_path, "pid", FAST)[1], "none": ran(tmp_path, "none", later, steady=(7.3, 67.3))[1]}
    assert same_offer(files)["n"] == 60


def test_a_law_that_shed_was_offered_the_same(tmp_path: Path) -> None:
    shed = [*FAST[:20], *(lost(k, k * 1.0, "shed") for k in range(20, 60))]
    found = both(tmp_path, FAST, shed)
    assert found["laws"]["none"]["measures"]["shed_share"]["value"] == pytest.approx(2 / 3)


def test_a_run_that_ended_early_is_compared_as_far_as_it_went_and_never_the_best(tmp_path: Path) -> None:
    found = compare({
        "pid": ran(tmp_path, "pid", [*FAST[:-1], record(59, 59.0, ttft=0.9)]),
        "none": ran(tmp_path, "none", FAST[:40], steady=(0.0, 40.0)),
        "bucket": ran(tmp_path, "bucket", FAST),
    })  # fmt: skip
    assert (found["offered"]["n"], found["offered"]["seconds"]) == (40, 40.0)
    assert {law: row["cut"] for law, row in found["laws"].items()} == {"pid": False, "none": True, "bucket": False}
    goodput = {
        law: (row["measures"]["goodput"]["value"], row["measures"]["goodput"]["best"]) for law, row in found["laws"].items()
    }
    assert goodput == {"pid": (pytest.approx(59 / 60), False), "none": (1.0, False), "bucket": (1.0, True)}


def test_a_law_that_holds_nothing_is_never_the_best_at_holding(tmp_path: Path) -> None:
    """none meets the set-point by chance, pid is 5 points off; the integral has its unit."""
    found = compare({"pid": ran(tmp_path, "pid", FAST, 0.85), "none": ran(tmp_path, "none", FAST, 0.8)})
    for name in ("overshoot", "iae", "mean_error"):
        assert not any(row["measures"][name]["best"] for row in found["laws"].values())
    out = io.StringIO()
    Console(file=out, width=80).print(table(found))
    assert "integral of |error|, share x s" in out.getvalue()
