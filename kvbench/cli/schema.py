"""`kvbench schema`: the JSON Schema of a scenario file, or its reference page."""

import json

import typer


def schema(as_markdown: bool = typer.Option(False, "--markdown", help="Print the reference page (docs/scenario.md).")) -> None:
    """Print the JSON Schema of a scenario file, for editors and other tools.

    Example: kvbench schema > scenario.schema.json
    """
    from kvbench.reference import markdown  # here: the verbs' help must not wait for them
    from kvbench.scenario import schema as scenario_schema

    tree = scenario_schema()
    typer.echo(markdown(tree) if as_markdown else json.dumps(tree, indent=2, ensure_ascii=False), nl=not as_markdown)
