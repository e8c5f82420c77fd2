"""The other end of `kvbench agent`: what it says of itself, its clock beside ours, and its fine readings."""

from typing import Any, NamedTuple

import aiohttp
import msgspec

from kvbench.clock import stopwatch
from kvbench.core import Nanos, Seconds
from kvbench.unanswered import why

PATIENCE: Seconds = 5.0  # for an answer
EXCHANGES = 8  # of the clock; the one with the shortest round trip counts
LONG = 256 << 20  # bytes of an answer


class Line(msgspec.Struct):
    """Readings of one device at one time, by the agent's clock; or an event. n: they are numbered without gaps."""

    n: int
    t: float
    labels: dict[str, str] = {}
    values: dict[str, float | None] = {}
    event: dict[str, Any] | None = None


class Bearing(NamedTuple):
    """At `at` of our stopwatch the agent's clock (ns since 1970) was `offset` further, give or take `error`: half of the round
    trip, since nobody knows how it divides (RFC 5905, section 8)."""

    instance: str
    at: Nanos
    offset: Nanos
    error: Nanos


class Peer:
    """One agent at `url`. Everything raises OSError, with a text for the user, where it does not come."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url.rstrip("/")
        self._line = msgspec.json.Decoder(Line)

    async def health(self) -> dict[str, Any]:
        """What it reads, and how. OSError also where something else answers."""
        body, _ = await self._ask("/health", {}, (200, 503))
        try:
            found = msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.DecodeError:
            found = {}
        if not isinstance(found.get("instance"), str):
            raise OSError(f"{self.url} is no kvbench agent: its /health names no instance")
        if not _whole(found):
            raise OSError(f"{self.url}: its /health lacks what a kvbench agent tells; is it one of this version?")
        return found

    async def bearing(self) -> Bearing:
        best: Bearing | None = None
        for _ in range(EXCHANGES):
            found = await self._exchange()
            if best is None or found.error < best.error or found.instance != best.instance:
                best = found
        assert best is not None
        return best

    async def _exchange(self) -> Bearing:
        sent = stopwatch()
        body, came = await self._ask("/time", {}, (200,))
        try:
            told = msgspec.json.decode(body, type=dict[str, Any])
            theirs, instance = int(told["now_ns"]), str(told["instance"])
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, OverflowError):
            raise OSError(f"{self.url}/time is not of a kvbench agent") from None
        return Bearing(instance, (sent + came) // 2, theirs - (sent + came) // 2, (came - sent + 1) // 2)

    async def lines(self, instance: str, since: float, until: float) -> list[bytes]:
        """Those with t in [since, until). OSError where another instance answers."""
        body, _ = await self._ask("/samples", {"since": f"{since:.6f}", "until": f"{until:.6f}"}, (200,), instance)
        return body.splitlines()

    def line(self, raw: bytes) -> Line:
        try:
            return self._line.decode(raw)
        except msgspec.DecodeError as error:
            raise OSError(f"{self.url}/samples: {error}") from None

    async def _ask(self, path: str, query: dict[str, str], good: tuple[int, ...], instance: str = "") -> tuple[bytes, Nanos]:
        """(the body, when its first byte came)."""
        url, patience = f"{self.url}{path}", aiohttp.ClientTimeout(total=PATIENCE)
        try:
            async with self.session.get(url, params=query, timeout=patience, allow_redirects=False) as answer:
                came = stopwatch()
                if answer.status not in good:
                    raise OSError(f"{url} answers {answer.status}")
                if instance and answer.headers.get("X-Instance") != instance:
                    raise OSError(f"{self.url}: the agent was restarted")
                body = bytearray()
                async for part in answer.content.iter_any():
                    body += part
                    if len(body) > LONG:
                        raise OSError(f"{url}: the answer is longer than {LONG >> 20} MiB")
                return bytes(body), came
        except TimeoutError:
            raise OSError(f"{url}: no answer within {PATIENCE:g} s") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise OSError(f"{url}: {why(error)}") from None


def _whole(found: dict[str, Any]) -> bool:
    """Has an answer of /health what the collector reads of it?"""
    numbers = [found.get(name) for name in ("every_s", "keep_s", "started")]
    gpus = found.get("gpus")
    if not isinstance(found.get("status"), str) or not isinstance(gpus, list):
        return False
    if not all(isinstance(number, (int, float)) and 0 < number < 1e12 for number in numbers):
        return False
    return all(isinstance(gpu, dict) and _named(gpu) and isinstance(gpu.get("unsupported"), dict) for gpu in gpus)


def _named(gpu: dict[str, Any]) -> bool:
    return str(gpu.get("gpu")).isdecimal() and isinstance(gpu.get("uuid"), str)
