"""Gains of the PID by a step test on the embedded engine: how the KV usage answers the admitted rate, a lag fitted to it, SIMC.

The scenario's own requests go to the engine at rates of our choosing, past its arrivals: up to where usage is at the set-point,
then in steps between that rate and a lower one, as many as it takes for their mean to stand out of the noise of random lengths.
A first-order lag with dead time is fitted to the mean, and SIMC (Skogestad 2003) turns the lag into gains:
kp = tau / (K (lambda + theta)), ti = min(tau, 4 (lambda + theta)).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from kvbench.compose import build_nonce, build_phases
from kvbench.core import Seconds
from kvbench.endpoint import Sim
from kvbench.engine import Job, Machine
from kvbench.plan.bare import bare
from kvbench.scenario import Scenario
from kvbench.target.sim import asked

Floats = NDArray[np.float64]

FIRST = 0.05  # requests/s that every server takes
FAST, SLOW = 2.0, 1.2  # factors of the climb, below and above a quarter of the set-point
CHUNK = 20  # seconds over which usage is averaged while it settles
CHUNKS = 9  # at most so many
SETTLED = 0.03  # of the set-point: two chunks that differ by less are the same
LOW = 0.65  # the lower rate of the steps, as a share of the upper
STEPS, MOST = 6, 36  # up and down, so often before the first fit, and at most
GOOD, WORST = 0.9, 0.6  # R^2 at which the steps are enough, and below which a lag says nothing


@dataclass(frozen=True)
class Lag:
    """How usage answers the rate: `gain` per request/s, time constant, dead time. explained: R^2 of the fit."""

    gain: float
    tau: Seconds
    dead: Seconds
    explained: float


@dataclass(frozen=True)
class Tuned:
    """What a scenario's `control` is to say, and the measurement behind it. nominal: requests/s at the set-point."""

    setpoint: float
    nominal: float
    kp: float
    ti: Seconds
    lag: Lag
    low: float  # requests/s below the step
    seconds: int  # of virtual time


class Bench:
    """A machine that is given `jobs` one after the other at a rate; usage is read once a second."""

    def __init__(self, engine: Machine, jobs: Iterator[Job]) -> None:
        self.engine, self.jobs = engine, (replace(job, id=at) for at, job in enumerate(jobs))
        self.seconds = 0
        self._due: Seconds = 0.0

    def hold(self, rate: float, seconds: int) -> Floats:
        """Usage at the end of each second at `rate` requests/s: float64 [seconds]. ValueError when the jobs run out."""
        self._due = max(self.seconds, min(self._due, self.seconds + 1 / rate))
        usage, served, refused = np.zeros(seconds), 0, ""
        for second in range(seconds):
            while self._due < self.seconds + 1:
                job = next(self.jobs, None)
                if job is None:
                    raise ValueError("the set-point was not reached with the requests there are")
                self.engine.advance(self._due)
                why = self.engine.submit(job, self._due)
                served, refused = served + (why is None), why or refused
                self._due += 1 / rate
            self.seconds += 1
            self.engine.advance(self.seconds)
            usage[second] = self.engine.gauges()["kv_usage"]
        if refused and not served:
            raise ValueError(f"the engine refuses its requests ({refused}), so that nothing fills the cache")
        return usage

    def settle(self, rate: float) -> tuple[float, int]:
        """(usage, seconds it took) once two chunks agree, or after CHUNKS of them."""
        before, now, took = -1.0, 0.0, 0
        while took < CHUNKS * CHUNK and abs(now - before) > SETTLED * max(now, before):
            before, now = now, float(self.hold(rate, CHUNK).mean())
            took += CHUNK
        return now, took


