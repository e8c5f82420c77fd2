"""From a scenario to the phases of its run: what each offers, with which content, under which bounds."""

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from kvbench.core import Record, Request, Seconds
from kvbench.endpoint import Http, Sim
from kvbench.phases import Phase
from kvbench.problem import Problem
from kvbench.scenario import Scenario, ScenarioError
from kvbench.source import Content, Source
from kvbench.timetable import Dynamic, Fixed, Prefill
from kvbench.warmup import Fill, Filled, Filling, Stationary
from kvbench.workload.chaos import Chaos
from kvbench.workload.classes import Class, Output
from kvbench.workload.lengths import Fixed as FixedLength
from kvbench.workload.mix import Mix, estimate
from kvbench.workload.sampling import Sampling
from kvbench.workload.schedule import Closed, FixedPause, Schedule, TraceSchedule
from kvbench.workload.standard import standard_class
from kvbench.workload.traces import Trace, TraceFile

STREAMS = ("arrivals", "lengths", "prompts", "sampling", "routing", "chaos")
"""The run's streams of randomness. New ones go to the end: a stream's seed is its place here."""


def seeds(seed: int) -> dict[str, np.random.SeedSequence]:
    """One independent seed sequence per stream. Seed 0 is a seed."""
    return dict(zip(STREAMS, np.random.SeedSequence(seed).spawn(len(STREAMS)), strict=True))


def build_phases(
    scenario: Scenario, nonce: int | None, count: Callable[[str], int] = estimate, facts: Mapping[str, Any] | None = None
) -> list[Phase]:
    """The run's phases in order, each with its source of arrivals and content. `count`: tokens in a real prompt's text. `facts`:
    what the target said of itself.

    Raises ScenarioError where a file cannot be read or holds fewer requests than asked, or nobody says how much a cache holds.
    """
    try:
        return list(_Agenda(scenario, nonce, count, facts or {}).phases())
    except ScenarioError:
        raise
    except ValueError as error:
        raise ScenarioError([Problem("", "workload", str(error))]) from None


def cache(target: Any, facts: Mapping[str, Any]) -> tuple[int, int] | None:
    """(tokens that the KV cache holds, tokens of a block): as the target said, or by its profiles. None where neither knows."""
    if facts.get("kv_tokens"):
        return int(facts["kv_tokens"]), int(facts.get("block_tokens") or 1)
    return pool(target) if isinstance(target, Sim) else None


def capacity(target: Any, spec: Prefill, facts: Mapping[str, Any]) -> tuple[int, int] | None:
    """As `cache`, with the scenario's own word for the tokens before any other's."""
    known = cache(target, facts)
    return (spec.capacity, known[1] if known else 1) if spec.capacity else known


def pool(target: Sim) -> tuple[int, int]:
    """(tokens that the embedded engine's cache holds, of a cluster all nodes' together, tokens of a block), by its profiles."""
    return sum(target.room(hardware) for hardware, _ in target.nodes()), target.load_engine().block


def primed(classes: Mapping[str, Class], content: Literal["own", "shared"]) -> dict[str, Class]:
    """`classes` as a prefill asks them: one answer of one token, no later turns; a prefix only where it is to be shared."""
    token = Output(lengths=FixedLength(value=1), force=True)
    single = {"output": token, "sampling": Sampling.model_validate({}), "sessions": None}
    found = {}
    for name, one in classes.items():
        prefixes = one.prefixes if content == "shared" else None
        trace = one.trace.model_copy(update={"wrap": "again"}) if one.trace else None
        found[name] = one.model_copy(update=single | {"prefixes": prefixes, "trace": trace})
    return found


@dataclass
class _Shape:
    """The shape that is running and since when; of chaos also the multiplier on lengths, which others do not have."""

    arrivals: Any = None
    start: Seconds = 0.0

    def __call__(self, at: Seconds) -> float:
        return self.arrivals.regime(at - self.start) if isinstance(self.arrivals, Chaos) else 1.0


@dataclass(frozen=True)
class _Onward:
    """A load shape from its moment `offset` on."""

    shape: Any
    offset: Seconds

    def rate(self, t: Seconds) -> float:
        return float(self.shape.rate(t + self.offset))

    def exposure(self, t: Seconds) -> float:
        return float(self.shape.exposure(t + self.offset) - self.shape.exposure(self.offset)) if t > 0 else 0.0

    def gaps(self, rng: np.random.Generator) -> Iterator[float]:
        return iter(self.shape.gaps(rng))

    def peak(self, until: Seconds = math.inf) -> float:
        return float(self.shape.peak(until + self.offset))


