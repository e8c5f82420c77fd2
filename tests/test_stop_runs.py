"""The field's three stop conditions in whole runs: each ends a run at the second worked out by hand when a fault of the engine
should trip it, and none ends a healthy hour."""

import asyncio
import sys
from pathlib import Path

import pytest

from kvbench.engine import Step
from kvbench.engine.cost import Roofline
from kvbench.profile import load_engine, load_hardware, load_model
from tests.stub.stub import DONE, FIN, C, Reply, Seen, Stub, U, answer_json, stream
from tests.whole import ROOT, Whole, against, kvbench, served, simulated

RULES = """[
  {kv_usage: ">= 90%", for: 2m},
  {success_rate: "< 99.9%", over: 10m, min_requests: 1000},
  {response_ttft_p99: "> 10s", over: 1m, min_requests: 100},
]"""
KV, SUCCESS, TTFT = range(3)
STEADY = """
name: guarded
seed: 7
target: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090, faults: FAULTS}
workload: {arrivals: {shape: constant, rate: RATE/s}, prompt: PROMPT, output: OUTPUT}
phases: {steady: {for: MINUTESm}}
windows: {length: 10s, slide: 10s}
stop: RULES
"""


def guarded(folder: Path, faults: str, minutes: int, rate: int = 4, prompt: int = 64, output: int = 8) -> Whole:
    """A light, even load (a request takes about 0.2 s) under the three rules, with faults."""
    text = STEADY.replace("RULES", RULES).replace("FAULTS", faults)
    for name, number in (("MINUTES", minutes), ("RATE", rate), ("PROMPT", prompt), ("OUTPUT", output)):
        text = text.replace(name, str(number))
    return simulated(text, folder)


def fired(run: Whole) -> tuple[float, int]:
    """(second, which of RULES)."""
    (event,) = [event for event in run.lines("events.jsonl") if event["kind"] == "stop"]
    return event["t"], [row["rule"] for row in run.summary["stop_rules"]].index(event["data"]["rule"])


def test_a_fault_is_on_record(tmp_path: Path) -> None:
    run = guarded(tmp_path, "[{kind: slow, at: 90.25s, for: 10s, factor: 4}]", minutes=2)
    told = {"kind": "slow", "at": 90.25, "for": 10, "factor": 4}
    assert run.summary["target"]["faults"] == [told]
    events = [(event["t"], event["data"]) for event in run.lines("events.jsonl") if event["kind"] == "fault"]
    assert events == [(90.25, told | {"edge": "begin"}), (100.25, told | {"edge": "end"})]


def test_half_the_cache_gone_for_a_minute_leaves_the_traces_a_real_loss_would(tmp_path: Path) -> None:
    text = HEALTHY.replace("RULES", "[]").replace("ARRIVALS", "{shape: poisson, rate: 4/s}").replace("MINUTES", "5")
    faults = "target.faults=[{kind: pinned, at: 2m, for: 1m, share: 75%}]"
    run = simulated(text, tmp_path, faults)

    def seen(name: str, start: int, end: int) -> list[float]:
        return [row["value"] for row in run.lines("samples.jsonl") if row["name"] == name and start <= row["t"] < end]

    before, during, after = ((0, 120), (120, 180), (230, 300))
    assert max(seen("kv_usage", *before)) < 0.75 < 0.85 < min(seen("kv_usage", *during)[5:])
    assert max(seen("waiting", *before)) < 10 < max(seen("waiting", *during))
    assert seen("preemptions_total", *before)[-1] == 0 < seen("preemptions_total", *during)[-1]
    assert max(seen("kv_usage", *after)) < 0.75
    assert max(seen("waiting", *after)) < 10

    def ttft(start: int, end: int) -> float:
        return max((r.first_ns - r.due_ns) / 1e9 for r in run.records if r.first_ns and start <= r.due_ns / 1e9 < end)

    assert ttft(*before) < 2 < 5 < ttft(*during)
    assert ttft(*after) < 2


def test_kv_usage_fires_two_minutes_after_its_mean_over_ten_seconds_has_reached_the_limit(tmp_path: Path) -> None:
    # 95 % of the blocks are gone from 60.0, and a request holds 0.2 %. The reading at 69 is the tenth of ten: at 70 the mean is
    # 95.2 % (one second earlier, with nine of ten, 86 %), and two minutes later is 190.
    run = guarded(tmp_path, "[{kind: pinned, at: 60s, share: 95%}]", minutes=4)
    assert fired(run) == (190, KV)
    assert run.code == 5
    assert run.why.startswith("a stop rule ended steady: kv_usage is 95 % over 10 s (n=10)")
    assert run.summary["stop"]["steady_seconds"] == 190


