"""What a person sees while a run goes on: a live view on a terminal, plain lines anywhere else, nothing with --quiet."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live as Screen
from rich.text import Text

from kvbench import units
from kvbench.core import Event, Record, Sample, Seconds, Window
from kvbench.sink.latest import Latest, newsworthy

Wall = Callable[[], Seconds]
FRAME: Seconds = 1 / 8  # of wall time between two drawings of the live view
LINE: Seconds = 10.0  # of wall time between two plain lines
BLOCKS = {True: " ▁▂▃▄▅▆▇█", False: " .:-=+*%#"}  # by whether the terminal takes UTF-8
BAR = {True: "█░", False: "#-"}
QUEUE = ("running", "waiting")
GONE = (OSError, SystemExit)  # rich turns a broken pipe into SystemExit, which would end the run


class Live:
    """Six lines that are redrawn in place, at most eight times a second of wall time."""

    def __init__(self, console: Console, total_phases: int, wall: Wall) -> None:
        self.console, self.wall = console, wall
        self.latest = Latest(total_phases)
        self.screen: Screen | None = None
        self.drawn: Seconds = float("-inf")
        self.utf8 = (console.encoding or "").lower().startswith("utf")

    def write(self, item: Event | Sample | Window | Record) -> None:
        try:
            self.latest.take(item)
        except (TypeError, ValueError, ArithmeticError):
            pass  # an item with odd numbers in it must not end the run it describes

    def refresh(self, totals: Mapping[str, int]) -> None:
        now = self.wall()
        if now - self.drawn < FRAME:
            return
        self.drawn = now
        try:
            if self.screen is None:
                self.screen = Screen(console=self.console, auto_refresh=False, transient=True)
                self.screen.start()
            self.screen.update(self.picture(totals), refresh=True)
        except GONE:  # the terminal went away; the run and its files go on, and nothing is drawn again
            self.drawn, self.screen = math.inf, None

    async def aclose(self) -> None:
        if self.screen is not None:
            try:
                self.screen.stop()
            except GONE:
                pass  # the terminal went away

    def picture(self, totals: Mapping[str, int]) -> Group:
        latest, width = self.latest, max(10, min(24, self.console.width - 64))
        lines = [self._phase(width), _counts(totals, latest)]
        offered, ok, tokens = (latest.rates.get(name, 0.0) for name in ("offered", "ok", "tokens_out"))
        rates = (f"offered {offered:.3g}/s", self._spark("offered"), f"ok {ok:.3g}/s", self._spark("ok"), f"{tokens:,.0f} tok/s")
        lines.append(_row("rate", *rates))
        due = [units.duration(latest.values.get(f"response_ttft_{q}")) for q in ("p50", "p99")]
        lines.append(_row("ttft", *_quantiles(latest, "ttft"), self._spark("ttft_p99"), f"from due {' / '.join(due)}"))
        if latest.kv is not None:
            style = "red" if latest.kv >= 0.9 else "yellow" if latest.kv >= 0.75 else "green"
            queue = [f"{name} {latest.gauges[name]:.0f}" for name in QUEUE if name in latest.gauges]
            row = _row("kv cache").append(bar(latest.kv, width, self.utf8), style=style)
            lines.append(row.append(f" {units.share(latest.kv)}  {self._spark('kv_usage')}  {'  '.join(queue)}"))
        if latest.controlled:
            lines.append(_row("control", *_loops(latest), self._spark("law_rate")))
        if latest.news:
            lines.append(_row("news", latest.news))
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
        return Group(*lines)

    def _phase(self, width: int) -> Text:
        latest = self.latest
        line = Text().append(f" {latest.phase or 'starting':<9}", style="bold cyan")
        line.append(f"{latest.number}/{latest.total_phases}  {_progress(latest)}  ")
        return line.append(bar(_done(latest), width, self.utf8)) if latest.seconds else line

    def _spark(self, name: str) -> str:
        return spark(self.latest.past[name], self.utf8)


class Plain:
    """A line every ten seconds of wall time, the first at once: for logs and pipes."""

    def __init__(self, console: Console, total_phases: int, wall: Wall) -> None:
        self.out: TextIO = console.file  # type: ignore[assignment]  # rich says IO[str]; only write and flush are used
        self.wall = wall
        self.latest = Latest(total_phases)
        self.printed: Seconds = float("-inf")

    def write(self, item: Event | Sample | Window | Record) -> None:
        try:
            self.latest.take(item)
            if isinstance(item, Event) and newsworthy(item):
                self._print(f"[{units.duration(self.latest.now)}] {self.latest.news}")
        except (TypeError, ValueError, ArithmeticError):
            pass  # an item with odd numbers in it must not end the run it describes

    def refresh(self, totals: Mapping[str, int]) -> None:
        now = self.wall()
        if now - self.printed < LINE:
            return
        self.printed = now
        latest = self.latest
        where = f"{latest.phase or 'starting'} {latest.number}/{latest.total_phases}"
        parts = [f"[{units.duration(latest.now)}] {where}", _progress(latest)]
        parts.append(" ".join(f"{name} {count:,}" for name, count in totals.items()))
        if latest.values.get("ttft_p50") is not None:
            parts.append("ttft " + " ".join(_quantiles(latest, "ttft")))
        if latest.kv is not None:
            parts.append(f"kv {units.share(latest.kv)}")
        if latest.controlled:
            parts += _loops(latest)
        self._print(" | ".join(part for part in parts if part))

    async def aclose(self) -> None:
        return

    def _print(self, line: str) -> None:
        try:
            self.out.write(line + "\n")
            self.out.flush()
        except (OSError, ValueError):
            pass  # the reader of the pipe has left, or the file is closed; the run goes on


class Quiet:
    """Says nothing while the run goes on."""

    def __init__(self, console: Console, total_phases: int, wall: Wall) -> None:
        return

    def write(self, item: Event | Sample | Window | Record) -> None:
        return

    def refresh(self, totals: Mapping[str, int]) -> None:
        return

    async def aclose(self) -> None:
        return


def bar(share: float, width: int, utf8: bool = True) -> str:
    """`share` of `width` characters filled."""
    full = round(max(0.0, min(1.0, share)) * width)
    return BAR[utf8][0] * full + BAR[utf8][1] * (width - full)


def spark(values: deque[float], utf8: bool = True) -> str:
    """The latest values as a line of blocks, from zero to their largest."""
    top = max(values, default=0.0)
    marks = BLOCKS[utf8]
    return "".join(marks[round(max(0.0, value) / top * 8)] if top > 0 else marks[0] for value in values)


def _done(latest: Latest) -> float:
    return latest.elapsed / latest.seconds if latest.seconds else 0.0


def _progress(latest: Latest) -> str:
    if latest.seconds:
        return f"{units.duration(latest.elapsed)} of {units.duration(latest.seconds)}"
    bound = f", until {latest.requests:,.0f} requests" if latest.requests else ""
    return f"{units.duration(latest.elapsed)}{bound}"


def _row(name: str, *parts: str) -> Text:
    return Text().append(f" {name:<9}", style="dim").append("  ".join(part for part in parts if part))


def _counts(totals: Mapping[str, int], latest: Latest) -> Text:
    line = _row("requests", "  ".join(f"{name} {count:,}" for name, count in totals.items()))
    bad = latest.rates.get("failed", 0) + latest.rates.get("timeout", 0)
    return line.append(f"  failing {bad:.3g}/s", style="bold red") if bad else line


def _loops(latest: Latest) -> list[str]:
    """How much is offered, and how much of it the law lets in; how many wait for that is among the counts."""
    level, rate = latest.gauges.get("level"), latest.gauges.get("law_rate")
    known = [f"level {level:.3g}"] if level is not None else []
    return known + ([f"law {rate:.3g}/s" if rate is not None else "law no limit"] if latest.law else [])


def _quantiles(latest: Latest, metric: str) -> list[str]:
    known = [(q, latest.values.get(f"{metric}_{q}")) for q in ("p50", "p99")]
    return [f"{q} {units.duration(value)}" for q, value in known if value is not None]


VIEWS: dict[str, type[Live] | type[Plain] | type[Quiet]] = {"live": Live, "plain": Plain, "quiet": Quiet}
