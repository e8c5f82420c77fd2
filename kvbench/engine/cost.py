"""How long one step takes: a roofline with its terms apart. Formulas and their limits: docs/engine.md.

Everything is per device of a tensor-parallel group: weights, heads and FLOPs are split by its size, latent KV is not.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvbench.core import Seconds
from kvbench.engine import Cost, Step
from kvbench.profile import EngineProfile, Hardware, Model

ACTIVATION_BYTES = 2  # activations are 16-bit whatever the weights are


class Stored(NamedTuple):
    """KV that is not in the model's own form. bytes: per token of context and device; what decoding takes in seconds: in every
    step that decodes, and per token of context."""

    bytes: float
    step: float
    token: float


@dataclass(frozen=True, slots=True)
class Terms:
    """Seconds of one step by cause. `linear` is the pair of compute and weight reads, overlapped; the rest add up."""

    compute: Seconds  # FLOPs of the matrix products with weights (inside `linear`)
    weights: Seconds  # reading those weights (inside `linear`)
    linear: Seconds
    prefill_attention: Seconds
    decode_attention: Seconds
    activations: Seconds
    communication: Seconds
    overhead: Seconds

    @property
    def total(self) -> Seconds:
        attention = self.prefill_attention + self.decode_attention
        return self.linear + attention + self.activations + self.communication + self.overhead


class Part(NamedTuple):
    """Layers of one kind in a model that has several, together and per device: what one token of context costs."""

    window: int | None
    flops: float
    bytes: float


def _parts(model: Model, count: int) -> list[Part]:
    """Kinds of layers that attend; [] where all are full attention of one shape, or latent."""
    kept = model.kept(count)
    if model.latent is not None or all(part.kind == "full" for part in kept):
        return []
    found = []
    for layers, keeps in zip(model.kinds, kept, strict=True):
        if layers.kind != "linear":
            width = layers.head_dim or model.head_dim
            values = layers.v_head_dim or layers.head_dim or model.v_head_dim or model.head_dim
            pair = (layers.heads or model.heads) * (width + values)
            found.append(Part(layers.window, 2 * layers.layers * pair / count, layers.layers * keeps.token))
    return found


class Roofline:
    """Each part at the slower of its FLOPs and its bytes, parts in sequence."""

    def __init__(self, model: Model, hardware: Hardware, engine: EngineProfile, stored: Stored | None = None) -> None:
        self.model, self.hardware, self.engine = model, hardware, engine
        n = hardware.count
        peak = hardware.flops8 if model.weight_bytes == 1 and hardware.flops8 else hardware.flops
        self._flops = peak * hardware.flops_share
        self._attention_flops = hardware.flops * hardware.flops_share
        self._bandwidth = hardware.bandwidth * hardware.bandwidth_share
        self._kv_bytes = model.kv_token_bytes(n) if stored is None else stored.bytes
        self._decode_step = 0.0 if stored is None else stored.step
        self._common = model.common_parameters * model.weight_bytes / n
        self._head = model.head_parameters * model.weight_bytes / n
        # Per pair of a new token and one it attends to. Prefill multiplies full keys and values; latent attention's decode
        # works on the latent itself: kv_rank + rope_dim for the scores and kv_rank for the sum, per head.
        m = model.latent
        pair = model.heads * (2 * model.head_dim if m is None else m.nope_dim + m.rope_dim + m.v_dim)
        decode_pair = pair if m is None else model.heads * (2 * m.kv_rank + m.rope_dim)
        self._pair = 2 * model.layers * pair / n
        self._context_seconds = max(2 * model.layers * decode_pair / n / self._attention_flops, self._kv_bytes / self._bandwidth)
        self._context_seconds += 0.0 if stored is None else stored.token
        self._parts = _parts(model, n)
        self._windows = tuple(sorted({part.window for part in self._parts if part.window is not None}))
        self._state = sum(part.layers * part.state for part in model.kept(n)) * 2 / self._bandwidth  # read and written
        inner = model.intermediate
        if model.experts is not None:
            inner = model.experts.intermediate * (model.experts.active + model.experts.shared)
        # Per token and layer: 8 passes over `hidden` (norms, residuals, q, output) and 3 over the MLP's inner width.
        self._activation = model.layers * ACTIVATION_BYTES * (8 * model.hidden + 3 * inner / n) / self._bandwidth
        self._reduce = 2 * model.layers * hardware.link_latency if n > 1 else 0.0
        self._reduce_token = 2 * model.layers * 2 * (n - 1) / n * model.hidden * ACTIVATION_BYTES / hardware.link

    def weight_bytes(self, tokens: float) -> float:
        """Bytes of layer weights a step over `tokens` tokens reads: of E experts, E (1 - (1 - k/E)^tokens) are touched."""
        if self.model.experts is None:
            return self._common
        experts = self.model.experts
        touched = experts.count * (1 - math.pow(1 - experts.active / experts.count, tokens))
        per_expert = self.model.expert_layers * self.model.expert_parameters * self.model.weight_bytes / self.hardware.count
        return self._common + touched * per_expert

    def terms(self, step: Step) -> Terms:
        shares = step.shares or (1.0,) * len(step.prefill)
        tokens = sum(share * chunk for share, (chunk, _) in zip(shares, step.prefill, strict=True)) + step.decodes
        flops = 2 * (self.model.active_parameters * tokens + self.model.head_parameters * step.samples) / self.hardware.count
        compute = flops / self._flops
        weights = (self.weight_bytes(tokens) + (self._head if step.samples else 0.0)) / self._bandwidth
        linear = max(compute, weights) + (1 - self.hardware.overlap) * min(compute, weights)
        prefill = self._state * len(step.prefill)
        for share, (chunk, before) in zip(shares, step.prefill, strict=True):
            pairs = chunk * before + chunk * (chunk + 1) / 2  # causal: token i of the chunk sees before + i
            read = (before + chunk) * self._kv_bytes / self._bandwidth
            if self._parts:
                prefill += sum(self._chunk(part, chunk, before) for part in self._parts)
            else:
                prefill += share * max(pairs * self._pair / self._attention_flops, read)
        sequences = len(step.prefill) + step.decodes
        return Terms(
            compute=compute,
            weights=weights,
            linear=linear,
            prefill_attention=prefill,
            decode_attention=self._decode(step),
            activations=tokens * self._activation,
            communication=self._reduce + tokens * self._reduce_token,
            overhead=self.engine.step_overhead + sequences * self.engine.seq_overhead,
        )

    def _decode(self, step: Step) -> Seconds:
        if not self._parts:
            return step.context * self._context_seconds + (self._decode_step if step.decodes else 0.0)
        mean = step.context / step.decodes if step.decodes else 0.0
        windowed = step.windowed or tuple(step.decodes * min(window, mean) for window in self._windows)
        contexts = dict(zip(self._windows, windowed, strict=True))
        seconds = self._state * step.decodes
        for part in self._parts:
            context = step.context if part.window is None else contexts[part.window]
            seconds += context * max(part.flops / self._attention_flops, part.bytes / self._bandwidth)
        return seconds

    def _chunk(self, part: Part, chunk: int, before: int) -> Seconds:
        """Attention of one kind of layer, of `chunk` new tokens after `before`."""
        window = part.window or before + chunk
        growing = max(0, min(chunk, window - before))  # tokens that see all before them: before + i; the others see the window
        pairs = growing * before + growing * (growing + 1) / 2 + (chunk - growing) * window
        read = min(before + chunk, window - 1 + chunk) * part.bytes / self._bandwidth
        return max(pairs * part.flops / self._attention_flops, read)

    def seconds(self, step: Step) -> Seconds:
        return self.terms(step).total


COSTS: dict[str, Callable[[Model, Hardware, EngineProfile], Cost]] = {"roofline": Roofline}
