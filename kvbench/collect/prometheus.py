"""What servers count and gauge on their /metrics pages, read every so often on the run's clock, under one set of names."""

import asyncio
import ssl
from collections.abc import Iterator, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvbench.clock import stopwatch
from kvbench.collect import Collector, CollectorError, Emit, Place
from kvbench.collect.beat import Beat
from kvbench.collect.exposition import Page, Reader
from kvbench.collect.fleet import Fleet, Reading
from kvbench.collect.scrape import Scrape, Scraped, candidates, find, unhurried
from kvbench.collect.servers import MEANINGS, known
from kvbench.collect.settings import asked, configured
from kvbench.core import Event, Sample, Seconds, Window
from kvbench.units import Span

Url = Annotated[str, Field(pattern=r"^https?://[^/\s?#@]+(/[^\s?#@]*)?$")]
SETTLING: Seconds = 0.2  # between the last readings: until counters stand still, at most AGAIN times
AGAIN = 5
PATIENCE: Seconds = 5.0  # for a page


class Prometheus(BaseModel):
    """A server's /metrics page: KV usage, queue, hits, preemptions, tokens, latencies as it sees them; an exporter's too."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    url: Url | None = Field(None, description="a page, or a server that has one at /metrics or /prometheus/metrics; the target")
    urls: Annotated[list[Url], Field(min_length=1, max_length=1000)] | None = Field(None, description="several, joined into one")
    every: Span = Field(1.0, ge=0.1, description="how often it is read")
    timeout: Span = Field(PATIENCE, le=PATIENCE, description="how long a page may take, at most 5s")
    ca_file: str | None = Field(None, description="certificates to trust, in place of the system's")
    required: bool = Field(False, description="true: losing it makes the run invalid")

    @model_validator(mode="after")
    def _one_way(self) -> "Prometheus":
        if self.url is not None and self.urls is not None:
            raise ValueError("write either url or urls")
        return self

    def addresses(self, place: Place) -> list[str]:
        return list(self.urls or ([self.url] if self.url else place.urls))

    def build(self, place: Place) -> Collector:
        return PrometheusCollector(self, place)


class PrometheusCollector:
    """Samples of each engine with labels, and of all of them without; what it all came to is told at the end (state: totals)."""

    source = "prometheus"

    def __init__(self, spec: Prometheus, place: Place) -> None:
        self.spec, self.place, self.clock, self.required = spec, place, place.clock, spec.required
        self.beat = Beat(self.source, place.clock, spec.every, self._read)
        self.held: Seconds = 0.0  # the longest that a reading kept the loop
        self.slowest: Seconds = 0.0  # the longest that a page took to come
        self._started = False
        self._session: aiohttp.ClientSession | None = None
        self._scrapes: list[Scrape] = []
        self._readers: list[Reader] = []
        self._opened = 0  # by the stopwatch
        self._before: Seconds = 0.0  # how long before the run's start the first pages were read
        self._last: Seconds = 0.0

    async def open(self) -> dict[str, Any]:
        """Find each page and read it: what it says now is what the run's counts begin with."""
        addresses = self.spec.addresses(self.place)
        if not addresses:
            raise CollectorError("there is no server to ask: give `url`, a page of metrics or a server that has one")
        self._session = session(self.spec.ca_file)
        found, failed = await search(self._session, addresses, self.place, self.spec.timeout)
        if failed:
            raise CollectorError(failed)
        self._scrapes, self._readers = [scrape for scrape, _, _ in found], [reader for _, reader, _ in found]
        pages = [page for _, _, page in found]
        self.fleet = Fleet([urlsplit(scrape.url).netloc for scrape in self._scrapes])
        self._opened = stopwatch()
        for number, page in enumerate(pages):
            await unhurried(self.fleet.take(number, page))
        told = await asyncio.gather(*(self._facts(number, page) for number, page in enumerate(pages)))
        gives = sorted({meaning for source in self.fleet.sources for meaning in source})
        return {"every": self.spec.every, "pages": told, "gives": gives, "not_exposed": self.fleet.missing()}

    async def _facts(self, number: int, page: Page) -> dict[str, Any]:
        """What one page is of, what it calls what we know, and how the server is set up."""
        scrape, found = self._scrapes[number], self.fleet.sources[number]
        kinds = {source.server for source in found.values()}
        base = scrape.url.removesuffix("/metrics").removesuffix("/prometheus")
        assert self._session is not None
        return {
            "url": scrape.url, "kinds": sorted(kinds), "bytes": page.size, "series": sum(map(len, page.rows.values())),
            "names": {meaning: list(source.way.names()) for meaning, source in found.items()},
            "instantaneous": [meaning for meaning in found if MEANINGS[meaning].instant],
            "engines": configured(page), "settings": await asked(self._session, base, scrape.headers, kinds),
        }  # fmt: skip

    def start(self, emit: Emit) -> None:
        self.emit, self._started = emit, True
        self._before = (stopwatch() - self._opened) / 1e9
        for metric in self.fleet.missing():
            emit(Sample(t=self.clock.now(), name=metric, value=None, source=self.source))
            self._say("unsupported", metric=metric, reason="not exposed by the server")
        for reading in self.fleet.readings():
            if reading.name in MEANINGS and MEANINGS[reading.name].kind == "counter":
                self._sample(reading, 0.0)
        self.beat.start(emit)

    def tell(self, item: Event | Window) -> None:
        return

    async def stop(self) -> None:
        """The last pages, once the server has counted what it answered; what everything came to; and the connections closed."""
        if self._session is None:
            return
        if self._started:
            await self.beat.stop()
            await self._settle()
            self._totals()
        open_, self._session = self._session, None
        await open_.close()

    async def _settle(self) -> None:
        """Read on until no counter moves any more: a server counts a request a little after it has answered it."""
        for _ in range(AGAIN if self.beat.answering else 0):
            before = self.fleet.joined("finished_total"), self.fleet.joined("generation_tokens_total")
            await asyncio.sleep(SETTLING)
            try:
                await self._read()
            except OSError:
                return
            if before == (self.fleet.joined("finished_total"), self.fleet.joined("generation_tokens_total")):
                return

    async def _read(self) -> None:
        """Every page at once. Raises OSError where one did not come: the others' engines are told, and nothing of all of them."""
        pairs = zip(self._scrapes, self._readers, strict=True)
        found = await asyncio.gather(*(scrape.read(reader) for scrape, reader in pairs), return_exceptions=True)
        came: dict[int, Scraped] = {}
        for number, scraped in enumerate(found):
            if isinstance(scraped, Scraped):
                came[number] = scraped
                self.held = max(self.held, scraped.held, await unhurried(self.fleet.take(number, scraped.page)))
                self.slowest = max(self.slowest, scraped.took)
        if came:
            self.held = max(self.held, await unhurried(self._tell(came)))
        for failure in found:
            if isinstance(failure, BaseException):
                raise failure
        self._last = max(scraped.at for scraped in came.values())

    def _tell(self, came: dict[int, Scraped]) -> Iterator[None]:
        """Emit what the pages say, each at its own time, and what all of them come to at the mean of these."""
        whole = len(came) == len(self._scrapes)
        middle = sum(scraped.at for scraped in came.values()) / len(came)
        for number, scraped in came.items():
            labels = {"server": self.fleet.labels.servers[number]}
            self.emit(Sample(t=scraped.at, name="scrape_s", value=scraped.took, source=self.source, labels=labels))
        for reading in self.fleet.readings():
            if reading.server in came:
                self._sample(reading, came[reading.server].at)
            elif reading.server < 0 and (whole or reading.labels):
                self._sample(reading, middle)
            yield
        events, self.fleet.events = self.fleet.events, []
        for data in events:
            self._say(**data)

    def _sample(self, reading: Reading, at: Seconds) -> None:
        self.emit(Sample(t=at, name=reading.name, value=reading.value, source=self.source, labels=reading.labels))

    def _totals(self) -> None:
        """What the run came to by the servers' counters: from before its first request to after its last answer."""
        told = {"complete": self.beat.answering, "scrape_max_s": self.slowest, "loop_held_max_s": self.held}
        self._say("totals", start=-self._before, end=self._last, metrics=self.fleet.totals(), **told)

    def _say(self, state: str, **data: Any) -> None:
        self.emit(Event(t=self.clock.now(), kind="collector", data={"source": self.source, "state": state, **data}))


