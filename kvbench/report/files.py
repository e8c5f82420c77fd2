"""A run directory as it lies on the disk, whole or cut off at any byte.

A run that was killed leaves every file readable but for the last line, which may be torn: it is dropped and counted. A line in
the middle that does not decode (a disk that filled up and was freed again) is dropped and counted apart.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from kvbench.core import Event, Record, Sample, Seconds, Window
from kvbench.report.kept import Planned

LINES = ("requests.jsonl", "events.jsonl", "windows.jsonl", "samples.jsonl")
T = TypeVar("T")


LONGEST: Seconds = 366 * 86_400.0  # of a run: a later instant is a damaged number, and a list of its seconds would not fit
Instant = Annotated[float, msgspec.Meta(ge=0, le=LONGEST)]
Stamp = Annotated[int, msgspec.Meta(ge=0, le=int(LONGEST * 1e9))]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Factor = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class _Workload(msgspec.Struct):
    arrivals: dict[str, Any] | None = None
    classes: dict[str, dict[str, Any] | None] | None = None


class _Warmup(msgspec.Struct):
    policy: str | None = None


class _Epoch(msgspec.Struct):
    classes: dict[str, dict[str, Any] | None] | None = None


class _Steady(msgspec.Struct):
    epochs: list[_Epoch] | None = None


class _Phases(msgspec.Struct):
    warmup: _Warmup | None = None
    steady: _Steady | None = None


class _Control(msgspec.Struct):
    law: str | None = None
    signal: str | None = None


class _Scenario(msgspec.Struct):
    workload: _Workload | None = None
    target: dict[str, Any] | None = None
    phases: _Phases | None = None
    control: _Control | None = None
    watch: dict[str, Any] | None = None
    verdict: dict[str, Any] | None = None
    budget: dict[str, Any] | None = None
    stop: list[dict[str, Any]] | None = None


class _Reset(msgspec.Struct):
    servers: list[dict[str, Any]] = []


class _Target(msgspec.Struct):
    reset: _Reset | None = None


class _Manifest(msgspec.Struct):
    """What the report takes for granted of a manifest, so that someone else's JSON is refused where it is read."""

    scenario: _Scenario | None = None
    phases: list[dict[str, Any]] | None = None
    seed: int | None = None
    target: _Target | None = None
    tokenizer: dict[str, Any] | None = None
    host: dict[str, Any] | None = None
    baseline: Planned | None = None


class _Asked(msgspec.Struct):
    n: Annotated[int, msgspec.Meta(ge=1, le=2**31)] = 1


class _Record(Record, kw_only=True):
    """A record with what the report takes for granted of it beyond its types; so the other three."""

    due_ns: Stamp = 0
    release_ns: Stamp | None = None
    sent_ns: Stamp | None = None
    written_ns: Stamp | None = None
    first_ns: Stamp | None = None
    content_ns: Stamp | None = None
    done_ns: Stamp | None = None
    end_ns: Stamp | None = None
    connect_ns: Stamp = 0
    asked_in: Number = 0
    asked_out: Number = 0
    n_in: Number | None = None
    n_out: Number | None = None
    cached: Number | None = None
    reasoning: Number | None = None
    token_ns: list[Stamp] = []
    token_n: list[Number] | None = None
    token_choice: list[Number] | None = None

    def __post_init__(self) -> None:
        for each in (self.token_n, self.token_choice):
            if each is not None and len(each) != len(self.token_ns):
                raise ValueError("what is noted of every token is as long as their times")
        if self.sampling:
            msgspec.convert(self.sampling, _Asked)


class _Event(Event, frozen=True, kw_only=True):
    t: Instant

    def __post_init__(self) -> None:
        if self.kind in DATA:
            msgspec.convert(self.data, DATA[self.kind])


class _Sample(Sample, frozen=True, kw_only=True):
    t: Instant


class _Window(Window, frozen=True, kw_only=True):
    start: Instant
    end: Instant


class _PhaseStart(msgspec.Struct):
    phase: str
    phase_kind: str
    start: Instant = 0.0


class _PhaseEnd(msgspec.Struct):
    phase: str
    reason: str = ""
    offered: Number | None = None


class _Stop(msgspec.Struct):
    rule: str
    reason: str
    phase: str
    phase_kind: str
    by: Literal["rule", "watch"] = "rule"


class _Signal(msgspec.Struct):
    signal: str


class _Level(msgspec.Struct):
    level: Factor
    why: str
    phase: str


