"""Identical steps in a row, the unit in which the engine plans: each lasts a little longer than the one before."""

from dataclasses import dataclass

from kvbench.core import Nanos
from kvbench.engine.batch import Plan


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
