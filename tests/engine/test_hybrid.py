"""Hybrid models in the engine, by hand on 2 full and 2 window layers: blocks of 4 tokens, a window of 8."""

import random

import pytest
from pydantic import ValidationError

from kvbench.core import Seconds
from kvbench.endpoint import Sim
from kvbench.engine import Job, Step
from kvbench.engine.cost import Roofline
from kvbench.engine.engine import Engine
from kvbench.profile import Model, layout, load_engine, load_hardware, load_model

CARD = load_hardware("8xh100")
TOY = Model.model_validate(
    {
        "source": "made up", "layers": 4, "hidden": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "intermediate": 128,
        "vocab": 1000, "max_len": 4096, "kinds": [{"layers": 2}, {"layers": 2, "kind": "window", "window": 8}],
    }
)  # fmt: skip


class Second:
    """Every step takes a second."""

    def seconds(self, step: Step) -> Seconds:
        return 1.0


def toy(blocks: int = 101, budget: int = 8) -> Engine:
    profile = load_engine("vllm", block=4, blocks=blocks, max_num_batched_tokens=budget, max_num_seqs=8)
    built = Engine(TOY, load_hardware("h100"), profile)
    built.cost = Second()
    return built


def held(built: Engine) -> list[int]:
    """Blocks that the first running sequence holds of each group: full, window."""
    return [sum(block > 0 for block in table.blocks) for table in built.batch.running[0].holding.tables]


def finish(built: Engine) -> None:
    while built._jobs:
        built.advance(built.wake())
        built.check()


def test_blocks_out_of_the_window_are_given_back() -> None:
    built = toy()
    assert built.submit(Job(1, ((1, 24),), 40), 0.0) is None
    # The step over tokens 9-16 begins with 8: token 9 sees 2-9, so nothing goes; that over 17-24 gives back 1-9's full blocks.
    seen = []
    for now in (0.5, 1.5, 2.5):
        built.advance(now)
        built.check()
        seen.append(held(built))
    assert seen == [[2, 2], [4, 4], [6, 4]]  # cdiv(8 - 1 + 8, 4) + 1 = 5 at most
    most = 0
    for now in range(4, 41):
        built.advance(now + 0.5)
        built.check()
        most = max(most, held(built)[1])
    assert held(built)[0] == 16
    assert most == 3  # decoding: the 8 tokens of the window touch at most 3 blocks of 4
    assert built.pool.referenced == sum(held(built))


def test_a_hit_needs_only_the_end_of_the_window_group() -> None:
    built = toy()
    built.submit(Job(1, ((1, 32),), 1), 0.0)
    finish(built)
    full, window = built.cache.open(((1, 33),), 2).tables
    keys = window.chain.upto(8)
    built.pool.discard(keys[:6])  # the last cdiv(7, 4) = 2 blocks stay
    assert built.found(Job(2, ((1, 33),), 1)) == 32
    built.pool.discard(keys[6:7])
    assert built.found(Job(2, ((1, 33),), 1)) == 0
    finish(built)
    built.submit(Job(3, ((1, 20),), 1), built.until / 1e9)
    finish(built)  # brings back what it computes: tokens 1-20
    assert built.found(Job(2, ((1, 33),), 1)) == 20
    built.pool.discard(full.chain.upto(8)[3:])
    assert built.found(Job(2, ((1, 33),), 1)) == 12  # the full group has three blocks, the window group 2 and 3


def test_an_admission_references_the_end_alone() -> None:
    built = toy()
    built.submit(Job(1, ((1, 32),), 1), 0.0)
    finish(built)
    built.submit(Job(2, ((1, 32), (2, 4)), 4), 100.0)
    built.advance(100.5)
    built.check()
    assert held(built) == [9, 3]
    assert built.batch.running[0].holding.tables[1].blocks[:6] == [0] * 6


