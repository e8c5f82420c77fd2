"""From a scenario to the parts of a run: the only place where rooms meet. Builds, and decides nothing of its own."""

import itertools
import math
import os
import secrets
import ssl
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvbench.clock import Clock
from kvbench.core import Request, Seconds
from kvbench.endpoint import Http, Sim
from kvbench.engine.engine import Engine
from kvbench.forecast import overlong
from kvbench.phases import Phase
from kvbench.problem import Problem
from kvbench.scenario import Scenario, ScenarioError
from kvbench.source import Source
from kvbench.target import Target, TargetUnreachable
from kvbench.target.http import HttpTarget
from kvbench.target.null import NullTarget
from kvbench.target.sim import Sim as SimTarget
from kvbench.timetable import Fixed
from kvbench.workload.chaos import Chaos
from kvbench.workload.mix import Mix, estimate
from kvbench.workload.schedule import Closed, Schedule, TraceSchedule
from kvbench.workload.tokenizers import File, Ids, Server, Words
from kvbench.workload.traces import Trace, TraceFile

STREAMS = ("arrivals", "lengths", "prompts", "sampling", "routing", "chaos")
"""The run's streams of randomness. New ones go to the end: a stream's seed is its place here."""


def seeds(seed: int) -> dict[str, np.random.SeedSequence]:
    """One independent seed sequence per stream. Seed 0 is a seed."""
    return dict(zip(STREAMS, np.random.SeedSequence(seed).spawn(len(STREAMS)), strict=True))


def build_nonce(scenario: Scenario) -> int | None:
    """What sets this run's prompts apart from every other run's; None where the scenario turned it off.

    From the seed where nothing outlives the run (sim, null), so that a run can be repeated to the byte; from the system on a real
    server, whose cache remembers.
    """
    if not scenario.workload.nonce:
        return None
    if isinstance(scenario.target, Http):
        return secrets.randbits(60)
    return int(seeds(scenario.seed)["prompts"].generate_state(2, np.uint64)[1] >> np.uint64(4))


@dataclass
class _Regime:
    """The multiplier on lengths, of whichever shape is running: chaos has one, others do not."""

    shape: Any = None
    start: Seconds = 0.0

    def __call__(self, at: Seconds) -> float:
        return self.shape.regime(at - self.start) if isinstance(self.shape, Chaos) else 1.0


@dataclass
class _Stream:
    """One phase stream's content and randomness; the epochs of steady share one."""

    mix: Mix
    rng: np.random.Generator  # of arrivals
    regime: _Regime = field(default_factory=_Regime)

    def source(self, arrivals: Any, count: float) -> Callable[[Seconds], Source]:
        """What builds the source as its phase starts. ValueError where a trace cannot be read or is shorter than `count`."""
        trace = arrivals.read() if isinstance(arrivals, TraceFile) else None
        if trace is not None:
            _dues(trace, arrivals, count)

        def build(start: Seconds) -> Source:
            self.regime.shape, self.regime.start = arrivals, start
            if isinstance(arrivals, Closed):
                return Source(self.mix, users=arrivals, rng=self.rng)
            if trace is not None:
                return Source(self.mix, TraceSchedule(_dues(trace, arrivals, count), start=start))
            return Source(self.mix, Schedule(arrivals, self.rng, start=start))

        return build


def _dues(trace: Trace, file: TraceFile, count: float) -> Iterator[Seconds]:
    """Due times of the rows that arrive by themselves; a shorter file than `count` starts over where the scenario says so."""
    rows = trace.replay(None if math.isinf(count) else int(count), file.wrap)
    return (due for due, _, _ in rows if due is not None)


def build_phases(scenario: Scenario, nonce: int | None, count: Callable[[str], int] = estimate) -> list[Phase]:
    """The run's phases in order, each with its source of arrivals and content. `count`: tokens in a real prompt's text.

    Raises ScenarioError where a file cannot be read, or holds fewer requests than asked.
    """
    try:
        return _phases(scenario, nonce, count)
    except ValueError as error:
        raise ScenarioError([Problem("", "workload", str(error))]) from None


def _phases(scenario: Scenario, nonce: int | None, count: Callable[[str], int]) -> list[Phase]:
    streams, ids = seeds(scenario.seed), itertools.count()
    phases = scenario.phases
    found: list[Phase] = []

    def stream(name: str) -> _Stream:
        regime, root = _Regime(), streams["arrivals"]
        mix = Mix(scenario.workload.classes, streams, nonce, stream=name, ids=ids, regime=regime, count=count)
        own = np.random.SeedSequence(root.entropy, spawn_key=(*root.spawn_key, zlib.crc32(name.encode())))
        return _Stream(mix, np.random.default_rng(own), regime)

    if isinstance(phases.warmup, Fixed):
        bound = phases.warmup.requests or math.inf
        source = stream("warmup").source(scenario.workload.arrivals, bound)
        seconds = phases.warmup.for_ or math.inf
        found.append(
            Phase("warmup", "warmup", source, seconds, bound, expected=_expected(scenario.workload.arrivals, seconds, bound))
        )
    steady, measured = phases.steady, stream("steady")
    bounds = {"requests": steady.requests or math.inf, "tokens": steady.tokens or math.inf}
    for number, epoch in enumerate(steady.epochs or (), 1):
        source, expected = measured.source(epoch.arrivals, math.inf), _expected(epoch.arrivals, epoch.for_, math.inf)
        found.append(Phase(f"steady-{number}", "steady", source, epoch.for_, expected=expected))
    if not steady.epochs:
        source = measured.source(scenario.workload.arrivals, bounds["requests"])
        seconds = steady.for_ or math.inf
        expected = _expected(scenario.workload.arrivals, seconds, bounds["requests"])
        found.append(Phase("steady", "steady", source, seconds, **bounds, expected=expected))
    if phases.drain:
        found.append(Phase("drain", "drain", seconds=phases.drain.for_))
    return found