class _Watch(msgspec.Struct):
    action: str
    metric: str | None = None
    value: float | None = None
    expected: float | None = None
    sigma: float | None = None
    z: float | None = None
    n: float | None = None
    start: Instant = 0.0
    end: Instant = 0.0
    level: Factor | None = None
    to: Factor | None = None


class _Snapshot(msgspec.Struct):
    window: _Window
    phase: str | None = None


class _GateHold(msgspec.Struct):
    until: Instant


class _ResetCheck(msgspec.Struct):
    hits: Factor | None = None
    queries: Factor | None = None
    reason: str | None = None


class _Fault(msgspec.Struct):
    kind: str
    edge: str


class _Watched(msgspec.Struct):
    judged: dict[str, Number] = {}
    skipped: dict[str, dict[str, Number]] = {}


class _RunEnd(msgspec.Struct):
    reason: str = ""
    postponed: Number | None = None
    holds: Number | None = None
    closed: Instant | None = None
    watch: _Watched | None = None
    law: dict[str, Any] | None = None
    level: Factor | None = None
    unread: dict[str, tuple[Number, Number, str]] | None = None


DATA: dict[str, type[Any]] = {
    "phase_start": _PhaseStart,
    "phase_end": _PhaseEnd,
    "stop": _Stop,
    "signal": _Signal,
    "level": _Level,
    "watch": _Watch,
    "snapshot": _Snapshot,
    "gate_hold": _GateHold,
    "reset_check": _ResetCheck,
    "fault": _Fault,
    "run_end": _RunEnd,
}
"""Of what the report reads of an event, by its kind."""


@dataclass
class RunFiles:
    """What was read. torn and damaged: lines dropped, per file (the last one; others). missing: files that are not there."""

    directory: Path
    manifest: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    torn: dict[str, int] = field(default_factory=dict)
    damaged: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def all(self, kind: str) -> list[Event]:
        """The events of one kind, in order."""
        return [event for event in self.events if event.kind == kind]

    def last(self, kind: str) -> Event | None:
        found = self.all(kind)
        return found[-1] if found else None

    @property
    def virtual(self) -> bool:
        return self.manifest.get("clock") == "virtual"

    @property
    def scenario(self) -> dict[str, Any]:
        return self.manifest.get("scenario") or {}

    @property
    def end(self) -> Seconds:
        """The latest instant of which the files know."""
        ended = max((r.end_ns or r.due_ns for r in self.records), default=0) / 1e9
        return max(ended, self.events[-1].t if self.events else 0.0, self.windows[-1].end if self.windows else 0.0)


def load(directory: Path) -> RunFiles:
    """Read a run directory, any prefix of it. ValueError, saying what is missing, where it is none."""
    if not directory.is_dir():
        raise ValueError(f"{directory}: there is no such directory")
    present = [name for name in ("manifest.json", *LINES) if (directory / name).is_file()]
    if not any(name in present for name in ("manifest.json", "requests.jsonl", "events.jsonl")):
        raise ValueError(f"{directory} is not a run directory: it holds none of manifest.json, requests.jsonl, events.jsonl")
    files = RunFiles(directory, missing=[name for name in ("manifest.json", *LINES) if name not in present])
    files.manifest = _manifest(directory, files)
    files.records = _lines(directory, "requests.jsonl", _Record, files)
    files.events = _lines(directory, "events.jsonl", _Event, files)
    files.windows = _lines(directory, "windows.jsonl", _Window, files)
    files.samples = _lines(directory, "samples.jsonl", _Sample, files)
    return files


def _manifest(directory: Path, files: RunFiles) -> dict[str, Any]:
    path = directory / "manifest.json"
    if not path.is_file():
        return {}
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        files.torn["manifest.json"] = 1
        return {}
    try:
        msgspec.convert(found, _Manifest)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path} is not a run's manifest: {error}") from None
    return dict(found)


def _lines(directory: Path, name: str, kind: type[T], files: RunFiles) -> list[T]:
    """The lines of one file. An object without its closing brace never decodes, so a torn line cannot pass for a whole one."""
    path = directory / name
    if not path.is_file():
        return []
    decode = msgspec.json.Decoder(kind).decode
    lines = path.read_bytes().split(b"\n")
    last = len(lines) - 1
    found: list[T] = []
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            found.append(decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            where = files.torn if number == last else files.damaged
            where[name] = where.get(name, 0) + 1
    return found
