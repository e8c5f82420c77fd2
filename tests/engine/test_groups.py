"""Layer groups by hand on Llama-3.1-8B: 32 layers of 4,096 bytes per token; 101 blocks of 4 tokens are 52,953,088 bytes."""

import random

import pytest
from pydantic import ValidationError

from kvbench.core import Seconds
from kvbench.endpoint import Sim
from kvbench.engine import Job, Step
from kvbench.engine.cache import Cache
from kvbench.engine.cost import Roofline, Stored
from kvbench.engine.engine import Engine
from kvbench.engine.evict.policies import POLICIES
from kvbench.engine.groups import LayersSpec, sizes
from kvbench.engine.holding import Found, Group
from kvbench.engine.pool import Pool
from kvbench.profile import load_engine, load_hardware, load_model
from kvbench.report.sentences import described

MODEL, CARD = load_model("llama-3.1-8b"), load_hardware("rtx-4090")
THREE: list[dict[str, object]] = [
    {"layers": "1-6", "codec": "fp16", "quota": 0.3},
    {"layers": "7-12", "codec": "int4-g64"},
    {"layers": "13+", "codec": "sparse-25"},
]


def engine(groups: list[dict[str, object]] | None = None, blocks: int = 101, **spec: object) -> Engine:
    layers = LayersSpec.model_validate({"groups": groups, **spec}) if groups else None
    return Engine(MODEL, CARD, load_engine("vllm", block=4, blocks=blocks), layers=layers)


def run(built: Engine) -> list[tuple[object, ...]]:
    spans: list[tuple[object, ...]] = []
    while built._jobs:
        spans += [(span.start, span.times, span.tokens, span.done) for span in built.advance(built.wake())]
        built.check()
    return spans


