"""Bytes per weight of a quantized checkpoint, from the `quantization_config` of its config.json."""

from collections.abc import Mapping
from typing import Any

from kvbench.shape import Model


def weight_bytes(scheme: Mapping[str, Any] | None, model: Model) -> tuple[float, list[str]]:
    """(mean bytes per weight, notes). What stays at 16 bits is told apart for MXFP4 only, where it is all but the experts."""
    if scheme is None:
        return 2.0, []
    notes = []
    method = str(scheme.get("quant_method", "")).lower()
    if scheme.get("kv_cache_scheme") is not None or scheme.get("kv_cache_quant_algo"):
        notes.append("the checkpoint names a KV cache of its own precision: --kv-dtype fp8 sizes an 8-bit one")
    if method == "mxfp4":
        routed = model.expert_layers * (model.experts.count if model.experts else 0) * model.expert_parameters
        return 2 - routed / model.parameters * (2 - 4.25 / 8), notes  # 4 bits and an 8-bit scale per 32 weights
    bits = _bits(scheme, method)
    if bits is None:
        return 2.0, [*notes, f"quantization_config ({method or 'no quant_method'}) does not say how many bits: taken as 16"]
    notes.append(f"weights taken as {bits:g} bits each, scales included; what is left at 16 bits is not told apart")
    return bits / 8, notes


def _bits(scheme: Mapping[str, Any], method: str) -> float | None:
    """Bits per weight with their scales (a 16-bit scale and a zero per group; NVFP4: an 8-bit scale per 16)."""
    algorithm = str(scheme.get("quant_algo", "")).upper()
    if method in ("fp8", "fbgemm_fp8") or algorithm == "FP8":
        return 8
    if algorithm == "NVFP4":
        return 4.5
    groups = scheme.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    own = first.get("weights") if isinstance(first, dict) else None
    weights: Mapping[str, Any] = own if isinstance(own, dict) else scheme
    loaded = 4 if scheme.get("load_in_4bit") else 8 if scheme.get("load_in_8bit") else None  # bitsandbytes
    bits, group = weights.get("num_bits", weights.get("bits", loaded)), weights.get("group_size")
    if isinstance(bits, bool) or not isinstance(bits, int) or bits < 1:
        return None
    return bits + (16 + bits) / group if isinstance(group, int) and group > 0 and bits < 8 else float(bits)
