"""`kvbench profile` on exports made by hand: golden numbers, which ranges count, whose a GPU operation is, hostile files."""

import itertools
import json
import os
import sqlite3
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvbench.cli import app
from kvbench.nsys import CaptureError, Name, Operations, Ranges
from kvbench.nsys.account import profiled, ranges
from kvbench.nsys.device import gaps
from kvbench.nsys.events import read
from kvbench.nsys.layers import robust_z
from kvbench.nsys.names import Place, told
from kvbench.nsys.passes import passes
from kvbench.nsys.projection import inside_of
from kvbench.nsys.source import opened
from tests.nsys.made import SCHEMA, THREAD, UTC, Made, tiny

TINY = Path(__file__).parents[1] / "data/nsys/tiny.sqlite"
US = 1e-6


def account(path: Path) -> dict[str, Any]:
    with opened(path) as tables:
        return profiled(read(tables))


def profile(*arguments: str | Path) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["profile", *map(str, arguments)])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.stdout, found.stderr


def layers(made: Made) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["stack"], row["layer"]): row for row in account(made.done())["layers"]}


# ---------------------------------------------------------------- golden


def test_a_capture_worked_out_by_hand() -> None:
    told = account(TINY)
    assert (told["exporter"], told["schema"], told["mode"], told["by"]) == ("made by hand", "3.0.0", "eager", "gpu")
    assert told["began"] == UTC / 1e9
    assert told["ranges"] == {
        "count": 18, "unfinished": 0, "damaged": 0, "output_twins": 6, "nested": 0, "passes": 6, "threads": 1, "processes": 1,
    }  # fmt: skip
    for row, gpu, busy, share in zip(told["layers"], (60, 60, 120), (80, 80, 240), (0.25, 0.25, 0.5), strict=True):
        # layer 0 of a step: attention from 20 to 30 us, gemm from 50 to 80: 60 projected; layer 2: 240 to 270, 270 to 360
        assert row["count"] == 2
        assert row["cpu"]["mean"] == row["cpu"]["p99"] == pytest.approx(100 * US)
        assert row["gpu"]["total"] == pytest.approx(2 * gpu * US)
        assert (row["gpu"]["min"], row["gpu"]["max"]) == pytest.approx((gpu * US, gpu * US))
        assert row["busy"] == pytest.approx(busy * US)
        assert (row["share"], row["kernels"], row["operations"], row["outlier"]) == (share, 2, 2, False)
        assert [(each["name"], each["share"]) for each in row["top_kernels"]] == [("gemm", 0.75), ("attention", 0.25)]
        assert row["dram_share"] == pytest.approx(0.5)  # 40 % read and 10 % written
    assert told["layers"][2]["z"] == pytest.approx(60 / (1.2533 * 20))  # medians 60, 60, 120: mean deviation 20
    (part,) = told["parts"]
    assert (part["name"], part["count"]) == ("self_attn", 6)
    assert part["gpu"]["total"] == pytest.approx(2 * (60 + 60 + 120) * US)  # both kernels are launched in its 1 to 50 us
    assert told["unknown"] == []
    (copied,) = told["memory"]
    assert (copied["name"], copied["count"], copied["bytes"]) == ("memcpy Device-to-Host", 2, 1_000_000)
    assert copied["bytes_per_s"] == pytest.approx(1e6 / (10 * US))
    (gpu,) = told["devices"]
    assert gpu["busy"] == pytest.approx(410 * US)  # 2 x (40 + 40 + 120 + 5)
    assert gpu["busy_share"] == pytest.approx(410 / 745)  # from 20 to 765 us
    assert gpu["outside_layers"] == pytest.approx(10 / 410)
    assert (gpu["gaps"]["count"], gpu["gaps"]["total"]) == (9, pytest.approx(335 * US))
    assert gpu["top_gaps"][0] == {
        "at": pytest.approx(365 * US), "seconds": pytest.approx(55 * US), "before": "memcpy Device-to-Host", "after": "attention",
    }  # fmt: skip
    assert [(each["stream"], each["operations"]) for each in gpu["streams"]] == [(7, 12), (8, 2)]
    assert told["metrics"][0]["bytes_per_s"] == pytest.approx(0.4e12)
    assert (told["advice"], told["graphs"]["launches"], told["diagnostics"]) == (None, 0, [])


