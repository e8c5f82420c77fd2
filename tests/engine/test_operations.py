"""Random operations on whole machines, with every invariant checked after each: one engine and clusters, with layer groups that
move quota, tiers, faults, losses and retention. 1,920 operations in the quick suite, 100,000 in the slow one."""

import hashlib
import math
import random
from collections import Counter
from typing import Any

import pytest

from kvbench.compose import build_machine
from kvbench.endpoint import Sim
from kvbench.engine import Done, Job, Machine
from kvbench.engine.engine import Engine
from kvbench.engine.tape import Access

LAYERS: dict[str, Any] = {
    "groups": [
        {"layers": "1-6", "block": 4, "quota": 0.3},
        {"layers": "7-12", "codec": "fp8", "block": 8, "quota": 0.2},
        {"layers": "13+", "codec": "int4-g64", "quota": 0.3},
    ],
    "partition": "dynamic",
    "every": 0.3,
}
BACK = {"host": {"capacity": 2e7}, "ssd": {"capacity": 4e7}, "spill": "swap", "prefetch": 2, "persist": 0.5}
THROUGH = {"host": {"capacity": 2e7}, "ssd": {"capacity": 8e7}, "write": "write_through", "restore": "cheaper"}
CHOSEN = {"host": {"capacity": 1e7}, "remote": {"capacity": 1e8}, "write": "selective", "admit": {"frequency": 2, "decay": 1}}
THREE = {"replicas": 3, "router": "load_aware", "migrate": 1e9, "store": {"cold": 0.3}, "detect": 0.05}
APART = {"nodes": [{"role": "prefill"}, {"role": "decode", "replicas": 2}], "transfer": {"bandwidth": 1e9}, "on_loss": "fail"}
MACHINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "retention": {"settings": {"retain": 0.5, "retain_tokens": 20, "policy": "s3fifo", "order": "priority"}},
    "layers": {"layers": LAYERS, "settings": {"policy": "arc", "retain": 0.2}},
    "tiers": {"tiers": BACK},
    "layers and tiers": {"layers": LAYERS, "tiers": THROUGH, "settings": {"policy": "learned", "preallocate": 0.5}},
    "cluster": {"cluster": THREE},
    "cluster with all": {
        "cluster": THREE, "layers": LAYERS, "tiers": CHOSEN, "settings": {"policy": "sieve", "victim": "most_blocks"},
    },
    "apart": {"cluster": APART, "tiers": BACK, "settings": {"prefill": "whole"}},
}  # fmt: skip


