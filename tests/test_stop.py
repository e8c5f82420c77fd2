"""Stop rules second by second on made-up records, and budgets against statistics. No run, no clock."""

from typing import Any

import pytest
from pydantic import ValidationError

from kvbench.core import Record
from kvbench.metrics import Stat, names
from kvbench.metrics.slots import Slots
from kvbench.metrics.window import statistic
from kvbench.stop import COMPARISONS, Budget, Guard, Rule, preallocated

S = 1_000_000_000


def rule(**keys: Any) -> Rule:
    return Rule.model_validate({key.rstrip("_"): value for key, value in keys.items()}, context={"text": True})


def ended(number: int, at: float, outcome: Any = "ok", took: float = 0.1) -> Record:
    start, end = round((at - took) * S), round(at * S)
    ok = outcome == "ok"
    return Record(id=number, outcome=outcome, due_ns=start, release_ns=start, sent_ns=start, end_ns=end, n_out=1, source="usage",
                  token_ns=[end] if ok else [], first_ns=end if ok else None, done_ns=end if ok else None)  # fmt: skip


def fires(guard: Guard, slots: Slots, seconds: range, live: list[Record] | None = None) -> int | None:
    """The second at which the guard fires; the caller has filled the slots."""
    for now in seconds:
        slots.close(now)
        if guard.check(slots, float(now), [r for r in live or [] if r.due_ns < now * S]):
            return now
    return None


def test_a_gauge_has_to_hold_for_its_time_and_fires_at_that_very_second() -> None:
    slots = Slots()
    for second in range(100):
        slots.gauge("kv_usage", second + 0.5, 0.95 if 20 <= second < 50 or second >= 60 else 0.2)
    guard = rule(kv_usage=">= 90%", for_="30s", over="1s").arm()
    assert fires(guard, slots, range(1, 100)) == 91  # first true at 61; true from 21 to 50 was 29 s only
    assert guard.unread == 0


def test_the_reason_carries_its_numbers() -> None:
    slots = Slots()
    slots.gauge("kv_usage", 0.5, 0.95)
    slots.close(1)
    reason = rule(kv_usage=">= 90%").arm().check(slots, 1.0, [])
    assert reason == "kv_usage is 95 % over 10 s (n=1); the rule is kv_usage >= 90 %"


def test_without_for_the_first_reading_past_the_limit_is_enough() -> None:
    slots = Slots()
    for second in range(30):
        slots.gauge("waiting", second + 0.5, float(second))
    assert fires(rule(waiting="> 8", over="1s").arm(), slots, range(1, 30)) == 10  # the slot of second 9 closes at 10


def test_only_closed_slots_count() -> None:
    slots = Slots()
    slots.gauge("waiting", 1.5, 100.0)
    slots.close(1.9)
    assert rule(waiting="> 8", over="5s").arm().check(slots, 1.9, []) is None


def test_missing_readings_neither_fire_nor_pass() -> None:
    slots = Slots()
    for second in range(100):
        if not 10 <= second < 40:
            slots.gauge("kv_usage", second + 0.5, 0.95)
    guard = rule(kv_usage=">= 90%", for_="20s", over="1s").arm()
    # held from 1 to 10: 9 s. Nothing from 11 to 40. Held again from 41: 9 + (now - 41) reaches 20 at 52
    assert fires(guard, slots, range(1, 100)) == 52
    assert guard.unread == 30
    assert guard.why == "not read in this interval"


def test_a_rule_on_what_nobody_reads_never_fires_and_says_so() -> None:
    slots = Slots()
    guard = rule(running="> 0").arm()
    assert fires(guard, slots, range(1, 20)) is None
    assert (guard.checks, guard.unread, guard.why) == (19, 19, "not exposed")


def test_success_rate_waits_for_enough_requests() -> None:
    few = Slots()
    few.fold([ended(k, 0.5, "failed" if k == 0 else "ok") for k in range(999)])
    guard = rule(success_rate="< 99.9%", over="10m").arm()
    assert guard.rule.needs == 1000
    assert fires(guard, few, range(1, 5)) is None
    assert guard.unread == 4
    few.fold([ended(1000, 5.5)])
    assert fires(guard, few, range(6, 9)) is None
    assert guard.unread == 4
    few.fold([ended(1001, 9.5, "timeout")])
    assert fires(guard, few, range(9, 12)) == 10


@pytest.mark.parametrize(
    ("keys", "needs"),
    [
        ({"response_ttft_p99": "> 10s"}, 100), ({"ttft_p50": "> 1s"}, 20), ({"tpot_p90": "> 1s"}, 20),
        ({"ttft_p95": "> 1s"}, 20), ({"error_rate": "> 1%"}, 100),
        ({"error_rate": "> 0%"}, 1), ({"kv_usage": "> 90%"}, 0), ({"ok_rate": "< 1/s"}, 0),
        ({"ttft_p99": "> 1s", "min_requests": 7}, 7),
        ({"ttft_p50": "> 1s", "min_requests": 2}, 2),
    ],
)  # fmt: skip
def test_the_fewest_requests_that_one_bad_one_cannot_decide(keys: dict[str, Any], needs: int) -> None:
    assert Rule.model_validate(keys).needs == needs


