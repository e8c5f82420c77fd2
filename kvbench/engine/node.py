"""One replica inside a cluster: its engine, the jobs the cluster sent it, and what a router may ask of it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from kvbench.core import Nanos, Seconds, reply_key
from kvbench.engine import BlockInfo, Done, Job, Span, Step
from kvbench.engine.batch import ENDLESS
from kvbench.engine.cache import Cache
from kvbench.engine.engine import Engine
from kvbench.engine.fault import Edge
from kvbench.engine.holding import Holding
from kvbench.engine.store import Line

Role = Literal["mixed", "prefill", "decode"]
Stage = Literal["entry", "decode"]
Source = Literal["gpu", "store"]
"""Where content comes from: another node's device, or the store."""


@dataclass(slots=True, eq=False)
class Task:
    """A live job of the cluster. `node` is None while it waits for one; `running`: the node's engine has it.

    Until then its KV is on its way, or the node is down and that has not been noticed.
    """

    job: Job
    holding: Holding  # its keys: prompt and first answer
    stage: Stage = "entry"
    node: "Node | None" = None
    running: bool = False
    source: "Node | None" = None  # the node that has the prompt's KV, before it moves on
    losses: int = 0  # of that node when the KV was computed
    begun: tuple[int, ...] = ()  # answer tokens of each choice from nodes it has left; () before the first
    first: Done | None = None  # of the node that gave its first token, once it has left it: what its first admission found
    preempted: int = 0  # on nodes it has left
    growth: int = 0  # answer tokens that are expected of it still, as its router expected them
    ahead: int = 0  # tokens to compute before its next one, by which it counts in its node's `backlog`

    @property
    def got(self) -> int:
        """Answer tokens that the choice furthest ahead had from nodes it has left."""
        return max(self.begun, default=0)

    def progress(self) -> Done:
        """The job so far, over all nodes it was on."""
        if self.node is None or not self.running:
            return self.over("")
        done = self.node.engine.progress(self.job.id)
        return replace(self.told(done), preempted=done.preempted + self.preempted)

    def told(self, done: Done) -> Done:
        """What a node says of its part, with the first admission's findings."""
        first = self.first or done
        return replace(done, cached=first.cached, below=first.below, begun=first.begun)

    def over(self, failed: str) -> Done:
        """The job where no node has it."""
        return self.told(Done(self.job.id, self.job.tokens, sum(self.begun), 0, self.preempted, failed))


