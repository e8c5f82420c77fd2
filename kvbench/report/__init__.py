"""What a run meant: reads a run directory (any prefix of it), never a live run. Called after a run and by `kvbench report`."""

from collections.abc import Mapping
from typing import Any, Protocol


class Page(Protocol):
    """One way to write a run down: a whole file's text. Called once per run, with the summary that every other page shows too.

    files: the RunFiles (report/files.py) that the summary was made of, for what a summary leaves out, such as every window.
    """

    def __call__(self, summary: Mapping[str, Any], files: Any) -> str: ...
