"""Clusters: every job ends once with the tokens it asked for, whatever the router, the losses and the way it is driven."""

import math
import random

import pytest
from pydantic import ValidationError

from kvbench.engine import Done, Job, Span
from kvbench.engine.cluster import Cluster
from kvbench.engine.engine import Engine
from kvbench.engine.faults import FAULTS, Fault
from kvbench.engine.node import Task, keys_of
from kvbench.engine.router import ROUTERS
from kvbench.engine.store import Line, Store, carry
from kvbench.fleet import ClusterSpec
from kvbench.profile import load_engine, load_hardware, load_model

MODEL = load_model("llama-3.1-8b")  # 131,072 B of KV per token


def cluster(spec: dict[str, object], *faults: Fault, blocks: int = 201, seed: int = 0, block: int = 4) -> Cluster:
    profile = load_engine("vllm", block=block, blocks=blocks)
    built = ClusterSpec.model_validate(spec)
    return built.build(MODEL, "rtx-4090", profile, seed, faults, lambda node, hw, own, hit: Engine(MODEL, hw, profile, own, hit))


def job(number: int, prompt: int = 8, answer: int = 4, shared: tuple[tuple[int, int], ...] = ()) -> Job:
    return Job(number, (*shared, (1000 + number, prompt)), answer)


def lost(node: int, at: float, for_: float | None = None) -> Fault:
    return FAULTS["node_loss"].model_validate({"node": node, "at": at, "for": for_})


class Seen:
    """What a driver saw. Asserts order, arrival before tokens, and one end per job."""

    def __init__(self) -> None:
        self.sent: dict[int, tuple[Job, float]] = {}
        self.times: dict[tuple[int, int], list[int]] = {}
        self.ends: dict[int, Done] = {}

    def take(self, spans: list[Span]) -> None:
        ends = [span.times[-1] for span in spans]
        assert ends == sorted(ends)
        for span in spans:
            for name in span.tokens:
                assert span.times[0] > self.sent[name[0]][1] * 1e9
                got = self.times.setdefault(name, [])
                assert not got or got[-1] < span.times[0]
                got += span.times
            for done in span.done:
                assert done.id not in self.ends
                self.ends[done.id] = done

    def submit(self, built: Cluster | Engine, each: Job, now: float) -> str | None:
        self.take(built.advance(now))
        self.sent[each.id] = each, now
        why = built.submit(each, now)
        if why is not None:
            del self.sent[each.id]
        return why

    def run(self, built: Cluster | Engine, check: int = 10) -> "Seen":
        steps = 0
        while math.isfinite(wake := built.wake()):
            self.take(built.advance(wake))
            steps += 1
            assert steps < 50_000
            if steps % check == 0:
                built.check()
        built.check()
        return self

    def whole(self) -> None:
        """Every job has ended, with all its tokens where it did not fail."""
        assert self.ends.keys() == self.sent.keys()
        for number, (each, _) in self.sent.items():
            got = [len(self.times.get((number, choice), [])) for choice in range(each.n)]
            if not self.ends[number].failed:
                assert got == [each.max_tokens] * each.n
                assert self.ends[number].n_out == sum(got)
                assert self.ends[number].n_in == each.tokens


def play(built: Cluster | Engine, seed: int, jobs: int = 50, rate: float = 20, looks: int = 0) -> Seen:
    """Random jobs, some cancelled; `looks`: times that the driver looks in between, for nothing."""
    rng, seen, now = random.Random(seed), Seen(), 0.0
    for number in range(jobs):
        before, now = now, now + rng.expovariate(rate)
        for look in range(looks):
            seen.take(built.advance(before + (now - before) * (look + 1) / (looks + 1)))
        segments = ((rng.randrange(5) + 1, rng.randrange(1, 40)), (100 + number, rng.randrange(1, 80)))
        each = Job(number, segments, rng.randrange(1, 30), rng.choice([1, 1, 1, 2]), cls=rng.choice("ab"))
        refused, cancels, wait = seen.submit(built, each, now), rng.random() < 0.1, rng.random() * 0.3
        if cancels and refused is None:
            now += wait
            seen.take(built.advance(now))
            if number not in seen.ends:
                built.cancel(number, now)
                del seen.sent[number]
        built.check()
    return seen.run(built)


