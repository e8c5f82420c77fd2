"""A trace as the references to blocks that its prompts make, in replay order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from kvbench.plan.replay.compiled import Flags, Ids
from kvbench.workload.formats import FORMATS
from kvbench.workload.rows import Row
from kvbench.workload.traces import Trace

Count = Literal["all", "full"]
"""Which blocks of a prompt are references: all that have ids, or only those filled to the last token, as engines cache them."""


@dataclass(frozen=True)
class References:
    """n references of m requests. keys: (n,) dense ids from 0 in order of first use, below `unique`. starts: (m + 1,) request i
    has references starts[i] to starts[i + 1]. tokens: (n,) of the prompt in each block. prompts, answers: (m,) tokens of each
    request, those without ids too. sizes: (m,) tokens per block. times: (m,) seconds, where the trace has any."""

    keys: Ids
    unique: int
    starts: NDArray[np.int64]
    tokens: Ids
    prompts: NDArray[np.int64]
    answers: NDArray[np.int64]
    sizes: NDArray[np.int64]
    times: NDArray[np.float64] | None

    @property
    def block(self) -> int | None:
        """Tokens per block; None where the trace mixes sizes."""
        sizes = np.unique(self.sizes[self.sizes > 0])
        return int(sizes[0]) if len(sizes) == 1 else None

    @property
    def first(self) -> Flags:
        """(n,) whether this is the first reference to its block."""
        found = np.zeros(len(self.keys), np.bool_)
        found[np.unique(self.keys, return_index=True)[1]] = True
        return found

    def run(self, hits: Flags) -> NDArray[np.int64]:
        """(m,) how many leading blocks of each request are hits: what a prefix cache can use of them."""
        n = len(self.keys)
        misses = np.append(np.where(hits, n, np.arange(n)), n)
        first = np.minimum.reduceat(misses, self.starts[:-1])
        ends = self.starts[1:]
        return np.where(ends > self.starts[:-1], np.minimum(first, ends) - self.starts[:-1], 0)

    def run_tokens(self, hits: Flags) -> NDArray[np.int64]:
        """(m,) prompt tokens in the leading run of hits of each request."""
        before = np.concatenate(([0], np.cumsum(self.tokens, dtype=np.int64)))
        begin = self.starts[:-1]
        return cast("NDArray[np.int64]", before[begin + self.run(hits)] - before[begin])


def references(trace: Trace, count: Count = "all") -> References:
    """The references of a trace. Raises ValueError where none of its rows has block ids, naming the formats that have."""
    rows = trace.rows
    hashes = [row.hashes[: row.n_in // row.block] if count == "full" and row.hashes else row.hashes for row in rows]
    if not any(hashes):
        raise ValueError(_without_ids(trace, count))
    ids: dict[int, int] = {}
    keys = [ids.setdefault(key, len(ids)) for found in hashes for key in found]
    tokens = [
        min(row.block, row.n_in - i * row.block) for row, found in zip(rows, hashes, strict=True) for i in range(len(found))
    ]
    return References(
        keys=np.array(keys, np.int32),
        unique=len(ids),
        starts=np.concatenate(([0], np.cumsum([len(found) for found in hashes]))).astype(np.int64),
        tokens=np.array(tokens, np.int32),
        prompts=np.array([row.n_in for row in rows], np.int64),
        answers=np.array([row.n_out for row in rows], np.int64),
        sizes=np.array([row.block for row in rows], np.int64),
        times=_times(rows),
    )


def _times(rows: Sequence[Row]) -> NDArray[np.float64] | None:
    at = [row.at for row in rows if row.at is not None]
    return np.array(at, np.float64) if len(at) == len(rows) else None


def _without_ids(trace: Trace, count: Count) -> str:
    file, name = trace.facts["file"], trace.facts["format"]
    having = [known for known, layout in FORMATS.items() if "hashes" in layout.holds]
    if name not in having:
        return (
            f"{file}: {name} traces have no block ids, so nothing is known of what prompts share and no cache can be replayed; "
            f"formats that have them: {', '.join(having)}"
        )
    if count == "full" and any(row.hashes for row in trace.rows):
        return f"{file}: no prompt fills a block: count all blocks instead (--count all)"
    return f"{file}: no row has block ids ({name} rows may have them), so no cache can be replayed"
