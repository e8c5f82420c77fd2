"""Hit rate against cache size, on the conversation trace (golden values from libcachesim and of the trace) and by hand."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from kvbench.cli import app
from kvbench.plan.curve import Lru, Point, capacities, conclusion, hits_of, known, points
from kvbench.plan.replay.kernels import KERNELS
from kvbench.plan.replay.references import Count, References, references
from kvbench.plan.replay.reuse import ideal, reuse, working_set
from kvbench.workload.traces import read
from tests.whole import ROOT

TRACE = ROOT / "scenarios/traces/mooncake_conversation.jsonl.gz"
BLOCKS = (1000, 5859, 10_000, 30_000, 50_000)
GOLDEN = {  # block hit rate at BLOCKS: libCacheSim 0.3.5
    "fifo": (0.0435, 0.1270, 0.1865, 0.3021, 0.3400),
    "lru": (0.0445, 0.1355, 0.2112, 0.3257, 0.3546),
    "lfu": (0.0481, 0.0966, 0.1318, 0.2759, 0.3438),
    "sieve": (0.0481, 0.0966, 0.1318, 0.2759, 0.3438),
    "clock": (0.0447, 0.1379, 0.2143, 0.3291, 0.3542),
    "arc": (0.0529, 0.1436, 0.2225, 0.3108, 0.3433),
    "belady": (0.1906, 0.3531, 0.3664, 0.3664, 0.3664),
}
CLOSE = {  # the same, of policies that leave parameters open: within .01
    "lirs": (0.0545, 0.1603, 0.1946, 0.2451, 0.2639),
    "s3fifo": (0.0543, 0.1575, 0.1925, 0.2549, 0.2872),
    "2q": (0.0541, 0.1251, 0.1849, 0.3062, 0.3423),
    "lecar": (0.0454, 0.1364, 0.2119, 0.3260, 0.3543),
    "gdsf": (0.0447, 0.1437, 0.2171, 0.3284, 0.3548),
}
TOKENS = (1e4, 1e5, 1e6, 2e6, 3e6, 5e6, 1e7, 5e7)
LRU_BY_TOKENS = {
    "all": (0.0253, 0.0417, 0.0532, 0.0839, 0.1355, 0.2061, 0.2852, 0.3635),
    "full": (0.0271, 0.0435, 0.0566, 0.0911, 0.1467, 0.2219, 0.3043, 0.3795),
}


@cache
def conversation(count: Count) -> tuple[References, Lru]:
    refs = references(read(TRACE), count)
    return refs, Lru(refs)


def traced(folder: Path, *rows: dict[str, Any]) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps({"n_out": 1, "block": 10} | row) + "\n" for row in rows))
    return file


def by_hand(folder: Path) -> References:
    """a b, a c, a b: the last b half full."""
    file = traced(
        folder,
        {"due": 0, "n_in": 20, "hashes": [7, 8]},
        {"due": 30, "n_in": 20, "hashes": [7, 9]},
        {"due": 120, "n_in": 15, "hashes": [7, 8]},
    )
    return references(read(file))


def ran(*words: object) -> Result:
    return CliRunner().invoke(app, ["curve", *map(str, words)])


@pytest.mark.parametrize("count", ["all", "full"])
def test_the_lru_curve_of_the_conversation_trace(count: Count) -> None:
    _, lru = conversation(count)
    assert tuple(round(lru.rate(int(tokens // 512)), 4) for tokens in TOKENS) == LRU_BY_TOKENS[count]


def test_the_lru_curve_is_what_replay_gives() -> None:
    refs, lru = conversation("all")
    assert tuple(round(lru.rate(blocks), 4) for blocks in BLOCKS) == GOLDEN["lru"]
    for blocks in (1, 2, 19, 333, 5859, 77_777, 182_789):
        found = np.zeros(len(refs.keys), np.bool_)
        KERNELS["lru"](refs.keys, refs.unique, blocks, found)
        assert (found == lru.flags(blocks)).all()
        assert lru.rate(blocks) == found.mean()


def test_ideal_rates_under_every_denominator() -> None:
    refs, lru = conversation("all")
    assert (len(refs.keys), refs.unique, refs.block) == (288_500, 182_790, 512)
    assert round(lru.ideal, 5) == 0.36641
    rates = {name: round(rate, 4) for name, rate in ideal(refs).items() if rate is not None}
    assert rates == {"block": 0.3664, "full": 0.3819, "token": 0.3736, "request_mean": 0.4094, "with_generated": 0.3914}
    used = reuse(refs, lru.distances)
    assert (round(used["reused_share"], 4), round(used["top_tenth"], 3)) == (0.2415, 0.751)


def test_reasons_sum_to_misses_and_belady_avoids_all_it_can() -> None:
    refs, lru = conversation("all")
    for point in points(refs, lru, ["lru", "belady"], BLOCKS):
        assert point.compulsory + point.capacity + point.policy_misses == point.misses
        assert min(point.compulsory, point.capacity, point.policy_misses) >= 0
        assert point.compulsory == 182_790
        assert (point.policy_misses == 0) == (point.policy == "belady")


def test_reasons_by_hand(tmp_path: Path) -> None:
    """a b c a b c in two blocks: LRU always throws out what comes next; Belady keeps a, then c, and misses b once more."""
    refs = references(read(traced(tmp_path, {"n_in": 30, "hashes": [1, 2, 3]}, {"n_in": 30, "hashes": [1, 2, 3]})))
    lru, belady = points(refs, Lru(refs), ["lru", "belady"], [2])
    assert (lru.misses, lru.compulsory, lru.capacity, lru.policy_misses) == (6, 3, 1, 2)
    assert (belady.misses, belady.compulsory, belady.capacity, belady.policy_misses) == (4, 3, 1, 0)
    assert belady.token_hit_rate == 10 / 60  # of a - c only a is a leading run


def test_tiers_knee_and_needs_by_hand(tmp_path: Path) -> None:
    """References a b a c a b have stack distances -, -, 1, -, 1, 2."""
    lru = Lru(by_hand(tmp_path))
    assert lru.distances.tolist() == [6, 6, 1, 6, 1, 2]
    assert [lru.rate(blocks) for blocks in (0, 1, 2, 3, 10**30)] == [0, 0, 2 / 6, 3 / 6, 3 / 6]
    knee = lru.knee()
    assert knee is not None
    assert (knee.blocks, knee.block_hit_rate, knee.of_ideal) == (2, 2 / 6, 2 / 3)
    assert [lru.blocks_for(share) for share in (0.5, 2 / 3, 0.9, 1.0)] == [2, 2, 3, 3]
    assert lru.enough == 3
    assert [(row["hits"], row["reach"]) for row in lru.tiers([1, 1, 5])] == [(0, 0), (2, 2 / 6), (1, 3 / 6)]


def test_ideal_reuse_and_working_set_by_hand(tmp_path: Path) -> None:
    refs = by_hand(tmp_path)
    assert ideal(refs) == {  # of 6 blocks 5 full; tokens 0, 10 and 15 of 20, 20 and 15
        "block": 3 / 6,
        "full": 2 / 5,
        "token": 25 / 55,
        "request_mean": (0 + 0.5 + 1) / 3,
        "with_generated": 2 / 5,
    }
    found = reuse(refs, Lru(refs).distances)
    assert (found["repeats"], found["reused_blocks"], found["top_tenth"]) == (3, 2, 2 / 3)
    assert (found["blocks"]["0.5"], found["blocks"]["0.9"]) == (1, 2)
    assert (found["seconds"]["0.1"], found["seconds"]["0.5"], found["seconds"]["0.99"]) == (30, 90, 120)
    # a is in the last 60 s during [0, 90), b during [0, 60), c during [30, 90): 210 of 120 s
    assert working_set(refs) == [{"seconds": 60.0, "mean": 210 / 120, "peak": 3}]


def test_answers_count_where_a_prompt_goes_on_behind_them(tmp_path: Path) -> None:
    """Prompt 20 and answer 15 fill three blocks; the next turn finds the third, its other continuation does not, nor a third."""
    first = {"n_in": 20, "n_out": 15, "hashes": [1, 2]}
    turns = [{"n_in": 40, "hashes": [1, 2, 3, 4]}, {"n_in": 40, "hashes": [1, 2, 5, 6]}]
    rates = ideal(references(read(traced(tmp_path, first, *turns))))
    assert (rates["full"], rates["with_generated"]) == (4 / 10, 5 / 10)


def test_rows_without_ids_count_as_prompts_that_miss(tmp_path: Path) -> None:
    shared = {"n_in": 10, "hashes": [1]}
    refs = references(read(traced(tmp_path, {"n_in": 30}, shared, {"n_in": 30}, shared, {"n_in": 20})))
    assert refs.run(~refs.first).tolist() == [0, 0, 0, 1, 0]
    assert ideal(refs)["token"] == 10 / 100


def test_ids_of_any_width(tmp_path: Path) -> None:
    refs = references(
        read(traced(tmp_path, {"n_in": 20, "hashes": [str(2**70), str(2**70 + 1)]}, {"n_in": 10, "hashes": [2**60]}))
    )
    assert refs.keys.tolist() == [0, 1, 2]


def test_what_is_tried_where_nobody_says() -> None:
    refs, lru = conversation("all")
    tried = capacities(refs, lru)
    assert tried == sorted({1828, 3656, 9140, 18_279, 45_698, 91_395, 182_790} | {lru.knee().blocks})  # type: ignore[union-attr]


def test_a_cache_with_room_for_all_is_ideal_whatever_the_policy() -> None:
    refs, lru = conversation("all")
    for name in KERNELS:
        assert hits_of(name, refs, lru, refs.unique).mean() == lru.ideal


def point(policy: str, blocks: int, rate: float) -> Point:
    return Point(policy, blocks, rate, rate, 1, 1, 0, 0)


def test_the_conclusion_names_who_gains_and_what_is_needed(tmp_path: Path) -> None:
    lru = Lru(by_hand(tmp_path))
    text = conclusion(lru, [point("lru", 2, 2 / 6), point("arc", 2, 0.4), point("belady", 2, 0.45), point("sieve", 1, 0.1)])
    assert text == (
        "LRU at 2 blocks (the knee) reaches 67 % of the ideal 50.00 %; arc would gain 6.67 points there, and none can gain more "
        "than 11.67 (belady). The choice matters most at 1 blocks, where sieve gains 10.00 points. "
        "LRU needs 3 blocks for 90 % of the ideal and 3 for all of it."
    )
    text = conclusion(lru, [point("fifo", 3, 0.5)])
    assert text.startswith(
        "LRU at 3 blocks (the knee is at 2) reaches 100 % of the ideal 50.00 %; none of the other policies does"
    )


def test_the_table_and_the_json_of_a_small_trace(tmp_path: Path) -> None:
    by_hand(tmp_path)
    words = (
        tmp_path / "trace.jsonl",
        "--policies",
        "lru, belady",
        "--blocks",
        "2,1,9",
        "--tiers",
        "1,2",
        "--model",
        "llama-3.1-8b",
    )
    shown = ran(*words)
    assert shown.exit_code == 0, shown.output
    rows = {line.split("  ")[1]: line.split()[-3:] for line in shown.stdout.splitlines() if line.startswith("  ")}
    assert rows["blocks"] in (["1", "2", "9"], ["blocks", "1", "2"])  # the tiers' line comes later
    assert rows["lru"] == ["0.00", "33.33", "50.00"]
    assert rows["compulsory"] == ["50.00"] * 3
    assert "exclusive LRU tiers" in shown.stdout
    assert "9 blocks are more than the 3 distinct ones" in shown.stderr
    found = json.loads(ran(*words, "--json").stdout)
    first = found["points"][0]
    assert first["policy"] == "lru"
    assert first["blocks"] == 1
    assert first["block_hit_rate"] == 0
    assert first["reasons"] == {"compulsory": 3, "capacity": 3, "policy": 0}
    assert first["bytes"] == 10 * 131_072  # KV bytes of ten tokens of Llama-3.1-8B
    assert [p["block_hit_rate"] for p in found["points"]] == [0, 2 / 6, 3 / 6, 0, 2 / 6, 3 / 6]
    assert found["tiers"][1]["hits"] == 3
    assert found["knee"]["blocks"] == 2


def test_a_policy_of_the_engine_without_a_kernel_is_replayed_too(tmp_path: Path) -> None:
    by_hand(tmp_path)
    found = ran(tmp_path / "trace.jsonl", "--policies", "leaf_lru", "--blocks", "2", "--json")
    assert found.exit_code == 0, found.output
    assert [p["policy"] for p in json.loads(found.stdout)["points"]] == ["leaf_lru"]
    assert "leaf_lru" in known(["all"])
    assert known([]) == list(KERNELS)


def test_a_picture(tmp_path: Path) -> None:
    by_hand(tmp_path)
    picture = tmp_path / "curve.png"
    found = ran(tmp_path / "trace.jsonl", "--policies", "lru", "--png", picture)
    assert found.exit_code == 0, found.output
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert ran(tmp_path / "trace.jsonl", "--policies", "lru", "--png", tmp_path / "no" / "x.png").exit_code == 2


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_curves_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand(tmp_path)

    def never(*_: object) -> None:
        raise AssertionError("computed, and there is nothing to draw with")

    monkeypatch.setattr("kvbench.plan.curve.points", never)
    there = ran(tmp_path / "trace.jsonl", "--policies", "lru", "--png", tmp_path / "no" / "x.png")
    assert (there.exit_code, "there is no folder" in there.stderr) == (2, True)
    monkeypatch.setattr("kvbench.plan.curve_png.find_spec", lambda name: None)
    found = ran(tmp_path / "trace.jsonl", "--policies", "lru", "--png", tmp_path / "x.png")
    assert (found.exit_code, "pip install -e '.[curve]'" in found.stderr) == (2, True)


def test_the_conclusion_says_the_difference_of_what_the_table_shows(tmp_path: Path) -> None:
    text = conclusion(Lru(by_hand(tmp_path)), [point("arc", 2, 0.39996)])  # 40.00 in the table and LRU's 33.33; exactly 6.663
    assert "arc would gain 6.67 points there" in text


def test_the_summary_fits_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    by_hand(tmp_path)
    lines = ran(tmp_path / "trace.jsonl", "--policies", "lru,belady", "--blocks", "1,2").stdout.splitlines()
    said = lines[next(k for k, line in enumerate(lines) if line.startswith("LRU at")) :]
    assert max(map(len, said)) <= 60
    assert len(said) > 1


def test_nothing_is_used_twice(tmp_path: Path) -> None:
    file = traced(tmp_path, {"n_in": 10, "hashes": [1]}, {"n_in": 10, "hashes": [2]})
    found = ran(file, "--policies", "lru,belady", "--blocks", "1", "--png", tmp_path / "x.png")
    assert found.exit_code == 0, found.output
    assert "No block is used twice: no cache of any size helps" in found.stdout
    assert json.loads(ran(file, "--policies", "lru", "--json").stdout)["knee"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--blocks", "0"], "0 blocks: a cache has at least 1"),
        (["--blocks", "-5,10"], "-5 blocks: a cache has at least 1"),
        (["--blocks", "10,20,10"], "10 is given twice"),
        (["--blocks", "10,many"], "'many' is no number of blocks"),
        (["--blocks", "1.5"], "'1.5' is no number of blocks"),
        (["--tiers", "10"], "one tier is what --blocks shows"),
        (["--policies", "lur"], "did you mean lru?"),
        (["--model", "llama-9"], "unknown profile 'llama-9'"),
    ],
)
def test_bad_options_end_in_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    by_hand(tmp_path)
    found = ran(tmp_path / "trace.jsonl", *words)
    assert found.exit_code == 2
    assert said in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_traces_that_say_nothing_of_blocks(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,10,5\n")
    bare = traced(tmp_path, {"n_in": 10})
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    for file, said in (
        (azure, "azure traces have no block ids"),
        (azure, "formats that have them: kvbench, weka, lmcache, bailian, mooncake"),
        (bare, "no row has block ids"),
        (empty, "the file is empty"),
        (tmp_path / "gone.jsonl", "cannot be read"),
    ):
        found = ran(file)
        assert (found.exit_code, said in found.stderr) == (2, True), found.output
    short = traced(tmp_path, {"n_in": 5, "hashes": [1]})
    assert "no prompt fills a block" in ran(short, "--count", "full").stderr


def test_a_mix_of_block_sizes_has_no_bytes(tmp_path: Path) -> None:
    file = traced(tmp_path, {"n_in": 10, "hashes": [1]}, {"n_in": 10, "hashes": [1, 2], "block": 5})
    assert "mixes block sizes" in ran(file, "--model", "llama-3.1-8b").stderr
    found = json.loads(ran(file, "--policies", "lru", "--json").stdout)
    assert found["block"] is None
    assert math.isclose(found["ideal"]["token"], 5 / 20)  # the known block is as long as this prompt says


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_the_policies_on_the_conversation_trace(name: str) -> None:
    refs, lru = conversation("all")
    found = [p.block_hit_rate for p in points(refs, lru, [name], BLOCKS)]
    if name in GOLDEN:
        assert tuple(round(rate, 4) for rate in found) == GOLDEN[name]
    else:
        assert found == pytest.approx(CLOSE[name], abs=0.01)


@pytest.mark.slow
def test_the_whole_verb_on_the_conversation_trace() -> None:
    shown = ran(TRACE)
    assert shown.exit_code == 0, shown.output
    assert "the knee" in shown.stdout
    assert all(name in shown.stdout for name in KERNELS)
