"""The collectors by the name that a scenario gives them."""

from typing import Any

from kvbench.collect.host import Host

COLLECTORS: dict[str, type[Any]] = {"host": Host}
