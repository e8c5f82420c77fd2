"""A Hugging Face config.json as a Model: what of it decides sizes. What would change them and is not understood is refused.

Keys are those of the transformers library's configuration classes; a class's defaults stand in where its files leave keys out.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.plan.weights import weight_bytes
from kvbench.shape import Experts, Latent, Layers, Model

_NESTED = ("text_config", "llm_config", "language_config")  # where multimodal models keep their language model
_NAMES: dict[str, tuple[str, ...]] = {  # our key: theirs, the common one first
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
    "max_len": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "active": ("num_experts_per_tok", "top_k_experts", "experts_per_token", "num_experts_per_token", "moe_k"),
    "expert_inner": ("moe_intermediate_size", "expert_intermediate_size"),
    "shared": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "dense": ("first_k_dense_replace",),
}
_TIED = ("bloom", "ernie4_5", "gemma", "gemma4_text", "gpt2", "opt", "smollm3", "starcoder2")
# What files leave out, as the classes of transformers 5.19 have it (models/*/configuration_*.py).
_DEFAULTS: dict[str, dict[str, Any]] = {
    **{kind: {"tie_word_embeddings": True} for kind in _TIED},  # all other classes of _KNOWN: False
    "gemma3_text": {  # Gemma3TextConfig
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
        "max_position_embeddings": 131072, "sliding_window_pattern": 6, "tie_word_embeddings": True,
    },
    "mistral": {"sliding_window": 4096},  # MistralConfig; null where a file says so
    "gemma2": {"sliding_window_pattern": 2, "tie_word_embeddings": True},  # Gemma2Config: every other layer
    "falcon": {"multi_query": True, "tie_word_embeddings": True},  # FalconConfig; GPTBigCodeConfig alike
    "gpt_bigcode": {"multi_query": True, "tie_word_embeddings": True},
    **{kind: {"use_sliding_window": False, "max_window_layers": 28} for kind in ("qwen2", "qwen2_moe", "qwen3")},
    "qwen3_moe": {"use_sliding_window": False},
    "ernie4_5_moe": {  # Ernie4_5_MoeConfig
        "moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_intermediate_size": 1536,
        "moe_layer_start_index": 1, "tie_word_embeddings": True,
    },
}  # fmt: skip
_UNGATED = {"gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2", "nemotron"}
_KNOWN = _UNGATED | set(_DEFAULTS)  # others are read by the same keys, and a note says so
_KNOWN |= {"llama", "mixtral", "phi3", "phimoe", "olmo2", "granite", "internlm2", "gpt_oss", "mimo_v2_flash", "qwen3_next"}
_KNOWN |= {"qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v2", "deepseek_v3", "deepseek_v32"}
_KNOWN |= {"kimi_k2", "glm_moe_dsa", "glm4_moe", "minimax_m2"}
_REFUSED: dict[str, str] = {  # keys that change what is kept in ways that are not modelled here
    "block_configs": "layers that differ one by one",
    "hybrid_override_pattern": "a pattern of Mamba, attention and MLP layers",
    "layers_block_type": "a pattern of Mamba and attention layers",
    "attn_layer_period": "a pattern of Mamba and attention layers",
    "attn_layer_indices": "a pattern of Mamba and attention layers",
    "attn_type_list": "a pattern of linear and full attention",
    "block_types": "a pattern of recurrent and attention layers",
    "full_attn_idxs": "a pattern of convolutions and attention layers",
    "mamba_d_state": "Mamba layers",
    "mamba_d_ssm": "Mamba layers",
    "compress_ratios": "keys and values compressed over tokens",
    "linear_attn_config": "linear attention of another form than linear_num_value_heads",
    "num_kv_shared_layers": "layers that read other layers' keys and values",
    "is_encoder_decoder": "an encoder beside the decoder",
}
_MOST = 1 << 40  # of any number; a larger one is no model's
_LAYERS = 10_000
_LLAMA4 = ("llama4", "llama4_text")  # attention in chunks: a chunk's start is forgotten at once, unlike a window's


@dataclass(slots=True)
class Config:
    """One config.json while it is read. Errors name the file and the key; `notes` say what was assumed."""

    file: Path
    data: Mapping[str, Any]
    at: str  # "text_config." where the language model is nested
    outer: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)

    def fault(self, key: str, text: str) -> ValueError:
        return ValueError(f"{self.file}: {self.at}{key} {text}")

    def count(self, *keys: str, default: int | None = None, low: int = 1, high: int = _MOST) -> int:
        """The first of `keys` that is there and not null, as a whole number."""
        for key in keys:
            value = self.data.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise self.fault(key, f"is {value!r}, not a whole number of at least {low}")
            if value > high:
                raise self.fault(key, f"is {value:.4g}: more than {high:,} is no model's")
            return value
        if default is None:
            also = f" (also looked for {', '.join(keys[1:])})" if keys[1:] else ""
            raise self.fault(keys[0], f"is missing{also}: without it there is no size")
        return default

    def named(self, name: str, default: int | None = None, low: int = 1, high: int = _MOST) -> int:
        return self.count(*_NAMES[name], default=default, low=low, high=high)

    def kind(self) -> str:
        return str(self.data.get("model_type") or self.outer.get("model_type") or "")


def read(path: Path) -> tuple[Model, list[str]]:
    """The model of a config.json or of a folder with one, and notes on what was assumed. ValueError names file and key."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} has no config.json" if path.is_dir() else f"no file {path}")
    try:
        data = json.loads(file.read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{file} holds {type(data).__name__}, not the object that a config.json is")
    nested = next((key for key in _NESTED if isinstance(data.get(key), dict)), None)
    inner = data[nested] if nested else data
    kind = str(inner.get("model_type") or f"{data.get('model_type')}_text")
    config = Config(file, {**_DEFAULTS.get(kind, {}), **inner}, f"{nested}." if nested else "", data)
    for key, why in _REFUSED.items():
        if config.data.get(key):
            raise config.fault(key, f"means {why}, which kvbench does not know: no size can be given")
    if config.kind() in _LLAMA4:
        raise config.fault("attention_chunk_size", "means attention in chunks, which kvbench does not know: no size can be given")
    if config.kind() not in _KNOWN:
        config.notes.append(f"model_type {config.kind()!r} is unknown here: read as an ordinary transformer by its keys")
    if nested:
        config.notes.append(f"the language model of {nested} alone: vision and audio parts are left out")
    return _model(config), config.notes


def _model(config: Config) -> Model:
    layers, hidden, heads = config.named("layers", high=_LAYERS), config.named("hidden"), config.named("heads")
    latent = _latent(config)
    tied = config.data.get("tie_word_embeddings", config.outer.get("tie_word_embeddings", False))
    experts = _experts(config, layers)
    inner = 4 * hidden if config.kind() in _UNGATED else experts.intermediate if experts else None
    named = any(config.data.get(key) is not None for key in ("head_dim", "attention_head_dim"))
    if not named and hidden % heads and latent is None:
        raise config.fault("head_dim", f"is missing, and hidden_size {hidden} is no multiple of {heads} heads")
    head_dim = latent.v_dim if latent else config.count("head_dim", "attention_head_dim", default=hidden // heads)
    one = config.data.get("multi_query") and not config.data.get("new_decoder_architecture")  # whatever else Falcon's files say
    kv_heads = 1 if one else config.named("kv_heads", heads)
    if not one and not any(config.data.get(key) for key in _NAMES["kv_heads"]):
        config.notes.append(f"num_key_value_heads is not given: {kv_heads}, as such models have it")
    value_dim = config.count("v_head_dim", default=head_dim) if latent is None else head_dim
    model = Model(
        name=_name(config),
        source=f"config.json: {config.kind() or 'no model_type'}",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=value_dim if value_dim != head_dim else None,
        intermediate=config.named("intermediate", inner),
        mlp_matrices=2 if config.kind() in _UNGATED else 3,
        vocab=config.named("vocab"),
        tied_embeddings=bool(tied),
        positions=config.named("max_len") if config.kind() in ("gpt2", "opt") else 0,
        max_len=config.named("max_len"),
        latent=latent,
        experts=experts,
        kinds=_kinds(config, layers),
    )
    scheme = config.outer.get("quantization_config") or config.data.get("quantization_config") or _beside(config.file)
    if scheme is not None and not isinstance(scheme, dict):
        raise ValueError(f"{config.file}: quantization_config is {scheme!r}, not an object")
    mean, notes = weight_bytes(scheme, model)
    config.notes += notes
    return model.model_copy(update={"weight_bytes": mean})


def _beside(file: Path) -> Any:
    """The quantization that TensorRT Model Optimizer writes into a file of its own."""
    other = file.with_name(file.name.replace("config.json", "hf_quant_config.json"))
    try:
        return json.loads(other.read_text()).get("quantization") if other != file and other.is_file() else None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError, AttributeError) as error:
        raise ValueError(f"{other} is not a JSON object: {error}") from None


def _name(config: Config) -> str:
    folder = config.file.resolve().parent.name
    return folder if config.file.name == "config.json" and folder else config.file.stem.removesuffix("_config")


def _latent(config: Config) -> Latent | None:
    if config.data.get("kv_lora_rank") is None:
        return None
    index = config.count("index_head_dim", default=0, low=0)
    return Latent(
        kv_rank=config.count("kv_lora_rank"),
        rope_dim=config.count("qk_rope_head_dim"),
        q_rank=config.count("q_lora_rank", default=0, low=0),
        nope_dim=config.count("qk_nope_head_dim"),
        v_dim=config.count("v_head_dim"),
        index_bytes=index + 4 * -(-index // 128),  # 8-bit numbers and a float32 scale per 128 of them
    )


def _experts(config: Config, layers: int) -> Experts | None:
    count = config.named("experts", 0, low=0)
    if not count or config.data.get("enable_moe_block") is False:
        return None
    if config.data.get("enable_moe_block"):
        raise config.fault("enable_moe_block", "means a dense MLP beside the experts, which kvbench does not know")
    inner = config.named("expert_inner", config.named("intermediate", 0, low=0) or None)
    shared_inner = config.count("shared_expert_intermediate_size", "share_expert_dim", default=0, low=0)
    frequency = config.data.get("moe_layer_freq")
    dense = config.named("dense", 0, low=0)
    if isinstance(alone := config.data.get("mlp_only_layers"), list):  # Qwen2MoeConfig, Qwen3MoeConfig
        dense = len({at for at in alone if at in range(layers)})
    if config.data.get("moe_layer_start_index") is not None:
        dense = layers - len(_ernie(config, layers))
    if isinstance(frequency, list):
        dense = len([flag for flag in frequency if not flag])
    elif (isinstance(frequency, int) and frequency > 1) or config.count("decoder_sparse_step", default=1) > 1:
        raise config.fault("moe_layer_freq", "above 1 (or decoder_sparse_step) is not known here: every layer has experts")
    return Experts(
        count=count,
        active=config.named("active"),
        intermediate=inner,
        shared=-(-shared_inner // inner) if shared_inner else config.named("shared", 0, low=0),
        dense_layers=min(dense, layers),
    )


def _ernie(config: Config, layers: int) -> range:
    """The layers, from 0, that have experts (Ernie4_5_MoeDecoderLayer): every so-manyth of those from start to end."""
    every = config.count("moe_layer_interval", default=1)
    last = config.data.get("moe_layer_end_index", -1)
    stop = layers if last in (None, -1) else min(layers, config.count("moe_layer_end_index", low=0) + 1)
    first = -(-(config.count("moe_layer_start_index", low=0) + 1) // every) * every - 1
    return range(first, stop, every)


def _kinds(config: Config, layers: int) -> tuple[Layers, ...]:
    """Which layers keep what; () where all keep everything."""
    pattern = _pattern(config, layers)
    parts = []
    for kind in dict.fromkeys(pattern):
        count = pattern.count(kind)
        if kind == "linear_attention":
            parts.append(_linear(config, count))
        elif kind in ("sliding_attention", "chunked_attention"):
            own = {"kv_heads": "swa_num_key_value_heads", "head_dim": "swa_head_dim", "v_head_dim": "swa_v_head_dim"}
            given = {ours: config.count(theirs) for ours, theirs in own.items() if config.data.get(theirs) is not None}
            parts.append(Layers(layers=count, kind="window", window=config.count("sliding_window"), **given))
        elif kind in ("full_attention", "deepseek_sparse_attention"):  # the latter reads less, and keeps all
            parts.append(_full(config, count))
        else:
            raise config.fault("layer_types", f"has {kind!r}; known are full_attention, sliding_attention, linear_attention")
    return () if parts == [Layers(layers=layers)] else tuple(parts)


def _pattern(config: Config, layers: int) -> list[str]:
    """The kind of every layer, in transformers' words."""
    types, flags = config.data.get("layer_types"), config.data.get("hybrid_layer_pattern")
    if isinstance(flags, list):
        types = ["sliding_attention" if flag else "full_attention" for flag in flags]
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            have = f"{len(types)} entries" if isinstance(types, list) else repr(types)
            raise config.fault("layer_types", f"has {have} and the model {layers} layers")
        return [str(name) for name in types]
    if config.data.get("sliding_window") is None or config.data.get("use_sliding_window") is False:
        return ["full_attention"] * layers
    if (every := config.count("sliding_window_pattern", default=0, low=0)) > 1:
        return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    used, whole = bool(config.data.get("use_sliding_window")), config.count("max_window_layers", default=0, low=0)
    if used and config.kind() == "qwen2_moe":  # Qwen2MoeConfig: every other one of the first max_window_layers
        return ["full_attention" if i % 2 or i >= whole else "sliding_attention" for i in range(layers)]
    whole = 0 if not used or config.kind() == "qwen3_moe" else whole  # Qwen3MoeAttention: all of them
    return ["full_attention"] * min(whole, layers) + ["sliding_attention"] * max(0, layers - whole)


def _full(config: Config, count: int) -> Layers:
    """Gemma 4's global layers have heads of their own; Qwen3.5's queries carry a gate as wide as they are."""
    if config.data.get("global_head_dim") is not None:
        own, head_dim = config.count("num_global_key_value_heads", *_NAMES["kv_heads"]), config.count("global_head_dim")
        values = 0 if config.data.get("attention_k_eq_v") else own  # projected once, and kept twice
        weights = config.named("hidden") * head_dim * (2 * config.named("heads") + own + values)
        return Layers(layers=count, kv_heads=own, head_dim=head_dim, projections=weights)
    if config.data.get("attn_output_gate"):
        heads, head_dim = config.named("heads"), config.count("head_dim")
        weights = config.named("hidden") * head_dim * (3 * heads + 2 * config.named("kv_heads", heads))
        return Layers(layers=count, projections=weights)
    return Layers(layers=count)


def _linear(config: Config, count: int) -> Layers:
    """Gated delta rule: a key x value matrix per value head, and the last inputs of a short convolution (16-bit)."""
    key_heads, value_heads = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    key_dim, value_dim = config.count("linear_key_head_dim"), config.count("linear_value_head_dim")
    mixed = 2 * key_heads * key_dim + value_heads * value_dim
    wide = 4 if config.data.get("mamba_ssm_dtype", "float32") == "float32" else 2
    state = value_heads * key_dim * value_dim * wide + (config.count("linear_conv_kernel_dim") - 1) * mixed * 2
    hidden = config.named("hidden")
    weights = hidden * (mixed + value_heads * value_dim + 2 * value_heads) + value_heads * value_dim * hidden
    return Layers(layers=count, kind="linear", state=state, projections=weights)
