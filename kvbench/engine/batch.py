"""Continuous batching in vLLM's order: running sequences first, chunked prefill under a token budget, then the queue.

When blocks run out a sequence is preempted (profile.victim; vLLM's is the one admitted last): it loses all its blocks, goes back
to its place in the queue and computes everything again (what is still resident of it counts as found). Nothing is admitted in a
step that preempted. One that has been preempted `max_preemptions` times is killed instead, and its job fails.

`prefill: whole` never cuts a prompt (what a sequence lost to a preemption is computed like one): it waits until all that is left
of it to compute fits the rest of a step's budget, beside whatever decodes. One that is longer than a whole budget has a step
alone: it goes first, and the running sequences wait for that step. What a prompt found in a tier below is loaded first; its rest
is then computed in its turn even where that exceeds the step's budget, which is then used up.

`preallocate` reserves, with the blocks of admission, those of the predicted answer (predict.py). What an answer needs beyond
them is taken on demand.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Protocol

from kvbench.core import Nanos, reply_key
from kvbench.engine import Job
from kvbench.engine.cache import Cache
from kvbench.engine.holding import Found
from kvbench.engine.predict import Lengths
from kvbench.engine.sequence import ORDERS, VICTIMS, Entry, Queue, Sequence
from kvbench.profile import EngineProfile

ENDLESS = 1 << 62  # tokens of a reply's content: as many as are asked for


@dataclass(slots=True)
class Counters:
    """Running totals, in tokens unless said otherwise."""

    query: int = 0  # prompt tokens looked up, once per job at its first admission
    hit: int = 0  # of those, found
    below: int = 0  # of the found, in a tier below the device
    recompute: int = 0  # computed again because of a preemption
    computed: int = 0
    preemptions: int = 0  # sequences
    admitted: int = 0  # jobs that were not turned away for the time being
    oom: int = 0  # of those, failed: they can never fit, or lost their blocks once too often


@dataclass(slots=True)
class Plan:
    """What one step does."""

    chunks: list[tuple[Sequence, int]] = field(default_factory=list)  # prefill: (sequence, new tokens)
    decodes: list[Sequence] = field(default_factory=list)  # one token each
    preempted: int = 0  # or killed
    repeats: bool = False  # the next step is the same until a sequence ends, blocks run out or something arrives
    ready: Nanos | None = None  # when the first of the sequences that are still being loaded can take part

    @property
    def work(self) -> bool:
        return bool(self.chunks or self.decodes)


class Condition(Protocol):
    """What a fault asks of a sequence beside blocks."""

    def admit(self, sequence: Sequence) -> bool:
        """Whether it may enter, its blocks being there. It may be asked again, and given back by `release` without having
        entered."""

    def release(self, sequence: Sequence, ended: bool) -> None:
        """It is about to give back its blocks: it `ended` or was cancelled, else it was preempted."""


class Batch:
    """The running and waiting sequences over one KV memory."""

    def __init__(self, cache: Cache, profile: EngineProfile) -> None:
        self.cache, self.profile = cache, profile
        self.running: list[Sequence] = []  # in order of admission
        self.waiting = Queue(ORDERS[profile.order])
        self.counters = Counters()
        self.entered: dict[int, Entry] = {}  # by job id: its first admission
        self.conditions: list[Condition] = []
        self.killed: list[Sequence] = []  # for want of blocks; they hold none. Whoever reads them takes them away
        self._victim = VICTIMS[profile.victim]
        self._whole = profile.prefill == "whole"
        self._lengths = Lengths(profile.preallocate) if profile.preallocate is not None else None
        self._arrivals = 0

    def arrive(self, job: Job, choice: int) -> Sequence:
        """Queue one answer to `job`."""
        reply = reply_key(job.id) if choice == 0 else hash((reply_key(job.id), choice))
        holding = self.cache.open((*job.segments, (reply, ENDLESS)), job.id, job.salt)
        sequence = Sequence(job, choice, holding, self._arrivals)
        if job.begun:  # what it finds of its own prompt came from another node: not a hit rate
            sequence.known += job.begun[choice]
            sequence.admitted = True
        self._arrivals += 1
        self.waiting.push(sequence)
        return sequence

    def plan(self) -> Plan:
        """Schedule the next step, take its blocks and publish those it fills: later admissions of the same step hit them."""
        plan = Plan()
        budget = self.profile.max_num_batched_tokens
        if self._whole and self._alone(plan, budget):
            return plan
        at = 0
        while at < len(self.running) and budget:
            sequence = self.running[at]
            if sequence.ready > self.cache.now:
                self._later(plan, sequence)
                at += 1
                continue
            tokens = sequence.known if self._whole else min(sequence.known, sequence.computed + budget)
            if tokens >= sequence.holding.edge and not self._room(sequence, tokens, at, plan):
                break
            budget = max(0, budget - (tokens - sequence.computed))
            self._schedule(plan, sequence, tokens)
            at += 1
        whole = at == len(self.running) and not plan.preempted
        blocked = self._admit(plan, budget) if whole else False
        plan.repeats = whole and not plan.chunks and (blocked or not self.waiting)
        for sequence in islice(self.waiting, self.cache.below.prefetch if self.cache.below is not None else 0):
            self.cache.ahead(sequence.holding, sequence.known - 1)
        return plan

    def _later(self, plan: Plan, sequence: Sequence) -> None:
        plan.ready = sequence.ready if plan.ready is None else min(plan.ready, sequence.ready)

    def _schedule(self, plan: Plan, sequence: Sequence, tokens: int) -> None:
        """The step computes the sequence up to `tokens` tokens."""
        if sequence.computed + 1 == sequence.known > sequence.prompt:
            plan.decodes.append(sequence)
        else:
            plan.chunks.append((sequence, tokens - sequence.computed))

    def _room(self, sequence: Sequence, tokens: int, at: int, plan: Plan) -> bool:
        """Blocks for `tokens` tokens of running[at], preempting among those not scheduled yet. False when it had to go itself."""
        while self.cache.lacks(sequence.holding, tokens, sequence.computed):
            victim = self.running.pop(at + self._victim(self.running[at:]))
            self._oust(victim)
            plan.preempted += 1
            if victim is sequence:
                return False
        self.cache.grow(sequence.holding, tokens, sequence.computed)
        return True

    def _admit(self, plan: Plan, budget: int) -> bool:
        """Take from the queue what fits. True when the head of the queue has to wait for blocks or for a place."""
        while self.waiting and budget:
            taken = self._admit_first(plan, budget)
            if taken is None:
                return True
            budget -= taken
        return False

    def _admit_first(self, plan: Plan, budget: int) -> int | None:
        """Let the head of the queue in. Returns the tokens of it that the step computes, None when it has to wait."""
        if len(self.running) >= self.profile.max_num_seqs:
            return None
        sequence = self.waiting[0]
        # The last known token is always computed, so that there is something to sample from: a hit never covers it.
        most = sequence.known - 1
        found = self.cache.find(sequence.holding, most)
        new = min(sequence.known - found.tokens, budget)
        if self._whole and found.tokens + new < sequence.known:
            return None
        target = sequence.known if self.profile.admission == "prompt" else found.tokens + new
        reserved = self._reserved(sequence)
        fits = self.cache.fits(sequence.holding, found, max(target, reserved))
        if not fits or not all(condition.admit(sequence) for condition in self.conditions):
            return None
        self.waiting.pop()
        self._enter(sequence, found, most)
        self.cache.reserve(sequence.holding, reserved)
        self.running.append(sequence)
        if sequence.ready > self.cache.now:
            self._later(plan, sequence)
            return 0
        self.cache.grow(sequence.holding, found.tokens + new, found.tokens)
        self._schedule(plan, sequence, found.tokens + new)
        return new

    def _alone(self, plan: Plan, budget: int) -> bool:
        """Where the head of the queue has more to compute than `budget`, a whole step's: whether this step is its."""
        if not self.waiting or self.waiting[0].known <= budget:
            return False
        head = self.waiting[0]
        if head.known - self.cache.find(head.holding, head.known - 1).tokens > budget:
            self._admit_first(plan, head.known)
        return plan.work

    def _reserved(self, sequence: Sequence) -> int:
        """Tokens to hold blocks for from admission on, whatever of them is known yet. 0: on demand."""
        if self._lengths is None:
            return 0
        return sequence.prompt + self._lengths.predict(sequence.job.cls, sequence.job.max_tokens) - 1  # the last is never cached

    def _enter(self, sequence: Sequence, found: Found, most: int) -> None:
        """Reference what was found. Lookups are counted once per job: later admissions of it would flatter the hit rate."""
        first = not sequence.admitted and sequence.name[1] == 0  # other choices would find the first one's blocks: not a hit rate
        sequence.ready = self.cache.enter(sequence.holding, found, most, again=not first)
        sequence.computed = found.tokens
        sequence.admitted = True
        if first:
            self.counters.query += sequence.prompt
            self.counters.hit += found.tokens
            self.counters.below += found.below
            self.entered[sequence.job.id] = Entry(found.tokens, found.below, max(self.cache.now, sequence.ready))
            self.cache.count(found, sequence.prompt)

    def preempt(self) -> None:
        """Every running sequence goes back to the queue."""
        while self.running:
            self._preempt(self.running.pop())

    def _release(self, sequence: Sequence, ended: bool) -> None:
        for condition in self.conditions:
            condition.release(sequence, ended)
        self.cache.release(sequence.holding, sequence.computed)

    def _oust(self, sequence: Sequence) -> None:
        """Its blocks are wanted: it is preempted, or killed where it has been preempted as often as the profile lets it be."""
        most = self.profile.max_preemptions
        if most is None or sequence.preempted < most:
            self._preempt(sequence)
            return
        self.cache.ended(sequence.holding)
        self._release(sequence, ended=True)
        self.killed.append(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self.cache.spill(sequence.holding, sequence.computed)
        self._release(sequence, ended=False)
        sequence.highest = max(sequence.highest, sequence.computed)
        sequence.computed = 0
        sequence.preempted += 1
        self.counters.preemptions += 1
        self.waiting.push(sequence)

    def prefilled(self, sequence: Sequence, tokens: int) -> None:
        """A chunk of `tokens` tokens of the sequence has been computed; the last one also gives the next token."""
        after = sequence.computed + tokens
        if sequence.computed < sequence.highest:
            self.counters.recompute += min(after, sequence.highest) - sequence.computed
        sequence.computed = after
        self.counters.computed += tokens
        if after == sequence.known:
            sequence.known += 1

    def decoded(self, sequences: list[Sequence], tokens: int, more: int, begin: Callable[[int], Nanos]) -> None:
        """`tokens` decode steps of each have been computed; blocks are taken for `more` (0 or 1) steps beyond them. begin(k):
        when the k-th of these steps began, for the tape."""
        for sequence in sequences:
            if self.cache.tape is not None:
                self.cache.when = partial(_when, begin, sequence.computed)
            sequence.computed = after = sequence.computed + tokens
            sequence.known += tokens
            if after + more >= sequence.holding.edge:
                self.cache.grow(sequence.holding, after + more, after + more - 1)
        self.cache.when = None
        self.counters.computed += tokens * len(sequences)

    def leave(self, sequence: Sequence) -> None:
        """The sequence ended or was cancelled: its references go, what it published stays resident."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        if self._lengths is not None and sequence.known == sequence.end:
            self._lengths.ended(sequence.job.cls, sequence.generated)
        self.cache.ended(sequence.holding)
        self._release(sequence, ended=True)

    def steps_in_room(self, sequences: Iterable[Sequence], most: int) -> int:
        """How many decode steps, at most `most`, all can take together before blocks run out. At least 1: it is planned."""
        return self.cache.steps_in_room([(s.holding, s.computed) for s in sequences], most)

    def check(self) -> None:
        """Assert the invariants of KV memory and batch. Slow: for tests."""
        self.cache.check(s.holding for s in self.running)
        for s in self.running:
            assert s.computed < s.known or s.known == 0, "everything computed, nothing to sample from"
            for group, table in zip(self.cache.groups, s.holding.tables, strict=True):
                assert group.state or len(table.blocks) * group.block >= s.computed, "computed tokens without blocks"
        for s in self.waiting:
            assert not any(table.blocks for table in s.holding.tables), "a waiting sequence holds blocks"
            assert not s.computed, "a waiting sequence has computed tokens"


def _when(begin: Callable[[int], Nanos], computed: int, token: int) -> Nanos:
    """When the step that computes the `token`-th token of a sequence began, if `computed` were there before."""
    return begin(token - computed)
