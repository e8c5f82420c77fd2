"""The tiers under the device as a scenario names them, and what is built of that. What each key does: docs/engine/tiers.md."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from kvbench.core import Nanos, Seconds
from kvbench.engine import Cost, Step
from kvbench.engine.admission import Admission, Everything, Frequency, Presence
from kvbench.engine.cost import Roofline
from kvbench.engine.disk import Disk
from kvbench.engine.evict.policies import POLICIES, unknown
from kvbench.engine.groups import LayersSpec, sizes, stored
from kvbench.engine.hierarchy import Hierarchy, Rules
from kvbench.engine.level import Level
from kvbench.engine.stack import Stack
from kvbench.engine.store import Line
from kvbench.engine.tape import Tape
from kvbench.profile import EngineProfile, Hardware, Model, load_tier
from kvbench.units import Size, Span, size


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TierSpec(_Spec):
    """One tier: what it is, how much of it KV blocks may take, who leaves it."""

    profile: str = Field(description="a profile of profiles/tiers: bandwidths, latency, endurance")
    capacity: Size | None = Field(
        None, description="bytes for KV blocks; the profile's where not given; 0B: as if it were not there"
    )
    policy: str = Field("lru", description="who leaves when it is full: a policy as for the device")

    @field_validator("profile")
    @classmethod
    def _known(cls, value: str) -> str:
        load_tier(value)
        return value

    @field_validator("policy")
    @classmethod
    def _policy(cls, value: str) -> str:
        if value not in POLICIES:
            raise ValueError(unknown(value))
        return value

    @property
    def bytes(self) -> float:
        return load_tier(self.profile).capacity if self.capacity is None else self.capacity


class Host(TierSpec):
    """Memory of the device's host."""

    profile: str = Field("host-ddr5", description=TierSpec.model_fields["profile"].description)


