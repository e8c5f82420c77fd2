"""`kvbench profile` on real captures, and against what `nsys stats` itself says of the same files."""

import json
import os
import random
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvbench.cli import app
from kvbench.nsys.account import profiled, ranges
from kvbench.nsys.events import read
from kvbench.nsys.source import opened
from tests.nsys import nsight

pytestmark = nsight.needed
LAYERS, STEPS = 32, nsight.STEPS
SECOND = 1_000_000_000


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A capture, its export as users make it, one with every table, and UTC around its marked range."""
    folder = tmp_path_factory.mktemp("nsys")
    captured, before, after = nsight.capture(folder)
    exported = nsight.export(captured, folder / "plain.sqlite")
    full = nsight.export(captured, folder / "full.sqlite", "--lazy=false")
    return {"capture": captured, "export": exported, "full": full, "utc": (before, after)}


@pytest.fixture(scope="module")
def worked(real: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with synthetic GPU work: a kernel for every part of a layer, copies and fills between, on two streams."""
    made, rnd = nsight.Synthetic(real["full"], tmp_path_factory.mktemp("worked") / "worked.sqlite"), random.Random(3)
    made.insert("TARGET_INFO_GPU", id=0, cuDevice=0, name="SYNTHETIC GPU", totalMemory=80 * 10**9, memoryBandwidth=3_350 * 10**9)
    clock = 0
    for number, (start, end, thread, name) in enumerate(made.ranges()):
        if name not in ("self_attn", "mlp"):
            continue
        launched = made.launch(thread, start + 1_000, min(end - 500, start + 4_000))
        length = {"self_attn": 20_000, "mlp": 50_000}[name] + rnd.randint(0, 9_000)
        clock = max(clock, start + 5_000) + rnd.randint(0, 2_000)
        made.kernel({"self_attn": "flash_fwd", "mlp": "gemm"}[name], clock, clock + length, launched, graphNodeId=None)
        clock += length
        if number % 5 == 0:
            copied = made.launch(thread, start + 4_200, start + 4_900, "cudaMemcpyAsync_v3020")
            where = {"start": clock, "end": clock + 3_000, "streamId": 9, **copied}
            made.insert("CUPTI_ACTIVITY_KIND_MEMCPY", bytes=rnd.randint(1, 10**6), copyKind=1 + number % 2, **where)
            filled = made.launch(thread, start + 4_900, start + 4_950, "cudaMemsetAsync_v3020")
            made.insert(
                "CUPTI_ACTIVITY_KIND_MEMSET",
                **{**where, **filled, "start": clock + 3_500, "end": clock + 4_500},
                bytes=4096,
                value=0,
            )
    return made.done()


def account(path: Path) -> dict[str, Any]:
    with opened(path) as tables:
        return profiled(read(tables))


def projections(path: Path) -> dict[str, dict[str, str]]:
    """nsys' own projections by range: a summary, which in 2022 only its trace can be summed up to."""
    rows = nsight.report(path, "nvtx_gpu_proj_sum", "nvtxgpuproj")
    if "Range" in rows[0]:
        return {row["Range"]: row for row in rows}
    columns = {"Total Proj Time": "Projected Duration", "Total Range Time": "Orig Duration", "Total GPU Ops": "NumGPUOps"}
    found = {}
    for name in {row["Name"] for row in rows}:
        mine = [row for row in rows if row["Name"] == name]
        found[name] = {to: str(sum(int(row[of]) for row in mine)) for to, of in columns.items()} | {
            "Range Instances": str(len(mine))
        }
    return found


def kvbench(*arguments: str | Path) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["profile", *map(str, arguments)])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.stdout, found.stderr


def test_a_real_capture_gives_every_layer_as_nsys_counts_it(real: dict[str, Any]) -> None:
    told = account(real["export"])
    theirs = {row["Range"]: row for row in nsight.report(real["export"], "nvtx_pushpop_sum", "nvtxppsum")}
    assert [row["layer"] for row in told["layers"]] == list(range(LAYERS))
    worst = 0.0
    for row in told["layers"]:
        their = theirs[f"DecoderLayer_{row['layer']}"]
        assert row["count"] == int(their["Instances"]) == STEPS
        for ours, column in (("total", "Total Time"), ("mean", "Avg"), ("median", "Med"), ("min", "Min"), ("max", "Max")):
            worst = max(worst, abs(row["cpu"][ours] * 1e9 / float(their[column]) - 1))
    print(f"largest difference from nsys stats: {100 * worst:.4f} %")
    assert worst < 1e-5  # the issue asks for 1 %
    parts = {row["name"]: row for row in told["parts"]}
    assert {name: parts[name]["count"] for name in parts} == {"self_attn": STEPS * LAYERS, "mlp": STEPS * LAYERS}
    assert parts["mlp"]["total"] * 1e9 == pytest.approx(float(theirs["mlp"]["Total Time"]))
    assert {row["name"]: row["count"] for row in told["unknown"]} == {"kvbench:execute_model": STEPS, "marked": 1}
    assert told["by"] == "cpu"
    assert sum(row["share"] for row in told["layers"]) == pytest.approx(1)
    assert any("was CUDA traced" in note for note in told["notes"])


