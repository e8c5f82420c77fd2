"""`kvbench run`: drive a scenario, show it, and say what it meant."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from kvbench.clock import Clock
    from kvbench.collect import Place
    from kvbench.run import Run
    from kvbench.scenario import Scenario
    from kvbench.signals import Ear
    from kvbench.sink import Store


def run(
    file: Path = typer.Argument(help="The scenario file."),
    set_: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Override a value, as in --set control.patience=10s."),
    target: str | None = typer.Option(None, "--target", "-t", metavar="URL", help="A server that takes the target's place."),
    out: Path | None = typer.Option(
        None, "--out", metavar="DIR", help="Where the run directory goes, in place of the scenario's."
    ),
    real_time: bool = typer.Option(False, "--real-time", help="Run the embedded engine at the pace of the wall clock."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Print nothing but the summary."),
) -> None:
    """Run a scenario: shaped load against a server or the embedded engine, with a summary and a run directory at the end.

    Examples: kvbench run scenarios/wave.yaml   |   kvbench run scenarios/wave.yaml --target http://127.0.0.1:8000

    Exit codes: 0 whole; 1 internal error; 2 scenario; 3 budget; 4 invalid; 5 stop rule; 6 no ok answer; 130/143 interrupted.
    """
    import json

    from rich.console import Console

    from kvbench.scenario import ScenarioError, load

    console = Console(highlight=False)
    try:
        scenario = load(file, [*set_, *([f"out={json.dumps(str(out))}"] if out is not None else [])], target)
        code = _drive(scenario, console, real_time, quiet)
    except ScenarioError as error:
        typer.echo(str(error), err=True)
        code = 2
    raise typer.Exit(code)


def _drive(scenario: "Scenario", console: "Console", real_time: bool, quiet: bool) -> int:
    """Open the target, run, report; returns the exit code."""
    found = execute(scenario, console, real_time, quiet)
    return _undisturbed(found, console) if isinstance(found, Path) else found


def execute(scenario: "Scenario", console: "Console", real_time: bool, quiet: bool) -> Path | int:
    """Run on a loop of its own: the run directory, or the exit code where there is no run to report. What goes wrong outside of
    kvbench is one line, not a traceback."""
    import asyncio

    import uvloop

    from kvbench.clock import VirtualLoop
    from kvbench.endpoint import Sim
    from kvbench.journal import JournalError
    from kvbench.signals import SignalError
    from kvbench.target import TargetUnreachable

    virtual = isinstance(scenario.target, Sim) and not real_time
    with asyncio.Runner(loop_factory=VirtualLoop if virtual else uvloop.new_event_loop) as runner:
        try:
            return runner.run(record(scenario, console, quiet))
        except TargetUnreachable as error:
            typer.echo(f"target unreachable: {error}", err=True)
            return 6
        except JournalError as error:
            typer.echo(f"stopped: {error.strerror or error}; what was recorded before is whole", err=True)
            return 1
        except SignalError as error:
            typer.echo(str(error), err=True)
            return error.code


def _undisturbed(directory: Path, console: "Console") -> int:
    """The report, whole even where a signal comes meanwhile; the exit code then is the signal's."""
    import signal

    from kvbench.signals import CODES, Ear, ending

    ear = Ear(lambda number: typer.echo(f"{number.name}: the run is over; its report is still written", err=True))
    for number in ending():
        signal.signal(number, ear.hear)
    code = _report(directory, console)
    return CODES[ear.number] if ear.number is not None else code


async def record(scenario: "Scenario", console: "Console", quiet: bool) -> Path:
    """Open the target and run the scenario on this loop; returns the run directory. The report is another step.

    A signal that comes before the run begins raises SignalError once all that was opened is closed; later ones are the run's.
    """
    import asyncio

    from kvbench.clock import Clock
    from kvbench.signals import SignalError, listening

    clock = Clock(asyncio.get_running_loop())
    ear = listening(clock.loop, lambda _: making.cancel())
    making = asyncio.ensure_future(_made(scenario, console, quiet, clock, ear))
    try:
        run = await making
    except asyncio.CancelledError:
        if ear.number is None:
            raise
        raise SignalError(ear.number) from None
    try:
        await run.execute()
    except BaseException:
        await run.setup.target.aclose()  # what came to nothing before its first phase has a server all the same
        raise
    return run.journal.path


