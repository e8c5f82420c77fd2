"""The InfluxDB sink: a run's points to a database over HTTP while it goes on, through a spool in its directory.

`write` turns an item into a line and puts it in a queue, a few microseconds; a thread does the rest (sender.py). What the
database did not get when the run ends is in the run directory, and `kvbench export --resume` delivers it.
"""

import asyncio
import fcntl
import os
import re
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvbench.clock import stopwatch
from kvbench.core import Event, Record, Sample, Seconds, Window
from kvbench.sink import SinkError, SinkPlace, Store
from kvbench.sink.database import V1, V2, Database, Reply
from kvbench.sink.points import ITEM_TAGS, RUN_TAGS, Points, tags_of
from kvbench.sink.sender import Sender
from kvbench.sink.spool import Spool
from kvbench.units import Duration, Span

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_SLICE: Seconds = 0.02  # for which the loop stands still at the end while the last lines go out


class Influx(BaseModel):
    """A database that takes InfluxDB's line protocol gets the run's windows, samples and events while it goes on."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    url: str = Field(description="its address, such as http://127.0.0.1:8086; no password in it")
    mode: Literal["v1", "v2"] = Field(
        "v2", description="v2: /api/v2/write with bucket and org; v1: /write with database (InfluxDB before 1.8)"
    )
    bucket: str = Field("kvbench", min_length=1, description="of mode v2")
    org: str = Field("", description="of mode v2")
    database: str = Field("kvbench", min_length=1, description="of mode v1")
    token_env: str | None = Field(
        None, description='the environment variable that holds the token; "user:password" in mode v1 is a login'
    )
    requests: bool = Field(False, description="true: a point for every request too, which is many")
    tags: Annotated[dict[str, str], Field(max_length=16)] = Field({}, description="further tags of every point")
    timeout: Span = Field(10.0, description="of one write")
    drain: Duration = Field(10.0, description="how long the end of the run waits for the last points")

    @field_validator("url")
    @classmethod
    def _address(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{value!r} is not an address: write http://HOST:PORT")
        if parts.username is not None or parts.password is not None:
            raise ValueError("no password in the address: put it into an environment variable and name that in token_env")
        if parts.query or parts.fragment:
            raise ValueError(f"{value!r} ends in a query: bucket, org and database have keys of their own")
        _ = parts.port  # a ValueError of its own
        return value.rstrip("/")

    @field_validator("tags")
    @classmethod
    def _tags(cls, value: dict[str, str]) -> dict[str, str]:
        taken = {*RUN_TAGS, *ITEM_TAGS, "time"}
        for name in value:
            if not _NAME.fullmatch(name) or name in taken:
                raise ValueError(f"tag {name!r}: write letters, digits and _, and none of {', '.join(sorted(taken))}")
        return value

    def build(self, place: SinkPlace) -> Store:
        """Write one point, to see that it can; then the sink. SinkError where it cannot."""
        database = self.connect()
        try:
            preflight(self, database, place.run, place.wall)
            return InfluxSink(self, place, claim(place.directory, self), database)
        except BaseException:
            database.close()
            raise

    def connect(self) -> Database:
        """Nothing is sent yet."""
        token = os.environ.get(self.token_env, "").strip() if self.token_env else None  # a file's last line feed is no part of it
        if self.token_env and not token:
            raise SinkError(f"influx: the environment variable {self.token_env} (token_env) is not set or empty")
        if token and not (token.isprintable() and (token.isascii() or (self.mode == "v1" and ":" in token))):
            raise SinkError(f"influx: the environment variable {self.token_env} (token_env) holds characters that no token has")
        try:
            if self.mode == "v1":
                return V1(self.url, self.database, token, self.timeout)
            return V2(self.url, self.bucket, self.org, token, self.timeout)
        except ValueError as error:
            raise SinkError(f"influx: {error}") from None

    def where(self, directory: Path) -> Path:
        """The spool of this database in a run directory."""
        place = self.database if self.mode == "v1" else f"{self.org}/{self.bucket}"
        mark = sha256(f"{self.url} {self.mode} {place}".encode()).hexdigest()[:8]
        name = re.sub(r"[^A-Za-z0-9._]+", "-", f"{urlsplit(self.url).netloc}-{place}").strip("-")
        return directory / "spool" / f"{name[:64]}-{mark}"


class Claimed(Spool):
    """A spool that is this process's alone until it is closed or the process dies."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            super().__init__(directory)
        except OSError:
            os.close(self._lock)
            raise

    def release(self) -> None:
        self.close()
        os.close(self._lock)


