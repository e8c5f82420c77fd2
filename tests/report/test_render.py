"""What a person or a CI system reads: fits 80 columns, needs nothing else, and is not driven by what a server says."""

import io
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from kvbench.cli.report import report
from kvbench.core import Event, Window
from kvbench.report import chart, render
from kvbench.report.files import load
from kvbench.report.summary import summarise
from kvbench.report.write import finish
from tests.report.build import gauges, lost, own, record, write

EVIL = '\x1b[2J\x07<script>alert("x")</script> & \u202e "quoted" \x00 [red]markup[/red]'
BUDGET = {"ttft_p99": "100ms", "goodput": ">= 99%", "error_rate": "1%"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    records = [record(k, k * 0.01, ttft=0.05 + (k % 37) * 0.003, cached=16, n_in=277) for k in range(1200)]
    records += [lost(1200 + k, 11 + k * 0.01, "failed", EVIL, error=EVIL, status=500) for k in range(5)]
    records += [lost(1300, 11.5, "timeout", "first", after=9.0), lost(1301, 11.6, "shed")]
    readings = {"kv_usage": [0.1 * t for t in range(1, 11)], "waiting": [2.0] * 10}
    windows = [
        Window(
            start=t - 1.0,
            end=float(t),
            counts={},
            values={"offered_rate": 100.0, "ok_rate": 98.0, "ttft_p50": 0.1, "kv_usage_mean": 0.5},
        )
        for t in range(1, 13)
    ]
    return write(
        tmp_path / "run", records, steady=(0.0, 12.0), windows=windows,
        samples=[*own(12, cpu=0.3, loop_lag_p99=0.001), *gauges(readings)],
        manifest={"name": EVIL, "target": {"kind": "http", "model": EVIL}},
        scenario={"budget": BUDGET, "stop": [{"kv_usage": ">= 90%", "for": "2m"}]},
    )  # fmt: skip


def printed(summary: dict[str, Any], width: int = 80, **options: Any) -> str:
    out = io.StringIO()
    render.terminal(summary, Console(file=out, width=width, **options))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_verdict_comes_first_and_no_line_is_wider_than_the_terminal(run: Path, width: int) -> None:
    text = printed(summarise(load(run)), width)
    assert re.match(r"(VALID|DEGRADED|INVALID)  ", text)
    assert max(len(line) for line in text.splitlines()) <= width
    for section in ("Requests", "Latency", "Throughput", "KV cache", "Budgets", "What to do next", "files: "):
        assert section in text


def test_classes_and_epochs_stand_side_by_side(tmp_path: Path) -> None:
    """Two classes in two epochs; 1 s against 0.1 s to the first token. With one of each there is no such table."""
    start, end = "phase_start", "phase_end"
    second = {"phase": "steady-2", "phase_kind": "steady", "bounds": {}, "reason": "duration", "offered": 10}
    events = [Event(t=10.0, kind=start, data=second), Event(t=20.0, kind=end, data=second)]
    records = [record(k, float(k), cls="chat" if k % 2 else "bulk", ttft=0.1 if k % 2 else 1.0) for k in range(10)]
    records += [record(10 + k, 10.0 + k, cls="chat", phase="steady-2") for k in range(10)]
    summary = summarise(load(write(tmp_path / "run", records, offered=10, events=events)))
    rows = {line.split()[0]: line.split()[1:] for line in printed(summary).split("Classes and epochs")[1].splitlines()[2:6]}
    assert rows["bulk"][:2] == ["5", "5"]
    assert rows["chat"][:2] == ["15", "15"]
    assert rows["bulk"][3:5] == ["1", "s"]
    assert rows["steady"][3:5] == ["100", "ms"]
    assert rows["steady-2"][:2] == ["10", "10"]
    assert summary["headline"]["seconds"] == 20.0
    assert "Classes and epochs" not in printed(summarise(load(write(tmp_path / "one", [record(0, 0.0)]))))


def test_a_server_cannot_drive_the_terminal(run: Path) -> None:
    text = printed(summarise(load(run)), force_terminal=True, color_system=None, legacy_windows=False)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]markup[/red]" in text.replace("\n", "")  # shown as it is, not obeyed


