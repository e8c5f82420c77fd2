"""Layer groups whose codecs take time or need a length, by hand on Llama-3.1-8B: 131,072 bytes per token in 32 layers.

sparse-25 keeps 4.03125 of 16 bits from 512 tokens on: before, a block takes 4 blocks of its pool.
"""

import random
from typing import Any

import pytest
from pydantic import ValidationError

from kvbench.core import Seconds
from kvbench.engine import Job, Step
from kvbench.engine.engine import Engine
from kvbench.engine.groups import LayersSpec
from kvbench.profile import load_engine, load_hardware, load_model

MODEL, CARD = load_model("llama-3.1-8b"), load_hardware("rtx-4090")
RAW = 131_072


class Second:
    """Every step takes one."""

    def seconds(self, step: Step) -> Seconds:
        return 1.0


def engine(group: dict[str, Any], blocks: int = 400, settings: dict[str, Any] | None = None, **spec: Any) -> Engine:
    layers = LayersSpec.model_validate({"groups": [{"layers": "1+"} | group], **spec})
    built = Engine(MODEL, CARD, load_engine("vllm", block=4, blocks=blocks, **(settings or {})), layers=layers)
    built.cost = Second()
    return built


def to_end(built: Engine) -> list[int]:
    """Ends of all steps until nothing is left, in ns."""
    times = []
    while built._jobs:
        for span in built.advance(built.wake()):
            times += span.times
        built.check()
    return times


def held(built: Engine) -> int:
    return built.pool.referenced


def test_a_synchronous_codec_takes_its_time_in_the_step_and_stages_the_whole_chunk() -> None:
    built = engine({"codec": "delta"})
    built.submit(Job(0, ((1, 40),), 1), 0.0)
    built.advance(0.5)
    first = built.gauges()
    assert first["staged_bytes"] == 40 * RAW
    assert first["kv_peak_bytes"] == pytest.approx(40 * RAW * (1 + 4.075 / 16))  # ten full blocks beside it
    assert built.gauges() == first
    assert to_end(built) == [1_000_000_000 + 40 * 32 * 200]


def test_an_asynchronous_codec_takes_none_and_stages_a_layer() -> None:
    built = engine({"codec": "delta", "encoding": "async"})
    built.submit(Job(0, ((1, 40),), 1), 0.0)
    built.advance(0.5)
    assert built.gauges()["staged_bytes"] == 40 * RAW / 32  # a layer every 31 ms, encoded in 8 us
    assert built.gauges()["kv_peak_bytes"] == pytest.approx(40 * RAW * (1 / 32 + 4.075 / 16))
    assert to_end(built) == [1_000_000_000]


def test_a_step_waits_for_staging_memory() -> None:
    """Half a second for 40 tokens of a layer, one every 1/32 s: 31 of 32 wait for the one before."""
    built = engine({"codec": "delta", "encoding": "async"}, staging=40 * RAW / 32)
    built.cache.groups[0].encode = 0.5 * 32 / 10
    built.submit(Job(0, ((1, 40),), 1), 0.0)
    assert to_end(built) == [round(1e9 / 32 + 31 * 0.5e9)]


def test_the_peak_is_of_all_steps_until_a_reset() -> None:
    built = engine({"codec": "int4-g64"})
    built.submit(Job(0, ((1, 40),), 3), 0.0)
    to_end(built)
    assert built.gauges()["staged_bytes"] == 0  # the last steps decoded
    assert built.gauges()["kv_peak_bytes"] == pytest.approx(40 * RAW * (1 + 4.5 / 16))
    assert built.reset(10.0)
    assert built.gauges()["kv_peak_bytes"] == 0


def test_what_is_found_is_neither_staged_nor_encoded_again() -> None:
    built = engine({"codec": "delta"})
    built.submit(Job(0, ((1, 40),), 1), 0.0)
    to_end(built)
    built.submit(Job(1, ((1, 40), (2, 8)), 1), 10.0)
    built.advance(10.5)
    assert built.gauges()["staged_bytes"] == 8 * RAW
    assert to_end(built) == [11_000_000_000 + 8 * 32 * 200]


def test_codecs_that_cost_nothing_stage_nothing() -> None:
    built = engine({"codec": "fp8"})
    assert "staged_bytes" not in built.gauges()


def test_a_short_sequence_takes_four_blocks_for_one_until_it_is_long_enough() -> None:
    built = engine({"codec": "sparse-25"})  # 1,583 usable blocks
    built.submit(Job(0, ((1, 500),), 20), 0.0)
    took = {}
    for second in range(1, 21):
        built.advance(second + 0.1)
        built.check()
        took[second] = held(built)
    # the step in progress after 12 s computes token 512: 500 in the first, then one in each
    assert [took[at] for at in (1, 11, 12, 13)] == [126 * 4, 128 * 4, 128, 129]
    to_end(built)
    assert held(built) == 0


def test_a_sequence_becomes_long_enough_within_a_block() -> None:
    built = engine({"codec": "sparse-25", "block": 48})
    built.submit(Job(0, ((1, 500),), 20), 0.0)
    took = []
    for second in (11, 12):
        built.advance(second + 0.1)
        took.append(held(built))
    assert took == [11 * 4, 11]


@pytest.mark.parametrize(("prompt", "blocks"), [(511, 128 * 4), (512, 128), (40, 40)])
def test_a_prompt_is_as_long_as_what_is_known_of_it(prompt: int, blocks: int) -> None:
    built = engine({"codec": "sparse-25"}, settings={"max_num_batched_tokens": 2048})
    built.submit(Job(0, ((1, prompt),), 1), 0.0)
    built.advance(0.5)
    assert held(built) == blocks