class Recorder:
    """Every step takes a second, and is kept."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def seconds(self, step: Step) -> Seconds:
        self.steps.append(step)
        return 1.0


def test_pools_are_quota_over_the_bytes_of_a_block() -> None:
    sized = sizes(LayersSpec.model_validate({"groups": THREE}), MODEL, CARD, load_engine("vllm", block=4, blocks=101))
    assert [one.token for one in sized] == [24_576, 6_912, 20_640]  # 6 x 4,096; x 4.5 / 16; 20 x 4,096 x 4.03125 / 16
    # .3 x 52,953,088 / 98,304 = 161.6; the other two share .7 by bytes: .7 x 52,953,088 / (4 x 27,552) = 336.3 each
    assert [one.blocks for one in sized] == [161, 336, 336]


@pytest.mark.parametrize("codec", ["fp16", None])
def test_one_group_over_all_layers_is_no_groups_at_all(codec: str | None) -> None:
    plain, grouped = engine(blocks=40), engine([{"layers": "1+", "codec": codec}], blocks=40)
    for built in (plain, grouped):
        for number in range(12):
            built.submit(Job(number, ((1, 20), (number + 2, 13)), 9), 0.0)
    assert run(plain) == run(grouped)
    assert plain.gauges() == grouped.gauges()
    assert plain.gauges()["preemptions"] > 0


def test_facts_and_memory_are_of_the_pools_that_there_are() -> None:
    mixed: list[dict[str, object]] = [
        {"layers": "1-6", "block": 8, "quota": 0.3},
        {"layers": "7+", "codec": "int4-g64", "quota": 0.5},
    ]
    built, plain = engine(mixed), engine()
    # .3 x 52,953,088 / (8 x 24,576) = 80.8 blocks; .5 x 52,953,088 / (4 x 26 x 1,152) = 220.99
    facts = built.facts()
    assert facts["blocks"] == 79 + 219
    assert [(one["blocks"], one["block"], one["bytes"]) for one in facts["groups"]] == [(79, 8, 196_608), (219, 4, 119_808)]
    assert facts["kv_tokens"] == 79 * 8
    assert built.memory is not None
    assert plain.memory is not None
    less = 101 * 4 * 131_072 - (80 * 196_608 + 220 * 119_808)
    assert plain.memory - built.memory == pytest.approx(less / CARD.memory)
    assert "KV pools of 2 layer groups (79 + 219 blocks), 632 tokens fit" in described(facts)


def test_a_miss_in_the_low_group_alone_computes_six_of_32_layers() -> None:
    built = engine(THREE)
    built.submit(Job(0, ((1, 40),), 1), 0.0)
    run(built)
    built.cache.groups[0].pool.clear()
    built.cost = recorder = Recorder()
    built.submit(Job(1, ((1, 40),), 1), 10.0)
    run(built)
    assert recorder.steps[0].prefill == ((40, 0),)
    assert recorder.steps[0].shares == pytest.approx(((36 * 6 / 32 + 4) / 40,))  # 9 full blocks; the last tokens in all layers
    gauges = built.gauges()
    assert [gauges[f"lookup_tokens_{name}"] for name in ("1_6", "7_12", "13_32")] == [80, 80, 80]
    assert [gauges[f"hit_tokens_{name}"] for name in ("1_6", "7_12", "13_32")] == [0, 36, 36]
    assert gauges["hit_tokens"] == 0  # a hit needs every group


def test_a_miss_in_the_high_group_computes_every_layer() -> None:
    built = engine(THREE)
    built.submit(Job(0, ((1, 40),), 1), 0.0)
    run(built)
    built.cache.groups[2].pool.clear()
    built.cost = recorder = Recorder()
    built.submit(Job(1, ((1, 40),), 1), 10.0)
    run(built)
    assert recorder.steps[0].shares == (1.0,)


def test_six_of_32_layers_are_six_32nds_of_flops_and_attention() -> None:
    cost = Roofline(MODEL, CARD, load_engine("vllm"))
    whole, part = cost.terms(Step(((2048, 0),), shares=(1.0,))), cost.terms(Step(((2048, 0),), shares=(6 / 32,)))
    assert part.compute == pytest.approx(whole.compute * 6 / 32)
    assert part.prefill_attention == pytest.approx(whole.prefill_attention * 6 / 32)


def test_decoding_reads_fewer_bytes_and_pays_the_codec() -> None:
    plain = Roofline(MODEL, CARD, load_engine("vllm"))
    coded = Roofline(MODEL, CARD, load_engine("vllm"), Stored(131_072 / 4, 50e-6, 0.0))
    step = Step(decodes=8, context=8000)
    expected = plain.terms(step).decode_attention / 4 + 50e-6
    assert coded.terms(step).decode_attention == pytest.approx(expected)
    assert coded.terms(Step(((64, 0),))).decode_attention == 0


def test_the_step_that_fills_a_block_pays_its_encoding_once() -> None:
    built = engine([{"layers": "1+", "codec": "delta"}])
    built.cost = Recorder()
    built.submit(Job(0, ((1, 40),), 1), 0.0)
    (_, times, _, _), *_ = run(built)
    assert times == [1_000_000_000 + 40 * 32 * 200]  # ns: 10 blocks of 4 tokens, 200 ns for a token and layer
    built.submit(Job(1, ((1, 40),), 1), 10.0)
    (_, times, _, _), *_ = run(built)
    assert times == [11_000_000_000]  # all ten blocks are there: the last is adopted


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ([{"layers": "1-6"}, {"layers": "8+"}], "each of the model's 32 layers is in one group"),
        ([{"layers": "1-6"}, {"layers": "6+"}], "each of the model's 32 layers is in one group"),
        ([{"layers": "1-40"}], "each of the model's 32 layers is in one group"),
        ([{"layers": "1-6", "quota": "60%"}, {"layers": "7+", "quota": "50%"}], "quotas add up to 110%"),
        ([{"layers": "1-6", "quota": "100%"}, {"layers": "7+"}], "quotas add up to 100%"),
        ([{"layers": "low"}], "not a range of layers"),
        ([{"layers": "1+", "codec": "int4"}], "unknown profile 'int4' in codecs"),
        ([{"layers": "1+", "block": 65536}], "no room for a block"),
    ],
)
def test_what_is_wrong_is_said(groups: list[dict[str, object]], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Sim.model_validate({"model": "llama-3.1-8b", "hardware": "rtx-4090", "layers": {"groups": groups}})


def test_random_loads_over_three_groups_keep_every_invariant() -> None:
    for seed in range(4):
        draw = random.Random(seed)
        groups: list[dict[str, object]] = [
            {"layers": "1-6", "block": 4, "quota": 0.3},
            {"layers": "7-12", "block": 8, "quota": 0.2},
            {"layers": "13+", "block": 16, "quota": 0.5},
        ]
        built = engine(groups, partition="dynamic", every=0.2)
        now = 0.0
        for number in range(60):
            prompt = ((draw.randrange(4), draw.randrange(1, 60)), (100 + number, draw.randrange(1, 9)))
            built.submit(Job(number, prompt, draw.randrange(1, 40)), now)
            now += draw.random() * 0.1
            built.advance(now)
            built.check()
        run(built)
        assert all(pool.referenced == 0 for pool in built.cache.pools)


def test_what_comes_up_from_below_needs_its_blocks_even_beyond_the_chunk() -> None:
    """The first group has ten blocks below and the second none: the chunk begins at token 0, and all ten come up."""
    groups = [Group(str(at), Pool(blocks + 1, 4, POLICIES["lru"](blocks, 0)), at, at, 1.0) for at, blocks in ((1, 9), (2, 10))]
    cache = Cache(groups)
    holding = cache.open(((1, 40),), 0)
    assert not cache.fits(holding, Found(0, 0, (0, 0), (10, 0)), 4)
    assert cache.fits(holding, Found(0, 0, (0, 0), (9, 0)), 4)
