"""Group I of the public cases, and F06: what a server's own metrics say of a run, and what they do not."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from kvbench.collect.fleet import Fleet
from kvbench.collect.settings import configured
from kvbench.metrics.names import METRICS
from tests.collect.pages import DATA, counting, joined, page_reply, read, take, text_of, vllm
from tests.stub.stub import DONE, FIN, C, Reply, Seen, Stub, answer_json, sse, stream, usage
from tests.whole import Whole, against, served

QUICK = "{steady: {requests: 10}, drain: {for: 5s}}"
EVERY = "collect: [{kind: prometheus, every: 100ms}]"


def answer(cached: int = 0) -> Reply:
    told = {**usage(8, 2), "prompt_tokens_details": {"cached_tokens": cached}}
    return stream(C("a") + C("b") + FIN + sse({"choices": [], "usage": told}) + DONE)


def run(stub: Stub, folder: Path, also: str = EVERY, phases: str = QUICK, rate: str = "20/s") -> Whole:
    return against(stub, served(f"{{shape: constant, rate: {rate}}}", phases, also=also), folder)


def check(found: Whole, name: str) -> Any:
    return next(row for row in found.summary["verdict"]["checks"] if row["check"] == name)


# ---- I01


def test_i01_of_several_processes_the_live_one_counts() -> None:
    pids = dict.fromkeys((271, 272, 274, 275, 276, 277, 278), 0.0) | {273: 0.6530455880475035}
    page = text_of(f'vllm:kv_cache_usage_perc{{engine="0",model_name="m",pid="{pid}"}} {value}' for pid, value in pids.items())
    found = {(r.name, *r.labels.items()): r.value for r in take(Fleet(["one"]), page).readings()}
    assert found == {("kv_usage", ("engine", "0")): 0.6530455880475035, ("kv_usage",): 0.6530455880475035}


def test_i01_engines_are_kept_apart_and_shares_are_never_added() -> None:
    page = vllm("0", usage=0.653) + vllm("1", usage=0.9)
    found = {(r.name, r.labels.get("engine")): r.value for r in take(Fleet(["one"]), page).readings()}
    assert found["kv_usage", "0"] == 0.653
    assert found["kv_usage", None] == pytest.approx((0.653 + 0.9) / 2)
    assert found["kv_usage_fullest", None] == 0.9


# ---- I02


@pytest.mark.parametrize("name", ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"])
def test_i02_old_names_and_new_ones_are_one_value(name: str) -> None:
    assert joined(f"{name} 0.25\n") == {"kv_usage": 0.25}


def test_i02_where_both_are_there_the_newer_counts() -> None:
    assert joined("vllm:gpu_cache_usage_perc 0.0\nvllm:kv_cache_usage_perc 0.25\n") == {"kv_usage": 0.25}


def test_i02_neither_is_null_and_gates_on_it_are_not_evaluated(tmp_path: Path) -> None:
    """The server shows its queue and no KV usage."""
    stub = Stub(answer(), gets=lambda seen: page_reply("vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"))
    stop = 'stop: [{kv_usage: "< 50%", for: 1s}]\nbudget: {kv_usage_max: 90%}\n'
    found = run(stub, tmp_path, stop + EVERY, "{steady: {for: 2100ms}, drain: {for: 5s}}")
    usage_ = found.summary["engine"]["kv_usage"]
    assert (usage_["mean"], usage_["reason"]) == (None, "not exposed by the target")
    (rule,) = found.summary["stop_rules"]
    assert rule["unread"] == rule["checks"] > 0, "0 would have been below 50 %"
    assert found.summary["stop"]["reason"] != rule["rule"]
    events = [line["data"] for line in found.lines("events.jsonl") if line["kind"] == "collector"]
    assert [e["reason"] for e in events if e.get("metric") == "kv_usage"] == ["not exposed by the server"]
    told = [line["value"] for line in found.lines("samples.jsonl") if line["name"] == "kv_usage"]
    assert told == [None]
    assert found.lines("windows.jsonl")[-1]["values"]["kv_usage_mean"] is None


# ---- I04


def test_i04_the_hit_rate_is_the_runs_own_and_other_traffic_is_flagged(tmp_path: Path) -> None:
    """Since its start the server had looked up 10,000 tokens and found 9,000; in the run 2,000 and 100, for us and for others."""

    def gets(seen: Seen) -> Reply:
        if stub.posts:
            return page_reply(vllm(queries=12000, hits=9100, finished=500 + 25, prompt=12000, generated=50))
        return page_reply(vllm(queries=10000, hits=9000, finished=500, prompt=10000))

    stub = Stub(answer(), gets=gets)
    found = run(stub, tmp_path)
    assert found.summary["server"]["hit_rate"] == {"value": 0.05, "n": 2000, "reason": None}
    assert found.summary["engine"]["hit_rate"]["value"] in (0.05, None), "of steady; read whenever it was"
    row = check(found, "server_requests")
    assert (row["value"], row["level"]) == (15 / 25, "INVALID")
    assert "25 ended there, 10 were sent from here" in row["text"]
    metrics = found.summary["server"]["metrics"]
    assert (metrics["hit_tokens_total"]["value"], metrics["hit_tokens_total"]["names"]) == (100, ["vllm:prefix_cache_hits_total"])
    assert found.summary["engine"]["hit_tokens_total"]["names"] == ["vllm:prefix_cache_hits_total"]


def test_i04_a_server_of_our_own_is_quiet_and_agrees(tmp_path: Path) -> None:
    stub: Stub = Stub(answer(), gets=lambda seen: counting(stub, seen, (8, 2), finished=500, prompt=1e6, generated=1e5))
    found = run(stub, tmp_path)
    metrics = found.summary["server"]["metrics"]
    assert [metrics[n]["value"] for n in ("finished_total", "prompt_tokens_total", "generation_tokens_total")] == [10, 80, 20]
    assert [(check(found, n)["value"], check(found, n)["level"]) for n in ("server_requests", "count_mismatch")] == [
        (0, "OK")
    ] * 2


def test_i04_a_count_that_disagrees_is_named(tmp_path: Path) -> None:
    stub: Stub = Stub(answer(), gets=lambda seen: counting(stub, seen, (8, 3)))
    row = check(run(stub, tmp_path), "count_mismatch")
    assert (row["value"], row["level"]) == (0.5, "INVALID")
    assert "tokens generated: 30 by the server, 20 by the answers" in row["text"]


# ---- I05


def test_i05_a_restart_counts_from_zero_and_is_flagged() -> None:
    fleet = take(Fleet(["one"]), vllm(generated=1000), vllm(generated=200))
    row = fleet.totals()["generation_tokens_total"]
    assert (row["value"], row["resets"]) == (200, 1)
    assert [(e["state"], e["labels"]) for e in fleet.events] == [("reset", {"engine": "0"})]
    assert fleet.joined("generation_tokens_total") == 1200


def test_i05_what_is_missing_at_the_end_is_null() -> None:
    fleet = take(Fleet(["one"]), vllm(generated=1000), vllm(generated=1100), "vllm:num_requests_running 0\n")
    row = fleet.totals()["generation_tokens_total"]
    assert (row["value"], row["gone"], row["reason"]) == (None, 1, "no series of it is left on the page")
    assert fleet.events[-1]["state"] == "gone"


def test_i05_a_pod_that_is_replaced_counts_from_zero() -> None:
    one, two = vllm(generated=1000, more=',pod="a"'), vllm(generated=1100, more=',pod="a"')
    fleet = take(Fleet(["one"]), one, two, vllm(generated=50, more=',pod="b"'))
    row = fleet.totals()["generation_tokens_total"]
    assert (row["value"], row["gone"], row["resets"]) == (150, 1, 0)
    assert [(e["state"], e["labels"]["pod"]) for e in fleet.events] == [("appeared", "b"), ("gone", "a")]


def test_i05_in_a_run(tmp_path: Path) -> None:
    """The server restarts after the fifth request; then its counters leave the page."""
    counts = [1000, 1000, 200, 260]

    def gets(seen: Seen) -> Reply:
        at = min(len(stub.posts) // 4, 3)
        return page_reply(vllm(generated=counts[at]) if len(stub.posts) < 14 else "vllm:num_requests_running 0\n")

    stub = Stub(answer(), gets=gets)
    found = run(stub, tmp_path, phases="{steady: {requests: 13}, drain: {for: 5s}}")
    assert found.summary["server"]["metrics"]["generation_tokens_total"]["value"] == 260
    assert [e["state"] for e in found.summary["server"]["events"]] == ["reset"]
    assert any("it restarted" in line for line in found.summary["warnings"])
    stub.log.clear()
    stub = Stub(answer(), gets=gets)
    (tmp_path / "two").mkdir()
    found = run(stub, tmp_path / "two", phases="{steady: {requests: 20}, drain: {for: 5s}}")
    assert found.summary["server"]["metrics"]["generation_tokens_total"]["value"] is None
    assert found.summary["engine"]["query_tokens_total"]["value"] is None


# ---- I06 (the engine's part is in test_i_preemption.py)


def test_i06_a_hit_rate_under_preemption_is_warned_of(tmp_path: Path) -> None:
    """The page of a real vLLM that had preempted 16 times, with what it was before at the start."""
    page = (DATA / "vllm-0.32-cpu.prom").read_text()
    label = '{engine="0",model_name="smollm2"}'
    after = [f"vllm:num_preemptions_total{label} 7.0", f"vllm:prefix_cache_hits_total{label} 1e6"]
    names = tuple(line.split("}")[0] for line in after)
    more = text_of([*(line for line in page.splitlines() if not line.startswith(names)), *after])
    stub: Stub = Stub(answer(), gets=lambda seen: page_reply(more if stub.posts else page) if seen.path == "/metrics" else NOT)
    found = run(stub, tmp_path)
    row = check(found, "recompute_in_hits")
    grown = 7 - joined(page)["preemptions_total"]  # type: ignore[operator]
    assert (row["value"], row["level"]) == (grown, "NOTED")
    assert "its hit rate may count what preempted requests looked up again" in row["text"]


def test_i06_the_warning_has_the_number(tmp_path: Path) -> None:
    def gets(seen: Seen) -> Reply:
        return page_reply(vllm(queries=100, hits=30, preempted=4) if stub.posts else vllm())

    stub = Stub(answer(), gets=gets)
    found = run(stub, tmp_path)
    (line,) = (line for line in found.summary["warnings"] if "preempted" in line)
    assert line.startswith("the server preempted 4 times over the run, 4 of them in steady: its hit rate of 30 % may count")


# ---- I07


def test_i07_a_gauge_of_the_last_batch_is_no_hit_rate(tmp_path: Path) -> None:
    """Replies say 6,000 of 10,000 tokens were found; the gauge goes 0.8, 0, 0, 0.9, 0."""
    gauge = itertools.cycle([0.8, 0.0, 0.0, 0.9, 0.0])
    told = {**usage(1000, 2), "prompt_tokens_details": {"cached_tokens": 600}}
    reply = stream(C("a") + C("b") + FIN + sse({"choices": [], "usage": told}) + DONE)
    page = 'sglang:cache_hit_rate{model_name="m"} %s\nsglang:token_usage{model_name="m"} 0.5\n'
    stub = Stub(reply, gets=lambda seen: page_reply(page % next(gauge)) if seen.path == "/metrics" else answer_json({}, 404))
    found = run(stub, tmp_path)
    assert (found.summary["told"]["hit_rate"], found.summary["told"]["prompt_tokens"]) == (0.6, 10000)
    assert found.summary["engine"]["hit_rate"]["value"] is None
    assert found.summary["server"]["hit_rate"]["value"] is None
    assert found.summary["server"]["pages"][0]["instantaneous"] == ["hit_rate_now"]
    assert {line["value"] for line in found.lines("samples.jsonl") if line["name"] == "hit_rate_now"} >= {0.0, 0.9}
    assert "hit_rate_now" not in METRICS, "so it is in no window, rule or budget"


# ---- I10


def test_i10_capacity_is_what_the_server_says_it_is() -> None:
    told = 'block_size="16",engine="0",num_gpu_blocks="1000",kv_cache_size_tokens="12345",kv_cache_max_concurrency="6.0"'
    info = f"vllm:cache_config_info{{{told}}} 1\n"
    (row,) = configured(read(info))
    assert (row["capacity_tokens"], row["capacity"], row["kv_cache_max_concurrency"]) == (12345, "told by the server", 6.0)
    two = configured(read(info + info.replace('engine="0"', 'engine="1"')))
    assert [(row["engine"], row["capacity_tokens"]) for row in two] == [("0", 12345), ("1", 12345)], "each engine's, never added"
    (row,) = configured(read('vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1\n'))
    assert (row["capacity_tokens"], row["capacity"]) == (16000, "blocks x block size: uniform layout assumed")
    (row,) = configured(read('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1\n'))
    assert (row["capacity_tokens"], row["capacity"]) == (None, "not exposed")


# ---- F06


def test_f06_the_servers_numbers_are_of_every_requests_whole_life(tmp_path: Path) -> None:
    """Steady is 0.5 s, answers take up to 0.9 s, and the page grows until 1.4 s: a tenth of the case's times."""
    delay = {number: 900.0 if number == 4 else 300.0 for number in range(5)}

    def script(seen: Seen) -> Reply:
        return Reply([(delay[seen.number], C("a") + C("b") + FIN + sse({"choices": [], "usage": usage(8, 2)}) + DONE)])

    def gets(seen: Seen) -> Reply:
        ended = [delay[post.number] / 1e3 for post in stub.posts if post.writes]
        edges = ("0.5", "1.0", "+Inf")
        name, label = "vllm:e2e_request_latency_seconds", 'engine="0"'
        lines = [f'{name}_bucket{{{label},le="{edge}"}} {sum(e <= float(edge) for e in ended)}' for edge in edges]
        lines += [f"{name}_sum{{{label}}} {sum(ended)}", f"{name}_count{{{label}}} {len(ended)}"]
        return page_reply(vllm(finished=len(ended)) + text_of(lines)) if seen.path == "/metrics" else NOT

    stub = Stub(script, gets=gets)
    found = run(stub, tmp_path, phases="{steady: {for: 500ms}, drain: {for: 5s}}", rate="10/s")
    told = found.summary["server"]
    assert len(found.records) == told["metrics"]["finished_total"]["value"] == 5
    e2e = told["metrics"]["server_e2e"]
    assert (e2e["n"], e2e["mean"]) == (5, pytest.approx((4 * 0.3 + 0.9) / 5))
    assert e2e["p99"] == {"low": 0.5, "high": 1.0}, "the slowest is not cut off"
    last = max(record.end_ns for record in found.records) / 1e9
    assert told["window"]["start"] < 0 < found.records[0].sent_ns / 1e9
    assert last <= told["window"]["end"] < last + 1.5
    assert "every request's whole life" in told["window"]["text"]


NOT = answer_json({}, 404)