def faults(rng: random.Random, until: float, spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Every kind that the machine can have, here and there; what cannot end by itself is left out."""

    def some(kind: str, count: int, **more: Any) -> list[dict[str, Any]]:
        return [{"kind": kind, "at": rng.uniform(0, until), "for": rng.uniform(0.05, 0.6), **more} for _ in range(count)]

    many = max(1, round(until / 8))
    found = some("slow", many, factor=3) + some("pinned", many, share=0.4) + some("refuse", many, share=0.3)
    found += some("stall", many) + some("gc_pause", many, every=0.1, pause=0.02) + some("double_free", many, every=0.1)
    found += some("alloc_retry", many, share=0.2, pause=0.01) + some("fragmentation", many, fit="bin")
    found += some("reset_storm", many, every=0.1, running=rng.choice(["preempt", "refuse"])) + some("oversized", many, share=0.5)
    found += some("slow_tier", many, tier="host", factor=4) if "tiers" in spec else []
    if "cluster" in spec:
        at = 1.0
        while at < until:
            found.append({"kind": "node_loss", "node": rng.randrange(3), "at": at, "for": rng.uniform(0.1, 0.5)})
            at += rng.uniform(2, 6)
    return found


class Witness:
    """What the tape must never say: a block is taken or given up that somebody holds, a look-up finds what is not there."""

    def __init__(self) -> None:
        self.told: Counter[str] = Counter()
        self._held: set[tuple[int, int, int]] = set()
        self._there: dict[tuple[int, int, int], int] = {}

    def __call__(self, access: Access) -> None:
        self.told[access.op] += 1
        if access.tier != "gpu" or access.op in ("spill", "restore", "migrate") or (access.op, access.key) == ("reset", None):
            return
        place = (access.node, access.group, access.block)
        if access.op == "alloc":
            assert place not in self._held, "a block was taken that somebody holds"
            assert place not in self._there, "a block was taken with its content"
            self._held.add(place)
        elif access.op == "store":
            assert access.key is not None
            self._there[place] = access.key
        elif access.op == "hit":
            assert self._there[place] == access.key, "found what is not there"
            self._held.add(place)
        elif access.op == "free":
            self._held.discard(place)
        elif access.op in ("evict", "reset"):
            assert place not in self._held, "a block was given up that somebody holds"
            assert self._there.pop(place) == access.key


def engines(machine: Any) -> list[Engine]:
    return [machine] if isinstance(machine, Engine) else [node.engine for node in machine.nodes if node.up]


def counted(machine: Machine) -> None:
    """free + cached + referenced = total, in every pool, counted apart from the pool's own check."""
    machine.check()
    for engine in engines(machine):
        for pool in engine.cache.pools:
            cached = sum(not pool._refs[block] for block in pool.index.values())
            assert pool.empty + cached + pool.referenced == pool.usable


class Play:
    """One machine under random operations. `log` is a digest of all that it said."""

    def __init__(self, name: str, seed: int, operations: int) -> None:
        spec, self.rng = MACHINES[name], random.Random(seed)
        settings = {"blocks": 81, "max_num_seqs": 12, "max_num_batched_tokens": 128, **spec.get("settings", {})}
        kinds = faults(self.rng, operations * 0.02, spec)
        target = {"model": "llama-3.1-8b", "hardware": "rtx-4090", "block": 4, "faults": kinds, **spec, "settings": settings}
        self.witness = Witness()
        self.machine = build_machine(Sim.model_validate(target), seed, [self.witness])
        self.live: set[int] = set()
        self.ends: Counter[str] = Counter()
        self.now, self.number, self.log = 0.0, 0, hashlib.blake2b()
        for _ in range(operations):
            self.step()
            counted(self.machine)
        self.rest()

    def take(self, until: float) -> None:
        self.now = max(self.now, until)
        for span in self.machine.advance(self.now):
            self.log.update(repr(span).encode())
            for done in span.done:
                self.over(done)

    def over(self, done: Done) -> None:
        self.live.remove(done.id)
        self.ends[done.failed or "ok"] += 1

    def step(self) -> None:
        choice = self.rng.random()
        if choice < 0.45 and len(self.live) < 40:
            self.take(self.now + self.rng.expovariate(300))
            self.submit()
        elif choice < 0.5 and self.live:
            gone = self.rng.choice(sorted(self.live))
            self.take(self.now)
            if gone in self.live:
                self.machine.cancel(gone, self.now)
                self.live.remove(gone)
                self.ends["cancelled"] += 1
        elif choice < 0.52:
            self.take(self.now)
            self.ends["reset" if self.machine.reset(self.now) else "no reset"] += 1
        elif choice < 0.85:
            self.take(min(self.machine.wake(), self.now + 0.2))
        else:
            self.take(self.now + self.rng.expovariate(20))
        self.log.update(repr(sorted(self.machine.gauges().items())).encode())

    def submit(self) -> None:
        """Prompts share heads, now and then a whole one before; some have several answers, a salt, a priority."""
        rng = self.rng
        own = rng.randrange(8) if rng.random() < 0.3 else 1000 + self.number
        segments = ((1 + rng.randrange(6), rng.randrange(1, 60)), (100 + own, rng.randrange(1, 40)))
        job = Job(
            self.number, segments, rng.choice([1, 2, 5, 20, 40]), rng.choice([1, 1, 1, 3]), rng.randrange(2), rng.randrange(3),
            rng.choice("ab"),
        )  # fmt: skip
        why = self.machine.submit(job, self.now)
        self.log.update(repr(why).encode())
        self.ends[why or "submitted"] += 1
        if why is None:
            self.live.add(self.number)
        self.number += 1

    def rest(self) -> None:
        """Everything ends, and nothing is held."""
        for _ in range(100_000):
            wake = self.machine.wake()
            if not self.live or math.isinf(wake):
                break
            self.take(wake)
        self.take(self.now + 60)  # the faults are over too
        counted(self.machine)
        assert not self.live
        assert not any(pool.referenced for engine in engines(self.machine) for pool in engine.cache.pools)
        self.machine.close()


@pytest.mark.parametrize("name", MACHINES)
def test_every_invariant_holds_after_each_of_many_operations(name: str) -> None:
    play = Play(name, 7, 240)
    assert play.ends["ok"] > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("seed", range(5))
def test_every_invariant_holds_after_each_of_100_000_operations(name: str, seed: int) -> None:
    play = Play(name, seed, 2500)
    assert play.ends["ok"] > 200
    assert play.ends["cancelled"] > 50
    assert play.witness.told["evict"] > 1000


@pytest.mark.parametrize("name", ["retention", "cluster with all"])
def test_the_same_seed_is_the_same_story(name: str) -> None:
    digests = [Play(name, seed, 60).log.hexdigest() for seed in (3, 3, 4)]
    assert digests[0] == digests[1] != digests[2]
