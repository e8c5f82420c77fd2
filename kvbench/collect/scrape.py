"""One server's /metrics page over aiohttp, off the send path: awaited, and read in parts that each hold the loop briefly."""

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp

from kvbench.clock import Clock, stopwatch
from kvbench.collect.exposition import NotAPageError, Page, Reader
from kvbench.core import Nanos, Seconds
from kvbench.unanswered import why

Headers = Mapping[str, str]

SLICE: Nanos = 250_000  # of work between two turns of the loop
LONG = 1 << 26  # bytes of a page that are read
PATHS = ("/metrics", "/prometheus/metrics")
UNANSWERED = (aiohttp.ClientError, OSError, TimeoutError)
HEADERS = {"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity", "User-Agent": "kvbench"}


class NoPageError(OSError):
    """Something answers, but not with a page of metrics."""


class Scraped(NamedTuple):
    """A page as it was at `at`, halfway between request and answer, which lie `took` apart. `held`: the longest that reading it
    kept the loop from anything else."""

    page: Page
    at: Seconds
    took: Seconds
    held: Seconds


class Scrape:
    """One page, asked for with `headers`."""

    def __init__(self, session: aiohttp.ClientSession, url: str, clock: Clock, patience: Seconds, headers: Headers) -> None:
        self.session, self.url, self.clock, self.patience, self.headers = session, url, clock, patience, headers

    async def fetch(self) -> list[bytes]:
        """The page as it comes. Raises OSError, with a text for the user; NoPageError where something else was answered."""
        try:
            async with asyncio.timeout(self.patience), self._ask() as answer:
                if answer.status != 200:
                    raise NoPageError(f"{self.url} answers {answer.status}")
                found = await parts(answer, LONG)
                if (
                    found
                    and not found[-1].endswith(b"\n")
                    and not {"Content-Length", "Transfer-Encoding"} & answer.headers.keys()
                ):
                    raise OSError(
                        f"{self.url}: the page was cut off in a line"
                    )  # a number of which digits are missing is a number
                return found
        except TimeoutError:
            raise OSError(f"{self.url}: no page within {self.patience:g} s") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise OSError(f"{self.url}: {why(error)}") from None

    async def read(self, reader: Reader) -> Scraped:
        """The same, read."""
        asked = self.clock.now()
        body = await self.fetch()
        came = self.clock.now()
        page = Page()
        try:
            held = await unhurried(reader.reading(body, page))
        except NotAPageError as error:
            raise NoPageError(f"{self.url}: {error}") from None
        return Scraped(page, (asked + came) / 2, came - asked, held)

    def _ask(self) -> Any:
        return self.session.get(self.url, allow_redirects=False, headers={**self.headers, **HEADERS})


async def unhurried(work: Iterator[None]) -> Seconds:
    """Do work that comes in parts, with a turn of the loop after each SLICE; returns the longest time without one."""
    began, longest = stopwatch(), 0
    for _ in work:
        held = stopwatch() - began
        if held > SLICE:
            longest = max(longest, held)
            await asyncio.sleep(0)
            began = stopwatch()
    return max(longest, stopwatch() - began) / 1e9


def candidates(url: str, owner: str) -> list[str]:
    """Where the page may be: at `url` itself, or under a server's base. owner: what its /v1/models says owns its models.

    TensorRT-LLM's /metrics is emptied by whoever reads it, and is no such page: its other path is asked first.
    """
    base = url.rstrip("/")
    if base.endswith("/metrics"):
        return [base]
    paths = PATHS[::-1] if "tensorrt" in owner.lower() else PATHS
    return [base + path for path in paths]


async def find(scrapes: Sequence[Scrape], names: Collection[str]) -> tuple[Scrape, Reader, Page]:
    """The first of these that gives a page with one of `names` on it, and its reader. Raises OSError with what was tried."""
    told = []
    for scrape in scrapes:
        reader = Reader(names)
        try:
            page = (await scrape.read(reader)).page
        except OSError as error:
            told.append(str(error))
        else:
            if page.rows or any(page.has(name) for name in names):
                return scrape, reader, page
            told.append(f"{scrape.url} shows no metric that is known (kvbench metrics {scrape.url})")
    raise OSError("; ".join(told))


async def parts(answer: aiohttp.ClientResponse, most: int) -> list[bytes]:
    """A body as it comes. OSError where it is longer than `most` bytes."""
    found: list[bytes] = []
    size = 0
    async for part in answer.content.iter_chunked(1 << 14):
        found.append(part)
        size += len(part)
        if size > most:
            raise OSError(f"{answer.url}: the answer is longer than {most >> 20} MiB")
    return found
