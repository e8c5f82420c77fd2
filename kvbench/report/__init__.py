"""What a run meant: reads a run directory (any prefix of it), never a live run. Called after a run and by `kvbench report`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kvbench.report.files import RunFiles


class Page(Protocol):
    """One way to write a run down: a whole file's text. Called once per run, with the summary that every other page shows too."""

    def __call__(self, summary: Mapping[str, Any], files: "RunFiles") -> str: ...
