"""The checklist of a run: baseline, warm-up, steady (in epochs), stress, drain. A phase that is not named does not run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kvbench.core import Record, Seconds
from kvbench.level import Ladder
from kvbench.metrics.slots import Slots
from kvbench.source import Source


class Until(Protocol):
    """Ends a phase in the ordinary way, asked once a second: why it is enough, or None to go on."""

    def check(self, slots: Slots, now: Seconds, live: Sequence[Record]) -> str | None: ...


@dataclass(frozen=True)
class Phase:
    """One phase and its bounds; the first bound reached ends it normally. `source` is built when the phase starts.

    seconds: time on the run's clock. requests: offered, and then over. tokens: output tokens received. until: built at the
    phase's start, and asked. ladder: how the level rises. snapshot: how often the numbers so far are written down.
    controlled: the run's limits and law hold here.
    """

    name: str
    kind: Literal["baseline", "warmup", "steady", "stress", "drain"]
    source: Callable[[Seconds], Source] | None = None
    seconds: Seconds = math.inf
    requests: float = math.inf
    tokens: float = math.inf
    expected: float | None = None  # requests that the shape offers within the bounds; None where answers decide (closed loop)
    until: Callable[[Seconds], Until] | None = None
    ladder: Ladder | None = None
    snapshot: Seconds | None = None
    controlled: bool = True

    def bounds(self) -> dict[str, Any]:
        """For the manifest and the phase's first event: only what bounds it."""
        limits = {"seconds": self.seconds, "requests": self.requests, "tokens": self.tokens}
        return {name: value for name, value in limits.items() if math.isfinite(value)}

    def plan(self) -> dict[str, Any]:
        """For the manifest."""
        return {"name": self.name, "kind": self.kind, **self.bounds(), "expected": self.expected}
