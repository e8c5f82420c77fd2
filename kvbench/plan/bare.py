"""A scenario's machine for plans that play it bare: the run's own, but for what outlives a run."""

from kvbench.compose import build_machine, seeds
from kvbench.endpoint import Sim
from kvbench.engine import Machine


def bare(spec: Sim, seed: int) -> Machine:
    """The engine or cluster of a run with that seed. Drives are played by their profiles alone: real files would remember one
    play in the next."""
    tiers = spec.tiers
    if tiers is not None and tiers.ssd is not None:
        tiers = tiers.model_copy(update={"ssd": tiers.ssd.model_copy(update={"real": None})})
    routing = int(seeds(seed)["routing"].generate_state(1)[0])
    return build_machine(spec.model_copy(update={"tiers": tiers}), routing)
