"""`kvbench trace`: look at a recorded trace, write it in another format, fit its lengths. Parses and prints, decides nothing."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvbench.workload.fit import Fit, Whole
    from kvbench.workload.traces import Trace

trace = typer.Typer(help="Inspect, convert and fit recorded traces.", no_args_is_help=True)

BARS = " ▁▂▃▄▅▆▇█"
_POOR = 0.05  # a KS distance above this is visible in a plot: quantiles of the data describe it better


class Column(StrEnum):
    """Which lengths."""

    prompt = "in"
    output = "out"


class UnitName(StrEnum):
    """Of numeric stamps."""

    s = "s"
    ms = "ms"
    us = "us"
    ns = "ns"


File = Annotated[Path, typer.Argument(metavar="FILE", help="A trace file, plain or .gz, or a directory of session files.")]
Kind = Annotated[str, typer.Option("--format", help="auto, or the name of a format where the first record does not tell.")]
Stamps = Annotated[UnitName | None, typer.Option("--unit", help="Unit of numeric stamps, where it is not the format's own.")]
Block = Annotated[int | None, typer.Option("--block", min=1, help="Tokens per block id, for records that do not say.")]
AsJson = Annotated[bool, typer.Option("--json", help="Strict JSON on stdout instead of tables.")]


@contextmanager
def _usage() -> Iterator[None]:
    """Bad input ends in one line on stderr and exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None


def _read(file: Path, kind: str, unit: UnitName | None, block: int | None) -> "Trace":
    from kvbench.workload.traces import read

    return read(file, kind, unit.value if unit else None, block)


