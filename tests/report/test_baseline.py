"""The baseline section: every figure from records whose numbers are known, and what a reader is told where there are none."""

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from kvbench.core import Event, Record, Sample
from kvbench.report import baseline_rows, html, render
from kvbench.report.files import load
from kvbench.report.kept import Kept, Layers, Planned, read
from kvbench.report.summary import summarise
from kvbench.report.write import finish
from tests.report.build import lost, record, write

LENGTHS = [100, 200, 400, 800, 1600]
TARGET = {"kind": "http", "model": "m"}


def prompt(number: int, n_in: int, ttft: float, **changes: Any) -> Record:
    """The number-th request of the baseline phase: 11 tokens, 20 ms apart."""
    return record(number, 10.0 + number, ttft, n_in=n_in, phase="baseline", measured=False, **changes)


def line(number: int, n_in: int) -> Record:
    """20 ms, and 0.1 ms a token."""
    return prompt(number, n_in, 0.02 + 1e-4 * n_in)


FIRST = prompt(0, 300, 0.5)
PROMPTS = [FIRST, *(line(k, n_in) for k, n_in in enumerate(LENGTHS, 1))]


def based(path: Path, records: list[Record], *, reason: str = "count", plan: Planned | None = None, **more: Any) -> Path:
    """A run of idle [0, 10), baseline [10, 50) and steady [50, 60)."""
    spans = (("idle", 0.0, 10.0, "duration"), ("baseline", 10.0, 50.0, reason))
    events = []
    for name, start, end, why in spans:
        both = {"phase": name, "phase_kind": "baseline"}
        events.append(Event(t=start, kind="phase_start", data=both | {"start": start, "bounds": {}}))
        offered = len(records) if name == "baseline" else 0
        events.append(Event(t=end, kind="phase_end", data=both | {"reason": why, "offered": offered}))
    told = msgspec.to_builtins(plan or Planned(version="standard-v1", digest="d" * 64, target=TARGET))
    steady = [record(100 + k, 50.0 + k / 10) for k in range(50)]
    return write(
        path, [*records, *steady], steady=(50.0, 60.0), offered=50, events=events, manifest={"baseline": told}, **more
    )  # fmt: skip


def told(path: Path, records: list[Record] = PROMPTS, **more: Any) -> dict[str, Any]:
    return dict(summarise(load(based(path / "run", records, **more)))["baseline"])


def printed(found: dict[str, Any]) -> dict[str, str]:
    return {name or f"#{k}": text for k, (name, text) in enumerate(baseline_rows.rows(found))}


def earlier(**changes: Any) -> Kept:
    same: dict[str, Any] = {"run": "old-run", "started": "2026-01-01", "version": "standard-v1", "digest": "d" * 64}
    same |= {"target": TARGET, "tokens": [300.0, 100.0, 200.0, 400.0, 800.0, 1600.0], "tpot": [0.02] * 6, "e2e": [0.3] * 6}
    return Kept(**(same | {"ttft": [0.5, 0.03, 0.04, 0.06, 0.10, 0.18]} | changes))


def test_cold_start_stands_apart(tmp_path: Path) -> None:
    found = told(tmp_path)
    cold = found["cold_start"]["ttft"]
    assert (cold["value"], cold["rest_p50"], cold["n"]) == (pytest.approx(0.5), pytest.approx(0.06), 5)  # 20 ms + 400 tokens
    assert cold["times"] == pytest.approx(0.5 / 0.06)
    assert found["cold_start"]["e2e"]["value"] == pytest.approx(0.7)  # and ten gaps of 20 ms
    assert found["latency"]["ttft"]["max"] == pytest.approx(0.18)  # the first is not among them
    assert printed(found)["cold start"] == (
        "ttft 500 ms, 8.33 x the median of the other 5; e2e 700 ms, 2.69 x the median of the other 5"
    )