class Ssd(TierSpec):
    """Drives of the host. `real`: blocks are written to files as well, and read back and verified."""

    profile: str = Field("ssd-nvme-gen4", description=TierSpec.model_fields["profile"].description)
    real: str | None = Field(None, description="a directory for real files; what an earlier run left there is found again")

    @field_validator("real")
    @classmethod
    def _beside(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("is empty: name a directory for the files")
        return value if value is None else str(Path(str((info.context or {}).get("folder") or "."), value).expanduser())

    @model_validator(mode="after")
    def _bounded(self) -> "Ssd":
        if self.real is not None and self.capacity is None:
            raise ValueError(
                "real files need a `capacity:`, so that they do not fill the disk (files take up to 1.25 times that)"
            )
        return self


class Remote(TierSpec):
    """A store behind a network."""

    profile: str = Field("remote-100g", description=TierSpec.model_fields["profile"].description)


class Often(_Spec):
    """Dynamo's filter: a block's count begins at 1, doubles with each use, and falls by 1 every `decay`."""

    frequency: Annotated[int, Field(ge=1, le=1 << 20)] = Field(2, description="least count at which a block is written")
    decay: Span = Field(600.0, description="the time in which a count falls by 1")

    def arm(self) -> Admission:
        return Frequency(self.frequency, max(1, round(self.decay * 1e9)))


class TiersSpec(_Spec):
    """What lies under the device's KV blocks, and when blocks move."""

    host: Host | None = Field(None, description="the host's memory")
    ssd: Ssd | None = Field(None, description="the host's drives")
    remote: Remote | None = Field(None, description="a remote store")
    write: Literal["write_through", "write_back", "selective"] = Field(
        "write_back",
        description="write_through: a full block is written to every tier at once; write_back: to the next one, when it has to "
        "leave; selective: as write_back, if `admit` lets it",
    )
    admit: Often | Literal["presence"] | None = Field(
        None, description="of write: selective. {frequency: 2, decay: 10m}, or presence: whatever was used twice"
    )
    restore: Literal["always", "cheaper"] = Field(
        "always", description="bring up what is found below: always, or as far as that is quicker than computing it"
    )
    prefetch: Annotated[int, Field(ge=0, le=100_000)] = Field(
        0, description="for so many waiting requests blocks come up to the host before they are admitted; 0: for none"
    )
    spill: Literal["recompute", "swap", "cheaper"] = Field(
        "cheaper",
        description="blocks of a preempted request are written down: never (recompute), always (swap), or where that is quicker",
    )
    persist: Span | None = Field(None, description="blocks idle in the first tier for so long are copied to the second")
    sequences: Literal["delta", "whole"] = Field(
        "delta", description="delta: only new blocks are written; whole: all of a request's when it ends, to compare with"
    )
    backlog: Size = Field(
        16 * 2.0**30, description="bytes that may wait to be written to a tier; what comes beyond that is dropped"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "TiersSpec":
        named = [(name, tier) for name, tier in self.named() if tier.bytes > 0]
        if not self.named():
            raise ValueError("names no tier: host, ssd or remote")
        if self.admit is not None and self.write != "selective":
            raise ValueError(f"`admit` is for write: selective; with {self.write} every block is written")
        if self.sequences == "whole" and self.write != "write_through":
            raise ValueError("`sequences: whole` needs write: write_through; otherwise only what leaves the device is written")
        if self.persist is not None and self.write == "write_through":
            raise ValueError("`persist` is for write_back and selective: write_through writes everything at once")
        if self.persist is not None and len(self.named()) < 2:
            raise ValueError("`persist` copies from the first tier to the second: name another one")
        if self.prefetch and (self.host is None or len(self.named()) < 2):
            raise ValueError("`prefetch` brings blocks up to the host from below it: name `host` and another tier")
        for (above, large), (below, small) in pairwise(named):
            if self.write == "write_through" and small.bytes < large.bytes:
                raise ValueError(
                    f"with write_through {below} holds a copy of what {above} does, and {size(small.bytes)} is less than "
                    f"{size(large.bytes)}: give it more, or use write_back"
                )
        return self

    def named(self) -> list[tuple[str, TierSpec]]:
        """Name and spec of each tier, nearest to the device first."""
        tiers = (("host", self.host), ("ssd", self.ssd), ("remote", self.remote))
        return [(name, tier) for name, tier in tiers if tier is not None]

    def admission(self) -> Admission:
        if self.write != "selective":
            return Everything()
        return Presence() if self.admit == "presence" else (self.admit or Often(frequency=2, decay=600.0)).arm()


def computing(cost: Cost, budget: int, encode: Seconds = 0.0) -> Callable[[int, int], Seconds]:
    """Seconds to compute so many tokens after so many others, in steps of `budget` tokens with nothing else in them, each of
    which takes `encode` per token to encode what it made."""

    def seconds(before: int, tokens: int) -> Seconds:
        total = encode * tokens
        while tokens > 0:
            chunk = min(budget, tokens)
            total += cost.seconds(Step(((chunk, before),)))
            before, tokens = before + chunk, tokens - chunk
        return total

    return seconds


def _kind(model: Model, engine: EngineProfile, layers: LayersSpec | None) -> str:
    """Whose KV a block is."""
    groups = layers.groups if layers is not None else []
    named = [f"layers {one.layers}: {one.codec or 'plain'}, {one.block or engine.block} tokens" for one in groups]
    return "; ".join([f"{model.name}, {engine.block} tokens a block", *named])


def build_below(
    spec: TiersSpec, model: Model, hardware: Hardware, engine: EngineProfile, stopwatch: Callable[[], Nanos],
    seed: int = 0, tape: Tape | None = None, node: str = "", layers: LayersSpec | None = None,
) -> Hierarchy | None:  # fmt: skip
    """The tiers under one engine; None where all have no room. `node` names its own directory where there are real files, which
    say that they are of this model, block size and `layers`.

    ValueError where the directory cannot be used.
    """
    block = engine.block * model.kv_token_bytes(1)
    copies = model.kv_token_bytes(1) / model.kv_token_bytes(hardware.count)
    levels = []
    for name, tier in spec.named():
        if tier.bytes > 0:
            real = Path(tier.real, node) if isinstance(tier, Ssd) and tier.real is not None else None
            levels.append(
                Level(
                    name,
                    load_tier(tier.profile),
                    tier.bytes,
                    POLICIES[tier.policy](max(1, int(tier.bytes // block)), seed),
                    spec.backlog,
                    moves=name == "host" and spec.write != "write_through",
                    disk=None if real is None else Disk(real, tier.bytes, stopwatch, holds=_kind(model, engine, layers)),
                )
            )
    if not levels:
        return None
    persist = None if spec.persist is None or len(levels) < 2 else round(spec.persist * 1e9)
    stack = Stack(levels, spec.write == "write_through", spec.admission(), persist, tape)
    prefetch = spec.prefetch if levels[0].name == "host" and len(levels) > 1 else 0
    rules = Rules(spec.write, spec.restore, spec.spill, spec.sequences, prefetch)
    link = float("inf") if hardware.host_link is None else hardware.host_link * copies
    sized = [] if layers is None else sizes(layers, model, hardware, engine)
    cost = Roofline(model, hardware, engine, stored(sized) if sized else None)
    encode = sum(one.codec.encode * one.layers for one in sized if one.codec and one.encoding == "sync")
    recompute = computing(cost, engine.max_num_batched_tokens, encode)
    return Hierarchy(stack, rules, Line(link), Line(link), copies, recompute)
