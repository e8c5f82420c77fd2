"""`kvbench profile`: an Nsight Systems capture by layer, and on a run's clock. Parses and prints, decides nothing."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

File = Annotated[Path, typer.Argument(metavar="FILE", help="A capture (.nsys-rep, .qdrep: needs nsys) or its export (.sqlite).")]
Run = Annotated[Path | None, typer.Option("--run", metavar="DIR", help="The run directory in whose time it was captured.")]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all of it as JSON; - for stdout, and no tables.")
]
SHOWN = 12  # rows of a table of names
LAYERS = 1000  # rows of the table of layers


def profile(file: File, run: Run = None, json_file: Json = None) -> None:
    """How long each layer of a model took on CPU and GPU, which stand out, and what the GPU did meanwhile.

    Examples: kvbench profile capture.nsys-rep   |   kvbench profile capture.sqlite --run results/wave-... --json profile.json

    Exit codes: 0 layers were found; 1 none were (the rest is shown, with advice); 2 it cannot be read, or is not of the run;
    130/143 interrupted.
    """
    from kvbench.nsys import CaptureError
    from kvbench.nsys.account import profiled
    from kvbench.nsys.events import read
    from kvbench.nsys.source import opened
    from kvbench.signals import unwinding

    unwinding()
    try:
        if json_file is not None and json_file.exists() and file.exists() and json_file.samefile(file):
            raise CaptureError(f"--json: {json_file} is the capture itself, and would be lost")
        with opened(file) as tables:
            capture = read(tables)
        told = {**profiled(capture), "file": str(file), "run": None}
        if run is not None:
            told["run"] = _on_run(capture, run)
        text = _text(told) if json_file is not None else ""
        if json_file is not None and str(json_file) != "-":
            json_file.write_text(text, encoding="utf-8")
    except (CaptureError, OSError, MemoryError) as error:
        typer.echo(f"kvbench profile: {error or 'it does not fit into memory'}", err=True)
        raise typer.Exit(2) from None
    if str(json_file) == "-":
        typer.echo(text, nl=False)
    else:
        try:
            _show(told)
        except SystemExit as left:
            if left.code != 1:  # rich's, where `| head` has read enough: the exit code is still that of the capture
                raise
    if told["advice"] is not None:
        typer.echo(f"kvbench profile: {file}: {told['advice']}", err=True)
        raise typer.Exit(1)


def _on_run(capture: Any, directory: Path) -> dict[str, Any]:
    from kvbench.nsys import CaptureError
    from kvbench.nsys.align import aligned
    from kvbench.replay import began
    from kvbench.report.files import load

    try:
        files = load(directory)
        wall = began(files)
    except ValueError as error:
        raise CaptureError(f"--run: {error}") from None
    if files.virtual:
        raise CaptureError(f"--run: {directory} had a virtual clock, so no capture lies in its time")
    return {"directory": str(directory), **aligned(capture, wall, files.windows, files.events)}


def _text(told: dict[str, Any]) -> str:
    import json

    return json.dumps(told, indent=2, allow_nan=False) + "\n"


def _show(told: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 160)  # a file has room for every column
    _head(console, told)
    if told["layers"]:
        more = f"; {len(told['layers']) - LAYERS:,} more in the JSON" if len(told["layers"]) > LAYERS else ""
        _section(console, f"layers (share and outliers by {told['by'].upper()} time{more})", _layers(told))
    for key, title in (("parts", "parts of layers"), ("unknown", "ranges that are no layer by name")):
        if told[key]:
            _section(console, title + _more(told, key), _ranges(told[key]))
    if told["kernels"]:
        _section(console, "kernels" + _more(told, "kernels"), _kernels(told["kernels"]))
    if told["memory"]:
        _section(console, "memory operations", _memory(told["memory"]))
    if told["devices"]:
        _section(console, "GPUs", _devices(told["devices"]))
        _section(console, "longest gaps", _gaps(told["devices"]))
    if told["metrics"]:
        _section(console, "GPU metrics", _metrics(told["metrics"]))
    if told["run"]:
        _run(console, told["run"])
    for note in told["notes"]:
        _line(console, f"! {note}")
    for each in told["diagnostics"]:
        _line(console, f"! nsys {'warns' if each['severity'] == 2 else 'reports'}: {each['text']}")


def _head(console: "Console", told: dict[str, Any]) -> None:
    from datetime import UTC, datetime

    from kvbench import units

    when = f", from {datetime.fromtimestamp(told['began'], UTC):%Y-%m-%d %H:%M:%S} UTC" if told["began"] is not None else ""
    ranges = told["ranges"]
    stacks = len({row["stack"] for row in told["layers"]})
    of = f" in {stacks} stacks" if stacks > 1 else ""
    mode = ", eager mode" if told["mode"] else ""
    _line(
        console,
        f"{told['file']}: {units.duration(told['seconds'])}{when}, nsys {told['exporter'] or 'of an unknown version'}{mode}",
    )
    _line(console, f"{len(told['layers'])} layers{of}, {ranges['passes']:,} passes; {ranges['count']:,} NVTX ranges")


def _layers(told: dict[str, Any]) -> "Table":
    from kvbench import units

    several = len({row["stack"] for row in told["layers"]}) > 1
    table = _table(
        "layer", "passes", "CPU mean", "median", "p99", "GPU mean", "median", "p99", "share", "z", "kernels", "top kernel"
    )
    for row in told["layers"][:LAYERS]:
        name = f"{row['stack']}.{row['layer']}" if several else str(row["layer"])
        times = [units.duration(row[on][key]) if row[on] else "-" for on in ("cpu", "gpu") for key in ("mean", "median", "p99")]
        z = "-" if row["z"] is None else f"{row['z']:.1f}{' !' if row['outlier'] else ''}"
        top = row["top_kernels"][0]["name"] if row["top_kernels"] else "-"
        share = units.share(row["share"])
        cells = [name, f"{row['count']:,}", *times, share, z, f"{row['kernels']:.4g}", top]
        table.add_row(*map(_plain, cells), style="yellow" if row["outlier"] else None)
    return table


def _ranges(rows: list[dict[str, Any]]) -> "Table":
    from kvbench import units

    table = _table("name", "count", "CPU total", "mean", "median", "p99", "GPU total", "mean", "median", "p99")
    for row in rows[:SHOWN]:
        times = [units.duration(on[key]) if on else "-" for on in (row, row["gpu"]) for key in ("total", "mean", "median", "p99")]
        table.add_row(_plain(row["name"]), f"{row['count']:,}", *times)
    return table


def _kernels(rows: list[dict[str, Any]]) -> "Table":
    from kvbench import units

    table = _table("name", "count", "total", "share", "mean", "median", "p99")
    for row in rows[:SHOWN]:
        times = [units.duration(row[key]) for key in ("mean", "median", "p99")]
        table.add_row(_plain(row["name"]), f"{row['count']:,}", units.duration(row["total"]), units.share(row["share"]), *times)
    return table


def _memory(rows: list[dict[str, Any]]) -> "Table":
    from kvbench import units

    table = _table("kind", "count", "total", "median", "p99", "bytes", "largest", "bandwidth")
    for row in rows:
        rate = "-" if row["bytes_per_s"] is None else f"{units.size(row['bytes_per_s'])}/s"
        times = [units.duration(row[key]) for key in ("total", "median", "p99")]
        table.add_row(
            _plain(row["name"]), f"{row['count']:,}", *times, units.size(row["bytes"]), units.size(row["largest"]), rate
        )
    return table


def _devices(rows: list[dict[str, Any]]) -> "Table":
    from kvbench import units

    table = _table("GPU", "operations", "busy", "busy share", "outside layers", "gaps", "gap time", "longest")
    for row in rows:
        parts = [(f"{row['device']} {row['name']}", row)]
        parts += [(f"  stream {each['stream']}", each) for each in row["streams"] if len(row["streams"]) > 1]
        for name, of in parts:
            gaps = of["gaps"]
            table.add_row(
                _plain(name), f"{of['operations']:,}", units.duration(of["busy"]), units.share(of["busy_share"]),
                units.share(of.get("outside_layers")), f"{gaps['count']:,}", units.duration(gaps.get("total")),
                units.duration(gaps.get("max")),
            )  # fmt: skip
    return table


def _gaps(rows: list[dict[str, Any]]) -> "Table":
    from kvbench import units

    table = _table("GPU", "at", "idle", "before it", "after it")
    for row in rows:
        for gap in row["top_gaps"][: SHOWN // 2]:
            names = [_plain(gap["before"]), _plain(gap["after"])]
            table.add_row(str(row["device"]), units.duration(gap["at"]), units.duration(gap["seconds"]), *names)
    return table


def _metrics(rows: list[dict[str, Any]]) -> "Table":
    from kvbench import units

    table = _table("metric", "GPU", "samples", "mean", "p99", "max", "bandwidth")
    for row in rows:
        rate = "-" if row["bytes_per_s"] is None else f"{units.size(row['bytes_per_s'])}/s"
        numbers = [f"{row[key]:.4g}" for key in ("mean", "p99", "max")]
        table.add_row(_plain(row["name"]), str(row["device"]), f"{row['samples']:,}", *numbers, rate)
    return table


def _run(console: "Console", told: dict[str, Any]) -> None:
    from kvbench import units

    where = ", ".join(told["phases"]) or "no phase"
    _line(console, f"\nof the run {told['directory']}: {told['from']:.2f} to {told['to']:.2f} s ({where})")
    table = _table("window", "captured", "tokens/s", "ok/s", "ttft p50", "p99", "itl p99", "kv usage", "running", "waiting")
    for row in sorted(told["windows"], key=lambda each: (-each["covered"], each["start"]))[:SHOWN]:
        times = [units.duration(row[key]) for key in ("ttft_p50", "ttft_p99", "itl_p99")]
        usual = [_number(row[key]) for key in ("output_tokens_rate", "ok_rate")]
        ends = [units.share(row["kv_usage_mean"]), _number(row["running_mean"]), _number(row["waiting_mean"])]
        table.add_row(f"{row['start']:g} to {row['end']:g} s", units.share(row["covered"]), *usual, *times, *ends)
    console.print(table)
    for name, rate in told["rates"].items():
        _line(
            console,
            f"{name}: {_number(rate['covered'])} in these windows, {_number(rate['rest_of_phase'])} in the phase's others",
        )


def _table(*names: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        words = name in ("name", "layer", "kind", "top kernel", "before it", "after it", "metric", "GPU", "window")
        table.add_column(name, justify="left" if words else "right", overflow="ellipsis", no_wrap=True, max_width=60)
    return table


def _section(console: "Console", title: str, table: "Table") -> None:
    console.print(f"\n[bold]{title}[/bold]")
    console.print(table)


def _line(console: "Console", text: str) -> None:
    console.print(_plain(text) if not text.startswith("\n") else "\n" + _plain(text[1:]), soft_wrap=True)


def _more(told: dict[str, Any], key: str) -> str:
    more = told[f"{key}_unlisted"] + max(0, len(told[key]) - SHOWN)
    return f" ({more:,} more)" if more else ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}"


def _plain(text: str) -> str:
    from rich.markup import escape

    from kvbench.report.text import plain

    return escape(plain(text))