def test_kv_usage_does_not_fire_when_the_blocks_come_back_in_time(tmp_path: Path) -> None:
    run = guarded(tmp_path, "[{kind: pinned, at: 60s, for: 129s, share: 95%}]", minutes=5)
    # 129 s of it: the last second read high is 188, so the mean has held from 70 to 189 and falls to 86 % at 190
    assert (run.code, run.summary["stop"]["reason"]) == (0, "duration")


def test_success_rate_fires_at_the_second_failure_of_some_1200(tmp_path: Path) -> None:
    # Four requests a second, one every 250 ms: a refusal of 200 ms meets exactly one. At 301 that is 1 of 1,204 (99.917 %), at
    # 311 it is 2 of 1,244 (99.84 %).
    twice = "[{kind: refuse, at: 300s, for: 200ms, share: 100%}, {kind: refuse, at: 310s, for: 200ms, share: 100%}]"
    run = guarded(tmp_path, twice, minutes=6)
    assert fired(run) == (311, SUCCESS)
    assert run.code == 5
    assert run.summary["accounting"]["total"]["rejected"] == 2
    refused = [(r.sent_ns / 1e9, r.status, r.cause) for r in run.records if r.outcome == "rejected"]
    assert refused == [(300, 503, "http_503"), (310, 503, "http_503")]


def test_a_hung_server_fires_by_the_ages_of_what_it_does_not_answer(tmp_path: Path) -> None:
    # The request due at 120.0 meets the hung server, and all after it. Its age is 10 s at 130, which is not more than 10 s.
    run = guarded(tmp_path, "[{kind: stall, at: 120s}]", minutes=4)
    assert fired(run) == (131, TTFT)
    assert run.code == 5
    assert "response_ttft_p99 is at least 11 s over 1m00s" in run.why
    assert max(at for record in run.records for at in record.token_ns) <= 120e9
    unanswered = [record for record in run.records if record.first_ns is None]
    assert min(record.due_ns for record in unanswered) == 120e9
    assert {record.outcome for record in unanswered} == {"cancelled"}


def test_a_server_that_hangs_passes_nothing(tmp_path: Path) -> None:
    """No request fails: what it does not answer is cut off at the end of drain. The run says so, and no latency budget is met."""
    text = STEADY.replace("RULES", '[{success_rate: "< 90%"}]\nbudget: {error_rate: 1%, response_ttft_p99: 1s}')
    text = text.replace("FAULTS", "[{kind: stall, at: 60s}]").replace("constant, rate: RATE/s", "poisson, rate: 6/s")
    text = text.replace("PROMPT", "64").replace("OUTPUT", "8").replace("{for: MINUTESm}", "{for: 4m}, drain: {for: 1m}")
    run = simulated(text, tmp_path)
    total = run.summary["accounting"]["total"]
    assert total["cancelled"] > 2 * total["ok"] > 0
    assert run.summary["outcomes"]["error_rate"] == 0
    assert (run.code, run.summary["verdict"]["verdict"]) == (4, "INVALID")
    assert "without an end when the run ended" in run.why
    assert "the oldest had waited 4m" in run.why  # sent at 60, cut off at 300
    assert [row["status"] for row in run.summary["budgets"]] == ["pass", "fail"]


def test_a_server_that_hangs_for_eight_seconds_does_not(tmp_path: Path) -> None:
    run = guarded(tmp_path, "[{kind: stall, at: 120s, for: 8s}]", minutes=4)
    assert run.code == 0
    assert 8 < run.summary["latency"]["response_ttft"]["max"] < 8.5  # all that waited share the first steps after it


def test_a_slow_server_fires_when_its_queue_is_ten_seconds_long(tmp_path: Path) -> None:
    # One prompt fills a step, so requests are served one by one: one of 2,048 tokens every 500 ms, in `step` seconds each, six
    # times as many from 120 on. The k-th from then is answered at 120 + (k + 1) x step; p99 is the worst that is known or waits.
    step = 6 * Roofline(load_model("llama-3.1-8b"), load_hardware("rtx-4090"), load_engine("vllm")).seconds(
        Step(prefill=((2048, 0),), samples=1)
    )
    worst = {}
    for second in range(121, 160):
        answered = int((second - 120) / step)
        waited = [(k + 1) * step - k / 2 for k in range(answered)]
        worst[second] = max([*waited, second - 120 - answered / 2])  # and the age of the first that is not answered
    due = min(second for second, value in worst.items() if value > 10)
    assert worst[due - 1] < 9.9 < 10.1 < worst[due]  # not a matter of rounding
    run = guarded(tmp_path, "[{kind: slow, at: 120s, factor: 6}]", minutes=4, rate=2, prompt=2048, output=1)
    assert fired(run) == (due, TTFT)
    assert run.code == 5


