"""Emptying a server's prefix cache before a run, and whether it really was empty. Over aiohttp, away from the hot path.

A reply's body is believed, never its status: servers answer 200 and say in the body that nothing was done. What is still busy is
asked again for a while. A refusal ends the run before it begins; a reply that says neither yes nor no is recorded as such, and
the first requests decide: by their own counts of cached tokens, or by the server's hit counters.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp

from kvbench.clock import Clock
from kvbench.core import Event, Seconds
from kvbench.target import TargetUnreachable
from kvbench.target.counters import Hits, read
from kvbench.target.openai import body_text
from kvbench.unanswered import why

PATIENCE: Seconds = 10.0  # for an answer, and again for a server that is busy to be so no longer
PAUSE: Seconds = 0.5  # between two askings
FIRST = 8  # requests that have to end ok before the hit counters are read again
LONG = 1 << 24  # bytes of an answer that are read
KEPT = 200  # characters of it that are recorded
UNANSWERED = (aiohttp.ClientError, TimeoutError, OSError)


class Said(NamedTuple):
    """An answer. done: it says that the cache is empty (True), that it is not (False), or neither (None). `why`, and what to do
    about it, for what is not True; busy: the same may succeed in a moment."""

    done: bool | None
    status: int
    text: str
    why: str = ""
    busy: bool = False


class Reply(NamedTuple):
    status: int
    text: str

    def json(self) -> Any:
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return None

    def fields(self) -> dict[str, Any]:
        said = self.json()
        return said if isinstance(said, dict) else {}


Ask = Callable[[str, str], Awaitable[Reply]]
"""(method, path) -> what the server answers."""


class Way(NamedTuple):
    """How one kind of server is asked. owners, software: by which it is known (/v1/models, the Server header)."""

    endpoint: str
    ask: Callable[[Ask], Awaitable[Said]]
    owners: tuple[str, ...]
    software: tuple[str, ...] = ()


async def reset(
    session: aiohttp.ClientSession, server: Mapping[str, Any], asked: str, patience: Seconds = PATIENCE
) -> dict[str, Any]:
    """Empty one server's cache; facts for the manifest, with its counters as they were just afterwards.

    server: discover.py's facts of it. Raises TargetUnreachable where it refuses, is busy for longer than `patience`, does not
    answer, or is of no kind that is known; the text says what to do.
    """
    base = str(server["url"])
    kind = recognised(server) if asked == "auto" else asked
    way = RESETS[kind]
    said, tries = await _ask(session, base, way, patience), 1
    while said.busy and tries * PAUSE < patience:
        await asyncio.sleep(PAUSE)
        said, tries = await _ask(session, base, way, patience), tries + 1
    if said.done is False:
        again = f" (asked {tries} times)" if said.busy else ""
        raise TargetUnreachable(f"target.reset: {base}: {way.endpoint} {said.why}{again}, or leave target.reset out")
    return {
        "url": base, "kind": kind, "endpoint": way.endpoint, "status": said.status, "said": said.text[:KEPT],
        "believed": said.done, "why": said.why or None, "tries": tries, "before": _facts(await scrape(session, base)),
    }  # fmt: skip


def recognised(server: Mapping[str, Any]) -> str:
    """The kind of a server, by what it says of itself. Raises TargetUnreachable, naming the choices, where that is not enough."""
    owner, software = (str(server.get(key) or "").lower() for key in ("owner", "software"))
    for kind, way in RESETS.items():
        if owner in way.owners or any(software.startswith(name) for name in way.software):
            return kind
    told = f"owned_by {owner or 'not told'}, Server header {software or 'not told'}"
    raise TargetUnreachable(f"target.reset: auto does not know {server['url']} ({told}): name one of {', '.join(RESETS)}")


async def _ask(session: aiohttp.ClientSession, base: str, way: Way, patience: Seconds) -> Said:
    async def ask(method: str, path: str) -> Reply:
        async with session.request(method, base + path, allow_redirects=False) as answer:
            return Reply(answer.status, await _text(answer))

    try:
        async with asyncio.timeout(patience):
            return await way.ask(ask)
    except TimeoutError:
        raise TargetUnreachable(f"target.reset: {base}: {way.endpoint} gave no answer within {patience:g} s") from None
    except UNANSWERED as error:
        raise TargetUnreachable(f"target.reset: {base}: {way.endpoint}: {why(error)}") from None


async def _text(answer: aiohttp.ClientResponse) -> str:
    held = bytearray()
    async for part in answer.content.iter_chunked(1 << 16):
        held += part
        if len(held) >= LONG:
            break
    return held.decode("utf-8", "replace").strip()


async def _vllm(ask: Ask) -> Said:
    reply = await ask("POST", "/reset_prefix_cache")
    if reply.status in (404, 405):
        return _refused(reply, f"answers {reply.status}: start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment")
    if reply.status != 200:
        return _refused(reply, _odd(reply))
    return _truth(reply, busy="says that blocks are still held: let the requests of others end")


async def _sglang(ask: Ask) -> Said:
    reply = await ask("POST", "/flush_cache")
    if reply.status == 400:
        return Said(False, 400, reply.text, "answers 400, which is busy: let the requests of others end", busy=True)
    if reply.status != 200:
        return _refused(reply, _odd(reply))
    if reply.text.lower().startswith("cache flushed"):
        return Said(True, 200, reply.text)
    return _truth(reply)


async def _dynamo(ask: Ask) -> Said:
    reply = await ask("POST", "/engine/control/clear_kv_blocks")
    if reply.status in (404, 405):
        reply = await ask("POST", "/clear_kv_blocks")
    if reply.status in (404, 405):
        return _refused(reply, "answers 404, and /clear_kv_blocks too: give the workers' system port (DYN_SYSTEM_PORT) as url")
    if reply.status != 200:
        return _refused(reply, _odd(reply))
    said = reply.fields()
    if "cleared_workers" not in said:
        return _truth(reply)
    cleared, failed = said["cleared_workers"], said.get("failed_workers")
    if failed or not cleared or any(_complains(worker) for worker in cleared):
        return _refused(reply, f"says that not every worker was cleared ({reply.text[:KEPT]}): see the workers' logs")
    return Said(True, 200, reply.text)


def _complains(worker: Any) -> bool:
    """A worker that "was cleared" may still have answered that it could not."""
    inner = worker.get("response") if isinstance(worker, dict) else worker
    return _truth(Reply(200, inner if isinstance(inner, str) else json.dumps(inner))).done is False


async def _llamacpp(ask: Ask) -> Said:
    listed = await ask("GET", "/slots")
    slots = listed.json()
    if listed.status != 200 or not isinstance(slots, list) or not all(_is_slot(slot) for slot in slots):
        return _refused(listed, f"needs GET /slots, which {_odd(listed)}: start llama.cpp with --slots")
    if any(slot.get("is_processing") for slot in slots):
        return Said(False, listed.status, listed.text, "meets busy slots: let the requests of others end", busy=True)
    erased = 0
    for slot in slots:
        reply = await ask("POST", f"/slots/{slot['id']}?action=erase")
        if reply.status == 501:
            return _refused(reply, "answers 501: start llama.cpp with --slot-save-path DIR")
        if reply.status != 200:
            return _refused(reply, _odd(reply))
        said = reply.fields()
        if said.get("id_slot") != slot["id"] or not isinstance(said.get("n_erased"), int):
            return Said(None, 200, reply.text, "answers 200 but does not say how much it erased")
        erased += said["n_erased"]
    return Said(bool(slots), 200, f"{erased} tokens erased in {len(slots)} slots", "" if slots else "finds no slot to erase")


def _is_slot(slot: Any) -> bool:
    return isinstance(slot, dict) and isinstance(slot.get("id"), int)


def _truth(reply: Reply, busy: str = "") -> Said:
    """What the body of a 200 says: success, status or message. `busy`: what a plain "no" means, where it may become a "yes"."""
    said = reply.fields()
    word = str(said.get("status", "")).lower()
    if said.get("success") is True or word in ("success", "ok"):
        return Said(True, reply.status, reply.text)
    if said.get("success") is False and busy:
        return Said(False, reply.status, reply.text, busy, busy=True)
    if said.get("success") is False or said.get("error") or word or "message" in said:
        return _refused(reply, f"answers {reply.status} but says {reply.text[:KEPT]}: see the server's log")
    return Said(None, reply.status, reply.text, f"answers {reply.status}, and its body says neither yes nor no")


def _refused(reply: Reply, why: str) -> Said:
    return Said(False, reply.status, reply.text, why)


def _odd(reply: Reply) -> str:
    text = body_text(reply.text.encode())[:KEPT]
    said = f" ({text})" if text else ""
    return f"answers {reply.status}{said}: see the server's log"


async def scrape(session: aiohttp.ClientSession, base: str) -> Hits | None:
    """The server's prefix-cache counters now; None where it has no /metrics, or no such counters there."""
    try:
        async with session.get(f"{base}/metrics", allow_redirects=False) as answer:
            return read(await _text(answer)) if answer.status == 200 else None
    except UNANSWERED:
        return None


