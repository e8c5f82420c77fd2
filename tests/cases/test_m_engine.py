"""Cases M01, M03, M05, M07 and M09: what simulators of a KV cache got wrong elsewhere."""

from pathlib import Path

import pytest

from kvbench.core import Seconds, reply_key
from kvbench.engine import Job, Step
from kvbench.engine.engine import Engine
from kvbench.engine.evict.policies import POLICIES
from kvbench.engine.pool import Pool
from kvbench.profile import load_engine, load_hardware, load_model
from tests.whole import simulated


class Second:
    def seconds(self, step: Step) -> Seconds:
        return 1.0


def engine(blocks: int, block: int, **overrides: object) -> Engine:
    return Engine(
        load_model("llama-3.1-8b"), load_hardware("rtx-4090"), load_engine("vllm", blocks=blocks, block=block, **overrides)
    )


def finish(built: Engine) -> None:
    while built.wake() < float("inf"):
        built.advance(built.wake())
        built.check()


def test_m01_the_tail_of_a_chain_leaves_first_every_time() -> None:
    for _ in range(200):
        built = engine(blocks=4, block=4)
        built.cost = Second()
        built.submit(Job(0, ((1, 12),), 1), 0.0)  # the chain [1, 2, 3]
        finish(built)
        chain = [key for key, _ in sorted(built.pool.index.items(), key=lambda item: item[1])]
        assert len(chain) == 3
        built.submit(Job(1, ((2, 4),), 1), 10.0)  # one new block
        finish(built)
        assert [key in built.pool.index for key in chain] == [True, True, False]
        built.submit(Job(2, ((1, 9),), 1), 20.0)  # the prefix [1, 2] and one token
        finish(built)
        assert built.gauges()["hit_tokens"] == 8


def test_m03_a_full_pool_does_not_make_more_concurrency_free() -> None:
    # 96 + 96 tokens are 12 blocks of 16: 68 requests fill 816 blocks.
    throughput = {}
    for concurrency in (64, 256, 1024):
        built = engine(blocks=68 * 12 + 1, block=16, max_num_seqs=1024)
        waiting = [Job(number, ((number + 1, 96),), 96) for number in range(1200)]
        tokens, busy, end = 0, 0, 0
        for _ in range(concurrency):
            built.submit(waiting.pop(), 0.0)
        while built.wake() < float("inf"):
            for span in built.advance(built.wake()):
                end = span.times[-1]
                busy += end - span.start
                tokens += len(span.tokens) * len(span.times)
                for _ in span.done[: len(waiting)]:
                    built.submit(waiting.pop(), end / 1e9)
        assert tokens == 1200 * 96
        assert busy <= end
        # A running request holds at least the 6 blocks of its prompt, so a step delivers at most 136 tokens; none is quicker than
        # one token after one prompt.
        assert tokens / 136 * built.cost.seconds(Step((), 1, 97, 1)) * 1e9 <= busy
        gauges = built.gauges()
        # Each request computes 96 + 96 - 1 tokens, and whatever was lost with a preemption once more.
        assert gauges["computed_tokens"] == 1200 * 191 + gauges["recompute_tokens"]
        assert gauges["recompute_tokens"] >= gauges["preemptions"]
        throughput[concurrency] = tokens / end
        if concurrency > 68:
            assert gauges["preemptions"] > 0
    assert throughput[1024] <= 1.1 * throughput[256]
    assert throughput[256] <= 1.5 * throughput[64]


def test_m05_each_turn_reads_all_turns_before_it() -> None:
    """One block of 16 a turn: 11 tokens asked and 5 answered. The first question is one longer, since the last token of an answer
    is never cached."""
    built = engine(blocks=100, block=16)
    history: list[tuple[int, int]] = []
    read = []
    for turn in range(10):
        history.append((1000 + turn, 11 if turn else 12))
        before = built.gauges()["hit_tokens"]
        built.submit(Job(turn, tuple(history), 5), 10.0 * turn)
        finish(built)
        read.append((built.gauges()["hit_tokens"] - before) / 16)
        history.append((reply_key(turn), 5))
    assert read == list(range(10))
    assert sum(read) == 45


def test_m05_the_turns_of_a_session_are_cumulative_in_a_run(tmp_path: Path) -> None:
    text = """
name: turns
seed: 5
target: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090, settings: {blocks: 400, block: 16}}
workload:
  arrivals: {shape: closed, concurrency: 1}
  prompt: 11
  output: {dist: fixed, value: 5, force: true}
  prefixes: {groups: 1, zipf: 1.0, tokens: 1, share: 100%}
  sessions: {turns: 10, think: 1s}
  nonce: false
phases: {steady: {for: 10s}, drain: {for: 60s}}
"""
    records = [record for record in simulated(text, tmp_path).records if record.session == 0]
    assert [(record.turn, record.n_in) for record in records] == [(turn, 12 + 16 * turn) for turn in range(len(records))]
    assert len(records) == 10
    assert sum(record.cached for record in records) == 45 * 16


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_m07_a_reused_block_forgets_its_old_content(policy: str) -> None:
    pool = Pool(9, 16, POLICIES[policy](8, 0))
    content: dict[int, int] = {}  # block -> what was last written into it
    for cycle in range(100_000):
        blocks = pool.allocate(1)
        assert pool.found([content.get(blocks[0], -1)], 1) == 0
        content[blocks[0]] = pool.publish(blocks[0], cycle, 0, 0) and cycle
        pool.release(blocks)
        assert len(pool.index) <= pool.usable
        if cycle % 1000 == 0:
            pool.check([])
    pool.check([])
    assert pool.referenced == 0


def test_m09_blocks_of_running_requests_are_never_evicted() -> None:
    built = engine(blocks=11, block=4)
    built.cost = Second()
    for number in range(2):
        built.submit(Job(number, ((number + 1, 13),), 4), 0.0)  # 4 blocks each up to their end: 13 + 3 computed tokens
    built.advance(0.5)
    assert built.pool.referenced == 8
    built.submit(Job(2, ((3, 16),), 1), 0.5)  # 4 more than the 10
    waited = []
    while built.wake() < float("inf"):
        spans = built.advance(built.wake())
        built.check()
        assert built.pool.referenced <= 10
        waited += [(done.id, span.times[-1] / 1e9) for span in spans for done in span.done]
    assert waited == [(0, 4), (1, 4), (2, 5)]
    assert built.gauges()["preemptions"] == 0
    assert built.pool.evicted == 2  # of what the first two left: 2 blocks were still empty