def test_latencies_and_decode_rate(tmp_path: Path) -> None:
    found = told(tmp_path)
    assert (found["n"], found["outcomes"]["offered"], found["complete"], found["reason"]) == (6, 6, True, None)
    assert {name: row["n"] for name, row in found["latency"].items()} == dict.fromkeys(("ttft", "tpot", "e2e", "decode_rate"), 5)
    assert found["latency"]["tpot"]["p50"] == pytest.approx(0.02)
    assert found["latency"]["decode_rate"]["p50"] == pytest.approx(50.0)
    assert printed(found)["the others"] == "ttft p50 60 ms, tpot p50 20 ms, e2e p50 260 ms, decode 50 tokens/s (n 5)"


def test_prefill_is_the_slope_over_prompt_length(tmp_path: Path) -> None:
    row = told(tmp_path)["prefill"]
    assert (row["per_1000"], row["fixed"], row["r2"], row["n"]) == (*map(pytest.approx, (0.1, 0.02, 1.0)), 5)


def test_the_fit_is_scipys_and_leaves_out_what_was_cached(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    cached = [0, 16, 32, 160, 0]
    ttft = [0.02 + 1e-4 * (n - c) + float(rng.uniform(0, 0.03)) for n, c in zip(LENGTHS, cached, strict=True)]
    rows = [prompt(k, n, t, cached=c) for k, (n, t, c) in enumerate(zip(LENGTHS, ttft, cached, strict=True), 1)]
    found = told(tmp_path, [FIRST, *rows])["prefill"]
    fit = stats.linregress(np.subtract(LENGTHS, cached), ttft)
    assert found["per_1000"] == pytest.approx(1000 * fit.slope, rel=1e-6)
    assert found["fixed"] == pytest.approx(fit.intercept, rel=1e-5)
    assert found["r2"] == pytest.approx(fit.rvalue**2, rel=1e-6)
    assert found["r2"] < 0.99


def test_rows_by_prompt_length(tmp_path: Path) -> None:
    found = told(tmp_path, [FIRST, line(1, 63), line(2, 64), line(3, 127), line(4, 1024)])
    rows = [(row["from"], row["below"], row["n"], row["tokens"]) for row in found["lengths"]]
    assert rows == [(32, 64, 1, 63.0), (64, 128, 2, 95.5), (1024, None, 1, 1024.0)]
    assert found["lengths"][1]["ttft_p50"] == pytest.approx(0.0264)  # the lower of two: an observed value
    shown = [row[:3] for row in baseline_rows.lengths(found)]
    assert shown[0] == ("32 to 63", "1", "26.3 ms")
    assert shown[2][0] == "1,024 and more"


def power(start: float, end: float, watts: float, **labels: str) -> list[Sample]:
    return [Sample(t=start + k, name="power", value=watts, source="nvml", labels=labels) for k in range(int(end - start))]


def test_power_is_the_mean_of_a_phase_and_the_sum_of_its_devices(tmp_path: Path) -> None:
    one = [*power(0, 10, 60.0, gpu="0"), *power(10, 50, 200.0, gpu="0"), *power(50, 60, 390.0, gpu="0")]
    two = [*power(0, 10, 50.0, gpu="1"), *power(10, 50, 100.0, gpu="1")]
    found = told(tmp_path, samples=[*one, *two])["power"]
    assert found["idle"]["mean"] == pytest.approx(110, rel=0.01)
    assert found["base"]["mean"] == pytest.approx(300, rel=0.01)
    assert (found["base"]["devices"], found["base"]["unit"]) == (2, "W")


def test_power_that_nobody_measures_is_null_with_its_reason(tmp_path: Path) -> None:
    found = told(tmp_path)
    assert [found["power"][name]["mean"] for name in ("idle", "base")] == [None, None]
    assert printed(found)["power"] == "- (no `power` reading: nothing here measures it)"


def test_layers_are_told_or_the_reason_is(tmp_path: Path) -> None:
    known = Layers(layers=32, tokens=141, prefill=521e-6, decode=471e-6, how="modelled", reason=None)
    found = told(tmp_path / "a", plan=Planned(layers=known))
    assert printed(found)["per layer"] == "521 us in a prefill of 141 tokens, 471 us in a decode step; 32 layers, modelled"
    none = told(tmp_path / "b", plan=Planned(layers=Layers(reason="no profiler")))
    assert none["layers"]["prefill"] is None
    assert printed(none)["per layer"] == "- (no profiler)"


def test_a_later_run_says_how_far_each_figure_moved(tmp_path: Path) -> None:
    then = earlier(ttft=[0.25, 0.0375, 0.05, 0.0625, 0.125, 0.2], idle_power=60.0)
    found = told(tmp_path, plan=Planned(earlier=then), samples=power(0, 50, 66.0))
    rows = {row["figure"]: row for row in found["compared"]["rows"]}
    assert rows["ttft p50"]["change"] == pytest.approx(-0.04)  # 60 ms of 62.5 ms
    assert rows["tpot p50"]["change"] == pytest.approx(0.0, abs=1e-6)
    assert rows["cold ttft"]["change"] == pytest.approx(1.0)
    assert rows["idle power"]["change"] == pytest.approx(0.1)
    assert "base power" not in rows  # the earlier run had none
    lines = list(printed(found).values())[6:]
    assert lines[:2] == [
        "ttft p50 60 ms, 4 % below the baseline of old-run (62.5 ms; n 5 and 5)",
        "tpot p50 20 ms, the same (20 ms; n 5 and 5)",
    ]
    assert "cold ttft 500 ms, 100 % above (250 ms)" in lines
    assert "idle power 66 W, 10 % above (60 W)" in lines


def test_runs_of_different_length_are_compared_over_the_prompts_of_both(tmp_path: Path) -> None:
    """Longer prompts take longer: five prompts against a hundred would show a change where there is none."""
    many = [300.0, 100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0, 6400.0]
    times = [0.02 + 1e-4 * n for n in many]
    then = earlier(tokens=many, ttft=[*times[:4], None, *times[5:]], tpot=[0.02] * 8, e2e=[t + 0.2 for t in times])
    rows = {row["figure"]: row for row in told(tmp_path, plan=Planned(earlier=then))["compared"]["rows"]}
    assert rows["ttft p50"]["change"] == pytest.approx(0.0, abs=1e-9)
    assert [rows["ttft p50"][key] for key in ("n", "n_now", "n_then")] == [4, 5, 6]
    assert rows["prefill per 1,000 tokens"]["change"] == pytest.approx(0.0, abs=1e-6)
    assert rows["e2e p50"]["n"] == 5


def test_no_earlier_run_is_a_reason_not_a_zero(tmp_path: Path) -> None:
    found = told(tmp_path, plan=Planned(why="no earlier run has a baseline here"))
    assert found["compared"] == {"run": None, "rows": [], "reason": "no earlier run has a baseline here"}
    assert printed(found)["compared"] == "- (no earlier run has a baseline here)"


def test_one_prompt_has_a_cold_start_and_nothing_else(tmp_path: Path) -> None:
    found = told(tmp_path, [FIRST])
    assert found["cold_start"]["ttft"] | {"value": 0} == {
        "value": 0, "rest_p50": None, "n": 0, "times": None, "unit": "s", "reason": None,
    }  # fmt: skip
    assert found["latency"]["ttft"]["n"] == 0
    assert found["prefill"]["per_1000"] is None
    lines = printed(found)
    assert lines["cold start"] == "ttft 500 ms; e2e 700 ms"
    assert lines["prefill"] == "- (fewer than 3 prompt lengths with a ttft)"


def test_failed_prompts_have_no_figures_and_hold_their_place(tmp_path: Path) -> None:
    failed = [lost(k, 10.0 + k, "failed", "http_500", phase="baseline", measured=False) for k in (0, 2)]
    found = told(tmp_path, [failed[0], line(1, 100), failed[1], line(3, 400)])
    assert found["n"] == 2
    assert found["cold_start"]["ttft"]["reason"] == "the first request ended failed"
    assert [value and round(value, 6) for value in found["by_prompt"]["ttft"]] == [None, 0.03, None, 0.06]
    assert found["by_prompt"]["tokens"] == [None, 100.0, None, 400.0]


def test_answers_that_came_whole_have_no_ttft_and_say_so(tmp_path: Path) -> None:
    whole = [prompt(k, 100 * k, 0.1, streamed=False) for k in range(1, 5)]
    found = told(tmp_path, whole)
    assert found["cold_start"]["ttft"]["reason"] == "not streaming"
    assert found["cold_start"]["e2e"]["value"] == pytest.approx(0.3)
    assert found["latency"]["e2e"]["n"] == 3
    assert found["prefill"]["n"] == 0


def test_a_baseline_never_counts_in_the_headline(tmp_path: Path) -> None:
    summary = summarise(load(based(tmp_path / "run", PROMPTS)))
    assert summary["headline"]["n"] == 50
    assert summary["latency"]["ttft"]["max"] == pytest.approx(0.1)
    assert summary["rates"]["ok"]["n"] <= 50


def test_a_complete_baseline_is_kept_and_read_again(tmp_path: Path) -> None:
    directory = based(tmp_path / "run", PROMPTS, samples=power(0, 50, 66.0))
    finish(directory)
    kept = read(directory / "baseline.json")
    assert kept is not None
    assert (kept.run, kept.version, kept.target, kept.started) == ("run", "standard-v1", TARGET, "2026-01-01T00:00:00Z")
    assert kept.tokens == [300.0, 100.0, 200.0, 400.0, 800.0, 1600.0]
    assert kept.ttft == pytest.approx([0.5, 0.03, 0.04, 0.06, 0.1, 0.18])
    assert (kept.idle_power, kept.base_power) == (pytest.approx(66.0), pytest.approx(66.0))


@pytest.mark.parametrize(
    ("records", "reason"), [(PROMPTS, "stop rule"), ([lost(0, 10.0, "failed", "x", phase="baseline", measured=False)], "count")]
)
def test_one_that_was_cut_short_or_had_no_answer_is_not(records: list[Record], reason: str, tmp_path: Path) -> None:
    directory = based(tmp_path / "run", records, reason=reason)
    summary = finish(directory)
    assert not (directory / "baseline.json").exists()
    said = dict(baseline_rows.rows(summary["baseline"]))["prompts"]
    assert said.startswith("6 of 6 ended ok (standard-v1); cut short (stop rule), so not kept" if reason != "count" else "0 of 1")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": 1}', '{"run": "a", "ttft": [1e999]}'])
def test_what_is_no_baseline_is_not_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "baseline.json").write_text(text)
    assert read(tmp_path / "baseline.json") is None
    assert read(tmp_path / "missing.json") is None


