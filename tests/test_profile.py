"""Profiles: sizes against published figures, parsing of names and counts, errors that help."""

from pathlib import Path

import pytest

from kvbench import profile
from kvbench.profile import (
    activation_bytes,
    kv_blocks,
    kv_groups,
    kv_room,
    load_engine,
    load_hardware,
    load_model,
    load_tier,
    names,
)
from kvbench.shape import Layers, Model

# Bytes per token: 2 (K and V) x layers x kv_heads x head_dim x 2 bytes; for latent attention layers x (512 + 64) x 2.
KV_BYTES = {
    "llama-2-70b": 327_680,  # 2 x 80 x 8 x 128 x 2
    "llama-3.1-70b": 327_680,
    "llama-3.1-8b": 131_072,  # 2 x 32 x 8 x 128 x 2
    "mixtral-8x7b": 131_072,
    "qwen3-8b": 147_456,  # 2 x 36 x 8 x 128 x 2
    "qwen3-32b": 262_144,  # 2 x 64 x 8 x 128 x 2
    "deepseek-v3": 70_272,  # 61 x 576 x 2
    "smollm2-135m": 23_040,  # 2 x 30 x 3 x 64 x 2
    "gpt3-175b": 4_718_592,  # 2 x 96 x 96 x 128 x 2
    "llama-2-7b": 524_288,  # 2 x 32 x 32 x 128 x 2
    "llama-2-13b": 819_200,  # 2 x 40 x 40 x 128 x 2
    "llama-3.1-405b": 516_096,  # 2 x 126 x 8 x 128 x 2
    "mixtral-8x22b": 229_376,  # 2 x 56 x 8 x 128 x 2
    "qwen2.5-7b": 57_344,  # 2 x 28 x 4 x 128 x 2
    "qwen3-0.6b": 114_688,  # 2 x 28 x 8 x 128 x 2
    "qwen3-30b-a3b": 98_304,  # 2 x 48 x 4 x 128 x 2
    "qwen3-235b-a22b": 192_512,  # 2 x 94 x 4 x 128 x 2
    "kimi-k2": 70_272,
    "deepseek-v3.2": 78_324,  # 70,272 + 61 x (128 + 4): the indexer's 8-bit numbers and their float32 scale
    "gpt-oss-20b": 49_152,  # 2 x 24 x 8 x 64 x 2, every layer full
    "gpt-oss-120b": 73_728,  # 2 x 36 x 8 x 64 x 2, every layer full
    "gemma-3-4b": 139_264,  # 2 x 34 x 4 x 256 x 2, every layer full
    "gemma-3-27b": 507_904,  # 2 x 62 x 16 x 128 x 2, every layer full
    "gemma-4-31b": 901_120,  # 50 x 2 x 16 x 256 x 2 + 10 x 2 x 4 x 512 x 2
    "qwen3.5-27b": 65_536,  # 2 x 16 x 4 x 256 x 2: 16 of 64 layers
    "minimax-m2.5": 253_952,  # 2 x 62 x 8 x 128 x 2
    "mimo-v2-flash": 222_720,  # 9 x 4 x (192 + 128) x 2 + 39 x 8 x (192 + 128) x 2
}
FULL = {  # bytes per token of the layers that keep every token: what a token costs beyond the windows
    "gpt-oss-20b": 24_576,
    "gpt-oss-120b": 36_864,
    "gemma-3-4b": 20_480,  # 5 layers
    "gemma-3-27b": 81_920,  # 10 layers
    "gemma-4-31b": 81_920,  # 10 layers x 8,192
}
PARAMETERS = {  # published, in billions
    "llama-2-70b": 68.98,
    "llama-3.1-70b": 70.55,
    "llama-3.1-8b": 8.03,
    "mixtral-8x7b": 46.70,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.76,
    "deepseek-v3": 671.0,
    "smollm2-135m": 0.1345,
    "gpt3-175b": 174.6,
    "llama-2-7b": 6.738,
    "llama-2-13b": 13.016,
    "llama-3.1-405b": 405.85,
    "mixtral-8x22b": 140.6,
    "qwen2.5-7b": 7.616,
    "qwen3-0.6b": 0.596,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.1,
    "kimi-k2": 1026.4,
    "deepseek-v3.2": 671.0,  # 671 is published for V3; the indexer's weights are left out
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "gemma-3-4b": 3.88,
    "gemma-3-27b": 27.0,
    "gemma-4-31b": 30.7,
    "qwen3.5-27b": 27.0,
    "minimax-m2.5": 228.7,
    "mimo-v2-flash": 309.0,
}


@pytest.mark.parametrize("name", sorted(KV_BYTES))
def test_kv_bytes_per_token(name: str) -> None:
    assert load_model(name).kv_token_bytes() == KV_BYTES[name]


@pytest.mark.parametrize("name", sorted(FULL))
def test_kv_bytes_of_the_layers_that_keep_every_token(name: str) -> None:
    groups = kv_groups(load_model(name))
    assert sum(layers * token for layers, kind, _, token in groups if kind == "full") == FULL[name]
    assert sum(layers for layers, *_ in groups) == load_model(name).layers


