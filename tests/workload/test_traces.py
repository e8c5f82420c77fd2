"""Trace files: golden facts of real ones, every format there and back, and what is refused."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvbench.workload.traces import FORMATS, Row, TraceFile, read, segments, write

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data/traces"
MOONCAKE = ROOT / "scenarios/traces/mooncake_conversation.jsonl.gz"


def test_mooncake_conversation_gives_the_published_numbers() -> None:
    facts = read(MOONCAKE).facts
    # FAST'25 table 2: 12,031 requests, mean 12,035 in and 343 out; hit rates computed independently with libCacheSim
    assert (facts["rows"], facts["block_refs"], facts["blocks"]) == (12031, 288500, 182790)
    assert round(facts["mean_in"]) == 12035
    assert round(facts["mean_out"]) == 343
    assert round(facts["block_hit_rate"], 5) == 0.36641
    assert round(facts["token_hit_rate"], 4) == 0.3736


def test_azure_stamps_keep_their_100_ns() -> None:
    trace = read(DATA / "azure_conv.csv")
    assert [(r.n_in, r.n_out) for r in trace.rows[:2]] == [(374, 44), (396, 109)]
    assert trace.dues[1] == 4.314579  # 18:15:50.9951690 - 18:15:46.6805900
    assert trace.facts["rows"] == 200
    assert trace.facts["token_hit_rate"] is None


def test_llmservingsim_runs_are_rebased_from_unix_time() -> None:
    trace = read(DATA / "llmservingsim.jsonl")
    assert trace.facts["format"] == "llmservingsim"
    assert trace.rows[1].due == pytest.approx(1787267980.3478317 - 1787267980.0827403)
    assert (trace.rows[0].n_in, trace.rows[0].n_out) == (2358, 531)


def test_weka_sessions_do_not_share_local_ids() -> None:
    trace = read(DATA / "weka")
    alone = [read(DATA / "weka" / name).facts["blocks"] for name in ("trace_0026.json", "trace_0103.json")]
    assert trace.facts["blocks"] == sum(alone)
    assert trace.facts["sessions"] == 2
    first, second = (trace.rows[0], trace.rows[1])
    assert {first.session, second.session} == {"trace_0026", "trace_0103"}
    assert (first.due, second.due) == (0.0, 0.0)
    assert trace.segments(first)[0] != trace.segments(second)[0]
    assert trace.warnings == ["all 2 sessions begin at 0: the file does not say when; shape them with `arrivals`"]


def test_weka_later_turns_follow_after_their_think_time() -> None:
    turns = read(DATA / "weka/trace_0026.json").rows
    assert [(r.turn, r.due, r.at) for r in turns] == [(0, 0.0, 0.0), (1, None, 94.0), (2, None, 146.0)]
    assert turns[0].think is None
    assert turns[1].think == 48.0
    assert len(turns[0].hashes) == 15291 // 64  # the full blocks; the tail is nobody else's
    assert segments(turns[0])[-1][1] == 15291 % 64
    assert segments(turns[0])[:200] == segments(turns[1])[:200]


def test_weka_sub_agents_are_sessions_sharing_their_parents_ids(tmp_path: Path) -> None:
    def request(t: float, ids: list[int], **more: Any) -> dict[str, Any]:
        return {"t": t, "in": 64 * len(ids), "out": 5, "hash_ids": ids, **more}

    agent = {"t": 10.0, "type": "subagent", "agent_id": "a1", "requests": [request(0.0, [1]), request(4.0, [1, 7])]}
    requests = [request(0.0, [1, 2], api_time=3.0), agent, request(30.0, [1, 2, 3])]
    session = {"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": requests}
    (tmp_path / "s.json").write_text(json.dumps(session, indent=1))
    trace = read(tmp_path / "s.json")
    assert [(r.session, r.turn, r.at, r.due) for r in trace.rows] == [
        ("s", 0, 0.0, 0.0),
        ("s/a1", 0, 10.0, 10.0),
        ("s/a1", 1, 14.0, None),
        ("s", 1, 30.0, None),
    ]
    assert trace.rows[3].think == 27.0  # no think_time: 30 - (0 + 3)
    assert len({segments(r)[0] for r in trace.rows}) == 1


def test_lmcache_logs_keep_wide_hashes_and_say_that_outputs_are_unknown(tmp_path: Path) -> None:
    wide = "0x" + "f" * 64
    log = [
        {"timestamp": 1711929600.5, "request_id": "a", "chunk_size": 256, "seq_len": 600, "chunk_hashes": [wide, "0x1"]},
        {"timestamp": 1711929602.0, "request_id": "b", "chunk_size": 256, "seq_len": 512, "chunk_hashes": [wide, "0x2"]},
    ]
    (tmp_path / "lookup.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    trace = read(tmp_path / "lookup.jsonl")
    assert [r.due for r in trace.rows] == [0.0, 1.5]
    assert trace.rows[0].hashes == (2**256 - 1, 1)
    assert [tokens for _, tokens in trace.segments(trace.rows[0])] == [256, 256, 88]
    assert trace.facts["token_hit_rate"] == 256 / 1112
    assert trace.warnings == ["lmcache has no output lengths: every row asks for 1 token"]


def test_bailian_chats_become_sessions(tmp_path: Path) -> None:
    chats = [(7, -1, 0), (8, -1, 1), (9, 7, 5), (10, 9, 9), (11, 99, 10)]
    common = {"input_length": 17, "output_length": 3, "type": "text"}
    records = [{"chat_id": c, "parent_chat_id": p, "timestamp": t, "hash_ids": [c, 50]} | common for c, p, t in chats]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    trace = read(tmp_path / "b.jsonl")
    assert [(r.session, r.turn) for r in trace.rows] == [("7", 0), ("8", 0), ("7", 1), ("7", 2), ("11", 0)]
    assert trace.dues == [0, 1, 5, 9, 10]
    assert trace.facts["block"] == [16]


def test_segments_of_one_trace_are_equal_where_ids_are_and_only_there() -> None:
    rows = [Row(0.0, 1000, 1, (3, 4), 512, ordinal=0), Row(0.0, 700, 1, (3, 9), 512, ordinal=1), Row(0.0, 5, 1, ordinal=2)]
    a, b, c = (segments(row, salt=77) for row in rows)
    assert a[0] == b[0]
    assert [tokens for _, tokens in a + b + c] == [512, 488, 512, 188, 5]
    assert len({key for key, _ in a + b + c}) == 4
    assert not {key for key, _ in a} & {key for key, _ in segments(rows[0], salt=78)}


@given(st.sets(st.integers(0, 2**70), min_size=2, max_size=50), st.integers(0, 2**64 - 1))
def test_segment_keys_never_collide_within_a_salt(ids: set[int], salt: int) -> None:
    keys = {segments(Row(0.0, 1, 1, (i,), 1), salt)[0][0] for i in ids}
    tails = {segments(Row(0.0, 1, 1, ordinal=k), salt)[0][0] for k in range(50)}
    assert len(keys | tails) == len(ids) + 50


def test_salt_is_of_the_text_not_of_the_file(tmp_path: Path) -> None:
    text = (DATA / "azure_conv.csv").read_bytes()
    (tmp_path / "other.csv.gz").write_bytes(gzip.compress(text))
    (tmp_path / "edited.csv").write_bytes(text + b"2023-11-16 18:59:59,5,5\n")
    salts = [read(path).salt for path in (DATA / "azure_conv.csv", tmp_path / "other.csv.gz", tmp_path / "edited.csv")]
    assert salts[0] == salts[1] != salts[2]


def test_cutting_and_stretching(tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl", [Row(float(t), 10 + t, 1) for t in range(10)], "kvbench")
    path = tmp_path / "t.jsonl"
    assert [(r.due, r.n_in) for r in read(path, start=3, end=6).rows] == [(0, 13), (1, 14), (2, 15)]
    assert [(r.due, r.n_in) for r in read(path, rows=(3, 5), scale=0.5).rows] == [(0, 13), (0.5, 14)]
    with pytest.raises(ValueError, match=r"rows \[3, 11\) asked of 10"):
        read(path, rows=(3, 11))
    with pytest.raises(ValueError, match="no row is due in"):
        read(path, start=50)


def test_a_turn_whose_opener_was_cut_away_arrives_by_itself(tmp_path: Path) -> None:
    opener, later = Row(0.0, 5, 5, session="a"), Row(9.0, 6, 5, session="a", turn=1, think=2.0)
    turns = [opener, later, replace(later, due=20.0, turn=2)]
    write(tmp_path / "t.jsonl", turns, "kvbench")
    assert [r.due for r in read(tmp_path / "t.jsonl").rows] == [0.0, None, None]
    assert [r.due for r in read(tmp_path / "t.jsonl", rows=(1, 3)).rows] == [0.0, None]


def test_peak_rate_counts_half_open_spans(tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl", [Row(t, 1, 1) for t in (0.0, 0.5, 1.0, 1.25, 1.75, 5.0)], "kvbench")
    facts = read(tmp_path / "t.jsonl").facts
    assert facts["peak_rate_1s"] == 3  # [1, 2); 0, 0.5 and 1.0 are not within one second
    assert facts["peak_rate_60s"] is None
    assert facts["mean_rate"] == 1.0


# --- there and back -------------------------------------------------------------------------------------------------------


@st.composite
def rows(draw: st.DrawFn, block: st.SearchStrategy[int] = st.integers(1, 600)) -> list[Row]:
    """Rows as read gives them: from 0, sorted, a turn of known think time without a due unless it opens its session."""
    out: list[Row] = []
    turns: dict[str, int] = {}
    at = 0
    for ordinal in range(draw(st.integers(1, 8))):
        at += draw(st.integers(0, 5000)) if out else 0
        size, n_in = draw(block), draw(st.integers(1, 2000))
        n_ids = draw(st.sampled_from([0, n_in // size, -(-n_in // size)]))
        ids = tuple(draw(st.lists(st.integers(0, 2**70), min_size=n_ids, max_size=n_ids)))
        session = draw(st.sampled_from([None, "a", "b"]))
        turn = turns.get(session, 0) if session else 0
        think = draw(st.floats(0, 100)) if turn else None
        turns |= {session: turn + 1} if session else {}
        due = None if think is not None else at / 1000
        row = Row(due, n_in, draw(st.integers(1, 500)), ids, size if ids else 0, session, turn, think, {}, at / 1000, ordinal)
        out.append(row)
    return out


def open_loop(row: Row) -> Row:
    return replace(row, due=row.at, think=None)


def bare(row: Row) -> Row:
    return replace(open_loop(row), hashes=(), block=0, session=None, turn=0)


def full_blocks(row: Row) -> Row:
    kept = row.hashes[: row.n_in // row.block] if row.hashes else ()
    return replace(row, hashes=kept, block=row.block if kept else 0)


def shape(given_rows: Sequence[Row]) -> list[list[int]]:
    """Which ids are equal, whatever they are called; the id of a partial last block, which a writer may make up, left out."""
    names: dict[int, int] = {}
    return [[names.setdefault(i, len(names)) for i in full_blocks(row).hashes] for row in given_rows]


def there_and_back(tmp_path: Path, given_rows: list[Row], format: str) -> list[Row]:  # noqa: A002  # as read calls it
    write(tmp_path / "t", given_rows, format)
    return read(tmp_path / "t", format, unit="ms" if format == "mooncake" else None if format == "azure" else "s").rows


CHECK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@CHECK
@given(rows())
def test_kvbench_keeps_everything(tmp_path: Path, given_rows: list[Row]) -> None:
    given_rows = [replace(row, extra={"model": "m"}) for row in given_rows]
    assert there_and_back(tmp_path, given_rows, "kvbench") == given_rows
    assert write(tmp_path / "t", given_rows, "kvbench") == []


@CHECK
@given(rows())
@pytest.mark.parametrize("format_", ["azure", "vidur", "llmservingsim"])
def test_columns_keep_times_and_lengths(tmp_path: Path, format_: str, given_rows: list[Row]) -> None:
    assert there_and_back(tmp_path, given_rows, format_) == [bare(row) for row in given_rows]


@CHECK
@given(rows())
def test_burstgpt_keeps_sessions_too(tmp_path: Path, given_rows: list[Row]) -> None:
    expected = [replace(bare(row), session=row.session, turn=row.turn) for row in given_rows]
    assert there_and_back(tmp_path, given_rows, "burstgpt") == expected


@CHECK
@given(rows())
@pytest.mark.parametrize("format_", ["mooncake", "bailian"])
def test_chained_ids_keep_their_sharing(tmp_path: Path, format_: str, given_rows: list[Row]) -> None:
    back = there_and_back(tmp_path, given_rows, format_)
    assert shape(back) == shape(given_rows)
    assert [r.block for r in back] == [r.block for r in given_rows]
    assert [replace(bare(r), extra={}) for r in back] == [bare(r) for r in given_rows]
    if format_ == "bailian":
        assert [r.turn for r in back] == [r.turn for r in given_rows]
    for before, after in zip(given_rows, back, strict=True):
        assert after.hashes[: len(before.hashes)] == before.hashes


@CHECK
@given(rows(block=st.just(256)))
def test_lmcache_keeps_full_chunks(tmp_path: Path, given_rows: list[Row]) -> None:
    expected = [replace(full_blocks(open_loop(row)), n_out=1, session=None, turn=0) for row in given_rows]
    assert there_and_back(tmp_path, given_rows, "lmcache") == expected


@CHECK
@given(rows(block=st.just(64)))
def test_weka_keeps_sessions_and_think_times(tmp_path: Path, given_rows: list[Row]) -> None:
    def key(row: Row) -> tuple[str, int]:
        return row.session or f"row-{row.ordinal}", row.turn

    expected = sorted((replace(full_blocks(row), session=key(row)[0]) for row in given_rows), key=key)
    starts = {row.session: row.at or 0.0 for row in reversed(expected)}
    back = sorted(there_and_back(tmp_path, given_rows, "weka"), key=key)
    assert [replace(row, due=None, at=None) for row in back] == [replace(row, due=None, at=None) for row in expected]
    assert [row.at for row in back] == [(row.at or 0.0) - starts[row.session] for row in expected]
    assert all((row.due is None) == (row.turn > 0) for row in back)


def test_what_a_format_cannot_keep_is_said(tmp_path: Path) -> None:
    kept = [Row(0.0, 100, 5, (1, 2), 64, "a"), Row(0.00005, 100, 5, (1, 3), 64, "a", 1, 2.0)]
    assert write(tmp_path / "t", kept, "azure") == ["hashes of 2 rows", "session of 2 rows", "turn of 1 rows", "think of 1 rows"]
    lost = {"session of 2 rows", "turn of 1 rows", "think of 1 rows", "time below 0.001 s of 1 rows"}
    assert set(write(tmp_path / "t", kept, "mooncake")) == lost
    assert "the partial last block's id of 2 rows" in write(tmp_path / "t", kept, "weka")
    assert "output length of 2 rows" in write(tmp_path / "t", kept, "lmcache")
    with pytest.raises(ValueError, match="row 1 has no time"):
        write(tmp_path / "u", [Row(None, 5, 5)], "azure")
    assert not (tmp_path / "u").exists()


def test_every_format_recognises_what_it_writes(tmp_path: Path) -> None:
    for name in FORMATS:
        write(tmp_path / name, [Row(0.0, 128, 5, (1, 2), 64, "a"), Row(1.0, 64, 5, (1,), 64, "b")], name)
        assert read(tmp_path / name).facts["format"] == name


# --- what is refused ------------------------------------------------------------------------------------------------------

GOOD = b'{"timestamp":0,"input_length":5,"output_length":5}\n'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "t: the file is empty"),
        (b"\n \n", "t: the file is empty"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "t: the file holds a header and no rows"),
        (b"\x00\x01\x02", "t:1: binary data"),
        (GOOD + b"\xff\xfe\n", "t:2: not UTF-8"),
        (GOOD + b"{bad\n", "t:2: not a JSON object"),
        (GOOD + b"[1]\n", r"t:2: '\[1\]' is not a JSON object"),
        (GOOD + GOOD[:-9], "t:2: not a JSON object"),
        (b"hello\n", "t:1: 'hello' is neither a JSON object nor a CSV header"),
        (b"a,b\n1,2\n", "t:2: no known trace format has the fields a, b .*mooncake: input_length, output_length, timestamp"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n0,1\n", "t:2: 2 fields, the header has 3"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n0,1,x\n", "t:2: GeneratedTokens is 'x': it must be a finite number"),
        (GOOD.replace(b":5}", b":1.5}"), "t:1: output_length is 1.5: it must be a whole number"),
        (GOOD.replace(b":5}", b":-5}"), "t:1: output_length is -5: it must be a finite number of at least 0"),
        (GOOD + b'{"timestamp":0,"input_length":5}\n', "t:2: output_length is missing"),
        (GOOD.replace(b"}", b',"hash_ids":[-1]}'), "t:1: hash_ids holds -1"),
        (GOOD.replace(b"}", b',"hash_ids":[1.5]}'), "t:1: hash_ids holds 1.5"),
        (GOOD.replace(b"}", b',"hash_ids":7}'), "t:1: hash_ids is 7: it must be a list"),
        (GOOD.replace(b"}", b',"hash_ids":[1],"block_size":0}'), "t:1: the block size is 0"),
        (b'{"n_in":1,"n_out":1,"due":0}\n{"n_in":1,"n_out":1}\n', "t:2: no due time"),
        (b'{"n_in":1,"n_out":1,"dew":0}\n', "t:1: unknown field 'dew'"),
        (b'{"n_in":5,"n_out":1,"hashes":[1]}\n', "t:1: block is missing"),
        (GOOD.replace(b":0", b':"2023-11-16 18:00:00"') + GOOD, "t:2: dates and numbers are mixed"),
        (GOOD.replace(b":0", b':"2023-13-16 18:00:00"'), "t:1: .* is no time"),
        (GOOD.replace(b":5,", b":0,"), "t: no usable row .1 skipped"),
        (gzip.compress(GOOD * 5000)[:-20], r"t:\d+: the gzip is damaged or cut short"),
    ],
)
def test_refusals_name_the_place_and_what_is_allowed(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read(tmp_path / "t")


def test_a_wrong_or_unknown_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(GOOD)
    with pytest.raises(ValueError, match="t:1: not a azure record: 'ContextTokens' is missing"):
        read(tmp_path / "t", "azure")
    with pytest.raises(ValueError, match=r"unknown trace format 'moncake': .*did you mean mooncake"):
        read(tmp_path / "t", "moncake")
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no \.json, \.jsonl or \.csv file"):
        read(tmp_path / "empty")


def test_the_scenario_spec_takes_a_path_or_keys_and_refuses_the_rest() -> None:
    assert TraceFile.model_validate("a.jsonl") == TraceFile(file="a.jsonl")
    spec = TraceFile.model_validate({"file": "a", "from": "1m", "to": "2m", "rows": [0, 5]}, context={"text": True})
    assert (spec.start, spec.end, spec.rows) == (60.0, 120.0, (0, 5))
    for wrong in ({"scale": 0}, {"format": "csv"}, {"block": 0}, {"wrap": "yes"}, {"from": 5}, {"speed": 2}):
        with pytest.raises(ValidationError):
            TraceFile.model_validate({"file": "a", **wrong}, context={"text": True})