def test_a_manifest_whose_baseline_is_something_else_is_refused(tmp_path: Path) -> None:
    directory = based(tmp_path / "run", PROMPTS)
    facts = json.loads((directory / "manifest.json").read_text())
    facts["baseline"]["earlier"] = {"run": "x"}
    (directory / "manifest.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="is not a run's manifest"):
        load(directory)


def test_both_reports_show_it_and_only_where_there_was_one(tmp_path: Path) -> None:
    with_one = based(tmp_path / "with", PROMPTS, plan=Planned(earlier=earlier()))
    without = write(tmp_path / "without", [record(k, k / 10) for k in range(50)])
    shown = []
    for directory in (with_one, without):
        files = load(directory)
        summary = summarise(files)
        out = io.StringIO()
        render.terminal(summary, Console(file=out, width=80))
        shown.append((out.getvalue(), html.page(summary, files), summary["baseline"]))
        assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "Baseline (one request at a time)" in shown[0][0]
    assert "the same as the baseline of" in shown[0][0]
    assert "<h2>Baseline</h2>" in shown[0][1]
    assert "<td>1,024 and more</td>" in shown[0][1]
    assert "Baseline" not in shown[1][0] + shown[1][1]
    assert shown[1][2] == {"n": 0, "complete": False, "reason": "no prompt of a baseline was sent"}