STRESSED = """
name: edge
seed: 7
target: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090}
workload: {arrivals: {shape: constant, rate: 2/s}, prompt: 512, output: 256}
phases: {steady: {for: 60s}, stress: {step: 50%, every: 20s, max: 10x}, drain: {for: 1m}}
stop: RULES
"""


@pytest.mark.parametrize(("limit", "code"), [("50%", 0), ("10%", 5)])
def test_a_rule_that_ends_stress_is_its_purpose_and_one_that_ends_steady_a_failure(limit: str, code: int, tmp_path: Path) -> None:
    # 2/s hold 14.5 % of the cache in steady; each step adds half of that, and more as answers take longer
    run = simulated(STRESSED.replace("RULES", f"[{{kv_usage: '>= {limit}', over: 5s}}]"), tmp_path)
    assert run.code == code, run.why
    (event,) = [event for event in run.lines("events.jsonl") if event["kind"] == "stop"]
    assert event["data"]["phase"] == ("steady" if code else "stress")
    if code:
        return
    stress = run.summary["levels"]["stress"]
    assert 1.5 <= stress["held"] < stress["ended_at"] <= 3.5
    assert stress["held"] == stress["ended_at"] - 0.5
    assert run.why.startswith(f"stress ended at level {stress['ended_at']:g} by kv_usage is 5")
    assert run.summary["headline"]["n"] == 120


HEALTHY = """
name: healthy
seed: 7
target: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090}
workload:
  arrivals: ARRIVALS
  prompt: {dist: power_law, alpha: 1.8, min: 128, max: 4096}
  output: {dist: power_law, alpha: 1.8, min: 64, max: 1024}
  prefixes: {groups: 20, zipf: 1.1, tokens: 256, share: 50%}
phases: {steady: {for: MINUTESm}, drain: {for: 1m}}
windows: {length: 30s, slide: 10s}
stop: RULES
"""
SHAPES = {  # usage goes to a third of the cache
    "wave": "{shape: wave, mean: 2/s, amplitude: 50%, period: 5m}",
    "stair": "{shape: stair, start: 1.8/s, step: 5%, every: 10m}",
}


@pytest.mark.parametrize(
    ("shape", "minutes"), [("wave", 15), *(pytest.param(shape, 60, marks=pytest.mark.slow) for shape in ("wave", "stair"))]
)
def test_none_fires_in_a_healthy_hour(shape: str, minutes: int, tmp_path: Path) -> None:
    text = HEALTHY.replace("RULES", RULES).replace("ARRIVALS", SHAPES[shape]).replace("MINUTES", str(minutes))
    run = simulated(text, tmp_path)
    assert (run.code, run.summary["stop"]["reason"]) == (0, "duration")
    unread = [row["unread"] for row in run.summary["stop_rules"]]
    assert unread[KV] == 0
    assert max(unread) < 600 + 360 * minutes / 15  # each was judged, success_rate from its thousandth request on
    usage = [window["values"]["kv_usage_mean"] for window in run.lines("windows.jsonl")]
    assert max(value for value in usage if value is not None) > 0.2  # and it was a load


MEMORY = '[{gpu_memory: ">= 95%", for: 2m JUDGED}]'


