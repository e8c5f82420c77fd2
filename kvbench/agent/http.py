"""The agent's HTTP server: four pages to read, nothing to write. Nobody that asks can hold up the readings or fill the memory."""

import asyncio
import logging
import math
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from kvbench.agent.agent import Agent
from kvbench.agent.page import TYPE, text
from kvbench.core import Seconds

AT_ONCE = 64  # answers of /samples
CLIENTS = 256  # connections; further ones are closed at once
PART = 256  # lines of /samples in one write
SLOW: Seconds = 10.0  # in which a client takes one
ANSWER: Seconds = 60.0  # in which it takes a whole answer
MUTE: Seconds = 30.0  # in which a connection has asked something, or is closed
PATHS = "/metrics, /samples?since=T&until=T, /time, /health"


class Server:
    """Answers for one agent, once it listens."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._answering = 0
        self._mute: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}  # connections that have not asked yet
        app = web.Application(middlewares=[self._plainly])
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/samples", self._samples)
        app.router.add_get("/time", self._time)
        app.router.add_get("/health", self._health)
        log = logging.Logger("kvbench agent", logging.ERROR)
        log.addHandler(logging.StreamHandler())
        log.addFilter(_ours)
        self._runner = web.AppRunner(
            app, access_log=None, logger=log, handle_signals=False, keepalive_timeout=75.0, shutdown_timeout=1.0
        )
        self._listener: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """The port that is bound. OSError where it cannot be."""
        await self._runner.setup()
        self._listener = await asyncio.get_running_loop().create_server(self._accept, host, port, backlog=CLIENTS)
        return int(self._listener.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()

    def _accept(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        assert server is not None
        if len(server.connections) >= CLIENTS:
            return _Full()
        made = server()
        self._mute[made] = asyncio.get_running_loop().call_later(MUTE, self._close_mute, made)
        return made

    def _close_mute(self, connection: Any) -> None:
        """aiohttp waits for a first request for ever."""
        self._mute.pop(connection, None)
        if connection.transport is not None:
            connection.transport.abort()

    @web.middleware
    async def _plainly(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """What there is, where something else is asked for."""
        waiting = self._mute.pop(request.protocol, None)
        if waiting is not None:
            waiting.cancel()
        try:
            return await handler(request)
        except web.HTTPNotFound:
            raise web.HTTPNotFound(text=f"there are {PATHS}") from None

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=text(self.agent.rows()), headers={"Content-Type": TYPE})

    async def _time(self, _: web.Request) -> web.Response:
        """When the question came, in ns since 1970 by the clock of the stamps, and whose clock that is."""
        return _json({"instance": self.agent.instance, "now_ns": self.agent.now_ns})

    async def _health(self, _: web.Request) -> web.Response:
        told = self.agent.told()
        return _json(told, 200 if told["status"] == "ok" else 503)

    async def _samples(self, request: web.Request) -> web.StreamResponse:
        """The ring's lines with since <= t < until, in parts that a client has to take within SLOW seconds."""
        odd = sorted(set(request.query) - {"since", "until"})
        if odd:
            raise web.HTTPBadRequest(text=f"{odd[0][:40]!r} is not known here: since and until are, in seconds since 1970")
        since, until = _instant(request, "since", 0.0), _instant(request, "until", math.inf)
        if until < since:
            raise web.HTTPBadRequest(text="until is before since")
        if self._answering >= AT_ONCE:
            raise web.HTTPServiceUnavailable(
                text=f"{AT_ONCE} clients are being answered: try again", headers={"Retry-After": "1"}
            )
        self._answering += 1
        try:
            return await self._lines(request, self.agent.ring.between(since, until))
        finally:
            self._answering -= 1

    async def _lines(self, request: web.Request, lines: list[bytes]) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "X-Instance": self.agent.instance})
        try:
            await answer.prepare(request)
            async with asyncio.timeout(ANSWER):
                for at in range(0, len(lines), PART):
                    async with asyncio.timeout(SLOW):
                        await answer.write(b"".join(lines[at : at + PART]))
                await answer.write_eof()
        except ConnectionError:
            pass  # it left in the middle of its answer
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        return answer


class _Full(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _ours(record: logging.LogRecord) -> bool:
    """Not what is wrong with a request, or with whoever sent it: a scan of the port must not fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (HttpProcessingError, ConnectionError))


def _instant(request: web.Request, name: str, otherwise: float) -> float:
    """Seconds since 1970, finite."""
    given = request.query.getall(name, [])
    if not given:
        return otherwise
    try:
        value = float(given[0])
    except ValueError:
        value = math.nan
    if len(given) > 1 or not math.isfinite(value):
        raise web.HTTPBadRequest(
            text=f"{name}={given[0][:40]!r} is not an instant: write seconds since 1970, such as 1764489600.5"
        )
    return value


def _json(found: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(found), status=status, content_type="application/json")
