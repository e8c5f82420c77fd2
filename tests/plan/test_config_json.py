"""Hugging Face config.json files: real ones against the profiles, and broken ones against their words."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.plan.config_json import read
from kvbench.profile import load_model
from kvbench.shape import Model

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
LLAMA: dict[str, Any] = json.loads((CONFIGS / "Llama-3.1-8B.json").read_text())
GEMMA_4: dict[str, Any] = {  # the numbers of google/gemma-4-31b-it that decide sizes
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text", "num_hidden_layers": 60, "hidden_size": 5376, "intermediate_size": 21504,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256, "global_head_dim": 512,
        "num_global_key_value_heads": 4, "attention_k_eq_v": True, "sliding_window": 1024, "vocab_size": 262144,
        "max_position_embeddings": 262144, "num_experts": None, "enable_moe_block": False, "num_kv_shared_layers": 0,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    },
}  # fmt: skip
GEMMA_3: dict[str, Any] = {  # google/gemma-3-4b-it leaves to its class what is not here
    "model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
}  # fmt: skip


def sizes(model: Model) -> dict[str, Any]:
    """All that decides sizes: everything but where it comes from, kinds in any order."""
    found = model.model_dump(exclude={"name", "source", "head_dim"} if model.latent else {"name", "source"})
    return found | {"weight_bytes": round(model.weight_bytes, 4), "kinds": sorted(map(str, found["kinds"]))}


def written(folder: Path, **changes: Any) -> Path:
    """Llama-3.1-8B's file with keys replaced, or removed (...)."""
    data = {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize(
    ("file", "profile"),
    [
        ("Llama-3.1-8B", "llama-3.1-8b"),
        ("Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("gpt-oss-120b", "gpt-oss-120b"),
        ("DeepSeek-V3.2", "deepseek-v3.2"),
        ("Kimi-K2-Instruct", "kimi-k2"),
        ("Qwen3.5-27B", "qwen3.5-27b"),
        ("MiMo-V2-Flash", "mimo-v2-flash"),
    ],
)
def test_real_files_give_what_the_profiles_say(file: str, profile: str) -> None:
    model, _ = read(CONFIGS / f"{file}.json")
    assert sizes(model) == sizes(load_model(profile))
    assert model.name == file


def test_defaults_of_classes_whose_files_leave_keys_out(tmp_path: Path) -> None:
    for data, profile in ((GEMMA_3, "gemma-3-4b"), (GEMMA_4, "gemma-4-31b")):
        (tmp_path / "config.json").write_text(json.dumps(data))
        model, notes = read(tmp_path)
        assert sizes(model) == sizes(load_model(profile))
        assert any("text_config alone" in note for note in notes)


def test_a_window_in_every_layer() -> None:
    model, _ = read(CONFIGS / "Phi-mini-MoE-instruct.json")
    assert [(part.layers, part.kind, part.window) for part in model.kinds] == [(32, "window", 2047)]
    assert model.parameters / 1e9 == pytest.approx(7.65, rel=0.005)  # published: 7.6 B


def test_experts() -> None:
    model, _ = read(CONFIGS / "Qwen3-30B-A3B-Instruct-2507.json")
    assert model.experts is not None
    assert (model.experts.count, model.experts.active, model.experts.intermediate) == (128, 8, 768)
    assert sizes(model) | {"max_len": 40_960} == sizes(load_model("qwen3-30b-a3b"))


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"sliding_window": None}, []),
        ({"sliding_window": 4096}, [(32, "window", 4096)]),
        ({"sliding_window": 4096, "use_sliding_window": False}, []),
        (
            {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 20},
            [(20, "full", None), (12, "window", 4096)],
        ),
        ({"sliding_window": 512, "sliding_window_pattern": 4}, [(24, "window", 512), (8, "full", None)]),
        ({"layer_types": ["full_attention"] * 32, "sliding_window": 512}, []),
        (
            {"layer_types": ["sliding_attention", "full_attention"] * 16, "sliding_window": 512},
            [(16, "window", 512), (16, "full", None)],
        ),
    ],
)
def test_which_layers_have_windows(tmp_path: Path, changes: dict[str, Any], kinds: list[tuple[int, str, int | None]]) -> None:
    model, _ = read(written(tmp_path, **changes))
    assert [(part.layers, part.kind, part.window) for part in model.kinds] == kinds


