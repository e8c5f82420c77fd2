"""What stands below and beside one pool of KV blocks: tiers under the device, nodes of a cluster, groups of layers.

Of the headline interval, from the readings alone; what each part is comes from the manifest's facts of the target.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from kvbench import units
from kvbench.core import Sample, Seconds
from kvbench.report import cache
from kvbench.report.text import count

NODE = ("up", "kv_usage", "running", "waiting", "hit_tokens_total", "query_tokens_total")  # read of every node
MOVED = ("transfer_bytes", "store_tokens", "store_written_bytes", "migrated_blocks", "retried")
MOST_NODES = 12  # shown; summary.json has all


def machine(samples: Sequence[Sample], start: Seconds, end: Seconds, target: Mapping[str, Any]) -> dict[str, Any]:
    """`tiers`, `nodes` and `groups`, each with `rows` and, where there are none, the reason."""
    apart = [sample for sample in samples if sample.source == "node" and sample.name in NODE]
    samples = [sample for sample in samples if sample.source not in cache.APART]  # of many nodes these are few
    looked = cache.counter(samples, "query_tokens_total", start, end)["value"]
    return {
        "tiers": _tiers(samples, start, end, target, looked),
        "nodes": _nodes(samples, apart, start, end, target),
        "groups": _groups(samples, start, end, target),
    }


def _tiers(
    samples: Sequence[Sample], start: Seconds, end: Seconds, target: Mapping[str, Any], looked: float | None
) -> dict[str, Any]:
    """Per tier, top first. hit_share: prompt tokens found there / all that were looked up. dwpd and life_years: as of the end,
    over the whole run so far. dropped: blocks that were to be written and were not."""

    def last(name: str) -> float | None:
        return _last(cache.gauge(samples, name, start, end))

    rows: dict[str, Any] = {}
    for name, facts in (target.get("tiers") or {}).items():
        if not isinstance(facts, Mapping) or not isinstance(facts.get("capacity"), (int, float)):
            continue  # a rule of all tiers
        counted = {what: cache.counter(samples, f"tier_{name}_{what}_total", start, end)
                   for what in ("written_bytes", "read_bytes", "dropped")}  # fmt: skip
        hits = cache.counter(samples, f"hit_tokens_{name}_total", start, end)
        rows[name] = {
            "profile": facts.get("profile"),
            "capacity": facts.get("capacity"),
            "hit_tokens": hits["value"],
            "hit_share": hits["value"] / looked if hits["value"] is not None and looked else None,
            **{what: row["value"] for what, row in counted.items()},
            "used": cache.gauge(samples, f"tier_{name}_used", start, end),
            "dwpd": last(f"{name}_dwpd"),
            "life_years": last(f"{name}_life_years"),
            "n": hits["n"],
            "reason": hits.get("reason"),
        }
    return {
        "rows": rows,
        "delta_saving": last("delta_saving"),
        "reason": None if rows else "the target has no tiers, or tells none",
    }


def _nodes(
    samples: Sequence[Sample], told: Sequence[Sample], start: Seconds, end: Seconds, target: Mapping[str, Any]
) -> dict[str, Any]:
    """Per node, by what each `told`, and what is said of all together: nodes_up, imbalance (largest kv_usage / mean of those up),
    what moved."""
    apart: dict[str, list[Sample]] = {}
    for sample in told:
        apart.setdefault(str(sample.labels.get("node")), []).append(replace(sample, source="target", labels={}))
    facts = dict(enumerate(target.get("nodes") or ()))
    rows = []
    for name, own in apart.items():
        found = cache.engine(own, start, end)
        known = facts.get(int(name) if name.isdecimal() else -1) or {}
        row: dict[str, Any] = {"node": name} | {key: known.get(key) for key in ("hardware", "devices", "role", "kv_tokens")}
        row |= {key: found[key] for key in ("kv_usage", "running", "waiting", "hit_rate")}
        rows.append(row | {"up": cache.gauge(own, "up", start, end)["mean"]})
    if not rows:
        return {"rows": [], "reason": "one machine, or a server that tells of no nodes"}
    gauges = {name: cache.gauge(samples, name, start, end) for name in ("nodes_up", "imbalance", "held")}
    moved = {name: cache.counter(samples, f"{name}_total", start, end)["value"] for name in MOVED}
    return {"rows": rows, **gauges, **moved, "reason": None}


def _groups(samples: Sequence[Sample], start: Seconds, end: Seconds, target: Mapping[str, Any]) -> dict[str, Any]:
    """Per layer group with blocks of its own: quota (share of the pools' bytes), kv_usage, hit rate of the tokens looked up
    there; moves: of quota, between all of them."""
    rows: dict[str, Any] = {}
    for facts in target.get("groups") or ():
        name = facts["name"]
        quota = cache.gauge(samples, f"quota_{name}", start, end)
        if quota["mean"] is None:
            continue
        hits, looked = (cache.counter(samples, f"{what}_tokens_{name}_total", start, end) for what in ("hit", "lookup"))
        known = hits["value"] is not None and looked["value"]
        rows[name] = {key: facts.get(key) for key in ("first", "last", "block", "bytes", "blocks")} | {
            "quota": quota,
            "kv_usage": cache.gauge(samples, f"kv_usage_{name}", start, end),
            "hit_rate": hits["value"] / looked["value"] if known else None,
            "n": round(looked["value"] or 0),
        }
    if not rows:
        return {"rows": {}, "moves": None, "reason": "all layers take blocks from one pool"}
    return {"rows": rows, "moves": cache.counter(samples, "partition_moves_total", start, end)["value"], "reason": None}


def _last(gauge: Mapping[str, Any]) -> float | None:
    found = gauge.get("last")
    return None if found is None else float(found)


def rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, text) for the report's block on the KV cache."""
    where = " on each node" if len(summary["nodes"]["rows"]) > 1 else ""
    for name, row in summary["tiers"]["rows"].items():
        yield f"tier {name}", ", ".join(_tier(row, where))
    yield from _shown_nodes(summary["nodes"])
    for row in summary["groups"]["rows"].values():
        yield f"layers {row['first']}-{row['last']}", ", ".join(_group(row))
    moves = summary["groups"]["moves"]
    if moves is not None:
        yield "quota", f"moved {moves:,.0f} times between the layer groups"


def _tier(row: Mapping[str, Any], where: str) -> Iterator[str]:
    if row["hit_share"] is not None:
        yield f"{row['hit_tokens']:,.0f} prompt tokens found there ({units.share(row['hit_share'])})"
    used = row["used"]
    if used["mean"] is not None:
        yield f"{units.share(used['last'])} of {units.size(row['capacity'])}{where} in use at the end"
    if row["written_bytes"] is not None:
        yield f"{units.size(row['written_bytes'])} written and {units.size(row['read_bytes'] or 0.0)} read"
    if row["dropped"]:
        yield f"{row['dropped']:,.0f} writes dropped"
    if row["dwpd"] is not None:
        life = f": {row['life_years']:.3g} years to its rated wear" if row["life_years"] is not None else ""
        yield f"{row['dwpd']:.3g} drive writes per day{life}"


def _shown_nodes(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not found["rows"]:
        return
    up, apart = found["nodes_up"], found["imbalance"]
    text = f"{len(found['rows'])}"
    if up["mean"] is not None and up["min"] < len(found["rows"]):
        text += f", of which {count(up['mean'])} were up in the mean and {count(up['min'])} at least"
    if apart["mean"] is not None:
        text += f"; imbalance mean {count(apart['mean'])} max {count(apart['max'])} (KV usage of the fullest / mean of all)"
    moved = [f"{units.size(found['transfer_bytes'])} of KV between nodes"] if found["transfer_bytes"] else []
    moved += [f"{found['migrated_blocks']:,.0f} blocks in the background"] if found["migrated_blocks"] else []
    moved += [f"{found['store_tokens']:,.0f} tokens out of the store"] if found["store_tokens"] else []
    text += f"; moved {', '.join(moved)}" if moved else ""
    text += f"; {found['retried']:,.0f} requests begun again" if found["retried"] else ""
    yield "nodes", text
    for row in found["rows"][:MOST_NODES]:
        yield f"node {row['node']}", ", ".join(_node(row))
    if len(found["rows"]) > MOST_NODES:
        yield "", f"and {len(found['rows']) - MOST_NODES} more nodes: see summary.json"


def _node(row: Mapping[str, Any]) -> Iterator[str]:
    if row["role"] not in (None, "mixed"):
        yield str(row["role"])
    if row["kv_usage"]["mean"] is None:
        yield f"- ({row['kv_usage']['reason']})"
        return
    yield f"kv mean {units.share(row['kv_usage']['mean'])} max {units.share(row['kv_usage']['max'])}"
    yield f"running mean {count(row['running']['mean'])} max {count(row['running']['max'])}"
    if row["hit_rate"]["value"] is not None:
        yield f"hit rate {units.share(row['hit_rate']['value'])}"
    if row["up"] is not None and row["up"] < 1:
        yield f"up {units.share(row['up'])} of the time"


def _group(row: Mapping[str, Any]) -> Iterator[str]:
    low, high = row["quota"]["min"], row["quota"]["max"]
    moved = f" ({units.share(low)} to {units.share(high)})" if high - low > 1e-3 else ""
    yield f"quota {units.share(row['quota']['last'])}{moved}"
    usage = row["kv_usage"]
    if usage["mean"] is not None:
        yield f"kv mean {units.share(usage['mean'])} max {units.share(usage['max'])}"
    if row["hit_rate"] is not None:
        yield f"hit rate {units.share(row['hit_rate'])}"