def test_the_file_in_data_is_what_its_source_makes(tmp_path: Path) -> None:
    assert list(sqlite3.connect(tiny(tmp_path / "again.sqlite")).iterdump()) == list(sqlite3.connect(TINY).iterdump())


def test_the_page_says_it(tmp_path: Path) -> None:
    code, said, errors = profile(TINY, "--json", tmp_path / "told.json")
    assert (code, errors) == (0, "")
    for each in ("3 layers, 6 passes", "eager mode", "120 us", "memcpy Device-to-Host", "MADE UP GPU", "DRAM Read", "stream 8"):
        assert each in said, each
    code, said, _ = profile(TINY, "--json", "-")
    assert json.loads(said) == json.loads((tmp_path / "told.json").read_text()) == {**account(TINY), "run": None}


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("DecoderLayer_18", Place("DecoderLayer", 18, "")),
        ("LlamaDecoderLayer_3.self_attn", Place("LlamaDecoderLayer", 3, "self_attn")),
        ("model.layers.18", Place("model.layers", 18, "")),
        ("layers.0", Place("layers", 0, "")),
        ("model.layers.1.mlp.experts.7", Place("model.layers", 1, "mlp.experts.7")),
        ("encoder.layers.1.layers.2", Place("encoder.layers", 1, "layers.2")),
        ("{'Module': 'model.layers.18.self_attn.qkv_proj', 'TrainableParams': 5, 'Inputs': [[1, 2]]}",
         Place("model.layers", 18, "self_attn.qkv_proj")),
        ("{'Module': 'model.layers.4', 'Inputs': tensor([1])}", Place("model.layers", 4, "")),  # no literal: by search
        ('{"Module": "model.layers.5"', Place("model.layers", 5, "")),  # cut off
        ("{'Module': 'model.layers.6', 'x': " + "[" * 3000, Place("model.layers", 6, "")),  # too deep to parse
        ("{'Module': 'model.layers.7', 'x': '" + "y" * 50_000 + "'}", Place("model.layers", 7, "")),  # too long to parse
        ("model.layers", None), ("model.embed_tokens", None), ("mylayers.3", None), ("players.3", None), ("", None), ("{}", None),
        ("{'Module': 3}", None), ("DecoderLayer_" + "9" * 5000, None), ("DecoderLayer_x", None), ("layers.٣", None),
    ],
)  # fmt: skip
def test_names(text: str, place: Place | None) -> None:
    assert told(text).place == place


@pytest.mark.parametrize(
    "text",
    [
        "{'Module': 'top.model.layers.3', 'Outputs': [[4, 64]]}",  # vLLM's hooks, after every module
        "{'Module': 'top.model.layers.3', 'TrainableParams': " + "[" * 3000 + ", 'Outputs': [[4, 64]]}",
        "{'Module': 'model.layers.3 (output)', 'Inputs': [[4, 64]]}",  # around what is compiled
        "{'Module': 'compiled (output): model.layers.3'}",
        "model.layers.3 (output)",
    ],
)
def test_a_twin_is_dropped(text: str) -> None:
    assert (told(text).place, told(text).twin) == (None, True)
    first = told(text.replace("(output)", "(input)").replace("'Outputs'", "'Inputs'"))
    assert first.place is not None
    assert (first.place.layer, first.place.part, first.twin) == (3, "", False)


# ---------------------------------------------------------------- which ranges count


def test_a_layer_and_its_parts_are_never_added_up(tmp_path: Path) -> None:
    made = Made(tmp_path / "x.sqlite").ranges([
        ("model.layers.0", 0, 100), ("model.layers.0.self_attn", 10, 40), ("model.layers.0.mlp", 50, 90),
        ("model.layers.0.mlp", 200, 290),  # outside of the layer's own range, so somebody else's call: the layer has its own
        ("model.layers.1.self_attn", 300, 340), ("model.layers.1.self_attn.qkv", 310, 320), ("model.layers.1.mlp", 350, 380),
        ("model.layers.1.self_attn", 400, 440), ("model.layers.1.mlp", 450, 490),
    ])  # fmt: skip
    found = layers(made)
    own, parts = found["model.layers", 0], found["model.layers", 1]
    assert (own["count"], own["cpu"]["total"] * 1e9, own["from_parts"]) == (1, pytest.approx(100), False)
    assert (parts["count"], parts["from_parts"]) == (2, True)
    assert [parts["cpu"][key] * 1e9 for key in ("min", "max", "total")] == pytest.approx([70, 80, 150])