def session(ca_file: str | None) -> aiohttp.ClientSession:
    """Raises CollectorError where the certificates cannot be used."""
    try:
        tls = ssl.create_default_context(cafile=ca_file) if ca_file else True
    except OSError as error:
        raise CollectorError(f"ca_file: {ca_file!r} cannot be used: {error}") from None
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls), timeout=aiohttp.ClientTimeout(total=PATIENCE))


async def search(
    asking: aiohttp.ClientSession, addresses: Sequence[str], place: Place, patience: Seconds
) -> tuple[list[tuple[Scrape, Reader, Page]], str]:
    """The pages at these addresses, in their order, all asked at once; and what is wrong with those that have none."""
    tries = [find(attempts(asking, address, place, patience), known()) for address in addresses]
    found = await asyncio.gather(*tries, return_exceptions=True)
    failed = []
    for each in found:
        if isinstance(each, OSError):
            failed.append(str(each))
        elif isinstance(each, BaseException):
            raise each
    return [each for each in found if not isinstance(each, BaseException)], "; ".join(failed)


def attempts(asking: aiohttp.ClientSession, address: str, place: Place, patience: Seconds) -> list[Scrape]:
    """Where a page may be at `address`. The target's headers hold its key: nobody else is shown them."""
    servers = {str(server["url"]): server for server in place.facts.get("servers") or ()}
    base = next((url for url in (*place.urls, *servers) if f"{address}/".startswith(f"{url.rstrip('/')}/")), None)
    owner = str(servers.get(base or "", {}).get("owner") or "")
    headers = place.headers if base is not None else {}
    return [Scrape(asking, url, place.clock, patience, headers) for url in candidates(address, owner)]


async def usual(place: Place, ca_file: str | None) -> tuple[Prometheus | None, str]:
    """The collector of a target for which none was asked: of those of its servers that show metrics; and what of the others."""
    async with session(ca_file) as asking:
        there, failed = await search(asking, place.urls, place, PATIENCE)
    pages = [scrape.url for scrape, _, _ in there]
    found = Prometheus.model_validate({"urls": pages, "ca_file": ca_file}) if pages else None
    return found, failed
