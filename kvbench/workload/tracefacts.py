"""What a trace holds, in numbers: rates, lengths, and how much of its prompts an endless cache would have."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvbench.workload.rows import Row

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)


def describe(rows: Sequence[Row]) -> dict[str, Any]:
    """Facts of the rows as they will be replayed; strict JSON. What cannot be said is None.

    Times are those recorded (`at`), of turns that will follow their predecessor too. duration_s: last - first. mean_rate: rows
    after the first per second of it. peak_rate_1s, peak_rate_60s: most rows in any half-open span of that length, per second.
    block_hit_rate, token_hit_rate: see `ideal_hits`.
    """
    dues = np.array([row.at for row in rows if row.at is not None])
    span = float(dues[-1] - dues[0]) if len(dues) else 0.0
    facts: dict[str, Any] = {
        "rows": len(rows),
        "sessions": len({row.session for row in rows if row.session is not None}),
        "duration_s": span if len(dues) else None,
        "mean_rate": (len(dues) - 1) / span if span > 0 else None,
        "peak_rate_1s": peak_rate(dues, 1.0),
        "peak_rate_60s": peak_rate(dues, 60.0),
        "tokens_in": sum(row.n_in for row in rows),
        "tokens_out": sum(row.n_out for row in rows),
        "block": sorted({row.block for row in rows if row.hashes}),
    }
    for name, lengths in (("in", [row.n_in for row in rows]), ("out", [row.n_out for row in rows])):
        values = np.quantile(lengths, QUANTILES, method="inverted_cdf")
        facts[f"quantiles_{name}"] = {f"{q:g}": int(v) for q, v in zip(QUANTILES, values, strict=True)}
        facts[f"mean_{name}"] = float(np.mean(lengths))
    return facts | ideal_hits(rows)


def peak_rate(dues: np.ndarray, span: float) -> float | None:
    """Most of the ascending `dues` in any [t, t + span), per second. None where they cover less than `span`."""
    if len(dues) == 0 or dues[-1] - dues[0] < span:
        return None
    return float((np.searchsorted(dues, dues + span, "left") - np.arange(len(dues))).max() / span)


def ideal_hits(rows: Sequence[Row]) -> dict[str, Any]:
    """Hit rates of a cache that forgets nothing and keeps prompts only, rows in order, one after the other.

    block_hit_rate: ids seen in an earlier row / ids. token_hit_rate: tokens of the leading run of such ids, the last block
    counted as it is long / all prompt tokens (those without ids always miss). None where no row has ids.
    """
    seen: set[int] = set()
    refs = hits = tokens = 0
    for row in rows:
        known = [i in seen for i in row.hashes]
        run = known.index(False) if False in known else len(known)
        tokens += min(run * row.block, row.n_in)
        refs += len(known)
        hits += sum(known)
        seen.update(row.hashes)
    if not refs:
        return {"block_refs": 0, "blocks": 0, "block_hit_rate": None, "token_hit_rate": None}
    total = sum(row.n_in for row in rows)
    return {"block_refs": refs, "blocks": len(seen), "block_hit_rate": hits / refs, "token_hit_rate": tokens / total}
