"""The server: routes, and what each of them says. One engine, one port."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from kvbench import __version__
from kvbench.clock import Clock
from kvbench.core import Seconds
from kvbench.engine import Machine, Span
from kvbench.serve import Tokens, asks, shapes
from kvbench.serve.asks import RefusedError, Said
from kvbench.serve.content import Contents
from kvbench.serve.events import Ledger, Publisher
from kvbench.serve.http import Asked, Connection
from kvbench.serve.kept import Kept
from kvbench.serve.pacing import Pace
from kvbench.serve.page import Page
from kvbench.serve.replies import Replies, Reply

BUSY = {  # why a request is turned away for now, or for good
    "refused": "Requests are refused at present (a fault of the scenario). Try again later.",
    "full": "The queue is full. Try again later.",
}
NEVER = {
    "empty": "Prompt and answer have at least one token each.",
    "context_too_long": "Prompt and answer are longer than the model's context.",
    "kv_too_small": "Prompt and answer need more KV blocks than there are.",
}


class TokenizeBody(msgspec.Struct):
    model: str | None = None
    prompt: str | None = None
    messages: list[Said] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


@dataclass(frozen=True)
class Feed:
    """KV events: what is heard of each replica, and where it goes."""

    ledgers: list[Ledger]
    publisher: Publisher


class Server:
    """`machine` behind HTTP, at `speed` times real time. `feed`: KV events, where they are wanted; its ledgers hear the
    engine's tapes.

    Nothing listens before `listen`; `close` ends every connection.
    """

    def __init__(
        self, machine: Machine, clock: Clock, tokens: Tokens, model: str, speed: float = 1.0, feed: Feed | None = None,
        kept: Kept | None = None,
    ) -> None:  # fmt: skip
        facts = machine.facts()
        self.machine, self.clock, self.tokens, self.model, self.feed, self.kept = machine, clock, tokens, model, feed, kept
        self.limit: int = facts["max_context"]
        self.contents = Contents(facts["block_tokens"])
        self.page = Page(machine, model, facts, clock.wall)
        self.replies = Replies(machine, self.contents, tokens, self.page, speed)
        self.pace = Pace(machine, clock, speed, self._deliver, self._settled)
        self._alive: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._routes: dict[str, tuple[str, Callable[[Asked, Connection], None]]] = {
            "/v1/chat/completions": ("POST", lambda asked, to: self._complete("chat", asked, to)),
            "/v1/completions": ("POST", lambda asked, to: self._complete("completions", asked, to)),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/reset_prefix_cache": ("POST", self._reset),
            "/v1/models": ("GET", self._models),
            "/version": ("GET", lambda _, to: self._say(to, {"version": __version__})),
            "/load": (
                "GET",
                lambda _, to: self._say(to, {"server_load": len({id(one[0]) for one in self.replies.live.values()})}),
            ),
            "/health": ("GET", lambda _, to: to.respond(200, b"")),
            "/ping": ("GET", lambda _, to: to.respond(200, b"")),
            "/metrics": ("GET", self._metrics),
        }

    async def listen(self, host: str, port: int) -> int:
        """Serve from now on. Returns the port, which is the system's choice where 0 is asked for. OSError where it is taken."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self._serve, self._alive, self._answered), host, port, backlog=4096
        )
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self._alive):
            connection.transport.abort()
        self.pace.close()
        self.machine.close()
        if self.kept is not None:
            self.kept.close()
        if self.feed is not None:
            self.feed.publisher.close()

    def _serve(self, asked: Asked, to: Connection) -> None:
        method, handler = self._routes.get(asked.path, ("", None))
        if handler is None:
            to.respond(404, b'{"detail":"Not Found"}')
        elif asked.method != method and (asked.path, asked.method) != ("/ping", "POST"):
            to.respond(405, b'{"detail":"Method Not Allowed"}', headers={"allow": method})
        else:
            try:
                handler(asked, to)
            except RefusedError as error:
                to.respond(error.status, error.body())

    def _answered(self, asked: Asked, status: int) -> None:
        self.page.asked(asked.path if asked.path in self._routes else "none", asked.method, status)

    def _say(self, to: Connection, said: Any) -> None:
        to.respond(200, msgspec.json.encode(said))

    def _complete(self, api: Literal["chat", "completions"], asked: Asked, to: Connection) -> None:
        ask = asks.read(api, asked.body, self.tokens, self.model, self.limit)
        salt = int.from_bytes(hashlib.blake2b(ask.salt.encode(), digest_size=7).digest(), "big") if ask.salt else 0
        parts = [self.replies.job(ask, ids, salt) for ids in ask.prompts]
        kind = "chatcmpl" if api == "chat" else "cmpl"
        head = shapes.Head(api, f"{kind}-{parts[0].job.id:016x}", int(self.clock.wall + self.clock.now()), self.model)
        now = self.pace.pump()
        try:
            for at, part in enumerate(parts):
                if self.feed is not None:
                    answers = [(one.key, one.ids) for one in part.choices]
                    for ledger in self.feed.ledgers:
                        ledger.watch(part.job, ask.prompts[at], answers, ask.salt)
                why = self.machine.submit(part.job, now)
                if why is not None:
                    for before in parts[:at]:
                        self.machine.cancel(before.job.id, now)
                    self._forget([one.job.id for one in parts])
                    raise self._turned_away(why)
            reply = Reply(ask, head, to, round(now * 1e9), parts)
            to.gone = lambda: self._gone(reply)
            self.replies.enter(reply)
        finally:
            self.pace.arm()

    def _turned_away(self, why: str) -> RefusedError:
        if why == "full":
            self.page.refused()
        if why in BUSY:
            return RefusedError(503, "Service Unavailable", BUSY[why])
        return RefusedError(400, "BadRequestError", NEVER[why])

    def _gone(self, reply: Reply) -> None:
        self.replies.drop(reply, self.pace.pump())
        self._forget([part.job.id for part in reply.parts])
        self.pace.arm()

    def _deliver(self, spans: list[Span], now: Seconds) -> None:
        failed = self.replies.deliver(spans, now)
        self._forget([done.id for span in spans for done in span.done] + [part.job.id for one in failed for part in one.parts])

    def _forget(self, jobs: Sequence[int]) -> None:
        """These are over: no block of theirs will be stored any more."""
        for ledger in self.feed.ledgers if self.feed is not None else ():
            for job in jobs:
                ledger.forget(job)

    def _settled(self) -> None:
        """All spans of a moment are with their replies: write, and tell the KV events."""
        self.replies.flush()
        if self.kept is not None:
            self.kept.write()
        if self.feed is not None:
            for rank, ledger in enumerate(self.feed.ledgers):
                for at, events in ledger.take():
                    self.feed.publisher.publish(self.clock.wall + self.pace.shown(at), events, rank)

    def _tokenize(self, asked: Asked, to: Connection) -> None:
        body = asks.decoded(asked.body, TokenizeBody)
        asks.known(body.model, self.model)
        ids = asks.written(body.messages, self.tokens) if body.prompt is None else self.tokens.encode(body.prompt)
        texts = [self.tokens.decode([token]) for token in ids] if body.return_token_strs else None
        self._say(to, {"count": len(ids), "max_model_len": self.limit, "tokens": ids, "token_strs": texts})

    def _detokenize(self, asked: Asked, to: Connection) -> None:
        body = asks.decoded(asked.body, DetokenizeBody)
        asks.known(body.model, self.model)
        try:
            self._say(to, {"prompt": self.tokens.decode(body.tokens)})
        except ValueError as error:
            raise asks.bad("tokens", str(error)) from None

    def _reset(self, _: Asked, to: Connection) -> None:
        done = self.machine.reset(self.pace.pump())
        self._settled()
        self.pace.arm()
        self._say(to, {"success": done})

    def _models(self, _: Asked, to: Connection) -> None:
        created = int(self.clock.wall)
        permission = {
            "id": "modelperm-kvbench", "object": "model_permission", "created": created, "allow_create_engine": False,
            "allow_sampling": True, "allow_logprobs": False, "allow_search_indices": False, "allow_view": True,
            "allow_fine_tuning": False, "organization": "*", "group": None, "is_blocking": False,
        }  # fmt: skip
        model = {"id": self.model, "object": "model", "created": created, "owned_by": "vllm", "root": self.model, "parent": None,
                 "max_model_len": self.limit, "permission": [permission]}  # fmt: skip
        self._say(to, {"object": "list", "data": [model]})

    def _metrics(self, _: Asked, to: Connection) -> None:
        self.pace.pump()
        self.pace.arm()
        to.respond(200, self.page.text(), CONTENT_TYPE_LATEST)
