"""`kvbench schema`: the JSON Schema of a scenario file."""

import json

import typer


def schema() -> None:
    """Print the JSON Schema of a scenario file, for editors and other tools.

    Example: kvbench schema > scenario.schema.json
    """
    from kvbench.scenario import schema as scenario_schema  # here: the verbs' help must not wait for it

    typer.echo(json.dumps(scenario_schema(), indent=2, ensure_ascii=False))
