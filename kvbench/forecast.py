"""What a scenario will do, before it does it: requests, rates, tokens, time, KV pressure, and what looks wrong. Sends nothing."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench import units
from kvbench.core import Seconds
from kvbench.endpoint import Http, Sim
from kvbench.engine import Step
from kvbench.engine.cost import COSTS
from kvbench.profile import kv_blocks
from kvbench.scenario import Bucket, Scenario
from kvbench.spec import plain
from kvbench.timetable import Fixed
from kvbench.workload.arrivals import Burst
from kvbench.workload.chaos import Chaos
from kvbench.workload.classes import Class, shares
from kvbench.workload.schedule import Closed, reach
from kvbench.workload.traces import Trace, TraceFile

SUPPORT, LEAST = 1000, 30  # requests that a p99 needs, and below which the verdict is INVALID
TOO_LONG = "a request may need {:,} tokens and the model's context is {:,}: those will fail"
GRID = 400  # quantiles that stand for a distribution


@dataclass(frozen=True)
class Expected:
    """One phase: how long it offers load (one that ends by a count then waits for the last answers). None: it depends on the
    server, and `why` says how."""

    name: str
    requests: float | None
    seconds: Seconds | None
    mean: float | None = None  # requests/s
    peak: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Tokens:
    """Per arrival, all its turns together: means of prompt and answer tokens, of token-steps held (prompt x answer +
    answer^2 / 2 of each turn) and of turns; and the longest request there can be."""

    prompt: float
    answer: float
    held: float
    turns: float
    longest: int


def forecast(scenario: Scenario) -> dict[str, Any]:
    """The plan as strict JSON. Raises ValueError where a trace cannot be read."""
    traces = {file: file.read() for file in _trace_files(scenario)}
    phases = _phases(scenario, traces)
    steady = [phase for phase in phases if phase.name.startswith("steady")]
    tokens = _tokens(scenario, traces)
    known = [phase.requests for phase in steady if phase.requests is not None]
    requests = sum(known) if len(known) == len(steady) else None
    peaks = [phase.peak for phase in steady if phase.peak is not None]
    times = [phase.seconds for phase in phases]
    total = sum(time for time in times if time is not None) if None not in times else None
    kv = _kv(scenario, scenario.target, steady, tokens) if isinstance(scenario.target, Sim) and tokens else None
    plan = {
        "name": scenario.name,
        "seed": scenario.seed,
        "target": _target(scenario),
        "arrivals": scenario.resolved()["workload"]["arrivals"],
        "phases": [vars(phase) for phase in phases],
        "steady": {"requests": requests, "rate_peak": max(peaks, default=None)},
        "tokens": _token_facts(tokens, requests),
        "seconds": total,
        "context": _context(scenario, tokens),
        "kv": kv,
        "control": scenario.resolved()["control"],
        "stop": [str(rule) for rule in scenario.stop],
        "budget": [str(line) for line in scenario.budget.lines] if scenario.budget else [],
        "timeouts": scenario.target.timeouts.model_dump() if isinstance(scenario.target, Http) else None,
        "files": [{"file": file, "bytes": Path(file).stat().st_size} for file in _files(scenario)],
        "out": scenario.out,
    }
    offered = min(requests * tokens.turns, scenario.phases.steady.requests or math.inf) if requests and tokens else requests
    warnings = [*(line for trace in traces.values() for line in trace.warnings), *_warnings(scenario, plan, steady, offered)]
    return dict(plain(plan | {"warnings": list(dict.fromkeys(warnings))}))


def _trace_files(scenario: Scenario) -> set[TraceFile]:
    found = {one.trace for one in scenario.workload.classes.values() if one.trace}
    shapes = [scenario.workload.arrivals, *(epoch.arrivals for epoch in scenario.phases.steady.epochs or ())]
    return found | {shape for shape in shapes if isinstance(shape, TraceFile)}


def _files(scenario: Scenario) -> list[str]:
    sources = [str(one.source.file) for one in scenario.workload.classes.values() if one.source]
    return sorted({*sources, *(file.file for file in _trace_files(scenario))})


def _target(scenario: Scenario) -> dict[str, Any]:
    data = scenario.resolved()["target"]
    shown = ("kind", "model", "hardware", "engine", "url", "urls", "api", "stream", "retries")
    return {key: data[key] for key in shown if data.get(key)}


# ---- how many, when


def _phases(scenario: Scenario, traces: dict[TraceFile, Trace]) -> list[Expected]:
    phases, arrivals = scenario.phases, scenario.workload.arrivals
    found = []
    if isinstance(phases.warmup, Fixed):
        bound = phases.warmup.requests or math.inf
        found.append(_expect("warmup", arrivals, phases.warmup.for_ or math.inf, bound, traces))
    steady = phases.steady
    bound = steady.requests or math.inf
    for number, epoch in enumerate(steady.epochs or (), 1):
        found.append(_expect(f"steady-{number}", epoch.arrivals, epoch.for_, bound, traces))
    if not steady.epochs:
        found.append(_expect("steady", arrivals, steady.for_ or math.inf, bound, traces))
    if phases.drain:
        found.append(Expected("drain", 0, phases.drain.for_))
    return found


def _expect(name: str, arrivals: Any, time: Seconds, bound: float, traces: dict[TraceFile, Trace]) -> Expected:
    if isinstance(arrivals, Closed):
        why = f"{arrivals.concurrency} users, each as fast as the server answers"
        return Expected(name, bound if math.isfinite(bound) else None, time if math.isfinite(time) else None, why=why)
    if isinstance(arrivals, TraceFile):
        return _replayed(name, arrivals, time, bound, traces[arrivals])
    if math.isinf(time) and math.isinf(bound):
        return Expected(name, None, None, arrivals.rate(0.0), arrivals.peak(), "until its bound on tokens")
    first = 1 if arrivals.process == "deterministic" else 0  # such a shape asks at its very start
    last = reach(arrivals, bound - first, 0.0) if math.isfinite(bound) else math.inf
    end = min(time, last)
    if math.isinf(end):
        return Expected(name, arrivals.exposure(math.inf), None, why="the shape ends before its bound on requests")
    requests = bound if last <= time else arrivals.exposure(time)
    why = f"{arrivals.requests} at once" if isinstance(arrivals, Burst) else ""
    mean = arrivals.exposure(end) / end if end else None
    return Expected(name, requests, end, mean, arrivals.peak(math.nextafter(end, 0.0)), why)


def _replayed(name: str, file: TraceFile, time: Seconds, bound: float, trace: Trace) -> Expected:
    dues = [due for due in trace.dues if due < time]
    if not dues:
        return Expected(name, None, None, why="no due times: give this trace to a class, and arrivals a shape")
    if file.wrap == "again" and (math.isfinite(bound) or math.isfinite(time)):
        rate = len(trace.dues) / max(trace.dues[-1], 1e-9)
        requests = min(bound, time * rate)
        return Expected(name, requests, requests / rate, rate, _peak(dues), "rows start over")
    dues = dues[: int(min(bound, len(dues)))]
    return Expected(name, len(dues), dues[-1], len(dues) / dues[-1] if dues[-1] else None, _peak(dues))


def _peak(dues: list[Seconds], over: Seconds = 10.0) -> float:
    """The busiest ten seconds of a trace, per second."""
    counts: dict[int, int] = {}
    for due in dues:
        counts[int(due // over)] = counts.get(int(due // over), 0) + 1
    return max(counts.values()) / over


# ---- how much


def _tokens(scenario: Scenario, traces: dict[TraceFile, Trace]) -> Tokens | None:
    """The mix's tokens per arrival; None where only a file of texts knows."""
    parts = []
    for name, share in shares(scenario.workload.classes).items():
        one = scenario.workload.classes[name]
        found = _traced(traces[one.trace]) if one.trace else _generated(one, *_stretch(scenario))
        if found is None:
            return None
        parts.append((share, found))
    means = ("prompt", "answer", "held", "turns")
    prompt, answer, held, turns = (sum(share * getattr(found, key) for share, found in parts) for key in means)
    return Tokens(prompt, answer, held, turns, max(found.longest for _, found in parts))


