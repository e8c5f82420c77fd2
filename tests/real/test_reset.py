"""target.reset against a real vLLM in dev mode: what its prefix cache held is gone, by its counters and by its answers."""

import asyncio
from pathlib import Path
from typing import Any

import uvloop

from tests.real.test_vllm import BLOCK, SCENARIO, idle, pytestmark
from tests.whole import Whole, finished, play

__all__ = ["pytestmark"]  # needs a server at KVBENCH_REAL_URL, as test_vllm.py does; .ci/real_server.sh starts it in dev mode


def repeated(folder: Path, *sets: str) -> Whole:
    """The same prompts at every run."""
    folder.mkdir()
    idle()
    sets = ("workload.nonce=off", "phases.warmup={policy: none}", "phases.steady={requests: 24}", *sets)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        run = finished(runner.run(play(SCENARIO, folder, *sets)))
    assert {record.outcome for record in run.records} == {"ok"}
    return run


def cached(run: Whole) -> int:
    return sum(record.cached for record in run.records)


def check(run: Whole) -> Any:
    return next(row for row in run.summary["verdict"]["checks"] if row["check"] == "prefix_hits")


def test_a_reset_makes_a_warm_cache_cold(tmp_path: Path) -> None:
    repeated(tmp_path / "fills")
    warm = repeated(tmp_path / "finds")
    assert cached(warm) == sum((record.n_in - 1) // BLOCK * BLOCK for record in warm.records) > 0
    cold = repeated(tmp_path / "after", "target.reset=auto")
    (server,) = cold.summary["target"]["reset"]["servers"]
    assert (server["kind"], server["believed"], server["said"]) == ("vllm", True, '{"success":true}')
    grown = cold.summary["target"]["reset"]["check"]
    assert (grown["reason"], grown["hits"]) == (None, 0)
    assert grown["queries"] > 0
    assert cached(cold) == 0
    assert (check(cold)["value"], check(cold)["level"]) == (0, "OK")