SPECS: dict[str, dict[str, object]] = {kind: {"replicas": 3, "router": kind} for kind in ROUTERS} | {
    "everything": {"replicas": 3, "router": "load_aware", "migrate": 1e9, "store": {"cold": 0.5}},
    "apart": {"nodes": [{"role": "prefill"}, {"role": "decode", "replicas": 2}], "transfer": {"bandwidth": 1e9}},
    "some apart": {
        "nodes": [{"role": "prefill"}, {"role": "decode"}, {"hardware": "l4"}], "router": "load_aware", "store": {"cold": 0.1},
    },
}  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("on_loss", ["retry", "fail"])
@pytest.mark.parametrize("name", SPECS)
def test_every_job_ends_once_with_its_tokens(name: str, on_loss: str, seed: int) -> None:
    spec: dict[str, object] = {**SPECS[name], "on_loss": on_loss, "detect": 0.2 * (seed == 2)}
    faults = [lost(1, 0.8, 0.7)] if seed else []
    built = cluster(spec, *faults, blocks=60 + 60 * seed, seed=seed)
    seen = play(built, seed)
    seen.whole()
    assert {done.failed for done in seen.ends.values()} <= ({"", "node_lost"} if seed and on_loss == "fail" else {""})


@pytest.mark.parametrize("name", SPECS)
def test_how_often_one_looks_changes_nothing(name: str) -> None:
    one, other = (play(cluster(SPECS[name], lost(1, 0.8, 0.7), blocks=90), 5, looks=looks) for looks in (0, 3))
    assert one.times == other.times
    assert one.ends == other.ends


def test_a_cluster_of_one_is_the_engine() -> None:
    profile = load_engine("vllm", block=4, blocks=60)
    alone = Engine(MODEL, load_hardware("rtx-4090"), profile, 3)
    built = cluster({"replicas": 1}, blocks=60, seed=3)
    rng, now = random.Random(1), 0.0
    for number in range(60):
        now += rng.expovariate(30)
        each = job(number, rng.randrange(1, 60), rng.randrange(1, 30), shared=((1, 20),))
        assert built.advance(now) == alone.advance(now)
        assert built.submit(each, now) == alone.submit(each, now)
        assert built.wake() == alone.wake()
    assert built.advance(1e3) == alone.advance(1e3)
    assert alone.gauges().items() <= built.gauges().items()


def test_round_robin_takes_turns_and_skips_who_is_down() -> None:
    built, seen = cluster({"replicas": 3}, lost(1, 1.0)), Seen()
    for number in range(8):
        seen.submit(built, job(number, answer=200), 0.1 * number if number < 5 else 1.0 + 0.01 * number)
    held = [sorted(node.tasks) for node in built.nodes]
    assert held == [[0, 1, 3, 6], [], [2, 4, 5, 7]]  # 1 and 4 were on node 1: retried in turn (2 was last: 0, 2); then 0, 2, 0


def test_a_lost_node_takes_only_its_own_keys_along() -> None:
    def where(without: int | None) -> list[int]:
        built = cluster({"replicas": 5, "router": "consistent_hash"})
        nodes = [node for node in built.nodes if node.number != without]
        router = built.routers["entry"]
        tasks = [Task(job(number), keys_of(nodes[0].cache, job(number))) for number in range(400)]
        router.choose(tasks[0], built.nodes)  # all five are on the ring
        return [chosen.number for task in tasks if (chosen := router.choose(task, nodes)) is not None]

    whole, less = where(None), where(2)
    assert all(before == after for before, after in zip(whole, less, strict=True) if before != 2)
    assert 40 < whole.count(2) < 130  # about a fifth


def test_affinity_finds_more_than_taking_turns() -> None:
    def hits(router: str) -> float:
        built, seen = cluster({"replicas": 4, "router": router}, blocks=301), Seen()
        rng = random.Random(4)
        for number in range(120):
            seen.submit(built, job(number, 10, 4, shared=((rng.randrange(12) + 1, 200),)), 0.1 * number)
        seen.run(built).whole()
        gauges = built.gauges()
        return gauges["hit_tokens"] / gauges["query_tokens"]

    assert hits("prefix_affine") > 1.2 * hits("round_robin")


def test_least_loaded_goes_where_fewest_requests_are() -> None:
    built, seen = cluster({"replicas": 3, "router": "least_loaded"}), Seen()
    for number, answer in enumerate((500, 2, 500, 500, 500)):
        seen.submit(built, job(number, answer=answer), 0.0 if number < 3 else 1.0 + 0.1 * number)
    assert [sorted(node.tasks) for node in built.nodes] == [[0, 4], [3], [2]]  # 1 had ended when 3 came; then all have one


