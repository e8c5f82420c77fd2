"""libcachesim's policies by our names, and our references as a file that it reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import libcachesim
import numpy as np

from kvbench.plan.replay.compiled import Ids
from kvbench.plan.replay.offline import next_use

PEERS: dict[str, Callable[..., Any]] = {
    "fifo": libcachesim.FIFO,
    "lru": libcachesim.LRU,
    "lfu": libcachesim.LFU,
    "clock": libcachesim.Clock,
    "sieve": libcachesim.Sieve,
    "arc": libcachesim.ARC,
    "2q": libcachesim.TwoQ,
    "lirs": libcachesim.LIRS,
    "s3fifo": libcachesim.S3FIFO,
    "gdsf": libcachesim.GDSF,
    "lecar": libcachesim.LeCaR,
    "belady": libcachesim.Belady,
}


def oracle(keys: Ids, unique: int, folder: Path) -> Path:
    """The references as an oracleGeneral file in `folder`: time, id, size 1, index of the next reference or -1."""
    rows = np.zeros(len(keys), np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")]))
    rows["time"], rows["id"], rows["size"] = np.arange(len(keys)), keys.astype(np.uint64) + 1, 1
    following = next_use(keys, unique).astype(np.int64)
    rows["next"] = np.where(following == len(keys), -1, following + 1)
    file = folder / "trace.oracleGeneral.bin"
    rows.tofile(file)
    return file


def misses(name: str, file: Path, blocks: int, refs: int) -> int:
    """Misses of libcachesim's policy."""
    reader = libcachesim.TraceReader(str(file), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
    rate, _ = PEERS[name](blocks, hashpower=16).process_trace(reader)
    return round(rate * refs)
