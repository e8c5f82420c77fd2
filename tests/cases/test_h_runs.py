"""Group H of the public cases, as whole replays on the embedded engine."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.core import Record
from tests.whole import ROOT, Whole, kvbench, simulated

MOONCAKE = ROOT / "scenarios" / "traces" / "mooncake_conversation.jsonl.gz"


def row(t: float, n_in: int, n_out: int = 1, **more: Any) -> dict[str, Any]:
    return {"timestamp": t, "input_length": n_in, "output_length": n_out, **more}


def scenario(folder: Path, rows: list[dict[str, Any]], phases: str = "{steady: {}}", keys: str = "unit: ms") -> str:
    (folder / "t.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    target = "{kind: sim, model: llama-3.1-8b, hardware: h100}"
    return f"target: {target}\nworkload: {{arrivals: {{shape: trace, file: t.jsonl, {keys}}}}}\nphases: {phases}\n"


def replay(folder: Path, rows: list[dict[str, Any]], phases: str = "{steady: {}}", keys: str = "unit: ms") -> Whole:
    return simulated(scenario(folder, rows, phases, keys), folder)


def refused(folder: Path, text: str) -> str:
    (folder / "s.yaml").write_text(text)
    done = kvbench("run", folder / "s.yaml", "--out", folder / "out")
    assert done.returncode == 2, done.stdout
    assert not (folder / "out").exists()
    return done.stderr


def test_h01_wide_ids_are_different_blocks_and_equal_ones_the_same(tmp_path: Path) -> None:
    """Blocks of 512 + 1 tokens: only a whole earlier block can be found, and only under its whole id."""
    ids = [1, 2**32 + 1, 2**64 - 1, 1, 2**64 - 1]
    rows = [row(10_000 * k, 513, hash_ids=[name, 100 + k]) for k, name in enumerate(ids)]
    assert [r.cached for r in replay(tmp_path, rows).records] == [0, 0, 0, 512, 512]


def test_h03_a_wrong_number_of_ids_is_refused_with_its_line_before_the_run(tmp_path: Path) -> None:
    said = refused(tmp_path, scenario(tmp_path, [row(0, 512, hash_ids=[5]), row(1, 20, hash_ids=[0, 1])]))
    assert "t.jsonl:2: 2 block ids for 20 tokens in blocks of 512: must be 1" in said


def test_h03_right_numbers_of_ids_and_none_run_with_their_lengths(tmp_path: Path) -> None:
    rows = [
        row(0, 6758, hash_ids=list(range(14))), row(1000, 512, hash_ids=[50]), row(2000, 513, hash_ids=[51, 52]),
        row(3000, 700), row(4000, 700, hash_ids=[]),
    ]  # fmt: skip
    run = replay(tmp_path, rows)
    assert [(r.asked_in, r.n_in, r.outcome) for r in run.records] == [(n, n, "ok") for n in (6758, 512, 513, 700, 700)]
    assert run.records[4].cached == 0, "without ids a prompt is its own"
    arrivals = json.loads((run.directory / "manifest.json").read_text())["scenario"]["workload"]["arrivals"]
    assert "block" in arrivals, "the block size is stored with the result"


def test_h05_every_row_once_in_file_order_and_no_more_than_there_are(tmp_path: Path) -> None:
    rows = [row(3000 * (k // 3), 20 + k, 1 + k % 5) for k in range(37)]
    run = replay(tmp_path, rows)
    assert [(r.asked_in, r.asked_out) for r in run.records] == [(20 + k, 1 + k % 5) for k in range(37)]
    assert "50 requests asked of 37 trace rows" in refused(tmp_path, scenario(tmp_path, rows, "{steady: {requests: 50}}"))
    (tmp_path / "again").mkdir()
    wrapped = replay(tmp_path / "again", rows, "{steady: {requests: 50}}", "unit: ms, wrap: again")
    assert [r.asked_in for r in wrapped.records] == [20 + k % 37 for k in range(50)]
    assert all(r.cached == 0 for r in wrapped.records), "the second lap has new content"


@pytest.mark.parametrize(
    ("stamps", "keys", "due"),
    [
        ([0, 0.2, 0.4], "unit: s", [0, 0.2, 0.4]),
        ([0, 200, 400], "unit: ms", [0, 0.2, 0.4]),
        ([0, 0.2, 0.4], "", [0, 0.2, 0.4]),
        ([0, 200, 400], "", [0, 0.2, 0.4]),
        ([200, 0, 400], "unit: ms", [0, 0.2, 0.4]),
    ],
    ids=["s", "ms", "guessed s", "guessed ms", "unsorted"],
)
def test_h06_units_are_explicit_or_guessed_and_rows_sorted(
    stamps: list[float], keys: str, due: list[float], tmp_path: Path
) -> None:
    run = replay(tmp_path, [row(t, 20) for t in stamps], keys=keys)
    assert [r.due_ns / 1e9 for r in run.records] == pytest.approx(due)


def test_h06_a_guess_and_the_length_of_the_replay_are_printed_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(scenario(tmp_path, [row(t, 20) for t in (0, 200, 400)], keys=""))
    printed = " ".join(kvbench("check", tmp_path / "s.yaml").stdout.split())
    assert "read as ms" in printed
    assert "the replay takes 400 ms" in printed


@pytest.mark.parametrize("stamp", [float("nan"), -1])
def test_h06_what_is_no_time_is_refused_with_its_line(stamp: float, tmp_path: Path) -> None:
    assert "t.jsonl:2: " in refused(tmp_path, scenario(tmp_path, [row(0, 20), row(stamp, 20)]))


def test_h07_rows_without_tokens_are_never_sent_and_the_slices_rate_is_printed(tmp_path: Path) -> None:
    rows = ["0,ChatGPT,10,5,15,x", "2,ChatGPT,10,0,10,x", "3,GPT-4,0,7,7,x", "4,GPT-4,9,0,9,x", "8,GPT-4,30,4,34,x"]
    (tmp_path / "b.csv").write_text("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "\n".join(rows))
    text = scenario(tmp_path, []).replace("t.jsonl, unit: ms", "b.csv")
    run = simulated(text, tmp_path)
    assert [(r.due_ns / 1e9, r.asked_in, r.asked_out) for r in run.records] == [(0.0, 10, 5), (8.0, 30, 4)]
    printed = " ".join(kvbench("check", tmp_path / "scenario.yaml").stdout.split())
    assert "3 of 5 rows skipped" in printed


def facts(record: Record) -> tuple[int, int, int, int | None, int | None]:
    return record.due_ns, record.asked_in, record.asked_out, record.n_in, record.n_out


def wanted(lines: list[str]) -> list[tuple[int, int, int, int, int]]:
    """What the file itself says, read without kvbench: due in ns, lengths asked for and got."""
    rows = sorted((json.loads(line) for line in lines), key=lambda each: each["timestamp"])
    lengths = [(each["timestamp"] * 10**6, each["input_length"], each["output_length"]) for each in rows]
    return [(due - lengths[0][0], n_in, n_out, n_in, n_out) for due, n_in, n_out in lengths]


def test_mooncake_a_slice_replays_with_its_lengths_and_due_times(tmp_path: Path) -> None:
    """The first 200 rows of the shipped trace on the shipped scenario's target."""
    with gzip.open(MOONCAKE, "rt") as file:
        lines = [next(file) for _ in range(200)]
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / MOONCAKE.name).write_bytes(gzip.compress("".join(lines).encode()))
    run = simulated((ROOT / "scenarios" / "mooncake.yaml").read_text(), tmp_path)
    assert [facts(r) for r in run.records] == wanted(lines)
    assert run.summary["outcomes"]["ok"] == 200


@pytest.mark.slow
def test_mooncake_all_12_031_requests_replay_with_their_lengths_and_due_times(tmp_path: Path) -> None:
    """Llama-3.1-70B on 8 x H100, to the end. The ideal hit rates are the trace's own: tests/workload/test_traces.py."""
    with gzip.open(MOONCAKE, "rt") as file:
        lines = list(file)
    text = (ROOT / "scenarios" / "mooncake.yaml").read_text().replace("traces/moon", f"{MOONCAKE.parent}/moon")
    run = simulated(text, tmp_path)
    assert len(run.records) == run.summary["outcomes"]["ok"] == 12_031
    assert [facts(r) for r in run.records] == wanted(lines)
