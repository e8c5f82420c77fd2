"""The run directory: append whole lines, flush every second, survive kill -9 and a full disk."""

import os
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kvbench.core import CacheAccess, Event, Record, Sample, Window

FILES = {Record: "requests.jsonl", Window: "windows.jsonl", Sample: "samples.jsonl", Event: "events.jsonl"}
_SPILL = 1 << 18  # bytes buffered per file before they go to the system, between the flushes of every second


class JournalError(OSError):
    """What was to be recorded could not be written; everything written before is whole."""


def create(out: Path, name: str, wall: float) -> Path:
    """A new directory `<name>-<UTC stamp>-<4 hex>` below `out`, its own even if another run starts in the same second."""
    stamp = datetime.fromtimestamp(wall, UTC).strftime("%Y%m%dT%H%M%SZ")
    for _ in range(100):
        path = out / f"{name}-{stamp}-{secrets.token_hex(2)}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise JournalError(error.errno, f"cannot create the run directory {path}: {error.strerror}") from error
        return path
    raise JournalError(17, f"cannot find a free name for a run directory in {out}")


def write_whole(path: Path, data: bytes) -> None:
    """Replace `path` by `data` so that a reader sees the old or the new file, never a part."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise JournalError(error.errno, f"cannot write {path}: {error.strerror}") from error


class _Lines:
    """One append-only JSONL file. A line is on disk whole or not at all: a short write is cut back to the last whole line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.buffer = bytearray()
        try:
            self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise JournalError(error.errno, f"cannot create {path}: {error.strerror}") from error

    def flush(self) -> None:
        if not self.buffer:
            return
        data, self.buffer = bytes(self.buffer), bytearray()
        done, error = 0, None
        try:
            while done < len(data):
                done += os.write(self.fd, data[done:])
        except OSError as raised:
            error = raised
        whole = done if done == len(data) else data.rfind(b"\n", 0, done) + 1
        self.size += whole
        if error is not None:
            os.ftruncate(self.fd, self.size)
            raise JournalError(error.errno, f"cannot record to {self.path}: {error.strerror}") from error

    def close(self) -> None:
        try:
            self.flush()
        finally:
            os.close(self.fd)


class Journal:
    """Appends records, windows, samples and events to their files in `path`. Raises JournalError when the disk refuses."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._encoder = msgspec.json.Encoder()
        self._lines: dict[type, _Lines] = {kind: _Lines(path / name) for kind, name in FILES.items()}
        self.records = 0

    def manifest(self, facts: dict[str, Any]) -> None:
        write_whole(self.path / "manifest.json", msgspec.json.format(self._encoder.encode(facts), indent=2) + b"\n")

    def write(self, item: Record | Window | Sample | Event) -> None:
        lines = self._lines[type(item)]
        lines.buffer += self._encoder.encode(item)
        lines.buffer += b"\n"
        if len(lines.buffer) > _SPILL:
            lines.flush()

    def file(self, records: list[Record]) -> None:
        """Append ended records."""
        lines = self._lines[Record]
        lines.buffer += self._encoder.encode_lines(records)
        self.records += len(records)
        if len(lines.buffer) > _SPILL:
            lines.flush()

    def accesses(self, accesses: list[CacheAccess]) -> None:
        """Append cache accesses. Their file is there from the first call on."""
        if CacheAccess not in self._lines:
            self._lines[CacheAccess] = _Lines(self.path / "cache.jsonl")
        lines = self._lines[CacheAccess]
        lines.buffer += self._encoder.encode_lines(accesses)
        if len(lines.buffer) > _SPILL:
            lines.flush()

    def flush(self) -> None:
        """Hand everything to the system; from here on it survives the death of this process."""
        for lines in self._lines.values():
            lines.flush()

    def close(self) -> None:
        error: JournalError | None = None
        for lines in self._lines.values():
            try:
                lines.close()
            except JournalError as raised:
                error = error or raised
        if error is not None:
            raise error
