"""What GPUs did: kernels, copies, fills and whole graphs, each with the API call that launched it."""

import numpy as np
from numpy.typing import NDArray

from kvbench.nsys import GRAPH, KERNEL, MEMCPY, MEMSET, Ints, Operations
from kvbench.nsys.tables import ABSENT, LONGEST, Tables, spans

_PROCESS = ~0xFFFFFF  # of a globalTid: its globalPid
_COLUMNS = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "graphNodeId", "bytes")
_KINDS = {  # table: (kind, column of the name)
    "CUPTI_ACTIVITY_KIND_KERNEL": (KERNEL, "demangledName"),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (MEMCPY, "copyKind"),
    "CUPTI_ACTIVITY_KIND_MEMSET": (MEMSET, "memKind"),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (GRAPH, "graphId"),
}
_COPIES = {  # CUpti_ActivityMemcpyKind, for exports without its table of names
    1: "Host-to-Device", 2: "Device-to-Host", 3: "Host-to-Array", 4: "Array-to-Host", 5: "Array-to-Array", 6: "Array-to-Device",
    7: "Device-to-Array", 8: "Device-to-Device", 9: "Host-to-Host", 10: "Peer-to-Peer", 11: "Unified Host-to-Device",
    12: "Unified Device-to-Host", 13: "Unified Device-to-Device",
}  # fmt: skip


def operations(tables: Tables) -> Operations:
    """All GPU operations of an export, in order of start; none on a machine without a GPU."""
    parts = []
    for table, (kind, named) in _KINDS.items():
        columns = tables.numbers(table, *_COLUMNS, named, "shortName")
        short = np.where(columns[named] == ABSENT, columns.pop("shortName"), columns[named])
        columns["named"] = short if kind == KERNEL else columns[named]
        columns.pop(named)
        columns["kind"] = np.full(len(columns["start"]), kind)
        parts.append(columns)
    every = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    whole = spans(every["start"], every["end"])
    order = np.flatnonzero(whole)
    order = order[np.argsort(every["start"][order], kind="stable")]
    every = {name: column[order] for name, column in every.items()}
    names, index = _named(tables, every["kind"], every["named"])
    call_start, call_end, thread = _calls(tables, every["correlationId"], every["globalPid"])
    return Operations(
        start=every["start"],
        end=every["end"],
        device=np.where(every["deviceId"] == ABSENT, -1, every["deviceId"]),
        stream=np.where(every["streamId"] == ABSENT, -1, every["streamId"]),
        kind=every["kind"],
        name=index,
        size=np.clip(every["bytes"], 0, LONGEST),
        call_start=call_start,
        call_end=call_end,
        thread=thread,
        graph=(every["kind"] == GRAPH) | ((every["graphNodeId"] != ABSENT) & (every["graphNodeId"] != 0)),
        names=names,
        damaged=int(np.count_nonzero(~whole)),
    )


def _named(tables: Tables, kind: Ints, code: Ints) -> tuple[list[str], Ints]:
    """(names, each operation's index into them)."""
    index = _paired(kind, code)
    first = np.unique(index, return_index=True)[1]
    strings = tables.strings() if len(kind) else {}
    copies = {**_COPIES, **_labels(tables, "ENUM_CUDA_MEMCPY_OPER")}
    memories = _labels(tables, "ENUM_CUDA_MEM_KIND")
    names = []
    for of, number in zip(kind[first].tolist(), code[first].tolist(), strict=True):
        if of == KERNEL:
            names.append(strings.get(number, "kernel without a name"))
        elif of == MEMCPY:
            names.append(f"memcpy {copies.get(number, 'Unknown')}")
        elif of == MEMSET:
            names.append(f"memset {memories[number]}" if number in memories else "memset")
        else:
            names.append("CUDA graph")
    return names, index


def _paired(one: Ints, other: Ints) -> Ints:
    """A number for each different pair, from 0 on without gaps."""
    values, right = np.unique(other, return_inverse=True)
    left = np.unique(one, return_inverse=True)[1]
    index: Ints = np.unique(left * len(values) + right, return_inverse=True)[1].astype(np.int64)
    return index


def _labels(tables: Tables, table: str) -> dict[int, str]:
    return {key: str(label) for key, label in tables.rows(table, "id", "label") if isinstance(key, int) and label}


def _calls(tables: Tables, correlation: Ints, process: Ints) -> tuple[Ints, Ints, Ints]:
    """(start, end, thread) of the API call that launched each operation: the first with its correlation in its process."""
    calls = tables.numbers("CUPTI_ACTIVITY_KIND_RUNTIME", "start", "end", "globalTid", "correlationId")
    kept = (calls["correlationId"] != ABSENT) & (calls["globalTid"] != ABSENT)
    kept &= spans(calls["start"], calls["end"])
    calls = {name: column[kept] for name, column in calls.items()}
    none = np.full(len(correlation), -1, np.int64)
    if not len(calls["start"]):
        return none, none.copy(), none.copy()
    owner = calls["globalTid"] & _PROCESS
    known: NDArray[np.bool_] = process != ABSENT
    if not known.any():  # an export without processes: correlations alone have to do
        owner = np.full_like(owner, ABSENT)
    keys = _paired(np.concatenate([calls["correlationId"], correlation]), np.concatenate([owner, process]))
    call, wanted = keys[: len(owner)], keys[len(owner) :]
    first = np.full(int(keys.max()) + 1, -1, np.int64)
    order = np.argsort(-calls["start"], kind="stable")
    first[call[order]] = order  # the last written is the earliest call
    found = np.where(correlation == ABSENT, -1, first[wanted])
    return tuple(np.where(found >= 0, calls[name][found], -1) for name in ("start", "end", "globalTid"))  # type: ignore[return-value]
