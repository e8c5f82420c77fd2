"""WHO answers. The driver awaits `send` once per request; `open` runs before the run, `aclose` after it."""

from typing import Any, Protocol

from kvbench.core import CacheAccess, Event, Record, Request, Seconds


class TargetUnreachable(Exception):  # noqa: N818 - it names a state of the world, which the exit code repeats
    """Nothing answers at the target. The text says what was tried; it never holds a header or a key."""


class Target(Protocol):
    """What answers requests: a server over HTTP, the embedded engine, or nothing at all (null)."""

    async def open(self) -> dict[str, Any]:
        """Called once, before the run: what answers there, as JSON facts for the manifest. Raises TargetUnreachable."""

    def encode(self, request: Request) -> bytes:
        """Called ahead of the due time: the body to send, kept in `request.body`."""

    async def send(self, request: Request, record: Record) -> None:
        """One request. Fills the record as bytes arrive, sets its outcome and end, and returns when it is over.

        Raises nothing but CancelledError, on which it closes the connection and marks the record cancelled.
        """

    def gauges(self, now: Seconds) -> dict[str, float]:
        """Called at each control period: kv_usage, running, waiting, ... where the target knows them."""

    def nodes(self, now: Seconds) -> list[dict[str, float]]:
        """Called with the gauges: the same of each node of a cluster, where the target knows its nodes."""

    def events(self) -> list[Event]:
        """Called with the gauges: what happened there since the last call, at its own time on the run's clock."""

    def accesses(self) -> list[CacheAccess] | None:
        """Called with the gauges: what was looked up and changed in the KV cache since then; None where nobody keeps it."""

    async def aclose(self) -> None:
        """Called once, after the run: closes every connection."""
