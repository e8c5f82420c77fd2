"""The server's own cache.jsonl: every look-up and change of its KV cache, as a run on the embedded engine keeps it."""

import os
from pathlib import Path

import msgspec

from kvbench.clock import Clock
from kvbench.core import Seconds
from kvbench.engine.log import Log

EVERY: Seconds = 1.0  # at most so much is lost when the process is killed


class Kept:
    """Appends what `log`, a listener of the engine's tape, has heard to a new file. Times are the engine's.

    Raises OSError where the file cannot be made; a disk that fills up later ends the file with a whole line.
    """

    def __init__(self, path: Path, log: Log, clock: Clock) -> None:
        self.log, self.clock = log, clock
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._encoder = msgspec.json.Encoder()
        self._written: Seconds = 0.0
        self._size = 0

    def write(self) -> None:
        """Called whenever something happened; writes once a second."""
        if self.clock.now() - self._written >= EVERY:
            self._written = self.clock.now()
            self._append()

    def _append(self) -> None:
        data = self._encoder.encode_lines(self.log.take())
        if self._descriptor < 0 or not data:
            return
        try:
            whole = os.write(self._descriptor, data) == len(data)
        except OSError:
            whole = False
        if not whole:
            os.ftruncate(self._descriptor, self._size)
            os.close(self._descriptor)
            self._descriptor = -1
        self._size += len(data)

    def close(self) -> None:
        self._append()
        if self._descriptor >= 0:
            os.close(self._descriptor)
