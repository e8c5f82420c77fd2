"""`kvbench export`: a run directory into a database, or into files that other tools read."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from kvbench.sink.influx import Influx


class Mode(StrEnum):
    """How lines are written."""

    v1 = "v1"
    v2 = "v2"


def export(
    directory: Path = typer.Argument(..., help="A run directory, also one that was cut off."),
    out: Path | None = typer.Argument(
        None, help="Where the files go, with --csv and --parquet; its csv/ or parquet/ if left out."
    ),
    influx: str | None = typer.Option(None, "--influx", metavar="URL", help="Send it to the InfluxDB or VictoriaMetrics there."),
    csv: bool = typer.Option(False, "--csv", help="Write windows, samples, events and requests as CSV."),
    parquet: bool = typer.Option(False, "--parquet", help="Write them as Parquet (needs pip install -e '.\\[parquet]')."),
    resume: bool = typer.Option(False, "--resume", help="Send only what the database did not acknowledge before."),
    mode: Mode | None = typer.Option(None, "--mode", help="v2: bucket and org; v1: database (InfluxDB before 1.8)."),
    bucket: str | None = typer.Option(None, "--bucket", help="Of mode v2."),
    org: str | None = typer.Option(None, "--org", help="Of mode v2."),
    database: str | None = typer.Option(None, "--database", help="Of mode v1."),
    token_env: str | None = typer.Option(None, "--token-env", metavar="NAME", help="The environment variable with the token."),
    requests: bool | None = typer.Option(None, "--requests/--no-requests", help="A point for every request too."),
) -> None:
    """Send a run to a database, or write it as tables. Where the run had a sink for that URL, its settings are taken.

    Examples: kvbench export results/wave-... --csv   |   kvbench export results/wave-... --influx http://127.0.0.1:8086 --resume

    Exit codes: 0 whole; 1 some points were not delivered; 2 wrong use, no run directory, or the database refuses.
    """
    given = {"mode": mode and mode.value, "bucket": bucket, "org": org, "database": database, "token_env": token_env,
             "requests": requests}  # fmt: skip
    settings = {name: value for name, value in given.items() if value is not None}
    try:
        if (influx is not None) + csv + parquet != 1:
            raise ValueError("say where to: one of --influx URL, --csv or --parquet")
        if influx is None:
            if resume or settings:
                raise ValueError("--resume and the database's options go with --influx")
            _files(directory, out, "csv" if csv else "parquet")
            return
        if out is not None:
            raise ValueError(f"{out}: files are written with --csv or --parquet, not with --influx")
        code = _database(directory, _spec(directory, influx, settings), resume)
    except (ValueError, OSError) as error:
        typer.echo(f"kvbench export: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("interrupted; what was delivered stays: repeat the command with --resume", err=True)
        raise typer.Exit(130) from None
    raise typer.Exit(code)


def _files(directory: Path, out: Path | None, suffix: str) -> None:
    from kvbench.replay import began
    from kvbench.report.files import load
    from kvbench.tables import tables, write_all

    files = load(directory)
    write_all(
        tables(files, began(files)), out or directory / suffix, suffix, lambda path, rows: typer.echo(f"{path}: {rows:,} rows")
    )


def _spec(directory: Path, url: str, settings: dict[str, Any]) -> "Influx":
    """The sink's settings of the run where it had one there, with what the command line says instead."""
    from pydantic import ValidationError

    from kvbench.replay import known
    from kvbench.sink.influx import Influx

    note = known(directory, url)
    try:
        return Influx.model_validate({**(note["spec"] if note is not None else {}), "url": url, **settings})
    except ValidationError as error:
        raise ValueError(
            "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors())
        ) from None


def _database(directory: Path, spec: "Influx", resume: bool) -> int:
    import sys

    from kvbench.replay import replay

    shown = sys.stderr.isatty()

    def progress(delivered: int, made: int) -> None:
        if shown:
            typer.echo(f"\r{delivered:,} of {made:,} points", nl=False, err=True)

    told = replay(directory, spec, resume, progress)
    if shown:
        typer.echo("", err=True)
    for note in told["notes"]:
        typer.echo(f"! {note}", err=True)
    what = f"{told['stored']:,} points to {told['to']}"
    if resume and told["complete"] and not told["sent"]:
        typer.echo(f"nothing was missing in {told['to']}")
    else:
        typer.echo(f"sent {what}" + (f", {told['refused']:,} refused (dead.lp)" if told["refused"] else ""))
    return 0 if told["complete"] and not told["refused"] else 1
