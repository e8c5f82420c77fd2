"""What cache.jsonl says of the run's KV cache: hit rates by block, why blocks missed, how far apart uses are."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvbench import units
from kvbench.core import CacheAccess
from kvbench.metrics import kv
from kvbench.report.files import RunFiles
from kvbench.report.forms import AccessLine

FILE = "cache.jsonl"
WHY = {
    "compulsory": "never seen before",
    "evicted": "evicted since",
    "divergence": "the prompts differ inside the block",
    "reset": "lost by a reset",
}


def accesses(files: RunFiles) -> dict[str, Any] | None:
    """The fold of cache.jsonl over the whole run; None where none was kept."""
    if not (files.directory / FILE).is_file():
        return None
    target = files.manifest.get("target") or {}
    share = target.get("cache_log")
    kept = float(share) if isinstance(share, (int, float)) and 0 < share <= 1 else 1.0
    return kv.fold(_lines(files), files.end, kept, *_memory(target))


def _memory(target: Mapping[str, Any]) -> tuple[float | None, dict[int, float]]:
    """How much KV the pools of all nodes hold: in tokens, or where layer groups share it in bytes, with the bytes of a token in
    each. None where it is not told."""
    tokens, groups = target.get("kv_tokens"), target.get("groups")
    if not isinstance(tokens, (int, float)) or tokens <= 0:
        return None, {}
    if not groups:
        return float(tokens), {}
    try:
        first = target["nodes"][0] if target.get("nodes") else target
        sizes = [one["blocks"] * one["bytes"] for one in groups]
        apart = first["blocks"] == sum(one["blocks"] for one in groups)  # else all groups take blocks from one pool
        total = (sum(sizes) if apart else sizes[0]) * tokens / first["kv_tokens"]
        return total, {at: one["bytes"] / one["block"] for at, one in enumerate(groups)}
    except (KeyError, IndexError, TypeError, ZeroDivisionError):
        return None, {}


def _lines(files: RunFiles) -> Iterator[CacheAccess]:
    """Line by line: the file may be larger than memory."""
    decode = msgspec.json.Decoder(AccessLine).decode
    with (files.directory / FILE).open("rb") as lines:
        for line in lines:
            try:
                yield decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                where = files.damaged if line.endswith(b"\n") else files.torn
                where[FILE] = where.get(FILE, 0) + 1


def rows(found: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """(name, text) for the report's block on the KV cache."""
    if found is None or not found["lookups"]:
        return
    sampled = "" if found["share"] == 1 else f" ({units.share(found['share'])} of the blocks looked at)"
    yield "block hit rate", f"{units.share(found['block_hit_rate'])} of {found['lookups']:,} full blocks looked up{sampled}"
    missed = {name: n for name, n in found["misses"].items() if n}
    total = sum(missed.values())
    if total:
        parts = [f"{units.share(n / total)} {WHY[name]}" for name, n in sorted(missed.items(), key=lambda item: -item[1])]
        yield "misses", ", ".join(parts)
    groups = found["groups"]
    for name, row in groups.items():
        label = "reuse" if len(groups) == 1 else f"reuse, group {name}"
        apart = row["reuse_distance"]
        if apart["n"]:
            yield label, f"{apart['p50']:,.0f} blocks apart at p50, {apart['p90']:,.0f} at p90, {apart['p99']:,.0f} at p99"
    gone = found["lifetime"]
    if gone["n"]:
        idle = units.duration(found["idle_before_evict"]["p50"])
        yield "evicted", f"{gone['n']:,} blocks, {units.duration(gone['p50'])} old and unused for {idle} at p50"
    if found["byte_efficiency"] is not None:
        held, resident = units.share(found["byte_efficiency"]), units.share(found["byte_residency"])
        yield "bytes", f"{held} of the pool's byte-seconds held tokens in use, {resident} tokens that could be found"