def test_load_aware_stays_below_its_threshold_where_turns_run_over() -> None:
    def highest(router: object) -> tuple[float, float]:
        built, seen, most = cluster({"replicas": 2, "router": router}, blocks=101), Seen(), 0.0  # 400 tokens each
        for number in range(60):
            large = number % 2 == 0  # taking turns sends every large one to node 0
            seen.submit(built, Job(number, ((number + 1, 90 if large else 10),), 20), 0.01 * number)
            most = max(most, *(node.engine.gauges()["kv_usage"] for node in built.nodes))
        seen.run(built, check=100).whole()
        return most, built.gauges()["preemptions"]

    most, preempted = highest({"kind": "load_aware", "threshold": 0.8, "prior": 22})
    assert most <= 0.8
    assert preempted == 0
    most, preempted = highest("round_robin")
    assert most > 0.95


def test_load_aware_learns_how_long_answers_of_a_class_are() -> None:
    """The mean of the class's answers, the prior counted in eight times."""
    router = ROUTERS["load_aware"].model_validate({"prior": 256}).arm()
    chat, other = Job(0, ((1, 8),), 500, 2, cls="chat"), Job(1, ((1, 8),), 500, cls="other")
    assert (router.expected(chat), router.expected(other)) == (2 * 256, 256)
    for _ in range(8):
        router.ended(chat, 64)
    assert (router.expected(chat), router.expected(other)) == (2 * 160, 256)


def test_transfer_by_hand() -> None:
    # 100 prompt tokens x 131,072 B = 13,107,200 B at 1 GB/s: 13.1072 ms, and 1 ms latency.
    spec: dict[str, object] = {
        "nodes": [{"role": "prefill"}, {"role": "decode"}],
        "transfer": {"bandwidth": 1e9, "latency": 1e-3},
    }
    built, seen = cluster(spec), Seen()
    seen.submit(built, job(0, 100, 3), 0.0)
    while (0, 0) not in seen.times:
        seen.take(built.advance(built.wake()))
    first = seen.times[0, 0][0]
    assert round(built.wake() * 1e9) == first + 14_107_200
    assert built.gauges()["transfer_bytes"] == 13_107_200
    seen.run(built).whole()
    assert seen.times[0, 0][1] > first + 14_107_200


def test_lines_carry_one_thing_at_a_time() -> None:
    out, into = Line(1e9, 0.5), Line(1e9, 0.5)
    assert carry(out, into, 1e9, 0) == 1_500_000_000
    assert carry(out, Line(1e9, 0.5), 1e9, 0) == 2_500_000_000  # the sender was busy for 1 s
    assert into.arrival(1e9, 0) == 2_500_000_000


def test_the_store_gives_up_what_was_used_longest_ago() -> None:
    store = Store(3, 100.0, Line(100.0), Line(100.0))
    store.keep([1, 2, 3])
    assert store.fetch([1], 0) == 10**9
    store.keep([4])
    assert [key in store for key in (1, 2, 3, 4)] == [True, True, False, True]  # the tail of 1, 2, 3 was the oldest
    assert store.found([1, 2, 3, 4]) == 2


def test_a_cold_context_is_found_in_the_store_by_another_node() -> None:
    spec: dict[str, object] = {"replicas": 2, "store": {"tier": "remote-100g", "cold": 1.0}}
    built, seen = cluster(spec, blocks=2001), Seen()
    prefix = ((1, 2000),)
    seen.submit(built, job(0, 8, 2, shared=prefix), 0.0)  # node 0
    seen.submit(built, job(1, 8, 2), 5.0)  # node 1; the store is written in the background
    seen.submit(built, job(2, 8, 2), 10.0)  # node 0
    seen.submit(built, job(3, 8, 2, shared=prefix), 15.0)  # node 1
    seen.run(built).whole()
    assert seen.ends[3].cached == 2000
    assert built.gauges()["store_tokens"] == 2000


def test_the_store_is_read_only_where_that_is_sooner_than_computing() -> None:
    spec: dict[str, object] = {"replicas": 2, "store": {"tier": "remote-100g", "cold": 1.0}}
    built, seen = cluster(spec, blocks=2001), Seen()
    assert built.mover.store is not None
    built.mover.store.reads.bandwidth = 1e6  # 131 KB a token: 8 tokens/s
    for number, at in enumerate((0.0, 5.0, 10.0, 15.0)):
        seen.submit(built, job(number, 8, 2, shared=((1, 2000),) if number in (0, 3) else ()), at)
    seen.run(built).whole()
    assert seen.ends[3].cached == built.gauges()["store_tokens"] == 0