def test_both_generations_of_report_names_are_the_same_oracle(real: dict[str, Any]) -> None:
    """2023.4 has the names of before and after; newer and older ones have one of them."""
    new, old = (
        nsight.report(real["export"], *names) for names in (["nvtx_pushpop_sum", "nvtxppsum"], ["nvtxppsum", "nvtx_pushpop_sum"])
    )
    assert new == old


def test_a_capture_lies_in_utc(real: dict[str, Any], tmp_path: Path) -> None:
    before, after = real["utc"]
    paths = [real["export"]]
    if "--ts-normalize" in nsight.nsys("export", "--help"):  # 2023 and later
        paths.append(nsight.export(real["capture"], tmp_path / "utc.sqlite", "--ts-normalize=true"))
    for path in paths:
        with opened(path) as tables:
            capture = read(tables)
        marked = [i for i, name in enumerate(capture.ranges.names) if name.text == "marked"]
        at = int(capture.ranges.start[capture.ranges.name == marked[0]][0])
        assert capture.utc is not None
        assert before - SECOND // 100 < capture.utc + at < after + SECOND // 100, path
        assert capture.utc + capture.begin < before < capture.utc + capture.end


def test_a_capture_is_read_through_an_installed_nsys(
    real: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(nsight.NSYS.parent), prepend=os.pathsep)
    out = tmp_path / "told.json"
    code, said, errors = kvbench(real["capture"], "--json", out)
    assert (code, errors) == (0, "")
    assert "32 layers, 384 passes" in said
    through, direct = json.loads(out.read_text()), account(real["export"])
    assert through["file"] == str(real["capture"])
    assert through["layers"] == direct["layers"]
    found = ranges(real["capture"])
    assert found[:2] == (STEPS * (3 * LAYERS + 1) + 1, LAYERS)
    broken = tmp_path / "broken.nsys-rep"
    broken.write_bytes(real["capture"].read_bytes()[:2000])
    code, said, errors = kvbench(broken)
    assert (code, said) == (2, "")
    assert "nsys export failed" in errors


def test_layers_on_the_gpu_are_as_nsys_projects_them(worked: Path) -> None:
    told = account(worked)
    theirs = projections(worked)
    assert told["by"] == "gpu"
    for row in told["layers"]:
        their = theirs[f"DecoderLayer_{row['layer']}"]
        assert row["count"] == int(their["Range Instances"])
        assert row["gpu"]["total"] * 1e9 == pytest.approx(float(their["Total Proj Time"]), rel=1e-9)
        assert row["cpu"]["total"] * 1e9 == pytest.approx(float(their["Total Range Time"]), rel=1e-9)
        assert row["operations"] * row["count"] == int(their["Total GPU Ops"])
        assert [each["name"] for each in row["top_kernels"]] == ["void gemm<Traits>(Params)", "void flash_fwd<Traits>(Params)"]
        assert row["kernels"] == 2
    assert len(told["layers"]) == LAYERS
    for row in [*told["parts"], *told["unknown"]]:
        if row["name"] != "marked":
            assert row["gpu"]["total"] * 1e9 == pytest.approx(float(theirs[row["name"]]["Total Proj Time"]), rel=1e-9)
    assert told["devices"][0]["outside_layers"] == 0


