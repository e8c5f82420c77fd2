"""Columns of numbers, grouped and described."""

from itertools import pairwise

import numpy as np

from kvbench.nsys import Ints


def by(which: Ints, column: Ints) -> list[tuple[int, Ints]]:
    """(value, those of `which` that have it in `column`), in order of value."""
    order = np.argsort(column, kind="stable")
    values, heads = np.unique(column[order], return_index=True)
    return list(zip(values.tolist(), np.split(which[order], heads[1:]), strict=True)) if len(values) else []


def spread(nanos: Ints) -> dict[str, float]:
    """Total, mean, median, p99, least and most of spans, in seconds."""
    median, p99 = np.quantile(nanos, [0.5, 0.99]).tolist()
    return {
        "total": int(nanos.sum()) / 1e9, "mean": float(nanos.mean()) / 1e9, "median": median / 1e9, "p99": p99 / 1e9,
        "min": int(nanos.min()) / 1e9, "max": int(nanos.max()) / 1e9,
    }  # fmt: skip


def runs(column: Ints) -> list[slice]:
    """Where a column of equal values side by side has each of them."""
    if not len(column):
        return []
    edges = np.concatenate([[0], np.flatnonzero(np.diff(column)) + 1, [len(column)]]).tolist()
    return [slice(low, high) for low, high in pairwise(edges)]
