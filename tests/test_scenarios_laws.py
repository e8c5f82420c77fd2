"""The shipped scenarios under their own laws, beside no law at all, on the same offered load: what the laws are shipped for."""

from pathlib import Path
from typing import Any

import pytest

from kvbench.plan.episode import Episode, Score, offers
from kvbench.scenario import load
from tests.whole import ROOT, Whole, simulated

SHORT = {
    "burst": ["phases.steady.for=3m"],
    "stair": ["phases.steady.for=6m", "workload.arrivals.every=30s"],
    "wave": ["phases.steady.for=5m"],
    "chaos": ["phases.steady.for=5m"],
}
OTHERS = {
    "none": "{law: none}",
    "bucket": "{law: bucket, rate: 4/s, patience: 2s}",
    "pid": "{law: pid, setpoint: 80%, patience: 2s}",
    "queue_feedback": "{law: queue_feedback, patience: 2s}",
}


def played(name: str, seed: int, folder: Path, *sets: str) -> Whole:
    """Without stop rules: `none` would trip them."""
    folder.mkdir()
    text = (ROOT / "scenarios" / f"{name}.yaml").read_text()
    return simulated(text, folder, *SHORT[name], f"seed={seed}", "stop=[]", "budget=null", *sets)


def holds_its_promise(name: str, seeds: range, folder: Path) -> None:
    """No request is lost for lack of cache, usage is above 95 % for less than 1 % of the time, goodput at least that of none."""
    above, good, free = [], [], []
    for seed in seeds:
        own = played(name, seed, folder / f"own-{seed}")
        none = played(name, seed, folder / f"none-{seed}", "control={law: none}")
        assert own.summary["outcomes"]["failed"] == none.summary["outcomes"]["failed"] == 0
        if name != "stair":  # how long its warm-up takes depends on the law
            assert own.summary["accounting"]["total"]["offered"] == none.summary["accounting"]["total"]["offered"]
        above.append(own.summary["control"]["time_above"]["value"])
        good.append(own.summary["goodput"]["value"])
        free.append(none.summary["goodput"]["value"])
    n = len(seeds)
    print(
        f"{name}: above 95 % {sum(above) / n:.2%} (worst {max(above):.2%}), goodput {sum(good) / n:.2%}, none {sum(free) / n:.2%}"
    )
    assert sum(above) / n < 0.01
    assert sum(good) >= sum(free)


@pytest.mark.parametrize("name", SHORT)
def test_a_shipped_scenario_under_its_law_stays_off_the_limit_and_loses_nothing_by_it(name: str, tmp_path: Path) -> None:
    holds_its_promise(name, range(1, 6), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_twenty_seeds_of_a_shipped_scenario(name: str, tmp_path: Path) -> None:
    holds_its_promise(name, range(1, 21), tmp_path)


def score(seed: int, seconds: int, *sets: str) -> Score:
    scenario: Any = load(ROOT / "scenarios/chaos.yaml", [f"seed={seed}", *sets])
    offered = offers(scenario, float(seconds))
    return Episode(scenario, offered, float(seconds), scenario.control.limits()).play(scenario.control.arm(None))


def learned_wins(seeds: range, seconds: int) -> None:
    """Mean goodput over seeds that the policy was not trained on (training took 1000 and up)."""
    found = {"learned": [score(seed, seconds).goodput for seed in seeds]}
    for law, control in OTHERS.items():
        found[law] = [score(seed, seconds, f"control={control}").goodput for seed in seeds]
    means = {law: sum(each) / len(each) for law, each in found.items()}
    print({law: f"{mean:.2%}" for law, mean in means.items()})
    assert max(means, key=means.__getitem__) == "learned", means


def test_in_chaos_learned_has_the_best_goodput_on_seeds_it_was_not_trained_on() -> None:
    learned_wins(range(1, 6), 300)


@pytest.mark.slow
def test_in_chaos_learned_has_the_best_goodput_on_twenty_seeds() -> None:
    learned_wins(range(1, 21), 480)
