"""A cluster in numbers: what became of its jobs, and its nodes' gauges as one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvbench.core import Seconds
from kvbench.engine.node import Node
from kvbench.engine.readings import LEVELS, occupied

MEANS = (
    "kv_usage", "cached_share", "gpu_memory", "slot_efficiency", "reserved_share", "quota", "fragmentation", "delta_saving",
    "tier_host_used", "tier_ssd_used", "tier_remote_used", "ssd_dwpd",
)  # fmt: skip
"""How the names of those gauges begin that are not summed."""
OOM = ("kv_too_small", "oom")
"""Why a request failed for lack of cache memory: it can never fit, or it lost its blocks too often."""


@dataclass(frozen=True, slots=True)
class Manners:
    """What a cluster does when things go wrong. `detect`: how long until a loss is noticed; `refuse_above`: most waiting jobs."""

    on_loss: Literal["retry", "fail"] = "retry"
    detect: Seconds = 0.0
    refuse_above: int | None = None


@dataclass(slots=True)
class Counts:
    """Jobs by their fate, and `carried`: the running totals of engines that were lost."""

    admitted: int = 0
    refused: int = 0
    ok: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    oom: int = 0
    carried: dict[str, float] = field(default_factory=dict)

    def submitted(self, refused: str | None) -> None:
        """A job came. `refused` and `full` turned away one that could have been served; other reasons are failures."""
        if refused in ("refused", "full"):
            self.refused += 1
            return
        self.admitted += 1
        if refused is not None:
            self.ended(refused)

    def ended(self, failed: str) -> None:
        """An admitted job is over: "" with all its tokens, else why without."""
        self.ok += not failed
        self.failed += bool(failed)
        self.oom += failed in OOM

    def lost(self, node: Node) -> None:
        """Keep the running totals of a node's engine, which is about to be lost."""
        if node.up:
            for name, value in node.engine.gauges().items():
                if not name.startswith(LEVELS):
                    self.carried[name] = self.carried.get(name, 0.0) + value


def gauges_by_node(nodes: Sequence[Node]) -> list[dict[str, float]]:
    """Each node's gauges and `up`; of a node that is down only that."""
    return [{"up": 1.0, **node.engine.gauges()} if node.up else {"up": 0.0} for node in nodes]


def gauges(nodes: Sequence[Node], counts: Counts, held: int) -> dict[str, float]:
    """Shares weighted by the memory of the nodes that are up and tell them (slot_efficiency: by what jobs hold there), the rest
    summed, jobs that no node has yet waiting with the others.

    imbalance: the largest kv_usage of a node that is up over their mean; 1 where all are alike or empty.
    """
    each = [(node, node.engine.gauges()) for node in nodes if node.up]
    total = dict(counts.carried)
    for name in dict.fromkeys(name for _, read in each for name in read):
        told = [(node, read[name]) for node, read in each if name in read]
        if name == "ssd_life_years":
            total[name] = min(value for _, value in told)
        elif name.startswith(MEANS):
            weights = [_held(node) if name == "slot_efficiency" else node.tokens for node, _ in told]
            total[name] = sum(value * (weight / sum(weights)) for (_, value), weight in zip(told, weights, strict=True))
        else:
            total[name] = total.get(name, 0.0) + sum(value for _, value in told)
    usage = [read["kv_usage"] for _, read in each]
    total["waiting"] = total.get("waiting", 0.0) + held
    return total | {
        "kv_usage": total.get("kv_usage", 0.0),
        "running": total.get("running", 0.0),
        "held": float(held),
        "nodes_up": float(len(each)),
        "imbalance": max(usage) * len(usage) / sum(usage) if sum(usage) else 1.0,
        "admitted": float(counts.admitted),
        "oom": float(counts.oom),
        "oom_rate": counts.oom / counts.admitted if counts.admitted else 0.0,
        "retried": float(counts.retried),
    }


def _held(node: Node) -> float:
    """Bytes of the blocks that sequences hold there, on all its devices."""
    return occupied(node.engine) * node.engine.hardware.count


def facts(nodes: Sequence[Node]) -> dict[str, Any]:
    """As the first node's, with the sums over nodes, and under `nodes` what each is."""
    each = [node.engine.facts() for node in nodes]
    summed = {name: sum(told[name] for told in each) for name in ("devices", "blocks", "kv_tokens")}
    kinds = list(dict.fromkeys(told["hardware"] for told in each))
    own = [
        {name: told[name] for name in ("hardware", *summed)} | {"role": node.role} for node, told in zip(nodes, each, strict=True)
    ]
    return each[0] | summed | {"hardware": " + ".join(kinds), "nodes": own}