@dataclass(frozen=True)
class _Epoch:
    """The content of one epoch. A session that began in another goes on with the content it began with: `begun` is theirs."""

    mix: Mix
    begun: dict[int, Mix]

    def next(self, at: Seconds) -> Request:
        request = self.mix.next(at)
        if request.session is not None:
            self.begun[request.session] = self.mix
        return request

    def follow(self, request: Request, record: Record) -> tuple[Seconds, Request] | None:
        mix = self.begun.get(request.session) if request.session is not None else None
        following = mix.follow(request, record) if mix is not None else None
        if following is None and request.session is not None:
            self.begun.pop(request.session, None)
        return following


@dataclass
class _Stream:
    """The arrivals of one phase stream and their randomness; the epochs of steady share one."""

    rng: np.random.Generator
    shape: _Shape = field(default_factory=_Shape)

    def source(
        self, arrivals: Any, count: float, content: Content, begun: Callable[[Seconds], Seconds] = lambda start: start
    ) -> Callable[[Seconds], Source]:
        """What builds the source as its phase starts. `begun`: when its shape did, that of the phase or an earlier moment.
        ValueError where a trace cannot be read or is shorter than `count`."""
        trace = arrivals.read() if isinstance(arrivals, TraceFile) else None
        if trace is not None:
            _dues(trace, arrivals, count)

        def build(start: Seconds) -> Source:
            since = begun(start)
            self.shape.arrivals, self.shape.start = arrivals, since
            if isinstance(arrivals, Closed):
                return Source(content, users=arrivals, rng=self.rng)
            if trace is not None:
                return Source(content, TraceSchedule(_dues(trace, arrivals, count), start=start))
            onward = _Onward(arrivals, start - since) if since < start else arrivals
            return Source(content, Schedule(onward, self.rng, start=start))

        return build


def _dues(trace: Trace, file: TraceFile, count: float) -> Iterator[Seconds]:
    """Due times of the rows that arrive by themselves; a shorter file than `count` starts over where the scenario says so."""
    rows = trace.replay(None if math.isinf(count) else int(count), file.wrap)
    return (due for due, _, _ in rows if due is not None)


