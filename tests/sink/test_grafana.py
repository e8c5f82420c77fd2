"""docs/grafana/kvbench.json against the schema, and every query of it against a real influxd that holds a run."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbench.core import Sample
from kvbench.replay import began
from kvbench.report.files import load
from kvbench.sink.database import V1
from kvbench.sink.points import ITEM_TAGS, RUN_TAGS, Points
from tests.sink.servers import Influxd, running
from tests.whole import ROOT, simulated

BOARD: dict[str, Any] = json.loads((ROOT / "docs/grafana/kvbench.json").read_text())
PANELS = [(panel["title"], target["query"]) for panel in BOARD["panels"] for target in panel["targets"]]
NOTES = [(note["name"], note["query"]) for note in BOARD["annotations"]["list"]]
GPU = ("gpu_memory", "gpu_utilization", "gpu_power_w", "gpu_temperature_c")  # no simulated run has all of these
RUN = """\
name: shown
target: {kind: sim, model: llama-3.1-8b, hardware: h100}
workload: {arrivals: {shape: poisson, rate: 5/s}, prompt: 32, output: 8}
phases: {steady: {for: 12s}, drain: {for: 1m}}
stop: [{offered_rate: ">= 0.5/s", for: 10s}]
sinks: [{kind: influx, url: "URL", mode: v1}]
"""


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Influxd, str]]:
    """Of a run, and of readings of a GPU."""
    folder = tmp_path_factory.mktemp("grafana")
    with running(Influxd(folder / "db")) as server:
        directory = simulated(RUN.replace("URL", server.url), folder).directory
        start = began(load(directory))
        points, writer = Points(directory.name, start, {}), V1(server.url, "kvbench", None, 5.0)
        labels = {"gpu": "0", "uuid": "GPU-1", "host": "h"}
        lines = [points.line(Sample(t=1.0, name=name, value=0.5, source="nvml", labels=labels)) for name in GPU]
        lines.append(
            Points("agent-h", start, {}).line(Sample(t=1.0, name="gpu_memory", value=0.5, source="agent", labels=labels))
        )
        assert writer.post(("\n".join(lines) + "\n").encode()).ok
        writer.close()
        yield server, directory.name


def ready(query: str, run: str) -> str:
    """As Grafana sends it."""
    return query.replace("$run", re.escape(run)).replace("$timeFilter", "time > 0").replace("$__interval", "1s") + " "


@pytest.mark.parametrize(("title", "query"), [*PANELS, *NOTES], ids=[title for title, _ in [*PANELS, *NOTES]])
def test_every_query_finds_something(database: tuple[Influxd, str], title: str, query: str) -> None:
    server, run = database
    # a GROUP BY time over all of time would be as many buckets as there are seconds
    text = ready(query, run).replace("time > 0", f"time > {_start(server, run)} AND time < {_start(server, run) + 10**11}")
    rows = server.rows(text)
    columns = {column for row in rows for column, value in row.items() if value is not None and column not in ("time", *RUN_TAGS)}
    wanted = set(re.findall(r'AS "(\w+)"', query)) or {"text"}
    assert wanted <= columns, f"no values for {sorted(wanted - columns)}"


def test_the_runs_are_offered(database: tuple[Influxd, str]) -> None:
    server, run = database
    query = next(each["query"] for each in BOARD["templating"]["list"] if each["name"] == "run")
    assert {row["value"] for row in server.rows(query)} == {run, "agent-h"}, "an agent's with --influx has no windows"


def test_queries_name_only_what_the_schema_has() -> None:
    for title, query in [*PANELS, *NOTES]:
        assert '"run" =~ /^$run$/' in query, title
        assert "$timeFilter" in query, title
        for grouped in re.findall(r'"(\w+)"', query.partition("GROUP BY")[2]):
            assert grouped in (*RUN_TAGS, *ITEM_TAGS), (title, grouped)


def test_the_board_is_one_that_grafana_imports() -> None:
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]]
    assert len(set(places)) == len(places)
    assert all(panel["datasource"] == {"type": "influxdb", "uid": "${datasource}"} for panel in BOARD["panels"])
    assert Path(ROOT / "docs/guides/influxdb.md").is_file()


def _start(server: Influxd, run: str) -> int:
    return int(server.rows(f"SELECT FIRST(t) FROM kvbench_event WHERE run = '{run}'")[0]["time"]) - 1
