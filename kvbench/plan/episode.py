"""One run of a scenario's steady load under a law, without files, records or an event loop: the same parts, played bare.

Engine or cluster, tiers, faults, gate, arrivals and content are those of a run, and the law sees the windows that a run would
show it, as far as laws of the cache and the queue read them. Left out: latencies and token counts in windows, sessions, closed
loops, other phases: the load, and with it the time of faults, begins at 0.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbench.compose import build_nonce, build_phases, build_slos
from kvbench.control import Law
from kvbench.control.gate import Gate
from kvbench.core import Limits, Nanos, Seconds, Window
from kvbench.endpoint import Sim
from kvbench.engine import Done, Job
from kvbench.plan.bare import bare
from kvbench.scenario import Scenario
from kvbench.target.sim import BUSY, asked

DRAIN: Seconds = 120.0  # after the load, for the last answers
FULL = 0.95  # KV usage above which the cache counts as full
COUNTED = ("offered", "admitted", "ok", "shed", "failed", "rejected")


@dataclass(frozen=True)
class Offer:
    """What arrives: the job, when it is due, and the limits that its class sets."""

    due: Seconds
    job: Job
    slo: dict[str, Seconds]


@dataclass(frozen=True)
class Score:
    """How an episode went; shares of the offered requests and of the seconds of the load."""

    offered: int
    goodput: float
    shed: float
    full: float  # of the seconds: KV usage above FULL
    preemptions: int
    refused: str = ""  # why the engine took a request not at all, where it did so


def offers(scenario: Scenario, seconds: Seconds) -> list[Offer]:
    """The load of the scenario's steady phase, up to `seconds`. ValueError for one that waits for answers."""
    if not isinstance(scenario.target, Sim):
        raise ValueError("the target is not the embedded engine: give the scenario `target: {kind: sim, ...}`")
    if any(one.sessions for one in scenario.workload.classes.values()):
        raise ValueError("sessions wait for answers, so their load cannot be played on its own: use classes without `sessions`")
    phase = next(each for each in build_phases(scenario, build_nonce(scenario)) if each.kind == "steady")
    source = phase.source(0.0) if phase.source is not None else None
    if source is None or source.schedule is None:
        raise ValueError("a closed loop has no load of its own: use an open-loop shape of arrivals")
    slos, found, count = build_slos(scenario), [], 0
    while source.due < seconds and count < phase.requests:  # an infinite rate has no other end
        due, count = source.schedule.pop(), count + 1
        request = source.take(lambda _: b"", due)
        if request is not None:
            found.append(Offer(due, asked(request), slos[request.cls]))
    return found


class Episode:
    """Plays `load` for `seconds` under a law that is asked every `every` about the last `over` seconds."""

    def __init__(self, scenario: Scenario, load: list[Offer], seconds: Seconds, limits: Limits) -> None:
        self.engine = bare(scenario.target, scenario.seed)
        self.gate = Gate(limits)
        self.load, self.seconds = load, seconds
        self.every, self.over = round(scenario.control.every), round(scenario.control.over)
        self.good = self.full = self.shed = 0
        self.refused = ""
        self._counts: deque[dict[str, int]] = deque([dict.fromkeys(COUNTED, 0)], maxlen=self.over)  # by second, the last is open
        self._live: dict[int, tuple[Offer, Seconds]] = {}  # job id -> what it is, and when it was sent
        self._first: dict[int, Nanos] = {}

    def play(self, law: Law | None) -> Score:
        """From an empty engine to the last answer, or DRAIN after the load."""
        at, tick, now, end = 0, 1, 0.0, self.seconds + DRAIN
        while now < end and (at < len(self.load) or self._live or len(self.gate)):
            due = self.load[at].due if at < len(self.load) else math.inf
            now = max(now, min(due, self.gate.wake(now), self.engine.wake(), tick))
            self._advance(now)
            self._pump(now)
            if due <= now:
                self._offer(self.load[at], now)
                at += 1
            if tick <= now:
                self._tick(tick, law)
                tick += 1
        offered, preempted = max(1, len(self.load)), int(self.engine.gauges()["preemptions"])
        shares = self.good / offered, self.shed / offered, self.full / self.seconds
        return Score(len(self.load), *shares, preempted, self.refused)

    def _offer(self, offer: Offer, now: Seconds) -> None:
        self._counts[-1]["offered"] += 1
        if self.gate.enter(offer, offer.due):
            self._send(offer, now)

    def _pump(self, now: Seconds) -> None:
        if not len(self.gate):
            return
        released, shed = self.gate.pump(now)
        for offer, _ in released:
            self._send(offer, now)
        self._counts[-1]["shed"] += len(shed)
        self.shed += len(shed)

    def _send(self, offer: Offer, now: Seconds) -> None:
        self._counts[-1]["admitted"] += 1
        self._live[offer.job.id] = offer, now
        if (why := self.engine.submit(offer.job, now)) is not None:  # refused: it fails at once
            self.refused = why
            self._counts[-1]["rejected" if why in BUSY else "failed"] += 1
            del self._live[offer.job.id]
            self.gate.leave(now)

    def _advance(self, now: Seconds) -> None:
        for span in self.engine.advance(now):
            for job, _ in span.tokens:
                self._first.setdefault(job, span.times[0])
            for done in span.done:
                self._end(done, span.times[-1] / 1e9)

    def _end(self, done: Done, at: Seconds) -> None:
        offer, sent = self._live.pop(done.id)
        first = self._first.pop(done.id, 0) / 1e9
        self._counts[-1]["failed" if done.failed else "ok"] += 1
        self.gate.leave(at)
        if done.failed:
            return
        got = {
            "response_ttft": first - offer.due, "ttft": first - sent, "response": at - offer.due, "e2e": at - sent,
            "tpot": (at - first) / (done.n_out - 1) if done.n_out > 1 else math.inf,
        }  # fmt: skip
        self.good += all(got.get(name, math.inf) <= most for name, most in offer.slo.items())

    def _tick(self, tick: int, law: Law | None) -> None:
        """A second is over: ask the law when its period is."""
        gauges = self.engine.gauges()
        if tick <= self.seconds:
            self.full += gauges["kv_usage"] > FULL
            if law is not None and tick % self.every == 0:
                self.gate.relimit(law.update(self._window(tick, gauges)), float(tick))
                self._pump(float(tick))
        self._counts.append(dict.fromkeys(COUNTED, 0))

    def _window(self, tick: int, gauges: dict[str, float]) -> Window:
        covered = len(self._counts)
        counts = {name: sum(second[name] for second in self._counts) for name in COUNTED}
        counts |= {"timeout": 0, "inflight": len(self._live), "held": len(self.gate)}
        values: dict[str, float | None] = {f"{name}_last": value for name, value in gauges.items()}
        values["admitted_rate"] = counts["admitted"] / covered
        return Window(
            start=float(tick - covered), end=float(tick), counts=counts, values=values, age=dict.fromkeys(gauges, 0.0),
        )  # fmt: skip


def mean(scores: list[Score]) -> dict[str, Any]:
    """Means over episodes, each weighing alike, rounded as they are told."""
    return {
        name: round(float(np.mean([getattr(score, name) for score in scores])), 4)
        for name in ("goodput", "shed", "full", "preemptions")
    }
