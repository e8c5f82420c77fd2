"""`kvbench report`: what a run directory says, whole or cut off."""

from pathlib import Path

import typer


def report(
    directory: Path = typer.Argument(..., help="A run directory, also one that is still being written or was cut off."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as strict JSON instead."),
    html: bool = typer.Option(False, "--html", help="Write report.html, with charts, into the directory as well."),
) -> None:
    """Say what a run means: verdict, requests, latencies, KV cache, budgets, and what to do next.

    Examples: kvbench report results/wave-...   |   kvbench report results/wave-... --json | jq .verdict
    """
    from rich.console import Console  # here: the verbs' help must not wait for it

    from kvbench.report import html as html_page
    from kvbench.report import render, write
    from kvbench.report.accounting import AccountingError
    from kvbench.report.files import load
    from kvbench.report.summary import summarise

    try:
        files = load(directory)
        summary = summarise(files)
    except ValueError as error:
        typer.echo(f"kvbench report: {error}", err=True)
        raise typer.Exit(2) from None
    except AccountingError as error:
        typer.echo(f"kvbench report: internal error: {error}", err=True)
        raise typer.Exit(1) from None
    if html:
        path = directory / "report.html"
        write.write_page(path, html_page.page(summary, files))
        typer.echo(f"wrote {path}", err=True)
    if as_json:
        typer.echo(write.as_json(summary, files), nl=False)
    else:
        try:
            render.terminal(summary, Console())
        except OSError as error:  # what stands behind stdout is full or gone
            typer.echo(f"kvbench report: cannot print: {error}", err=True)
            raise typer.Exit(1) from None