def test_ranges_inside_others_are_not_counted_twice(tmp_path: Path) -> None:
    made = Made(tmp_path / "x.sqlite").ranges([
        ("DecoderLayer_3", 0, 100), ("DecoderLayer_3", 10, 90), ("DecoderLayer_3", 20, 80), ("DecoderLayer_4", 30, 40),
        ("DecoderLayer_3", 0, 100),
    ])  # fmt: skip
    told = account(made.done())
    assert [(row["layer"], row["count"]) for row in told["layers"]] == [(3, 1)]
    assert told["ranges"]["nested"] == 4
    assert any("4 layer ranges lay inside another" in note for note in told["notes"])


def test_a_range_that_begins_with_the_layer_is_inside_it(tmp_path: Path) -> None:
    made = Made(tmp_path / "x.sqlite").ranges([("DecoderLayer_3", 0, 50), ("DecoderLayer_3", 0, 100)])
    (row,) = layers(made).values()
    assert (row["count"], row["cpu"]["total"] * 1e9) == (1, pytest.approx(100))


def test_a_layer_is_one_whatever_its_inputs(tmp_path: Path) -> None:
    made = Made(tmp_path / "x.sqlite")
    for step, shape in enumerate(([1, 64], [2, 64], [1, 64])):
        made.range(str({"Module": "model.layers.0", "Inputs": shape}), step * 100, step * 100 + 50)
    (row,) = layers(made).values()
    assert (row["count"], row["from_parts"], row["cpu"]["max"] * 1e9) == (3, False, pytest.approx(50))


def test_stacks_threads_and_processes_are_kept_apart(tmp_path: Path) -> None:
    made = Made(tmp_path / "x.sqlite")
    made.range("vision.layers.0", 0, 50)
    for rank in (0, 1):  # the same instants in two processes
        made.range("model.layers.0", 100, 200 + rank * 100, THREAD + rank * 0x1000000)
    found = account(made.done())
    assert [(row["stack"], row["count"]) for row in found["layers"]] == [("model.layers", 2), ("vision.layers", 1)]
    assert found["layers"][0]["cpu"]["total"] * 1e9 == pytest.approx(300)
    assert any("2 processes" in note for note in found["notes"])


def test_domains_ids_ends_and_kinds_of_ranges(tmp_path: Path) -> None:
    made = Made(tmp_path / "x.sqlite")
    made.insert("NVTX_EVENTS", start=0, eventType=75, text="engine", globalTid=THREAD, domainId=1)
    made.insert("NVTX_EVENTS", start=0, eventType=75, text="other", globalTid=THREAD + 0x1000000, domainId=1)
    made.range(None, 0, 10, textId=made.string("step"), domainId=1)  # registered: its name is in StringIds
    made.range("step", 20, 30)  # the default domain
    made.range("DecoderLayer_0", 40, None)  # the capture ended first
    made.range("DecoderLayer_0", 40, 90, eventType=60)
    made.range("mark", 50, 50, eventType=34)
    made.range(
        "DecoderLayer_1", 100, 9_000, eventType=60, endGlobalTid=THREAD + 1
    )  # ends on another thread: nobody's call is inside
    made.kernel("k", 120, 130, 140)
    told = account(made.done())
    assert {row["name"] for row in told["unknown"]} == {"engine:step", "step"}
    assert (told["ranges"]["unfinished"], told["ranges"]["count"]) == (1, 4)
    assert [(row["layer"], row["count"], row["gpu"]) for row in told["layers"]] == [(0, 1, None), (1, 1, None)]