@trace.command()
def inspect(file: File, kind: Kind = "auto", unit: Stamps = None, block: Block = None, as_json: AsJson = False) -> None:
    """What a trace holds: rates, lengths, sessions, and the hit rate an endless prefix cache would have on it."""
    from kvbench.units import duration  # brings pydantic: not for --help

    with _usage():
        recorded = _read(file, kind, unit, block)
    if as_json:
        typer.echo(json.dumps({"facts": recorded.facts, "warnings": recorded.warnings}, allow_nan=False, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=str(file), show_header=False)
    for name, value in _facts(recorded.facts):
        table.add_row(name, value)
    console.print(table)
    lengths = Table(title="tokens", box=None)
    lengths.add_column("")
    for quantile in recorded.facts["quantiles_in"]:
        lengths.add_column({"0": "min", "1": "max"}.get(quantile, f"p{float(quantile) * 100:g}"), justify="right")
    for name in ("in", "out"):
        lengths.add_row(name, *(f"{v:,}" for v in recorded.facts[f"quantiles_{name}"].values()))
    console.print(lengths)
    if recorded.facts["duration_s"]:
        console.print(f"rate over time (each mark {duration(recorded.facts['duration_s'] / 60)}, full height the busiest)")
        console.print(f"|{sparkline([row.at for row in recorded.rows if row.at is not None])}|", highlight=False)
    for warning in recorded.warnings:
        typer.echo(f"warning: {warning}", err=True)


def _facts(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from kvbench.units import duration, share  # brings pydantic: not for --help

    def rate(value: float | None) -> str:
        return "- (too short, or no times)" if value is None else f"{value:.4g}/s"

    yield "format", facts["format"]
    yield "rows", f"{facts['rows']:,} ({facts['skipped']:,} skipped)"
    yield "sessions", f"{facts['sessions']:,}" if facts["sessions"] else "-"
    yield "duration", duration(facts["duration_s"])
    yield "mean rate", rate(facts["mean_rate"])
    yield "peak rate over 1 s", rate(facts["peak_rate_1s"])
    yield "peak rate over 60 s", rate(facts["peak_rate_60s"])
    yield "tokens in", f"{facts['tokens_in']:,} (mean {facts['mean_in']:,.1f})"
    yield "tokens out", f"{facts['tokens_out']:,} (mean {facts['mean_out']:,.1f})"
    if facts["block_refs"]:
        sizes = ", ".join(map(str, facts["block"]))
        yield "block ids", f"{facts['block_refs']:,}, {facts['blocks']:,} distinct, of {sizes} tokens"
        yield "ideal block hit rate", share(facts["block_hit_rate"])
        yield "ideal token hit rate", share(facts["token_hit_rate"])
    else:
        yield "ideal hit rates", "- (no block ids: prompts are not known to share anything)"


def sparkline(times: Sequence[float], width: int = 60) -> str:
    """Rows per equal part of the span of ascending times, the busiest at full height, an empty part blank."""
    span = times[-1] - times[0]
    counts = [0] * width
    for at in times:
        counts[min(width - 1, int((at - times[0]) / span * width))] += 1
    return "".join(BARS[math.ceil(count / max(counts) * (len(BARS) - 1))] for count in counts)


@trace.command()
def convert(
    file: File,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where to write; gzipped where the name ends in .gz.")],
    to: Annotated[str, typer.Option("--to", help="Format to write.")],
    kind: Kind = "auto",
    unit: Stamps = None,
    block: Block = None,
) -> None:
    """Write a trace in another format and say what that format could not keep."""
    with _usage():
        from kvbench.workload.traces import known_format, write

        known_format(to)
        recorded = _read(file, kind, unit, block)
        lost = write(out, recorded.rows, to)
    for warning in recorded.warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(f"{len(recorded.rows):,} rows of {recorded.facts['format']} written to {out} as {to}")
    for line in lost or ["nothing"]:
        typer.echo(f"lost: {line}")


@trace.command()
def fit(
    file: File,
    column: Annotated[Column, typer.Option("--column", help="Prompt (in) or output (out) lengths.")] = Column.prompt,
    bootstraps: Annotated[int, typer.Option("--bootstraps", min=10, help="Refits behind p, good to 0.5 / sqrt of it.")] = 100,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the bootstraps.")] = 0,
    xmin: Annotated[int | None, typer.Option("--xmin", min=1, help="Fit from here on instead of seeking the start.")] = None,
    kind: Kind = "auto",
    block: Block = None,
    as_json: AsJson = False,
) -> None:
    """Is a column of lengths a power law? Exponent, where it starts, a p-value, rivals, and lines for a scenario."""
    from kvbench.units import share  # brings pydantic: not for --help

    with _usage():
        from kvbench.workload.fit import fit_lognormal, fit_power_law

        rows = _read(file, kind, None, block).rows
        lengths = [row.n_in if column is Column.prompt else row.n_out for row in rows]
        found, whole = fit_power_law(lengths, bootstraps, seed, xmin), fit_lognormal(lengths)
    verdict, lines = _verdict(found), _snippet(found, whole, lengths, column)
    if as_json:
        typer.echo(json.dumps(_json(found, whole) | {"verdict": verdict, "scenario": lines}, allow_nan=False, indent=1))
        return
    typer.echo(f"{column.value} of {file}: {found.n:,} values, {min(lengths):,} to {found.largest:,} tokens")
    typer.echo(f"power law   alpha {found.alpha:.3f} +- {found.se:.3f} from {found.xmin:,} tokens on: {found.tail:,} values,")
    part = share(found.tail / found.n)
    typer.echo(f"            {part} of all; KS distance {found.ks:.4f}; p {_p(found)} ({bootstraps} refits, seed {seed})")
    for rival in found.rivals:
        ahead = "power law" if rival.ratio > 0 else rival.name
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in rival.parameters.items())
        typer.echo(f"{rival.name:11} {numbers}; Vuong {rival.ratio:+.2f} for {ahead}, p {rival.p:.2g}")
    typer.echo(verdict)
    typer.echo("\n".join(["", *lines]))


def _p(found: "Fit") -> str:
    return f"{found.p:.2f}" if found.p else f"< {1 / found.bootstraps:g}"  # none of the refits was as far off


def _verdict(found: "Fit") -> str:
    """One sentence, honest about what the numbers do not say."""
    if found.at_bound:
        return "Power law rejected: the exponent ran to the edge of the range searched; the tail is a cut-off."
    if found.rejected:
        named = f"; the {found.better.name} is the better of those tried" if found.better else ""
        return f"Power law rejected: p {_p(found)}, and below 0.1 is ruled out{named}."
    if found.better:
        return f"Power law not ruled out, but the {found.better.name} fits the same tail better (p {found.better.p:.2g})."
    close = [rival.name for rival in found.rivals if rival.p >= 0.1]
    doubt = f"; nor is it told apart from: {', '.join(close)}" if close else " and beats the rivals tried"
    return f"Power law not rejected (p {_p(found)}){doubt}."


def _snippet(found: "Fit", whole: "Whole", lengths: Sequence[int], column: Column) -> list[str]:
    """Scenario lines for the column: the power law where it stands, else a lognormal of all values, else the data's quantiles."""
    from kvbench.units import share  # brings pydantic: not for --help

    key = "prompt" if column is Column.prompt else "output"
    if not found.rejected and not found.better:
        law = f"{key}: {{dist: power_law, alpha: {found.alpha:.3f}, min: {found.xmin}, max: {found.largest}}}"
        return [f"# describes the largest {share(found.tail / found.n)} of the values", law]
    if whole.ks <= _POOR:
        law = f"median: {whole.median:.0f}, sigma: {whole.sigma:.3f}, min: {min(lengths)}, max: {found.largest}"
        return [f"# a lognormal of all values, KS distance {whole.ks:.3f}", f"{key}: {{dist: lognormal, {law}}}"]
    import numpy as np

    middles = np.quantile(lengths, (np.arange(20) + 0.5) / 20, method="inverted_cdf")
    values, counts = np.unique(middles, return_counts=True)
    inline = ", ".join(f"{value}: {5 * count}%" for value, count in zip(values, counts, strict=True))
    why = f"# no law tried fits (lognormal of all values: KS distance {whole.ks:.3f}): the data's own quantiles instead"
    return [why, f"{key}: {{dist: histogram, values: {{{inline}}}}}"]


def _json(found: "Fit", whole: "Whole") -> dict[str, Any]:
    from dataclasses import asdict

    better = found.better.name if found.better else None
    return {"power_law": asdict(found) | {"rejected": found.rejected, "better": better}, "lognormal_all": asdict(whole)}
