"""The KV memory that a model, a device and a scenario's layer groups come to, and what a step over it costs."""

from dataclasses import dataclass

from kvbench.engine import Below
from kvbench.engine.cache import Cache
from kvbench.engine.coded import CodedCache, is_coded
from kvbench.engine.cost import Roofline
from kvbench.engine.evict.policies import POLICIES, unknown
from kvbench.engine.groups import LayersSpec, build, sizes
from kvbench.engine.hybrid import hybrid_cache, is_hybrid, one_pool
from kvbench.engine.partition import Partition
from kvbench.engine.tape import Tape
from kvbench.profile import EngineProfile, Hardware, Model, kv_blocks


@dataclass(frozen=True)
class Memory:
    """blocks: of the pool of a model without groups, the null block included. partition: where quotas move."""

    blocks: int
    cache: Cache
    cost: Roofline
    partition: Partition | None = None


def kv_memory(
    model: Model,
    hardware: Hardware,
    engine: EngineProfile,
    seed: int,
    tape: Tape | None,
    below: Below | None,
    layers: LayersSpec | None,
) -> Memory:  # fmt: skip
    """ValueError where the model does not fit, or the policy is unknown."""
    if engine.policy not in POLICIES:
        raise ValueError(unknown(engine.policy))
    blocks = kv_blocks(model, hardware, engine)
    if layers is not None:
        groups, stored = build(
            sizes(layers, model, hardware, engine), engine, lambda count: POLICIES[engine.policy](count, seed), tape
        )
        partition = Partition(groups, layers) if layers.partition == "dynamic" else None
        if is_coded(groups):
            cache: Cache = CodedCache(groups, below, tape, engine.retain_tokens, layers.staging)
        else:
            cache = Cache(groups, below, tape, retain_tokens=engine.retain_tokens)
        return Memory(blocks, cache, Roofline(model, hardware, engine, stored), partition)
    groups = one_pool(model, hardware.count, engine, blocks, POLICIES[engine.policy](blocks - 1, seed), tape)
    if is_hybrid(groups):
        cache = hybrid_cache(groups, model, hardware.count, engine, tape, below)
    else:
        cache = Cache(groups, below, tape, retain_tokens=engine.retain_tokens)
    return Memory(blocks, cache, Roofline(model, hardware, engine))
