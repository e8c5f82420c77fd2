"""`kvbench laws`: what control laws do on a scenario. One verb per file where it is more than a few lines."""

import typer

from kvbench.cli.compare import compare
from kvbench.cli.train import train
from kvbench.cli.tune import tune

laws = typer.Typer(help="Compare, tune and train control laws.", no_args_is_help=True)
laws.command()(compare)
laws.command()(train)
laws.command()(tune)
