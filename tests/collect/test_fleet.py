"""Pages into readings: each kind of server, several engines, restarts, and what is missing. Numbers by hand from pages.py."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.collect.fleet import Fleet
from kvbench.collect.series import SUM, Buckets, Track, described, quantile
from kvbench.collect.settings import configured
from tests.collect import pages
from tests.collect.pages import joined, read, take, vllm


def missing(text: str) -> set[str]:
    return set(take(Fleet(["one"]), text).missing())


def test_sglang() -> None:
    found = joined(pages.SGLANG)
    assert found == {
        "kv_usage": 0.28, "running": 7, "waiting": 2, "paused": 1, "preemptions_total": 4, "hit_rate_now": 0.8,
        "hit_tokens_total": 700, "query_tokens_total": 1000, "prompt_tokens_total": 1000, "generation_tokens_total": 300,
        "finished_total": 12, "refused_total": 1,
    }  # fmt: skip
    assert configured(read(pages.SGLANG))[0]["capacity_tokens"] == 50000
    assert not missing(pages.SGLANG)


def test_tensorrt_llm_counts_blocks() -> None:
    found = joined(pages.TRTLLM)
    assert (found["hit_tokens_total"], found["kv_usage"], found["paused"], found["finished_total"]) == (320, 0.4, 2, 9)
    assert found["query_tokens_total"] == 1280
    assert missing(pages.TRTLLM) == {"preemptions_total", "prompt_tokens_total", "generation_tokens_total"}
    assert configured(read(pages.TRTLLM))[0] == {
        "engine": None, "num_gpu_blocks": 100, "block_size": 32, "capacity_tokens": 3200,
        "capacity": "blocks x block size: uniform layout assumed",
    }  # fmt: skip


def test_lmdeploy_tgi_and_llama_cpp() -> None:
    found = joined(pages.LMDEPLOY)
    assert (found["kv_usage"], found["running"], found["hit_tokens_total"], found["hit_rate_now"]) == (0.5, 4, 64, 0.125)
    assert "preemptions_total" not in found
    found = joined(pages.TGI)
    assert found == {
        "running": 5, "waiting": 3, "prompt_tokens_total": 800, "generation_tokens_total": 240, "finished_total": 12,
        "refused_total": 1,
    }  # fmt: skip
    assert "kv_usage" in missing(pages.TGI)
    found = joined(pages.LLAMACPP)
    assert found == {"running": 1, "waiting": 2, "prompt_tokens_total": 120, "generation_tokens_total": 60}


def test_dynamo_and_an_engine_behind_it() -> None:
    found = joined(pages.DYNAMO)
    assert (found["kv_usage"], found["kv_usage_fullest"]) == (pytest.approx(0.4), 0.5)
    assert (found["finished_total"], found["hit_tokens_total"], found["query_tokens_total"]) == (21, 300, 1200)
    both = joined(pages.DYNAMO + vllm(usage=0.9, queries=50))
    assert (both["kv_usage"], both["query_tokens_total"], both["finished_total"]) == (0.9, 50, 0)


def test_devices_of_dcgm_and_of_our_agent() -> None:
    fleet = take(Fleet(["one"]), pages.DCGM)
    found = {r.name: r.value for r in fleet.readings() if not r.labels}
    assert found == {
        "gpu_memory": 61000 / 80000, "gpu_utilization": 0.75, "gpu_power_w": 801, "gpu_energy_j_total": 4000,
        "gpu_temperature_c": 61, "gpu_sm_clock_hz": 1.98e9,
    }  # fmt: skip
    apart = {r.labels["gpu"]: r for r in take(Fleet(["one"]), pages.DCGM).readings() if r.name == "gpu_memory" and r.labels}
    assert apart["1"].value == 21000 / 80000
    assert apart["1"].labels == {"host": "h", "uuid": "GPU-1", "gpu": "1"}
    assert not missing(pages.DCGM), "nobody asks an exporter of devices for KV usage"
    take(fleet, pages.DCGM.replace('pod="a"', 'pod="b"').replace(" 2000000", " 2500000"))
    assert fleet.totals()["gpu_energy_j_total"]["value"] == 1000, "another pod on a device is no other device"
    assert joined(pages.AGENT) == {"gpu_memory": 0.75, "gpu_power_w": 400, "gpu_energy_j_total": 1234.5}


def test_engines_stand_apart_and_together() -> None:
    fleet = take(Fleet(["one"]), vllm("0", usage=0.9, queries=10) + vllm("1", usage=0.1, queries=5))
    found = {(r.name, r.labels.get("engine")): r.value for r in fleet.readings()}
    assert [found["kv_usage", engine] for engine in ("0", "1", None)] == [0.9, 0.1, 0.5]
    assert [found["query_tokens_total", engine] for engine in ("0", "1", None)] == [10, 5, 15]
    assert found["kv_usage_fullest", None] == 0.9
    assert found["running", None] == 2


def test_several_servers_are_one_fleet() -> None:
    fleet = Fleet(["a:1", "b:2"])
    take(take(fleet, vllm(usage=0.2, finished=3)), vllm(usage=0.6, finished=4), server=1)
    found = {(r.name, r.labels.get("server")): (r.value, r.server) for r in fleet.readings()}
    assert found["kv_usage", None] == (pytest.approx(0.4), -1)
    assert found["finished_total", "b:2"] == (4, 1)
    assert found["finished_total", None] == (7, -1)


def test_a_counter_that_is_declared_and_has_not_counted_is_at_zero() -> None:
    text = "# TYPE vllm:request_success_total counter\n"
    assert joined(text)["finished_total"] == 0
    assert "kv_usage" not in joined(text), "a gauge without a series says nothing"


def test_out_of_range_is_null_and_said_so() -> None:
    fleet = take(Fleet(["one"]), vllm(usage=28.0))
    assert [r.value for r in fleet.readings() if r.name == "kv_usage"] == [None, None]
    (event,) = fleet.events
    assert (event["metric"], event["reason"]) == ("kv_usage", "28 is out of range")


def test_what_goes_is_told_once() -> None:
    fleet = take(Fleet(["one"]), vllm(usage=0.5))
    assert [r.value for r in fleet.readings() if r.name == "kv_usage"] == [0.5, 0.5]
    take(fleet, "up 1\n")
    assert [r.value for r in fleet.readings() if r.name == "kv_usage"] == [None, None]
    take(fleet, "up 1\n")
    assert not [r for r in fleet.readings() if r.name in ("kv_usage", "query_tokens_total")]
    take(fleet, vllm(usage=0.25))
    assert [r.value for r in fleet.readings() if r.name == "kv_usage"] == [0.25, 0.25]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30), st.integers(0, 100))
def test_a_track_adds_up_whatever_restarts(steps: list[tuple[int, bool]], base: int) -> None:
    """The sum of all increments, where each is seen; a restart to a value that was passed already shows as a fall."""
    track, value, grown, resets = Track(float(base)), base, 0, 0
    for more, restarts in steps:
        if restarts and value > more:
            value = more
            resets += 1
        else:
            value += more
        grown += more
        track.read(float(value))
    assert (track.grown, track.resets, track.base) == (grown, resets, base)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("012"), st.integers(0, 9), st.booleans()), max_size=20))
def test_the_joined_counter_never_falls(steps: list[tuple[str, int, bool]]) -> None:
    """Engines that count, restart, come and go: what all of them came to is the sum of what each of them counted."""
    now = {"0": 100, "1": 50}
    fleet = take(Fleet(["one"]), "".join(vllm(e, finished=n) for e, n in now.items()))
    last, counted = 150.0, 0
    for engine, more, restarts in steps:
        before = now.get(engine, 0)
        now[engine] = more if restarts and more < before else before + more
        counted += more
        take(fleet, "".join(vllm(e, finished=n) for e, n in now.items()))
        value = fleet.joined("finished_total")
        assert value is not None
        assert value >= last
        last = value
    assert last == 150 + counted
    assert fleet.totals()["finished_total"]["value"] == counted


def test_quantiles_lie_between_the_edges_of_their_bucket() -> None:
    """100 observations: 50 up to 1 s, 90 up to 2 s, 98 up to 4 s, 2 beyond."""
    edges, counts = [1.0, 2.0, 4.0, math.inf], [50.0, 90.0, 98.0, 100.0]
    assert quantile(edges, counts, 0.5) == (0.0, 1.0)
    assert quantile(edges, counts, 0.51) == (1.0, 2.0)
    assert quantile(edges, counts, 0.9) == (1.0, 2.0)
    assert quantile(edges, counts, 0.95) == (2.0, 4.0)
    assert quantile(edges, counts, 0.99) == (4.0, None), "beyond the last edge: at least that"


def test_a_histogram_is_the_runs_own() -> None:
    """Before the run 10 observations, all up to 1; in it 4 more, of which 1 beyond 2; then a restart, and 2 up to 1."""
    buckets = Buckets({1.0: 10.0, 2.0: 10.0, math.inf: 10.0, SUM: 5.0})
    assert not buckets.read({1.0: 12.0, 2.0: 13.0, math.inf: 14.0, SUM: 12.0})
    assert buckets.read({1.0: 2.0, 2.0: 2.0, math.inf: 2.0, SUM: 1.0})
    found = described([buckets])
    assert (found["n"], found["mean"]) == (6, (7 + 1) / 6)
    assert (found["p50"], found["p99"]) == ({"low": 0.0, "high": 1.0}, {"low": 2.0, "high": None})
    assert described([Buckets({math.inf: 3.0})])["reason"] == "nothing was observed"
    other = Buckets(None)
    other.read({3.0: 1.0, math.inf: 1.0})
    assert described([buckets, other])["reason"] == "the engines' buckets differ"