def _traced(trace: Trace) -> Tokens:
    rows, arrivals = trace.rows, len(trace.dues) or len(trace.rows)
    prompt, answer = sum(row.n_in for row in rows), sum(row.n_out for row in rows)
    held = sum(row.n_in * row.n_out + row.n_out**2 / 2 for row in rows)
    longest = max(row.n_in + row.n_out for row in rows)
    return Tokens(prompt / arrivals, answer / arrivals, held / arrivals, len(rows) / arrivals, longest)


def _generated(one: Class, mean: float, most: float) -> Tokens | None:
    """`mean`, `most`: the factor on drawn lengths, of chaos; shared prefixes keep theirs."""
    found, ends = one.mean_tokens(), one.longest()
    if found is None or ends is None or one.output is None or one.output.lengths is None:
        return None
    lengths, turns = one.output.lengths, one.sessions.turns.mean() if one.sessions else 1.0
    square = sum(lengths.quantile((i + 0.5) / GRID) ** 2 for i in range(GRID)) / GRID
    prompt, answer = found[0] * mean, found[1] * mean
    prefix = one.prefixes.tokens.bounds()[1] if one.prefixes else 0
    longest = prefix + round((ends[1] - prefix) * most)
    return Tokens(prompt, answer, prompt * answer / turns + turns * square * mean**2 / 2, turns, longest)


