"""A cluster's gauges and its tape: shares over nodes by hand, and what moves between nodes row by row."""

from typing import Any

import pytest

from kvbench.compose import build_machine
from kvbench.core import CacheAccess
from kvbench.endpoint import Sim
from kvbench.engine import Job
from kvbench.engine.log import Log
from kvbench.engine.tape import Access

HALVED = {"groups": [{"layers": "1-16", "codec": "fp8"}, {"layers": "17+", "codec": "fp8"}]}


def machine(cluster: dict[str, Any], blocks: int = 201, **more: Any) -> tuple[Any, list[Access]]:
    """A cluster of llama-3.1-8b in blocks of 4 tokens, and its tape."""
    heard: list[Access] = []
    spec = {"model": "llama-3.1-8b", "hardware": "rtx-4090", "block": 4, "settings": {"blocks": blocks}, "cluster": cluster}
    return build_machine(Sim.model_validate(spec | more), 0, [heard.append]), heard


def play(built: Any, *jobs: tuple[float, Job]) -> None:
    for at, each in jobs:
        built.advance(at)
        assert built.submit(each, at) is None
    while built.wake() < float("inf"):
        built.advance(built.wake())
        built.check()


def test_slot_efficiency_is_over_what_is_held_whoever_idles() -> None:
    built, _ = machine({"replicas": 3})
    assert "slot_efficiency" not in built.gauges()
    built.submit(Job(0, ((1, 9),), 50), 0.0)  # node 0: 3 blocks of 4, of which 2 will be full after the step
    built.submit(Job(1, ((2, 30),), 50), 0.0)  # node 1: 8, of which 7
    built.advance(1e-4)
    assert built.gauges()["slot_efficiency"] == pytest.approx((8 + 28) / (12 + 32))
    each = [read.get("slot_efficiency") for read in built.gauges_by_node()]
    assert each == [pytest.approx(8 / 12), pytest.approx(28 / 32), None]


def test_shares_of_layer_groups_and_tiers_stay_shares() -> None:
    groups = {"groups": [{"layers": "1-6", "quota": 0.3}, {"layers": "7+"}], "partition": "dynamic"}
    tiers = {"host": {"capacity": 4e7}, "ssd": {"capacity": 8e7}}
    built, _ = machine({"replicas": 3}, layers=groups, tiers=tiers)
    play(built, *((0.1 * number, Job(number, ((number + 1, 300),), 20)) for number in range(12)))
    built.submit(Job(99, ((7, 200),), 50), 10.0)
    built.advance(10.01)
    gauges = built.gauges()
    nodes = built.gauges_by_node()
    for name in ("quota_1_6", "kv_usage_1_6", "kv_usage_7_32", "tier_host_used", "tier_ssd_used"):
        assert gauges[name] == pytest.approx(sum(node[name] for node in nodes) / 3), name
        assert 0 < gauges[name] <= 1, name
    assert gauges["quota_1_6"] + gauges["quota_7_32"] == pytest.approx(1)
    assert gauges["ssd_life_years"] == min(node["ssd_life_years"] for node in nodes if "ssd_life_years" in node)


@pytest.mark.parametrize(("layers", "size"), [(None, 131_072), (HALVED, 65_536)])
def test_a_prompt_that_moves_on_is_told_block_by_block_in_bytes_as_stored(layers: Any, size: int) -> None:
    more = {} if layers is None else {"layers": layers}
    built, heard = machine({"nodes": [{"role": "prefill"}, {"role": "decode"}]}, **more)
    play(built, (0.0, Job(5, ((1, 42),), 3)))
    moved = [row for row in heard if row.op == "migrate"]
    assert [(row.job, row.node, row.tier) for row in moved] == [(5, 1, "gpu")] * 10 * (1 if layers is None else 2)
    assert {row.key for row in moved} <= {row.key for row in heard if row.op == "store" and row.node == 0}
    assert built.gauges()["transfer_bytes"] == 42 * size


def test_copies_of_warm_content_are_told_as_they_are_counted() -> None:
    built, heard = machine({"replicas": 2, "migrate": 1e12})
    jobs = [(0.5 * number, Job(number, ((number + 1, 700 if number % 2 == 0 else 8),), 4)) for number in range(8)]
    play(built, *jobs)
    moved = [row for row in heard if row.op == "migrate"]
    assert len(moved) == built.gauges()["migrated_blocks"] > 10
    assert {row.node for row in moved} == {1}


def test_what_the_store_gives_is_told_as_restored_from_it() -> None:
    built, heard = machine({"replicas": 2, "store": {"cold": 1.0}}, blocks=2001)
    shared = Job(0, ((1, 2000), (10, 8)), 2), Job(3, ((1, 2000), (13, 8)), 2)  # on node 0, then on node 1
    play(built, (0.0, shared[0]), (5.0, Job(1, ((11, 8),), 2)), (10.0, Job(2, ((12, 8),), 2)), (15.0, shared[1]))
    rows = [row for row in heard if row.op == "restore"]
    assert [(row.job, row.node, row.tier) for row in rows] == [(3, 1, "store")] * 500
    assert built.gauges()["store_tokens"] == 2000


def test_a_loss_is_a_reset_of_its_node_and_the_log_says_so() -> None:
    log = Log(1.0)
    spec = {
        "model": "llama-3.1-8b", "hardware": "rtx-4090", "block": 4, "settings": {"blocks": 201}, "cluster": {"replicas": 2},
        "faults": [{"kind": "node_loss", "node": 0, "at": 1, "for": 1}],
    }  # fmt: skip
    built = build_machine(Sim.model_validate(spec), 0, [log])
    play(built, (0.0, Job(0, ((1, 40),), 2)), (0.5, Job(1, ((2, 40),), 2)), (0.999, Job(2, ((3, 41),), 400)))
    play(built, (5.0, Job(3, ((4, 9),), 2)), (6.0, Job(4, ((1, 40),), 2)), (6.0, Job(5, ((1, 40),), 2)))
    lines = log.take()
    reasons = [(line.node, line.reason) for line in lines if line.op == "miss" and line.job in (4, 5) and line.node == 0]
    assert reasons == [(0, "reset")] * 9
    gone = [line for line in lines if line.op == "reset" and line.node == 0]
    assert {line.t for line in gone} == {1.0}
    assert sum(not line.key for line in gone) == 1
    taken, freed = (sum(line.op == op and line.node == 0 and line.t <= 1.0 for line in lines) for op in ("alloc", "free"))
    assert taken == freed > 20


def test_content_that_is_not_kept_for_its_shortness_is_told_to_leave() -> None:
    heard: list[CacheAccess] = []
    log = Log(1.0)
    spec = {"model": "llama-3.1-8b", "hardware": "rtx-4090", "block": 4, "settings": {"blocks": 201, "retain_tokens": 100}}
    built = build_machine(Sim.model_validate(spec), 0, [log])
    play(built, (0.0, Job(0, ((1, 40),), 2)))
    heard += log.take()
    stored, evicted = ({line.key for line in heard if line.op == op and line.key} for op in ("alloc", "evict"))
    assert stored == evicted
    assert len(stored) == 10
