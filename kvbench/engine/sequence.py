"""One answer to one job while the engine works on it, and the orders in which sequences wait and leave.

ORDERS say who is admitted first, VICTIMS who loses its blocks when they run out.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Row
from typing import NamedTuple

from kvbench.core import Nanos
from kvbench.engine import Job
from kvbench.engine.holding import Holding


class Entry(NamedTuple):
    """A job's first admission: prompt tokens that were found, those of them below the device, and when all were on it."""

    cached: int
    below: int
    at: Nanos


class Sequence:
    """known: tokens whose content is known, the prompt and what was generated; computed: those whose KV exists, always fewer."""

    __slots__ = (
        "admitted", "computed", "end", "highest", "holding", "job", "known", "name", "number", "preempted", "prompt", "ready",
    )  # fmt: skip

    def __init__(self, job: Job, choice: int, holding: Holding, number: int) -> None:
        self.job = job
        self.name = (job.id, choice)
        self.number = number  # of arrival: who came first among equals
        self.holding = holding
        self.prompt = job.tokens
        self.end = self.prompt + job.max_tokens
        self.known = self.prompt
        self.computed = 0
        self.ready: Nanos = 0  # before that its KV is still being loaded
        self.highest = 0  # most tokens computed before a preemption: up to here they are computed again
        self.preempted = 0
        self.admitted = False

    @property
    def generated(self) -> int:
        return self.known - self.prompt


class Queue:
    """Waiting sequences, first the one with the least (order, arrival): one that lost its blocks comes back to its own place."""

    def __init__(self, order: Callable[[Sequence], int]) -> None:
        self._order = order
        self._waiting: list[Sequence] = []

    def _place(self, sequence: Sequence) -> tuple[int, int]:
        return self._order(sequence), sequence.number

    def push(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=self._place)

    def pop(self) -> Sequence:
        return self._waiting.pop(0)

    def remove(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)

    def __getitem__(self, at: int) -> Sequence:
        return self._waiting[at]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)


ORDERS: dict[str, Callable[[Sequence], int]] = {
    "fcfs": lambda sequence: 0,
    "priority": lambda sequence: sequence.job.priority,
    "shortest": lambda sequence: sequence.prompt,
}
"""Least first; equals in order of arrival."""


def _held(sequence: Sequence) -> int:
    return sum(len(table.blocks) + len(table.beside) - table.passed for table in sequence.holding.tables)


VICTIMS: dict[str, Callable[[Row[Sequence]], int]] = {
    "last": lambda running: len(running) - 1,
    "least_computed": lambda running: min(range(len(running)), key=lambda at: (running[at].computed, -at)),
    "most_blocks": lambda running: max(range(len(running)), key=lambda at: (_held(running[at]), at)),
}
"""Who is preempted of the running sequences that this step has not scheduled yet, in order of admission; latest among equals."""
