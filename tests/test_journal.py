"""What is recorded stays: whole lines after a short write, a directory of one's own, strict JSON."""

import errno
import json
import os
from pathlib import Path

import pytest

from kvbench.core import Event, Record, Sample, Window
from kvbench.journal import Journal, JournalError, create, write_whole


def test_two_runs_in_one_second_get_two_directories(tmp_path: Path) -> None:
    paths = {create(tmp_path, "wave", 1_700_000_000.0) for _ in range(20)}
    assert len(paths) == 20
    assert all(p.name.startswith("wave-20231114T221320Z-") for p in paths)


def test_each_kind_goes_to_its_file_as_strict_json(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.file([Record(id=1, error='quote " and \n newline'), Record(id=2)])
    journal.write(Window(start=0, end=1, counts={"ok": 1}, values={"ttft_p99": float("nan"), "rate": float("inf")}))
    journal.write(Sample(t=1.0, name="kv_usage", value=0.5))
    journal.write(Event(t=0.0, kind="run_start"))
    journal.close()
    assert [json.loads(line)["id"] for line in (tmp_path / "requests.jsonl").read_text().splitlines()] == [1, 2]
    window = json.loads((tmp_path / "windows.jsonl").read_text(), parse_constant=lambda c: pytest.fail(f"not strict JSON: {c}"))
    assert window["values"] == {"ttft_p99": None, "rate": None}
    assert json.loads((tmp_path / "samples.jsonl").read_text())["value"] == 0.5
    assert json.loads((tmp_path / "events.jsonl").read_text())["kind"] == "run_start"


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system takes part of a write and then says the disk is full: the torn line is cut off again."""
    journal = Journal(tmp_path)
    journal.file([Record(id=k) for k in range(3)])
    journal.flush()
    real = os.write
    room = [700]

    def write(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = real(fd, data[: room[0]])
        room[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", write)
    journal.file([Record(id=k) for k in range(3, 9)])
    with pytest.raises(JournalError, match="No space left on device"):
        journal.flush()
    monkeypatch.undo()
    lines = (tmp_path / "requests.jsonl").read_bytes()
    assert lines.endswith(b"\n")
    ids = [json.loads(line)["id"] for line in lines.splitlines()]
    assert ids == list(range(len(ids)))
    assert len(ids) >= 3


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    with pytest.raises(JournalError, match="cannot write"):
        write_whole(tmp_path / "missing" / "manifest.json", b"x")
