"""What looks wrong with a scenario before it runs: each doubt with its numbers and what to do about it."""

import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from kvbench import units
from kvbench.agenda import capacity
from kvbench.collect.prometheus import Prometheus
from kvbench.control.bucket import Bucket
from kvbench.control.feedback import QueueFeedback
from kvbench.control.laws import LAWS
from kvbench.control.learned import Learned
from kvbench.control.pid import Pid
from kvbench.endpoint import Http, Sim
from kvbench.expected import Expected, expected, read_traces, tokens
from kvbench.scenario import Scenario
from kvbench.timetable import Dynamic, OnDemand, Prefill
from kvbench.warmup import LEAST, even
from kvbench.workload.arrivals import Burst
from kvbench.workload.schedule import Closed
from kvbench.workload.traces import TraceFile

SUPPORT, FEWEST = 1000, 30  # requests that a p99 needs, and below which the verdict is INVALID
TOO_LONG = "a request may need {:,} tokens and the model's context is {:,}: those will fail"
FULL = 0.95  # a prefill beyond may not get there: what a prompt leaves of its last block holds nothing reusable


def overlong(scenario: Scenario, limit: int | None) -> list[str]:
    """That requests may not fit a server's context of `limit` tokens. Raises ValueError where a trace cannot be read."""
    if not limit:
        return []
    traces = read_traces(scenario)
    steady = [phase for phase in expected(scenario, traces) if phase.kind == "steady"]
    each = tokens(scenario, traces, steady)
    return [TOO_LONG.format(each.longest, limit)] if each and each.longest > limit else []


def blind(scenario: Scenario, told: Collection[str] | None = None) -> list[str]:
    """That the law waits for a signal which nobody gives. `told`: what this run's collectors have found; None before they have
    looked, when only a scenario that reads nothing is known to be blind."""
    control, target = scenario.control, scenario.target
    if isinstance(target, Sim):
        return []
    still = "so the law holds still for the whole run"
    if isinstance(control, Pid) and control.signal == "ttft":
        if isinstance(target, Http) and not target.stream:
            return [f"pid holds ttft, and there is none with `stream: false`, {still}. Use `stream: true`, or `law: bucket`"]
        return []
    needs = _signals(control)
    if told is None:
        reads = scenario.collect is None or any(isinstance(each, Prometheus) for each in scenario.collect)
        told = needs if reads and isinstance(target, Http) else ()
    missing = [name for name in needs if name not in told]
    if not missing:
        return []
    law = f"{next(name for name, spec in LAWS.items() if type(control) is spec)} holds {' and '.join(missing)}"
    instead = "Use `law: pid` with `signal: ttft`, or `law: bucket`"
    return [f"{law}, and nothing that this run reads tells it of this target, {still}. {instead}"]


def _signals(control: Any) -> tuple[str, ...]:
    """The gauges that a law cannot do without."""
    if isinstance(control, Pid):
        return (control.signal,)
    if isinstance(control, QueueFeedback):
        return ("waiting",)
    return ("kv_usage", "waiting") if isinstance(control, Learned) else ()


def doubts(scenario: Scenario, plan: dict[str, Any], phases: Sequence[Expected], requests: float | None) -> Iterator[str]:
    """`plan`: what the forecast has found so far. `requests`: of steady, every turn counted; None where they are not known."""
    steady = [phase for phase in phases if phase.kind == "steady"]
    if requests is not None and requests < SUPPORT:
        verdict = "" if "degraded" in scenario.verdict.get("steady_requests", {}) else ", the verdict DEGRADED"
        level = f"below {FEWEST} the verdict is INVALID" if requests < FEWEST else f"its p99 is marked{verdict}"
        yield f"about {requests:,.0f} requests in steady: a p99 needs {SUPPORT:,}; {level}. Run longer or faster"
    context = plan["context"]
    if context["fits"] is False:
        yield TOO_LONG.format(context["longest"], context["limit"])
    ends = scenario.phases.steady  # one that ends by its count or with its trace waits for its last answers
    if scenario.phases.drain is None and (ends.for_ or ends.tokens or ends.epochs or scenario.phases.stress):
        yield f"no drain phase: what is in flight when {phases[-1].kind} ends is cancelled. Add `drain: {{for: 1m}}`"
    if not scenario.workload.nonce:
        yield "nonce is off: the cache may still hold this scenario's prompts from an earlier run"
    yield from _warmups(scenario, phases)
    yield from blind(scenario)
    yield from _limits(scenario, steady)
    yield from _rules(scenario, phases)
    yield from _ladder(scenario, phases)
    length = plan["seconds_most"]  # with what a phase may last at most; None: nobody knows
    for fault in plan["faults"] if length is not None else ():
        if fault["at"] >= length:
            begins = f"it begins at {units.duration(fault['at'])} and the run offers load for {units.duration(length)}"
            yield f"fault {fault['kind']}: {begins}, so it may never begin. Set an earlier `at`"
    if (kv := plan["kv"]) and kv["share_at_peak"] is None and any(phase.peak for phase in steady):
        yield "at the peak rate prefill alone is more than this hardware does: the queue grows as long as the peak lasts"
    target = scenario.target
    if isinstance(target, Http) and target.key_env and not os.environ.get(target.key_env):
        yield f"the environment variable {target.key_env} (target.key_env) is not set here"