async def _made(scenario: "Scenario", console: "Console", quiet: bool, clock: "Clock", ear: "Ear") -> "Run":
    """The run with all that it needs, opened. Where that cannot be, or `ear` heard a signal, all of it is closed again."""
    import asyncio
    import sys
    from contextlib import AsyncExitStack
    from dataclasses import replace

    from kvbench import baseline, compose, doubts, journal
    from kvbench.clock import wall_time
    from kvbench.collect import Place
    from kvbench.endpoint import Http
    from kvbench.run import Run, Setup
    from kvbench.sink.console import GONE, VIEWS
    from kvbench.target.overheard import Overheard

    async with AsyncExitStack() as open_ones:
        opened = await compose.open_target(scenario, clock)
        open_ones.push_async_callback(opened.target.aclose)
        urls = scenario.target.addresses() if isinstance(scenario.target, Http) else ()
        nonce = compose.build_nonce(scenario)
        phases = compose.build_phases(scenario, nonce, opened.count, opened.facts)
        planned = baseline.planned(scenario, opened.facts)
        opened.facts["warnings"] = [*opened.facts.get("warnings", ()), *baseline.overlong(scenario, opened.facts)]
        path = journal.create(Path(scenario.out), scenario.name, wall_time())
        open_ones.callback(_unused, path)
        server = opened.server
        if server is not None and scenario.target.launch.log is None:
            server.moved(path / "server.log")
        place = Place(clock, path, urls, opened.facts, opened.headers, prompt=opened.prompt)
        if server is not None:
            place = replace(
                place, server_log=server.log, session=server.session, unprofiled=server.unprofiled, secrets=server.secrets
            )
        crew = await compose.open_crew(scenario, place)
        open_ones.push_async_callback(crew.stop)
        sinks = await _open_sinks(scenario, place, crew.facts)
        for sink in sinks:
            open_ones.push_async_callback(sink.aclose)
        opened.facts["warnings"] += [f"collector {told['source']}: {told['error']}" for told in crew.facts if told["error"]]
        opened.facts["warnings"] += doubts.blind(scenario, {name for told in crew.facts for name in told.get("gives", ())})
        view = VIEWS["quiet" if quiet else "live" if console.is_terminal else "plain"](console, len(phases), wall_time)
        target = Overheard(opened.target, crew.listeners) if crew.listeners else opened.target
        controls, windows = compose.build_controls(scenario, phases), scenario.windows
        setup = Setup(
            target=target, phases=phases, controls=controls, sinks=sinks, view=view, crew=crew,
            length=windows.length, slide=windows.slide, slos=compose.build_slos(scenario),
        )  # fmt: skip
        if ear.number is not None:  # a call that ended in the same instant may have taken the cancellation for itself
            raise asyncio.CancelledError
        log = journal.Journal(path)
        facts = _manifest(scenario, clock, opened, nonce, phases, sys.argv)
        log.manifest(facts | {"baseline": planned, "collectors": crew.facts})
        if not quiet:
            with suppress(*GONE):  # nobody reads it: the run and its files go on
                _announce(scenario, opened.facts, path, console)
        open_ones.pop_all()
    return Run(setup, clock, log)


def _unused(directory: Path) -> None:
    """Remove a run directory in which nothing was written."""
    with suppress(OSError):
        directory.rmdir()


async def _open_sinks(scenario: "Scenario", at: "Place", collectors: list[dict[str, Any]]) -> "list[Store]":
    from kvbench import compose
    from kvbench.sink import SinkPlace
    from kvbench.sink.points import engine_of

    known = {"scenario": scenario.name, "model": at.facts.get("model"), "engine": engine_of(at.facts, collectors)}
    place = SinkPlace(at.directory, at.directory.name, at.clock.wall, known)
    return await compose.open_sinks(scenario, place)


def _announce(scenario: "Scenario", facts: dict[str, Any], path: Path, console: "Console") -> None:
    from rich.markup import escape

    from kvbench import units
    from kvbench.endpoint import Http
    from kvbench.report.sentences import described
    from kvbench.report.text import plain

    console.print(f"[bold]{escape(scenario.name)}[/bold] on {escape(plain(described(facts)))}", soft_wrap=True)
    if isinstance(scenario.target, Http):
        limits = scenario.target.timeouts.model_dump()
        console.print("timeouts: " + ", ".join(f"{name} {units.duration(value)}" for name, value in limits.items()))
    for warning in facts.get("warnings", ()):
        console.print(f"[yellow]! {escape(plain(warning))}[/yellow]", soft_wrap=True)
    console.print(f"recording to {escape(str(path))}", soft_wrap=True)


def _manifest(scenario: "Scenario", clock: Any, opened: Any, nonce: int | None, phases: Any, argv: list[str]) -> dict[str, Any]:
    """What someone needs to know to read, or repeat, this run. Holds no secret."""
    import os
    import platform
    from datetime import UTC, datetime

    from kvbench import __version__
    from kvbench.clock import wall_time

    return {
        "kvbench": __version__, "name": scenario.name,
        "started": datetime.fromtimestamp(wall_time(), UTC).isoformat(timespec="milliseconds"),
        "clock": "virtual" if clock.virtual else "real", **({"wall": clock.wall} if clock.virtual else {}), "seed": scenario.seed,
        "nonce": nonce, "scenario": scenario.resolved(), "target": opened.facts, "tokenizer": opened.tokenizer,
        "host": {"name": platform.node(), "system": platform.platform(), "python": platform.python_version(),
                 "cpus": os.cpu_count()},
        "phases": [phase.plan() for phase in phases],
        "argv": argv[1:],
    }  # fmt: skip


def _report(directory: Path, console: "Console") -> int:
    """Write the report's files, print the summary and return the exit code that follows."""
    from kvbench.report import render
    from kvbench.report.accounting import AccountingError
    from kvbench.report.write import finish
    from kvbench.sink.console import GONE

    try:
        summary = finish(directory)
    except AccountingError as error:
        typer.echo(f"internal error: the run's requests do not add up: {error}", err=True)
        return 1
    except OSError as error:
        typer.echo(f"the report could not be written: {error}; the records are in {directory}", err=True)
        return 1
    with suppress(*GONE):  # a pipe that was closed or a full disk behind stdout does not change what the run came to
        render.terminal(summary, console)
    code = int(summary["exit"]["code"])
    if code:
        typer.echo(f"exit {code}: {summary['exit']['reason']}", err=True)
    return code
