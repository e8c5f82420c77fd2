"""How the blocks of a trace are reused, whatever the cache: ideal rates, reuse distances, working set."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.core import Seconds
from kvbench.plan.replay.compiled import Flags, Ids
from kvbench.plan.replay.references import References

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
WINDOWS: tuple[Seconds, ...] = (60.0, 600.0, 3600.0)


def ideal(refs: References) -> dict[str, float | None]:
    """Hit rates of a cache that forgets nothing, under every denominator in use; prompts one after the other.

    block: references to known blocks / references. full: the same over blocks filled by the prompt. token: tokens of the leading
    run of known blocks / prompt tokens. request_mean: the mean over requests of that ratio. with_generated: as `full`, where
    answers are cached too (`continued`).
    """
    known = ~refs.first
    size = np.repeat(refs.sizes, np.diff(refs.starts))
    full = refs.tokens == size
    found = refs.run_tokens(known)
    total = int(full.sum())
    return {
        "block": float(known.mean()),
        "full": float(known[full].mean()) if total else None,
        "token": float(found.sum() / refs.prompts.sum()),
        "request_mean": float((found / refs.prompts).mean()),
        "with_generated": float((known[full].sum() + continued(refs, known, full)) / total) if total else None,
    }


def continued(refs: References, known: Flags, full: Flags) -> int:
    """Full blocks that would be found besides if answers were cached behind their prompts.

    Ids say nothing of answers, so who continues whom is inferred: a request whose known full blocks end exactly where
    those of an earlier prompt of two or more did is its next turn (one block is often a preamble that all share). It finds what
    prompt and answer filled. A prompt is continued once, the latest first.
    """
    keys, starts = refs.keys.tolist(), refs.starts.tolist()
    runs = refs.run(known & full).tolist()
    filled = np.add.reduceat(np.append(full, False).astype(np.int64), refs.starts[:-1]) * (np.diff(refs.starts) > 0)
    reach = ((refs.prompts + refs.answers) // np.maximum(refs.sizes, 1)).tolist()
    ends: dict[int, list[int]] = {}  # last full block of a prompt -> blocks that prompt and answer fill
    more = 0
    for begin, run, blocks, far in zip(starts[:-1], runs, filled.tolist(), reach, strict=True):
        if run and (open_ := ends.get(keys[begin + run - 1])):
            more += max(0, min(open_.pop(), blocks) - run)
        if blocks >= 2:
            ends.setdefault(keys[begin + blocks - 1], []).append(far)
    return more


def reuse(refs: References, distances: Ids) -> dict[str, Any]:
    """Who is reused, and after how long: distinct blocks in between, and seconds where the trace has times.

    top_tenth: share of the repeated references that go to the tenth of the blocks most often referenced.
    """
    counts = np.bincount(refs.keys)
    again = np.sort(counts - 1)[::-1]
    repeats = int(again.sum())
    top = int(again[: max(1, len(again) // 10)].sum())
    gaps = _gaps(refs)
    return {
        "repeats": repeats,
        "reused_blocks": int((counts > 1).sum()),
        "reused_share": float((counts > 1).mean()),
        "top_tenth": top / repeats if repeats else None,
        "blocks": _quantiles(distances[distances < len(refs.keys)]),
        "seconds": None if gaps is None else _quantiles(gaps[np.isfinite(gaps)]),
    }


def _quantiles(values: NDArray[Any]) -> dict[str, float] | None:
    if not len(values):
        return None
    found = np.quantile(values, QUANTILES, method="inverted_cdf")
    return {f"{q:g}": value.item() for q, value in zip(QUANTILES, found, strict=True)}


def _gaps(refs: References) -> NDArray[np.float64] | None:
    """(n,) seconds to the next reference to the same block, infinite after the last; None without times."""
    if refs.times is None:
        return None
    at = np.repeat(refs.times, np.diff(refs.starts))
    order = np.argsort(refs.keys, kind="stable")
    gaps = np.full(len(at), np.inf)
    same = refs.keys[order[1:]] == refs.keys[order[:-1]]
    gaps[order[:-1][same]] = (at[order[1:]] - at[order[:-1]])[same]
    return gaps


def working_set(refs: References) -> list[dict[str, float]]:
    """Distinct blocks referenced in the last `seconds`, mean over the trace and peak, for windows that are not longer than it."""
    gaps = _gaps(refs)
    if gaps is None or refs.times is None:
        return []
    at = np.repeat(refs.times, np.diff(refs.starts))
    begin, end = float(refs.times.min()), float(refs.times.max())
    rows = []
    for window in WINDOWS:
        if window > end - begin:
            continue
        until = at + np.minimum(gaps, window)
        mean = (np.minimum(until, end) - at).sum() / (end - begin)
        times = np.concatenate((until, at))
        change = np.repeat((-1, 1), len(at))
        order = np.lexsort((change, times))  # at one instant who leaves goes before who comes
        rows.append({"seconds": window, "mean": float(mean), "peak": int(np.cumsum(change[order]).max())})
    return rows