def test_no_color_is_respected(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    colours = re.compile(r"\x1b\[[0-9;]*3[0-7]")
    assert colours.search(printed(summarise(load(run)), force_terminal=True, color_system="standard"))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colours.search(printed(summarise(load(run)), force_terminal=True))


def test_html_needs_nothing_else_and_escapes_everything(run: Path) -> None:
    finish(run)
    page = (run / "report.html").read_text()
    assert not re.search(r"""(src|href)=|url\(|@import|<script|<link|https?:""", page)
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;" in page
    assert page.count("<svg") == 3  # rates, first token, KV usage; no gauge of running requests, so no chart of it
    assert "polyline" in page
    for tag in ("table", "ul", "svg", "figure", "h2"):
        assert page.count(f"<{tag}") == page.count(f"</{tag}>")


def test_junit_is_xml_with_a_case_per_budget_and_rule(run: Path) -> None:
    finish(run)
    suite = ET.parse(run / "junit.xml").getroot().find("testsuite")
    assert suite is not None
    cases = {case.get("name"): case.find("failure") is not None for case in suite.iter("testcase")}
    assert cases == {
        "ttft_p99 <= 100 ms": True, "goodput >= 99 %": True, "error_rate <= 1 %": False,
        "kv_usage >= 90 % for 2m00s (over 10 s)": False,
        "the run can be trusted": False, "requests succeeded and the run ended in order": False,
    }  # fmt: skip
    assert (suite.get("tests"), suite.get("failures")) == ("6", "2")


def test_every_output_tells_the_same_numbers(run: Path) -> None:
    finish(run)
    told = json.loads((run / "summary.json").read_text())
    p99 = told["latency"]["ttft"]["p99"]
    assert f"{p99 * 1e3:.3g} ms" in printed(told)
    assert f"{p99 * 1e3:.3g} ms" in (run / "report.html").read_text()
    assert told["exit"]["reason"].split(":")[0] in printed(told)


def test_the_verb_reads_a_run_and_refuses_what_is_none(run: Path, tmp_path: Path) -> None:
    app = Typer()
    app.command()(report)
    cli = CliRunner()
    text = cli.invoke(app, [str(run)])
    assert text.exit_code == 0
    assert "Latency" in text.stdout
    found = cli.invoke(app, [str(run), "--json", "--html"])
    assert json.loads(found.stdout)["accounting"]["total"]["offered"] == 1207
    assert (run / "report.html").exists()
    wrong = cli.invoke(app, [str(tmp_path / "nowhere")])
    assert wrong.exit_code == 2
    assert "there is no such directory" in wrong.stderr


def test_a_rule_that_was_never_read_is_a_failure(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [record(0, 0.0)], scenario={"stop": [{"kv_usage": ">= 90%"}]})
    rule = "kv_usage >= 90 % (over 10 s)"
    text = (run / "events.jsonl").read_text()
    (run / "events.jsonl").write_text(text.replace('"inflight":0', f'"inflight":0,"unread":{{"{rule}":[10,10,"no reading"]}}'))
    summary = finish(run)
    assert summary["stop_rules"] == [{"rule": rule, "checks": 10, "unread": 10, "why": "no reading"}]
    assert "not evaluated: no reading" in (run / "junit.xml").read_text()
    assert any("was never evaluated: no reading" in line for line in summary["warnings"])


def test_charts_break_at_gaps_and_keep_peaks() -> None:
    points = [(float(t), None if t == 5 else 1.0) for t in range(10)]
    assert [len(piece) for piece in chart.pieces(points)] == [5, 4]
    many = [(float(t), 100.0 if t == 4321 else 1.0) for t in range(10_000)]
    assert max(value or 0 for _, value in chart.thin(many)) == 100.0
    assert len(chart.thin(many)) <= chart.MOST
    assert [chart.nice(v) for v in (0, 0.3, 1.0, 1.1, 7)] == [1.0, 0.5, 1.0, 2.0, 10.0]
    assert chart.lines("empty", "s", {"p50": [(1.0, None)]}) == ""