@pytest.mark.parametrize(
    ("scheme", "mean"),
    [
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, (4 + 20 / 128) / 8),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, 1.0),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5 / 8),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 1.0),
        ({"quant_method": "something new"}, 2.0),
    ],
)
def test_bytes_per_weight_of_quantized_checkpoints(tmp_path: Path, scheme: dict[str, Any], mean: float) -> None:
    model, notes = read(written(tmp_path, quantization_config=scheme))
    assert model.weight_bytes == pytest.approx(mean)
    assert len(notes) == 1


def test_a_quantization_in_a_file_of_its_own(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}')
    model, notes = read(tmp_path)
    assert model.weight_bytes == 1
    assert any("--kv-dtype fp8" in note for note in notes)
    (tmp_path / "hf_quant_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"hf_quant_config\.json is not a JSON object"):
        read(tmp_path)


def test_assumptions_are_said(tmp_path: Path) -> None:
    _, notes = read(written(tmp_path, model_type="brand_new", num_key_value_heads=...))
    assert any("'brand_new' is unknown here" in note for note in notes)
    assert any("num_key_value_heads is not given: 32" in note for note in notes)
    model, _ = read(written(tmp_path, num_key_value_heads=..., multi_query=True))
    assert model.kv_heads == 1


def test_old_names_of_keys(tmp_path: Path) -> None:
    data = {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
        "n_inner": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(data))
    model, _ = read(tmp_path)
    assert model.parameters / 1e6 == pytest.approx(124.4, rel=0.002)  # GPT-2 small
    assert model.kv_token_bytes() == 2 * 12 * 12 * 64 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": ...}, r"config\.json: num_hidden_layers is missing \(also looked for n_layer, num_layers\)"),
        ({"num_hidden_layers": "many"}, r"num_hidden_layers is 'many', not a whole number of at least 1"),
        ({"num_attention_heads": 0}, r"num_attention_heads is 0, not a whole number"),
        ({"hidden_size": True}, r"hidden_size is True, not a whole number"),
        ({"vocab_size": 1.5}, r"vocab_size is 1\.5"),
        ({"hidden_size": 4100}, r"head_dim is missing, and hidden_size 4100 is no multiple of 32 heads"),
        ({"layer_types": ["full_attention"]}, r"layer_types has 1 entries and the model 32 layers"),
        ({"layer_types": "full"}, r"layer_types has 'full' and the model 32 layers"),
        ({"layer_types": ["mystery"] * 32}, r"layer_types has 'mystery'; known are full_attention"),
        ({"layer_types": ["sliding_attention"] * 32}, r"sliding_window is missing"),
        ({"quantization_config": "fp8"}, r"quantization_config is 'fp8', not an object"),
        ({"hybrid_override_pattern": "M-M*"}, r"hybrid_override_pattern means a pattern of Mamba, attention and MLP layers"),
        ({"block_configs": [{}]}, r"block_configs means layers that differ"),
        ({"compress_ratios": [4]}, r"compress_ratios means keys and values compressed"),
        ({"is_encoder_decoder": True}, r"is_encoder_decoder means an encoder"),
        ({"model_type": "llama4_text"}, r"attention_chunk_size means attention in chunks"),
        ({"kv_lora_rank": 512}, r"qk_rope_head_dim is missing"),
        ({"num_local_experts": 8}, r"num_experts_per_tok is missing"),
        ({"num_local_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2}, r"moe_layer_freq above 1"),
    ],
)
def test_broken_files_are_named_with_their_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(written(tmp_path, **changes))


def test_keys_of_a_nested_model_are_named_in_full(tmp_path: Path) -> None:
    inner = {key: value for key, value in GEMMA_4["text_config"].items() if key != "hidden_size"}
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA_4, "text_config": inner}))
    with pytest.raises(ValueError, match=r"config\.json: text_config\.hidden_size is missing"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[1]", "holds list, not the object"), ("\x00\x01", "is not JSON")]
)
def test_what_is_no_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "config.json")
    with pytest.raises(ValueError, match="no file"):
        read(tmp_path / "missing.json")