def test_a_long_prompt_is_never_raw_however_small_its_chunks() -> None:
    built = engine({"codec": "sparse-25"}, settings={"max_num_batched_tokens": 256})
    built.submit(Job(0, ((1, 1024),), 1), 0.0)
    took = []
    for second in range(4):
        built.advance(second + 0.5)
        took.append(held(built))
    assert took == [64, 128, 192, 256]


def test_raw_blocks_pay_for_their_encoding_when_the_sequence_is_long_enough_or_ends() -> None:
    built = engine({"codec": "sparse-25"})
    built.submit(Job(0, ((1, 508),), 6), 0.0)
    times = to_end(built)
    steps = [b - a for a, b in zip([0, *times], times, strict=False)]
    assert steps[:4] == [1_000_000_000] * 4
    assert steps[4] == 1_000_000_000 + 512 * 32 * 20  # 127 blocks that were raw, and the one that this step fills
    built.submit(Job(1, ((7, 40),), 1), 50.0)
    assert to_end(built) == [51_000_000_000]
    built.submit(Job(2, ((8, 40),), 1), 60.0)
    assert to_end(built) == [61_000_000_000 + 40 * 32 * 20]  # what the one before left


def test_what_a_short_sequence_leaves_is_encoded() -> None:
    built = engine({"codec": "sparse-25"})
    built.submit(Job(0, ((1, 40),), 1), 0.0)
    to_end(built)
    assert (held(built), len(built.pool.index)) == (0, 10)
    built.submit(Job(1, ((1, 40), (2, 8)), 1), 10.0)
    built.advance(10.5)
    assert held(built) == 10 + 2 * 4


def test_room_is_that_of_a_sequence_that_begins_short() -> None:
    """511 tokens are 128 blocks, and raw 512 of the pool's. 129 blocks in 16 bit are 512 encoded, one of them the null block."""
    assert engine({"codec": "sparse-25"}, blocks=129).cache.usable_tokens() == 511 // 4 * 4
    assert engine({"codec": "sparse-25"}, blocks=130).cache.usable_tokens() == 514 * 4  # from 512 tokens on there is room


def test_reserved_blocks_hold_what_is_raw_before_they_are_needed() -> None:
    built = engine({"codec": "sparse-25"}, settings={"preallocate": 1.0})
    built.submit(Job(0, ((1, 40),), 1), 0.0)
    built.submit(Job(1, ((2, 40),), 400), 0.0)
    built.submit(Job(2, ((3, 400),), 300), 0.0)
    built.advance(1.5)
    built.check()
    to_end(built)
    small = engine({"codec": "sparse-25"}, blocks=140, settings={"preallocate": 1.0})
    small.submit(Job(0, ((1, 40),), 1500), 0.0)
    small.advance(0.5)
    assert held(small) == 512  # 1,539 tokens are 385 blocks; the first 511 of them take 4 x 128 while they are all
    to_end(small)


def test_async_needs_a_codec() -> None:
    with pytest.raises(ValidationError, match="`encoding: async` without a codec"):
        LayersSpec.model_validate({"groups": [{"layers": "1+", "encoding": "async"}]})


GROUPS: list[list[dict[str, Any]]] = [
    [{"layers": "1+", "codec": "sparse-25"}],
    [{"layers": "1-6", "codec": "int4-g64", "encoding": "async"}, {"layers": "7+", "codec": "sparse-12", "block": 48}],
    [{"layers": "1-6", "quota": 0.3}, {"layers": "7-12", "codec": "delta", "block": 32, "encoding": "async"},
     {"layers": "13+", "codec": "sparse-25", "encoding": "async", "block": 20}],
]  # fmt: skip
SETTINGS: list[dict[str, Any]] = [
    {},
    {"admission": "chunk", "max_num_batched_tokens": 256, "max_num_seqs": 32},
    {"preallocate": 0.9, "retain_tokens": 64},
    {"prefill": "whole", "victim": "most_blocks"},
]


@pytest.mark.parametrize("seed", range(12))
def test_random_loads_keep_every_invariant_and_end(seed: int) -> None:
    draw = random.Random(seed)
    groups, settings = GROUPS[seed % 3], SETTINGS[seed % 4]
    spec = LayersSpec.model_validate(
        {"groups": groups, "partition": "dynamic", "every": 2.0, "staging": draw.choice([1e6, 64e6])}
    )
    built = Engine(MODEL, CARD, load_engine("vllm", block=16, blocks=draw.choice([60, 90, 150]), **settings), layers=spec)
    now, live, over = 0.0, [], 0
    for number in range(70):
        prompt = ((draw.randrange(4), draw.choice([1, 40, 300, 500])), (100 + number, draw.randrange(1, 200)))
        if built.submit(Job(number, prompt, draw.randrange(1, 250), n=draw.choice([1, 1, 2])), now) is None:
            live.append(number)
        if live and draw.random() < 0.1:
            victim = draw.choice(live)
            live.remove(victim)
            built.cancel(victim, now)
        now += draw.expovariate(3.0)
        ended = [done.id for span in built.advance(now) for done in span.done]
        over += len(ended)
        live = [job for job in live if job not in ended]
        built.check()
        if draw.random() < 0.05:
            built.preempt()
            built.check()
    to_end(built)
    assert over > 10
    assert built.gauges()["preemptions"] > 0
    assert all(pool.referenced == 0 for pool in built.cache.pools)


def test_a_short_sequence_that_is_cancelled_while_it_waits_owes_nothing() -> None:
    built = engine({"codec": "sparse-25"})
    built.submit(Job(0, ((1, 40),), 1), 0.0)
    to_end(built)
    built.submit(Job(1, ((1, 40), (2, 8)), 9), 10.0)
    built.advance(10.5)
    built.preempt()
    owed = built.cache.debt
    built.cancel(1, 10.5)
    assert built.cache.debt == owed > 0
