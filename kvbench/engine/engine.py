"""The engine: jobs in, spans of steps out. No clock, no I/O: whoever drives it says how far time has come.

How to drive it: advance(now) before anything else at `now`; then submit or cancel; then call again at wake(). The steps of a span
are identical decodes, planned up to the next scheduling event; an arrival cuts a span after the step in progress, as it
would have to wait for that step in a real engine. Blocks are taken as the steps happen, never ahead of the step in progress.
Faults (faults.py) begin and end at their own times, whatever the engine is advanced to.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

from kvbench.core import Nanos, Seconds
from kvbench.engine import Below, Cost, Done, Job, Span, readings
from kvbench.engine.batch import Batch
from kvbench.engine.energy import Meter
from kvbench.engine.faults import Agenda, Edge, Fault
from kvbench.engine.groups import LayersSpec
from kvbench.engine.harm import Harm
from kvbench.engine.live import Live
from kvbench.engine.memory import kv_memory
from kvbench.engine.sequence import Sequence
from kvbench.engine.steps import Steps, lay_out
from kvbench.engine.tape import Tape
from kvbench.profile import EngineProfile, Hardware, Model


class Engine:
    """One replica. `seed` reaches the eviction policy and says who is refused; everything else is deterministic by itself.

    Faults act through what is public here; `passed` holds the edges that time has come to, until whoever reads it takes them
    away. `tape` is told of every access. Ids of jobs are 0 or more: others are a fault's (harm.py), and no span tells of them.
    """

    def __init__(
        self, model: Model, hardware: Hardware, engine: EngineProfile, seed: int = 0, faults: Iterable[Fault] = (),
        tape: Tape | None = None, below: Below | None = None, layers: LayersSpec | None = None,
    ) -> None:  # fmt: skip
        self.model, self.hardware, self.profile = model, hardware, engine
        held = kv_memory(model, hardware, engine, seed, tape, below, layers)
        self.blocks, self.cache, self.partition = held.blocks, held.cache, held.partition
        self.cost: Cost = held.cost
        self.pool = self.cache.groups[0].pool
        powered = hardware.idle is not None and hardware.power is not None
        self.meter = Meter(hardware, held.cost) if powered else None
        self.memory = readings.memory(model, hardware, engine, self.cache)
        self.batch = Batch(self.cache, engine)
        self._jobs = Live(self.batch.entered)
        self._steps: Steps | None = None
        self.until: Nanos = 0  # how far time has come
        self._clock: Nanos = 0  # end of the last step, or the change that ended an idle time
        self._blocked = False  # there are jobs and no block for any of them: nothing begins until something changes
        self._loading: Nanos | None = None  # all that could run is being loaded: until then nothing begins
        self.faults = tuple(faults)
        self.harm = Harm(seed)
        self._agenda = Agenda(self.faults)
        self._stalls = 0
        self._stalled: Nanos = 0  # since when, while there are stalls
        self.passed: list[Edge] = []

    def submit(self, job: Job, now: Seconds) -> str | None:
        """Queue a job. Returns None, or why it is not served: "refused" (a fault) or "full" (max_waiting), or never can be:
        "empty", "context_too_long" or "kv_too_small".

        ValueError for an id that is live.
        """
        if job.id in self._jobs:
            raise ValueError(f"job {job.id} is already here")
        if self.harm.refuses():
            return "refused"
        unfit, counters = self.unfit(job), self.batch.counters
        if not unfit and self.profile.max_waiting is not None and len(self.batch.waiting) >= self.profile.max_waiting:
            return "full"
        counters.admitted += 1
        if unfit:
            counters.oom += unfit == "kv_too_small"
            return unfit
        if not self._jobs:
            self._clock = max(self._clock, round(now * 1e9))
        begun = job.begun or (0,) * job.n
        self._jobs.add(job, [self.batch.arrive(job, choice) for choice in range(job.n) if begun[choice] < job.max_tokens])
        self._cut(round(now * 1e9))
        return None

    def unfit(self, job: Job) -> str | None:
        """Why the job can never be served here: "empty", "context_too_long" or "kv_too_small"; None where it can."""
        total = job.tokens + job.max_tokens
        if job.tokens < 1 or job.max_tokens < 1 or job.n < 1:
            return "empty"
        if total > self.profile.limit(self.model):
            return "context_too_long"
        if self.partition is not None:
            self.partition.longest = max(self.partition.longest, min(total, self.cache.usable_tokens()))
        return "kv_too_small" if total - 1 > self.cache.usable_tokens() else None  # the last token is sampled and never cached

    def cancel(self, job_id: int, now: Seconds) -> None:
        """Forget a job: its blocks are free at once, the step in progress goes on. After advance(now). KeyError if unknown."""
        self._leave(self._jobs.sequences(job_id))
        self._jobs.remove(job_id)
        self._cut(round(now * 1e9))

    def _leave(self, sequences: Iterable[Sequence]) -> None:
        """They go, whatever the step in progress computes for them."""
        for sequence in sequences:
            self.batch.leave(sequence)
            if self._steps is not None:
                plan = self._steps.plan
                plan.decodes = [s for s in plan.decodes if s is not sequence]
                plan.chunks = [(s, new) for s, new in plan.chunks if s is not sequence]

    def _cut(self, now: Nanos) -> None:
        """Something changed at `now`: nothing beyond the step in progress, if there is one, is decided any more."""
        steps = self._steps
        if steps is None:
            if self._blocked or self._loading is not None:
                self._clock, self._blocked, self._loading = max(self._clock, now), False, None
            return
        if steps.taken and now <= steps.end(steps.taken):
            self._clock, self._steps = steps.end(steps.taken), None
        else:
            steps.count = steps.taken + 1

    def advance(self, until: Seconds) -> list[Span]:
        """Take every step that begins before `until`; hand out those that end by then. A step in progress is handed out later.

        What begins or ends at a fault's edge is decided there, and edges at `until` itself have passed.
        """
        limit = self.until = round(until * 1e9)
        spans: list[Span] = []
        while self._agenda.at <= limit:
            edge = self._agenda.pop()
            spans += self._advance(edge.at)
            self._cut(edge.at)
            if edge.edge in ("begin", "end"):
                self.passed.append(edge)
            edge.act(self)
        return spans + self._advance(limit)

    def _advance(self, limit: Nanos) -> list[Span]:
        """As `advance`, with no edge before `limit`."""
        spans: list[Span] = []
        while not self._stalls:
            if self._steps is None:
                if self._loading is not None and self._loading < limit:
                    self._clock, self._loading = max(self._clock, self._loading), None
                if self._clock >= limit or self._blocked or self._loading is not None or not self._jobs:
                    break
                self._steps = self._begin()
                if self.batch.killed:
                    spans.append(self._fail())
                if self._steps is None:
                    continue
            steps = self._steps
            ended = bisect_right(range(1, steps.count + 1), limit, key=steps.end)
            if ended > steps.taken:
                spans.append(self._take(steps, ended))
            if ended < steps.count:
                break
            self._clock, self._steps = steps.end(steps.count), None
        return spans

    def stall(self, now: Nanos) -> None:
        """From `now` on no step begins or ends, until as many `resume`. Nothing beyond the step in progress may be planned."""
        self._stalls += 1
        if self._stalls > 1:
            return
        self._stalled, steps = now, self._steps
        if steps is not None and steps.taken:  # the step in progress by itself, so that it alone grows longer
            begun = steps.end(steps.taken)
            self._steps = Steps(begun, steps.end(steps.taken + 1) - begun, 0.0, 1, steps.plan)

    def resume(self, now: Nanos) -> None:
        """End one stall. With the last of them the step in progress goes on where it was."""
        self._stalls -= 1
        if self._stalls:
            return
        if self._steps is not None:
            self._steps.first += now - self._stalled
        else:
            self._clock = max(self._clock, now)

    def _begin(self) -> Steps | None:
        """The next steps, from _clock. None while everything is being loaded, and where no job can have its blocks, which takes a
        fault that holds them: `_loading` or `_blocked` is set then."""
        self.cache.now = self._clock
        if self.partition is not None:
            self.partition.look(self._clock)
        plan = self.batch.plan()
        while plan.preempted and not plan.work:  # the last one running had to go: it may come back with a smaller first chunk
            plan = self.batch.plan()
        if not plan.work:
            self._loading, self._blocked = plan.ready, plan.ready is None
            return None
        return lay_out(plan, self._clock, self.batch, self.cost, self.harm, self.meter)

    def _fail(self) -> Span:
        """The jobs fail whose sequences the batch has killed, at the time that the step begins which had no blocks for them."""
        killed, self.batch.killed = self.batch.killed, []
        ended: list[Done] = []
        for job_id in dict.fromkeys(sequence.job.id for sequence in killed):
            self._leave([s for s in self._jobs.sequences(job_id) if s not in killed])
            ended.append(self._jobs.remove(job_id, "oom"))
        self.batch.counters.oom += len(ended)
        self._cut(self._clock)
        return Span(self._clock, [self._clock], [], [done for done in ended if done.id >= 0])

    def _take(self, steps: Steps, upto: int) -> Span:
        """Hand out steps up to and including `upto`, and take the blocks of the step after them, where there is one."""
        plan = steps.plan
        self.cache.now = steps.end(upto)
        sampled = [s for s, new in plan.chunks if s.computed + new == s.known]
        for sequence, new in plan.chunks:
            self.batch.prefilled(sequence, new)
        taken = steps.taken
        self.batch.decoded(plan.decodes, upto - taken, 1 if upto < steps.count else 0, lambda step: steps.end(taken + step - 1))
        self.cache.now = steps.end(upto)
        sampled += plan.decodes
        ended = [
            done for done in map(self._finish, [s for s in sampled if s.known == s.end]) if done is not None and done.id >= 0
        ]
        start = steps.end(steps.taken) if steps.taken else steps.start
        times = [steps.end(step) for step in range(steps.taken + 1, upto + 1)]
        if self.meter is not None:
            self.meter.add(steps.burnt(upto) - steps.burnt(taken))
        steps.taken = upto
        return Span(start, times, [s.name for s in sampled if s.job.id >= 0], ended)

    def _finish(self, sequence: Sequence) -> Done | None:
        """The sequence has its last token. Returns the job's end when it was the last of its choices."""
        self.batch.leave(sequence)
        return self._jobs.ended(sequence)

    def wake(self) -> Seconds:
        """When to call advance next if nothing arrives before: no first token or end lies before it. inf when idle or hung."""
        if not self._jobs:
            return math.inf
        edge = self._agenda.at / 1e9  # the steps planned so far may not last beyond it
        if self._blocked or self._stalls > self.harm.pauses:
            return self._agenda.turn / 1e9
        if self._stalls:
            return edge
        if self._loading is not None:
            return min(edge, (self._loading + 1) / 1e9)
        if self._steps is not None:
            return min(edge, self._steps.end(self._steps.count) / 1e9)
        return min(edge, (self._clock + 1) / 1e9)  # the step that begins at _clock has begun just after it

    def tick(self) -> Seconds:
        """As wake(), and no later than the end of the step in progress: for who hands out tokens as they come."""
        if self._steps is None or self._stalls:
            return self.wake()
        return min(self.wake(), self._steps.end(self._steps.taken + 1) / 1e9)

    def progress(self, job_id: int) -> Done:
        """A live job so far. KeyError if unknown."""
        return self._jobs.progress(job_id)

    def begun(self, job_id: int) -> tuple[int, ...]:
        """Answer tokens of each choice of a live job so far, those from other nodes included. KeyError if unknown."""
        return self._jobs.begun(job_id)

    @property
    def watts(self) -> float:
        """Power beyond idle of the step in progress, all devices together."""
        steps = self._steps
        return 0.0 if steps is None else steps.watts(steps.taken + 1)

    def gauges(self) -> dict[str, float]:
        """State at the time advanced to, the step in progress included."""
        return readings.gauges(self)

    def gauges_by_node(self) -> list[dict[str, float]]:
        return []

    def facts(self) -> dict[str, Any]:
        return readings.facts(self)

    def preempt(self) -> None:
        """Every running sequence loses its blocks, and what the step in progress computes for it. After advance(now)."""
        self.batch.preempt()
        if self._steps is not None:
            self._steps.plan.chunks, self._steps.plan.decodes = [], []

    def found(self, job: Job) -> int:
        """Prompt tokens of `job` that are resident, on the device or below. Counts nothing."""
        return self.cache.find(self.cache.open(job.segments, job.id, job.salt), job.tokens - 1).tokens

    def reset(self, now: Seconds) -> bool:
        """Empty the prefix cache. False, and nothing done, while blocks are in use. After advance(now)."""
        self.cache.now = round(now * 1e9)
        return self.cache.reset()

    def close(self) -> None:
        """Let go of real files."""
        if self.cache.below is not None:
            self.cache.below.close()

    def check(self) -> None:
        """Assert every invariant. Slow: for tests."""
        self.batch.check()
        if self.cache.below is not None:
            self.cache.below.check()
        assert not self.batch.killed, "killed sequences whose jobs have not failed"
        self._jobs.check([*self.batch.running, *self.batch.waiting])
