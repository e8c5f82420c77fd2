"""Power of the devices, modelled from the hardware profile: idle, plus what the work of each step adds, up to the board limit.

A step at the peak of its matrix units draws the limit; one that only moves memory draws idle plus MEMORY of the range between
(an assumption, held against published board powers in docs/engine.md). Host, disks and network are not counted.
"""

from kvbench.core import Nanos, Seconds
from kvbench.engine import Step
from kvbench.engine.cost import Roofline
from kvbench.profile import Hardware

MEMORY = 0.5  # share of (limit - idle) drawn while memory is read at full speed and nothing is computed


class Meter:
    """Joules of all devices together. Constructed for one engine; the hardware must have `idle` and `power` (W per device)."""

    def __init__(self, hardware: Hardware, cost: Roofline) -> None:
        if hardware.idle is None or hardware.power is None:
            raise ValueError(f"hardware {hardware.name!r} has no idle and power: its energy cannot be modelled")
        self.idle = hardware.idle * hardware.count  # W
        self._range = (hardware.power - hardware.idle) * hardware.count
        self._cost = cost
        self._busy = 0.0  # J beyond idle, of the steps taken

    def joules(self, step: Step, seconds: Seconds) -> float:
        """Beyond idle, of a step that takes `seconds`."""
        terms = self._cost.terms(step)
        full = terms.compute + terms.prefill_attention
        moving = terms.weights + terms.decode_attention + terms.activations
        return self._range * min(seconds, full + MEMORY * moving)

    def add(self, joules: float) -> None:
        self._busy += joules

    def total(self, now: Nanos) -> float:
        """J from the run's zero to `now`, idle time included."""
        return self.idle * now / 1e9 + self._busy
