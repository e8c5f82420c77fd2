"""Which node of a cluster serves a job: the contract, and the routers by the name that a scenario gives them.

A router sees nodes as a front end does: what it sent them and what they report. What it expects of a job's answer counts in the
node's `growth` and `committed` until those tokens have come.
"""

import bisect
import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field

from kvbench.core import Seconds
from kvbench.engine import Job, Step
from kvbench.units import Share

if TYPE_CHECKING:
    from kvbench.engine.node import Node, Task


class Router(Protocol):
    """Asked once per job and stage; again for a job that had to wait, whenever one ends."""

    def choose(self, task: "Task", nodes: "Sequence[Node]") -> "Node | None":
        """The node for `task`, one of `nodes` (at least one, by number, all believed to be up). None: it waits in the cluster."""

    def expected(self, job: Job) -> int:
        """Answer tokens expected of the job, over all its choices; 0 where nothing is."""

    def ended(self, job: Job, tokens: int) -> None:
        """A job received its last token: `tokens` of them per choice."""


class Routing(BaseModel):
    """A router's settings; `arm` gives the router of one run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @abstractmethod
    def arm(self) -> Router: ...


class _Blind:
    """Expects nothing, learns nothing."""

    def expected(self, job: Job) -> int:
        return 0

    def ended(self, job: Job, tokens: int) -> None:
        return None


class RoundRobin(Routing):
    """Each node in turn, whatever it holds. A node that is down loses its turn."""

    def arm(self) -> Router:
        return _Turns()


class _Turns(_Blind):
    def __init__(self) -> None:
        self._next = 0

    def choose(self, task: "Task", nodes: "Sequence[Node]") -> "Node":
        chosen = next((node for node in nodes if node.number >= self._next), nodes[0])
        self._next = chosen.number + 1
        return chosen


class LeastLoaded(Routing):
    """The node with the fewest live requests, as a proxy's least_conn; of several the first."""

    def arm(self) -> Router:
        return _Fewest()


class _Fewest(_Blind):
    def choose(self, task: "Task", nodes: "Sequence[Node]") -> "Node":
        return min(nodes, key=lambda node: len(node.tasks))


class PrefixAffine(Routing):
    """Dynamo's cost: `weight` x prompt tokens to compute + tokens of live requests. The cheapest;
    of equals the node that had fewest so far."""

    weight: Annotated[float, Field(ge=0, le=1000)] = Field(1.0, description="of a prompt token that must be computed")

    def arm(self) -> Router:
        return _Affine(self.weight)


class _Affine(_Blind):
    def __init__(self, weight: float) -> None:
        self.weight = weight

    def choose(self, task: "Task", nodes: "Sequence[Node]") -> "Node":
        def cost(node: "Node") -> tuple[float, int]:
            return self.weight * (task.job.tokens - node.found(task)) + node.committed, node.taken

        return min(nodes, key=cost)


class ConsistentHash(Routing):
    """By the content a prompt begins with, on a ring of hashes: when a node goes, only its own keys move."""

    points: Annotated[int, Field(ge=1, le=10_000)] = Field(128, description="places of each node on the ring")

    def arm(self) -> Router:
        return _Ring(self.points)


class _Ring(_Blind):
    def __init__(self, points: int) -> None:
        self.points = points
        self._ring: list[tuple[int, int]] = []  # (place, node), in order
        self._on: set[int] = set()

    def choose(self, task: "Task", nodes: "Sequence[Node]") -> "Node":
        for node in nodes:
            if node.number not in self._on:
                self._on.add(node.number)
                self._ring += [(_place("node", node.number, point), node.number) for point in range(self.points)]
                self._ring.sort()
        here = {node.number: node for node in nodes}
        at = bisect.bisect(self._ring, (_place("key", task.job.salt, task.job.segments[0][0]), 0))
        for step in range(len(self._ring)):
            number = self._ring[(at + step) % len(self._ring)][1]
            if number in here:
                return here[number]
        raise AssertionError("every node given is on the ring")


def _place(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


class LoadAware(Routing):
    """The node where the request is predicted to end first, of those whose memory it will not push over the threshold; where
    there is none it waits in the cluster, first come first served."""

    threshold: Annotated[Share, Field(gt=0, le=1)] = Field(
        0.9, description="of a node's KV memory: what live requests hold and are expected to need stays below"
    )
    prior: Annotated[int, Field(ge=1, le=10**6)] = Field(256, description="answer tokens expected before any answer has ended")

    def arm(self) -> Router:
        return _Load(self)


class _Load:
    """Predicts a job's time on a node: the prefill queued there and its own, then its answer at the pace of the batch joined."""

    WEIGHT = 8  # answers that the prior counts for

    def __init__(self, settings: LoadAware) -> None:
        self.threshold, self.prior = settings.threshold, settings.prior
        self._answers: dict[str, tuple[int, int]] = {}  # class -> answers ended, their tokens

    def answer(self, job: Job) -> float:
        """The running mean of the class's answers, the prior counted in. A node holds the sum over many: the mean adds up."""
        count, tokens = self._answers.get(job.cls, (0, 0))
        return (self.WEIGHT * self.prior + tokens) / (self.WEIGHT + count)

    def expected(self, job: Job) -> int:
        return job.n * round(self.answer(job))

    def ended(self, job: Job, tokens: int) -> None:
        count, total = self._answers.get(job.cls, (0, 0))
        self._answers[job.cls] = count + 1, total + tokens

    def choose(self, task: "Task", nodes: "Sequence[Node]") -> "Node | None":
        found = {node.number: node.found(task) for node in nodes}
        total = task.job.tokens + task.got + self.expected(task.job)
        open_ = [node for node in nodes if not node.tasks or self._has_room(node, total - found[node.number], task.job.n)]
        return min(open_, key=lambda node: (self._seconds(node, task, found[node.number], total), node.taken)) if open_ else None

    def _has_room(self, node: "Node", need: int, choices: int) -> bool:
        return node.committed + need <= self.threshold * node.tokens and node.sequences + choices <= node.most_sequences

    def _seconds(self, node: "Node", task: "Task", found: int, total: int) -> Seconds:
        job, decodes = task.job, node.sequences + task.job.n
        prefill = (node.backlog + max(0, job.tokens + task.got - found)) / node.prefill_rate
        step = node.engine.cost.seconds(Step((), decodes, round(node.committed) + total, decodes))
        return prefill + step * max(1.0, self.answer(job) - task.got)


ROUTERS: dict[str, type[Routing]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_affine": PrefixAffine,
    "consistent_hash": ConsistentHash,
    "load_aware": LoadAware,
}
