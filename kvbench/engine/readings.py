"""What an engine shows: gauges and running totals by name, and what it is."""

from typing import TYPE_CHECKING, Any

from kvbench.engine.cache import Cache
from kvbench.profile import EngineProfile, Hardware, Model, kv_room

if TYPE_CHECKING:
    from kvbench.engine.engine import Engine

LEVELS: tuple[str, ...] = (
    "up", "held", "nodes_up", "imbalance",
    "kv_usage", "cached_share", "running", "waiting", "gpu_memory", "slot_efficiency", "reserved_share", "power",
    "quota", "fragmentation",
    "leaked_blocks", "oom_rate", "staged_bytes", "kv_peak_bytes",
    "delta_saving", "ssd_dwpd", "ssd_life_years", "ssd_real_write_rate", "ssd_real_read_rate", "ssd_real_stopped",
    *(f"tier_{tier}_{what}" for tier in ("host", "ssd", "remote") for what in ("used", "queue")),
)  # fmt: skip
"""How the names of gauges begin; everything else that `gauges` tells is a running total."""


def gauges(engine: "Engine") -> dict[str, float]:
    """State at the time advanced to, the step in progress included. Shares are of the usable blocks' bytes (docs/metrics.md)."""
    counters, batch, cache = engine.batch.counters, engine.batch, engine.cache
    found: dict[str, float] = {} if engine.memory is None else {"gpu_memory": engine.memory}
    found |= {
        "kv_usage": cache.share("referenced"),
        "cached_share": cache.share("index"),
        "running": float(len(batch.running)),
        "waiting": float(len(batch.waiting)),
        "preemptions": float(counters.preemptions),
        "admitted": float(counters.admitted),
        "oom": float(counters.oom),
        "oom_rate": counters.oom / counters.admitted if counters.admitted else 0.0,
        "hit_tokens": float(counters.hit),
        "query_tokens": float(counters.query),
        "recompute_tokens": float(counters.recompute),
        "computed_tokens": float(counters.computed),
    }
    found |= cache.gauges()
    if len(cache.pools) > 1:
        found |= groups(cache)
    if engine.partition is not None:
        found["partition_moves"] = float(engine.partition.moves)
    for fault in engine.faults:
        found |= fault.gauges(engine)
    if engine.meter is not None:
        found |= {"power": engine.meter.idle + engine.watts, "energy": engine.meter.total(engine.until)}
    if cache.below is not None:
        found |= cache.below.gauges(engine.until)
    if engine.profile.preallocate is not None:
        found["reserved_share"] = reserved_share(engine)
    efficiency = slot_efficiency(engine)
    return found if efficiency is None else found | {"slot_efficiency": efficiency}


def groups(cache: Cache) -> dict[str, float]:
    """Per layer group: blocks referenced / usable, share of the pools' bytes, prompt tokens looked up and found."""
    total = sum(group.pool.usable * group.bytes for group in cache.groups)
    found: dict[str, float] = {}
    for group in cache.groups:
        name, pool = group.name, group.pool
        found |= {f"kv_usage_{name}": pool.referenced / pool.usable, f"quota_{name}": pool.usable * group.bytes / total}
        found |= {f"lookup_tokens_{name}": float(group.lookups), f"hit_tokens_{name}": float(group.hits)}
    return found


def reserved_share(engine: "Engine") -> float:
    """Bytes of blocks that running sequences hold beyond the one in which their next token goes / those of all usable blocks."""
    reserved = total = 0.0
    for at, group in enumerate(engine.cache.groups):
        tables = [(s.computed, s.holding.tables[at]) for s in engine.batch.running if not group.state]
        begun = [max(computed, table.published * group.block) // group.block + 1 for computed, table in tables]
        ahead = sum(max(0, len(table.blocks) - used) for used, (_, table) in zip(begun, tables, strict=True))
        reserved += ahead * group.bytes
    for pool in engine.cache.pools:
        total += pool.usable * engine.cache.block_bytes(pool)
    return reserved / total


def slot_efficiency(engine: "Engine") -> float | None:
    """Valid tokens in referenced blocks / what they could hold; None while none is. 1 - it: internal fragmentation.

    Only blocks that are not full waste anything, and each of those belongs to one sequence.
    """
    wasted, total = 0.0, occupied(engine)
    for at, group in enumerate(engine.cache.groups):
        block, token = group.block, group.bytes / group.block
        for sequence in engine.batch.running:
            table = sequence.holding.tables[at]
            valid = max(sequence.computed, table.published * block)
            wasted += 0.0 if group.state else max(0, len(table.blocks) * block - valid) * token
    return 1 - wasted / total if total > 0 else None


def occupied(engine: "Engine") -> float:
    """Bytes on each device of the blocks that sequences hold."""
    return sum((pool.referenced - pool.pinned) * engine.cache.block_bytes(pool) for pool in engine.cache.pools)


def facts(engine: "Engine") -> dict[str, Any]:
    """What it is, for a run's manifest."""
    below = engine.cache.below
    found: dict[str, Any] = {} if below is None else {"tiers": below.facts()}
    groups = engine.cache.groups
    if len(groups) > 1:
        named = [{name: getattr(group, name) for name in ("name", "first", "last", "block", "bytes")} for group in groups]
        found["groups"] = [told | {"blocks": group.pool.usable} for told, group in zip(named, groups, strict=True)]
    return found | {
        "kind": "sim",
        "model": engine.model.name,
        "hardware": engine.hardware.name,
        "devices": engine.hardware.count,
        "engine": engine.profile.name,
        "max_context": engine.profile.limit(engine.model),
        "blocks": sum(pool.usable for pool in engine.cache.pools),  # of each pool one is the null block, as in vLLM
        "block_tokens": engine.profile.block,
        "kv_tokens": engine.cache.capacity(),
        "kv_bytes_per_token": sum(group.bytes / group.block for group in groups if not group.state) * engine.hardware.count,
        "idle_power": engine.meter.idle if engine.meter is not None else None,
        "gpu_memory_utilization": engine.profile.preallocates,
        "faults": [fault.told() for fault in engine.faults],
    }


def memory(model: Model, hardware: Hardware, engine: EngineProfile, cache: Cache) -> float | None:
    """Share of each device's memory in use from the start, the cache's pools with their null blocks included, in bytes as stored.
    None where the engine has no GPU, or was given more blocks than fit."""
    if engine.preallocates is None:
        return None
    unused = kv_room(model, hardware, engine) - sum((pool.usable + 1) * cache.block_bytes(pool) for pool in cache.pools)
    used = engine.preallocates - unused / hardware.memory
    return used if used <= 1 else None
