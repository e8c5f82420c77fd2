"""From a scenario to the parts of a run: the only place where rooms meet. Builds, and decides nothing of its own.

The phases are agenda.py's.
"""

import math
import secrets
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvbench import startup
from kvbench.agenda import STREAMS, build_phases, seeds
from kvbench.clock import Clock, stopwatch
from kvbench.collect import CollectorError, Place
from kvbench.collect.prometheus import usual
from kvbench.core import Request, Seconds
from kvbench.crew import Crew
from kvbench.doubts import overlong
from kvbench.endpoint import Http, Sim
from kvbench.engine import Machine
from kvbench.engine.engine import Engine
from kvbench.engine.faults import Fault
from kvbench.engine.log import Log
from kvbench.engine.tape import Access, Tape
from kvbench.engine.tiers import build_below
from kvbench.launch import Launched
from kvbench.launch import Server as LaunchedServer
from kvbench.phases import Phase
from kvbench.pilot import Controls
from kvbench.problem import Problem
from kvbench.profile import Hardware
from kvbench.scenario import Scenario, ScenarioError
from kvbench.sink import SinkError, SinkPlace, Store
from kvbench.startup import secret
from kvbench.stop import preallocated
from kvbench.target import Target, TargetUnreachable
from kvbench.target.http import HttpTarget
from kvbench.target.null import NullTarget
from kvbench.target.sim import Sim as SimTarget
from kvbench.workload.mix import estimate
from kvbench.workload.tokenizers import File, Ids, Server, Words

__all__ = [
    "STREAMS", "Opened", "build_controls", "build_nonce", "build_phases", "build_slos", "open_crew", "open_sinks", "open_target",
    "seeds",
]  # fmt: skip


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


def build_controls(scenario: Scenario, phases: list[Phase]) -> Controls:
    """The limits, the law armed for this load, the stop rules and the watch."""
    steady = next((phase for phase in phases if phase.kind == "steady"), None)
    offered = steady.expected / steady.seconds if steady and steady.expected and math.isfinite(steady.seconds) else None
    control, watch = scenario.control, scenario.watch
    return Controls(
        limits=control.limits(), law=control.arm(offered), every=control.every, over=control.over, rules=scenario.stop,
        watch=watch.arm() if watch else None, width=watch.window if watch else 10.0,
    )  # fmt: skip


def build_slos(scenario: Scenario) -> dict[str, dict[str, Seconds]]:
    """Per class the per-request limits that goodput counts."""
    classes = {name: one for found in scenario.traffic() for name, one in found.items()}
    return {name: {str(limit): most for limit, most in one.slo.items()} for name, one in classes.items()}


def build_machine(spec: Sim, seed: int, listeners: Sequence[Callable[[Access], None]] = ()) -> Machine:
    """The embedded engine, or a cluster of them, as the target section of a scenario describes it. `listeners` are told of every
    access to their caches."""
    model, engine = spec.load_model(), spec.load_engine()

    def one(node: int, hardware: Hardware, seed: int, faults: Sequence[Fault]) -> Engine:
        tape = Tape(node) if listeners else None
        if tape is not None:
            tape.listeners += listeners
        own = f"node-{node}" if spec.cluster is not None else ""
        layers = spec.load_layers()
        parts = (model, hardware, engine, stopwatch, seed, tape, own, layers)
        below = None if spec.tiers is None else build_below(spec.tiers, *parts)
        return Engine(model, hardware, engine, seed, faults, tape, below, layers)

    if spec.cluster is not None:
        return spec.cluster.build(model, spec.hardware, engine, seed, spec.faults, one)
    return one(0, spec.load_hardware(), seed, spec.faults)


async def open_crew(scenario: Scenario, place: Place) -> Crew:
    """The collectors that the scenario names, opened. Raises ScenarioError where a required one cannot work, or none can."""
    specs, absent = scenario.collect or [], ""
    if place.clock.virtual and specs:
        text = "no machine can be read in virtual time: run with --real-time, or leave it out"
        raise ScenarioError([Problem("", "collect", text)])
    try:
        if scenario.collect is None and isinstance(scenario.target, Http):
            found, absent = await usual(place, scenario.target.ca_file)
            specs = [found] if found is not None else []
        crew = Crew(place.clock, [spec.build(place) for spec in specs])
        await crew.open()
    except CollectorError as error:
        raise ScenarioError([Problem("", "collect", str(error))]) from None
    if absent:  # nobody asked for them: no reason to warn
        crew.facts.append({"source": "prometheus", "required": False, "error": None, "absent": absent})
    return crew


