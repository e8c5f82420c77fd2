"""Run directories made of records with known numbers, for tests of what the report says of them."""

from pathlib import Path
from typing import Any

import msgspec

from kvbench.core import Event, Record, Sample, Window

MANIFEST: dict[str, Any] = {
    "kvbench": "0.0",
    "name": "made",
    "started": "2026-01-01T00:00:00Z",
    "wall": 1767225600.0,
    "clock": "real",
    "seed": 7,
    "nonce": 99,
    "scenario": {"workload": {"arrivals": {"shape": "constant"}, "classes": {"default": {"slo": {}}}, "nonce": True}},
    "target": {"kind": "http", "model": "stub"},
    "host": {},
    "tokenizer": {"kind": "words", "error": 0.01},
    "phases": [],
    "argv": [],
}


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def record(number: int, due: float, ttft: float = 0.1, tokens: int = 11, gap: float = 0.02, **changes: Any) -> Record:
    """A request sent when due; its first token after `ttft`, then an event every `gap`. `changes` override fields."""
    times = [ns(due + ttft + k * gap) for k in range(tokens)]
    first = times[0] if times else None
    done = times[-1] if times else ns(due + ttft)
    plain: dict[str, Any] = {"due_ns": ns(due), "release_ns": ns(due), "sent_ns": ns(due), "written_ns": ns(due)}
    plain |= {"first_ns": first, "content_ns": first, "done_ns": done, "end_ns": done, "token_ns": times, "reads": tokens}
    plain |= {"outcome": "ok", "status": 200, "finish": "stop", "source": "usage"}
    plain |= {"asked_in": 256, "asked_out": tokens, "n_in": 256, "n_out": tokens}
    return Record(id=number, **(plain | changes))


def lost(number: int, due: float, outcome: str, cause: str = "", after: float = 0.2, **changes: Any) -> Record:
    """A request without an answer: failed, rejected, timeout or cancelled after `after`; shed, dropped, withdrawn never left."""
    bare: dict[str, Any] = {"due_ns": ns(due), "end_ns": ns(due + after), "outcome": outcome, "cause": cause}
    bare |= {"asked_in": 256, "asked_out": 11}
    if outcome not in ("shed", "dropped", "withdrawn"):
        bare |= {"release_ns": ns(due), "sent_ns": ns(due), "written_ns": ns(due)}
    return Record(id=number, **(bare | changes))


def write(
    path: Path,
    records: list[Record],
    *,
    steady: tuple[float, float] = (0.0, 10.0),
    offered: int | None = None,
    reason: str = "duration",
    events: list[Event] | None = None,
    samples: list[Sample] | None = None,
    windows: list[Window] | None = None,
    manifest: dict[str, Any] | None = None,
    scenario: dict[str, Any] | None = None,
) -> Path:
    """A run of one steady phase and a drain, that ended in order. `events` come on top; `offered` is what the driver claims."""
    path.mkdir(parents=True, exist_ok=True)
    facts = MANIFEST | (manifest or {})
    facts["scenario"] = {**facts["scenario"], **(scenario or {})}
    start, end = steady
    count = len(records) if offered is None else offered
    over = max([end, *((r.end_ns or 0) / 1e9 for r in records)])
    told = [
        Event(t=0.0, kind="run_start"),
        Event(t=start, kind="phase_start", data={"phase": "steady", "phase_kind": "steady", "bounds": {"seconds": end - start}}),
        Event(t=end, kind="phase_end", data={"phase": "steady", "phase_kind": "steady", "reason": reason, "offered": count}),
        Event(t=end, kind="phase_start", data={"phase": "drain", "phase_kind": "drain", "bounds": {}}),
        Event(t=over, kind="phase_end", data={"phase": "drain", "phase_kind": "drain", "reason": "drained", "offered": 0}),
        *(events or []),
        Event(t=over, kind="run_end", data={"reason": "completed", "inflight": 0}),
    ]
    encode = msgspec.json.Encoder()
    (path / "manifest.json").write_bytes(encode.encode(facts))
    for name, rows in (("requests", records), ("events", told), ("samples", samples or []), ("windows", windows or [])):
        (path / f"{name}.jsonl").write_bytes(encode.encode_lines(rows))
    return path


def own(seconds: int, **values: float) -> list[Sample]:
    """What the run says of itself, once a second."""
    return [
        Sample(t=float(t), name=name, value=value, source="kvbench")
        for t in range(1, seconds + 1)
        for name, value in values.items()
    ]


def gauges(values: dict[str, list[float]], source: str = "target") -> list[Sample]:
    """Readings at 1, 2, 3, ... seconds."""
    return [Sample(t=k + 1.0, name=name, value=v, source=source) for name, row in values.items() for k, v in enumerate(row)]