def test_graphs_are_said_to_hide_ranges(tmp_path: Path) -> None:
    made = Made(tmp_path / "x.sqlite").ranges([("DecoderLayer_0", 0, 10_000)])
    made.kernel("eager", 1_000, 5_000, 6_000, graphNodeId=0)
    graph = made.launch(20_000, name="cudaGraphLaunch_v10000")
    for at in (30_000, 31_000, 32_000):
        number = made.string("captured")
        kernel = {"deviceId": 0, "streamId": 7, "demangledName": number, "shortName": number, "graphNodeId": at}
        made.insert("CUPTI_ACTIVITY_KIND_KERNEL", start=at, end=at + 1_000, **kernel, **graph)
    told = account(made.done())
    assert told["graphs"] == {"launches": 1, "operations": 3, "share": 0.75}
    assert any("CUDA graphs were launched (1 times) and did 75 %" in note for note in told["notes"])


def test_one_slow_layer_of_many_stands_out(tmp_path: Path) -> None:
    made = Made(tmp_path / "x.sqlite")
    lengths = {layer: 1_000 + 7 * layer for layer in range(16)} | {9: 2_000}
    for layer, length in lengths.items():
        for again in range(3):
            made.range(f"DecoderLayer_{layer}", 10_000 * layer + 3_000 * again, 10_000 * layer + 3_000 * again + length)
    told = account(made.done())
    assert [row["layer"] for row in told["layers"] if row["outlier"]] == [9]
    # medians 1000, 1007, ... 1105 without 1063, and 2000: the eighth and ninth are 1049 and 1056
    assert told["layers"][9]["z"] == pytest.approx(
        0.6745 * (2000 - 1052.5) / np.median([abs(v - 1052.5) for v in lengths.values()])
    )


def test_robust_z_of_equal_and_of_few() -> None:
    assert robust_z(np.array([])).tolist() == []
    assert robust_z(np.array([5.0, 5.0, 5.0])).tolist() == [0, 0, 0]
    assert robust_z(np.array([1.0, 2.0, 3.0])).tolist() == pytest.approx([-0.6745, 0, 0.6745])


# ---------------------------------------------------------------- whose operations


def test_an_operation_is_of_the_process_that_launched_it(tmp_path: Path) -> None:
    """Correlations count per process: the same number in two of them is two operations."""
    made = Made(tmp_path / "x.sqlite").ranges([("DecoderLayer_0", 0, 10_000)])
    made.range("DecoderLayer_0", 0, 10_000, THREAD + 0x1000000)
    for rank, end in ((0, 300), (1, 900)):
        thread = THREAD + rank * 0x1000000
        made.calls = 0
        made.kernel("k", 1_000, 100, end, thread)
    (row,) = layers(made).values()
    assert [row["gpu"][key] * 1e9 for key in ("min", "max")] == pytest.approx([200, 800])


def test_an_operation_is_of_the_first_call_with_its_number(tmp_path: Path) -> None:
    """A runtime call and the driver call that it makes may share a correlation."""
    made = Made(tmp_path / "x.sqlite").ranges([("DecoderLayer_0", 0, 10_000), ("DecoderLayer_1", 20_000, 40_000)])
    made.kernel("k", 1_000, 50_000, 50_600)
    made.calls = 0
    made.launch(30_000)
    first, second = layers(made).values()
    assert (first["operations"], second["operations"]) == (1, 0)


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 25), st.integers(0, 2)), max_size=12)
CALLS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(0, 2)), max_size=25)


def work_of(calls: list[tuple[int, int, int]]) -> Operations:
    """Operations whose calls follow each other on their thread: (pause before, length, thread)."""
    clocks, rows = [0, 0, 0], []
    for pause, length, thread in calls:
        start = clocks[thread] + pause
        clocks[thread] = start + length + 1
        rows.append((start, start + length, thread))
    start, end, thread = np.array(rows, np.int64).reshape(-1, 3).T
    zeros, n = np.zeros(len(rows), np.int64), len(rows)
    return Operations(start, end + 5, zeros, zeros, zeros, zeros, zeros, start, end, thread, np.zeros(n, bool), ["k"])