def test_a_hung_server_fires_by_the_ages_of_what_is_in_flight() -> None:
    slots = Slots()
    slots.fold([ended(k, 1 + k / 100) for k in range(100)])  # fine until 2 s
    hung = [Record(id=1000 + k, due_ns=2 * S + k * S // 50, sent_ns=2 * S + k * S // 50) for k in range(1000)]  # 50/s from 2 s
    guard = rule(response_ttft_p99="> 10s", over="10s", min_requests=100).arm()
    assert fires(guard, slots, range(1, 22), hung) == 13  # the oldest was due at 2.0: at 12 its age is 10 s, not above it
    reason = guard.check(slots, 13.0, [r for r in hung if r.due_ns < 13 * S])
    assert reason is not None
    assert "at least 11 s" in reason


def test_a_healthy_server_with_many_young_requests_does_not() -> None:
    slots = Slots()
    slots.fold([ended(k, k / 10) for k in range(1, 300)])
    young = [Record(id=1000 + k, due_ns=29 * S, sent_ns=29 * S) for k in range(500)]
    assert fires(rule(response_ttft_p99="> 1s", min_requests=10).arm(), slots, range(1, 30), young) is None


def test_min_requests_of_a_gauge_counts_the_requests_that_ended() -> None:
    slots = Slots()
    for second in range(10):
        slots.gauge("kv_usage", second + 0.5, 0.95)
    slots.fold([ended(1, 2.5), ended(2, 5.5)])
    assert fires(rule(kv_usage="> 90%", min_requests=2).arm(), slots, range(1, 10)) == 6


def test_guards_of_one_rule_are_independent() -> None:
    slots = Slots()
    slots.gauge("waiting", 0.5, 9.0)
    one = rule(waiting="> 8")
    assert fires(one.arm(), slots, range(1, 2)) == 1
    assert fires(one.arm(), slots, range(1, 2)) == 1
    assert Rule.model_validate(one.model_dump()) == one


@pytest.mark.parametrize("compare", COMPARISONS)
def test_every_window_metric_can_be_a_rule(compare: str) -> None:
    """With a comparison, a span, a time to hold and a minimum: it fires as its value has been past the limit for that long, and
    where there is no value it says why."""
    slots = Slots()
    for gauge, metric in names.METRICS.items():
        for second in range(20):
            if metric.kind in ("gauge", "counter"):
                slots.gauge(gauge, second + 0.5, 0.5 if metric.kind == "gauge" else float(second))
    slots.fold([ended(k, 0.5 + k / 10, "failed" if k % 4 == 0 else "ok") for k in range(1, 150)])
    units = {"s": "0.1ms", "share": "10%", "/s": "0.01/s", "W": "0.1W", "J": "0.1J", "C": "0.1C", "Hz": "0.1Hz", "": 0.1}
    guards = {
        name: rule(**{name: f"{compare} {units[names.parse(name).of.unit]}"}, for_="2s", over="5s", min_requests=1).arm()
        for name in names.known()
    }
    judged = 0
    for now in (10.0, 11.0, 12.0):
        slots.close(now)
        for name, guard in guards.items():
            value = statistic(slots, name, 5.0, []).value
            past = value is not None and guard.rule.when.holds(value)  # nothing moves: at one second, at all
            assert (guard.check(slots, now, []) is not None) == (past and now == 12), name
            assert (guard.unread > 0, guard.why != "") == (value is None, value is None), name
            judged += value is not None
    assert judged > 0.6 * 3 * len(guards)


def test_requests_held_at_the_gate_are_a_metric() -> None:
    waiting = [Record(id=k, due_ns=k * S) for k in range(10)]
    guard = rule(held="> 4", over="1s").arm()
    assert fires(guard, Slots(), range(1, 10), waiting) == 5  # those due at 0, 1, 2, 3 and 4


SHARE = {"engine": "vllm", "gpu_memory_utilization": 0.92}
SERVERS = {
    "vllm": {"owner": "vllm", "software": "uvicorn"},
    "sglang": {"owner": "sglang", "software": "uvicorn"},
    "tensorrt_llm": {"owner": "tensorrt_llm"},
    "LMDeploy": {"owner": None, "software": "LMDeploy/0.14"},
}


@pytest.mark.parametrize("who", SERVERS)
def test_gpu_memory_is_not_judged_on_a_server_that_takes_it_at_the_start(who: str) -> None:
    rules = [rule(kv_usage=">= 90%"), rule(gpu_memory=">= 95%", for_="2m"), rule(gpu_memory_max="> 99%", preallocated="judged")]
    ((at, text),) = preallocated(rules, {"kind": "http", "servers": [{"owner": "somebody"}, SERVERS[who]]})
    assert at == 1
    assert text.startswith(f"{(SERVERS[who]['owner'] or SERVERS[who].get('software'))} takes its device memory when it starts")
    assert "use kv_usage" in text
    assert "`preallocated: judged`" in text


def test_gpu_memory_of_the_embedded_engine_and_of_others() -> None:
    rules = [rule(gpu_memory=">= 95%")]
    ((_, text),) = preallocated(rules, SHARE)
    assert text.startswith("engine vllm (gpu_memory_utilization 92 %) takes")
    assert preallocated(rules, {"engine": "vllm-cpu", "gpu_memory_utilization": None}) == []
    assert preallocated(rules, {"servers": [{"owner": "ollama", "software": None}]}) == []
    assert preallocated(rules, {}) == []


@pytest.mark.parametrize(
    ("keys", "hint"),
    [
        ({"kv_usage": "> 1%", "preallocated": "judged"}, "preallocated belongs to gpu_memory"),
        ({"gpu_memory": "> 1%", "preallocated": "yes"}, "'refused' or 'judged'"),
        ({"kv_usge": ">= 90%"}, "unknown metric 'kv_usge': did you mean 'kv_usage'"),
        ({"response_tft_p99": "> 1s"}, "did you mean 'response_ttft_p99'"),
        ({"kv_usage": ">= 0.9"}, "'0.9' has no unit"),
        ({"ttft_p99": "> 250"}, "'250' has no unit"),
        ({"ttft_p99": "> 90%"}, "unknown unit '%'"),
        ({"ttft_p99": "1s"}, "needs a comparison"),
        ({"ttft_p99": "== 1s"}, "needs a comparison"),
        ({"ttft": "> 1s"}, "ttft is written as one of ttft_p50"),
        ({"waiting": "> many"}, "not a plain number"),
        ({"waiting": "> inf"}, "finite"),
        ({"kv_usage": "> 1%", "waiting": "> 1"}, "one metric beside"),
        ({"for": "1s"}, "one metric beside"),
        ({"kv_usage": "> 1%", "for": 10}, "no unit"),
        ({"kv_usage": "> 1%", "over": "20m"}, "less than or equal to 600"),
    ],
)
def test_rules_are_read_strictly(keys: dict[str, Any], hint: str) -> None:
    with pytest.raises(ValidationError, match=hint.replace("(", r"\(")):
        Rule.model_validate(keys, context={"text": True})


def budget(**lines: Any) -> Budget:
    return Budget.model_validate(lines, context={"text": True})


def test_l02_milliseconds_and_seconds_are_the_same_limit_and_a_bare_number_is_none() -> None:
    stats = {"ttft_p99": Stat(0.3, 5000)}
    for text in ("250ms", "0.25s"):
        assert [line.verdict for line in budget(ttft_p99=text).judge(stats)] == ["fail"]
    assert budget(ttft_p99="300ms").judge(stats)[0].verdict == "pass"
    with pytest.raises(ValidationError, match="250 has no unit"):
        budget(ttft_p99=250)


def test_l01_a_budget_without_samples_is_not_evaluated() -> None:
    lines = budget(ttft_p99="200ms", error_rate="1%", hit_rate=">= 50%").judge(
        {"ttft_p99": Stat(None, reason="no request ended ok"), "error_rate": Stat(1.0, 100)}
    )
    assert [(line.name, line.value, line.n, line.verdict) for line in lines] == [
        ("ttft_p99", None, 0, "not evaluated"), ("error_rate", 1.0, 100, "fail"), ("hit_rate", None, 0, "not evaluated")
    ]  # fmt: skip
    with pytest.raises(ValidationError, match="did you mean 'ttft_p99'"):
        budget(ttf_p99="200ms")


def test_what_is_better_high_has_to_say_which_way() -> None:
    assert budget(goodput=">= 99%").judge({"goodput": Stat(0.99, 400)})[0].verdict == "pass"
    with pytest.raises(ValidationError, match="needs a comparison"):
        budget(goodput="99%")


def test_a_thin_quantile_is_marked_or_fails_when_strict() -> None:
    stats = {"tpot_p99": Stat(0.01, 50, supported=False)}
    loose, strict = budget(tpot_p99="50ms").judge(stats)[0], budget(tpot_p99="50ms", strict=True).judge(stats)[0]
    assert (loose.verdict, loose.low_confidence) == ("pass", True)
    assert (strict.verdict, strict.low_confidence) == ("fail", True)


def test_a_lower_bound_cannot_pass_a_limit_from_below() -> None:
    line = budget(response_p99="10s").judge({"response_p99": Stat(3.0, 2000, lower_bound=True)})[0]
    assert (line.verdict, line.reason) == ("fail", "the quantile falls among requests that got no answer")
    above = budget(response_p99="10s").judge({"response_p99": Stat(30.0, 2000, lower_bound=True)})[0]
    assert (above.verdict, above.value) == ("fail", 30.0)
