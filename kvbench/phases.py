"""The checklist of a run: warm-up, steady (in epochs), drain. A phase that is not named does not run."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from kvbench.core import Seconds
from kvbench.source import Source


@dataclass(frozen=True)
class Phase:
    """One phase and its bounds; the first bound reached ends it normally. `source` is built when the phase starts.

    seconds: time on the run's clock. requests: offered, and then over. tokens: output tokens received.
    """

    name: str
    kind: Literal["warmup", "steady", "drain"]
    source: Callable[[Seconds], Source] | None = None
    seconds: Seconds = math.inf
    requests: float = math.inf
    tokens: float = math.inf
    expected: float | None = None  # requests that the shape offers within the bounds; None where answers decide (closed loop)

    def bounds(self) -> dict[str, Any]:
        """For the manifest and the phase's first event: only what bounds it."""
        limits = {"seconds": self.seconds, "requests": self.requests, "tokens": self.tokens}
        return {name: value for name, value in limits.items() if math.isfinite(value)}

    def plan(self) -> dict[str, Any]:
        """For the manifest."""
        return {"name": self.name, "kind": self.kind, **self.bounds(), "expected": self.expected}