@given(SPANS, CALLS)
def test_operations_inside_spans_are_those_a_plain_search_finds(
    spans: list[tuple[int, int, int]], calls: list[tuple[int, int, int]]
) -> None:
    work = work_of(calls)
    ordered = sorted((thread, start, start + length) for start, length, thread in spans)
    thread, start, end = np.array(ordered, np.int64).reshape(-1, 3).T
    low, high, order = inside_of(work, thread, start, end)
    for i, (on, begin, stop) in enumerate(ordered):
        plain = {
            j for j in range(len(work.start)) if work.thread[j] == on and begin <= work.call_start[j] and work.call_end[j] <= stop
        }
        assert set(order[low[i] : high[i]].tolist()) == plain


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 10)), min_size=1, max_size=20))
def test_gaps_and_busy_time_are_those_of_a_plain_count(spans: list[tuple[int, int]]) -> None:
    ordered = sorted((start, start + length) for start, length in spans)
    covered = {tick for start, end in ordered for tick in range(start, end)}
    start, end = np.array(ordered, np.int64).T
    _, length, busy = gaps(start, end)
    assert busy == len(covered)
    assert busy + int(length.sum()) == int(end.max() - start.min())


NAMES = ["a", "model", "model.layers.0", "model.layers.1", "model.layers.0.mlp", "model.layers.1.mlp", "DecoderLayer_0 (output)"]
TREES = st.recursive(
    st.tuples(st.sampled_from(NAMES), st.just([])),
    lambda inner: st.tuples(st.sampled_from(NAMES), st.lists(inner, max_size=3)),
    max_leaves=12,
)


@given(TREES)
def test_however_ranges_nest_no_instant_counts_twice(tree: Any) -> None:
    rows: list[tuple[int, int, str]] = []
    clock = itertools.count()

    def lay(node: Any) -> None:
        start = next(clock)
        for child in node[1]:
            lay(child)
        rows.append((start, next(clock), node[0]))

    lay(tree)
    names = sorted({name for _, _, name in rows})
    start, end, name = np.array([(start, end, names.index(name)) for start, end, name in rows], np.int64).T
    nested = Ranges(start, end, np.full(len(rows), 5), name, [Name("", text) for text in names])
    found = passes(nested, work_of([]))
    own = {layer for layer in (0, 1) if f"model.layers.{layer}" in names}
    covers = {layer: {f"model.layers.{layer}"} if layer in own else {f"model.layers.{layer}.mlp"} for layer in (0, 1)}
    counting = [row for row in rows if any(row[2] in each for each in covers.values())]
    outermost = [r for r in counting if not any(o[0] < r[0] and r[1] < o[1] for o in counting)]
    assert int(found.cpu.sum()) == sum(stop - begin for begin, stop, _ in outermost)
    ticks = [tick for begin, stop, _ in outermost for tick in range(begin, stop)]
    assert len(ticks) == len(set(ticks))
    assert found.nested == len(counting) - len(outermost)
    inside = [any(o[0] <= r[0] and r[1] <= o[1] for o in outermost) for r in rows]
    assert found.inside.tolist() == inside


# ---------------------------------------------------------------- files that are not what they should be


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_what_is_no_capture_is_said_to_be_none(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE t (x)")
    db.close()
    for path, why in (
        (tmp_path / "none.sqlite", "No such file"),
        (tmp_path, "Is a directory"),
        (write(tmp_path / "empty.sqlite", b""), "is empty"),
        (write(tmp_path / "empty.nsys-rep", b""), "is empty"),
        (write(tmp_path / "text.sqlite", b"hello" * 100), "neither a capture"),
        (write(tmp_path / "raw.qdstrm", b"x"), "never imported"),
        (write(tmp_path / "cut.sqlite", TINY.read_bytes()[:9000]), "damaged or cut off"),
        (write(tmp_path / "head.sqlite", TINY.read_bytes()[:100]), "damaged or cut off"),
        (other, "no export of Nsight Systems"),
    ):
        code, said, errors = profile(path)
        assert (code, said) == (2, ""), path
        assert errors.startswith("kvbench profile: ")
        assert why in errors, errors
        with pytest.raises(CaptureError):
            ranges(path)


def test_bytes_changed_anywhere_never_end_in_a_traceback(tmp_path: Path) -> None:
    content, rnd = TINY.read_bytes(), np.random.default_rng(5)
    for at in range(25):
        hurt = bytearray(content)
        for place in rnd.integers(100, len(content), 40).tolist():
            hurt[place] = int(rnd.integers(0, 256))
        code, _, errors = profile(write(tmp_path / f"{at}.sqlite", bytes(hurt)), "--json", "-")
        assert code in (0, 1, 2)
        assert (code == 0) == (errors == "")


@pytest.mark.parametrize("table", [line.split()[2] for line in SCHEMA.splitlines() if line.startswith("CREATE")])
def test_any_table_may_be_missing_or_full_of_nothing(table: str, tmp_path: Path) -> None:
    for name, change in (
        ("gone", "DROP TABLE {0}"),
        ("empty", "DELETE FROM {0}"),
        ("null", "UPDATE {0} SET {1}"),
        ("text", "UPDATE {0} SET {2}"),
    ):
        path = write(tmp_path / f"{name}.sqlite", TINY.read_bytes())
        with sqlite3.connect(path) as db:
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})") if not row[5]]
            nulls, words = (
                ", ".join(f'"{column}" = {value}' for column in columns) for value in ("NULL", "'é' || char(0) || '[bold]'")
            )
            db.execute(change.format(table, nulls, words))
        db.close()
        code, said, errors = profile(path)
        assert code in (0, 1), errors
        if code == 0:
            assert "3 layers" in said


