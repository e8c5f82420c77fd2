"""`kvbench laws compare`: one scenario under several laws, on the same offered requests."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from kvbench.scenario import Scenario

COMMON = ("inflight", "patience", "every", "over", "retry_after")  # keys of the scenario's control block that every law takes
ENDED = (130, 143, 1, 6)  # exit codes of a run after which there is nothing to compare


def compare(
    file: Path = typer.Argument(help="The scenario file."),
    law: list[str] = typer.Option([], "--law", metavar="NAME", help="A law to compare; may be repeated. Left out: all of them."),
    set_: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Override a value, as in --set control.patience=10s."),
    target: str | None = typer.Option(None, "--target", "-t", metavar="URL", help="A server that takes the target's place."),
    out: Path | None = typer.Option(None, "--out", metavar="DIR", help="Where the results go, in place of the scenario's."),
    as_json: bool = typer.Option(False, "--json", help="Print the comparison as JSON."),
) -> None:
    """Run a scenario under every law, on the same offered requests and seed, and say what each held and what it cost.

    The scenario's own law keeps its block; the others have their defaults and the block's inflight, patience, every, over and
    retry_after. On the embedded engine each run takes virtual time; a server is driven by one law after the other.

    Example: kvbench laws compare scenarios/stair.yaml --law pid --law none

    Exit codes: 0 compared; 1 internal error; 2 scenario, law; 4 the offered requests differ; 6 no ok answer; 130/143 interrupted.
    """
    import json

    from rich.console import Console

    from kvbench.control.laws import LAWS
    from kvbench.report import compare as compared
    from kvbench.scenario import ScenarioError, load

    console = Console(highlight=False, stderr=as_json)
    unknown = [name for name in law if name not in LAWS]
    if unknown:
        typer.echo(f"--law {unknown[0]}: there is no such law; known are {', '.join(LAWS)}", err=True)
        raise typer.Exit(2)
    try:
        scenario = load(file, [*set_, *([f"out={json.dumps(str(out))}"] if out is not None else [])], target)
        found = drive(scenario, law, console)
    except ScenarioError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except compared.OfferError as error:
        typer.echo(f"not comparable: {error}", err=True)
        raise typer.Exit(4) from None
    if isinstance(found, int):
        raise typer.Exit(found)
    if as_json:
        typer.echo(json.dumps(found, indent=2, allow_nan=False))
    else:
        console.print(compared.table(found))
        console.print(f"\nfiles: {found['directory']}", soft_wrap=True)


def drive(scenario: "Scenario", names: list[str], console: "Console") -> dict[str, Any] | int:
    """Run these laws, all where none is named, into one directory and compare; compare.json is written there. An exit code where
    a run came to nothing.

    Raises ScenarioError (a law lacks what only the user can say), OfferError.
    """
    import json

    from kvbench.clock import wall_time
    from kvbench.endpoint import Http
    from kvbench.journal import JournalError, create
    from kvbench.report import compare as compared
    from kvbench.report.write import write_page

    laws, notes = variants(scenario, names)
    if isinstance(scenario.target, Http):
        notes.append("the laws drive the server one after the other: what it does for others meanwhile is in their difference")
    for note in notes:
        console.print(note, soft_wrap=True)
    try:
        folder = create(Path(scenario.out), f"{scenario.name}-laws", wall_time())
    except JournalError as error:
        typer.echo(f"stopped: {error.strerror or error}", err=True)
        return 1
    runs = {}
    for name, block in laws.items():
        console.print(f"{name} ...", soft_wrap=True)
        change = {"control": block, "out": str(folder), "name": f"{scenario.name}-{name}"}
        ended = _finished(scenario.model_copy(update=change), console)
        if isinstance(ended, int):
            return ended
        runs[name] = ended
    found = compared.compare(runs) | {"scenario": scenario.name, "directory": str(folder), "notes": notes}
    write_page(folder / "compare.json", json.dumps(found, indent=2, allow_nan=False) + "\n")
    return found


def _finished(scenario: "Scenario", console: "Console") -> Any:
    """One run's (summary, files); an exit code where it came to nothing."""
    from kvbench.cli.run import execute
    from kvbench.report.accounting import AccountingError
    from kvbench.report.files import load
    from kvbench.report.write import finish

    directory = execute(scenario, console, False, True)
    if isinstance(directory, int):
        return directory
    try:
        summary = finish(directory)
    except (AccountingError, OSError) as error:
        typer.echo(f"internal error: {directory}: {error}", err=True)
        return 1
    code = int(summary["exit"]["code"])
    if code in ENDED:
        typer.echo(f"{scenario.name}: exit {code}: {summary['exit']['reason']}", err=True)
        return code
    return summary, load(directory)


def variants(scenario: "Scenario", names: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The control blocks by law, the scenario's own first, and what was assumed for what has no default. `names`: the laws; where
    there are none all of them, as far as the scenario lets them.

    A rate is the load's mean; anything else is the law's own example. Raises ScenarioError where a law that is named lacks it.
    """
    from kvbench.control.laws import LAWS
    from kvbench.scenario import ScenarioError

    own = next(name for name, kind in LAWS.items() if type(scenario.control) is kind)
    common = {key: getattr(scenario.control, key) for key in COMMON}
    wanted = names or list(LAWS)
    laws, notes = ({own: scenario.control} if own in wanted else {}), []
    for name in (name for name in LAWS if name in wanted and name != own):
        try:
            laws[name], said = _block(scenario, name, common)
        except ScenarioError as error:
            if names:
                raise
            said = [f"{name} is left out: {error.problems[0].text}"]
        notes += said
    return laws, notes


def _block(scenario: "Scenario", name: str, common: dict[str, Any]) -> tuple[Any, list[str]]:
    """One law's control block, and what was assumed. Raises ScenarioError."""
    from pydantic import ValidationError

    from kvbench.control.laws import LAWS
    from kvbench.problem import Problem
    from kvbench.scenario import ScenarioError

    needed = [key for key, field in LAWS[name].model_fields.items() if field.is_required()]
    given = {key: _needed(scenario, name, key) for key in needed}
    try:
        block = LAWS[name](**common, **given)
    except ValidationError as error:  # the block's period, say, does not go with this law's defaults
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ScenarioError([Problem("", f"--law {name}", f"{why}: make it the scenario's own law to say so")]) from None
    told = {key: f"{value:.3g}/s" if key == "rate" else value for key, value in given.items()}
    return block, [f"{name}: {key} {value}, since the scenario does not say" for key, value in told.items()]


def _needed(scenario: "Scenario", name: str, key: str) -> Any:
    """What a law is given for a key that has no default."""
    from kvbench.control.laws import LAWS
    from kvbench.problem import Problem
    from kvbench.scenario import ScenarioError

    mean = _mean_rate(scenario) if key == "rate" else None
    found = mean if key == "rate" else getattr(LAWS[name], "example", {}).get(key)
    if found is None:
        why = "the load has no mean rate to take: " if key == "rate" else ""
        raise ScenarioError([Problem("", f"--law {name}", f"{why}it needs `{key}`: make it the scenario's own law to say so")])
    return found


def _mean_rate(scenario: "Scenario") -> float | None:
    """Requests/s that steady offers; None where the shape cannot say."""
    import math

    from kvbench import compose

    steady = [phase for phase in compose.build_phases(scenario, None) if phase.kind == "steady"]
    if any(phase.expected is None or not math.isfinite(phase.seconds) for phase in steady):
        return None
    return sum(phase.expected or 0.0 for phase in steady) / sum(phase.seconds for phase in steady)