def test_kv_groups_of_each_kind() -> None:
    assert kv_groups(load_model("gpt-oss-20b")) == [(12, "window", 128, 2048), (12, "full", None, 2048)]
    assert kv_groups(load_model("gemma-4-31b")) == [(50, "window", 1024, 16_384), (10, "full", None, 8192)]
    assert kv_groups(load_model("gemma-4-31b"), 8) == [(50, "window", 1024, 2048), (10, "full", None, 2048)]  # 4 heads on 8
    assert kv_groups(load_model("llama-3.1-8b")) == [(32, "full", None, 4096)]
    assert kv_groups(load_model("deepseek-v3"), 8) == [(61, "full", None, 1152)]


def test_a_linear_layer_keeps_a_state_and_no_tokens() -> None:
    # Qwen3.5-27B: 48 value heads x 128 x 128 x 4 B, and 3 inputs of the convolution over 2 x 16 x 128 + 48 x 128 channels x 2 B.
    linear, full = load_model("qwen3.5-27b").kept(2)
    assert (linear.layers, linear.token, linear.state) == (48, 0, (3_145_728 + 61_440) / 2)
    assert (full.layers, full.token, full.state) == (16, 2 * 2 * 256 * 2, 0)


def test_kinds_must_make_sense() -> None:
    base = load_model("gpt-oss-20b").model_dump()
    with pytest.raises(ValueError, match="25 layers are listed and the model has 24"):
        Model.model_validate({**base, "kinds": [{"layers": 25}]})
    with pytest.raises(ValueError, match="`window` goes with kind: window"):
        Layers(layers=1, window=128)
    with pytest.raises(ValueError, match="`window` goes with kind: window"):
        Layers(layers=1, kind="window")
    with pytest.raises(ValueError, match="`state` goes with kind: linear"):
        Layers(layers=1, kind="linear", projections=1)
    with pytest.raises(ValueError, match="needs `projections`"):
        Layers(layers=1, kind="linear", state=1)


def test_weights_of_mixed_precision() -> None:
    # Published checkpoint sizes: 65.2 GB and 13.8 GB (experts in MXFP4).
    assert load_model("gpt-oss-120b").weights / 1e9 == pytest.approx(65.2, rel=0.01)
    assert load_model("gpt-oss-20b").weights / 1e9 == pytest.approx(13.8, rel=0.01)


def test_kv_bytes_are_split_by_heads_and_replicated_below_one_head_per_device() -> None:
    model = load_model("llama-3.1-70b")  # 8 KV heads
    assert model.kv_token_bytes(8) == 40_960
    assert model.kv_token_bytes(16) == 40_960
    assert load_model("deepseek-v3").kv_token_bytes(8) == 70_272  # the latent is on every device


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_parameters_match_the_published_count(name: str) -> None:
    assert load_model(name).parameters / 1e9 == pytest.approx(PARAMETERS[name], rel=0.005)


def test_active_parameters_of_mixtures() -> None:
    # Published: Mixtral 12.9 B and DeepSeek-V3 37 B active, each with the embedding (2 x 32000 x 4096 and 2 x 129280 x 7168).
    mixtral, deepseek = load_model("mixtral-8x7b"), load_model("deepseek-v3")
    assert (mixtral.active_parameters + 2 * mixtral.head_parameters) / 1e9 == pytest.approx(12.9, rel=0.01)
    assert (deepseek.active_parameters + 2 * deepseek.head_parameters) / 1e9 == pytest.approx(37.5, rel=0.02)


def test_every_profile_loads_and_names_its_source() -> None:
    assert set(names("models")) == set(KV_BYTES)
    for name in names("models"):
        assert load_model(name).source
    for name in names("hardware"):
        assert load_hardware(name).source
        assert load_hardware(name).host_link or name == "two-core-cpu"
    for name in names("engines"):
        assert load_engine(name).source
    for name in names("tiers"):
        assert load_tier(name).source


def test_a_kind_without_profiles_has_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "root", lambda: tmp_path)
    assert names("codecs") == []
    with pytest.raises(ValueError, match="unknown profile 'host-ddr5' in tiers"):
        load_tier("host-ddr5")


def test_tiers_are_ordered_as_hardware_is() -> None:
    host, gen5, gen4, sata = (load_tier(name) for name in ("host-ddr5", "ssd-nvme-gen5", "ssd-nvme-gen4", "ssd-sata"))
    assert host.read > gen5.read > gen4.read > sata.read
    assert host.latency < gen5.latency < sata.latency
    assert host.endurance is None
    assert gen4.endurance is not None
    assert gen4.write < gen4.read
    with pytest.raises(ValueError, match="unknown profile 'ssd-gen5' in tiers; did you mean 'ssd-nvme-gen5'"):
        load_tier("ssd-gen5")