@pytest.mark.parametrize(  # the defaults of transformers 5.19's configuration classes, where a file leaves them out
    ("changes", "tied", "kv_heads"),
    [
        ({"model_type": "gemma"}, True, 8),
        ({"model_type": "opt"}, True, 8),
        ({"model_type": "bloom"}, True, 8),
        ({"model_type": "starcoder2"}, True, 8),
        ({"model_type": "smollm3"}, True, 8),
        ({"model_type": "ernie4_5"}, True, 8),
        ({"model_type": "gpt_bigcode", "num_key_value_heads": ...}, True, 1),
        ({"model_type": "gpt_bigcode", "num_key_value_heads": ..., "multi_query": False}, True, 32),
        ({"model_type": "falcon", "num_key_value_heads": ...}, True, 1),
        ({"model_type": "falcon", "num_key_value_heads": ..., "multi_query": False}, True, 32),
        ({"model_type": "falcon", "num_key_value_heads": ..., "new_decoder_architecture": True, "num_kv_heads": 8}, True, 8),
        ({"model_type": "gpt_neox"}, False, 8),
        ({"model_type": "phi"}, False, 8),
        ({"model_type": "nemotron"}, False, 8),
        ({"model_type": "qwen2"}, False, 8),
    ],
)
def test_defaults_of_configuration_classes(tmp_path: Path, changes: dict[str, Any], tied: bool, kv_heads: int) -> None:
    model, _ = read(written(tmp_path, **{"tie_word_embeddings": ..., **changes}))
    assert (model.tied_embeddings, model.kv_heads) == (tied, kv_heads)


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"model_type": "qwen2"}, []),
        ({"model_type": "qwen3_moe"}, []),
        ({"model_type": "qwen2", "use_sliding_window": True}, [(28, "full"), (4, "window")]),
        ({"model_type": "qwen3_moe", "use_sliding_window": True, "max_window_layers": 20}, [(32, "window")]),
        ({"model_type": "qwen2_moe", "use_sliding_window": True, "max_window_layers": 21}, [(11, "window"), (21, "full")]),
    ],
)
def test_which_layers_of_qwen_have_windows(tmp_path: Path, changes: dict[str, Any], kinds: list[tuple[int, str]]) -> None:
    model, _ = read(written(tmp_path, **{"sliding_window": 4096, **changes}))
    assert [(part.layers, part.kind) for part in model.kinds] == kinds


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": []}, 0),
        ({"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0, 5, 5, 99]}, 2),
        ({"model_type": "ernie4_5_moe"}, 1),  # 64 experts, of which 6 are active and 2 shared, from the second layer on
        ({"model_type": "ernie4_5_moe", "moe_layer_start_index": 3, "moe_layer_end_index": 30}, 4),
        ({"model_type": "ernie4_5_moe", "moe_layer_interval": 2}, 16),
        ({"model_type": "ernie4_5_moe", "moe_layer_interval": 3, "moe_layer_start_index": 4, "moe_layer_end_index": -1}, 23),
    ],
)
def test_which_layers_have_experts(tmp_path: Path, changes: dict[str, Any], dense: int) -> None:
    model, _ = read(written(tmp_path, **changes))
    assert model.experts is not None
    assert model.experts.dense_layers == dense
    if changes["model_type"] == "ernie4_5_moe":
        assert (model.experts.count, model.experts.active, model.experts.shared, model.experts.intermediate) == (64, 6, 2, 1536)
