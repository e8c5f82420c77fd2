"""`kvbench export`: tables that say what the run directory says, and errors that say what to do."""

import builtins
import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from kvbench.cli import app
from kvbench.metrics import request
from kvbench.replay import began
from kvbench.report.files import load
from kvbench.report.summary import summarise
from kvbench.sink.lines import nanos
from tests.sink.servers import Rude, free_port
from tests.whole import simulated

RUN = """\
name: tabled
target: {kind: sim, model: llama-3.1-8b, hardware: h100}
workload: {arrivals: {shape: poisson, rate: 5/s}, prompt: 32, output: 8}
phases: {steady: {for: 10s}, drain: {for: 1m}}
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(RUN, tmp_path_factory.mktemp("run")).directory


def export(*arguments: str | Path) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["export", *map(str, arguments)])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output


def rows(path: Path) -> list[dict[str, Any]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_csv_says_what_the_directory_says(directory: Path, tmp_path: Path) -> None:
    code, said = export(directory, tmp_path / "new" / "out", "--csv")
    files, out = load(directory), tmp_path / "new" / "out"
    zero = nanos(began(files))
    assert code == 0
    assert f"requests.csv: {len(files.records)} rows" in said
    for row, window in zip(rows(out / "windows.csv"), files.windows, strict=True):
        assert (int(row["time"]), float(row["end"])) == (zero + round(window.end * 1e9), window.end)
        for name, value in (window.counts | window.values).items():
            assert (float(row[name]) if row[name] else None) == value
    for row, record in zip(rows(out / "requests.csv"), files.records, strict=True):
        assert (int(row["id"]), row["outcome"], json.loads(row["token_ns"])) == (record.id, record.outcome, record.token_ns)
        for name, value in request.values(record).items():
            assert (float(row[name]) if row[name] else None) == pytest.approx(value, rel=1e-12)
    for row, sample in zip(rows(out / "samples.csv"), files.samples, strict=True):
        assert (float(row["t"]), row["name"]) == (sample.t, sample.name)
        assert (float(row["value"]) if row["value"] else None) == sample.value
    for row, event in zip(rows(out / "events.csv"), files.events, strict=True):
        assert (row["kind"], json.loads(row["data"])) == (event.kind, event.data)
    assert sorted(path.name for path in out.iterdir()) == ["events.csv", "requests.csv", "samples.csv", "windows.csv"]


def test_parquet_says_the_same_with_types(directory: Path, tmp_path: Path) -> None:
    assert export(directory, tmp_path, "--parquet")[0] == 0
    assert export(directory, tmp_path, "--csv")[0] == 0
    for name in ("windows", "samples", "events", "requests"):
        table = parquet.read_table(tmp_path / f"{name}.parquet")
        plain = rows(tmp_path / f"{name}.csv")
        assert table.column_names == list(plain[0])
        for kept, row in zip(table.to_pylist(), plain, strict=True):
            for key, value in kept.items():
                assert (
                    "" if value is None else json.dumps(value, separators=(",", ":")) if key == "token_ns" else str(value)
                ) == row[key]
    types = {field.name: str(field.type) for field in parquet.read_table(tmp_path / "requests.parquet").schema}
    assert (types["id"], types["ttft"], types["cls"], types["status"]) == ("int64", "double", "string", "int64")
    assert types["token_ns"].startswith("list<")


def test_tables_go_below_the_run_where_nothing_else_is_said(directory: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(directory, tmp_path / "run")
    assert export(copy, "--csv")[0] == 0
    assert (copy / "csv" / "windows.csv").is_file()


def test_a_run_that_was_cut_off_is_exported_to_where_it_goes(directory: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(directory, tmp_path / "run")
    whole = (copy / "requests.jsonl").read_bytes()
    (copy / "requests.jsonl").write_bytes(whole[: len(whole) // 2])
    for name in ("windows.jsonl", "samples.jsonl"):
        (copy / name).unlink()
    assert export(copy, "--csv")[0] == 0
    assert len(rows(copy / "csv" / "requests.csv")) == len(load(copy).records) > 0
    assert rows(copy / "csv" / "windows.csv") == []


def test_parquet_without_its_package_says_what_to_install(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    code, said = export(directory, tmp_path / "out", "--parquet")
    assert (code, "pip install -e '.[parquet]'" in said) == (2, True)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "one of --influx URL, --csv or --parquet"),
        (["--csv", "--parquet"], "one of --influx URL, --csv or --parquet"),
        (["--csv", "--resume"], "go with --influx"),
        (["--csv", "--bucket", "b"], "go with --influx"),
        (["out", "--influx", "http://h:1"], "files are written with --csv or --parquet"),
        (["--influx", "h:1"], "url: 'h:1' is not an address: write http://HOST:PORT"),
        (["--influx", "http://h:1", "--token-env", "NO_SUCH_VARIABLE"], "environment variable NO_SUCH_VARIABLE"),
    ],
)
def test_wrong_use_is_one_line(directory: Path, arguments: list[str], said: str) -> None:
    code, output = export(directory, *arguments)
    assert code == 2
    assert said in output
    assert output.startswith("kvbench export: ")
    assert output.count("\n") == 1


def test_what_is_no_run_is_not_exported(tmp_path: Path) -> None:
    assert export(tmp_path, "--csv") == (2, f"kvbench export: {tmp_path} is not a run directory: it holds none of manifest.json, "
                                            "requests.jsonl, events.jsonl\n")  # fmt: skip
    (tmp_path / "manifest.json").write_text('{"name": "x"}')
    assert "no event `run_start` says when the run began" in export(tmp_path, "--csv")[1]


def test_a_database_that_is_not_there_is_exit_code_2(directory: Path) -> None:
    code, said = export(directory, "--influx", f"http://127.0.0.1:{free_port()}", "--mode", "v1")
    assert (code, "Is it running, and is the address right?" in said) == (2, True)


def test_an_export_that_is_refused_midway_goes_on_where_it_was(directory: Path, tmp_path: Path) -> None:
    """The journal and what was acknowledged decide; here the second batch meets a login that is no longer taken."""
    copy = shutil.copytree(directory, tmp_path / "run")
    with Rude(lambda lines, n: (204, {}, b"") if n == 1 else (401, {}, b"")) as rude:
        code, said = export(copy, "--influx", rude.url, "--mode", "v1", "--requests")
        assert code == 1
        assert "nothing more is sent" in said
        assert f"kvbench export {copy} --influx {rude.url} --resume" in said
        rude.script = None
        code, said = export(copy, "--influx", rude.url, "--resume")
        assert (code, said.split()[0]) == (0, "sent")
        files = load(copy)
        made = len(files.windows) + len(files.events) + len(files.records) + sum(s.value is not None for s in files.samples)
        assert len([line for line in rude.lines if not line.startswith("kvbench_sink,")]) == made
        assert export(copy, "--influx", rude.url, "--resume") == (0, f"nothing was missing in {rude.url}/write?db=kvbench\n")


def test_what_was_delivered_later_is_not_missing_in_the_report(tmp_path: Path) -> None:
    """The run's sink met a login that was not taken; after `export --resume` its account is whole, in points of the run."""
    with Rude() as rude:
        sunk = RUN + f'sinks: [{{kind: influx, url: "{rude.url}", mode: v1, drain: 1s}}]\n'
        rude.script = lambda lines, n: (204, {}, b"") if n == 1 else (401, {}, b"")
        run = simulated(sunk, tmp_path)
        check = next(row for row in run.summary["verdict"]["checks"] if row["check"] == "sink_loss")
        assert (check["level"], check["value"]) == ("DEGRADED", 1)
        made = run.summary["telemetry"]["sinks"][0]["points"]
        rude.script = None
        code, said = export(run.directory, "--influx", rude.url, "--resume")
        assert (code, said) == (0, f"sent {made:,} points to {rude.url}/write?db=kvbench\n")
    summary = summarise(load(run.directory))
    (told,) = summary["telemetry"]["sinks"]
    assert (told["points"], told["delivered"], told["remaining"], told["complete"]) == (made, made, 0, True)
    assert next(row for row in summary["verdict"]["checks"] if row["check"] == "sink_loss")["level"] == "OK"
    assert not any("--resume" in line for line in summary["next"])
    lines = (run.directory / "events.jsonl").read_bytes().splitlines(keepends=True)
    (run.directory / "events.jsonl").write_bytes(b"".join(line for line in lines if b'"sink"' not in line))
    (killed,) = summarise(load(run.directory))["telemetry"]["sinks"]
    assert killed["complete"], "a run that was killed had no account of its own"
    next(run.directory.rglob("sink.json")).write_text('{"ledger": {"to": 1}')
    assert summarise(load(run.directory))["telemetry"]["sinks"] == []


def test_the_help_says_what_to_install() -> None:
    assert "'.[parquet]'" in " ".join(export("--help")[1].replace("│", " ").split())
