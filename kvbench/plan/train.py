"""Train a policy of the `learned` law: episodes of a scenario's load in virtual time, on one core, the same bytes for a seed.

Direct policy search. A policy is a preference for each bin of each feature; those of a state's bins add up to the index of its
action. In each generation pairs of mirrored perturbations play the same load, a new one for each pair, and what they differ by,
along their perturbation, is an unbiased estimate of the gradient of the expected reward: no credit has to be given to single
decisions, whose consequences come ten seconds later and mixed with those of others. Of the generations the one that does best on
loads set aside is kept. Exploring is safe: the law shuts the gate at its `kv_limit` whatever a perturbation prefers.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench import __version__
from kvbench.control.law import Open
from kvbench.control.learned import Act, Learned
from kvbench.control.policy import FEATURES, Policy
from kvbench.core import Seconds
from kvbench.plan.episode import Episode, Offer, Score, mean, offers
from kvbench.scenario import Scenario
from kvbench.spec import plain

Weights = NDArray[np.float64]  # [bins of all features], in indices of ACTIONS

EDGES: dict[str, list[float]] = {
    "error": [0.001],
    "waiting": [1.0, 3.0],
    "trend": [-0.01, 0.02],
    "kv_usage": [0.4, 0.65, 0.76, 0.83, 0.88],
}
ACTIONS = [0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0]
PRIOR: dict[str, list[float]] = {  # where the search starts: the whole room, less near the limit and while the server queues
    "error": [0.0, 0.0],
    "waiting": [0.0, -1.0, -4.0],
    "trend": [0.0, 0.0, -0.5],
    "kv_usage": [6.0, 6.0, 6.0, 5.5, 4.0, 1.5],
}
SHARE = 0.025  # KV usage of a request, before any was seen
ENOUGH = 30  # control periods in a state from which on it is known
WIDTH = 1.0  # standard deviation of a perturbation, in indices of ACTIONS
STRIDE = 0.25  # length of the first step, in widths and per root of the number of weights
FADE = 0.85  # by which each step is shorter than the one before
MEMORY = 0.7  # of slopes: one generation alone tells little more than its noise
PRICE = 0.7  # of a full cache, in goodput: linear, so that loads which fill it are not judged apart from those that do not
REWARD = f"goodput - {PRICE} x share of seconds with kv_usage above 95 %"


@dataclass(frozen=True)
class Effort:
    """How much is played: generations of pairs of episodes, and the loads that choose between the generations."""

    generations: int = 6
    pairs: int = 16
    judged: int = 12
    seconds: Seconds = 300.0
    first: int = 1000  # seeds of the episodes start here, those set aside first


@dataclass
class Trainer:
    """`fresh` gives the scenario with a seed of its own; `say` hears what each generation came to."""

    fresh: Callable[[int], Scenario]
    effort: Effort = field(default_factory=Effort)
    say: Callable[[str], None] = lambda text: None
    episodes: int = field(default=0, init=False)

    def train(self, seed: int) -> Policy:
        """ValueError where the scenario's load cannot be played bare (see plan.episode), or none of its requests is ever served
        within its limits: then nothing tells policies apart."""
        effort, rng = self.effort, np.random.default_rng(seed)
        scenario = self.fresh(effort.first)
        self.spec, self.episodes, self.best = spec(scenario.control), 0, 0.0
        self.seen = np.zeros(len(_table(prior())), np.int64)
        aside = [self._load(effort.first + i) for i in range(effort.judged)]
        weights = best = prior()
        before = top = self._judge(weights, aside, "start")
        slope = np.zeros_like(weights)
        for generation in range(effort.generations):
            first = effort.first + effort.judged + generation * effort.pairs
            slope = MEMORY * slope + self._slope(weights, [self._load(first + i) for i in range(effort.pairs)], rng)
            if not self.best:
                raise ValueError(self._unserved(before))
            length = STRIDE * WIDTH * np.sqrt(len(weights)) * FADE**generation
            weights = weights + slope * (length / max(float(np.linalg.norm(slope)), 1e-12))
            found = self._judge(weights, aside, f"generation {generation + 1} of {effort.generations}")
            if reward(found) > reward(top):
                best, top = weights, found
        return self._policy(best, self._how(scenario, seed, before, top))

    def _load(self, seed: int) -> tuple[Scenario, list[Offer]]:
        scenario = self.fresh(seed)
        return scenario, offers(scenario, self.effort.seconds)

    def _slope(self, weights: Weights, loads: list[tuple[Scenario, list[Offer]]], rng: np.random.Generator) -> Weights:
        slope = np.zeros_like(weights)
        for load in loads:
            step = WIDTH * rng.standard_normal(len(weights))
            slope += step * (reward([self._play(weights + step, load)]) - reward([self._play(weights - step, load)]))
        return slope / len(loads)

    def _judge(self, weights: Weights, loads: list[tuple[Scenario, list[Offer]]], title: str) -> list[Score]:
        scores = [self._play(weights, load) for load in loads]
        told = mean(scores)
        self.say(f"{title}: goodput {told['goodput']:.2%}, cache full {told['full']:.2%} of the time, shed {told['shed']:.2%}")
        return scores

    def _play(self, weights: Weights, load: tuple[Scenario, list[Offer]]) -> Score:
        law = Act(self.spec, self._policy(weights, {}))
        self.episodes += 1
        score = Episode(load[0], load[1], self.effort.seconds, law.limits).play(law)
        self.seen += np.array(law.visits)
        self.best = max(self.best, score.goodput)
        return score

    def _unserved(self, scores: list[Score]) -> str:
        offered, refused = sum(score.offered for score in scores), next((score.refused for score in scores if score.refused), "")
        why = f"the engine refuses them ({refused})" if refused else "see their limits (slo), the load and control.patience"
        return f"goodput is 0 in all {self.episodes} episodes so far, of {offered:,} requests in the first {len(scores)}: {why}"

    def _policy(self, weights: Weights, how: dict[str, Any]) -> Policy:
        """While training every state is known: what is tried is the table, not the fallback."""
        table = _table(weights)
        seen = self.seen.tolist() if how else [ENOUGH] * len(table)
        return Policy(
            trained=how, share=SHARE, kv_limit=self.spec.kv_limit, edges=EDGES, actions=ACTIONS, table=table, seen=seen,
            enough=ENOUGH,
        )  # fmt: skip

    def _how(self, scenario: Scenario, seed: int, before: list[Score], after: list[Score]) -> dict[str, Any]:
        effort = self.effort
        last = effort.first + effort.judged + effort.generations * effort.pairs - 1
        return {
            "scenario": scenario.name, "digest": digest(scenario), "control": _control(self.spec), "seed": seed,
            "episodes": self.episodes,
            "seconds": effort.seconds, "load_seeds": [effort.first, last], "set_aside": effort.judged,
            "method": "mirrored perturbations of bin preferences, best generation on the loads set aside", "reward": REWARD,
            "before": mean(before), "after": mean(after), "versions": {"kvbench": __version__, "numpy": np.__version__},
        }  # fmt: skip


def spec(control: Open) -> Learned:
    """The law as the scenario's own control would have it, whichever policy it names."""
    shared = {name: getattr(control, name) for name in Learned.model_fields if name in type(control).model_fields}
    return Learned.model_construct(**shared)


def prior() -> Weights:
    return np.array([weight for name in FEATURES for weight in PRIOR[name]])


def _table(weights: Weights) -> list[int]:
    """The action's index of each state, the last feature running fastest."""
    parts, at = [], 0
    for name in FEATURES:
        parts.append(weights[at : at + len(EDGES[name]) + 1].tolist())
        at += len(EDGES[name]) + 1
    return [min(max(round(sum(chosen)), 0), len(ACTIONS) - 1) for chosen in product(*parts)]


def reward(scores: list[Score]) -> float:
    return float(np.mean([score.goodput - PRICE * score.full for score in scores]))


def digest(scenario: Scenario) -> str:
    """Of what a policy is trained against: the target and the load, whatever their seed."""
    data = scenario.resolved()
    data["workload"]["arrivals"].pop("seed", None)
    return hashlib.sha256(json.dumps([data["target"], data["workload"]], sort_keys=True).encode()).hexdigest()[:16]


def _control(law: Learned) -> dict[str, Any]:
    """What of the control block an episode goes by."""
    return dict(plain({name: getattr(law, name) for name in ("inflight", "patience", "every", "over")}))
