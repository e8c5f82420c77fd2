"""The engine: jobs in, spans of steps out. No clock, no I/O: whoever drives it says how far time has come.

How to drive it: advance(now) before anything else at `now`; then submit or cancel; then call again at wake(). The steps of a span
are identical decodes, planned up to the next scheduling event; an arrival cuts a span after the step in progress, as it
would have to wait for that step in a real engine. Blocks are taken as the steps happen, never ahead of the step in progress.
"""

from bisect import bisect_right
from dataclasses import dataclass

from kvbench.core import Nanos, Seconds
from kvbench.engine import Done, Job, Span, Step
from kvbench.engine.batch import Batch, Plan, Sequence
from kvbench.engine.cost import COSTS
from kvbench.engine.evict import POLICIES
from kvbench.engine.pool import Pool
from kvbench.profile import EngineProfile, Hardware, Model, kv_blocks


@dataclass(slots=True)
class _Steps:
    """The steps under way: step i (1, 2, ...) ends at start + i first + i (i - 1) / 2 growth."""

    start: Nanos
    first: float  # ns
    growth: float  # ns by which each step is longer than the one before: contexts grow
    count: int
    plan: Plan
    taken: int = 0  # steps that have been handed out

    def end(self, step: int) -> Nanos:
        return self.start + max(step, round(step * self.first + step * (step - 1) / 2 * self.growth))


