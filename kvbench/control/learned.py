"""Learned: a policy trained in virtual time says, by the state of the cache and its queue, how fast to let requests in.

Actions are factors on a rate that is measured: what would fill the KV cache up to `kv_limit` in one control period, counted in
requests of the size that the running ones have shown. So a policy carries over to a cache of another size, every action dies away
towards the limit, and at the limit the gate is shut whatever the table says or exploring would try (what is running still grows,
token by token). A state that training saw too seldom is answered by plain feedback, and counted.
"""

from pathlib import Path
from random import Random
from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field, ValidationInfo, field_validator

from kvbench.control import Law
from kvbench.control.law import SIGNALS, Open
from kvbench.control.policy import Policy, is_file, load, read
from kvbench.core import Limits, Seconds, Window
from kvbench.units import Share

FEW = 3  # running requests from which on their mean size says something
FOLLOWING = 0.3  # share by which the size follows a reading
QUEUE = 2  # requests waiting in the server from which on feedback lets nothing in
BURST = 4.0  # room is given at once, not spread over the period: the cache fills anyway by the token


class Learned(Open):
    """A policy trained in virtual time: a rate by the state of the KV cache and its queue; feedback where it never was."""

    policy: str = Field("chaos", description="one of profiles/laws, or a file that `kvbench laws train` made: `./mine.yaml`")
    kv_limit: Annotated[Share, Field(gt=0, le=1)] = Field(0.9, description="KV usage from which nothing more is admitted")
    explore: Share = Field(0.0, le=1, description="share of control periods that try the action beside the best known one")
    seed: int = Field(0, ge=0, description="of what is tried")
    example: ClassVar[dict[str, Any]] = {"policy": "chaos"}

    @field_validator("policy")
    @classmethod
    def _known(cls, value: str, info: ValidationInfo) -> str:
        """A file's path is from the scenario in the file, and from here in what is read of it."""
        if not is_file(value):
            load(value)
            return value
        path = Path((info.context or {}).get("folder", "."), value).expanduser()
        if not path.is_file():
            raise ValueError(f"no file {str(path)!r} (paths are relative to the scenario file)")
        read(path)
        return str(path) if is_file(str(path)) else f"./{path}"

    def limits(self, rate: float | None = None, burst: float = 1.0) -> Limits:
        """Without a rate, those until the first reading."""
        return super().limits(self.first(load(self.policy)) if rate is None else rate, burst)

    def first(self, policy: Policy) -> float:
        """The rate at which an empty cache fills within one control period."""
        return self.kv_limit / policy.share / self.every

    def arm(self, offered: float | None) -> Law:
        return Act(self, load(self.policy))


class Act:
    """The policy at work in one run."""

    def __init__(self, spec: Learned, policy: Policy) -> None:
        self.spec, self.policy = spec, policy
        self.limits = spec.limits(spec.first(policy))
        self.share = policy.share  # KV usage of one running request
        self.visits = [0] * policy.states
        self.updates = self.stale = self.fallbacks = self.explored = self.shut = 0
        self._random = Random(spec.seed)
        self._last: tuple[Seconds, float] | None = None  # when the KV usage was read, and it
        self._state: dict[str, float] = {}

    def update(self, window: Window) -> Limits:
        """Without KV usage or queue, or with old ones, the law holds still."""
        self.updates += 1
        every = self.spec.every
        usage, waiting = SIGNALS["kv_usage"].read(window, every), SIGNALS["waiting"].read(window, every)
        if usage is None or waiting is None:
            self.stale += 1
            self._last = None
            return self.limits
        inflight = window.counts.get("inflight", 0)
        self._measure(usage, inflight - waiting)
        values = {"error": unserved(window), "waiting": waiting, "trend": self._trend(window.end, usage), "kv_usage": usage}
        factor = self._factor(values)
        free = (self.spec.kv_limit - usage) / self.share  # requests for which there is room
        self._state = {**values, "footprint": self.share, "factor": factor, "free": free}
        if free > 0:
            self.limits = self._let_in(factor * free, inflight, window)
        else:
            self.shut += 1
            self.limits = self.spec.limits(0.0, BURST)
        return self.limits

    def _let_in(self, room: float, inflight: int, window: Window) -> Limits:
        """So many more than there are, and one for each that ends meanwhile: as a rate, and as a cap against misjudging it."""
        ended = window.counts.get("ok", 0) / max(window.end - window.start, 1.0)
        limits = self.spec.limits(room / self.spec.every + ended, BURST)
        return msgspec.structs.replace(limits, inflight=min(limits.inflight, max(1, inflight + int(room))))

    def _factor(self, values: dict[str, float]) -> float:
        policy, state = self.policy, self.policy.state(values)
        self.visits[state] += 1
        if not policy.known(state):
            self.fallbacks += 1
            return feedback(values["waiting"])
        action = policy.table[state]
        if self.spec.explore and self._random.random() < self.spec.explore:
            self.explored += 1
            action = min(max(action + self._random.choice((-1, 1)), 0), len(policy.actions) - 1)
        return policy.actions[action]

    def _measure(self, usage: float, running: float) -> None:
        if running >= FEW and usage > 0:
            self.share += FOLLOWING * (usage / running - self.share)

    def _trend(self, now: Seconds, usage: float) -> float:
        before, self._last = self._last, (now, usage)
        return (usage - before[1]) / (now - before[0]) if before is not None and now > before[0] else 0.0

    def state(self) -> dict[str, float]:
        return self._state

    def told(self) -> dict[str, Any]:
        counts = {"stale": self.stale, "fallbacks": self.fallbacks, "explored": self.explored, "shut": self.shut}
        return {"policy": self.policy.name, "updates": self.updates, **counts}


def feedback(waiting: float) -> float:
    """The factor where no policy is known: half of the room, less the longer the server's queue, nothing from QUEUE on."""
    return 0.5 * max(0.0, 1 - waiting / QUEUE)


def unserved(window: Window) -> float:
    """The share of the requests that ended in the window and were not served, those shed at our gate among them."""
    missed = sum(window.counts.get(name, 0) for name in ("failed", "rejected", "timeout", "shed"))
    return missed / max(1, missed + window.counts.get("ok", 0))
