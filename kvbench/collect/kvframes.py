"""KV events as vLLM sends them over ZMQ: (topic, sequence number in 8 bytes, msgpack of [time, [events], rank]).

An event is a map with a `type` (vLLM from 0.30 on), or an array that begins with its type, its fields in a fixed order (before).
"""

import math
from typing import Any, NamedTuple

import msgspec

ARRAY = {  # vLLM's classes, in the order of their fields
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
_ENDLESS = (1 << 64) - 1


class Change(NamedTuple):
    """What one event says. kind: stored, removed or cleared. keys: 16 hex digits; parent: of the first, None at a prompt's start.
    tokens: ids of each stored block. tier: gpu, or the medium's own name. group: of layers; full: with attention over everything.
    """

    kind: str
    keys: tuple[str, ...] = ()
    parent: str | None = None
    tokens: tuple[tuple[int, ...], ...] = ()
    block: int = 0
    tier: str = "gpu"
    group: int = 0
    full: bool = True


class Batch(NamedTuple):
    """The changes of one moment. time: seconds since 1970 by the server's clock; rank: of data parallelism; ignored: events of
    unknown kinds."""

    time: float
    changes: tuple[Change, ...]
    rank: int
    ignored: int


_decode = msgspec.msgpack.Decoder().decode


def read(payload: bytes) -> Batch:
    """Raises ValueError on what is no batch of KV events; an event of an unknown kind is counted."""
    try:
        said = _decode(payload)
        time, events, rank = float(said[0]), said[1], int((said[2] if len(said) > 2 else 0) or 0)
        changes = [_change(event) for event in events]
    except (msgspec.DecodeError, TypeError, LookupError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a batch of KV events: {error}") from None
    if not math.isfinite(time):
        raise ValueError("not a batch of KV events: its time is not finite")
    known = tuple(change for change in changes if change is not None)
    return Batch(time, known, rank, len(changes) - len(known))


def _change(event: Any) -> Change | None:
    if isinstance(event, list):
        kind, fields = event[0], dict(zip(ARRAY.get(event[0], ()), event[1:], strict=False))
    else:
        kind, fields = event["type"], event
    if kind == "AllBlocksCleared":
        return Change("cleared")
    if kind not in ARRAY:
        return None
    keys, medium = tuple(name(key) for key in fields["block_hashes"]), str(fields.get("medium") or "gpu").lower()
    group = int(fields.get("group_idx") or 0)
    if kind == "BlockRemoved":
        return Change("removed", keys, tier=medium, group=group)
    block, ids = int(fields["block_size"]), fields["token_ids"]
    if block < 1 or len(ids) != block * len(keys):
        raise ValueError(f"{len(ids)} token ids for {len(keys)} blocks of {block}")
    if not all(type(one) is int for one in ids):
        raise ValueError("token ids that are no integers")
    parent = fields.get("parent_block_hash")
    tokens = tuple(tuple(ids[at : at + block]) for at in range(0, len(ids), block))
    full = fields.get("kv_cache_spec_kind") in (None, "full_attention")
    return Change("stored", keys, None if parent is None else name(parent), tokens, block, medium, group, full)


def name(key: Any) -> str:
    """A block's hash, an integer or bytes of any length, as cache.jsonl writes it: the last 64 bits in 16 hex digits."""
    if isinstance(key, bytes):
        key = int.from_bytes(key[-8:], "big")
    return f"{key & _ENDLESS:016x}"
