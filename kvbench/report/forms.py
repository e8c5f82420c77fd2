"""What the report takes for granted of each line of a run directory, beyond its types: a file that says otherwise is not ours."""

from typing import Annotated, Any, Literal

import msgspec

from kvbench.core import CacheAccess, Event, Record, Sample, Seconds, Window
from kvbench.report.kept import Planned

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


class _Group(msgspec.Struct):
    name: str
    first: int
    last: int
    block: int
    bytes: float
    blocks: int


class _Node(msgspec.Struct):
    hardware: str
    devices: int
    role: str
    blocks: int


class _Target(msgspec.Struct):
    reset: _Reset | None = None
    tiers: dict[str, Any] | None = None
    groups: list[_Group] | None = None
    nodes: list[_Node] | None = None


class Manifest(msgspec.Struct):
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


class RecordLine(Record, kw_only=True):
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


class EventLine(Event, frozen=True, kw_only=True):
    t: Instant

    def __post_init__(self) -> None:
        if self.kind in DATA:
            msgspec.convert(self.data, DATA[self.kind])


class SampleLine(Sample, frozen=True, kw_only=True):
    t: Instant


class WindowLine(Window, frozen=True, kw_only=True):
    start: Instant
    end: Instant


class AccessLine(CacheAccess, frozen=True, kw_only=True):
    t: Instant
    full: Instant | None = None
    tokens: Number = 0
    group: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    tier: Annotated[str, msgspec.Meta(max_length=64)] = "gpu"
    reason: Literal["", "reset", "divergence", "compulsory", "evicted"] = ""

    def __post_init__(self) -> None:
        if (self.op == "miss") != bool(self.reason):
            raise ValueError("a miss has a reason, and nothing else has")


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
    window: WindowLine
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
