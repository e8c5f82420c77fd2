"""`kvbench laws train`: a policy of the `learned` law, trained on a scenario's load in virtual time."""

from pathlib import Path

import typer


def train(
    file: Path = typer.Argument(help="The scenario file; its target is the embedded engine."),
    seed: int = typer.Option(0, "--seed", min=0, help="Of the search. The same seed gives the same file."),
    set_: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Override a value, as in --set control.patience=2s."),
    out: Path | None = typer.Option(
        None, "--out", metavar="FILE", help="Where the policy goes; left out, the scenario's name with .yaml, here."
    ),
    generations: int = typer.Option(6, "--generations", min=1, max=1000, help="Steps of the search."),
    pairs: int = typer.Option(16, "--pairs", min=1, max=1000, help="Pairs of episodes that a step is made from."),
    seconds: float = typer.Option(300.0, "--seconds", min=10, max=86400, help="Length of an episode, in virtual time."),
) -> None:
    """Train a policy of the learned law on the embedded engine: some minutes on one core, the same file for the same seed.

    Episodes play the scenario's load under seeds from 1000 on, so that smaller ones stay unseen for comparisons.

    Example: kvbench laws train scenarios/chaos.yaml

    Exit codes: 0 written; 1 the file cannot be written; 2 scenario, or nothing can be learned from it.
    """
    from kvbench.control.policy import write
    from kvbench.plan.train import Effort, Trainer
    from kvbench.scenario import Scenario, ScenarioError, load

    def fresh(number: int) -> Scenario:
        return load(file, [*set_, f"seed={number}"])

    effort = Effort(generations=generations, pairs=pairs, seconds=seconds)
    try:
        path = out or Path(f"{load(file, set_).name}.yaml")
        _replaceable(path)
        policy = Trainer(fresh, effort, typer.echo).train(seed)
    except ScenarioError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except ValueError as error:
        typer.echo(f"{file} cannot be trained on: {error}", err=True)
        raise typer.Exit(2) from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(write(policy))
    except OSError as error:
        typer.echo(f"the policy cannot be written: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"written to {path}: {policy.trained['episodes']} episodes")
    typer.echo(f"a scenario beside it names it so: control: {{law: learned, policy: ./{path.name}}}")


def _replaceable(path: Path) -> None:
    """ValueError where something else than a policy, the scenario itself perhaps, would be written over."""
    from kvbench.control.policy import read

    if not path.exists():
        return
    try:
        read(path)
    except ValueError:
        raise ValueError(f"{path} is there and is no policy, so it is kept: say with --out where the policy goes") from None
