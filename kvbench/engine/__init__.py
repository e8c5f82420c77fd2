"""The embedded KV-cache engine's door: what goes in (Job, Step), what comes out (Span), and the contracts inside.

Times are integer nanoseconds where events are stamped and seconds where rooms meet, both on the run's clock. All intervals are
half-open: a step that would begin at `until` has not begun.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvbench.core import Nanos, Seconds, Segment

if TYPE_CHECKING:
    from kvbench.engine.faults import Edge
    from kvbench.engine.holding import Group

Key = int
"""Content hash of a block: of everything from the start of the sequence to the block's last token."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request for the engine: `n` answers of exactly `max_tokens` tokens to the prompt `segments`.

    Content is shared between jobs of one `salt` (a tenant, an adapter) only. A lower `priority` is served first, where
    the profile orders by it. `cls` is the class of traffic, by which lengths are predicted. `begun`: of each answer the tokens
    that other nodes of a cluster have given already; () where there are none. It goes on from there.
    """

    id: int
    segments: tuple[Segment, ...]
    max_tokens: int
    n: int = 1
    salt: int = 0
    priority: int = 0
    cls: str = ""
    begun: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.segments)


@dataclass(frozen=True, slots=True)
class Done:
    """A job that ended: n_out counts all its choices; cached are prompt tokens found at first admission, of those `below` in a
    tier below the device, and `begun` is when it could be computed from then; None where it was never admitted.

    failed: "" where it has all its tokens, else why it has not: "node_lost", "oom" (it lost its blocks once too often), ...
    """

    id: int
    n_in: int
    n_out: int
    cached: int
    preempted: int
    failed: str = ""
    below: int = field(default=0, compare=False)
    begun: Nanos | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Span:
    """Identical steps in a row. At each of `times` (their ends) every (job id, choice) of `tokens` received one token.

    Jobs in `done` received their last token at times[-1]; those that failed, failed then.
    """

    start: Nanos
    times: list[Nanos]
    tokens: list[tuple[int, int]]
    done: list[Done]
    node: int = 0  # of a cluster, where the steps were taken


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one engine step: prefill chunks as (new tokens, tokens before them), and decoding sequences.

    shares: of each chunk the share of the layers that must be computed, the others' KV being resident; () where all must.
    """

    prefill: tuple[tuple[int, int], ...] = ()
    decodes: int = 0
    context: int = 0  # tokens that the decoding sequences attend to, summed
    samples: int = 0  # sequences that receive a token
    shares: tuple[float, ...] = ()
    windowed: tuple[float, ...] = ()  # as context within each of the model's windows, shortest first; (): as if all were alike


class BlockInfo(NamedTuple):
    """What a policy may know of a block that became resident."""

    parent: Key
    position: int  # blocks before it in its chain
    tokens: int


class Policy(Protocol):
    """Who leaves a full pool. Sees every access. Constructed with (capacity in blocks, seed)."""

    def insert(self, key: Key, block: BlockInfo) -> None:
        """`key` became resident, referenced by the sequence that computes it."""

    def hit(self, key: Key) -> None:
        """`key` was looked up, found and referenced by one more sequence."""

    def miss(self, key: Key) -> None:
        """`key` was looked up at an admission and is not resident."""

    def free(self, key: Key) -> None:
        """The last reference to `key` went. A sequence frees its blocks tail first."""

    def evict(self, pinned: Callable[[Key], bool], incoming: Key | None) -> Key:
        """Give up a resident key for which pinned(key) is false, to make room (for `incoming`, where it is known by then).

        KeyError when every resident key is pinned.
        """

    def remove(self, key: Key) -> None:
        """`key` left for another reason than `evict`."""


class Cost(Protocol):
    """How long one step takes. Asked once or twice per span.

    Must be affine in `Step.context` where all else is equal, and not fall with it: the engine extrapolates from the first
    two steps of a span.
    """

    def seconds(self, step: Step) -> Seconds: ...


class Below(Protocol):
    """What lies under the device's blocks: host memory, disks, a remote store. Times are the run's, in nanoseconds."""

    prefetch: int
    """For how many waiting sequences `ahead` is to be called."""

    def attach(self, groups: "Sequence[Group]") -> None:
        """What lies above. Called once, before anything else: what their pools give up goes here (Pool.evicted_to)."""

    def found(self, group: int, keys: Sequence[Key], start: int, now: Nanos) -> int:
        """How many leading keys of layer group `group` come up if asked for, after `start` blocks that are on the device. Counts
        nothing: admission may fail."""

    def entered(
        self, group: int, keys: Sequence[Key], device: int, upto: int, tokens: int, job: int, again: bool, now: Nanos
    ) -> Nanos:
        """An admission looked for `keys`: the first `device` were on the device, those before `upto` are to come up, the others
        are missing. tokens: of the prefix that all groups have. again: it is not the first of the job. Returns when all found
        are on the device, at least `now`."""

    def stored(self, group: int, key: Key, block: BlockInfo, now: Nanos) -> None:
        """A block of the device is full and has its key, computed or brought up: a copy may go down at once."""

    def ended(self, group: int, keys: Sequence[Key], now: Nanos) -> None:
        """A sequence is over that held these full blocks."""

    def preempted(self, keys: Sequence[Sequence[Key]], tokens: int, now: Nanos) -> None:
        """A sequence of `tokens` tokens, with these full blocks of each group, loses its place: it may go down (swap)."""

    def ahead(self, group: int, keys: Sequence[Key], now: Nanos) -> None:
        """A waiting sequence will ask for `keys`, the first of them not on the device: they may come nearer."""

    def gauges(self, now: Nanos) -> dict[str, float]: ...

    def facts(self) -> dict[str, Any]: ...

    def check(self) -> None: ...

    def close(self) -> None:
        """Let go of what is held outside this process."""

    def clear(self, now: Nanos) -> None:
        """Forget everything: a reset of the prefix cache."""


class Machine(Protocol):
    """What serves jobs: one Engine, or a Cluster of them. No clock, no I/O; how to drive it is said in engine.py."""

    passed: "list[Edge]"
    """Edges of faults that time has come to; whoever reads them takes them away."""

    def submit(self, job: Job, now: Seconds) -> str | None:
        """Queue a job. None, or why it is not served: "refused" or "full" now; ever: "empty", "context_too_long",
        "kv_too_small"."""

    def cancel(self, job_id: int, now: Seconds) -> None:
        """Forget a live job. KeyError if unknown."""

    def advance(self, until: Seconds) -> list[Span]:
        """Take every step that begins before `until`; hand out those that ended by then, in order of time."""

    def wake(self) -> Seconds:
        """When to call advance next if nothing arrives before; inf when idle or hung."""

    def tick(self) -> Seconds:
        """As wake, and no later than the end of the step in progress: for who hands out tokens as they come."""

    def progress(self, job_id: int) -> Done:
        """A live job so far. KeyError if unknown."""

    def gauges(self) -> dict[str, float]:
        """Gauges and running totals by name, at the time advanced to."""

    def gauges_by_node(self) -> list[dict[str, float]]:
        """The same of each node of a cluster; [] where there are no nodes."""

    def facts(self) -> dict[str, Any]:
        """What it is, for a run's manifest."""

    def reset(self, now: Seconds) -> bool:
        """Empty the prefix cache, as vLLM's /reset_prefix_cache: False, and nothing done, while blocks are in use."""

    def check(self) -> None:
        """Assert every invariant. Slow: for tests."""

    def close(self) -> None:
        """Let go of what is held outside this process: real files. Nothing is asked of it afterwards."""