class _Agenda:
    """Builds the phases of one run: one numbering of its requests, one set of random streams."""

    def __init__(self, scenario: Scenario, nonce: int | None, count: Callable[[str], int], facts: Mapping[str, Any]) -> None:
        self.scenario, self.nonce, self.count, self.facts = scenario, nonce, count, facts
        self.seeds, self.ids = seeds(scenario.seed), itertools.count()
        self.steady = self._stream("steady")

    def phases(self) -> Iterator[Phase]:
        phases = self.scenario.phases
        if phases.baseline is not None:
            yield from self._baseline(phases.baseline.idle_power, phases.baseline.prompts)
        yield from WARMUPS.get(type(phases.warmup), _none)(self, phases.warmup)
        yield from self._steady()
        if phases.stress is not None:
            yield self._stress(phases.stress.ladder())
        if phases.drain is not None:
            yield Phase("drain", "drain", seconds=phases.drain.for_)

    def _stream(self, name: str) -> _Stream:
        root = self.seeds["arrivals"]
        own = np.random.SeedSequence(root.entropy, spawn_key=(*root.spawn_key, zlib.crc32(name.encode())))
        return _Stream(np.random.default_rng(own))

    def _mix(self, name: str, classes: Mapping[str, Class], shape: _Shape, shared: str | None = None) -> Mix:
        return Mix(classes, self.seeds, self.nonce, stream=name, shared=shared, ids=self.ids, regime=shape, count=self.count)

    def _baseline(self, idle: Seconds, prompts: int) -> Iterator[Phase]:
        """Nothing, then the standard prompts one after the other; no law or limit comes between."""
        if idle:
            yield Phase("idle", "baseline", seconds=idle, controlled=False)
        stream = self._stream("baseline")
        content = self._mix("baseline", {"standard": standard_class()}, stream.shape)
        source = stream.source(_users(1), math.inf, content)
        yield Phase("baseline", "baseline", source, requests=prompts, expected=float(prompts), controlled=False)

    def fixed(self, spec: Fixed) -> Iterator[Phase]:
        arrivals, classes = self.scenario.opening()
        stream, requests, seconds = self._stream("warmup"), spec.requests or math.inf, spec.for_ or math.inf
        source = stream.source(arrivals, requests, self._mix("warmup", classes, stream.shape))
        yield Phase("warmup", "warmup", source, seconds, requests, expected=_expected(arrivals, seconds, requests))

    def prefill(self, spec: Prefill) -> Iterator[Phase]:
        known = capacity(self.scenario.target, spec, self.facts)
        if known is None:
            how = "the target does not say how many tokens its KV cache holds: give `capacity`"
            raise ScenarioError([Problem("", "phases.warmup.capacity", how)])
        fill = Fill(spec.fill, *known, spec.requests)
        stream, shared = self._stream("warmup"), "steady" if spec.content == "shared" else None
        mix = self._mix("warmup", primed(self.scenario.opening()[1], spec.content), stream.shape, shared)
        source = stream.source(_users(spec.concurrency), math.inf, Filling(mix, fill))
        yield Phase("warmup", "warmup", source, spec.max, until=lambda start: Filled(fill, start, spec.max), controlled=False)

    def dynamic(self, spec: Dynamic) -> Iterator[Phase]:
        arrivals, classes = self.scenario.opening()
        stream, target = self._stream("warmup"), self.scenario.target
        first = "ttft_mean" if not isinstance(target, Http) or target.stream else "e2e_mean"  # without a stream there is no first
        source = stream.source(arrivals, math.inf, self._mix("warmup", classes, stream.shape))
        metrics = (first, "output_tokens_rate")

        def until(start: Seconds) -> Stationary:
            return Stationary(metrics, round(spec.batch), start, spec.min, spec.max)

        yield Phase("warmup", "warmup", source, spec.max, until=until)

    def _steady(self) -> Iterator[Phase]:
        steady, workload, shape = self.scenario.phases.steady, self.scenario.workload, self.steady.shape
        common = self._mix("steady", workload.classes, shape)
        if not steady.epochs:
            seconds, requests, tokens = (bound or math.inf for bound in (steady.for_, steady.requests, steady.tokens))
            source = self.steady.source(workload.arrivals, requests, common)
            expected = _expected(workload.arrivals, seconds, requests)
            yield Phase("steady", "steady", source, seconds, requests, tokens, expected, snapshot=steady.snapshot)
            return
        begun: dict[int, Mix] = {}
        sources = []
        for place, epoch in enumerate(steady.epochs, 1):
            mix = self._mix(f"steady-{place}", epoch.classes, shape, "steady") if epoch.classes else common
            sources.append(self.steady.source(epoch.arrivals, math.inf, _Epoch(mix, begun)))
        for number, (place, lasts) in enumerate(steady.turns(), 1):
            expected = _expected(steady.epochs[place].arrivals, lasts, math.inf)
            name = f"steady-{number}"
            yield Phase(name, "steady", sources[place], lasts, expected=expected, snapshot=steady.snapshot)

    def _stress(self, ladder: Any) -> Phase:
        """Steady's last shape goes on where it was, with the run's prefix groups and requests of its own."""
        arrivals, classes = self.scenario.closing()
        stream = self._stream("stress")
        content = self._mix("stress", classes, stream.shape, "steady")
        source = stream.source(arrivals, math.inf, content, lambda start: self.steady.shape.start)
        return Phase("stress", "stress", source, ladder=ladder)


def _users(count: int) -> Closed:
    """So many users, who pause for nothing."""
    return Closed(concurrency=count, think=FixedPause(mean=0.0))


def _none(agenda: _Agenda, spec: Any) -> Iterator[Phase]:
    """No warm-up, or one that is no phase: on demand."""
    return iter(())


def _expected(arrivals: Any, seconds: Seconds, requests: float) -> float | None:
    """How many requests a shape offers in that time, at most `requests`; None where it cannot say before it is played."""
    if isinstance(arrivals, (Closed, TraceFile)) or math.isinf(seconds):
        return None
    return float(min(arrivals.exposure(seconds), requests))


WARMUPS: dict[type, Callable[[_Agenda, Any], Iterator[Phase]]] = {
    Fixed: _Agenda.fixed,
    Prefill: _Agenda.prefill,
    Dynamic: _Agenda.dynamic,
}