def _stretch(scenario: Scenario) -> tuple[float, float]:
    """Mean and largest factor on lengths (log-uniform spells of chaos); (1, 1) without any."""
    shapes = [scenario.workload.arrivals, *(epoch.arrivals for epoch in scenario.phases.steady.epochs or ())]
    spells = [
        shape.lengths for shape in shapes if isinstance(shape, Chaos) and shape.lengths and shape.lengths.max > shape.lengths.min
    ]
    if not spells:
        return 1.0, 1.0
    return max((s.max - s.min) / math.log(s.max / s.min) for s in spells), max(s.max for s in spells)


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


def _kv(scenario: Scenario, target: Sim, steady: list[Expected], tokens: Tokens) -> dict[str, Any]:
    """Tokens expected alive at once (Little's law, answers at the step time this load makes) against the pool's. An estimate:
    nobody waits, no prefix is shared. None: at that rate prefill alone is more than the hardware does."""
    model, hardware, engine = target.load_model(), target.load_hardware(), target.load_engine()
    pool = (kv_blocks(model, hardware, engine) - 1) * engine.block
    cost = COSTS["roofline"](model, hardware, engine)
    prefill = cost.seconds(Step(prefill=((max(1, round(tokens.prompt)), 0),), samples=1))

    def alive(rate: float | None) -> float | None:
        if rate is None or not math.isfinite(rate):
            return None
        free = 1 - rate * prefill
        if free <= 0:
            return None
        running, held = 1.0, 0.0
        for _ in range(50):  # a fixed point: more running requests make longer steps, which keep more running
            step = cost.seconds(Step(decodes=max(1, round(running)), context=round(held), samples=max(1, round(running)))) / free
            running, held = min(rate * tokens.answer * step, engine.max_num_seqs), min(rate * tokens.held * step, 10.0 * pool)
        return held / pool

    means = [phase.mean for phase in steady if phase.mean is not None]
    peaks = [phase.peak for phase in steady if phase.peak is not None]
    burst = scenario.workload.arrivals.requests if isinstance(scenario.workload.arrivals, Burst) else None
    return {
        "pool_tokens": pool,
        "prefill_seconds": prefill,
        "share_at_mean": alive(max(means, default=None)),
        "share_at_peak": alive(max(peaks, default=None)),
        "share_of_burst": burst * (tokens.prompt + tokens.answer / 2) / pool if burst else None,
    }