def prepare(scenario: Scenario) -> tuple[Machine, Iterator[Job]]:
    """The scenario's engine or cluster, without its faults, and the requests of its steady phase in order. ValueError where it
    has none."""
    spec = scenario.target
    if not isinstance(spec, Sim):
        raise ValueError("the target is not the embedded engine: describe the server as `target: {kind: sim, ...}`")
    if any(one.sessions for one in scenario.workload.classes.values()):
        raise ValueError("turns of a session wait for answers and cannot be sent at a rate: use classes without `sessions`")
    phase = next(each for each in build_phases(scenario, build_nonce(scenario)) if each.kind == "steady")
    assert phase.source is not None, "steady offers requests"
    source = phase.source(0.0)
    taken = iter(lambda: source.take(lambda _: b"", 0.0), None)
    jobs = (asked(one) for one in taken if one is not None)
    return bare(spec.model_copy(update={"faults": []}), scenario.seed), jobs


def tune(engine: Machine, jobs: Iterator[Job], setpoint: float, every: Seconds) -> Tuned:
    """The step test. ValueError where the usage does not reach the set-point, or does not answer like a lag."""
    bench = Bench(engine, jobs)
    nominal, length = climb(bench, setpoint)
    low = LOW * nominal
    bench.hold(low, length)
    total, lag = np.zeros(length), Lag(0.0, 0.0, 0.0, 0.0)
    for steps in range(1, MOST + 1):
        up, down = bench.hold(nominal, length), bench.hold(low, length)
        total += (up - down + up[-length // 3 :].mean() - down[-length // 3 :].mean()) / 2
        if steps >= STEPS and (lag := fit(total / steps, nominal - low)).explained >= GOOD:
            break
    if lag.explained < WORST:
        raise ValueError(
            f"KV usage does not answer like a lag (R^2 {lag.explained:.2f} after {MOST} steps of {nominal - low:.3g}/s): "
            "the noise of these lengths hides it, so keep the gains that pid has by itself"
        )
    kp, ti = simc(lag, every)
    return Tuned(setpoint, nominal, kp * setpoint / nominal, ti, lag, low, bench.seconds)


def climb(bench: Bench, setpoint: float) -> tuple[float, int]:
    """(requests/s at which the usage is at the set-point, seconds in which it settles there)."""
    rate, usage, before = FIRST, 0.0, (0.0, 0.0)
    while True:
        usage, took = bench.settle(rate)
        if usage >= setpoint:
            share = (setpoint - before[1]) / (usage - before[1])
            return before[0] + share * (rate - before[0]), took
        if bench.engine.gauges()["waiting"] > rate * CHUNK:
            raise ValueError(
                f"at {rate:.3g}/s requests wait while KV usage is {usage:.0%}: this server is short of compute before its cache "
                "is full, so hold `waiting` or `ttft`, or use queue_feedback"
            )
        before = (rate, usage)
        rate *= FAST if usage < setpoint / 4 else SLOW


def fit(answer: Floats, step: float) -> Lag:
    """A lag with dead time through `answer`: the mean rise of usage at 1, 2, ... seconds after a step of the rate by `step`."""
    times = np.arange(1, len(answer) + 1, dtype=np.float64)

    def lagged(gain: float, tau: float, dead: float) -> Floats:
        return np.asarray(gain * -np.expm1(-np.maximum(times - dead, 0) / tau))

    def missed(p: Floats) -> Floats:
        return lagged(*p) - answer

    height = float(max(answer[-len(answer) // 3 :].mean(), 1e-6))
    start = [height, float(times[np.argmax(answer >= 0.63 * height)]), 0.5]
    most = [10 * height, 2.0 * len(answer), len(answer) / 3]
    found = least_squares(missed, start, bounds=([0.0, 0.1, 0.0], most)).x
    left, all_ = float((missed(found) ** 2).sum()), float(((answer - answer.mean()) ** 2).sum())
    return Lag(float(found[0]) / step, float(found[1]), float(found[2]), 1 - left / all_ if all_ else 0.0)


def simc(lag: Lag, every: Seconds) -> tuple[float, Seconds]:
    """(kp in requests/s per usage, ti). The control period delays by half of itself. lambda is the lag's own time constant, or
    the dead time where that is longer: a server whose lag changes with its load is held loosely."""
    dead = lag.dead + every / 2
    slow = max(dead, lag.tau)
    return lag.tau / (lag.gain * (slow + dead)), max(min(lag.tau, 4 * (slow + dead)), every)
