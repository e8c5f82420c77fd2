"""How much a scenario will offer, and when: per phase the requests and their rate, per arrival the tokens."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench import units
from kvbench.agenda import capacity, primed
from kvbench.core import Seconds
from kvbench.level import Ladder
from kvbench.scenario import Scenario
from kvbench.timetable import Dynamic, Fixed, Prefill
from kvbench.workload.arrivals import Burst
from kvbench.workload.chaos import Chaos
from kvbench.workload.classes import Class, shares
from kvbench.workload.schedule import Closed, reach
from kvbench.workload.traces import Trace, TraceFile

GRID = 400  # quantiles that stand for a distribution
Traces = Mapping[TraceFile | None, Trace]


@dataclass(frozen=True)
class Expected:
    """One phase: how long it offers load (one that ends by a count then waits for the last answers). None: it depends on the
    server, and `why` says how. most: its bound on time, where it has one and may end before it. impulse: requests of one
    instant, which `peak` (the rate beside them) leaves out."""

    name: str
    kind: str
    requests: float | None
    seconds: Seconds | None
    mean: float | None = None  # requests/s
    peak: float | None = None
    most: Seconds | None = None
    why: str = ""
    impulse: int | None = None


@dataclass(frozen=True)
class Tokens:
    """Per arrival, all its turns together: means of prompt and answer tokens, of token-steps held (prompt x answer +
    answer^2 / 2 of each turn) and of turns; and the longest request there can be."""

    prompt: float
    answer: float
    held: float
    turns: float
    longest: int


def read_traces(scenario: Scenario) -> Traces:
    """Every trace that the scenario names. Raises ValueError where one cannot be read."""
    files = {one.trace for classes in scenario.traffic() for one in classes.values() if one.trace}
    files |= {shape for shape in _shapes(scenario) if isinstance(shape, TraceFile)}
    return {file: file.read() for file in files}


def _shapes(scenario: Scenario) -> list[Any]:
    return [scenario.workload.arrivals, *(epoch.arrivals for epoch in scenario.phases.steady.epochs or ())]


# ---- how many, when


def expected(scenario: Scenario, traces: Traces) -> list[Expected]:
    """The phases in their order."""
    phases, steady = scenario.phases, scenario.phases.steady
    found = []
    if phases.baseline and phases.baseline.idle_power:
        found.append(Expected("idle", "baseline", 0, phases.baseline.idle_power))
    if phases.baseline:
        found.append(Expected("baseline", "baseline", phases.baseline.prompts, None, why="one after the other"))
    found += _warmup(scenario, traces)
    for number, (place, lasts) in enumerate(steady.turns(), 1):
        arrivals = (steady.epochs or [])[place].arrivals
        found.append(_expect(f"steady-{number}", "steady", arrivals, lasts, math.inf, traces))
    if not steady.epochs:
        times = steady.for_ or math.inf, steady.requests or math.inf
        found.append(_expect("steady", "steady", scenario.workload.arrivals, *times, traces))
    if phases.stress:
        found.append(_stress(scenario.closing()[0], found[-1].seconds, phases.stress.ladder()))
    if phases.drain:
        found.append(Expected("drain", "drain", 0, phases.drain.for_))
    return found


def _warmup(scenario: Scenario, traces: Traces) -> Iterator[Expected]:
    warmup, (arrivals, _) = scenario.phases.warmup, scenario.opening()
    if isinstance(warmup, Fixed):
        yield _expect("warmup", "warmup", arrivals, warmup.for_ or math.inf, warmup.requests or math.inf, traces)
    if isinstance(warmup, Prefill):
        known = capacity(scenario.target, warmup, {})
        whole = f"the cache's {known[0]:,} tokens are filled" if known else "what the server says its cache holds is filled"
        why = f"until {units.share(warmup.fill)} of {whole}, {warmup.concurrency} at a time"
        yield Expected("warmup", "warmup", prompts(scenario, warmup, traces), None, most=warmup.max, why=why)
    if isinstance(warmup, Dynamic):
        longest = _expect("warmup", "warmup", arrivals, warmup.max, math.inf, traces)
        why = "until TTFT and throughput are stationary"
        yield Expected("warmup", "warmup", None, None, longest.mean, longest.peak, warmup.max, why)


def prompts(scenario: Scenario, warmup: Prefill, traces: Traces) -> float | None:
    """About how many prompts fill the share: each leaves its whole blocks, so half a block less than it has tokens."""
    known, measured = capacity(scenario.target, warmup, {}), scenario.opening()[1]
    asked = primed(measured, "own")
    same = {asked[name].trace: traces[one.trace] for name, one in measured.items() if one.trace}
    each = tokens_of(asked, same, _stretch(scenario))
    if known is None or each is None:
        return None
    whole = max(1.0, each.prompt - (known[1] - 1) / 2)
    return float(math.ceil(warmup.fill * known[0] / whole))


def _stress(arrivals: Any, before: Seconds | None, ladder: Ladder) -> Expected:
    """The shape goes on from where steady leaves it, `before` seconds from its start, rung by rung."""
    climb = f"{units.share(ladder.step)} more every {units.duration(ladder.every)} up to {units.multiple(ladder.max)}"
    why = f"{climb}, unless something stops it"
    if isinstance(arrivals, Closed):
        users = arrivals.concurrency
        return Expected("stress", "stress", None, ladder.seconds, why=f"{users} to {round(ladder.max * users)} users; {why}")
    if isinstance(arrivals, TraceFile) or before is None or math.isinf(before):
        return Expected("stress", "stress", None, ladder.seconds, why=why)
    requests = 0.0
    for at, level in ladder.rungs():
        requests += level * (arrivals.exposure(before + at + ladder.every) - arrivals.exposure(before + at))
    peak = ladder.max * arrivals.peak(before + ladder.seconds)
    impulse = round(ladder.max * arrivals.requests) if isinstance(arrivals, Burst) and arrivals.every else None
    return Expected("stress", "stress", requests, ladder.seconds, requests / ladder.seconds, peak, why=why, impulse=impulse)


def _expect(name: str, kind: str, arrivals: Any, time: Seconds, bound: float, traces: Traces) -> Expected:
    if isinstance(arrivals, Closed):
        why = f"{arrivals.concurrency} users, each as fast as the server answers"
        return Expected(name, kind, bound if math.isfinite(bound) else None, time if math.isfinite(time) else None, why=why)
    if isinstance(arrivals, TraceFile):
        return _replayed(name, kind, arrivals, time, bound, traces[arrivals])
    if math.isinf(time) and math.isinf(bound):
        return Expected(name, kind, None, None, arrivals.rate(0.0), arrivals.peak(), why="until its bound on tokens")
    first = 1 if arrivals.process == "deterministic" else 0  # such a shape asks at its very start
    last = reach(arrivals, bound - first, 0.0) if math.isfinite(bound) else math.inf
    end = min(time, last)
    if math.isinf(end):
        return Expected(name, kind, arrivals.exposure(math.inf), None, why="the shape ends before its bound on requests")
    requests = bound if last <= time else arrivals.exposure(time)
    impulse = arrivals.requests if isinstance(arrivals, Burst) and arrivals.first <= end else None
    mean = arrivals.exposure(end) / end if end else None
    return Expected(name, kind, requests, end, mean, arrivals.peak(math.nextafter(end, 0.0)), impulse=impulse)


def _replayed(name: str, kind: str, file: TraceFile, time: Seconds, bound: float, trace: Trace) -> Expected:
    dues = [due for due in trace.dues if due < time]
    if not dues:
        return Expected(name, kind, None, None, why="no due times: give this trace to a class, and arrivals a shape")
    if file.wrap == "again" and (math.isfinite(bound) or math.isfinite(time)):
        rate = len(trace.dues) / max(trace.dues[-1], 1e-9)
        requests = min(bound, time * rate)
        return Expected(name, kind, requests, requests / rate, rate, _peak(dues), why="rows start over")
    dues = dues[: int(min(bound, len(dues)))]
    return Expected(name, kind, len(dues), dues[-1], len(dues) / dues[-1] if dues[-1] else None, _peak(dues))


def _peak(dues: list[Seconds], over: Seconds = 10.0) -> float:
    """The busiest ten seconds of a trace, per second."""
    counts: dict[int, int] = {}
    for due in dues:
        counts[int(due // over)] = counts.get(int(due // over), 0) + 1
    return max(counts.values()) / over


# ---- how much


def tokens(scenario: Scenario, traces: Traces, steady: list[Expected]) -> Tokens | None:
    """Tokens per arrival of steady, its epochs by their requests (or by their time, where those are not known); None where only a
    file of texts knows."""
    epochs, turns = scenario.phases.steady.epochs or [], scenario.phases.steady.turns()
    if not any(epoch.classes for epoch in epochs):
        return tokens_of(scenario.workload.classes, traces, _stretch(scenario))
    counts = [phase.requests for phase in steady]
    weights = [lasts for _, lasts in turns] if None in counts else [count or 0.0 for count in counts]
    parts = []
    for (place, _), weight in zip(turns, weights, strict=True):
        found = tokens_of(epochs[place].classes or scenario.workload.classes, traces, _stretch(scenario))
        if found is None:
            return None
        parts.append((weight / (sum(weights) or 1.0), found))
    return _mixed(parts)


def tokens_of(classes: Mapping[str, Class], traces: Traces, stretch: tuple[float, float]) -> Tokens | None:
    """A mix's tokens per arrival. `stretch`: mean and largest factor on drawn lengths."""
    parts = []
    for name, share in shares(classes).items():
        one = classes[name]
        found = _traced(traces[one.trace]) if one.trace else _generated(one, *stretch)
        if found is None:
            return None
        parts.append((share, found))
    return _mixed(parts)


def _mixed(parts: Iterable[tuple[float, Tokens]]) -> Tokens:
    parts = list(parts)
    means = ("prompt", "answer", "held", "turns")
    whole = sum(share for share, _ in parts) or 1.0  # 1, as far as floats go
    prompt, answer, held, turns = (sum(share * getattr(found, key) for share, found in parts) / whole for key in means)
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
    spells = [
        shape.lengths
        for shape in _shapes(scenario)
        if isinstance(shape, Chaos) and shape.lengths and shape.lengths.max > shape.lengths.min
    ]
    if not spells:
        return 1.0, 1.0
    return max((s.max - s.min) / math.log(s.max / s.min) for s in spells), max(s.max for s in spells)
