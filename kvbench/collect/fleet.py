"""Pages of one or several servers into readings: each engine's by its labels, and one of all that goes into windows.

Counters are followed per series, so that the restart of one engine is no loss of the others' counts; their joined value never
falls. What a server does not have is missing, never 0.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvbench.collect.exposition import Labels, Page, Row
from kvbench.collect.labels import Labeller, Spot
from kvbench.collect.series import INF, LARGEST, SUM, Buckets, Track, described, whole
from kvbench.collect.servers import EXPECTED, MEANINGS, SERVERS, Way

APART = 256  # engines or devices that are told of one by one: a page of a hundred thousand must not fill the disk
FULLEST = "kv_usage_fullest"  # beside the mean: what an engine that is alone in its trouble shows

Series = tuple[str, Spot]
Happened = tuple[str, Labels]
"""(reset | appeared | gone, engine)"""


class Reading(NamedTuple):
    """A meaning's value, of one engine or device by its labels; of all of them without (server: -1)."""

    name: str
    value: float | None
    labels: dict[str, str]
    server: int = -1


class Source(NamedTuple):
    """Where a page has a meaning: by which server's map, in which way."""

    server: str
    way: Way


def sources(page: Page) -> dict[str, Source]:
    """What a page says, by meaning: the first server of the map, and the newest of its names, that the page has. Series go before
    a mere declaration: a counter with labels has none before it first counts."""
    found: dict[str, Source] = {}
    for server, meanings in SERVERS.items():
        for meaning, ways in meanings.items():
            way = next((way for way in ways if _has_series(meaning, way, page)), None)
            if way is None and MEANINGS[meaning].kind == "counter":
                way = next((way for way in ways if all(page.has(name) for name in way.names())), None)
            if way is not None:
                found.setdefault(meaning, Source(server, way))
    return found


def _has_series(meaning: str, way: Way, page: Page) -> bool:
    if MEANINGS[meaning].kind == "histogram":
        return f"{way.add[0]}_count" in page.rows
    return all(name in page.rows for name in way.names())


