"""Continuous batching in vLLM's order: running sequences first, chunked prefill under a token budget, first come first served.

When blocks run out the sequence admitted last is preempted: it loses all its blocks, goes to the head of the queue and computes
everything again (what is still resident of it counts as found). Nothing is admitted in a step that preempted.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvbench.core import reply_key
from kvbench.engine import Job, Key
from kvbench.engine.pool import ROOT, Chain, Pool
from kvbench.profile import EngineProfile

ENDLESS = 1 << 62  # tokens of a reply's content: as many as are asked for


class Sequence:
    """One answer to one job while the engine works on it."""

    __slots__ = (
        "admitted", "blocks", "chain", "computed", "edge", "end", "highest", "job", "known", "name", "preempted", "prompt",
        "published",
    )  # fmt: skip

    def __init__(self, job: Job, choice: int, block: int) -> None:
        self.job = job
        self.name = (job.id, choice)
        self.prompt = job.tokens
        self.end = self.prompt + job.max_tokens
        reply = reply_key(job.id) if choice == 0 else hash((reply_key(job.id), choice))
        self.chain = Chain((*job.segments, (reply, ENDLESS)), block)
        self.known = self.prompt  # tokens whose content is known: the prompt and what was generated
        self.computed = 0  # tokens whose KV exists: always fewer than `known`
        self.blocks: list[int] = []
        self.published = 0  # leading blocks that are in the pool's index
        self.edge = 1  # the next number of tokens that takes a new block or fills one
        self.highest = 0  # most tokens computed before a preemption: up to here they are computed again
        self.preempted = 0
        self.admitted = False

    @property
    def generated(self) -> int:
        return self.known - self.prompt


@dataclass(slots=True)
class Counters:
    """Running totals, in tokens unless said otherwise."""

    query: int = 0  # prompt tokens looked up, once per job at its first admission
    hit: int = 0  # of those, found
    recompute: int = 0  # computed again because of a preemption
    computed: int = 0
    preemptions: int = 0  # sequences


@dataclass(slots=True)
class Plan:
    """What one step does."""

    chunks: list[tuple[Sequence, int]] = field(default_factory=list)  # prefill: (sequence, new tokens)
    decodes: list[Sequence] = field(default_factory=list)  # one token each
    preempted: int = 0
    repeats: bool = False  # the next step is the same until a sequence ends, blocks run out or something arrives

    @property
    def work(self) -> bool:
        return bool(self.chunks or self.decodes)


class Batch:
    """The running and waiting sequences over one pool."""

    def __init__(self, pool: Pool, profile: EngineProfile) -> None:
        self.pool, self.profile = pool, profile
        self.running: list[Sequence] = []  # in order of admission
        self.waiting: deque[Sequence] = deque()
        self.counters = Counters()
        self.cached: dict[int, int] = {}  # job id -> prompt tokens found at its first admission

    def plan(self) -> Plan:
        """Schedule the next step, take its blocks and publish those it fills: later admissions of the same step hit them."""
        plan = Plan()
        budget = self.profile.max_num_batched_tokens
        at = 0
        while at < len(self.running) and budget:
            sequence = self.running[at]
            tokens = min(sequence.known, sequence.computed + budget)
            if tokens >= sequence.edge and not self._room(sequence, tokens, plan):
                break
            budget -= tokens - sequence.computed
            self._schedule(plan, sequence, tokens)
            at += 1
        whole = at == len(self.running) and not plan.preempted
        blocked = self._admit(plan, budget) if whole else False
        plan.repeats = whole and not plan.chunks and (blocked or not self.waiting)
        return plan

    def _schedule(self, plan: Plan, sequence: Sequence, tokens: int) -> None:
        """The step computes the sequence up to `tokens` tokens."""
        if sequence.computed + 1 == sequence.known > sequence.prompt:
            plan.decodes.append(sequence)
        else:
            plan.chunks.append((sequence, tokens - sequence.computed))

    def _room(self, sequence: Sequence, tokens: int, plan: Plan) -> bool:
        """Blocks for `tokens` tokens, preempting from the end of the batch. False when the sequence itself had to go."""
        need = -(-tokens // self.pool.tokens) - len(sequence.blocks)
        while need > self.pool.free:
            victim = self.running.pop()
            self._preempt(victim)
            plan.preempted += 1
            if victim is sequence:
                return False
        self.grow(sequence, tokens)
        return True

    def grow(self, sequence: Sequence, tokens: int) -> None:
        """Allocate up to `tokens` tokens and publish every block they fill. The caller has checked that there is room."""
        block, blocks = self.pool.tokens, sequence.blocks
        need = -(-tokens // block) - len(blocks)
        if need > 0:
            blocks += self.pool.allocate(need)
        full = tokens // block
        if full > sequence.published:
            keys = sequence.chain.upto(full)
            for at in range(sequence.published, full):
                blocks[at] = self.pool.publish(blocks[at], keys[at], keys[at - 1] if at else ROOT, at)
            sequence.published = full
        edge = len(blocks) * block
        sequence.edge = edge if edge > tokens else tokens + 1

    def _admit(self, plan: Plan, budget: int) -> bool:
        """Take from the queue what fits. True when the head of the queue has to wait for blocks or for a place."""
        while self.waiting and budget:
            if len(self.running) >= self.profile.max_num_seqs:
                return True
            sequence = self.waiting[0]
            # The last known token is always computed, so that there is something to sample from: a hit never covers it.
            most = (sequence.known - 1) // self.pool.tokens
            keys = sequence.chain.upto(most)
            found = self.pool.found(keys, most)
            start = found * self.pool.tokens
            new = min(sequence.known - start, budget)
            target = sequence.known if self.profile.admission == "prompt" else start + new
            need = -(-target // self.pool.tokens) - found + self.pool.unreferenced(keys[:found])
            if need > self.pool.free:
                return True
            self.waiting.popleft()
            if found < most:
                self.pool.policy.miss(keys[found])
            self._enter(sequence, keys[:found])
            self.grow(sequence, start + new)
            self.running.append(sequence)
            budget -= new
            self._schedule(plan, sequence, start + new)
        return False

    def _enter(self, sequence: Sequence, found: list[Key]) -> None:
        """Reference what was found. Lookups are counted once per job: later admissions of it would flatter the hit rate."""
        sequence.blocks = self.pool.take(found)
        sequence.computed = len(found) * self.pool.tokens
        sequence.published = len(found)
        if not sequence.admitted and sequence.name[1] == 0:  # other choices would find the first one's blocks: not a hit rate
            self.counters.query += sequence.prompt
            self.counters.hit += sequence.computed
            self.cached[sequence.job.id] = sequence.computed
        sequence.admitted = True

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.highest = max(sequence.highest, sequence.computed)
        sequence.computed = 0
        sequence.preempted += 1
        self.counters.preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.published = 0
        sequence.edge = 1

    def prefilled(self, sequence: Sequence, tokens: int) -> None:
        """A chunk of `tokens` tokens of the sequence has been computed; the last one also gives the next token."""
        after = sequence.computed + tokens
        if sequence.computed < sequence.highest:
            self.counters.recompute += min(after, sequence.highest) - sequence.computed
        sequence.computed = after
        self.counters.computed += tokens
        if after == sequence.known:
            sequence.known += 1

    def decoded(self, sequences: list[Sequence], tokens: int, more: int) -> None:
        """`tokens` decode steps of each have been computed; blocks are taken for `more` (0 or 1) steps beyond them."""
        for sequence in sequences:
            sequence.computed = after = sequence.computed + tokens
            sequence.known += tokens
            if after + more >= sequence.edge:
                self.grow(sequence, after + more)
        self.counters.computed += tokens * len(sequences)

    def leave(self, sequence: Sequence) -> None:
        """The sequence ended or was cancelled: its references go, what it published stays resident."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._release(sequence)

    def steps_in_room(self, sequences: Iterable[Sequence], most: int) -> int:
        """How many decode steps, at most `most`, all can take together before blocks run out. At least 1: it is planned."""
        block, free = self.pool.tokens, self.pool.free
        slack = [len(s.blocks) * block - s.computed for s in sequences]  # tokens that still fit into what each holds

        def fits(steps: int) -> bool:
            return sum(-(-(steps - left) // block) for left in slack if steps > left) <= free

        if fits(most):
            return most
        low, high = 1, most  # fits(low), not fits(high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def check(self) -> None:
        """Assert the invariants of pool and batch. Slow: for tests."""
        self.pool.check(s.blocks for s in self.running)
        for s in self.running:
            assert s.computed < s.known or s.known == 0, "everything computed, nothing to sample from"
            assert len(s.blocks) * self.pool.tokens >= s.computed, "computed tokens without blocks"
            assert s.published <= len(s.blocks), "more blocks published than held"
            held = [self.pool.index.get(key) for key in s.chain.keys[: s.published]]
            assert held == s.blocks[: s.published], "a published block is not the index's"
        for s in self.waiting:
            assert not s.blocks, "a waiting sequence holds blocks"
            assert not s.computed, "a waiting sequence has computed tokens"