def test_gpu_memory_is_refused_where_the_scenario_says_who_serves(tmp_path: Path) -> None:
    text = HEALTHY.replace("RULES", MEMORY.replace("JUDGED", "")).replace("ARRIVALS", SHAPES["wave"]).replace("MINUTES", "1")
    (tmp_path / "s.yaml").write_text(text)
    done = kvbench("run", tmp_path / "s.yaml", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "stop[0].gpu_memory: engine vllm (gpu_memory_utilization 92 %) takes its device memory when it starts" in done.stderr
    assert "use kv_usage" in done.stderr
    assert "s.yaml:12" in done.stderr
    assert not (tmp_path / "out").exists()


def models(seen: Seen) -> Reply:
    return answer_json({"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 4096}]})


def test_gpu_memory_is_refused_before_any_traffic_where_the_server_says_what_it_is(tmp_path: Path) -> None:
    rules = f"stop: {MEMORY.replace('JUDGED', '')}"
    text = served("{shape: constant, rate: 5/s}", "{steady: {for: 1s}}", also=rules)

    async def main() -> tuple[int | None, str, Stub]:
        async with Stub(stream(C("a"), C("b"), FIN, U(8, 2), DONE), gets=models) as stub:
            (tmp_path / "s.yaml").write_text(text.replace("{url}", stub.url))
            command = (sys.executable, "-m", "kvbench", "run", str(tmp_path / "s.yaml"), "--out", str(tmp_path / "out"))
            process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
            errors = (await asyncio.wait_for(process.communicate(), 60))[1]
            return process.returncode, errors.decode(), stub

    code, errors, stub = asyncio.run(main())
    assert code == 2
    assert "stop[0].gpu_memory: vllm takes its device memory when it starts" in errors
    assert stub.posts == []
    assert not (tmp_path / "out").exists()


def test_a_rule_that_nothing_can_be_read_for_neither_fires_nor_passes_and_is_said(tmp_path: Path) -> None:
    rules = f"stop: {MEMORY.replace('JUDGED', ', preallocated: judged')}"
    text = served("{shape: constant, rate: 20/s}", "{steady: {for: 3s}}", also=rules)
    run = against(Stub(stream(C("a"), C("b"), FIN, U(8, 2), DONE), gets=models), text, tmp_path)
    (row,) = run.summary["stop_rules"]
    assert (row["unread"], row["why"]) == (row["checks"], "not exposed")
    said = "the stop rule gpu_memory >= 95 % for 2m00s (over 10 s) was never evaluated: not exposed"
    assert said in run.summary["warnings"]
    assert run.summary["stop"]["kind"] == "bound"
    assert said in " ".join(kvbench("report", run.directory).stdout.replace("! ", "").split())


def test_requests_that_memory_fails_end_a_run_and_break_a_budget(tmp_path: Path) -> None:
    """Answers outgrow a small pool whose victims fail; each window tells its own share, by the records too."""
    text = """
name: oom
seed: 7
target: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090, settings: {blocks: 201, max_preemptions: 0}}
workload: {arrivals: {shape: constant, rate: 2/s}, prompt: 256, output: {dist: fixed, value: 300, force: true}}
phases: {steady: {for: 60s}, drain: {for: 60s}}
windows: {length: 10s, slide: 10s}
budget: {oom_rate: "< 1%", oom_total: "<= 1000"}
"""
    (tmp_path / "whole").mkdir()
    run = simulated(text, tmp_path / "whole")
    lost = [record for record in run.records if record.cause == "oom"]
    assert lost
    told = 0.0
    for row in run.lines("windows.jsonl")[:6]:  # of its last second the counter may have been read before the end
        told += row["values"]["oom_total"]
        by = [sum(record.end_ns / 1e9 < row["end"] - back for record in lost) for back in (1.0, 0.0)]
        assert by[0] <= told <= by[1]
        assert row["values"]["oom_rate"] == pytest.approx(row["values"]["oom_total"] / row["values"]["admitted_total"])
        assert row["values"]["admitted_total"] == pytest.approx(20, abs=2)  # two a second
    assert run.summary["engine"]["oom_rate"]["value"] == run.summary["engine"]["oom_total"]["value"] / 120
    rate, total = run.summary["budgets"]
    assert (rate["status"], total["status"]) == ("fail", "pass")
    assert rate["value"] == run.summary["engine"]["oom_rate"]["value"] > 0.01
    (tmp_path / "stopped").mkdir()
    stopped = simulated(text + 'stop: [{oom_rate: "> 0%", over: 5s}]\n', tmp_path / "stopped")
    (event,) = [event for event in stopped.lines("events.jsonl") if event["kind"] == "stop"]
    first = min(record.end_ns for record in lost) / 1e9
    assert first < event["t"] <= first + 2


def test_a_server_that_tells_no_oom_has_no_oom_rate(tmp_path: Path) -> None:
    text = served("{shape: constant, rate: 5/s}", "{steady: {for: 2s}}", also='budget: {oom_rate: "< 1%"}')
    run = against(Stub(stream(C("a"), C("b"), FIN, U(8, 2), DONE)), text, tmp_path)
    (row,) = run.summary["budgets"]
    assert (row["status"], row["reason"]) == ("not evaluated", "not exposed by the target")
