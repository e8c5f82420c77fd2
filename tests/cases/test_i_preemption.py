"""Case I06: hits are counted once per request, and what a preemption computes again is no hit."""

from pathlib import Path

import pytest

from kvbench.core import Event, Seconds
from kvbench.engine import Job, Step
from kvbench.engine.engine import Engine
from kvbench.profile import load_engine, load_hardware, load_model
from kvbench.report.files import load
from kvbench.report.summary import summarise
from tests.report.build import record, write


class Second:
    def seconds(self, step: Step) -> Seconds:
        return 1.0


def engine(blocks: int, **overrides: object) -> Engine:
    profile = load_engine("vllm", blocks=blocks, **overrides)
    built = Engine(load_model("llama-3.1-8b"), load_hardware("rtx-4090"), profile)
    built.cost = Second()
    return built


def finish(built: Engine) -> None:
    while built.wake() < float("inf"):
        built.advance(built.wake())


def test_i06_a_unique_prompts_under_pressure_never_hit() -> None:
    built = engine(blocks=20 * 8 + 1)  # 64 + 64 tokens are 8 blocks of 16: room for 20
    for number in range(100):
        built.submit(Job(number, ((number + 1, 64),), 64), 0.0)
    finish(built)
    gauges = built.gauges()
    assert gauges["preemptions"] > 0
    assert gauges["hit_tokens"] == 0
    assert gauges["query_tokens"] == 100 * 64
    assert gauges["recompute_tokens"] > 0


def test_i06_b_an_admission_that_fails_counts_nothing() -> None:
    built = engine(blocks=16 + 1)
    built.submit(Job(0, ((1, 64),), 1), 0.0)  # leaves 4 blocks cached
    built.advance(1.0)
    built.submit(Job(1, ((2, 176),), 4), 1.0)  # 11 blocks, 12 from its second step on, until 5
    built.advance(1.5)
    built.submit(Job(2, ((1, 64), (3, 64)), 1), 1.5)  # 128 tokens, 64 of them cached: fails at 2, 3 and 4
    for now in (2.5, 3.5, 4.5):
        built.advance(now)
        assert (built.gauges()["waiting"], built.gauges()["query_tokens"]) == (1, 240)
    finish(built)
    assert built.gauges()["query_tokens"] == 240 + 128
    assert built.gauges()["hit_tokens"] == 64


@pytest.mark.parametrize("preempted", [0.0, 3.0])
def test_i06_c_a_servers_hit_rate_over_preemptions_is_warned_of(preempted: float, tmp_path: Path) -> None:
    counts = {"preemptions_total": preempted, "hit_tokens_total": 320.0, "query_tokens_total": 1000.0}
    metrics = {name: {"value": value, "resets": 0, "gone": 0, "reason": None} for name, value in counts.items()}
    told = {"state": "totals", "source": "prometheus", "start": -1.0, "end": 11.0, "scrape_max_s": 0.0, "loop_held_max_s": 0.0}
    event = Event(t=11.0, kind="collector", data=told | {"complete": True, "metrics": metrics})
    lines = summarise(load(write(tmp_path / "run", [record(0, 0.0)], events=[event])))["warnings"]
    warned = [line for line in lines if "32 %" in str(line) and "preempted" in str(line)]
    assert len(warned) == bool(preempted)
