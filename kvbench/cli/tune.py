"""`kvbench laws tune`: gains of the pid law, from a step test in virtual time."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from kvbench.control.law import Open
    from kvbench.control.pid import Pid
    from kvbench.plan.tune import Tuned

MEASURED = ("signal", "setpoint", "kp", "ti", "td", "nominal", "start")  # keys whose values the step test gives


def tune(
    file: Path = typer.Argument(help="The scenario file; its target is the embedded engine."),
    setpoint: str = typer.Option("80%", "--setpoint", metavar="SHARE", help="The KV usage to hold, where the scenario has none."),
    set_: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Override a value, as in --set target.hardware=h100."),
) -> None:
    """Measure how KV usage answers the admitted rate, and print the `control` to paste: pid with gains that suit this server.

    The scenario's requests go to the embedded engine at rates of the test's own, whatever its arrivals: up to the set-point,
    then in steps below it.

    Example: kvbench laws tune scenarios/stair.yaml

    Exit codes: 0 printed; 2 scenario, or no gains can be given for it.
    """
    from pydantic import ValidationError

    from kvbench.control.law import SIGNALS
    from kvbench.plan.tune import prepare
    from kvbench.plan.tune import tune as measure
    from kvbench.scenario import ScenarioError, load

    try:
        scenario = load(file, set_)
        own = as_pid(scenario.control, SIGNALS["kv_usage"].setpoint(setpoint))
        if own.signal != "kv_usage":
            raise ValueError(f"its pid holds {own.signal}, which is no lag of the rate: gains can be measured for kv_usage")
        found = measure(*prepare(scenario), own.setpoint, own.every)
    except ScenarioError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except ValueError as error:  # pydantic's own, of a set-point that pid does not take, is one
        why = error.errors()[0]["msg"].removeprefix("Value error, ") if isinstance(error, ValidationError) else error
        typer.echo(f"{file} cannot be tuned: {why}", err=True)
        raise typer.Exit(2) from None
    typer.echo("\n".join(lines(found, own)))


def kept(control: "Open") -> dict[str, Any]:
    """What the scenario's control says that pid has a key for too and the step test does not give."""
    from kvbench.control.pid import Pid

    common = [key for key in Pid.model_fields if key in control.model_fields_set and key not in MEASURED]
    return {key: getattr(control, key) for key in common if getattr(control, key) is not None}


def as_pid(control: "Open", setpoint: float) -> "Pid":
    """The scenario's own pid, or one with `setpoint` and what its control says. ValueError where they do not go together."""
    from kvbench.control.pid import Pid

    if isinstance(control, Pid):
        return control
    slowest = max(Pid.model_fields["ti"].default, control.every)
    return Pid.model_validate({"setpoint": setpoint, "ti": slowest, **kept(control)})


def lines(found: "Tuned", own: "Pid") -> list[str]:
    """The block to paste, with what was measured as its comments. `own`: what else it says."""
    from kvbench import units

    lag = found.lag
    return [
        f"# Step test in {units.duration(found.seconds)} of virtual time, between {found.low:.3g}/s and {found.nominal:.3g}/s:",
        f"# usage answers with {100 * lag.gain:.3g} % per request/s, time constant {lag.tau:.3g} s, "
        f"dead time {lag.dead:.2f} s (R^2 {lag.explained:.2f}).",
        "control:",
        "  law: pid",
        "  signal: kv_usage",
        f"  setpoint: {100 * found.setpoint:g}%",
        f"  kp: {found.kp:.3g}",
        f"  ti: {found.ti:.3g}s",
        "  td: 0s",
        f"  nominal: {found.nominal:.3g}/s",
        f"  start: {found.nominal:.3g}/s",
        *(f"  {key}: {_written(key, value)}" for key, value in kept(own).items()),
    ]


def _written(key: str, value: float) -> str:
    """A value of pid with its unit, whole."""
    from kvbench.control.pid import Pid

    node = Pid.model_json_schema()["properties"][key]
    example = str(next((option["examples"][0] for option in (node, *node.get("anyOf", ())) if "examples" in option), ""))
    if example.endswith("%"):
        return f"{100 * value:.12g}%"
    return f"{value:.12g}" + ("/s" if example.endswith("/s") else "s" if example else "")