def test_numbers_beyond_reason_are_left_out_and_said(tmp_path: Path) -> None:
    made = Made(tmp_path / "x.sqlite").ranges([
        ("DecoderLayer_0", 0, 100), ("DecoderLayer_0", 50, 10), ("DecoderLayer_1", -(2**63), 2**63 - 1),
        ("DecoderLayer_2", 2**62, 2**63 - 1),
    ])  # fmt: skip
    made.range("DecoderLayer_3", None, None)
    made.range("DecoderLayer_4", 1, 2, None)  # no thread
    made.kernel("k", 0, 2**63 - 1, 5)
    told = account(made.done())
    assert [row["layer"] for row in told["layers"]] == [0, 4]
    assert (told["ranges"]["damaged"], told["ranges"]["unfinished"]) == (3, 1)
    assert any("4 rows make no sense" in note for note in told["notes"])


def test_names_of_others_drive_no_terminal(tmp_path: Path) -> None:
    made = Made(tmp_path / "x.sqlite").ranges([("DecoderLayer_0", 0, 100), ("\x1b[31m[bold]" + "n" * 100_000, 200, 300)])
    made.kernel("\x1b]0;x\x07[red]", 10, 20, 30)
    code, said, _ = profile(made.done())
    assert code == 0
    assert "\x1b" not in said
    assert "[bold]n" in said
    assert len(said) < 20_000


def test_a_deep_recursion_of_ranges_is_one_layer(tmp_path: Path) -> None:
    deep = 3_000
    made = Made(tmp_path / "x.sqlite").ranges(("DecoderLayer_0", i, 2 * deep - i) for i in range(deep))
    told = account(made.done())
    assert [(row["layer"], row["count"]) for row in told["layers"]] == [(0, 1)]
    assert told["ranges"]["nested"] == deep - 1


# ---------------------------------------------------------------- on a run's clock


def run(folder: Path, wall: float = UTC / 1e9 - 100, clock: str = "real") -> Path:
    """A run that began 100 s before the tiny capture; windows of 10 s every 5 s, and phases that meet at 95 s."""
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"name": "by hand", "clock": clock}))
    phases = {name: {"phase": name, "phase_kind": name} for name in ("warmup", "steady")}
    events = [
        (0, "run_start", {"wall": wall}), (0, "phase_start", phases["warmup"]), (95, "phase_end", phases["warmup"]),
        (95, "phase_start", phases["steady"]), (200, "phase_end", phases["steady"]),
    ]  # fmt: skip
    (folder / "events.jsonl").write_text(
        "".join(json.dumps({"t": t, "kind": kind, "data": data}) + "\n" for t, kind, data in events)
    )
    with open(folder / "windows.jsonl", "w") as out:
        for start in range(0, 200, 5):
            values = {"output_tokens_rate": 1000.0 + start, "ok_rate": 2.0, "ttft_p50": 0.25, "kv_usage_mean": None}
            print(json.dumps({"start": start, "end": start + 10, "counts": {"ok": 20}, "values": values}), file=out)
    return folder


