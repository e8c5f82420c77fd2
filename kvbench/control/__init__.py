"""How much may enter. The gate holds the limits; a law, asked once per control period, says what they are."""

from typing import Any, Protocol

from kvbench.core import Limits, Window


class Law(Protocol):
    """One law during one run. Synchronous: no I/O, no clock.

    A law sees service latency and gauges, never what contains waiting at our own gate: that would close a loop through itself.
    """

    def update(self, window: Window) -> Limits:
        """Once per control period. `window` covers the last `over` seconds; its gauges carry their age."""
        ...

    def state(self) -> dict[str, float]:
        """The numbers behind the latest decision (error, p, i, d, ...), written as samples named law_<key>."""
        ...

    def told(self) -> dict[str, Any]:
        """At the end of the run: how often it was asked (updates), had no fresh signal (stale), could not act (saturated), ..."""
        ...