def test_kernels_and_memory_operations_are_as_nsys_sums_them(worked: Path) -> None:
    told = account(worked)
    theirs = nsight.report(worked, "cuda_gpu_kern_sum", "gpukernsum")
    assert [row["name"] for row in told["kernels"]] == [row["Name"] for row in theirs]
    for row, their in zip(told["kernels"], theirs, strict=True):
        assert (row["count"], round(row["total"] * 1e9)) == (int(their["Instances"]), int(their["Total Time"]))
        assert 100 * row["share"] == pytest.approx(float(their["Time"]), abs=0.06)
    times = {row["Operation"]: row for row in nsight.report(worked, "cuda_gpu_mem_time_sum", "gpumemtimesum")}
    sizes = {row["Operation"]: row for row in nsight.report(worked, "cuda_gpu_mem_size_sum", "gpumemsizesum")}
    ours = {f"[CUDA {row['name']}]": row for row in told["memory"]}
    short = {name.replace("Host-to-Device", "HtoD").replace("Device-to-Host", "DtoH"): name for name in ours}  # nsys 2022
    assert {name.split(" (")[0] if "memset" in name else name for name in ours} == {short.get(name, name) for name in times}
    for name, row in ours.items():
        key = name.split(" (")[0]
        their = times.get(key) or times[name.replace("Host-to-Device", "HtoD").replace("Device-to-Host", "DtoH")]
        assert (row["count"], round(row["total"] * 1e9)) == (int(their["Count"]), int(their["Total Time"]))
        moved = sizes.get(key) or sizes[name.replace("Host-to-Device", "HtoD").replace("Device-to-Host", "DtoH")]
        assert row["bytes"] / 1e6 == pytest.approx(float(moved["Total"]), abs=0.0006)
        assert row["bytes_per_s"] == pytest.approx(row["bytes"] / row["total"])


def test_an_export_of_2022_reads_the_same(worked: Path, tmp_path: Path) -> None:
    """Names and columns of schema 3.0.0, made of a newer export: other table of meta data, no green contexts, texts in place."""
    old = tmp_path / "old.sqlite"
    old.write_bytes(worked.read_bytes())
    with sqlite3.connect(old) as db:
        if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'META_DATA_EXPORT'").fetchone():  # not if it is of 2022 already
            db.execute("ALTER TABLE META_DATA_EXPORT RENAME TO EXPORT_META_DATA")
        for table in ("KERNEL", "MEMCPY", "MEMSET"):
            if "greenContextId" in {row[1] for row in db.execute(f"PRAGMA table_info(CUPTI_ACTIVITY_KIND_{table})")}:
                db.execute(f"ALTER TABLE CUPTI_ACTIVITY_KIND_{table} DROP COLUMN greenContextId")
        db.execute("UPDATE NVTX_EVENTS SET text = (SELECT value FROM StringIds WHERE id = textId) WHERE textId IS NOT NULL")
        db.execute("ALTER TABLE NVTX_EVENTS DROP COLUMN textId")
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for name in tables:
            if name.startswith("ENUM_") or not db.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchone():
                db.execute(f"DROP TABLE {name}")
    db.close()
    ours, theirs = account(old), account(worked)
    assert ours["schema"] == theirs["schema"] != ""
    for key in theirs:
        if key not in ("file", "memory"):
            assert ours[key] == theirs[key], key
    assert [row["name"] for row in ours["memory"]] == [row["name"].split(" (")[0] for row in theirs["memory"]]


def test_an_export_of_tomorrow_may_have_more_columns(worked: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.sqlite"
    new.write_bytes(worked.read_bytes())
    with sqlite3.connect(new) as db:
        for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "StringIds"):
            db.execute(f"ALTER TABLE {table} ADD COLUMN unheardOf TEXT DEFAULT 'x'")
        db.execute("DROP TABLE IF EXISTS DIAGNOSTIC_EVENT")  # 2024 has one
        db.execute("CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER, severity INTEGER, text TEXT)")
        told = [
            (1, "Started."),
            (4, "Chatter."),
            (2, "NVTX payload extension is incompatible."),
            (3, "It broke."),
            (2, "NVTX payload extension is incompatible."),
        ]
        db.executemany("INSERT INTO DIAGNOSTIC_EVENT (severity, text) VALUES (?, ?)", told)
    db.close()
    ours, theirs = account(new), account(worked)
    assert ours["layers"] == theirs["layers"]
    assert [each["text"] for each in ours["diagnostics"]] == ["NVTX payload extension is incompatible.", "It broke."]
    code, said, _ = kvbench(new)
    assert code == 0
    assert "nsys warns: NVTX payload extension is incompatible." in said
    assert ranges(new).diagnostics == ("NVTX payload extension is incompatible.", "It broke.")


def test_a_capture_without_layers_is_an_error_with_advice(real: dict[str, Any], tmp_path: Path) -> None:
    none = tmp_path / "none.sqlite"
    none.write_bytes(real["export"].read_bytes())
    with sqlite3.connect(none) as db:
        db.execute("UPDATE StringIds SET value = replace(value, 'DecoderLayer', 'Block')")
    db.close()
    code, said, errors = kvbench(none)
    assert code == 1
    assert "--enable-layerwise-nvtx-tracing" in errors
    assert "Block_" in said
    with sqlite3.connect(none) as db:
        db.execute("DELETE FROM NVTX_EVENTS")
    db.close()
    code, said, errors = kvbench(none)
    assert code == 1
    assert "no NVTX range at all" in errors
    assert np.isclose(ranges(none).ranges, 0)
