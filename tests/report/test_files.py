"""A run directory is readable whole, in part, and cut off at any byte."""

from pathlib import Path

import pytest

from kvbench.report.files import load
from kvbench.report.summary import summarise
from tests.report.build import lost, own, record, write


@pytest.fixture
def run(tmp_path: Path) -> Path:
    records = [record(k, k * 0.5, tokens=3) for k in range(19)] + [lost(19, 9.6, "failed", "http_500", error="döwn")]
    return write(tmp_path / "run", records, samples=own(10, cpu=0.1))


def test_cut_off_at_any_byte_of_the_records(run: Path) -> None:
    whole = (run / "requests.jsonl").read_bytes()
    ends = [k for k, byte in enumerate(whole) if byte == 10]
    for cut in range(0, len(whole), 37):
        (run / "requests.jsonl").write_bytes(whole[:cut])
        files = load(run)
        complete = sum(end <= cut for end in ends)  # without its newline a line is whole all the same
        torn = cut not in (0, *ends) and whole[cut - 1] != 10
        assert len(files.records) == complete
        assert files.torn.get("requests.jsonl", 0) == torn


def test_a_killed_run_is_summarised_from_every_prefix(run: Path) -> None:
    """kill -9: the last lines of every file are missing, and nothing says that the run ended."""
    whole = {name: (run / name).read_bytes() for name in ("requests.jsonl", "events.jsonl", "samples.jsonl")}
    for part in range(1, 20):
        for name, data in whole.items():
            (run / name).write_bytes(data[: len(data) * part // 20])
        summary = summarise(load(run))
        assert summary["run"]["partial"]
        assert summary["stop"]["kind"] == "killed"
        assert summary["exit"]["code"] == 1  # never "whole"
        total = summary["accounting"]["total"]
        assert total["offered"] == total["ok"] + total["failed"] + total["in_flight"]


@pytest.mark.parametrize("gone", ["manifest.json", "events.jsonl", "samples.jsonl", "windows.jsonl", "requests.jsonl"])
def test_a_missing_file_is_tolerated_and_named(run: Path, gone: str) -> None:
    (run / gone).unlink()
    summary = summarise(load(run))
    assert summary["run"]["missing_files"] == [gone]
    assert any(gone in line for line in summary["warnings"])


def test_damage_in_the_middle_is_counted_apart(run: Path) -> None:
    lines = (run / "requests.jsonl").read_bytes().splitlines(keepends=True)
    lines[5] = b'{"id": 5, "due_ns"\n'
    (run / "requests.jsonl").write_bytes(b"".join(lines))
    files = load(run)
    assert (len(files.records), files.damaged, files.torn) == (19, {"requests.jsonl": 1}, {})


def test_no_run_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such directory"):
        load(tmp_path / "nowhere")
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds none of manifest\.json, requests\.jsonl, events\.jsonl"):
        load(tmp_path)
