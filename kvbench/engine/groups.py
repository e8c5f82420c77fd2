"""Layer groups as a scenario names them, and the pools that hold them. Each has its own codec, block size and quota.

blocks of a group = quota x KV bytes / (block x bytes per token of its layers under its codec), the null block included.
"""

import math
import re
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvbench.engine import Policy
from kvbench.engine.codec import Codec, load_codec
from kvbench.engine.cost import Stored
from kvbench.engine.holding import Group
from kvbench.engine.pool import Pool
from kvbench.engine.tape import Tape
from kvbench.profile import EngineProfile, Hardware, Model, kv_groups, kv_room
from kvbench.units import Share, Size, Span

_RANGE = re.compile(r"(\d+)(?:\s*-\s*(\d+)|(\+))?")


class LayerGroup(BaseModel):
    """Layers that share a block table."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    layers: str = Field(description='which, counted from 1: "1-6", "13+" or "7"')
    codec: str | None = Field(
        None, description="a codec profile, for example int4-g64; as the model keeps its KV where not given"
    )
    encoding: Literal["sync", "async"] = Field(
        "sync", description="the step that computes KV encodes it at its end, or an encoder does in the background"
    )
    block: Annotated[int, Field(ge=1, le=65536)] | None = Field(
        None, description="tokens per block; the engine's where not given"
    )
    quota: Annotated[Share, Field(gt=0, le=1)] | None = Field(
        None, description="share of the KV bytes; what others leave, by bytes per token, where not given"
    )

    @field_validator("layers")
    @classmethod
    def _is_range(cls, value: str) -> str:
        if not _RANGE.fullmatch(value.strip()):
            raise ValueError(f'{value!r} is not a range of layers: write "1-6", "13+" or "7" (layers count from 1)')
        return value.strip()

    @field_validator("codec")
    @classmethod
    def _is_codec(cls, value: str | None) -> str | None:
        if value is not None:
            load_codec(value)
        return value

    @model_validator(mode="after")
    def _has_codec(self) -> Self:
        if self.encoding == "async" and self.codec is None:
            raise ValueError(f"layers {self.layers}: `encoding: async` without a codec: name one, for example int4-g64")
        return self

    def span(self, layers: int) -> tuple[int, int]:
        """(first, last) layer of a model of `layers` layers."""
        first, last, rest = _RANGE.fullmatch(self.layers).groups()  # type: ignore[union-attr]
        return int(first), layers if rest else int(last or first)


class LayersSpec(BaseModel):
    """How the layers are grouped, and whether quotas move."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    groups: Annotated[list[LayerGroup], Field(min_length=1, max_length=128)] = Field(description="every layer in exactly one")
    partition: Literal["static", "dynamic"] = Field("static", description="whether quota moves between groups during the run")
    floor: Annotated[Share, Field(gt=0, le=1)] = Field(0.85, description="hit rate below which a group is given quota (dynamic)")
    step: Annotated[Share, Field(gt=0, le=1)] = Field(
        0.15, description="share of its own quota that it is given at a time (dynamic)"
    )
    staging: Annotated[Size, Field(gt=0)] = Field(
        64e6, description="bytes per device that may wait for the background encoder (async); steps wait when it is full"
    )
    every: Span = Field(10.0, description="how often hit rates are looked at (dynamic)")


class Sized(NamedTuple):
    """One group as this model and device have it. token: bytes per token and device; blocks: the null block included."""

    first: int
    last: int
    block: int
    blocks: int
    token: float
    codec: Codec | None
    raw: float
    encoding: Literal["sync", "async"]

    @property
    def layers(self) -> int:
        return self.last - self.first + 1


def sizes(spec: LayersSpec, model: Model, hardware: Hardware, engine: EngineProfile) -> list[Sized]:
    """ValueError where layers are in no group or in two, quotas exceed the whole, or a group has no room for a block."""
    kinds = kv_groups(model, hardware.count)
    if len(kinds) > 1 or kinds[0][1] != "full":
        raise ValueError(f"{model.name} has layers that are not full attention: layers cannot be grouped by hand there")
    spans = _spans(spec, model.layers)
    codecs = [load_codec(one.codec) if one.codec else None for one in spec.groups]
    whole = model.kv_token_bytes(hardware.count)
    tokens = [(b - a + 1) * whole / model.layers * _scale(c, model) for (a, b), c in zip(spans, codecs, strict=True)]
    room = kv_room(model, hardware, engine) if engine.blocks is None else engine.blocks * engine.block * whole
    found = []
    for one, (first, last), token, codec, quota in zip(spec.groups, spans, tokens, codecs, _quotas(spec, tokens), strict=True):
        block = one.block or engine.block
        blocks = int(quota * room // (block * token))
        if blocks < 2:
            raise ValueError(f"layers {one.layers}: a quota of {quota:.1%} has no room for a block of {block} tokens")
        raw = (last - first + 1) * whole / model.layers
        found.append(Sized(first, last, block, blocks, token, codec, raw, one.encoding))
    return found


def build(
    sized: list[Sized], engine: EngineProfile, policy: Callable[[int], Policy], tape: Tape | None
) -> tuple[list[Group], Stored]:
    """The groups, their pools empty, and what they are together. policy(blocks): who leaves a pool of so many."""
    groups, retain = [], round(engine.retain * 1e9)
    for at, one in enumerate(sized):
        pool = Pool(one.blocks, one.block, policy(one.blocks - 1), at, retain, tape)
        encode = one.codec.encode * one.layers * one.block if one.codec else 0.0
        wide = math.ceil(one.raw / one.token - 1e-9)
        least = one.codec.min_tokens if one.codec and wide > 1 else 0
        groups.append(
            Group(
                f"{one.first}_{one.last}", pool, one.first, one.last, one.block * one.token,
                encode, one.encoding, one.raw, least, wide,
            )
        )  # fmt: skip
    return groups, stored(sized)


def stored(sized: list[Sized]) -> Stored:
    """What all groups are together, for the time of a step."""
    step = sum(one.codec.decode_step for one in sized if one.codec)
    token = sum(one.codec.decode * one.layers for one in sized if one.codec)
    return Stored(sum(one.token for one in sized), step, token)


def _scale(codec: Codec | None, model: Model) -> float:
    """Bytes under the codec / bytes as the model keeps them."""
    return 1.0 if codec is None else codec.effective_bits / (8 * model.kv_bytes)


def _spans(spec: LayersSpec, layers: int) -> list[tuple[int, int]]:
    spans = [one.span(layers) for one in spec.groups]
    begins = [1, *(last + 1 for _, last in spans)]
    if any(first > last for first, last in spans) or [*(first for first, _ in spans), layers + 1] != begins:
        told = ", ".join(one.layers for one in spec.groups)
        raise ValueError(f"groups {told}: each of the model's {layers} layers is in one group, in order, counted from 1")
    return spans


def _quotas(spec: LayersSpec, tokens: list[float]) -> list[float]:
    """Shares of the bytes. What is not given away is divided by bytes per token, so that those groups hold as many tokens."""
    given = sum(one.quota or 0.0 for one in spec.groups)
    free = sum(size for one, size in zip(spec.groups, tokens, strict=True) if one.quota is None)
    if given > 1 + 1e-9 or (free and given >= 1 - 1e-9):
        raise ValueError(f"quotas add up to {given:.0%}: at most 100 %, and less where a group has none")
    return [size / free * (1 - given) if one.quota is None else one.quota for one, size in zip(spec.groups, tokens, strict=True)]
