"""What an Nsight Systems capture says of a served model: its layers, the GPU's work, gaps, and where it lies in a run.

`events.read` makes a Capture of any export; `account.profiled` makes of it the numbers that `kvbench profile` prints,
`align.aligned` puts them beside a run's windows, and `account.ranges` answers whether a capture is worth anything. Instants are
ns on the capture's own axis.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
KERNEL, MEMCPY, MEMSET, GRAPH = range(4)  # Operations.kind


class CaptureError(ValueError):
    """A file that is no capture, or cannot be read as one. The text is for the user: what is wrong, and what to do."""


class Name(NamedTuple):
    """What a range is called, and the NVTX domain it is in ("": the default one)."""

    domain: str
    text: str


@dataclass(frozen=True, slots=True)
class Ranges:
    """NVTX ranges that began and ended, as columns of one length.

    thread: globalTid; -1 where unknown; another negative number, its own, where a range began on one thread and ended on another.
    unfinished: ranges without an end, left out. damaged: rows that make no sense, left out.
    """

    start: Ints
    end: Ints
    thread: Ints
    name: Ints  # index into names
    names: list[Name]
    unfinished: int = 0
    damaged: int = 0


@dataclass(frozen=True, slots=True)
class Operations:
    """What GPUs did, in order of start. call_start, call_end, thread: of the API call that launched it; thread -1 where that is
    not in the capture. size: bytes of memory operations. graph: launched as part of a CUDA graph."""

    start: Ints
    end: Ints
    device: Ints
    stream: Ints
    kind: Ints
    name: Ints  # index into names
    size: Ints
    call_start: Ints
    call_end: Ints
    thread: Ints
    graph: NDArray[np.bool_]
    names: list[str]
    damaged: int = 0


class Device(NamedTuple):
    """A GPU. bandwidth: bytes/s of its memory, None where the capture does not say."""

    name: str
    bandwidth: float | None


@dataclass(frozen=True, slots=True)
class Metric:
    """A sampled GPU metric: `value` in the unit its name states, at instants `at`, ascending."""

    device: int
    name: str
    at: Ints
    value: Floats


class Diagnostic(NamedTuple):
    """What Nsight Systems itself had to say. severity: 2 a warning, 3 an error."""

    severity: int
    text: str


class Found(NamedTuple):
    """Is a capture worth anything? ranges: finished NVTX ranges; layers: different layers among them."""

    ranges: int
    layers: int
    diagnostics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Capture:
    """One capture. utc: ns since 1970 at instant 0 of its axis, None where it does not say. begin, end: what it covers."""

    path: Path
    exporter: str
    schema: str
    utc: int | None
    begin: int
    end: int
    ranges: Ranges
    operations: Operations
    devices: dict[int, Device]
    metrics: list[Metric]
    graph_launches: int
    diagnostics: list[Diagnostic]
