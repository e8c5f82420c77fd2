"""WHAT arrives WHEN. The contracts of this room; the parts that satisfy them sit in dicts at the foot of their files."""

from collections.abc import Iterator
from typing import Any, Protocol

from numpy.random import Generator

from kvbench.core import Request, Seconds


class Arrivals(Protocol):
    """An open-loop load shape: the claim. `Schedule` turns it into due times; the contract suite holds one against the other.

    Times are shape times: 0 is the instant the shape starts. Pure: every method answers the same for ever (chaos extends
    itself from its own seed, whatever the order of the questions).
    """

    def rate(self, t: Seconds) -> float:
        """Requests/s at `t` at level 1, impulses (a burst of many at one instant) left out. Asked for plots and for plans."""

    def exposure(self, t: Seconds) -> float:
        """Requests due in [0, t) at level 1: the integral of rate plus the impulses before `t`. 0 at and before 0, nondecreasing,
        inf from the first instant on where the rate is. Asked in batches by the schedule's inversion."""

    def gaps(self, rng: Generator) -> Iterator[float]:
        """Exposure before the first event, then between events, for ever: 0, 1, 1, ... for deterministic shapes; exponential,
        gamma or Pareto with mean 1 otherwise. Asked once, when a schedule is built."""

    def peak(self, until: Seconds = float("inf")) -> float:
        """A bound on the rate in [0, until), impulses left out; inf where it grows for ever. Asked by `kvbench check`."""


class Lengths(Protocol):
    """How many tokens: one distribution, for prompts or for outputs. Asked once per request."""

    def sample(self, rng: Generator) -> int: ...
    def mean(self) -> float:
        """The exact expectation of `sample`, for the plan."""

    def bounds(self) -> tuple[int, int]:
        """The least and the most `sample` can give, for the check against the model's context."""

    def quantile(self, q: float) -> int:
        """The least length with at least the share `q` of draws at or below it; q in [0, 1]."""


class Tokenizer(Protocol):
    """How content (segments of `kvbench.core`) becomes what the API takes. Asked once per request, ahead of its due time.

    Rendering a segment (key, n) is a prefix of rendering (key, m) for n < m; unequal keys differ from their first token on.
    """

    name: str  # as the manifest and the report say it

    def render(self, request: Request) -> dict[str, Any]:
        """The part of the body that carries the prompt: {"messages": [...]}, {"prompt": text} or {"prompt": [ids]}."""

    def count(self, text: str) -> int:
        """Tokens in `text`; an estimate where the tokenizer is not the server's."""
