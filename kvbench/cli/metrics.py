"""`kvbench metrics`: what kvbench understands of a server's metrics, and what it does not. Parses and prints, decides nothing."""

import json
from typing import Annotated, Any

import typer

Url = Annotated[str, typer.Argument(metavar="URL", help="A page of metrics, or a server that has one at /metrics.")]
AsJson = Annotated[bool, typer.Option("--json", help="Strict JSON on stdout.")]
Key = Annotated[str | None, typer.Option("--key-env", metavar="NAME", help="Environment variable with the server's key.")]

OURS = "kvbench_"  # what names on the page of an agent begin with
WIDE = 1000  # columns, where what reads it is no terminal and nothing is to be folded


def metrics(url: Url, as_json: AsJson = False, key_env: Key = None) -> None:
    """Read a server's metrics once: each meaning with the server's name for it and its value per engine; then what is not known.

    Example: kvbench metrics http://127.0.0.1:8000

    Exit codes: 0 something is understood; 2 not a page of metrics, or nothing on it is known; 6 nothing answers.
    """
    import asyncio

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code, told, why = runner.run(_read(url, key_env))
    if why:
        typer.echo(f"kvbench metrics: {why}", err=True)
    if told is not None:
        typer.echo(json.dumps(told, indent=2, allow_nan=False)) if as_json else _show(told)
    raise typer.Exit(code)


async def _read(url: str, key_env: str | None) -> tuple[int, dict[str, Any] | None, str]:
    """(exit code, what was read, what went wrong)."""
    import asyncio
    import os
    import re

    from kvbench.clock import Clock
    from kvbench.collect.exposition import NotAPageError
    from kvbench.collect.prometheus import PATIENCE, session
    from kvbench.collect.scrape import NoPageError, Scrape, candidates

    if not re.fullmatch(r"https?://[^/\s?#@]+(/[^\s?#@]*)?", url):
        return 2, None, f"{url!r} is not a URL: write http://host:port"
    if key_env is not None and not os.environ.get(key_env):
        return 2, None, f"--key-env: the environment variable {key_env} is not set"
    headers = {"Authorization": f"Bearer {os.environ[key_env]}"} if key_env else {}
    clock, failed, code = Clock(asyncio.get_running_loop()), [], 6
    async with session(None) as asking:
        for page_url in candidates(url, ""):
            try:
                told = understood(page_url, b"".join(await Scrape(asking, page_url, clock, PATIENCE, headers).fetch()))
            except (NoPageError, NotAPageError) as error:
                code = 2
                failed.append(str(error) if isinstance(error, NoPageError) else f"{page_url}: {error}")
            except OSError as error:
                failed.append(str(error))
            else:
                known = told["known"] or told["agent"]
                return (0, told, "") if known else (2, told, f"{page_url}: nothing on this page is known")
    return code, None, "; ".join(failed)


def understood(url: str, body: bytes) -> dict[str, Any]:
    """A page in three parts: `known`, by meaning, with the server's names, the engines' values and the joined one (of a histogram
    its quantiles since the server's start); `agent`, what `kvbench agent` tells besides, which the collector `agent` reads;
    `unknown`, the other metrics with type and help. Raises NotAPageError."""
    from kvbench.agent.page import HELP
    from kvbench.collect.exposition import Page, Reader, families
    from kvbench.collect.fleet import Fleet
    from kvbench.collect.servers import MEANINGS, known
    from kvbench.collect.settings import configured

    page, fleet, names = Page(), Fleet([""]), known()
    for _ in Reader(names).reading([body], page):
        pass
    for each in (Page(), page):  # after an empty page everything has come since
        for _ in fleet.take(0, each):
            pass
    rows: dict[str, dict[str, Any]] = {}
    readings, totals, found = list(fleet.readings()), fleet.totals(), fleet.sources[0]
    for meaning, of in MEANINGS.items():
        if meaning not in found:
            continue
        source = found[meaning]
        engines = [{"labels": r.labels, "value": r.value} for r in readings if r.name == meaning and r.labels]
        joined = totals[meaning] if of.kind == "histogram" else fleet.joined(meaning)
        rows[meaning] = {
            "what": of.what, "kind": of.kind, "unit": of.unit, "join": of.join, "instantaneous": of.instant,
            "server": source.server, "names": list(source.way.names()), "engines": engines, "joined": joined,
        }  # fmt: skip
    every = families(body.decode("utf-8", "replace"))
    named = {each.name for each in every}
    rest = [f for f in every if not _meant(f.name, names) and f.name.removesuffix("_created") not in named - {f.name}]
    shown = [{"name": each.name, "type": each.kind, "help": each.help, "series": each.series} for each in rest]
    ours = {f"{OURS}{name}".removesuffix("_total") for name in HELP}  # the parser takes _total off
    agent, unknown = ([each for each in shown if (each["name"] in ours) is of] for of in (True, False))
    return {
        "url": url, "kinds": sorted({source.server for source in fleet.sources[0].values()}), "known": rows,
        "engines": configured(page), "not_exposed": fleet.missing(), "agent": agent, "unknown": unknown,
    }  # fmt: skip


def _meant(family: str, names: frozenset[str]) -> bool:
    return any(family + suffix in names for suffix in ("", "_total", "_bucket", "_sum", "_count"))


def _show(told: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from kvbench.report.text import plain

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    kinds = ", ".join(told["kinds"]) or ("kvbench agent" if told["agent"] else "no server that is known")
    console.print(escape(f"{told['url']}: {kinds}"), soft_wrap=True)
    table = Table("meaning", "joined", "of each engine", "name on the page", box=None, pad_edge=False)
    for meaning, row in told["known"].items():
        now = " (of a moment)" if row["instantaneous"] else ""
        engines = ", ".join(_value(each["value"], row["unit"]) for each in row["engines"][:8])
        table.add_row(meaning + now, _joined(row), engines, escape(plain(" / ".join(row["names"]))))
    for column in table.columns:
        column.overflow = "fold"
    if told["known"]:
        console.print(table)
    for engine in told["engines"]:
        said = ", ".join(f"{key} {value}" for key, value in engine.items() if value is not None)
        console.print(escape(plain(f"settings: {said}")), soft_wrap=True)
    if told["not_exposed"]:
        console.print(f"not exposed: {', '.join(told['not_exposed'])}", soft_wrap=True)
    if told["agent"]:
        names = ", ".join(each["name"].removeprefix(OURS) for each in told["agent"])
        said = f"of kvbench agent ({len(told['agent'])} metrics), read by the collector `agent`: {names}"
        console.print(f"\n{said}", soft_wrap=True)
    if told["unknown"]:
        console.print(f"\nnot understood ({len(told['unknown'])} metrics):")
        for each in told["unknown"]:
            console.print(
                escape(plain(f"  {each['name']} ({each['type']}, {each['series']} series): {each['help']}")), soft_wrap=True
            )


def _joined(row: dict[str, Any]) -> str:
    if row["kind"] != "histogram":
        return f"{_value(row['joined'], row['unit'])} ({row['join']})"
    told = row["joined"]
    if not told["n"]:
        return f"- ({told['reason']})"
    p99 = told["p99"]
    top = f"above {_value(p99['low'], row['unit'])}" if p99["high"] is None else f"at most {_value(p99['high'], row['unit'])}"
    return f"n {told['n']:,}, mean {_value(told['mean'], row['unit'])}, p99 {top}"


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.4g} %" if unit == "share" else f"{value:,.6g}{' ' + unit if unit else ''}"
