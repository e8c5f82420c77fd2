"""Group H of the public bug reports: trace replay."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvbench.workload.traces import TraceFile, read

DATED = [0, 0.02004, 0.50004]  # 18:17:03.97996 to :04 and to :04.48


def mooncake(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def row(t: Any = 0, n_in: int = 512, n_out: int = 1, **more: Any) -> dict[str, Any]:
    return {"timestamp": t, "input_length": n_in, "output_length": n_out, **more}


def test_h01_wide_ids_stay_apart(tmp_path: Path) -> None:
    ids = [1, 2**32 + 1, 2**64 - 1, 2**63, 2**200 + 1, 1]
    trace = read(mooncake(tmp_path / "t.jsonl", *(row(hash_ids=[i]) for i in ids)))
    first = [trace.segments(r)[0] for r in trace.rows]
    assert len(set(first)) == 5
    assert first[0] == first[5]
    assert trace.facts["blocks"] == 5
    assert trace.facts["block_hit_rate"] == pytest.approx(1 / 6)


@pytest.mark.parametrize(("n_in", "count"), [(6758, 14), (512, 1), (513, 2), (1, 1)])
def test_h03_right_number_of_ids_passes(tmp_path: Path, n_in: int, count: int) -> None:
    trace = read(mooncake(tmp_path / "t.jsonl", row(n_in=n_in, hash_ids=list(range(count)))))
    parts = trace.segments(trace.rows[0])
    assert len(parts) == count
    assert sum(tokens for _, tokens in parts) == n_in
    assert trace.facts["block"] == [512]


@pytest.mark.parametrize(("n_in", "count", "want"), [(20, 2, "1"), (513, 1, "2"), (6758, 13, "14")])
def test_h03_wrong_number_of_ids_is_refused_with_its_line(tmp_path: Path, n_in: int, count: int, want: str) -> None:
    path = mooncake(tmp_path / "t.jsonl", row(), row(n_in=n_in, hash_ids=list(range(count))))
    with pytest.raises(ValueError, match=rf"t\.jsonl:2: {count} block ids for {n_in} tokens in blocks of 512: must be {want}"):
        read(path)


def test_h03_no_ids_is_a_prompt_of_its_own(tmp_path: Path) -> None:
    trace = read(mooncake(tmp_path / "t.jsonl", row(n_in=700), row(n_in=700, hash_ids=[]), row(n_in=700, hash_ids=None)))
    parts = [trace.segments(r) for r in trace.rows]
    assert [[tokens for _, tokens in p] for p in parts] == [[700]] * 3
    assert len({p[0][0] for p in parts}) == 3


def test_h03_block_size_is_read_from_the_record_and_kept(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "t.jsonl", row(n_in=100, hash_ids=[1, 2]), row(n_in=100, hash_ids=[9], block_size=128))
    assert read(path, block=64).facts["block"] == [64, 128]
    with pytest.raises(ValueError, match=r"t\.jsonl:1: 2 block ids for 100 tokens in blocks of 512"):
        read(path)


def test_h05_every_row_once_in_file_order(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "t.jsonl", *(row(3000 * (i // 3), n_in=i + 1) for i in range(37)))
    trace = read(path)
    assert [r.n_in for _, _, r in trace.replay()] == list(range(1, 38))
    assert [r.n_in for _, _, r in trace.replay(10)] == list(range(1, 11))


def test_h05_more_than_the_rows_is_refused_or_wraps_with_new_content(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "t.jsonl", *(row(1000 * i, hash_ids=[i]) for i in range(37)))
    trace = read(path)
    with pytest.raises(ValueError, match="50 requests asked of 37 trace rows: ask for fewer, or set `wrap: again`"):
        trace.replay(50)
    sent = list(trace.replay(50, "again"))
    assert [due for due, _, _ in sent] == [float(i) for i in range(50)]  # a mean gap of 1 s between the laps too
    assert sent[37][1:] == (1, trace.rows[0])
    assert trace.segments(sent[37][2], sent[37][1]) != trace.segments(sent[0][2], sent[0][1])
    assert len({trace.segments(r, lap)[0][0] for _, lap, r in sent}) == 50


@pytest.mark.parametrize(
    ("stamps", "unit", "dues", "said"),
    [
        ([0, 0.2, 0.4], None, [0, 0.2, 0.4], "read as s .* the replay takes 400 ms"),
        ([0, 200, 400], None, [0, 0.2, 0.4], "read as ms .* the replay takes 400 ms"),
        ([0, 0.2, 0.4], "ms", [0, 0.0002, 0.0004], None),
        ([0, 200, 400], "s", [0, 200, 400], None),
        ([1000, 1200, 1400], None, [0, 0.2, 0.4], "read as ms"),
        (["2023-11-16 18:17:03.9799600", "2023-11-16T18:17:04Z", "2023-11-16T19:17:04.48+01:00"], None, DATED, None),
    ],
)
def test_h06_units_are_explicit_or_guessed_aloud(
    tmp_path: Path, stamps: list[Any], unit: Any, dues: list[float], said: str | None
) -> None:
    trace = read(mooncake(tmp_path / "t.jsonl", *(row(t) for t in stamps)), unit=unit)
    assert trace.dues == pytest.approx(dues, abs=1e-12)
    if said is None:
        assert trace.warnings == []
    else:
        assert re.search(said, trace.warnings[0])


def test_h06_unsorted_rows_are_sorted_stably_with_a_warning(tmp_path: Path) -> None:
    trace = read(mooncake(tmp_path / "t.jsonl", row(200, 1), row(100, 2), row(200, 3), row(100, 4), row(300, 5)), unit="ms")
    assert [r.n_in for r in trace.rows] == [2, 4, 1, 3, 5]
    assert trace.warnings == ["2 of 5 rows are due before the row above them: sorted, file order kept among equals"]


@pytest.mark.parametrize("stamp", ["NaN", "-1", "Infinity", '"yesterday"', "null", "true"])
def test_h06_no_number_of_seconds_is_refused_with_its_line(tmp_path: Path, stamp: str) -> None:
    path = tmp_path / "t.jsonl"
    record = '{"timestamp": %s, "input_length": 5, "output_length": 5}\n'
    path.write_text(record % "0" + record % stamp)
    with pytest.raises(ValueError, match=r"t\.jsonl:2: "):
        read(path)


def test_h07_rows_without_tokens_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    rows = ["0,ChatGPT,10,5,15,x", "2,ChatGPT,10,0,10,x", "3,GPT-4,0,7,7,x", "4,GPT-4,9,0,9,x", "8,GPT-4,3,4,7,x"]
    path.write_text("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "\n".join(rows) + "\n")
    trace = read(path)
    assert [(r.due, r.n_in, r.n_out) for r in trace.rows] == [(0.0, 10, 5), (8.0, 3, 4)]
    assert trace.facts["skipped"] == 3
    assert trace.facts["mean_rate"] == 1 / 8  # of what is replayed
    assert trace.warnings[0].startswith("3 of 5 rows skipped")


def test_h07_facts_are_of_the_slice(tmp_path: Path) -> None:
    stamps = [0, 1000, *(1000 + i / 10 for i in range(1, 101))]  # an idle head, then 10 requests/s
    mooncake(tmp_path / "t.jsonl", *(row(t) for t in stamps))
    whole = TraceFile(file="t.jsonl", unit="s").read(tmp_path)
    part = TraceFile.model_validate({"file": "t.jsonl", "unit": "s", "from": "1000s"}, context={"text": True}).read(tmp_path)
    assert whole.facts["mean_rate"] == pytest.approx(101 / 1010)
    assert part.facts["mean_rate"] == pytest.approx(10)
    assert part.facts["peak_rate_1s"] == 10
    assert part.rows[0].due == 0