def claim(directory: Path, spec: Influx) -> Claimed:
    """The spool of `spec` in a run directory. SinkError where another process has it or the disk refuses."""
    where = spec.where(directory)
    try:
        return Claimed(where)
    except BlockingIOError:
        raise SinkError(
            f"influx: {where} is in use: the run is still going on, is being exported, or names {spec.url} twice"
        ) from None
    except OSError as error:
        raise SinkError(f"influx: cannot keep lines in {where}: {error.strerror or error}") from None


def preflight(spec: Influx, database: Database, run: str, wall: float) -> None:
    """A real write, since health and ping say yes where writes are refused. SinkError, with what to do, where it fails."""
    line = Points(run, wall, {}).mark("preflight")
    reply = database.post(f"{line}\n".encode())
    if not reply.ok:
        raise SinkError(f"influx: writing one point to {database.where}: {_advice(spec, reply)}")


def _advice(spec: Influx, reply: Reply) -> str:
    if reply.status is None:
        return f"no answer ({reply.said}). Is it running, and is the address right?"
    held = f"the token in {spec.token_env}" if spec.token_env else "no token, since token_env names no variable"
    advice = {
        401: f"It was sent {held}.",
        403: f"It was sent {held}; it needs the right to write there.",
        404: f"Create it: curl -XPOST {spec.url}/query --data-urlencode 'q=CREATE DATABASE \"{spec.database}\"'"
        if spec.mode == "v1"
        else f"Does the bucket {spec.bucket!r} exist in the organisation {spec.org!r}? InfluxDB before 1.8 needs mode: v1.",
    }.get(reply.status, "Nothing was stored; the run was not started.")
    return f"answered {reply}. {advice}"


class InfluxSink:
    """Windows, samples, events and, where asked for, requests, as points in a database."""

    def __init__(self, spec: Influx, place: SinkPlace, spool: Claimed, database: Database) -> None:
        self.spec, self.place, self.spool = spec, place, spool
        self.sender = Sender(spool, database)
        self.points = Points(place.run, place.wall, tags_of(place.facts, spec.tags))
        self.odd = 0
        write_note(spec, place, {})
        self.sender.start()

    def write(self, item: Event | Sample | Window | Record) -> None:
        if type(item) is Record and not self.spec.requests:
            return
        try:
            line = self.points.line(item)
        except Exception:  # whatever is odd in an item must not end the run it describes
            self.odd += 1
            return
        if line:
            self.sender.offer(line)

    async def aclose(self) -> None:
        """Send what is left, for `drain` seconds at most."""
        sender = self.sender
        sender.end()
        until = stopwatch() + self.spec.drain * 1e9
        while not sender.ended(_SLICE) and stopwatch() < until:  # noqa: ASYNC110 - a thread's end, on a loop of any time
            await asyncio.sleep(0)
        sender.abandon()
        if sender.ended(_SLICE):  # else it is in a write, and ends with this process
            if self.told()["complete"]:
                self.spool.clear()
            self.spool.release()
        write_note(self.spec, self.place, self.told())

    def behind(self) -> dict[str, Any]:
        sender = self.sender
        if not sender.behind:
            return {}
        return {"sink": "influx", "to": sender.database.where, "reason": sender.behind, "waiting": sender.remaining}

    def told(self) -> dict[str, Any]:
        return account(self.sender, self.points, self.place.directory, self.spec) | {"odd": self.odd}


def account(sender: Sender, points: Points, directory: Path, spec: Influx) -> dict[str, Any]:
    """Where the points of a run are, and what to do about those that are not in the database."""
    spool, left = sender.spool, sender.remaining + sender.lost
    notes = [*points.notes, *sender.notes]
    if left:
        answer = f" (last answer: {sender.last})" if sender.last is not None else ""
        notes.append(
            f"influx: {left:,} of {sender.offered:,} points were not delivered to {sender.database.where}{answer}; the run "
            f"directory holds them: kvbench export {directory} --influx {spec.url} --resume"
        )
    return {
        "sink": "influx", "to": sender.database.where, "points": sender.offered, "delivered": spool.acked - spool.dead,
        "remaining": sender.remaining, "lost": sender.lost, "refused": spool.dead, "skipped_fields": points.skipped,
        "complete": not left, "notes": notes,
    }  # fmt: skip


def write_note(spec: Influx, place: SinkPlace, ledger: dict[str, Any]) -> None:
    """sink.json beside the segments."""
    facts = {name: str(place.facts[name]) for name in RUN_TAGS[1:] if place.facts.get(name)}
    note = {"run": place.run, "wall": place.wall, "facts": facts, "spec": spec.model_dump(), "ledger": ledger}
    path = spec.where(place.directory) / "sink.json"
    part = path.with_suffix(".part")
    try:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(note), indent=2) + b"\n")
        os.replace(part, path)
    except OSError:
        pass  # a full disk: the manifest says the same but for the tags