def test_random_operations_keep_the_invariants() -> None:
    rng = random.Random(5)
    built = toy(blocks=40)
    now = 0.0
    for number in range(200):
        prompt = rng.randrange(1, 60)
        built.submit(Job(number, ((rng.randrange(3), prompt),), rng.randrange(1, 30), n=rng.choice((1, 1, 2))), now)
        now += rng.random() * 8
        built.advance(now)
        built.check()
        if rng.random() < 0.1 and built._jobs:
            built.cancel(rng.choice(list(built._jobs)), now)
            built.check()
    finish(built)
    assert built.pool.referenced == 0
    assert built.batch.counters.preemptions > 0


@pytest.mark.parametrize(("name", "groups"), [("gpt-oss-120b", 2), ("gemma-3-27b", 7), ("qwen3.5-27b", 4)])
def test_a_long_request_holds_what_the_layout_says(name: str, groups: int) -> None:
    model, length = load_model(name), 19 * 2048 + 2
    profile = load_engine("vllm", max_num_batched_tokens=2048)
    built = Engine(model, CARD, profile)
    cut = layout(model, profile.block, CARD.count)
    built.submit(Job(1, ((1, length - 2),), 2), 0.0)
    most = 0
    while built._jobs:
        built.advance(built.wake())
        most = max(most, built.pool.referenced)
    assert len(built.cache.groups) == len(cut.groups) == groups
    windows = sum(group.kind == "window" for group in cut.groups)
    assert cut.request_blocks(length, 2048) - windows - 1 <= most <= cut.request_blocks(length, 2048)
    assert built.facts()["kv_tokens"] == cut.tokens(built.blocks, model.max_len, 2048)


def test_as_many_run_at_once_as_the_layout_says() -> None:
    blocks, length = 201, 200
    built = toy(blocks, budget=32)
    for number in range(8):
        built.submit(Job(number, ((number, 160),), length - 160), 0.0)
    most = 0
    while built._jobs:
        built.advance(built.until / 1e9 + 1)
        most = max(most, len(built.batch.running))
        built.check()
    assert abs(most - layout(TOY, 4).concurrency(blocks, length, 32)) < 1  # 201 / (50 + cdiv(39, 4) + 1) = 3.3
    assert toy(56).unfit(Job(1, ((1, 200),), 1)) is None  # 50 + 5 of 55 blocks
    assert toy(55).unfit(Job(1, ((1, 200),), 1)) == "kv_too_small"


def test_decode_does_not_grow_beyond_the_window() -> None:
    profile = load_engine("vllm")
    every = Model.model_validate(TOY.model_dump(exclude={"kinds"}) | {"kinds": [{"layers": 4, "kind": "window", "window": 8}]})
    cost = Roofline(every, CARD, profile)
    times = [cost.seconds(Step((), 1, context, 1, (), (min(8, context),))) for context in (4, 8, 9, 1000)]
    assert times[0] < times[1] == times[2] == times[3]
    assert cost.seconds(Step(((10, 0),))) < cost.seconds(Step(((10, 8),))) == cost.seconds(Step(((10, 400),)))


def test_spans_are_steps_one_by_one() -> None:
    """A window is crossed inside a long decode: times extrapolated over spans are those of every step by itself."""

    def ends(tick: float | None) -> list[int]:
        built = Engine(TOY, load_hardware("h100"), load_engine("vllm", block=4, blocks=101))
        for number, prompt in enumerate((3, 5, 20)):
            built.submit(Job(number, ((number, prompt),), 30), 0.0)
        found: list[int] = []
        while built._jobs:
            spans = built.advance(built.wake() if tick is None else built.tick())
            found += [time for span in spans for time in span.times]
        return found

    whole, single = ends(None), ends(1.0)
    assert len(whole) == len(single)
    assert all(abs(a - b) <= 2 for a, b in zip(whole, single, strict=True))


@pytest.mark.parametrize("more", [{"cluster": {"nodes": [{"replicas": 2}]}}, {"tiers": {"host": {"capacity": 1e9}}}])
def test_tiers_and_clusters_are_refused(more: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"not full attention: (a cluster|tiers below the device) cannot hold"):
        Sim.model_validate({"model": "gpt-oss-20b", "hardware": "h100", **more})