class Fleet:
    """The readings of `servers`, by names that tell them apart.

    `events`: what happened to the series since it was last emptied, as data of collector events.
    """

    def __init__(self, servers: Sequence[str]) -> None:
        self.labels = Labeller(list(servers))
        self.events: list[dict[str, Any]] = []
        self.sources: list[dict[str, Source]] = [{} for _ in servers]
        self._gauges: dict[tuple[int, str], dict[Labels, float | None]] = {}
        self._counters: dict[tuple[int, str], dict[Series, Track]] = {}
        self._factors: dict[tuple[int, str], float] = {}
        self._histograms: dict[tuple[int, str], dict[Spot, Buckets]] = {}
        self._read = [False for _ in servers]
        self._kinds: list[set[str]] = [set() for _ in servers]  # whose names were read on its pages
        self._told: dict[tuple[str, tuple[tuple[str, str], ...]], bool] = {}  # what was told of: had it a value?
        self._warned: set[str] = set()

    def take(self, server: int, page: Page) -> Iterator[None]:
        """The next page of a server, in parts."""
        self.sources[server] = found = sources(page)
        yield
        happened: dict[Happened, list[str]] = {}
        for meaning, of in MEANINGS.items():
            # new series began with the run's first page or since then; those of a page of another kind may have counted for long
            before = self._kinds[server]
            since = self._read[server] and (not before or meaning not in found or found[meaning].server in before)
            key, way = (server, meaning), found[meaning].way if meaning in found else None
            if way is not None and way.times and not _factors(way, page):
                way = None  # blocks of an unknown size
            if of.kind == "gauge":
                self._gauges.pop(key, None)
                if way is not None:
                    self._gauges[key] = self._gauge(meaning, way, page)
            elif way is not None or key in self._counters or key in self._histograms:
                follow = self._counter if of.kind == "counter" else self._histogram
                for each in follow(server, meaning, way or Way(()), page, since):
                    happened.setdefault(each, []).append(meaning)
            yield
        for (state, engine), metrics in happened.items():
            told = {"state": state, "labels": self.labels.shown(server, engine), "server": self.labels.servers[server]}
            self.events.append(told | {"metrics": metrics, "reason": _WHY[state]})
        self._read[server] = True
        self._kinds[server] |= {source.server for source in found.values()}

    def _gauge(self, meaning: str, way: Way, page: Page) -> dict[Labels, float | None]:
        """By engine. Of the series of several processes (pid) the live one counts, which has the largest value."""
        tops, bottoms = (self._sums(meaning, names, way, page) for names in (way.add, way.over))
        found: dict[Labels, float | None] = {}
        for engine, top in tops.items():
            bottom = bottoms.get(engine) if way.over else 1.0
            value = top / bottom * way.scale if bottom else None
            if value is not None and not _possible(value, MEANINGS[meaning].unit):
                self._out_of_range(meaning, value)
                value = None
            found[engine] = value
        return found

    def _sums(self, meaning: str, names: Sequence[str], way: Way, page: Page) -> dict[Labels, float]:
        largest: dict[tuple[str, Labels, Labels], float] = {}
        for name in names:
            for row in page.rows.get(name, ()):
                if _counts(way, row):
                    spot, _ = self.labels.spot(meaning, row.labels)
                    key = name, spot.engine, spot.part
                    largest[key] = row.value if key not in largest else max(largest[key], row.value)
        found: dict[Labels, float] = {}
        for (_, engine, _), value in largest.items():
            found[engine] = found.get(engine, 0.0) + value
        return found

    def _counter(self, server: int, meaning: str, way: Way, page: Page, since: bool) -> list[Happened]:
        """since: a series that is new has counted since the page before, from 0."""
        now: dict[Series, float] = {}
        for name in way.add:
            for row in page.rows.get(name, ()):
                if _counts(way, row) and 0 <= row.value < LARGEST:
                    series = name, self.labels.spot(meaning, row.labels)[0]
                    now[series] = max(now.get(series, 0.0), row.value)
        if way.add:
            self._factors[server, meaning] = way.scale * (_factors(way, page)[0] if way.times else 1.0)
        tracks = self._counters.setdefault((server, meaning), {})
        happened: dict[Happened, None] = {}
        engines = {spot.engine for _, spot in tracks}
        for series, value in now.items():
            engine = series[1].engine
            if series not in tracks:
                tracks[series] = Track(0.0 if since else value)
                if self._read[server] and engine not in engines:
                    happened["appeared", engine] = None
            if tracks[series].read(value):
                happened["reset", engine] = None
        return [*happened, *_gone([(spot, track) for (name, spot), track in tracks.items() if (name, spot) not in now])]

    def _histogram(self, server: int, meaning: str, way: Way, page: Page, since: bool) -> list[Happened]:
        now: dict[Spot, dict[float, float]] = {}
        for name in way.add:
            for row in page.rows.get(f"{name}_bucket", ()):
                spot, edge = self.labels.spot(meaning, row.labels)
                if edge == edge:
                    now.setdefault(spot, {})[edge] = row.value
            for row in page.rows.get(f"{name}_count", ()):
                now.setdefault(self.labels.spot(meaning, row.labels)[0], {}).setdefault(INF, row.value)
            for row in page.rows.get(f"{name}_sum", ()):
                now.setdefault(self.labels.spot(meaning, row.labels)[0], {})[SUM] = row.value
        series = self._histograms.setdefault((server, meaning), {})
        happened: dict[Happened, None] = {}
        now = {spot: counts for spot, counts in now.items() if whole(counts, series[spot].last if spot in series else {})}
        for spot, counts in now.items():
            if spot not in series:
                series[spot] = Buckets(None if since else counts)
            if series[spot].read(counts):
                happened["reset", spot.engine] = None
        return [*happened, *_gone([(spot, each) for spot, each in series.items() if spot not in now])]

    # ---- what is told

    def readings(self) -> Iterator[Reading]:
        """What the latest pages say, of each engine, then of all. What has no value is told so once."""
        told: dict[tuple[str, tuple[tuple[str, str], ...]], bool] = {}
        for meaning, of in MEANINGS.items():
            engines = None if of.kind == "histogram" else self._engines(meaning)
            if engines is None:
                continue
            found = [*(each for each in engines[:APART] if each.labels), Reading(meaning, self.joined(meaning), {})]
            if meaning == "kv_usage" and len(engines) > 1:
                found.append(Reading(FULLEST, max((each.value for each in engines if each.value is not None), default=None), {}))
            for reading in found:
                key = meaning if reading.labels else reading.name, tuple(reading.labels.items())
                told[key] = reading.value is not None
                if reading.value is not None or self._told.get(key, True):
                    yield reading
        for (name, labels), valued in self._told.items():
            if (name, labels) not in told:
                told[name, labels] = False
                if valued:
                    yield Reading(name, None, dict(labels))
        self._told = told

    def _engines(self, meaning: str) -> list[Reading] | None:
        """Each engine on the latest pages; None where no server has this meaning, nor had it before."""
        values: dict[tuple[int, Labels], float | None] = {}
        kept: Mapping[tuple[int, str], Any] = self._gauges if MEANINGS[meaning].kind == "gauge" else self._counters
        if not any(of == meaning for _, of in kept):
            return None
        for (server, of), gauges in self._gauges.items():
            if of == meaning:
                values |= {(server, engine): value for engine, value in gauges.items()}
        for (server, of), tracks in self._counters.items():
            for (_, spot), track in tracks.items():
                if of == meaning and track.here:
                    grown = track.last * self._factors[server, meaning]
                    values[server, spot.engine] = (values.get((server, spot.engine)) or 0.0) + grown
        return [Reading(meaning, value, self.labels.shown(server, engine), server) for (server, engine), value in values.items()]

    def joined(self, meaning: str) -> float | None:
        """All engines' value. A counter's is what it was at its first reading and what has come since: it never falls."""
        if MEANINGS[meaning].kind == "counter":
            return self._total(meaning, lambda track: track.base + track.grown)
        values = [v for (_, of), engines in self._gauges.items() if of == meaning for v in engines.values() if v is not None]
        if not values:
            return None
        join = MEANINGS[meaning].join
        return max(values) if join == "max" else sum(values) / (len(values) if join == "mean" else 1)

    def _total(self, meaning: str, value: Any) -> float | None:
        """None where every series has left the pages. One that is declared and has not counted yet is at 0."""
        mine = {server: list(tracks.values()) for (server, of), tracks in self._counters.items() if of == meaning}
        if not mine or (any(mine.values()) and not any(track.here for tracks in mine.values() for track in tracks)):
            return None
        return float(sum(self._factors[server, meaning] * sum(map(value, tracks)) for server, tracks in mine.items()))

    def names(self, meaning: str) -> list[str]:
        """What the servers call it."""
        ways = [source[meaning].way for source in self.sources if meaning in source]
        return list(dict.fromkeys(name for way in ways for name in way.names()))

    def missing(self) -> list[str]:
        """What an inference server is expected to tell and none of these does; nothing where there are only devices."""
        told = {meaning for source in self.sources for meaning in source}
        served = any(not meaning.startswith("gpu_") for meaning in told)
        return [meaning for meaning in EXPECTED if meaning not in told] if served else []

    def totals(self) -> dict[str, dict[str, Any]]:
        """What each counter and histogram came to since the first pages, by meaning. gone: series that left the page: what they
        counted afterwards is missing."""
        found: dict[str, dict[str, Any]] = {}
        for meaning, of in MEANINGS.items():
            row: dict[str, Any] | None = None
            if of.kind == "counter" and any(each == meaning for _, each in self._counters):
                value = self._total(meaning, lambda track: track.grown)
                row = {"value": value, "reason": "no series of it is left on the page" if value is None else None}
                kept: list[Any] = [t for (_, each), tracks in self._counters.items() if each == meaning for t in tracks.values()]
            elif of.kind == "histogram" and any(each == meaning for _, each in self._histograms):
                kept = [b for (_, each), series in self._histograms.items() if each == meaning for b in series.values()]
                row = described(kept)
            if row is not None:
                ends = {"resets": max((s.resets for s in kept), default=0), "gone": sum(not s.here for s in kept)}
                found[meaning] = {**row, "unit": of.unit, **ends, "names": self.names(meaning)}
        return found

    def _out_of_range(self, meaning: str, value: float) -> None:
        if meaning not in self._warned:
            self._warned.add(meaning)
            self.events.append({"state": "unsupported", "metric": meaning, "reason": f"{value:g} is out of range"})


def _factors(way: Way, page: Page) -> list[float]:
    """What one of its counts stands for, where that is a number."""
    return [row.value for row in page.rows.get(way.times, ()) if 0 < row.value < LARGEST]


def _possible(value: float, unit: str) -> bool:
    """Only degrees may be below 0."""
    return abs(value) < LARGEST and (value >= 0 or unit == "C") and (unit != "share" or value <= 1 + 1e-9)


def _counts(way: Way, row: Row) -> bool:
    return way.only is None or dict(row.labels).get(way.only[0]) in way.only[1]


def _gone(missing: Sequence[tuple[Spot, Track | Buckets]]) -> list[Happened]:
    """Mark series that are not on the page; the engines of those that were on the last one."""
    left = [(spot, each) for spot, each in missing if each.here]
    for _, each in left:
        each.here = False
    return list(dict.fromkeys(("gone", spot.engine) for spot, _ in left))


_WHY = {
    "reset": "its counters fell: it restarted, and they count on from 0",
    "appeared": "its counters were not there before: they count from 0",
    "gone": "its series are no longer on the page: what it counted since is not known",
}