def test_idle_power_is_below_the_limit() -> None:
    for hardware in map(load_hardware, names("hardware")):
        assert hardware.idle is None or hardware.power is None or hardware.idle < 0.3 * hardware.power


@pytest.mark.parametrize("text", ["h100 x8", "h100x8", "8xh100", "8 x h100", "H100 X8"])
def test_device_counts(text: str) -> None:
    hardware = load_hardware(text)
    assert (hardware.name, hardware.count) == ("h100", 8)


def test_device_count_of_names_that_hold_an_x() -> None:
    assert load_hardware("rtx-4090").count == 1
    assert (load_hardware("2xrtx-4090").name, load_hardware("rtx-4090 x2").count) == ("rtx-4090", 2)


def test_device_count_given_twice() -> None:
    assert load_hardware("h100 x8", 8).count == 8
    with pytest.raises(ValueError, match="says 8 devices and count says 4"):
        load_hardware("h100 x8", 4)


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown profile 'llama-3-8b' in models; did you mean 'llama-3.1-8b'"):
        load_model("llama-3-8b")
    with pytest.raises(ValueError, match="did you mean 'h100'"):
        load_hardware("h10")


def test_engine_overrides_are_validated() -> None:
    assert load_engine("vllm", block=512).block == 512
    assert load_engine("vllm", gpu_memory_utilization="85%").gpu_memory_utilization == pytest.approx(0.85)
    with pytest.raises(ValueError, match="no field 'blok'; did you mean 'block'"):
        load_engine("vllm", blok=512)
    with pytest.raises(ValueError, match=r"block: .*greater than or equal to 1 \(got 0\)"):
        load_engine("vllm", block=0)
    with pytest.raises(ValueError, match="max_num_batched_tokens 100 is below max_num_seqs 256"):
        load_engine("vllm", max_num_batched_tokens=100)


def test_blocks_against_recorded_vllm_on_rtx_4090() -> None:
    # vLLM 0.19 logged 2,588 blocks at utilization 0.9 (LLMServingSim, meta.json). `reserve` was fitted to this one run.
    engine = load_engine("vllm", gpu_memory_utilization=0.9)
    assert kv_blocks(load_model("llama-3.1-8b"), load_hardware("rtx-4090"), engine) == pytest.approx(2588, rel=0.005)


def test_room_against_measured_a100() -> None:
    # 55.1 GiB measured for Llama-3-8B on an 80 GB A100 at 0.9 (another tool's record); nothing was fitted to it.
    room = kv_room(load_model("llama-3.1-8b"), load_hardware("a100-80gb"), load_engine("vllm", gpu_memory_utilization=0.9))
    assert room / 2**30 == pytest.approx(55.1, rel=0.02)


def test_block_count_by_hand() -> None:
    # Llama-3.1-70B on 8 x H100, 16-token blocks.
    # Weights 80 x (8192 x 128 x (2 x 64 + 2 x 8) + 3 x 8192 x 28672) + 2 x 8192 x 128256 = 70,552,387,584 parameters
    # (norms left out) = 141,104,775,168 B, an eighth of it 17,638,096,896.
    model, hardware, engine = load_model("llama-3.1-70b"), load_hardware("h100 x8"), load_engine("vllm")
    assert model.parameters == 70_552_387_584
    # Activations: 2048 x 2 x (4 x 8192 + 2 x 28672 / 8) = 163,577,856; logits 256 x 128256 x 8 = 262,668,288.
    assert activation_bytes(model, 8, engine) == 163_577_856 + 262_668_288
    # 85,899,345,920 x 0.92 = 79,027,398,246.4; less 17,638,096,896, 426,246,144 and 805,306,368 leaves 60,157,748,838.4;
    # a block is 16 x 40,960 = 655,360 B: 91,793.4 of them.
    assert kv_blocks(model, hardware, engine) == 91_793


def test_block_count_of_a_hybrid_by_hand() -> None:
    # gpt-oss-120b on one H100: a block is 18 layers x 16 tokens x 2,048 B = 589,824 B, not 36 layers' worth.
    model, hardware, engine = load_model("gpt-oss-120b"), load_hardware("h100"), load_engine("vllm-large")
    assert kv_blocks(model, hardware, engine) == int(kv_room(model, hardware, engine) // 589_824)


def test_a_model_that_does_not_fit_says_what_would() -> None:
    # 70.55 B x 2 bytes = 131.4 GiB of weights against 80 GiB x 0.92.
    with pytest.raises(ValueError, match=r"weights 131.4 GiB, memory 80 GiB, of which 92% may be used; 2 of them would do"):
        kv_blocks(load_model("llama-3.1-70b"), load_hardware("h100"), load_engine("vllm"))
    # GPT-3's 174.6 B x 2 = 325 GiB over 32 GiB x 0.92: 16 devices leave 9.1 GiB each.
    with pytest.raises(ValueError, match="16 of them would do"):
        kv_blocks(load_model("gpt3-175b"), load_hardware("v100-32gb x8"), load_engine("vllm"))