@pytest.mark.parametrize(("other", "copied"), [(260, True), (200, False)])
def test_a_full_node_copies_its_oldest_content_to_one_with_room(other: int, copied: bool) -> None:
    """Nodes of 400 tokens in turn. Node 0 has 104 + `other` tokens of content: less than 40 empty, or more."""
    built, seen = cluster({"replicas": 2, "migrate": 1e9}, blocks=101), Seen()
    prefix = ((1, 100),)
    for number, each in enumerate((job(0, 4, 2, prefix), job(1, 8, 2), job(2, other, 2), job(3, 8, 2), job(4, 4, 2))):
        seen.submit(built, each, 5.0 * number)  # job 3 comes when node 0 has what job 2 left
    seen.submit(built, job(5, 8, 2, prefix), 30.0)
    assert 5 in built.nodes[1].tasks
    seen.run(built).whole()
    assert seen.ends[5].cached == (100 if copied else 0)
    assert (built.gauges()["migrated_blocks"] > 0) == copied


def test_who_waits_beyond_refuse_above_is_turned_away() -> None:
    spec: dict[str, object] = {"replicas": 1, "router": {"kind": "load_aware", "prior": 50}, "refuse_above": 1}
    built, seen = cluster(spec, blocks=26), Seen()  # 100 tokens, 90 of them to commit: one job at a time
    assert [seen.submit(built, job(number, 30, 10), 0.0) for number in range(3)] == [None, None, "full"]
    assert built.submit(job(9, 100, 10), 0.0) == "kv_too_small"
    assert (built.gauges()["held"], built.gauges()["oom"]) == (1, 1)
    seen.run(built).whole()


def test_oom_is_counted_over_all_nodes_and_teaches_routers_nothing() -> None:
    """Three equal answers on each of two nodes whose memory holds two: the third dies at its node's first shortage."""
    profile = load_engine("vllm", block=4, blocks=13, max_preemptions=0)
    spec = ClusterSpec.model_validate({"replicas": 2})
    built = spec.build(MODEL, "rtx-4090", profile, 0, (), lambda node, hw, own, hit: Engine(MODEL, hw, profile, own, hit))
    taught: list[int] = []
    for router in {id(router): router for router in built.routers.values()}.values():
        router.ended = lambda job, tokens: taught.append(job.id)  # type: ignore[method-assign]
    seen = Seen()
    for number in range(6):
        assert seen.submit(built, job(number, 8, 13), 0.0) is None
    seen.run(built)
    failed = {number for number, done in seen.ends.items() if done.failed == "oom"}
    assert len(seen.ends) == 6
    assert {number % 2 for number in failed} == {0, 1}
    assert all(seen.ends[number].n_out == len(seen.times[number, 0]) < 13 for number in failed)
    assert {*taught} == {*range(6)} - failed
    gauges, nodes = built.gauges(), built.gauges_by_node()
    assert gauges["oom"] == sum(node["oom"] for node in nodes) == len(failed)
    assert gauges["oom_rate"] == len(failed) / 6 == sum(node["oom_rate"] for node in nodes) / 2


def test_an_unnoticed_loss_swallows_what_is_sent_there() -> None:
    built, seen = cluster({"replicas": 2, "on_loss": "fail", "detect": 2.0}, lost(0, 1.0, 10.0)), Seen()
    assert seen.submit(built, job(0, answer=300), 0.5) is None
    assert seen.submit(built, job(1), 1.5) is None  # node 1
    assert seen.submit(built, job(2), 2.0) is None  # node 0, down
    seen.run(built)
    assert {number: done.failed for number, done in seen.ends.items()} == {0: "node_lost", 1: "", 2: "node_lost"}
    assert 0 < seen.ends[0].n_out < 300
    assert seen.ends[2].n_out == 0
    assert [read["up"] for read in built.gauges_by_node()] == [0, 1]
    built.advance(11.0)
    assert [read["up"] for read in built.gauges_by_node()] == [1, 1]
    assert [edge.edge for edge in built.passed] == ["begin", "end"]


def test_reset_empties_every_node_or_none() -> None:
    built, seen = cluster({"replicas": 2}), Seen()
    seen.submit(built, job(0, 40), 0.0)
    seen.take(built.advance(1e-6))
    assert not built.reset(1e-6)
    seen.run(built)
    assert built.gauges()["cached_share"] > 0
    assert built.reset(10.0)
    assert built.gauges()["cached_share"] == 0


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({}, "replicas"),
        ({"replicas": 2, "nodes": [{}]}, "either"),
        ({"nodes": [{"role": "prefill"}]}, "somebody has to decode"),
        ({"nodes": [{"role": "decode"}, {}]}, "there is none"),
        ({"replicas": 2, "router": "rnd"}, "round_robin"),
        ({"replicas": 2, "store": {"tier": "tape"}}, "remote-100g"),
    ],
)
def test_what_is_wrong_is_said(spec: dict[str, object], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        ClusterSpec.model_validate(spec)