def _warmups(scenario: Scenario, phases: Sequence[Expected]) -> Iterator[str]:
    """Warm-ups that may not get where they are to go."""
    warmup, (arrivals, classes) = scenario.phases.warmup, scenario.opening()
    count = next((phase.requests for phase in phases if phase.kind == "warmup"), None)
    if isinstance(warmup, Prefill):
        if capacity(scenario.target, warmup, {}) is None:
            yield "prefill: the server may not say how many tokens its KV cache holds: then give `phases.warmup.capacity`"
        if count is not None and count > warmup.requests:
            reached = units.share(warmup.fill * warmup.requests / count)
            sent = f"at most {warmup.requests:,} are sent, which fill {reached}"
            yield f"prefill: it takes about {count:,.0f} prompts and {sent}: raise `requests`"
        if warmup.fill > FULL:
            share = units.share(warmup.fill)
            yield f"prefill: {share} may not be reached: a prompt's last block is seldom full, and then holds nothing reusable"
    if isinstance(warmup, Dynamic) and not isinstance(arrivals, (Closed, TraceFile)):
        batches = int(warmup.max // warmup.batch)
        asked = [arrivals.exposure(warmup.batch * (k + 1)) - arrivals.exposure(warmup.batch * k) for k in range(batches)]
        if not any(even(asked[:n]) is not None for n in range(LEAST, batches + 1)):
            most = units.duration(warmup.max)
            yield f"dynamic warm-up: the load itself is not stationary within {most}, so TTFT will hardly be: raise `max`"
    if isinstance(warmup, OnDemand) and not any(one.prefixes or one.trace for one in classes.values()):
        yield "warm-up on demand: no class has `prefixes`, so no first use can be told apart"


def _limits(scenario: Scenario, steady: list[Expected]) -> Iterator[str]:
    """Limits that the load is bound to meet."""
    control, arrivals = scenario.control, scenario.workload.arrivals
    patience = units.duration(control.patience)
    mean = max((phase.mean for phase in steady if phase.mean is not None), default=0.0)
    if isinstance(control, Bucket):
        if mean > control.rate:
            yield f"{mean:.3g}/s arrive, the bucket lets {control.rate:.3g}/s in: about {1 - control.rate / mean:.0%} is shed"
        if isinstance(arrivals, Burst) and (wait := (arrivals.requests - control.burst) / control.rate) > control.patience:
            let = control.burst + control.rate * control.patience
            lost = max(1, round(arrivals.requests - let))
            lasts = 0.0 if scenario.phases.steady.epochs else steady[0].seconds or 0.0
            times = arrivals.impulses(lasts) // arrivals.requests
            whole = f": {lost * times:,} in the {times} bursts of steady" if times > 1 else ""
            late = f"the last of a burst of {arrivals.requests} waits {units.duration(wait)} for the bucket; patience: {patience}"
            yield f"{late}. About {lost} of each burst's {arrivals.requests} are shed{whole}"
    if control.inflight and isinstance(arrivals, Closed) and arrivals.concurrency > control.inflight:
        yield f"{arrivals.concurrency} users, {control.inflight} of them in flight: the others wait at the gate, up to {patience}"


def _rules(scenario: Scenario, phases: Sequence[Expected]) -> Iterator[str]:
    """Stop rules that can never fire, and snapshots that are never taken."""
    steady = [phase for phase in phases if phase.kind == "steady"]
    every = scenario.phases.steady.snapshot
    if every and all(phase.seconds is not None and phase.seconds < every for phase in steady):
        longest = units.duration(max(phase.seconds or 0.0 for phase in steady))
        yield f"snapshot: one every {units.duration(every)}, and no part of steady is longer than {longest}: none is taken"
    for rule in scenario.stop:
        if rule.when.metric.of.unit == "share" and rule.when.limit > 1:
            fires = "cannot fire" if rule.when.compare in (">", ">=") else "always fires"
            yield f"stop rule {rule}: a share is 0 % to 100 %, so it {fires}"
    loaded = [phase for phase in phases if phase.kind in ("steady", "stress")]
    times = [phase.seconds for phase in loaded]
    if None in times:
        return
    length = sum(time for time in times if time is not None)
    rate = max((phase.mean for phase in loaded if phase.mean is not None), default=None)
    for rule in scenario.stop:
        if rule.hold > length:
            yield f"stop rule {rule}: it must hold longer than steady lasts ({units.duration(length)}), so it cannot fire"
        if rate is not None and rate * rule.over < rule.needs:
            seen = f"about {rate * rule.over:.3g} requests in {units.duration(rule.over)}"
            yield f"stop rule {rule}: it needs {rule.needs} and sees {seen}, so it may never be read: lengthen `over`"


def _ladder(scenario: Scenario, phases: Sequence[Expected]) -> Iterator[str]:
    stress = scenario.phases.stress
    if stress is None:
        return
    if not scenario.stop:
        most = units.multiple(stress.max)
        yield f"stress without a stop rule: nothing ends it before {most} of the load. Add one under `stop`, for example kv_usage"
    if any(phase.kind == "stress" and phase.requests == 0 for phase in phases):
        yield "stress: the load shape offers nothing any more after steady, and a multiple of nothing is nothing"
