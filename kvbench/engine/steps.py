"""Identical steps in a row, the unit in which the engine plans: each lasts a little longer than the one before."""

import math
from dataclasses import dataclass

from kvbench.core import Nanos
from kvbench.engine import Cost, Step
from kvbench.engine.batch import Batch, Plan
from kvbench.engine.energy import Meter
from kvbench.engine.harm import Harm
from kvbench.engine.hybrid import attended


@dataclass(slots=True)
class Steps:
    """The steps under way: step i (1, 2, ...) ends at start + i first + i (i - 1) / 2 growth."""

    start: Nanos
    first: float  # ns
    growth: float  # ns by which each step is longer than the one before: contexts grow
    count: int
    plan: Plan
    taken: int = 0  # steps that have been handed out
    joules: float = 0.0  # beyond idle, of the first
    warming: float = 0.0  # by which each step's are more than the one's before

    def end(self, step: int) -> Nanos:
        return self.start + max(step, round(step * self.first + step * (step - 1) / 2 * self.growth))

    def burnt(self, step: int) -> float:
        """Joules beyond idle of the first `step` steps."""
        return step * self.joules + step * (step - 1) / 2 * self.warming

    def watts(self, step: int) -> float:
        """Power beyond idle of the `step`-th step."""
        begun = self.end(step - 1) if step > 1 else self.start
        return (self.joules + (step - 1) * self.warming) * 1e9 / (self.end(step) - begun)


def lay_out(plan: Plan, clock: Nanos, batch: Batch, cost: Cost, harm: Harm, meter: Meter | None) -> Steps:
    """The steps that `plan` comes to from `clock` on, as many as are alike. The first pays the cache's debt."""
    cache, decodes = batch.cache, plan.decodes
    chunks = tuple((new, sequence.computed) for sequence, new in plan.chunks)
    shares: tuple[float, ...] = ()
    if len(cache.pools) > 1:
        shares = tuple(s.holding.share(s.computed, s.computed + new) for s, new in plan.chunks)
    samples = len(decodes) + sum([s.computed + new == s.known for s, new in plan.chunks])
    context = sum([s.computed for s in decodes]) + len(decodes)
    slow = math.prod(harm.slowed) * 1e9
    step = Step(chunks, len(decodes), context, samples, shares, attended(cache.windows, decodes, 1))
    alone = cost.seconds(step) * slow
    debt = cache.owed(alone / 1e9) * 1e9
    steps = Steps(clock, alone + debt, 0.0, 1, plan)
    if meter is not None:
        steps.joules = meter.joules(step, steps.first / 1e9)
    if not plan.repeats or debt or plan.ready is not None or harm.single:  # the next step may owe less, or more take part
        return steps
    count = batch.steps_in_room(decodes, min([s.end - s.known for s in decodes]))
    if count > 1:
        grown = Step((), len(decodes), context + len(decodes), samples, (), attended(cache.windows, decodes, 2))
        steps.count, steps.growth = count, cost.seconds(grown) * slow - alone
        if meter is not None:
            steps.warming = meter.joules(grown, (alone + steps.growth) / 1e9) - steps.joules
    return steps
