"""The seven request features (docs/metrics.md, section 4) and the table of sampling parameters that the requests carried."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvbench.core import Record
from kvbench.metrics.histogram import order_statistic, supported

PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")


def features(records: Sequence[Record], accesses: Mapping[str, Any] | None) -> dict[str, Any]:
    """Of the requests that were offered; lengths are the server's where it told them, else those asked for. accesses: the fold of
    cache.jsonl, where there is one."""
    lengths = np.array([r.n_in if r.n_in is not None else r.asked_in for r in records], dtype=float)
    told = sum(r.n_in is not None for r in records)
    outputs = np.sort(np.array([r.n_out for r in records if r.outcome == "ok" and r.n_out is not None], dtype=float))
    return {
        "input_length": {"bins": histogram(lengths), "n": len(lengths), "told_by_server": told, "unit": "tokens"},
        "output_length_p99": {
            "value": order_statistic(outputs, 0.99) if len(outputs) else None,
            "n": len(outputs),
            "supported": supported(0.99, len(outputs)),
            "unit": "tokens",
            "reason": None if len(outputs) else "no answer whose length is known",
        },
        "head_activity_variance": {"value": None, "reason": "needs a probe of the same model: no probe is linked to this run"},
        "reuse_distance": reuse(accesses),
        "beam_width": shares(r.sampling.get("n", 1) if r.sampling.get("use_beam_search") else 1 for r in records),
        "temperature": shares(r.sampling.get("temperature") for r in records),
        "penalties": shares(_penalties(r.sampling) for r in records),
        "sampling": sampling(records),
    }


def reuse(accesses: Mapping[str, Any] | None) -> dict[str, Any]:
    """Distinct blocks between two uses of one, by layer group: p50, p90, p99, n."""
    if accesses is None:
        return {"value": None, "reason": "needs cache.jsonl: target.cache_log on the embedded engine, kv_events on a server"}
    found = {name: row["reuse_distance"] for name, row in accesses["groups"].items() if row["reuse_distance"]["n"]}
    if not found:
        return {"value": None, "reason": "no block was used twice"}
    return {"value": {name: {key: row[key] for key in ("p50", "p90", "p99", "n")} for name, row in found.items()}, "reason": None}


def histogram(values: "np.typing.NDArray[np.float64]") -> list[dict[str, int]]:
    """Counts in bins that double: [0, 1), [1, 2), [2, 4), [4, 8), ..., from the first to the last that hold something."""
    if not len(values):
        return []
    bins = np.floor(np.log2(np.maximum(values, 0.5))).astype(int) + 1  # 0 -> 0, 1 -> 1, 2 and 3 -> 2
    counts = np.bincount(bins)
    first = int(bins.min())
    edges = [0, *(2**k for k in range(len(counts)))]
    return [{"from": edges[k], "below": edges[k + 1], "n": int(counts[k])} for k in range(first, len(counts))]


def shares(values: "Sequence[Any] | Any") -> dict[str, Any]:
    """How often each value was sent; "default" where the request left it to the server."""
    counts = Counter("default" if value is None else str(value) for value in values)
    total = sum(counts.values())
    return {"n": total, "shares": {name: count / total for name, count in counts.most_common()}}


def sampling(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Each distinct set of parameters with its requests, those that ended ok and their mean output length."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        parameters = {name: value for name, value in record.sampling.items() if name != "seed"}
        groups.setdefault(json.dumps(parameters, sort_keys=True), []).append(record)
    rows = []
    for key, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        lengths = [r.n_out for r in members if r.outcome == "ok" and r.n_out is not None]
        ok = sum(r.outcome == "ok" for r in members)
        mean = sum(lengths) / len(lengths) if lengths else None
        rows.append({"parameters": json.loads(key), "requests": len(members), "ok": ok, "mean_n_out": mean})
    return rows


def _penalties(parameters: dict[str, Any]) -> str:
    sent = [f"{name.removesuffix('_penalty')} {parameters[name]:g}" for name in PENALTIES if name in parameters]
    return ", ".join(sent) or "none"
