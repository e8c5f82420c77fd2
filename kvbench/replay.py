"""A run directory into a database: everything, or what the database did not get while the run went on.

The journal is the truth. Its items make the same lines as they made in the run (sink/points.py), so what the spool says is
delivered is left out line by line, and what is sent twice all the same overwrites itself.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvbench.clock import stopwatch
from kvbench.core import Event, Record, Sample, Seconds, Window
from kvbench.report.files import RunFiles, load
from kvbench.sink import SinkPlace
from kvbench.sink.influx import Influx, account, claim, preflight, write_note
from kvbench.sink.points import Points, engine_of, tags_of
from kvbench.sink.sender import Sender
from kvbench.sink.spool import Spool

AHEAD = 50_000  # lines made before they are on the disk
GIVE_UP: Seconds = 60.0  # without a line delivered
STEP: Seconds = 0.05


def items(files: RunFiles) -> Iterator[Event | Sample | Window | Record]:
    """Each kind in the order in which the run told it; but the accounts of its sinks, which it told when they were closed."""
    yield from (event for event in files.events if event.kind != "sink" or "points" not in event.data)
    yield from files.windows
    yield from files.samples
    yield from files.records


def began(files: RunFiles) -> Seconds:
    """Seconds since 1970 at which the run's clock was 0. ValueError where the directory does not say."""
    start = next(iter(files.all("run_start")), None)
    wall = (start.data.get("wall") if start is not None else None) or files.manifest.get("wall")
    if not isinstance(wall, float) or not 0 <= wall < 9e9:
        raise ValueError(f"{files.directory}: no event `run_start` says when the run began, so its points have no time")
    return wall


def place(files: RunFiles, note: Mapping[str, Any] | None) -> SinkPlace:
    """Where the run took place; facts as its sink noted them, where it had one."""
    target = files.manifest.get("target") or {}
    engine = engine_of(target, files.manifest.get("collectors") or ())
    facts = {"scenario": files.manifest.get("name"), "model": target.get("model"), "engine": engine}
    name = files.directory.resolve().name if note is None else str(note["run"])
    return SinkPlace(files.directory, name, began(files), facts if note is None else note["facts"])


def known(directory: Path, url: str) -> dict[str, Any] | None:
    """What a sink or an export of this run noted of the database at `url`: run, wall, facts, spec, ledger. None: nothing."""
    for path in sorted(directory.glob("spool/*/sink.json")):
        try:
            note = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
            spec = Influx.model_validate(note["spec"])
            SinkPlace(directory, str(note["run"]), float(note["wall"]), dict(note["facts"]))
        except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError):
            continue  # damaged: the manifest says the same but for the tags
        if spec.url == url.rstrip("/"):
            return note
    return None


def replay(directory: Path, spec: Influx, resume: bool, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Send a run's points; `progress` is told (delivered, made so far). Returns the account, as a sink's `told`, of the whole
    run: what was delivered before counts; `sent` and `stored` are of this time. The report reads it in sink.json.

    Raises ValueError where `directory` is no run's, SinkError where the database cannot be written to or another process sends.
    """
    files = load(directory)
    note = known(directory, spec.url)
    at = place(files, note)
    if resume and note is not None and _whole(note, spec):
        return {**note["ledger"], "sent": 0, "stored": 0}
    database = spec.connect()
    spool = claim(directory, spec)
    try:
        preflight(spec, database, at.run, at.wall)
        had = _had(spool) if resume else set()
        if not resume:
            spool.clear()
        write_note(spec, at, {})
        points = Points(at.run, at.wall, tags_of(at.facts, spec.tags))
        sender = Sender(spool, database)
        sender.start()
        skipped: list[int] = []
        _send(sender, _lines(files, points, spec.requests, had, skipped), progress, spec.timeout)
        told = account(sender, points, directory, spec)
        ledger = told | {name: told[name] + len(skipped) for name in ("points", "delivered")}
        write_note(spec, at, ledger)
        if ledger["complete"]:
            spool.clear()
        return {**ledger, "sent": sender.offered, "stored": told["delivered"]}
    finally:
        spool.release()
        database.close()


def _lines(files: RunFiles, points: Points, requests: bool, had: set[int], skipped: list[int]) -> Iterator[str]:
    """What to send. skipped: gets a place for every line that the database had."""
    for item in items(files):
        if isinstance(item, Record) and not requests:
            continue
        line = points.line(item)
        if line and (mark := hash(line.encode("utf-8", "replace"))) in had:
            skipped.append(mark)
        elif line:
            yield line


def _send(sender: Sender, lines: Iterator[str], progress: Callable[[int, int], None], timeout: Seconds) -> None:
    """Offer all and wait until they are delivered or there is no hope. Interrupted, it stops in order."""
    spool = sender.spool
    before, since = 0, stopwatch()
    try:
        for line in lines:
            sender.offer(line)
            while sender.waiting > AHEAD and not sender.ended(STEP):
                progress(spool.acked, sender.offered)
        sender.end()
        while not sender.ended(STEP) and stopwatch() - since < GIVE_UP * 1e9:
            progress(spool.acked, sender.offered)
            if spool.acked > before:
                before, since = spool.acked, stopwatch()
    finally:
        sender.abandon()
        sender.ended(timeout)  # of the write that may be under way
    progress(spool.acked, sender.offered)


def _whole(note: dict[str, Any], spec: Influx) -> bool:
    """All that is asked for was delivered before."""
    return (
        bool(note["ledger"].get("complete"))
        and not note["ledger"].get("refused")
        and spec.where(Path()) == Influx.model_validate(note["spec"]).where(Path())
        and (note["spec"]["requests"] or not spec.requests)
    )


def _had(spool: Spool) -> set[int]:
    """Hashes of the lines that the database acknowledged; the others are made again from the journal, refused ones too."""
    spool.cut()
    return {hash(line) for line in spool.delivered()} - {hash(line) for line in spool.unbury()}
