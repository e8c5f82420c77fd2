"""`kvbench check`: the plan of a scenario, before any traffic."""

import json
from pathlib import Path
from typing import Any

import typer

ROWS = 12  # phases that are printed; --json has all of them


def check(
    file: Path = typer.Argument(help="The scenario file."),
    set_: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Override a value, as in --set control.patience=10s."),
    target: str | None = typer.Option(None, "--target", "-t", metavar="URL", help="A server that takes the target's place."),
    as_json: bool = typer.Option(False, "--json", help="Print the plan as JSON."),
) -> None:
    """Check a scenario and print what a run of it would do. Sends nothing; exit code 2 when the file is wrong.

    Example: kvbench check scenarios/wave.yaml --set workload.arrivals.mean=3/s
    """
    from kvbench.forecast import forecast  # here: the verbs' help must not wait for them
    from kvbench.scenario import ScenarioError, load

    try:
        plan = forecast(load(file, set_, target))
    except ScenarioError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except ValueError as error:  # a trace or a file of prompts: its message names file and line
        typer.echo(f"{file}: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(json.dumps(plan, indent=2, allow_nan=False) if as_json else "\n".join(lines(plan)))


def lines(plan: dict[str, Any]) -> list[str]:
    """The plan for people."""
    from kvbench import units

    target = ", ".join(f"{key} {value}" for key, value in plan["target"].items() if key != "kind")
    shape = _shape(plan["arrivals"])
    counted = "requests" if plan["tokens"].get("turns_mean", 1) == 1 else "arrivals"  # a session arrives once
    rows = [
        f"{plan['name']}  (seed {plan['seed']})",
        f"  target    {plan['target']['kind']}  {target}",
        f"  arrivals  {plan['arrivals']['shape']}  {shape}",
        "",
        f"  {'phase':<12}{'load for':>10}{counted:>12}{'mean':>10}{'peak':>15}",
        *_phases(plan["phases"]),
        "",
        f"  tokens    {_tokens(plan['tokens'])}",
        f"  context   {_context(plan['context'])}",
    ]
    if plan["kv"]:
        rows.append(f"  KV        {_kv(plan['kv'])}")
    if plan["timeouts"]:
        limits = (f"{name} {'none' if value == 'inf' else units.duration(value)}" for name, value in plan["timeouts"].items())
        rows.append(f"  timeouts  {', '.join(limits)}; retries {plan['target'].get('retries', 0)}")
    rows.append(f"  control   {_control(plan['control'])}")
    if plan["watch"]:
        rows.append(f"  watch     {_watch(plan['watch'])}")
    rows += [f"  fault     {_fault(fault)}" for fault in plan["faults"]]
    rows += [f"  stop      {rule}" for rule in plan["stop"]]
    rows += [f"  budget    {line}" for line in plan["budget"]]
    rows += [f"  file      {file['file']} ({units.size(file['bytes'])})" for file in plan["files"]]
    rows += [f"  time      {_time(plan['seconds'], plan['seconds_most'])}; results go under {plan['out']}/"]
    return rows + [f"warning: {text}" for text in plan["warnings"]]


def _phases(phases: list[dict[str, Any]]) -> list[str]:
    """One row each; of very many the middle is only counted."""
    rows = [_phase(phase) for phase in phases]
    if len(rows) <= ROWS:
        return rows
    return [*rows[: ROWS - 4], f"  ... and {len(rows) - ROWS + 1} more like these ...", *rows[-3:]]


def _phase(phase: dict[str, Any]) -> str:
    from kvbench import units

    limit = units.duration(phase["most"]) if phase["most"] is not None else "-"
    time = units.duration(phase["seconds"]) if phase["seconds"] is not None else f"<= {limit}" if limit != "-" else limit
    requests = "-" if phase["requests"] is None else f"{phase['requests']:,.0f}"
    mean, peak = (_rate(phase[key]) for key in ("mean", "peak"))
    peak = f"{phase['impulse']:,} at once" if phase["impulse"] else peak
    why = f"  ({phase['why']})" if phase["why"] else ""
    return f"  {phase['name']:<12}{time:>10}{requests:>12}{mean:>10}{peak:>15}{why}"


def _time(seconds: float | None, most: float | None) -> str:
    from kvbench import units

    if seconds is not None:
        return units.duration(seconds)
    return "depends on the server" + (f", {units.duration(most)} at most" if most is not None else "")


def _shape(arrivals: dict[str, Any]) -> str:
    """The load shape's settings with the units they were written in, which the schema's examples show."""
    from kvbench.timetable import SHAPES

    tree = SHAPES[arrivals["shape"]].model_json_schema()
    return _settings({key: value for key, value in arrivals.items() if key != "shape"}, tree, tree.get("$defs", {}))


def _settings(values: dict[str, Any], tree: dict[str, Any], defs: dict[str, Any]) -> str:
    nodes = tree.get("properties", {})
    return ", ".join(f"{key} {_value(value, nodes.get(key, {}), defs)}" for key, value in values.items() if value is not None)


def _value(value: Any, node: dict[str, Any], defs: dict[str, Any]) -> str:
    from kvbench import units

    options = [option for option in (node, *node.get("anyOf", ())) if option]
    options = [defs[option["$ref"].rsplit("/", 1)[-1]] if "$ref" in option else option for option in options]
    if isinstance(value, dict):
        return f"({_settings(value, next((option for option in options if 'properties' in option), {}), defs)})"
    example = str(next((option["examples"][0] for option in options if "examples" in option), ""))
    if not isinstance(value, float) or not example or example.isdigit():
        return f"{value:g}" if isinstance(value, float) else str(value)
    return units.share(value) if example.endswith("%") else f"{value:g}/s" if example.endswith("/s") else units.duration(value)


def _control(control: dict[str, Any]) -> str:
    """The law with what it needs and what differs from its defaults, then what holds at every gate."""
    from kvbench import units
    from kvbench.control.law import SIGNALS, Open
    from kvbench.control.laws import LAWS

    law = LAWS[control["law"]]
    tree = law.model_json_schema()
    own = [name for name in law.model_fields if name not in Open.model_fields]
    main = {name for name in own if control[name] != law.model_fields[name].default} | {*law.example, "signal", "kv_limit"}
    nodes = tree["properties"]
    if "setpoint" in nodes:
        nodes["setpoint"] = {"examples": [SIGNALS[control["signal"]].example]}
    told = [control["law"], _settings({name: control[name] for name in own if name in main}, tree, tree.get("$defs", {}))]
    if control["inflight"]:
        told.append(f"at most {control['inflight']:,} in flight")
    if control["law"] == "none" and not control["inflight"]:
        told.append("everything is sent as it falls due")
    else:
        told.append(f"patience {units.duration(control['patience'])}")
    if control["retry_after"]:
        told.append(f"a Retry-After of up to {units.duration(control['retry_after'])} is heeded")
    return "; ".join(part for part in told if part)


def _watch(watch: dict[str, Any]) -> str:
    from kvbench import units

    votes = f"{watch['confirm']} of {watch['of']} windows of {units.duration(watch['window'])}"
    return f"{', '.join(watch['metrics'])}; {watch['sigma']:g} sigma worse in {votes}; then {watch['action']}"


def _fault(fault: dict[str, Any]) -> str:
    from kvbench import units
    from kvbench.engine.faults import FAULTS

    tree = FAULTS[fault["kind"]].model_json_schema()
    rest = {key: value for key, value in fault.items() if key not in ("kind", "at", "for")}
    lasts = f"for {units.duration(fault['for'])}" if fault["for"] is not None else "to the end"
    told = _settings(rest, tree, tree.get("$defs", {}))
    return f"{fault['kind']} at {units.duration(fault['at'])} {lasts}{', ' if told else ''}{told}"


def _rate(value: float | str | None) -> str:
    """A rate; strict JSON has "inf" for everything at once."""
    return "-" if value is None else "at once" if isinstance(value, str) else f"{value:.3g}/s"


def _tokens(tokens: dict[str, Any]) -> str:
    if "prompt_mean" not in tokens:
        return str(tokens["why"])
    total = f"; about {tokens['prompt_total']:,.0f} + {tokens['answer_total']:,.0f} in all" if "prompt_total" in tokens else ""
    turns = f" of {tokens['turns_mean']:.3g} turns (requests)" if tokens["turns_mean"] != 1 else ""
    return f"{tokens['prompt_mean']:,.0f} prompt + {tokens['answer_mean']:,.0f} answer per arrival{turns}{total}"


def _context(context: dict[str, Any]) -> str:
    longest = "unknown before the files are read" if context["longest"] is None else f"{context['longest']:,} tokens at most"
    if context["limit"] is None:
        return f"{longest}; the model's: {context['why']}"
    verdict = "" if context["fits"] is None else ", fits" if context["fits"] else ", DOES NOT FIT"
    return f"{longest}; the model's: {context['limit']:,}{verdict}"


def _kv(kv: dict[str, Any]) -> str:
    from kvbench import units

    where = f" on {kv['nodes']} nodes" if kv["nodes"] > 1 else ""
    parts = [f"pool of {kv['pool_tokens']:,} tokens{where}"]
    for key, what in (
        ("share_at_mean", "alive at the mean rate"),
        ("share_at_peak", "at the peak"),
        ("share_of_burst", "in one burst"),
        ("share_at_stress", "at stress's top"),
    ):
        if kv[key] is not None and not (key == "share_at_peak" and kv["share_of_burst"]):  # there the burst is the peak
            parts.append(f"{units.share(kv[key]) if kv[key] < 10 else 'over 1,000 %'} {what}")
    return "; ".join(parts) + " (estimate: no queue, no sharing" + (", even shares)" if kv["nodes"] > 1 else ")")
