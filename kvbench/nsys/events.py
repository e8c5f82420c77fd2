"""An export's rows as a Capture: ranges, GPU operations with the call that launched each, clock, diagnostics.

Numbers and names are those of the exporter's documented schema, as seen in exports of 2022.4, 2023.4 and 2024.2.
"""

from typing import Any

import numpy as np

from kvbench.nsys import Capture, Device, Diagnostic, Name, Operations, Ranges
from kvbench.nsys.metrics import metrics
from kvbench.nsys.operations import operations
from kvbench.nsys.tables import ABSENT, Tables, sane, spans

_RANGES = (59, 60, 70, 71)  # push/pop and start/end; the same of ranges imported from text
_DOMAIN = 75  # a domain was created: its text is the domain's name
_TOLD = (2, 3)  # severities of diagnostics that are for the user: warning, error; 1 is information, 4 chatter
_NVTX = ("start", "end", "eventType", "globalTid", "endGlobalTid", "domainId", "textId")


def read(tables: Tables) -> Capture:
    """All of a capture that this package knows. Raises CaptureError where a table cannot be read."""
    meta = tables.pairs("META_DATA_EXPORT", "EXPORT_META_DATA")
    found, work = ranges(tables), operations(tables)
    utc, zero = _clock(tables, meta)
    begin, end = _covers(tables, zero, found, work)
    return Capture(
        path=tables.path,
        exporter=meta.get("EXPORT_PRODUCT_VERSION", ""),
        schema=meta.get("EXPORT_SCHEMA_VERSION", ""),
        utc=utc,
        begin=begin,
        end=end,
        ranges=found,
        operations=work,
        devices=_devices(tables),
        metrics=metrics(tables),
        graph_launches=_graph_launches(tables),
        diagnostics=diagnostics(tables),
    )


def ranges(tables: Tables) -> Ranges:
    """The NVTX ranges of an export that have an end, with the names of their domains."""
    strings, texts = tables.strings(), _texts(tables)
    parts = [np.array(rows, np.int64) for rows in tables.chunks("NVTX_EVENTS", *_NVTX)]
    rows = np.concatenate(parts) if parts else np.empty((0, len(_NVTX)), np.int64)
    start, end, kind, thread, other, domain, text_id = rows.T
    domains = _domains(rows, texts)
    ours = np.isin(kind, _RANGES)
    open_ended = ours & (end == ABSENT)
    whole = ours & spans(start, end)
    kept = np.flatnonzero(whole)
    names: dict[Name, int] = {}
    index = np.empty(len(kept), np.int64)
    for at, row in enumerate(kept.tolist()):
        text = texts.get(row)
        if text is None:
            text = strings.get(int(text_id[row]), "")
        name = Name(domains.get((_process(int(thread[row])), int(domain[row])), ""), text)
        index[at] = names.setdefault(name, len(names))
    crossed = (other != ABSENT) & (other != thread)
    threads = np.where(crossed, -2 - np.arange(len(rows)), np.where(thread == ABSENT, -1, thread))
    damaged = int(np.count_nonzero(ours & ~open_ended & ~whole))
    return Ranges(start[kept], end[kept], threads[kept], index, list(names), int(np.count_nonzero(open_ended)), damaged)


def diagnostics(tables: Tables) -> list[Diagnostic]:
    """What Nsight Systems warned of; exports before 2024 have none."""
    rows = tables.rows("DIAGNOSTIC_EVENT", "severity", "text")
    told = [Diagnostic(severity, str(text)) for severity, text in rows if severity in _TOLD]
    return list(dict.fromkeys(told))


def _texts(tables: Tables) -> dict[int, str]:
    """The names that are in the rows themselves, by the number of the row."""
    texts = (text for rows in tables.chunks("NVTX_EVENTS", "text", numeric=False) for (text,) in rows)
    return {number: str(text) for number, text in enumerate(texts) if text is not None}


def _domains(rows: np.ndarray[Any, Any], texts: dict[int, str]) -> dict[tuple[int, int], str]:
    """Names of domains by process and number: processes count theirs from 1 each."""
    made = np.flatnonzero(rows[:, 2] == _DOMAIN).tolist()
    return {(_process(int(rows[at, 3])), int(rows[at, 5])): texts[at] for at in reversed(made) if at in texts}


def _process(thread: int) -> int:
    return thread >> 24 & 0xFFFFFF if thread != ABSENT else ABSENT


def _clock(tables: Tables, meta: dict[str, str]) -> tuple[int | None, int | None]:
    """(ns since 1970 at the axis' 0, where on the axis the capture began), None where it does not say. An export made with
    --ts-normalize=true has UTC on its axis; others begin at 0."""
    told = tables.numbers("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")["utcEpochNs"]
    known = told[(told > 0) & sane(told)]
    began = int(known[0]) if len(known) else None
    if meta.get("EXPORT_PARAM_TIME_NORMALIZE") == "true":
        return 0, began
    return began, 0


def _covers(tables: Tables, zero: int | None, found: Ranges, work: Operations) -> tuple[int, int]:
    """From when to when it was captured: as long as the capture says from `zero` on, and all that is in it. (Its startTime and
    stopTime count from the start of the session, which may have had captures before.)"""
    said = tables.numbers("ANALYSIS_DETAILS", "duration")["duration"]
    length = said[(said > 0) & sane(said)]
    spans = [(int(each.start.min()), int(each.end.max())) for each in (found, work) if len(each.start)]
    if zero is not None and len(length):
        spans.append((zero, zero + int(length[0])))
    return min((begin for begin, _ in spans), default=0), max((end for _, end in spans), default=0)


def _devices(tables: Tables) -> dict[int, Device]:
    """GPUs by the number that operations call them by."""
    found = {}
    for number, cuda, name, bandwidth in tables.rows("TARGET_INFO_GPU", "id", "cuDevice", "name", "memoryBandwidth"):
        key = cuda if isinstance(cuda, int) else number
        if isinstance(key, int):
            per_second = float(bandwidth) if isinstance(bandwidth, int) and bandwidth > 0 else None
            found[key] = Device(str(name) if name is not None else "", per_second)
    return found


def _graph_launches(tables: Tables) -> int:
    """Calls that launched a CUDA graph. Ranges inside a graph are not recorded when it runs."""
    names = {key for key, value in tables.strings().items() if value.startswith(("cudaGraphLaunch", "cuGraphLaunch"))}
    if not names:
        return 0
    called = tables.numbers("CUPTI_ACTIVITY_KIND_RUNTIME", "nameId", "correlationId")
    return len(np.unique(called["correlationId"][np.isin(called["nameId"], list(names))]))
