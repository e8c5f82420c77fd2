"""The roofline against arithmetic done by hand on a toy model and device whose rates are round."""

import pytest

from kvbench.engine import Step
from kvbench.engine.cost import Roofline
from kvbench.profile import EngineProfile, Experts, Hardware, Latent, Model, load_engine, load_hardware, load_model

# Per layer: attention 4 x 2 x (2 x 2 + 2 x 1) = 48, MLP 3 x 4 x 8 = 96 weights; 2 layers: 288. Output head 4 x 10 = 40.
MODEL = Model(
    source="toy", layers=2, hidden=4, heads=2, kv_heads=1, head_dim=2, intermediate=8, vocab=10, max_len=1000
)  # fmt: skip
DEVICE = Hardware(
    source="toy", memory=1e6, bandwidth=1000, flops=1000, link=100, link_latency=0.5, bandwidth_share=1, flops_share=1
)  # fmt: skip
ENGINE = EngineProfile(source="toy", step_overhead=0.1, seq_overhead=0.01)
STEP = Step(prefill=((3, 5),), decodes=2, context=20, samples=2)


def test_terms_of_a_mixed_step_on_one_device() -> None:
    terms = Roofline(MODEL, DEVICE, ENGINE).terms(STEP)
    assert terms.compute == pytest.approx(3.04)  # 2 x (288 x 5 tokens + 40 x 2 samples) = 3,040 FLOP
    assert terms.weights == pytest.approx(0.656)  # (288 + 40) x 2 B
    assert terms.linear == pytest.approx(3.04)  # the longer of the two
    # Pairs 3 x 5 + 3 x 4 / 2 = 21, each 2 (multiply, add) x 2 layers x 2 heads x 2 x 2 (QK and PV) = 32 FLOP: 672.
    # Its KV: 8 tokens x 16 B = 128 B is less.
    assert terms.prefill_attention == pytest.approx(0.672)
    assert terms.decode_attention == pytest.approx(0.64)  # 20 x max(32 FLOP / 1000, 16 B / 1000)
    assert terms.activations == pytest.approx(1.12)  # 5 x 2 layers x 2 B x (8 x 4 + 3 x 8)
    assert terms.communication == 0
    assert terms.overhead == pytest.approx(0.13)  # 0.1 + 3 sequences x 0.01
    assert terms.total == pytest.approx(5.602)


def test_terms_on_two_devices() -> None:
    terms = Roofline(MODEL, DEVICE.model_copy(update={"count": 2}), ENGINE).terms(STEP)
    assert terms.compute == pytest.approx(1.52)
    assert terms.weights == pytest.approx(0.328)
    assert terms.prefill_attention == pytest.approx(0.336)
    assert terms.decode_attention == pytest.approx(0.32)  # 16 FLOP; the one KV head is replicated: still 16 B
    assert terms.activations == pytest.approx(0.88)  # 5 x 2 x 2 x (32 + 24 / 2)
    # 2 all-reduces x 2 layers x 0.5 s, and per token 4 x (2 x 1/2 of 4 x 2 B) / 100 B/s = 0.32.
    assert terms.communication == pytest.approx(2.0 + 5 * 0.32)


def test_weight_reads_that_do_not_overlap_add_up() -> None:
    terms = Roofline(MODEL, DEVICE.model_copy(update={"overlap": 0.25}), ENGINE).terms(STEP)
    assert terms.linear == pytest.approx(3.04 + 0.75 * 0.656)


def test_experts_touched() -> None:
    model = MODEL.model_copy(update={"experts": Experts(count=4, active=1, intermediate=8)})
    cost = Roofline(model, DEVICE, ENGINE)
    # Common: attention 2 x 48 and routers 2 x 4 x 4 = 128. One expert: 96 weights in each of 2 layers.
    # 2 tokens touch 4 x (1 - (3/4)^2) = 1.75 experts: 2 x (128 + 1.75 x 192) = 928 B.
    assert cost.weight_bytes(2) == pytest.approx(928)
    assert cost.weight_bytes(1000) == pytest.approx(2 * (128 + 4 * 192))
    terms = cost.terms(Step(decodes=2, context=2, samples=0))
    assert terms.compute == pytest.approx(2 * 320 * 2 / 1000)  # active: 128 + 2 x 96 = 320


def test_latent_attention_decodes_on_the_latent() -> None:
    latent = Latent(kv_rank=6, rope_dim=2, q_rank=3, nope_dim=2, v_dim=2)
    cost = Roofline(MODEL.model_copy(update={"latent": latent}), DEVICE, ENGINE)
    # Decode: 2 x 2 layers x 2 heads x (6 + 2 + 6) = 112 FLOP against 2 x 8 x 2 B = 32 B per context token.
    assert cost.terms(Step(decodes=1, context=10)).decode_attention == pytest.approx(1.12)
    # Prefill: 2 x 2 x 2 x (2 + 2 + 2) = 48 FLOP per pair; 1 new token after 9 makes 10 pairs, its KV 10 x 32 B = 320 B.
    assert cost.terms(Step(prefill=((1, 9),))).prefill_attention == pytest.approx(0.48)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3", "mixtral-8x7b"])
def test_affine_in_context_as_the_contract_says(model: str) -> None:
    cost = Roofline(load_model(model), load_hardware("h100 x8"), load_engine("vllm"))
    at = [cost.seconds(Step(decodes=64, context=64 * tokens, samples=64)) for tokens in (1000, 1001, 9000)]
    assert at[1] > at[0]
    assert at[2] - at[0] == pytest.approx((at[1] - at[0]) * 8000, rel=1e-6)


def test_decode_of_an_8b_model_reads_its_weights() -> None:
    # Layers 32 x (4096 x 128 x 80 + 3 x 4096 x 14336) and the head 4096 x 128256: 7,504,658,432 weights = 15.01 GB at
    # 0.92 x 1,008 GB/s: 16.2 ms; 1,000 tokens of KV are 0.13 GB: 0.14 ms.
    terms = Roofline(load_model("llama-3.1-8b"), load_hardware("rtx-4090"), load_engine("vllm")).terms(Step((), 1, 1000, 1))
    assert terms.weights == pytest.approx(0.016185, rel=1e-3)
    assert terms.decode_attention == pytest.approx(131_072_000 / (0.92 * 1008e9))
