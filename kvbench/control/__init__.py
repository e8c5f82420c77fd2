"""How much may enter. The gate holds the limits; a law, asked once per control period, says what they are."""

from typing import Protocol

from kvbench.core import Limits, Window


class Law(Protocol):
    """Called once per control period with the latest window; no I/O, no clock. Gauges in the window carry their age."""

    def update(self, window: Window) -> Limits: ...
