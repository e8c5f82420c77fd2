"""What a model, a device, a tier and a serving engine are, in numbers, from profiles/*/*.yaml. Data and size arithmetic only.

Sizes are bytes, rates bytes/s or FLOP/s per device, times seconds. A model's shape is in shape.py, blocks in layout.py.
"""

import difflib
import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from kvbench.layout import Layout, kv_groups, layout
from kvbench.shape import Experts, Latent, Layers, Model, Profile
from kvbench.units import Duration, Share, Size, size

__all__ = ["EngineProfile", "Experts", "Hardware", "Kind", "Latent", "Layers", "Model", "Tier", "activation_bytes", "kv_blocks"]
__all__ += ["Profile", "kv_groups", "kv_room", "layout", "load_engine", "load_hardware", "load_model", "load_tier", "names"]
__all__ += ["Layout", "read", "root"]

Kind = Literal["models", "hardware", "engines", "tiers", "codecs", "logs"]


class Hardware(Profile):
    """`count` equal devices in tensor parallel. Peaks are datasheet values; the two shares are what is reached of them."""

    memory: Size = Field(gt=0, description="bytes per device")
    bandwidth: Size = Field(gt=0, description="memory bytes/s per device")
    flops: float = Field(gt=0, description="dense 16-bit FLOP/s per device")
    flops8: float | None = Field(default=None, gt=0, description="dense 8-bit FLOP/s, used where weights are 8-bit")
    link: Size = Field(gt=0, description="bytes/s to the other devices, one direction")
    link_latency: Duration = Field(default=10e-6, description="of one all-reduce, beyond its bytes")
    bandwidth_share: Share = Field(gt=0, le=1, description="share of `bandwidth` reached")
    flops_share: Share = Field(gt=0, le=1, description="share of `flops` reached by large matrix products")
    overlap: Share = Field(default=1.0, le=1, description="share of compute and weight reads that run at once")
    host_link: Size | None = Field(default=None, gt=0, description="bytes/s between a device and its host, one direction")
    power: float | None = Field(default=None, gt=0, description="board limit, W per device")
    idle: float | None = Field(default=None, gt=0, description="W per device that holds a model and does nothing")
    count: int = Field(default=1, ge=1, le=1024)


class Tier(Profile):
    """Where KV blocks can go when they leave the device: host memory, a drive, another machine."""

    capacity: Size = Field(gt=0, description="bytes for KV blocks")
    read: Size = Field(gt=0, description="bytes/s out of it")
    write: Size = Field(gt=0, description="bytes/s into it, sustained")
    latency: Duration = Field(description="of one transfer, beyond its bytes")
    energy: float = Field(ge=0, description="pJ per byte moved in or out")
    idle: float = Field(default=0.0, ge=0, description="W while nothing moves")
    endurance: float | None = Field(default=None, gt=0, description="drive writes per day over the warranty; none for memory")


class EngineProfile(Profile):
    """A serving engine's settings and overheads, named as vLLM names them where it has them."""

    block: int = Field(default=16, ge=1, le=65536, description="tokens per KV block")
    max_num_batched_tokens: int = Field(default=2048, ge=1, description="token budget of one step")
    max_num_seqs: int = Field(default=256, ge=1, description="most sequences in one step")
    gpu_memory_utilization: Share = Field(default=0.92, gt=0, le=1, description="share of device memory the engine may use")
    max_model_len: int | None = Field(default=None, ge=1, description="longest prompt + answer; the model's own where absent")
    blocks: int | None = Field(default=None, ge=2, description="KV blocks, null block included, instead of computing them")
    admission: Literal["prompt", "chunk"] = Field(
        default="prompt", description="a request enters when its whole prompt fits (reserve_full_isl), or when a chunk does"
    )
    policy: str = Field(default="lru", description="who leaves when the pool is full: a name of engine/evict")
    order: Literal["fcfs", "priority", "shortest"] = Field(default="fcfs", description="who of the waiting is admitted first")
    victim: Literal["last", "least_computed", "most_blocks"] = Field(
        default="last", description="who loses its blocks when they run out, of those that the step has not scheduled yet"
    )
    max_preemptions: int | None = Field(
        default=None,
        ge=0,
        description="a request that lost its blocks so often fails (oom) where it would lose them again; absent: never",
    )
    prefill: Literal["chunked", "whole"] = Field(
        default="chunked", description="a prompt is computed in pieces that fit the steps' token budget, or whole in one step"
    )
    preallocate: Share | None = Field(
        default=None, gt=0, le=1, description="reserve blocks for this quantile of a class's answers; absent: on demand"
    )
    max_waiting: int | None = Field(default=None, ge=1, description="with so many waiting a new request is refused (503)")
    retain: Duration = Field(default=0.0, description="content younger than this stays while another block can go")
    retain_tokens: int = Field(default=0, ge=0, description="content of sequences shorter than this is not kept")
    reserve: Size = Field(default=0.75 * 2**30, description="memory per device for runtime and graphs, beyond activations")
    step_overhead: Duration = Field(default=0.0, description="scheduling, launch and sampling per step")
    seq_overhead: Duration = Field(default=0.0, description="the same per sequence in the step")

    @model_validator(mode="after")
    def _budget(self) -> "EngineProfile":
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "a full batch could not decode one token each"
            )
        return self

    @property
    def preallocates(self) -> float | None:
        """The share of device memory that the engine takes when it starts, and keeps; None where the profile names none."""
        return self.gpu_memory_utilization if "gpu_memory_utilization" in self.model_fields_set else None

    def limit(self, model: Model) -> int:
        """Longest prompt + answer in tokens."""
        return self.max_model_len or model.max_len


