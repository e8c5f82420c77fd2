"""What a scenario will do, before it does it: requests, rates, tokens, time, KV pressure, and what looks wrong. Sends nothing."""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.doubts import doubts
from kvbench.endpoint import Http, Sim
from kvbench.engine import Cost, Step
from kvbench.engine.cost import COSTS
from kvbench.expected import Expected, Tokens, Traces, expected, read_traces, tokens
from kvbench.scenario import Scenario
from kvbench.spec import plain
from kvbench.workload.arrivals import Burst


def forecast(scenario: Scenario) -> dict[str, Any]:
    """The plan as strict JSON. Raises ValueError where a trace cannot be read."""
    traces = read_traces(scenario)
    phases = expected(scenario, traces)
    steady = [phase for phase in phases if phase.kind == "steady"]
    each = tokens(scenario, traces, steady)
    known = [phase.requests for phase in steady if phase.requests is not None]
    requests = sum(known) if len(known) == len(steady) else None
    peaks = [phase.peak for phase in steady if phase.peak is not None]
    kv = _kv(scenario, scenario.target, phases, each) if isinstance(scenario.target, Sim) and each else None
    plan = {
        "name": scenario.name,
        "seed": scenario.seed,
        "target": _target(scenario),
        "arrivals": scenario.resolved()["workload"]["arrivals"],
        "phases": [vars(phase) for phase in phases],
        "steady": {"requests": requests, "rate_peak": max(peaks, default=None)},
        "tokens": _token_facts(each, requests),
        "seconds": _total([phase.seconds for phase in phases]),
        "seconds_most": _total([phase.most if phase.seconds is None else phase.seconds for phase in phases]),
        "context": _context(scenario, each),
        "kv": kv,
        "control": scenario.resolved()["control"],
        "watch": scenario.resolved()["watch"],
        "faults": [fault.told() for fault in scenario.target.faults] if isinstance(scenario.target, Sim) else [],
        "stop": [str(rule) for rule in scenario.stop],
        "budget": [str(line) for line in scenario.budget.lines] if scenario.budget else [],
        "timeouts": scenario.target.timeouts.model_dump() if isinstance(scenario.target, Http) else None,
        "files": [{"file": file, "bytes": Path(file).stat().st_size} for file in _files(scenario, traces)],
        "out": scenario.out,
    }
    offered = min(requests * each.turns, scenario.phases.steady.requests or math.inf) if requests and each else requests
    warnings = [*(line for trace in traces.values() for line in trace.warnings), *doubts(scenario, plan, phases, offered)]
    return dict(plain(plan | {"warnings": list(dict.fromkeys(warnings))}))


def _files(scenario: Scenario, traces: Traces) -> list[str]:
    sources = [str(one.source.file) for classes in scenario.traffic() for one in classes.values() if one.source]
    return sorted({*sources, *(file.file for file in traces if file)})


def _total(times: list[float | None]) -> float | None:
    return None if None in times else sum(time for time in times if time is not None)


def _target(scenario: Scenario) -> dict[str, Any]:
    data = scenario.resolved()["target"]
    shown = ("kind", "model", "hardware", "engine", "url", "urls", "api", "stream", "retries")
    return {key: data[key] for key in shown if data.get(key)}


def _token_facts(tokens: Tokens | None, requests: float | None) -> dict[str, Any]:
    if tokens is None:
        return {"why": "only the file of prompts knows"}
    totals = {"prompt_total": tokens.prompt * requests, "answer_total": tokens.answer * requests} if requests is not None else {}
    return {"prompt_mean": tokens.prompt, "answer_mean": tokens.answer, "turns_mean": tokens.turns, **totals}


def _context(scenario: Scenario, tokens: Tokens | None) -> dict[str, Any]:
    """Whether the longest request fits the model's context."""
    longest = tokens.longest if tokens else None
    if not isinstance(scenario.target, Sim):
        return {"longest": longest, "limit": None, "fits": None, "why": "known once the server is asked (kvbench run says)"}
    limit = scenario.target.load_engine().limit(scenario.target.load_model())
    return {"longest": longest, "limit": limit, "fits": None if longest is None else longest <= limit, "why": ""}


@dataclass(frozen=True)
class _Node:
    """One engine, and the share of all requests that it prefills and decodes: even shares of those that do."""

    cost: Cost
    tokens: int
    prefill: float
    decode: float
    most: int  # sequences at once

    def seconds(self, each: Tokens) -> float:
        """Of one mean prompt."""
        return self.cost.seconds(Step(prefill=((max(1, round(each.prompt)), 0),), samples=1))

    def held(self, rate: float, each: Tokens) -> float | None:
        """Tokens alive at `rate` requests/s to the whole cluster (Little's law, answers at the step time this load makes). None
        where prefill alone is more than it does."""
        free = 1 - rate * self.prefill * self.seconds(each)
        if free <= 0:
            return None
        rate *= self.decode
        running, held = 1.0, 0.0
        for _ in range(50):  # a fixed point: more running requests make longer steps, which keep more running
            decodes = max(1, round(running))
            step = self.cost.seconds(Step(decodes=decodes, context=round(held), samples=decodes)) / free
            running, held = min(rate * each.answer * step, self.most), min(rate * each.held * step, 10.0 * self.tokens)
        return held


def _nodes(target: Sim) -> list[tuple[_Node, int]]:
    """Each kind of node, and how many there are."""
    model, engine, members = target.load_model(), target.load_engine(), target.nodes()
    entry, decode = (sum(role != other for _, role in members) for other in ("decode", "prefill"))
    found = []
    for (hardware, role), count in Counter(members).items():
        shares = (role != "decode") / entry, (role != "prefill") / decode
        cost = COSTS["roofline"](model, hardware, engine)
        found.append((_Node(cost, target.room(hardware), *shares, engine.max_num_seqs), count))
    return found


def _kv(scenario: Scenario, target: Sim, phases: list[Expected], tokens: Tokens) -> dict[str, Any]:
    """Tokens expected alive at once against those of the pools, of a cluster all nodes' together. An estimate: nobody waits, no
    prefix is shared, nodes that do the same get as many requests each, whatever the router. None: at that rate prefill alone is
    more than some node does."""
    built = _nodes(target)
    whole = sum(node.tokens * count for node, count in built)

    def alive(rate: float | None) -> float | None:
        if rate is None or not math.isfinite(rate):
            return None
        held = [(node.held(rate, tokens), count) for node, count in built]
        return None if any(one is None for one, _ in held) else sum((one or 0.0) * count for one, count in held) / whole

    means = [phase.mean for phase in phases if phase.kind == "steady" and phase.mean is not None]
    peaks = [phase.peak for phase in phases if phase.kind == "steady" and phase.peak is not None]
    tops = [phase.peak for phase in phases if phase.kind == "stress" and phase.peak is not None]
    burst = scenario.workload.arrivals.requests if isinstance(scenario.workload.arrivals, Burst) else None
    return {
        "pool_tokens": whole,
        "nodes": sum(count for _, count in built),
        "prefill_seconds": max(node.seconds(tokens) for node, _ in built if node.prefill),
        "share_at_mean": alive(max(means, default=None)),
        "share_at_peak": alive(max(peaks, default=None)),
        "share_at_stress": alive(max(tops, default=None)),
        "share_of_burst": burst * (tokens.prompt + tokens.answer / 2) / whole if burst else None,
    }