async def open_sinks(scenario: Scenario, place: SinkPlace) -> list[Store]:
    """The sinks that the scenario names, each after a write that shows it can. Raises ScenarioError where one cannot."""
    built: list[Store] = []
    for at, spec in enumerate(scenario.sinks):
        try:
            built.append(spec.build(place))
        except SinkError as error:
            for store in built:
                await store.aclose()
            raise ScenarioError([Problem("", f"sinks[{at}]", str(error))]) from None
    return built


@dataclass(frozen=True)
class Opened:
    """A target that answered, what is known of it and of how prompts become its tokens, and a count of a text's tokens."""

    target: Target
    facts: dict[str, Any]
    tokenizer: dict[str, Any]
    count: Callable[[str], int]
    prompt: Callable[[Request], Sequence[int] | None] = lambda _: None  # token ids, where they are exactly the server's
    server: LaunchedServer | None = None  # that was launched for the run; the target's aclose ends it
    headers: Mapping[str, str] = field(default_factory=dict)  # what it is asked with, its key among them


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
        log = Log(spec.cache_log) if spec.cache_log else None
        try:
            machine = build_machine(spec, int(seeds(scenario.seed)["routing"].generate_state(1)[0]), [log] if log else [])
        except ValueError as error:  # all else was known when the file was read: this machine lacks the directory
            raise ScenarioError([Problem("", "target.tiers.ssd.real", str(error))]) from None
        target = SimTarget(machine, clock, log)
    how = "prompts are token counts and content keys: nothing is written out"
    return Opened(target, await target.open(), {"kind": "none", "exact": True, "error": 0.0, "how": how}, estimate)


async def _open_server(scenario: Scenario, spec: Http, clock: Clock) -> Opened:
    headers = {
        name: secret(f"target.headers.{name}", text[1:]) if text[:1] == "$" else text for name, text in spec.headers.items()
    }
    target = HttpTarget(
        clock, urls=spec.addresses(), render=_unrendered, model=spec.model or "", api=spec.api, stream=spec.stream,
        headers=headers, key=secret("target.key_env", spec.key_env) if spec.key_env else None,
        ca_file=spec.ca_file, extra_body=spec.extra_body, timeouts=spec.timeouts, retries=spec.retries,
    )  # fmt: skip
    server: LaunchedServer | None = None
    try:
        if spec.launch is not None:
            server = await startup.launched(scenario, spec.launch, clock, target)
        facts = await target.open()
        if spec.model is None:
            target.model = _only_model(facts)
            facts = await target.open()
        _judgeable(scenario, facts)
        facts["warnings"] += overlong(scenario, facts["max_context"])
        tokenizer = await _tokenizer(scenario, spec, target)
        if spec.reset is not None:
            facts["reset"] = await target.reset(spec.reset, facts["servers"])
            facts["warnings"] += facts["reset"].pop("warnings")
    except BaseException:
        await (Launched(target, server) if server is not None else target).aclose()
        raise
    target.render = tokenizer.render
    whole: Target = Launched(target, server) if server is not None else target
    prompt = (lambda request: tokenizer.render(request)["prompt"]) if isinstance(tokenizer, Ids) else (lambda _: None)
    return Opened(whole, facts, tokenizer.facts(), tokenizer.count, prompt, server, target.headers)


def _judgeable(scenario: Scenario, facts: dict[str, Any]) -> None:
    """ScenarioError for stop rules that mean nothing on the server that answered."""
    problems = [
        Problem("", f"stop[{at}].{scenario.stop[at].when.metric}", text) for at, text in preallocated(scenario.stop, facts)
    ]
    if problems:
        raise ScenarioError(problems)


def _unrendered(request: Request) -> dict[str, Any]:
    raise AssertionError("a prompt was rendered before its tokenizer was known")


def _only_model(facts: dict[str, Any]) -> str:
    """The model a server has, where the scenario names none: its first."""
    for server in facts["servers"]:
        if server["models"]:
            return str(server["models"][0])
    raise TargetUnreachable("the server lists no model (/v1/models): name one with target.model")


async def _tokenizer(scenario: Scenario, spec: Http, target: HttpTarget) -> Any:
    """The tokenizer the scenario names; else token ids where the API takes them and no text is asked, else words, measured where
    the server counts tokens for us."""
    classes = [one for found in scenario.traffic() for one in found.values()]
    textual = scenario.phases.baseline is not None or any(one.source or one.sessions for one in classes)
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
