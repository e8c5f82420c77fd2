"""A run directory as it lies on the disk, whole or cut off at any byte.

A run that was killed leaves every file readable but for the last line, which may be torn: it is dropped and counted. A line in
the middle that does not decode (a disk that filled up and was freed again) is dropped and counted apart.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from kvbench.core import Event, Record, Sample, Seconds, Window
from kvbench.report.forms import EventLine, Manifest, RecordLine, SampleLine, WindowLine

LINES = ("requests.jsonl", "events.jsonl", "windows.jsonl", "samples.jsonl")
T = TypeVar("T")


@dataclass
class RunFiles:
    """What was read. torn and damaged: lines dropped, per file (the last one; others). missing: files that are not there."""

    directory: Path
    manifest: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    torn: dict[str, int] = field(default_factory=dict)
    damaged: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def all(self, kind: str) -> list[Event]:
        """The events of one kind, in order."""
        return [event for event in self.events if event.kind == kind]

    def last(self, kind: str) -> Event | None:
        found = self.all(kind)
        return found[-1] if found else None

    @property
    def virtual(self) -> bool:
        return self.manifest.get("clock") == "virtual"

    @property
    def scenario(self) -> dict[str, Any]:
        return self.manifest.get("scenario") or {}

    @property
    def end(self) -> Seconds:
        """The latest instant of which the files know."""
        ended = max((r.end_ns or r.due_ns for r in self.records), default=0) / 1e9
        return max(ended, self.events[-1].t if self.events else 0.0, self.windows[-1].end if self.windows else 0.0)


def load(directory: Path) -> RunFiles:
    """Read a run directory, any prefix of it. ValueError, saying what is missing, where it is none."""
    if not directory.is_dir():
        raise ValueError(f"{directory}: there is no such directory")
    present = [name for name in ("manifest.json", *LINES) if (directory / name).is_file()]
    if not any(name in present for name in ("manifest.json", "requests.jsonl", "events.jsonl")):
        raise ValueError(f"{directory} is not a run directory: it holds none of manifest.json, requests.jsonl, events.jsonl")
    files = RunFiles(directory, missing=[name for name in ("manifest.json", *LINES) if name not in present])
    files.manifest = _manifest(directory, files)
    files.records = _lines(directory, "requests.jsonl", RecordLine, files)
    files.events = _lines(directory, "events.jsonl", EventLine, files)
    files.windows = _lines(directory, "windows.jsonl", WindowLine, files)
    files.samples = _lines(directory, "samples.jsonl", SampleLine, files)
    files.events = _exported(files)
    return files


def _exported(files: RunFiles) -> list[Event]:
    """The events, with the accounts of the run's sinks as `kvbench export` left them: what it delivered later is not missing. A
    run that was killed has none of its own."""
    notes = [note for path in sorted(files.directory.glob("spool/*/sink.json")) if (note := _note(path)) is not None]
    if not notes:
        return files.events
    said = {event.data.get("to") for event in files.events if event.kind == "sink"}
    asked = {str(sink.get("url")).rstrip("/") for sink in files.scenario.get("sinks") or () if isinstance(sink, dict)}
    ledgers = {note.ledger["to"]: note.ledger for note in notes}
    later = [note.ledger for note in notes if note.ledger["to"] not in said and note.spec.get("url") in asked]
    found = [
        replace(event, data=event.data | ledgers.get(event.data.get("to"), {})) if event.kind == "sink" and "points" in event.data
        else event
        for event in files.events
    ]  # fmt: skip
    return found + [Event(t=files.end, kind="sink", data=ledger) for ledger in later]


class _Note(msgspec.Struct):
    """sink.json of a spool."""

    spec: dict[str, Any]
    ledger: dict[str, Any]


def _note(path: Path) -> _Note | None:
    """None where it is damaged, or has no account yet."""
    try:
        note = msgspec.json.decode(path.read_bytes(), type=_Note)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    counts = [note.ledger.get(name) for name in ("points", "delivered")]
    whole = isinstance(note.ledger.get("to"), str) and all(isinstance(n, int) and n >= 0 for n in counts)
    return note if whole and isinstance(note.ledger.get("notes", []), list) else None


def _manifest(directory: Path, files: RunFiles) -> dict[str, Any]:
    path = directory / "manifest.json"
    if not path.is_file():
        return {}
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        files.torn["manifest.json"] = 1
        return {}
    try:
        msgspec.convert(found, Manifest)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path} is not a run's manifest: {error}") from None
    return dict(found)


def _lines(directory: Path, name: str, kind: type[T], files: RunFiles) -> list[T]:
    """The lines of one file. An object without its closing brace never decodes, so a torn line cannot pass for a whole one."""
    path = directory / name
    if not path.is_file():
        return []
    decode = msgspec.json.Decoder(kind).decode
    lines = path.read_bytes().split(b"\n")
    last = len(lines) - 1
    found: list[T] = []
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            found.append(decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            where = files.torn if number == last else files.damaged
            where[name] = where.get(name, 0) + 1
    return found
