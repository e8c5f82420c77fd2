"""The embedded KV-cache engine's door: what goes in (Job, Step), what comes out (Span), and the two contracts inside.

Times are integer nanoseconds where events are stamped and seconds where rooms meet, both on the run's clock. All intervals are
half-open: a step that would begin at `until` has not begun.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvbench.core import Nanos, Seconds, Segment

Key = int
"""Content hash of a block: of everything from the start of the sequence to the block's last token."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request for the engine: `n` answers of exactly `max_tokens` tokens to the prompt `segments`."""

    id: int
    segments: tuple[Segment, ...]
    max_tokens: int
    n: int = 1

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.segments)


@dataclass(frozen=True, slots=True)
class Done:
    """A job that ended: n_out counts all its choices; cached are prompt tokens found resident at first admission."""

    id: int
    n_in: int
    n_out: int
    cached: int
    preempted: int


@dataclass(frozen=True, slots=True)
class Span:
    """Identical steps in a row. At each of `times` (their ends) every (job id, choice) of `tokens` received one token.

    Jobs in `done` received their last token at times[-1].
    """

    start: Nanos
    times: list[Nanos]
    tokens: list[tuple[int, int]]
    done: list[Done]


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one engine step: prefill chunks as (new tokens, tokens before them), and decoding sequences."""

    prefill: tuple[tuple[int, int], ...] = ()
    decodes: int = 0
    context: int = 0  # tokens that the decoding sequences attend to, summed
    samples: int = 0  # sequences that receive a token


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
