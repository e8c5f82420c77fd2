"""One replica inside a cluster: its engine, the jobs the cluster sent it, and what a router may ask of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kvbench.core import Nanos, Seconds, reply_key
from kvbench.engine import Done, Job, Span, Step
from kvbench.engine.batch import ENDLESS
from kvbench.engine.cache import Cache, Holding
from kvbench.engine.engine import Engine
from kvbench.engine.store import Line

Role = Literal["mixed", "prefill", "decode"]


@dataclass(slots=True, eq=False)
class Task:
    """A live job of the cluster. `node` is None while it waits for one, or while its KV is on its way."""

    job: Job
    holding: Holding  # its keys: prompt and first answer
    stage: Literal["entry", "decode"] = "entry"
    node: "Node | None" = None
    begun: tuple[int, ...] = ()  # answer tokens of each choice from nodes it has left; () before the first
    cached: int | None = None  # prompt tokens found at its first admission, once it has left that node
    preempted: int = 0  # on nodes it has left
    expected: int = 0  # tokens by which it counts in its node's `committed`
    ahead: int = 0  # tokens to compute before its next one, by which it counts in its node's `backlog`

    @property
    def got(self) -> int:
        """Answer tokens that the choice furthest ahead had from nodes it has left."""
        return max(self.begun, default=0)


@dataclass(slots=True, eq=False)
class Node:
    """`build` makes its engine, again after a loss. `out` and `into` are its lines to other nodes.

    `up`: it works; `known`: the cluster believes so. committed and backlog: tokens that its tasks are expected to hold at their ends,
    and to compute before their first token here.
    """

    number: int
    build: Callable[[], Engine]
    role: Role
    out: Line
    into: Line
    engine: Engine = field(init=False)
    up: bool = True
    known: bool = True
    losses: int = 0
    tasks: dict[int, Task] = field(default_factory=dict)
    committed: int = 0
    backlog: int = 0
    sequences: int = 0
    prefill_rate: float = field(init=False)  # tokens/s of a full budget of one prompt

    def __post_init__(self) -> None:
        self.engine = self.build()
        budget = self.engine.profile.max_num_batched_tokens
        self.prefill_rate = budget / self.engine.cost.seconds(Step(((budget, 0),), samples=1))

    @property
    def cache(self) -> Cache:
        return self.engine.cache

    @property
    def tokens(self) -> int:
        """KV memory in tokens of one sequence."""
        return self.cache.usable_tokens()

    @property
    def held(self) -> float:
        """KV memory in use by live requests (and faults), in tokens."""
        return self.cache.share("referenced") * self.tokens

    @property
    def empty(self) -> float:
        """KV memory without content, in tokens: the poorest pool's."""
        return min(
            pool.usable - pool.referenced - sum(not refs for refs in map(pool.references, pool.index)) for pool in self.cache.pools
        ) * self.cache.groups[0].pool.tokens  # fmt: skip

    @property
    def most_sequences(self) -> int:
        return self.engine.profile.max_num_seqs

    def holds(self, job: Job) -> bool:
        """Whether the job fits when nothing else is there."""
        return job.tokens + job.max_tokens - 1 <= self.tokens

    def found(self, task: Task) -> int:
        """Tokens of the job's prompt that are resident here. 0 on a node that has been lost."""
        return self.cache.find(task.holding, task.job.tokens - 1).tokens if self.up else 0

    def take(self, task: Task, job: Job, expected: int, now: Seconds) -> str | None:
        """Give `job`, the task's work here, to the engine. None, or why it is not served."""
        ahead = max(0, task.job.tokens + task.got - self.found(task))
        refused = self.engine.submit(job, now) if self.up else None  # nobody answers: it waits until that is noticed
        if refused is not None:
            return refused
        task.node, task.expected, task.ahead = self, expected, ahead
        self.tasks[job.id] = task
        self.committed += expected
        self.backlog += ahead
        self.sequences += job.n
        return None

    def drop(self, task: Task) -> None:
        """The task is no longer here: it ended, left, or was lost. The engine has been told, or is gone."""
        del self.tasks[task.job.id]
        self.committed -= task.expected
        self.backlog -= task.ahead
        self.sequences -= task.job.n
        task.node, task.ahead = None, 0

    def heard(self, span: Span) -> None:
        """Tasks that received a token here have nothing queued before it any more."""
        if self.backlog:
            for job_id, _ in span.tokens:
                task = self.tasks[job_id]
                if task.ahead:
                    self.backlog -= task.ahead
                    task.ahead = 0

    def begun(self, task: Task) -> tuple[int, ...]:
        """Answer tokens of each choice so far."""
        return self.engine.begun(task.job.id) if self.up else task.begun

    def progress(self, task: Task) -> Done:
        return self.engine.progress(task.job.id)

    def lose(self) -> None:
        """Everything on the node is gone: its cache, and what its jobs had computed."""
        self.up = False
        self.losses += 1

    def come_back(self, now: Seconds) -> None:
        """A fresh engine, empty."""
        self.engine = self.build()
        self.engine.advance(now)
        self.up = self.known = True


def keys_of(cache: Cache, job: Job) -> Holding:
    """The keys of the job's prompt and of its first answer, with no blocks. Good on every node: they have equal groups."""
    return cache.open((*job.segments, (reply_key(job.id), ENDLESS)), job.id, job.salt)


def adopt(cache: Cache, holding: Holding, tokens: int, now: Nanos) -> int:
    """Content that came from elsewhere is resident from now on, unreferenced, as far as there is room: full blocks of the first
    `tokens` tokens. What nobody references is evicted for it, as for an allocation. Returns the blocks that came in."""
    came = 0
    cache.now = max(cache.now, now)
    for group, table in zip(cache.groups, holding.tables, strict=True):
        pool, full = group.pool, tokens // group.pool.tokens
        keys = table.chain.upto(full)
        missing = [at for at in range(full) if keys[at] not in pool.index][: pool.free]
        blocks = pool.allocate(len(missing))
        for block, at in zip(blocks, missing, strict=True):
            pool.publish(block, keys[at], table.chain.parent(at), at)
        pool.release(blocks)
        came += len(blocks)
    return came


def resident(cache: Cache, holding: Holding, tokens: int) -> int:
    """How many of the first `tokens` tokens the device holds, full blocks of every group."""
    held = tokens
    for group, table in zip(cache.groups, holding.tables, strict=True):
        full = held // group.pool.tokens
        held = min(held, group.pool.found(table.chain.upto(full), full) * group.pool.tokens)
    return held
