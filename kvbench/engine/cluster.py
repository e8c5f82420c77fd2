"""A cluster behind one door: jobs in, spans out, as one engine. Nodes know nothing of each other; the cluster routes, moves KV,
notices losses and keeps what content is worth keeping.

Time: each node's engine is advanced by itself. Where something waits for an end elsewhere (a job that no node had room for, a
prompt whose KV moves on), the nodes concerned are advanced from one of their ends to the next, so that what follows follows at
its nanosecond, however the cluster is driven.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvbench.core import Nanos, Seconds
from kvbench.engine import Done, Job, Span
from kvbench.engine.disaggregate import Coming, Mover
from kvbench.engine.faults import Edge, Fault, NodeLoss, edges
from kvbench.engine.heat import Heat
from kvbench.engine.node import Node, Stage, Task, adopt, keys_of
from kvbench.engine.router import Router
from kvbench.engine.state import Counts, Manners, facts, gauges, gauges_by_node
from kvbench.engine.store import Line, Store

NEVER: Nanos = 1 << 62


class Cluster:
    """`routers` choose where a job begins ("entry") and where it goes on ("decode") from a node that only prefills or is lost.
    `line` carries copies of warm content between nodes, content unused for `cold` goes to `store`; None: not done."""

    def __init__(
        self, nodes: Sequence[Node], routers: dict[Stage, Router], *, store: Store | None = None, line: Line | None = None,
        cold: Seconds = 60.0, manners: Manners = Manners(), faults: Iterable[Fault] = (),
    ) -> None:  # fmt: skip
        self.nodes, self.routers, self.store, self.manners = list(nodes), routers, store, manners
        self.faults = tuple(faults)
        self.counts = Counts()
        self.mover = Mover(store)
        self.heat = Heat(self.nodes, store, line, round(cold * 1e9), self._after)
        self.passed: list[Edge] = []
        self._edges = edges(self.faults)
        self._tasks: dict[int, Task] = {}
        self._held: dict[Stage, deque[Task]] = {"decode": deque(), "entry": deque()}
        self._failed: list[Span] = []
        self._events: list[tuple[Nanos, int, Callable[[Nanos], None]]] = []  # a heap: time, order of planning, what
        self._planned = 0
        self._now: Nanos = 0
        for edge in self._edges:
            if isinstance(edge.fault, NodeLoss):
                self._after(
                    edge.at, partial(self._lose if edge.edge == "begin" else self._come_back, self.nodes[edge.fault.node])
                )

    def _after(self, at: Nanos, what: Callable[[Nanos], None]) -> None:
        heapq.heappush(self._events, (at, self._planned, what))
        self._planned += 1

    def submit(self, job: Job, now: Seconds) -> str | None:
        """As an engine's. "refused" also where no node is known to be up; "full" also where `refuse_above` jobs wait already.

        A job that only some nodes can hold goes to those. ValueError for an id that is live.
        """
        if job.id in self._tasks:
            raise ValueError(f"job {job.id} is already here")
        at = round(now * 1e9)
        self.heat.look(at)
        refused = self._unfit(job)
        if refused is None:
            task = Task(job, keys_of(self.nodes[0].cache, job))
            refused = self._enter(task, at)
            if refused is None:
                self._tasks[job.id] = task
        self.counts.submitted(refused)
        return refused

    def _unfit(self, job: Job) -> str | None:
        """Why no node can ever serve the job."""
        reasons = [node.engine.unfit(job) for node in self.nodes if node.role != "prefill"]
        return None if None in reasons else min(filter(None, reasons), key=("kv_too_small", "context_too_long", "empty").index)

    def _enter(self, task: Task, now: Nanos) -> str | None:
        """Send a new job to a node, or have it wait its turn."""
        nodes = self._candidates(task)
        if not nodes:
            return "refused"
        chosen = None if self._held["entry"] else self.routers["entry"].choose(task, nodes)
        if chosen is not None:
            return self._put(task, chosen, now)
        if self.manners.refuse_above is not None and len(self._held["entry"]) >= self.manners.refuse_above:
            return "full"
        self._held["entry"].append(task)
        return None

    def _candidates(self, task: Task) -> list[Node]:
        """The nodes that may be given the task, by number."""
        wrong = "decode" if task.stage == "entry" else "prefill"
        fit = [n for n in self.nodes if n.known and n.role != wrong and n.engine.unfit(self._work(task, n)) is None]
        return fit if task.stage == "entry" or task.source is None else [n for n in fit if n.has_room(task.job.tokens)]

    def _work(self, task: Task, node: Node) -> Job:
        """The part of the job that the node does: a prefill node gives each answer's first token."""
        job = replace(task.job, begun=task.begun) if task.begun else task.job
        return replace(job, max_tokens=1) if node.role == "prefill" else job

    def _put(self, task: Task, node: Node, now: Nanos) -> str | None:
        """Give the task to the node, now or when its KV has arrived. None, or why its engine does not serve it."""
        source, task.source = task.source, None
        expected = 0 if node.role == "prefill" else self.routers[task.stage].expected(task.job)
        coming: Coming | None
        if source is not None and source.up and source.losses == task.losses:
            coming = self.mover.handover(task, source, node, now)
        else:
            coming = self.mover.fetch(task, node, now)
        node.take(task, expected, coming.tokens if coming else node.found(task))
        if coming is None:
            return self._start(task, node, now)
        self._after(coming.at, partial(self._arrived, task, node, node.losses, coming))
        return None

    def _start(self, task: Task, node: Node, now: Nanos) -> str | None:
        if not node.up:
            return None  # nobody answers: it stays with the node until that is noticed
        refused = node.engine.submit(self._work(task, node), now / 1e9)
        if refused is not None:
            node.drop(task)
        task.running = refused is None
        return refused

    def _arrived(self, task: Task, node: Node, losses: int, came: Coming, now: Nanos) -> None:
        """The KV of the prompt's first tokens is there; nothing where task or node no longer are."""
        if node.losses != losses or task.node is not node:
            return
        adopt(node.cache, task.holding, came.tokens, now, came.source)
        refused = self._start(task, node, now)
        if refused is not None:
            self._fail(task, refused, now)

    def cancel(self, job_id: int, now: Seconds) -> None:
        """As an engine's. After advance(now)."""
        task, at = self._tasks.pop(job_id), round(now * 1e9)
        if task.node is None:
            self._held[task.stage].remove(task)
        else:
            if task.running:
                task.node.engine.cancel(job_id, now)
            task.node.drop(task)
        self.counts.cancelled += 1
        self._settle(at)

    def advance(self, until: Seconds) -> list[Span]:
        """As an engine's: the spans of all nodes, in order of their ends."""
        limit = round(until * 1e9)
        spans: list[Span] = []
        while (at := self._next()) <= limit:
            spans += self._run(at / 1e9, at)
            while self._events and self._events[0][0] <= at:
                heapq.heappop(self._events)[2](at)
            self._settle(at)
        spans += self._run(until, limit)
        while self._edges and self._edges[0].at <= limit:
            self.passed.append(self._edges.popleft())
        if self._failed:
            spans = sorted(spans + self._failed, key=lambda span: span.times[-1])
            self._failed = []
        return spans

    def _next(self) -> Nanos:
        """When the next thing happens that changes more than one node; NEVER where nothing does."""
        event = self._events[0][0] if self._events else NEVER
        ends = [node.engine.wake() for node in self.nodes if node.up and node.tasks and (self._waits or node.role == "prefill")]
        end = min(ends, default=math.inf)
        return event if math.isinf(end) else min(event, max(round(end * 1e9), self._now + 1))

    @property
    def _waits(self) -> int:
        return len(self._held["entry"]) + len(self._held["decode"])

    def _run(self, until: Seconds, limit: Nanos) -> list[Span]:
        """Advance every node that works, with nothing between them to do before `limit`."""
        self._now = max(self._now, limit)
        found: list[tuple[Span, Node]] = []
        for node in self.nodes:
            if node.up:
                found += [(span, node) for span in node.engine.advance(until)]
                self.passed += node.refusals()
        if len(self.nodes) > 1:
            found.sort(key=lambda each: (each[0].times[-1], each[1].number))
        return [self._heard(span, node) for span, node in found]

    def _heard(self, span: Span, node: Node) -> Span:
        """A node's span as the cluster's: without the ends of jobs that go on elsewhere."""
        node.heard(span)
        if not span.done and not node.number:
            return span
        ended = [self._ended(node, done, span.times[-1]) for done in span.done]
        return replace(span, done=[done for done in ended if done is not None], node=node.number)

    def _ended(self, node: Node, done: Done, at: Nanos) -> Done | None:
        """A node has done its part of a job. Returns the job's end, None where it goes on."""
        task = node.tasks[done.id]
        node.drop(task)
        task.first = task.first or done
        task.preempted += done.preempted
        job, last = task.job, 1 if node.role == "prefill" else task.job.max_tokens
        self.heat.used(node, task.holding, job.tokens + last - 1, at)
        if last < job.max_tokens and not done.failed:
            task.stage, task.source, task.losses, task.begun = "decode", node, node.losses, (1,) * job.n
            self._held["decode"].append(task)
            return None
        del self._tasks[done.id]
        self.counts.ended(done.failed)
        for router in () if done.failed else {id(router): router for router in self.routers.values()}.values():
            router.ended(job, job.max_tokens)
        return replace(task.told(done), preempted=task.preempted)

    def _settle(self, now: Nanos) -> None:
        """Place what waits and now has a node, first come first served in each stage."""
        for stage, held in self._held.items():
            while held:
                nodes = self._candidates(held[0])
                chosen = self.routers[stage].choose(held[0], nodes) if nodes else None
                if chosen is None:
                    break
                task = held.popleft()
                refused = self._put(task, chosen, now)
                if refused is not None:
                    self._fail(task, refused, now)

    def _fail(self, task: Task, why: str, now: Nanos) -> None:
        """The job, which no node has any more, will not get its tokens."""
        del self._tasks[task.job.id]
        self.counts.ended(why)
        self._failed.append(Span(now, [now], [], [task.over(why)]))

    def _lose(self, node: Node, now: Nanos) -> None:
        self.counts.lost(node)
        node.lose(now)
        self.heat.forget(node)
        self._after(now + round(self.manners.detect * 1e9), partial(self._notice, node, node.losses))

    def _notice(self, node: Node, losses: int, now: Nanos) -> None:
        """Nobody answers for the node's jobs: they go on elsewhere, before others, or fail. Once."""
        if node.losses != losses or not node.known:
            return
        node.known = False
        tasks = list(node.tasks.values())
        for task in tasks:
            node.drop(task)
            if self.manners.on_loss == "fail":
                self._fail(task, "node_lost", now)
            else:
                task.stage = "decode" if any(task.begun) else "entry"
        if self.manners.on_loss == "retry":
            self.counts.retried += len(tasks)
            for task in reversed(tasks):
                self._held[task.stage].appendleft(task)

    def _come_back(self, node: Node, now: Nanos) -> None:
        self._notice(node, node.losses, now)  # at the latest now: connections to what it was are refused
        node.come_back(now / 1e9)

    def wake(self) -> Seconds:
        """As an engine's. The ends of transfers and what befalls nodes count while there are jobs."""
        if self._failed:
            return (self._now + 1) / 1e9
        if not self._tasks:
            return math.inf
        event = self._events[0][0] / 1e9 if self._events else math.inf
        return min([event, *(node.engine.wake() for node in self.nodes if node.up)])

    def tick(self) -> Seconds:
        """As an engine's."""
        return min([node.engine.tick() for node in self.nodes if node.up], default=math.inf)

    def progress(self, job_id: int) -> Done:
        """As an engine's."""
        return self._tasks[job_id].progress()

    def gauges(self) -> dict[str, float]:
        """The nodes' gauges together (state.py), and the cluster's own."""
        return gauges(self.nodes, self.counts, self._waits) | self.mover.totals() | self.heat.totals()

    def gauges_by_node(self) -> list[dict[str, float]]:
        """Each node's own gauges, by number; `up` is 0 or 1, and alone while the node is down."""
        return gauges_by_node(self.nodes)

    def facts(self) -> dict[str, Any]:
        """What it is, for a run's manifest: as the first node's, sums over nodes, and each node."""
        return facts(self.nodes) | {"faults": [fault.told() for fault in self.faults]}

    def reset(self, now: Seconds) -> bool:
        """Empty every prefix cache and the store. False, and nothing done, while blocks of any node are in use."""
        if any(pool.referenced for node in self.nodes if node.up for pool in node.cache.pools):
            return False
        for node in self.nodes:
            self.heat.forget(node)
            if node.up:
                node.engine.reset(now)
        if self.store is not None:
            self.store.clear()
        return True

    def close(self) -> None:
        """Let go of every node's real files."""
        for node in self.nodes:
            node.engine.close()

    def check(self) -> None:
        """Assert that every live job is in one place, and every node's invariants. Slow: for tests."""
        placed = [task for node in self.nodes for task in node.tasks.values()]
        waiting = [task for held in self._held.values() for task in held]
        assert sorted(map(id, [*placed, *waiting])) == sorted(map(id, self._tasks.values())), "a job is nowhere, or in two places"
        assert all(task.node is None for task in waiting), "a waiting job has a node"
        for node in self.nodes:
            node.check()
        if self.store is not None:
            self.store.check()
