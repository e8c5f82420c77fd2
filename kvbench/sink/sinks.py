"""The sinks by the name that a scenario gives them."""

from typing import Any

from kvbench.sink.influx import Influx

SINKS: dict[str, type[Any]] = {"influx": Influx}
