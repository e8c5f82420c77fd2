"""The server's log as events: what lines mean, and that a log survives rotation, truncation, torn lines and floods."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from kvbench import profile
from kvbench.clock import Clock, VirtualLoop
from kvbench.collect import CollectorError, Place
from kvbench.collect.logrules import LogRule, first
from kvbench.collect.serverlog import ServerLog
from kvbench.core import Event, Sample
from tests.stub.stub import DONE, FIN, C, Reply, Stub, U
from tests.whole import against, served

RULES = [
    LogRule.model_validate(rule)
    for name in ("vllm", "sglang", "llama-cpp", "pytorch")
    for rule in profile.read("logs", name)["rules"]
]

# Lines as public bug reports quote them, and what they are.
LINES = [
    ("WARNING 04-14 20:04:53 scheduler.py:1484] Sequence group 63 is preempted by PreemptionMode.RECOMPUTE mode because there is "
     "not enough KV cache space. [...] total_num_cumulative_preemption=51", "preemption", {"total": 51}),
    ("ERROR core.py:1131] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB. GPU 0 has a total capacity of "
     "23.56 GiB of which 21.75 MiB is free.", "out_of_memory", {"asked": "50.00 MiB", "free": "21.75 MiB"}),
    ("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", "engine_dead", {}),
    ("INFO 05-10 16:00:15 [gpu_model_runner.py:1686] Graph capturing finished in 112 secs, took 0.95 GiB", "graph_capture",
     {"seconds": 112, "memory": "0.95 GiB"}),
    ("INFO kv_cache_utils.py:840] GPU KV cache size: 41,408 tokens", "kv_cache_size", {"tokens": 41408}),
    ("[TP0] KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_token_ratio: 0.4", "preemption", {"requests": 3}),
    ("[2025-06-26 02:16:20 TP0] Scheduler hit an exception: Traceback (most recent call last):", "engine_dead", {}),
    ("gc: done, 4274 unreachable, 0 uncollectable, 0.0171s elapsed", "gc_pause", {"seconds": 0.0171}),
    ("|            CUDA OOMs: 0            |        cudaMalloc retries: 12        |", "alloc_retry", {"retries": 12}),
    ("slot update_slots: failed to find free space in the KV cache, retrying with smaller batch size", "kv_full", {}),
    ("ggml_backend_cuda_buffer_type_alloc_buffer: allocating 1024.00 MiB on device 0: cudaMalloc failed: out of memory",
     "out_of_memory", {}),
    ("main: server is listening on http://127.0.0.1:8080 - starting the main loop", "engine_start", {}),
    ("init engine (profile, create kv cache, warmup model) took 23.45 seconds", "engine_start", {"seconds": 23.45}),
    ("The server is fired up and ready to roll!", "engine_start", {}),
    ("Input prompt (5000 tokens) is too long and exceeds the capacity of block_manager", "request_rejected", {}),
    ("Cache flushed successfully!", "cache_flushed", {}),
    ("Watchdog timeout (self.watchdog_last_forward_ct=1234)", "watchdog", {}),
    ("NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.", "cuda_error", {}),
    ("RuntimeError: CUDA error: an illegal memory access was encountered", "cuda_error", {}),
    ("If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
     "expandable_segments_hint", {}),
]  # fmt: skip
PLAIN = [
    'INFO:     127.0.0.1:60264 - "POST /v1/completions HTTP/1.1" 200 OK',
    "Engine 000: Avg prompt throughput: 0.0 tokens/s, Running: 8 reqs, Waiting: 0 reqs, GPU KV cache usage: 91.6%",
    "|            CUDA OOMs: 0            |        cudaMalloc retries: 0         |",
    "gc: collecting generation 2...",
    "",
]


@pytest.mark.parametrize(("line", "rule", "values"), LINES)
def test_what_servers_say_is_known(line: str, rule: str, values: dict[str, Any]) -> None:
    match = first(RULES, line)
    assert match is not None
    assert (match.rule.name, match.values) == (rule, values)


def test_every_rule_has_a_line_above() -> None:
    assert {rule.name for rule in RULES} == {name for _, name, _ in LINES}


@pytest.mark.parametrize("line", PLAIN)
def test_ordinary_lines_are_no_happening(line: str) -> None:
    assert first(RULES, line) is None


def follow(file: Path | None, steps: Any, **settings: Any) -> tuple[list[Event], list[Sample]]:
    """Run the collector in virtual time while `steps(clock)` writes to the file; what it told."""
    told: list[Any] = []

    async def play() -> None:
        clock = Clock(asyncio.get_running_loop())
        collector = ServerLog(file=file, **settings).build(Place(clock, Path()))
        await collector.open()
        clock.start()
        collector.start(told.append)
        await steps(clock)
        await collector.stop()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(play())
    return [item for item in told if isinstance(item, Event)], [item for item in told if isinstance(item, Sample)]


def test_lines_become_events_at_the_time_of_reading(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_text("CUDA out of memory before the run\n")

    async def steps(clock: Clock) -> None:
        await clock.sleep_until(1.05)
        with file.open("a") as log:
            log.write("Sequence group 1 is preempted by RECOMPUTE\nnothing\nCUDA out of mem")
        await clock.sleep_until(2.05)
        with file.open("a") as log:
            log.write(
                "ory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 9 GiB of which 1.00 GiB is free\nEngineDeadError"
            )
        await clock.sleep_until(3)  # the last line never ends

    events, samples = follow(file, steps)
    found = [(event.t, event.data["rule"], event.data["level"]) for event in events if event.kind == "server_log"]
    assert [(rule, level) for _, rule, level in found] == [
        ("preemption", "warning"),
        ("out_of_memory", "harm"),
        ("engine_dead", "harm"),
    ]
    assert found[0][0] == pytest.approx(1.2, abs=0.01)
    assert found[1][0] == pytest.approx(2.2, abs=0.01)
    counts = [(round(sample.t, 1), sample.name, sample.value) for sample in samples]
    assert counts == [
        (1.0, "log_preemption_total", 0), (1.2, "log_preemption_total", 1),
        (2.0, "log_preemption_total", 1), (2.0, "log_out_of_memory_total", 0), (2.2, "log_out_of_memory_total", 1),
        (3.0, "log_preemption_total", 1), (3.0, "log_out_of_memory_total", 1),
        (3.0, "log_engine_dead_total", 0), (3.0, "log_engine_dead_total", 1),
    ], "from 0 at the reading before, and once a second"  # fmt: skip


def test_matches_are_counted_per_window(tmp_path: Path) -> None:
    """Three in the first second, two in the third: each window of a second has its own."""
    log = tmp_path / "server.log"
    log.write_text("")

    async def serve() -> None:
        for lines in (3, 0, 2):
            await asyncio.sleep(0.3)
            with log.open("a") as file:
                file.write("CUDA out of memory\n" * lines)
            await asyncio.sleep(0.7)

    text = served(
        "{shape: constant, rate: 20/s}",
        "{steady: {for: 4100ms}, drain: {for: 1s}}",
        also=f"collect: [{{kind: server_log, file: {log}, every: 100ms}}]\nwindows: {{length: 1s, slide: 1s}}",
    )
    reply = Reply([(0, C("a") + FIN + U(8, 1) + DONE)])
    run = against(Stub(reply), text, tmp_path, also=serve)
    windows = run.lines("windows.jsonl")
    assert [row["values"]["log_out_of_memory_total"] for row in windows][:4] == [3, 0, 2, 0]
    assert run.summary["telemetry"]["happened"] == {"out_of_memory": 5}


@pytest.mark.parametrize("way", ["moved", "cut"])
def test_rotation_loses_no_line(tmp_path: Path, way: str) -> None:
    file = tmp_path / "server.log"
    file.write_text("x" * 1000 + "\n")

    async def steps(clock: Clock) -> None:
        await clock.sleep_until(0.5)
        with file.open("a") as log:
            log.write("CUDA out of memory: the old file's last\n")
        if way == "moved":
            os.rename(file, tmp_path / "server.log.1")
            await clock.sleep_until(1.05)
        else:
            await clock.sleep_until(1.05)  # what is cut off before it is read is gone
        file.write_text("CUDA out of memory: the new file's first\n")
        await clock.sleep_until(2)

    events, _ = follow(file, steps)
    lines = [event.data["line"] for event in events if event.data.get("rule") == "out_of_memory"]
    assert [line.split(": ")[1] for line in lines] == ["the old file's last", "the new file's first"]


def test_a_flood_is_counted_not_told(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_text("")

    async def steps(clock: Clock) -> None:
        await clock.sleep_until(0.5)
        file.write_text("Preempting request 1\n" * 5000)
        await clock.sleep_until(1)

    events, samples = follow(file, steps)
    told = [event for event in events if event.data.get("rule") == "preemption"]
    assert len(told) == 21
    assert told[-1].data["more"] == 4980
    assert samples[-1].value == 5000


def test_keys_in_a_line_are_blotted(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_text("")

    async def steps(clock: Clock) -> None:
        await clock.sleep_until(0.5)
        file.write_text("EngineDeadError args: api_key='sk-verysecret123' Authorization: Bearer abcdefghijk\n")
        await clock.sleep_until(1)

    events, _ = follow(file, steps)
    line = next(event.data["line"] for event in events if event.kind == "server_log")
    assert "verysecret" not in line
    assert "abcdefghijk" not in line


@pytest.mark.parametrize("file", [None, Path("/nowhere/server.log"), Path("/"), Path("/dev/null")])
def test_what_cannot_be_followed_is_refused(file: Path | None) -> None:
    async def nothing(clock: Clock) -> None:
        return

    with pytest.raises(CollectorError, match=r"file|cannot read"):
        follow(file, nothing)


@pytest.mark.parametrize(
    "bad", [{"name": "x", "match": "("}, {"name": "X y", "match": "a"}, {"name": "x", "match": "a", "level": "bad"}]
)
def test_broken_rules_are_refused(bad: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"name|match|level"):
        LogRule.model_validate(bad)
