"""What opens and closes a capture window on a server. nsight.py decides when; session.py and startstop.py do it."""

from pathlib import Path
from typing import Any, Protocol


class ProfilerError(Exception):
    """A capture could not be had. The text is for the user: what was tried, what came of it, what to do. `begun`: for all that is
    known a window of ours may be open."""

    def __init__(self, text: str, begun: bool = True) -> None:
        super().__init__(text)
        self.begun = begun


class Profiler(Protocol):
    """Every wait is bounded. Errors of a window are ProfilerError."""

    async def open(self) -> dict[str, Any]:
        """Before the run: can it work? Facts for the manifest. Raises CollectorError."""

    async def begin(self, stem: Path) -> None:
        """Open a window whose file is `stem` with a suffix of the profiler's, where it writes one here."""

    async def end(self, stem: Path) -> Path | None:
        """Close the window, and return its file once that is whole; None where the file is not to be seen from here."""

    async def abandon(self) -> None:
        """After a failed begin or end: close what may be open. Raises nothing."""

    async def close(self) -> None:
        """The run is over."""