class Engine:
    """One replica. `seed` reaches the eviction policy; everything else is deterministic by itself."""

    def __init__(self, model: Model, hardware: Hardware, engine: EngineProfile, seed: int = 0) -> None:
        if engine.policy not in POLICIES:
            raise ValueError(f"policy {engine.policy!r} is unknown: one of {', '.join(POLICIES)}")
        self.model, self.hardware, self.profile = model, hardware, engine
        self.blocks = kv_blocks(model, hardware, engine)
        self.cost = COSTS["roofline"](model, hardware, engine)
        self.pool = Pool(self.blocks, engine.block, POLICIES[engine.policy](self.blocks - 1, seed))
        self.batch = Batch(self.pool, engine)
        self._jobs: dict[int, list[Sequence]] = {}  # job id -> its choices that have not ended
        self._ended: dict[int, tuple[int, int]] = {}  # job id -> tokens and preemptions of choices that have
        self._steps: _Steps | None = None
        self._clock: Nanos = 0  # end of the last step, or the arrival that ended an idle time

    def submit(self, job: Job, now: Seconds) -> str | None:
        """Queue a job. Returns None, or why it can never be served: "empty", "context_too_long" or "kv_too_small".

        ValueError for an id that is live.
        """
        if job.id in self._jobs:
            raise ValueError(f"job {job.id} is already here")
        total = job.tokens + job.max_tokens
        if job.tokens < 1 or job.max_tokens < 1 or job.n < 1:
            return "empty"
        if total > self.profile.limit(self.model):
            return "context_too_long"
        if -(-(total - 1) // self.profile.block) > self.pool.usable:  # the last token is sampled and never cached
            return "kv_too_small"
        if not self._jobs:
            self._clock = max(self._clock, round(now * 1e9))
        self._jobs[job.id] = [Sequence(job, choice, self.profile.block) for choice in range(job.n)]
        self.batch.waiting.extend(self._jobs[job.id])
        self._cut(round(now * 1e9))
        return None

    def cancel(self, job_id: int, now: Seconds) -> None:
        """Forget a job: its blocks are free at once, the step in progress goes on. After advance(now). KeyError if unknown."""
        for sequence in self._jobs.pop(job_id):
            self.batch.leave(sequence)
            if self._steps is not None:
                plan = self._steps.plan
                plan.decodes = [s for s in plan.decodes if s is not sequence]
                plan.chunks = [(s, new) for s, new in plan.chunks if s is not sequence]
        self._forget(job_id)
        self._cut(round(now * 1e9))

    def _cut(self, now: Nanos) -> None:
        """Something changed at `now`: nothing beyond the step in progress, if there is one, is decided any more."""
        steps = self._steps
        if steps is None:
            return
        if steps.taken and now <= steps.end(steps.taken):
            self._clock, self._steps = steps.end(steps.taken), None
        else:
            steps.count = steps.taken + 1

    def advance(self, until: Seconds) -> list[Span]:
        """Take every step that begins before `until`; hand out those that end by then. A step in progress is handed out later."""
        limit = round(until * 1e9)
        spans: list[Span] = []
        while True:
            if self._steps is None:
                if self._clock >= limit or not self._jobs:
                    return spans
                self._steps = self._begin()
            steps = self._steps
            ended = bisect_right(range(1, steps.count + 1), limit, key=steps.end)
            if ended > steps.taken:
                spans.append(self._take(steps, ended))
            if ended < steps.count:
                return spans
            self._clock, self._steps = steps.end(steps.count), None

    def _begin(self) -> _Steps:
        plan = self.batch.plan()
        chunks = tuple((new, sequence.computed) for sequence, new in plan.chunks)
        samples = len(plan.decodes) + sum([s.computed + new == s.known for s, new in plan.chunks])
        context = sum([s.computed for s in plan.decodes]) + len(plan.decodes)
        first = self.cost.seconds(Step(chunks, len(plan.decodes), context, samples)) * 1e9
        count, growth = 1, 0.0
        if plan.repeats:
            count = min([s.end - s.known for s in plan.decodes])
        if count > 1:
            count = self.batch.steps_in_room(plan.decodes, count)
            grown = Step((), len(plan.decodes), context + len(plan.decodes), samples)
            growth = self.cost.seconds(grown) * 1e9 - first
        return _Steps(self._clock, first, growth, count, plan)

    def _take(self, steps: _Steps, upto: int) -> Span:
        """Hand out steps up to and including `upto`, and take the blocks of the step after them, where there is one."""
        plan = steps.plan
        sampled = [s for s, new in plan.chunks if s.computed + new == s.known]
        for sequence, new in plan.chunks:
            self.batch.prefilled(sequence, new)
        self.batch.decoded(plan.decodes, upto - steps.taken, 1 if upto < steps.count else 0)
        sampled += plan.decodes
        ended = [self._finish(s) for s in sampled if s.known == s.end]
        start = steps.end(steps.taken) if steps.taken else steps.start
        times = [steps.end(step) for step in range(steps.taken + 1, upto + 1)]
        steps.taken = upto
        return Span(start, times, [s.name for s in sampled], [done for done in ended if done is not None])

    def _finish(self, sequence: Sequence) -> Done | None:
        """The sequence has its last token. Returns the job's end when it was the last of its choices."""
        self.batch.leave(sequence)
        job = sequence.job
        tokens, preempted = self._ended.get(job.id, (0, 0))
        self._ended[job.id] = (tokens + sequence.generated, preempted + sequence.preempted)
        live = self._jobs[job.id]
        live.remove(sequence)
        if live:
            return None
        del self._jobs[job.id]
        return Done(job.id, sequence.prompt, *self._forget(job.id))

    def _forget(self, job_id: int) -> tuple[int, int, int]:
        """Drop what was kept of a job: (tokens generated, prompt tokens found, preemptions)."""
        tokens, preempted = self._ended.pop(job_id, (0, 0))
        return tokens, self.batch.cached.pop(job_id, 0), preempted

    def wake(self) -> Seconds:
        """When to call advance next if nothing arrives before: no first token or end lies before it. inf when idle."""
        if self._steps is not None:
            return self._steps.end(self._steps.count) / 1e9
        return (self._clock + 1) / 1e9 if self._jobs else float("inf")  # the step that begins at _clock has begun just after it

    def progress(self, job_id: int) -> Done:
        """A live job so far. KeyError if unknown."""
        live = self._jobs[job_id]
        tokens, preempted = self._ended.get(job_id, (0, 0))
        tokens += sum(s.generated for s in live)
        preempted += sum(s.preempted for s in live)
        return Done(job_id, live[0].prompt, tokens, self.batch.cached.get(job_id, 0), preempted)

    def gauges(self) -> dict[str, float]:
        """State at the time advanced to, the step in progress included. Shares are of the usable blocks (metrics: KV cache)."""
        counters = self.batch.counters
        return {
            "kv_usage": self.pool.referenced / self.pool.usable,
            "cached_share": len(self.pool.index) / self.pool.usable,
            "running": float(len(self.batch.running)),
            "waiting": float(len(self.batch.waiting)),
            "preemptions": float(counters.preemptions),
            "hit_tokens": float(counters.hit),
            "query_tokens": float(counters.query),
            "recompute_tokens": float(counters.recompute),
            "computed_tokens": float(counters.computed),
        }

    def check(self) -> None:
        """Assert every invariant. Slow: for tests."""
        self.batch.check()
        queued = [*self.batch.running, *self.batch.waiting]
        live = [s for sequences in self._jobs.values() for s in sequences]
        assert len(queued) == len(live), "sequences lost or doubled"
        assert set(map(id, queued)) == set(map(id, live)), "queues and jobs disagree"
        assert set(self.batch.cached) <= set(self._jobs), "cached counts of jobs that ended"
        assert all(s.prompt <= s.known < s.end for s in live), "a finished sequence is live"