@dataclass(slots=True, eq=False)
class Node:
    """`build` makes its engine, again after a loss. `out` and `into` are its lines to other nodes.

    `up`: it works; `known`: the cluster believes so. backlog and growth: prompt tokens that its tasks have to compute before
    their first token here, and answer tokens that are expected of them still.
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
    backlog: int = 0
    growth: int = 0
    sequences: int = 0
    taken: int = 0  # tasks so far
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
    def token_bytes(self) -> float:
        """Bytes of a token's KV as it is stored, each value once however many devices keep it."""
        model, count = self.engine.model, self.engine.hardware.count
        stored = sum(group.bytes / group.block for group in self.cache.groups)
        return model.kv_token_bytes() * stored / model.kv_token_bytes(count)

    @property
    def held(self) -> float:
        """KV memory in use by live requests (and faults), in tokens."""
        return self.cache.share("referenced") * self.tokens

    @property
    def committed(self) -> float:
        """KV memory, in tokens, that live requests hold or are expected to need; shared content counts once."""
        return self.held + self.backlog + self.growth

    @property
    def empty(self) -> int:
        """KV memory without content, in tokens: the fullest pool's."""
        return min(pool.empty * pool.tokens for pool in self.cache.pools)

    @property
    def most_sequences(self) -> int:
        return self.engine.profile.max_num_seqs

    def has_room(self, tokens: int) -> bool:
        """Whether KV of `tokens` tokens that comes from elsewhere finds room beside what is on its way already."""
        coming = sum(task.job.tokens for task in self.tasks.values() if not task.running)
        return not self.tasks or self.held + coming + tokens <= self.tokens

    def found(self, task: Task) -> int:
        """Tokens of the job's prompt that are resident here, on the device or below. 0 on a node that has been lost."""
        return self.cache.find(task.holding, task.job.tokens - 1).tokens if self.up else 0

    def take(self, task: Task, expected: int, there: int) -> None:
        """The task is the node's from now on. `there`: tokens of its prompt that need not be computed here."""
        task.node, task.growth, task.ahead = self, expected, max(0, task.job.tokens + task.got - there)
        self.tasks[task.job.id] = task
        self.taken += 1
        self.growth += task.growth
        self.backlog += task.ahead
        self.sequences += task.job.n

    def drop(self, task: Task) -> None:
        """The task is no longer here: it ended, left, or was lost. The engine has been told, or is gone."""
        del self.tasks[task.job.id]
        self.growth -= task.growth
        self.backlog -= task.ahead
        self.sequences -= task.job.n
        task.node, task.running, task.growth, task.ahead = None, False, 0, 0

    def heard(self, span: Span) -> None:
        """Tasks that received tokens here have nothing queued before them, and so many fewer to come."""
        if self.backlog or self.growth:
            for job_id, _ in span.tokens:
                task = self.tasks[job_id]
                grown = min(task.growth, len(span.times))
                self.backlog -= task.ahead
                self.growth -= grown
                task.ahead, task.growth = 0, task.growth - grown

    def refusals(self) -> list[Edge]:
        """What its engine tells of faults and the cluster does not know by itself. Taken away from it."""
        told = [edge for edge in self.engine.passed if edge.edge == "refusal"]
        self.engine.passed.clear()
        return told

    def lose(self, now: Nanos) -> None:
        """Everything on the node is gone: its cache, and what its jobs had computed. The answers so far are not. For the tape it
        is a reset."""
        self.losses += 1
        for task in self.tasks.values():
            if task.running:
                begun, done = self.engine.begun(task.job.id), self.engine.progress(task.job.id)
                task.begun = begun if any(begun) else ()
                task.first = done if any(begun) and task.first is None else task.first
                task.preempted += done.preempted
                task.running = False
        self.cache.now = max(self.cache.now, now)
        for sequence in self.engine.batch.running:
            self.cache.release(sequence.holding, sequence.computed)
        for pool in self.cache.pools:
            pool.lose()
        if self.cache.tape is not None:
            self.cache.tape.note("reset", None)
        self.engine.close()  # its real files are the next engine's
        self.up = False

    def come_back(self, now: Seconds) -> None:
        """A fresh engine, empty."""
        self.engine = self.build()
        self.engine.advance(now)
        self.engine.passed.clear()  # what struck before was counted on the engine that it struck
        self.engine.harm.tally.clear()
        self.up = self.known = True

    def check(self) -> None:
        """Assert that tasks, counts and engine agree, and the engine's invariants. Slow: for tests."""
        tasks = self.tasks.values()
        assert all(task.node is self for task in tasks), "a task of another node"
        assert self.growth == sum(task.growth for task in tasks), "growth is miscounted"
        assert self.backlog == sum(task.ahead for task in tasks), "backlog is miscounted"
        assert self.sequences == sum(task.job.n for task in tasks), "sequences are miscounted"
        if self.up:
            self.engine.check()
            assert all(self.engine.progress(task.job.id) for task in tasks if task.running), "the engine lacks a task"


def keys_of(cache: Cache, job: Job) -> Holding:
    """The keys of the job's prompt and of its first answer, with no blocks. Good on every node: they have equal groups."""
    return cache.open((*job.segments, (reply_key(job.id), ENDLESS)), job.id, job.salt)


def adopt(cache: Cache, holding: Holding, tokens: int, now: Nanos, source: Source) -> int:
    """Content that came from another node's device or the store is resident from now on, unreferenced, as far as there is room:
    full blocks of the first `tokens` tokens. What nobody references is evicted for it, as for an allocation. Returns the blocks
    that came in."""
    came = 0
    cache.now = max(cache.now, now)
    for number, (group, table) in enumerate(zip(cache.groups, holding.tables, strict=True)):
        pool, full = group.pool, tokens // group.pool.tokens
        keys = table.chain.upto(full)
        missing = [at for at in range(full) if keys[at] not in pool.index][: pool.free]
        blocks = pool.allocate(len(missing))
        for block, at in zip(blocks, missing, strict=True):
            key, parent = keys[at], table.chain.parent(at)
            pool.publish(block, key, parent, at)
            if cache.tape is not None:
                cache.tape.note("migrate" if source == "gpu" else "restore", key, pool.group, holding.job, block, source)
            if cache.below is not None:
                cache.below.stored(number, key, BlockInfo(parent, at, pool.tokens), cache.now)
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