def _expected(arrivals: Any, seconds: Seconds, requests: float) -> float | None:
    """How many requests a shape offers in that time, at most `requests`; None where it cannot say before it is played."""
    if isinstance(arrivals, (Closed, TraceFile)) or math.isinf(seconds):
        return None
    return float(min(arrivals.exposure(seconds), requests))


def build_slos(scenario: Scenario) -> dict[str, dict[str, Seconds]]:
    """Per class the per-request limits that goodput counts."""
    return {name: {str(limit): most for limit, most in one.slo.items()} for name, one in scenario.workload.classes.items()}


@dataclass(frozen=True)
class Opened:
    """A target that answered, what is known of it and of how prompts become its tokens, and a count of a text's tokens."""

    target: Target
    facts: dict[str, Any]
    tokenizer: dict[str, Any]
    count: Callable[[str], int]


async def open_target(scenario: Scenario, clock: Clock) -> Opened:
    """Build the target, ask it what it is, and measure the tokenizer where a server must be asked. Sends no prompt of the run.

    Raises TargetUnreachable, and ScenarioError for what the file says and this machine lacks (a key, a tokenizer, a certificate).
    """
    spec = scenario.target
    if isinstance(spec, Http):
        try:
            return await _open_server(scenario, spec, clock)
        except ScenarioError:
            raise
        except (ValueError, ssl.SSLError) as error:
            raise ScenarioError([Problem("", "target", str(error))]) from None
    target: Target = NullTarget(clock)
    if isinstance(spec, Sim):
        routing = int(seeds(scenario.seed)["routing"].generate_state(1)[0])
        target = SimTarget(Engine(spec.load_model(), spec.load_hardware(), spec.load_engine(), routing), clock)
    how = "prompts are token counts and content keys: nothing is written out"
    return Opened(target, await target.open(), {"kind": "none", "exact": True, "error": 0.0, "how": how}, estimate)


async def _open_server(scenario: Scenario, spec: Http, clock: Clock) -> Opened:
    headers = {
        name: _secret(f"target.headers.{name}", text[1:]) if text[:1] == "$" else text for name, text in spec.headers.items()
    }
    target = HttpTarget(
        clock, urls=spec.addresses(), render=_unrendered, model=spec.model or "", api=spec.api, stream=spec.stream,
        headers=headers, key=_secret("target.key_env", spec.key_env) if spec.key_env else None,
        ca_file=spec.ca_file, extra_body=spec.extra_body, timeouts=spec.timeouts, retries=spec.retries,
    )  # fmt: skip
    try:
        facts = await target.open()
        if spec.model is None:
            target.model = _only_model(facts)
            facts = await target.open()
        facts["warnings"] += overlong(scenario, facts["max_context"])
        tokenizer = await _tokenizer(scenario, spec, target)
    except BaseException:
        await target.aclose()
        raise
    target.render = tokenizer.render
    return Opened(target, facts, tokenizer.facts(), tokenizer.count)


def _unrendered(request: Request) -> dict[str, Any]:
    raise AssertionError("a prompt was rendered before its tokenizer was known")


def _secret(key: str, name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ScenarioError([Problem("", key, f"the environment variable {name} is not set")])
    return value


def _only_model(facts: dict[str, Any]) -> str:
    """The model a server has, where the scenario names none: its first."""
    for server in facts["servers"]:
        if server["models"]:
            return str(server["models"][0])
    raise TargetUnreachable("the server lists no model (/v1/models): name one with target.model")


async def _tokenizer(scenario: Scenario, spec: Http, target: HttpTarget) -> Any:
    """The tokenizer the scenario names; else token ids where the API takes them and no text is asked, else words, measured where
    the server counts tokens for us."""
    classes = scenario.workload.classes.values()
    textual = any(one.source or one.sessions for one in classes)
    kind = spec.tokenizer or ("ids" if spec.api == "completions" and not textual else "server")
    if kind == "ids":
        return Ids()
    if kind == "words":
        return Words(spec.api)
    if kind != "server":
        return File(kind, spec.api)
    if await target.tokenize_probe("one two three") is None:
        if spec.tokenizer:
            raise TargetUnreachable(
                "target.tokenizer is `server`, but the server has no /tokenize: use words or a tokenizer.json"
            )
        return Words(spec.api)

    async def counted(text: str) -> int:
        return len(await target.tokenize_probe(text) or ())

    return await Server(spec.api).calibrate(counted)
