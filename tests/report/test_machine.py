"""What stands below and beside one pool: tiers, nodes, layer groups, from readings with known numbers, and on both pages."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvbench.core import Sample
from kvbench.report import html, render
from kvbench.report.files import load
from kvbench.report.machine import machine, rows
from kvbench.report.sentences import described, tokenized
from kvbench.report.summary import summarise
from tests.report.build import record, write

GB = 1e9
FACTS: dict[str, Any] = {
    "kind": "sim", "model": "m", "hardware": "h100", "devices": 4, "engine": "vllm", "blocks": 500, "block_tokens": 16,
    "kv_tokens": 4000,
    "tiers": {"ssd": {"profile": "ssd-nvme-gen4", "capacity": 2**34}, "write": "write_back", "prefetch": 0},
    "groups": [
        {"name": "1_6", "first": 1, "last": 6, "block": 16, "bytes": 64.0, "blocks": 300},
        {"name": "7_32", "first": 7, "last": 32, "block": 16, "bytes": 64.0, "blocks": 200},
    ],
    "nodes": [
        {"hardware": "h100", "devices": 1, "blocks": 500, "kv_tokens": 2000, "role": "prefill"},
        {"hardware": "h100", "devices": 1, "blocks": 500, "kv_tokens": 2000, "role": "decode"},
        {"hardware": "h100", "devices": 1, "blocks": 500, "kv_tokens": 2000, "role": "decode"},
    ],
}  # fmt: skip
TARGET = {  # at 0, 5 and 10 s; the interval is [5, 10]
    "query_tokens_total": (0, 1000, 5000),
    "hit_tokens_ssd_total": (0, 100, 500),
    "tier_ssd_written_bytes_total": (0, 1 * GB, 3 * GB),
    "tier_ssd_read_bytes_total": (0, 0, 2**30),
    "tier_ssd_dropped_total": (0, 2, 7),
    "tier_ssd_used": (0.0, 0.2, 0.5),
    "ssd_dwpd": (0.0, 4.0, 2.5),
    "ssd_life_years": (9.0, 9.0, 2.0),
    "nodes_up": (3, 3, 2),
    "imbalance": (1, 1.5, 2.5),
    "transfer_bytes_total": (0, 0, 2**31),
    "retried_total": (0, 0, 3),
    "quota_1_6": (0.6, 0.6, 0.4),
    "quota_7_32": (0.4, 0.4, 0.6),
    "kv_usage_1_6": (0.1, 0.2, 0.4),
    "kv_usage_7_32": (0.1, 0.3, 0.9),
    "lookup_tokens_1_6_total": (0, 1000, 5000),
    "hit_tokens_1_6_total": (0, 500, 1500),
    "partition_moves_total": (0, 1, 3),
}


def samples() -> list[Sample]:
    found = [
        Sample(t=t, name=n, value=v, source="target") for n, row in TARGET.items() for t, v in zip((0, 5, 10), row, strict=True)
    ]
    for node, usage in (("0", (0.1, 0.2, 0.4)), ("1", (0.0, 0.1, 0.1))):
        for t, value in zip((0, 5, 10), usage, strict=True):
            for name, told in (("up", 1.0), ("kv_usage", value), ("running", 10 * value)):
                found.append(Sample(t=t, name=name, value=told, source="node", labels={"node": node}))
    return found


@pytest.fixture
def found() -> dict[str, Any]:
    return machine(samples(), 5.0, 10.0, FACTS)


def test_a_tier_tells_its_hits_its_bytes_and_its_wear(found: dict[str, Any]) -> None:
    assert set(found["tiers"]["rows"]) == {"ssd"}  # write and prefetch are rules
    row = found["tiers"]["rows"]["ssd"]
    assert row["hit_tokens"] == 400  # of the interval, not of the run
    assert row["hit_share"] == pytest.approx(0.1)  # of the 4,000 looked up in it
    assert (row["written_bytes"], row["read_bytes"], row["dropped"]) == (2 * GB, 2**30, 5)
    assert (row["dwpd"], row["life_years"]) == (2.5, 2.0)  # as of the end
    (name, text), *_ = rows(found)
    assert name == "tier ssd"
    assert text == (
        "400 prompt tokens found there (10 %), 50 % of 16 GiB on each node in use at the end, 1.863 GiB written and 1 GiB read, "
        "5 writes dropped, 2.5 drive writes per day: 2 years to its rated wear"
    )


def test_nodes_stand_apart_with_what_moved_between_them(found: dict[str, Any]) -> None:
    nodes = found["nodes"]
    assert [(row["node"], row["role"]) for row in nodes["rows"]] == [("0", "prefill"), ("1", "decode")]
    assert nodes["rows"][0]["kv_usage"]["max"] == 0.4
    assert nodes["rows"][0]["kv_usage"]["mean"] == pytest.approx(0.2)  # the reading at 5 s held until 10 s
    assert (nodes["transfer_bytes"], nodes["retried"], nodes["store_tokens"]) == (2**31, 3, None)
    said = dict(rows(found))
    assert "of which 3 were up in the mean and 2 at least" not in said["nodes"]  # two told of themselves: no fewer
    assert "imbalance mean 1.5 max 2.5" in said["nodes"]
    assert "moved 2 GiB of KV between nodes; 3 requests begun again" in said["nodes"]
    assert said["node 1"] == "decode, kv mean 10 % max 10 %, running mean 1 max 1"


def test_groups_have_quota_hit_rate_and_moves(found: dict[str, Any]) -> None:
    low, high = found["groups"]["rows"].values()
    assert low["hit_rate"] == pytest.approx(0.25)  # 1,000 of 4,000
    assert high["hit_rate"] is None  # nobody told: not 0
    assert found["groups"]["moves"] == 2
    said = dict(rows(found))
    assert said["layers 1-6"] == "quota 40 % (40 % to 60 %), kv mean 20 % max 40 %, hit rate 25 %"
    assert said["layers 7-32"] == "quota 60 % (40 % to 60 %), kv mean 30 % max 90 %"
    assert said["quota"] == "moved 2 times between the layer groups"


def test_one_machine_has_none_of_it_and_says_so() -> None:
    none = machine([], 0.0, 10.0, {})
    assert all(part["rows"] in ([], {}) and part["reason"] for part in none.values())
    assert list(rows(none)) == []


def test_both_pages_have_the_same_rows(tmp_path: Path) -> None:
    directory = write(
        tmp_path / "run",
        [record(k, k * 0.01) for k in range(1000)],
        steady=(0.0, 10.0),
        samples=samples(),
        manifest={"target": FACTS},
    )
    files = load(directory)
    summary = summarise(files)
    page, out = html.page(summary, files), io.StringIO()
    render.terminal(summary, Console(file=out, width=400))
    for said in (
        "KV cache",
        "tier ssd",
        "layers 7-32",
        "goodput",
        "at most 10 sends within 100 ms",
        "longest ",
        "not measured: ",
    ):
        assert said in page
        assert said in out.getvalue()
    assert "words; off by 1 %" in page
    assert "{" not in page.split("</style>")[1].split("Request features")[0]  # nothing as Python writes it


def test_what_answered_is_told_node_by_node_and_no_product_is_made_of_groups() -> None:
    assert described(FACTS) == (
        "the embedded engine: m on 1 node of 1 x h100 for prefill and 2 nodes of 1 x h100 for decode (vllm profile), "
        "KV pools of 2 layer groups (300 + 200 blocks on each node), 4,000 tokens fit"
    )
    shared = [node | {"blocks": 300} for node in FACTS["nodes"]]
    pool = [group | {"blocks": 300} for group in FACTS["groups"]]
    assert "one KV pool for 2 layer groups (300 blocks on each node), 4,000 tokens fit" in described(
        FACTS | {"nodes": shared, "groups": pool}
    )
    assert "(300 + 200 blocks on node 0)" in described(
        FACTS | {"nodes": [FACTS["nodes"][0], FACTS["nodes"][1] | {"hardware": "l4"}]}
    )
    alike = [node | {"role": "mixed"} for node in FACTS["nodes"]]
    assert "m on 3 nodes of 1 x h100 (" in described(FACTS | {"nodes": alike})
    alone = {key: value for key, value in FACTS.items() if key not in ("nodes", "groups")}
    assert described(alone | {"kv_tokens": 8000}).endswith(
        "m on 4 x h100 (vllm profile), KV pool 500 blocks of 16 = 8,000 tokens"
    )


def test_a_tokenizer_is_told_in_words() -> None:
    assert tokenized({"kind": None, "reason": "the manifest names none"}) == "- (the manifest names none)"
    assert (
        tokenized({"kind": "words", "exact": False, "error": None, "how": "one token a word"})
        == "words; one token a word; not measured"
    )
    assert tokenized({"kind": "ids", "exact": True, "error": 0.0, "how": "random ids"}) == "ids; random ids; exact"
