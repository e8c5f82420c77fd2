"""PyTorch's allocator statistics, from a file and over HTTP."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.clock import Clock
from kvbench.collect import CollectorError, Place
from kvbench.collect.allocator import Allocator, readings
from kvbench.core import Event, Sample

STATS = {  # as torch.cuda.memory_stats() names them; numbers by hand
    "allocated_bytes.all.current": 6_000, "reserved_bytes.all.current": 8_000, "reserved_bytes.all.peak": 9_000,
    "inactive_split_bytes.all.current": 500, "num_alloc_retries": 2, "num_ooms": 0,
}  # fmt: skip


def test_what_is_reserved_and_not_used_is_fragmentation() -> None:
    found = dict(readings(STATS))
    assert found["fragmentation"] == pytest.approx(0.25)
    assert (found["reserved_peak_bytes"], found["alloc_retries_total"]) == (9000, 2)
    assert dict(readings({"reserved_bytes.all.current": 0}))["fragmentation"] is None


def test_a_retry_is_an_event(tmp_path: Path) -> None:
    file, told = tmp_path / "stats.json", []

    async def play() -> dict[str, Any]:
        clock = Clock(asyncio.get_running_loop())
        file.write_text(json.dumps([STATS, STATS]))
        collector = Allocator(stats=str(file), every=0.1).build(Place(clock, tmp_path))
        facts = await collector.open()
        collector.start(told.append)
        await clock.sleep_until(0.25)
        file.write_text(json.dumps([STATS, STATS | {"num_alloc_retries": 5}]))
        await clock.sleep_until(0.45)
        file.write_text('{"torn')
        await clock.sleep_until(0.65)
        await collector.stop()
        return facts

    facts = asyncio.run(play())
    assert facts["devices"] == 2
    events = [item for item in told if isinstance(item, Event)]
    retried = [event.data for event in events if event.kind == "allocator"]
    assert [(one["what"], one["device"], one["more"]) for one in retried] == [("num_alloc_retries", 1, 3)]
    assert [event.data["state"] for event in events if event.kind == "collector"] == ["failing", "stopped"]
    assert {sample.labels["device"] for sample in told if isinstance(sample, Sample)} == {"0", "1"}


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '"x"', "[1]", '{"other": 1}'])
def test_what_is_no_memory_stats_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "stats.json"
    if text is not None:
        file.write_text(text)

    async def play() -> None:
        await Allocator(stats=str(file)).build(Place(Clock(asyncio.get_running_loop()), tmp_path)).open()

    with pytest.raises(CollectorError, match="no memory_stats at"):
        asyncio.run(play())