# ---- what looks wrong


def overlong(scenario: Scenario, limit: int | None) -> list[str]:
    """That requests may not fit a server's context of `limit` tokens. Raises ValueError where a trace cannot be read."""
    tokens = _tokens(scenario, {file: file.read() for file in _trace_files(scenario)}) if limit else None
    return [TOO_LONG.format(tokens.longest, limit)] if tokens and tokens.longest > (limit or 0) else []


def _warnings(scenario: Scenario, plan: dict[str, Any], steady: list[Expected], requests: float | None) -> Iterator[str]:
    if requests is not None and requests < SUPPORT:
        verdict = "" if "degraded" in scenario.verdict.get("steady_requests", {}) else ", the verdict DEGRADED"
        level = f"below {LEAST} the verdict is INVALID" if requests < LEAST else f"its p99 is marked{verdict}"
        yield f"about {requests:,.0f} requests in steady: a p99 needs {SUPPORT:,}; {level}. Run longer or faster"
    context = plan["context"]
    if context["fits"] is False:
        yield TOO_LONG.format(context["longest"], context["limit"])
    ends = scenario.phases.steady  # one that ends by its count or with its trace waits for its last answers
    if scenario.phases.drain is None and (ends.for_ or ends.tokens or ends.epochs):
        yield "no drain phase: what is in flight when steady ends is cancelled. Add `drain: {for: 1m}`"
    if not scenario.workload.nonce:
        yield "nonce is off: the cache may still hold this scenario's prompts from an earlier run"
    yield from _limits(scenario, steady)
    yield from _rules(scenario, steady)
    if (kv := plan["kv"]) and kv["share_at_peak"] is None and any(phase.peak for phase in steady):
        yield "at the peak rate prefill alone is more than this hardware does: the queue grows as long as the peak lasts"
    target = scenario.target
    if isinstance(target, Http) and target.key_env and not os.environ.get(target.key_env):
        yield f"the environment variable {target.key_env} (target.key_env) is not set here"


def _limits(scenario: Scenario, steady: list[Expected]) -> Iterator[str]:
    """Limits that the load is bound to meet."""
    control, arrivals = scenario.control, scenario.workload.arrivals
    patience = units.duration(control.patience)
    mean = max((phase.mean for phase in steady if phase.mean is not None), default=0.0)
    if isinstance(control, Bucket):
        if mean > control.rate:
            yield f"{mean:.3g}/s arrive, the bucket lets {control.rate:.3g}/s in: about {1 - control.rate / mean:.0%} is shed"
        if isinstance(arrivals, Burst) and (wait := (arrivals.requests - control.burst) / control.rate) > control.patience:
            yield f"the last of a burst of {arrivals.requests} waits {units.duration(wait)} for the bucket; patience: {patience}"
    if control.inflight and isinstance(arrivals, Closed) and arrivals.concurrency > control.inflight:
        yield f"{arrivals.concurrency} users, {control.inflight} of them in flight: the others wait at the gate, up to {patience}"


def _rules(scenario: Scenario, steady: list[Expected]) -> Iterator[str]:
    """Stop rules that can never fire."""
    times = [phase.seconds for phase in steady]
    if None in times:
        return
    length = sum(time for time in times if time is not None)
    rate = max((phase.mean for phase in steady if phase.mean is not None), default=None)
    for rule in scenario.stop:
        if rule.hold > length:
            yield f"stop rule {rule}: it must hold longer than steady lasts ({units.duration(length)}), so it cannot fire"
        if rate is not None and rate * rule.over < rule.needs:
            seen = f"about {rate * rule.over:.3g} requests in {units.duration(rule.over)}"
            yield f"stop rule {rule}: it needs {rule.needs} and sees {seen}, so it may never be read: lengthen `over`"