def test_a_capture_lies_in_the_windows_of_its_run(tmp_path: Path) -> None:
    code, said, errors = profile(TINY, "--run", run(tmp_path / "run"), "--json", tmp_path / "told.json")
    assert (code, errors) == (0, "")
    told = json.loads((tmp_path / "told.json").read_text())["run"]
    assert told["from"] == pytest.approx(100, abs=1e-6)  # whole seconds since 1970 as a double: 0.2 us
    assert told["to"] == pytest.approx(100.000765, abs=1e-6)
    assert told["phases"] == ["steady"]
    assert [(row["start"], row["end"], row["ok"], row["output_tokens_rate"]) for row in told["windows"]] == [
        (95, 105, 20, 1095), (100, 110, 20, 1100),
    ]  # fmt: skip
    assert told["windows"][1]["covered"] == pytest.approx(765e-6 / 10, rel=1e-3)
    rest = [1000 + start for start in range(105, 195, 5)]  # of steady, without the two
    assert told["rates"]["output_tokens_rate"] == {"covered": 1097.5, "rest_of_phase": sum(rest) / len(rest)}
    assert "100.00 to 100.00 s (steady)" in said
    assert "95 to 105 s" in said
    assert "250 ms" in said


def test_a_capture_of_another_time_is_refused(tmp_path: Path) -> None:
    virtual = run(tmp_path / "virtual", clock="virtual")
    later = run(tmp_path / "later", UTC / 1e9 + 50)
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    unclocked = Made(tmp_path / "unclocked.sqlite").ranges([("DecoderLayer_0", 0, 100)]).done()
    good = run(tmp_path / "good")
    for path, directory, why in (
        (TINY, virtual, "virtual clock"), (TINY, later, "lies at -50.0 to -50.0 s"), (TINY, nothing, "not a run directory"),
        (TINY, tmp_path / "none", "no such directory"), (unclocked, good, "does not say when it began"),
    ):  # fmt: skip
        code, said, errors = profile(path, "--run", directory)
        assert (code, said) == (2, "")
        assert why in errors, errors


# ---------------------------------------------------------------- nsys


def fake(folder: Path, script: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "nsys"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A capture that only a fake nsys reads, which must be found first."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return write(tmp_path / "x.nsys-rep", b"capture")


def test_without_nsys_a_capture_is_refused_with_advice(captured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("kvbench.nsys.source._INSTALLED", ())
    code, _, errors = profile(captured)
    assert code == 2
    assert "none is installed here" in errors
    assert "nsys export -t sqlite x.nsys-rep" in errors


@pytest.mark.parametrize("suffix", [".nsys-rep", ".qdrep"])
def test_nsys_exports_what_is_read(captured: Path, tmp_path: Path, suffix: str) -> None:
    fake(tmp_path / "bin", f'echo "$@" > {tmp_path}/said; while [ "$1" != -o ]; do shift; done; cp {TINY} "$2"')
    capture = captured.rename(captured.with_suffix(suffix))
    code, said, _ = profile(capture)
    assert code == 0
    assert "3 layers" in said
    assert (tmp_path / "said").read_text().startswith("export -t sqlite -f true -o ")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'Exportation error: bad.'; exit 1", "failed (exit code 1): Exportation error: bad."),
        ("exit 0", "failed (exit code 0): it said nothing"),
        ('while [ "$1" != -o ]; do shift; done; echo hello > "$2"', "damaged"),
    ],
)
def test_an_nsys_that_fails_is_named(captured: Path, tmp_path: Path, script: str, why: str) -> None:
    fake(tmp_path / "bin", script)
    code, said, errors = profile(captured)
    assert (code, said) == (2, "")
    assert why in errors


def test_an_nsys_that_never_ends_is_stopped_with_its_children(captured: Path, tmp_path: Path) -> None:
    fake(tmp_path / "bin", f"sleep 600 & echo $! > {tmp_path}/child; wait")
    with pytest.raises(CaptureError, match=r"did not end within 0\.5 s and was stopped"):
        ranges(captured, wait=0.5)
    child = int((tmp_path / "child").read_text())
    status = Path(f"/proc/{child}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"
