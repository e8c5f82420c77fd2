"""The command line: one file per verb. It parses and prints, and decides nothing.

Verbs import what they need when they run, so that `kvbench --help` answers at once.
"""

import errno
import io
import sys

import typer

from kvbench import __version__
from kvbench.cli.agent import agent
from kvbench.cli.check import check
from kvbench.cli.curve import curve
from kvbench.cli.doctor import doctor
from kvbench.cli.export import export
from kvbench.cli.laws import laws
from kvbench.cli.metrics import metrics
from kvbench.cli.profile import profile
from kvbench.cli.report import report
from kvbench.cli.run import run
from kvbench.cli.schema import schema
from kvbench.cli.serve import serve
from kvbench.cli.size import size
from kvbench.cli.trace import trace

app = typer.Typer(
    name="kvbench",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="How much load an LLM serving setup takes before its KV cache gives way, and what gives way first.",
    epilog="Examples:  kvbench run scenarios/wave.yaml  |  kvbench run scenarios/smoke.yaml --target http://127.0.0.1:8000  |  "
    "kvbench check scenarios/stair.yaml  |  kvbench report results/wave-...",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvbench {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version and exit."),
) -> None:
    """Options of every verb."""


app.command()(run)
app.command()(check)
app.command()(curve)
app.command()(schema)
app.command()(report)
app.command()(export)
app.command()(doctor)
app.command()(metrics)
app.command()(profile)
app.command()(size)
app.command()(serve)
app.command()(agent)
app.add_typer(trace, name="trace")
app.add_typer(laws, name="laws")


def main() -> None:
    """The `kvbench` command. What stdout's encoding cannot show (a name, a server's words) is shown as ?, and ends nothing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        app()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        sys.exit(f"error: what was to be printed cannot be written: {error.strerror}")  # exit code 1