def activation_bytes(model: Model, count: int, engine: EngineProfile) -> float:
    """Peak activations per device: one layer's inputs, outputs and MLP for a full token budget, and float32 logits twice."""
    inner = max(model.intermediate, model.experts.intermediate * model.experts.active if model.experts else 0)
    tokens = engine.max_num_batched_tokens * 2 * (4 * model.hidden + 2 * inner / count)
    return tokens + engine.max_num_seqs * model.vocab * 4 * 2


def kv_room(model: Model, hardware: Hardware, engine: EngineProfile) -> float:
    """Bytes per device left for KV blocks; negative where the weights alone do not fit."""
    used = model.weights / hardware.count + activation_bytes(model, hardware.count, engine) + engine.reserve
    return hardware.memory * engine.gpu_memory_utilization - used


def kv_blocks(model: Model, hardware: Hardware, engine: EngineProfile) -> int:
    """Blocks as vLLM counts them, the null block included. ValueError where the model does not fit, with the count that would."""
    if engine.blocks is not None:
        return engine.blocks
    blocks = int(kv_room(model, hardware, engine) // layout(model, engine.block, hardware.count).block_bytes)
    if blocks >= 2:
        return blocks
    enough = next((n for n in _counts() if _fits(model, hardware.model_copy(update={"count": n}), engine)), None)
    advice = f"{enough} of them would do" if enough else "no number up to 1024 would do"
    raise ValueError(
        f"{model.name} does not fit on {hardware.count} x {hardware.name}: weights {size(model.weights)}, memory "
        f"{size(hardware.memory * hardware.count)}, of which {engine.gpu_memory_utilization:.0%} may be used; {advice}"
    )


def _fits(model: Model, hardware: Hardware, engine: EngineProfile) -> bool:
    return kv_room(model, hardware, engine) >= 2 * layout(model, engine.block, hardware.count).block_bytes


def _counts() -> list[int]:
    return [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]  # tensor-parallel sizes in use are powers of two


def root() -> Path:
    """profiles/ inside the installed package, else at the top of the repository."""
    inside = Path(__file__).parent / "profiles"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "profiles"


def names(kind: Kind) -> list[str]:
    return sorted(path.stem for path in (root() / kind).glob("*.yaml"))


def _stem(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.strip().lower())


def _nearest(stem: str, known: list[str]) -> str:
    """The shortest that begins as `stem` does, signs aside ("llama3": llama-3.1-8b), else the most alike; "" where none is."""
    bare = re.sub(r"[^a-z0-9]", "", stem)
    longer = [name for name in known if bare and re.sub(r"[^a-z0-9]", "", name).startswith(bare)]
    alike = difflib.get_close_matches(stem, known, n=1, cutoff=0.4)
    return min(longer, key=lambda name: (len(name), name)) if longer else alike[0] if alike else ""


def read(kind: Kind, name: str) -> dict[str, Any]:
    """The YAML of one profile, its name filled in. ValueError naming the nearest where there is none."""
    stem, known = _stem(name), names(kind)
    if stem not in known:
        near = _nearest(stem, known)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ValueError(f"unknown profile {name!r} in {kind}{hint} (known: {', '.join(known)})")
    data: dict[str, Any] = yaml.safe_load((root() / kind / f"{stem}.yaml").read_text())
    return {"name": stem, **data}


def load_model(name: str) -> Model:
    return Model.model_validate(read("models", name))


def load_tier(name: str) -> Tier:
    return Tier.model_validate(read("tiers", name))


def load_hardware(name: str, count: int | None = None) -> Hardware:
    """`name` may carry the count: "h100", "h100 x8", "h100x8", "8xh100". A count given twice must agree."""
    text = name.strip().lower()
    match = re.fullmatch(r"(?P<a>\d+)\s*x\s*(?P<x>[a-z].*)|(?P<y>.*?[^\s])\s*x\s*(?P<b>\d+)", text)
    if match and text not in names("hardware") and _stem(match["x"] or match["y"]) in names("hardware"):
        written = int(match["a"] or match["b"])
        if count is not None and count != written:
            raise ValueError(f"hardware {name!r} says {written} devices and count says {count}")
        text, count = match["x"] or match["y"], written
    return Hardware.model_validate({**read("hardware", text), "count": 1 if count is None else count})


def load_engine(name: str, **overrides: Any) -> EngineProfile:
    """A profile with any of its fields replaced, validated again: load_engine("vllm", block=512)."""
    data = read("engines", name)
    for key in overrides:
        if key not in EngineProfile.model_fields or key in ("name", "source"):
            near = difflib.get_close_matches(key, EngineProfile.model_fields, n=1)
            raise ValueError(f"engine profiles have no field {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    try:
        return EngineProfile.model_validate({**data, **overrides})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        said = first["msg"].removeprefix("Value error, ")
        if not field:  # of several fields together
            raise ValueError(f"engine settings: {said}") from error
        where = field if field in overrides else f"engine profile {name!r}: {field}"
        got = "" if repr(first["input"]) in said else f" (got {first['input']!r})"
        raise ValueError(f"{where}: {said}{got}") from error