def _facts(found: Hits | None) -> dict[str, Any] | None:
    return {"hits": found.hits, "queries": found.queries, "names": list(found.names)} if found is not None else None


class Proof:
    """Reads the counters once more when FIRST requests have ended ok. `events` then has what they grew by, once."""

    def __init__(self, clock: Clock, servers: Sequence[Mapping[str, Any]], open_: Callable[[], aiohttp.ClientSession]) -> None:
        self.clock, self.servers, self._open = clock, servers, open_
        self._left = FIRST
        self._task: asyncio.Task[None] | None = None
        self._events: list[Event] = []

    def count(self) -> None:
        """A request has ended ok."""
        self._left -= 1
        if not self._left:
            self._task = self.clock.loop.create_task(self._read())

    def events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _read(self) -> None:
        async with self._open() as session:
            now = await asyncio.gather(*(scrape(session, server["url"]) for server in self.servers))
        rows = [self._grown(server, found) for server, found in zip(self.servers, now, strict=True)]
        reasons = [f"{row['url']}: {row['reason']}" for row in rows if row["reason"]]
        totals = {name: sum(row[name] for row in rows) if not reasons else None for name in ("hits", "queries")}
        data = {"requests": FIRST, **totals, "reason": "; ".join(reasons) or None, "servers": rows}
        self._events.append(Event(t=self.clock.now(), kind="reset_check", data=data))

    @staticmethod
    def _grown(server: Mapping[str, Any], found: Hits | None) -> dict[str, Any]:
        before = server["before"]
        row = {"url": server["url"], "after": _facts(found), "hits": None, "queries": None, "reason": None}
        if before is None or found is None:
            return row | {"reason": "no prefix-cache counters in its /metrics"}
        hits, queries = found.hits - before["hits"], found.queries - before["queries"]
        if list(found.names) != before["names"] or hits < 0 or queries <= 0:
            return row | {"reason": "its counters did not count these requests"}
        return row | {"hits": hits, "queries": queries}


RESETS: dict[str, Way] = {
    "vllm": Way("POST /reset_prefix_cache", _vllm, ("vllm",)),
    "sglang": Way("POST /flush_cache", _sglang, ("sglang",)),
    "dynamo": Way("POST /engine/control/clear_kv_blocks", _dynamo, ("nvidia", "dynamo")),
    "llamacpp": Way("POST /slots/{id}?action=erase", _llamacpp, ("llamacpp", "llama.cpp"), ("llama.cpp",)),
}
