"""What goes wrong with a server for a while, on the run's clock. One class and one line in FAULTS per kind.

A fault acts through what the engine shows: its KV memory (`cache.pools`, `batch.conditions`), `stall` and `resume`, `preempt`,
`submit`, and `harm`, which also keeps what the faults leave behind. When they act is said in fault.py.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from kvbench.core import Nanos
from kvbench.engine import Job
from kvbench.engine.fault import Agenda, Edge, Fault, Periodic, Strike, edges
from kvbench.engine.harm import Contiguous, Doubt, Leaking, Slowable
from kvbench.units import Share, Span

if TYPE_CHECKING:
    from kvbench.engine.engine import Engine

__all__ = ["FAULTS", "Agenda", "Edge", "Fault", "by_node", "edges"]

Part = Annotated[Share, Field(gt=0, le=1)]
Factor = Annotated[float, Field(ge=1, le=1e6)]


class Slow(Fault):
    """Every step takes `factor` times as long: a throttled device, a noisy neighbour, with `node` a slow node of a cluster."""

    factor: Factor = Field(description="on the time of each step that begins while it lasts")

    def begin(self, engine: "Engine", now: Nanos) -> None:
        engine.harm.slowed.append(self.factor)

    def end(self, engine: "Engine", now: Nanos) -> None:
        engine.harm.slowed.remove(self.factor)


class SlowTier(Fault):
    """A tier below the device moves bytes at 1 / `factor` of its rate. What is on its way arrives as planned."""

    tier: str = Field(description="its name: host, ssd, ...")
    factor: Factor = Field(description="on the time of each transfer that begins while it lasts")

    def begin(self, engine: "Engine", now: Nanos) -> None:
        self._tiers(engine).slow(self.tier, self.factor)

    def end(self, engine: "Engine", now: Nanos) -> None:
        self._tiers(engine).fast(self.tier, self.factor)

    def _tiers(self, engine: "Engine") -> Slowable:
        return cast(Slowable, engine.cache.below)


class Pinned(Fault):
    """A share of the KV blocks is taken away: free ones at once, the rest before anyone else as they come free.

    They count as referenced, so kv_usage shows them. Cached content leaves for them as for an allocation.
    """

    share: Part = Field(description="of the usable blocks when it begins, rounded")

    def begin(self, engine: "Engine", now: Nanos) -> None:
        engine.harm.pinned.append((self, [round(self.share * pool.usable) for pool in engine.cache.pools]))
        for pool, count in zip(engine.cache.pools, engine.harm.pinned[-1][1], strict=True):
            pool.pin(count)

    def end(self, engine: "Engine", now: Nanos) -> None:
        mine = next(each for each in engine.harm.pinned if each[0] == self)
        engine.harm.pinned.remove(mine)
        for pool, count in zip(engine.cache.pools, mine[1], strict=True):
            pool.unpin(count)


class Leak(Fault):
    """A lost release hook: of the requests that end or are cancelled while it lasts, a share keeps its blocks for ever.

    No end of the fault and no reset of the prefix cache gives them back (a reset fails, as vLLM's, while blocks are in use); a
    restart does: the loss and return of a node. Which requests leak follows from the run's seed.
    """

    share: Part = Field(description="of the requests that end")

    def begin(self, engine: "Engine", now: Nanos) -> None:
        engine.batch.conditions.append(Leaking(self, self.share, engine))

    def end(self, engine: "Engine", now: Nanos) -> None:
        _drop(engine.batch.conditions, self)

    def gauges(self, engine: "Engine") -> dict[str, float]:
        return {"leaked_blocks": float(sum(pool.leaked for pool in engine.cache.pools))}


class DoubleFree(Periodic):
    """The engine frees a block that nobody holds: one freed before, or the null block where there is none. It must be refused."""

    def on(self, engine: "Engine", now: Nanos) -> None:
        for pool in engine.cache.pools:
            try:
                pool.release([pool.spare()])
            except RuntimeError:
                engine.harm.tally["double_frees"] += 1
                engine.passed.append(Edge(now, "refusal", self))
            else:
                raise AssertionError("a double free was accepted")

    def gauges(self, engine: "Engine") -> dict[str, float]:
        return {"double_frees": float(engine.harm.tally["double_frees"])}


class Fragmentation(Fault):
    """KV memory as before pages: a request enters only with one contiguous extent for its prompt and whole answer.

    It waits while no extent is long enough, though as many tokens may be free.
    """

    fit: Literal["first", "best", "good", "bin"] = Field("first", description="which extent it gets (docs/engine/faults.md)")

    def begin(self, engine: "Engine", now: Nanos) -> None:
        engine.batch.conditions.append(Contiguous(self, self.fit, engine))

    def end(self, engine: "Engine", now: Nanos) -> None:
        _drop(engine.batch.conditions, self)

    def gauges(self, engine: "Engine") -> dict[str, float]:
        held = [each.extents.fragmentation for each in engine.batch.conditions if isinstance(each, Contiguous)]
        return {"fragmentation": max(held, default=0.0), "extent_waits": float(engine.harm.tally["extent_waits"])}


class ResetStorm(Periodic):
    """The prefix cache is emptied again and again, as for new weights."""

    running: Literal["preempt", "refuse"] = Field(
        "preempt",
        description="where requests hold blocks: preempt all of them first, or refuse the reset as vLLM does",
    )

    def on(self, engine: "Engine", now: Nanos) -> None:
        if self.running == "preempt":
            engine.preempt()
        engine.harm.tally["resets" if engine.reset(now / 1e9) else "resets_failed"] += 1

    def gauges(self, engine: "Engine") -> dict[str, float]:
        return {name: float(engine.harm.tally[name]) for name in ("resets", "resets_failed")}


class Oversized(Fault):
    """A request of somebody else's that takes a share of the whole KV memory, or is refused where that is more than all of it.

    It runs like any other, in every gauge and counter of the engine, but it is not in the run's records. Cancelled at the end.
    """

    share: Annotated[Share, Field(gt=0, le=1000)] = Field(description="of the usable tokens that prompt and answer come to hold")
    answer: Annotated[int, Field(ge=1)] = Field(1, description="of them tokens of its answer, one more for the last")

    def begin(self, engine: "Engine", now: Nanos) -> None:
        total = max(2, round(self.share * engine.cache.usable_tokens()) + 1)  # the last token is sampled and never cached
        answer = min(self.answer, total - 1)
        number, content = engine.harm.foreign(self)
        if engine.submit(Job(number, ((content, total - answer),), answer), now / 1e9) is not None:
            engine.harm.tally["oversized_refused"] += 1
            engine.passed.append(Edge(now, "refusal", self))

    def end(self, engine: "Engine", now: Nanos) -> None:
        for number in engine.harm.over(self):
            with suppress(KeyError):  # refused, or it has ended
                engine.cancel(number, now / 1e9)

    def gauges(self, engine: "Engine") -> dict[str, float]:
        return {"oversized_refused": float(engine.harm.tally["oversized_refused"])}


class Refuse(Fault):
    """A share of new requests is answered with status 503; which ones follows from the run's seed."""

    share: Part = Field(description="of the requests that arrive while it lasts")

    def begin(self, engine: "Engine", now: Nanos) -> None:
        engine.harm.refusals.append(self.share)

    def end(self, engine: "Engine", now: Nanos) -> None:
        engine.harm.refusals.remove(self.share)


class Stall(Fault):
    """A hung server: no step begins or ends while it lasts. The step in progress takes that much longer; requests queue."""

    def begin(self, engine: "Engine", now: Nanos) -> None:
        engine.stall(now)

    def end(self, engine: "Engine", now: Nanos) -> None:
        engine.resume(now)


class GcPause(Periodic):
    """Short stalls again and again: a collector that stops the world."""

    pause: Span = Field(description="how long each stall is, less than `every`")

    @model_validator(mode="after")
    def _shorter(self) -> "GcPause":
        if self.pause >= self.every:
            raise ValueError(
                f"pause is {self.pause:g} s and every {self.every:g} s: nothing would ever run. Set a shorter pause; "
                "a server that hangs for good is `kind: stall`"
            )
        return self

    def on(self, engine: "Engine", now: Nanos) -> None:
        engine.harm.tally["gc_pauses"] += 1
        engine.harm.pauses += 1
        engine.stall(now)

    def off(self, engine: "Engine", now: Nanos) -> None:
        engine.harm.pauses -= 1
        engine.resume(now)

    def end(self, engine: "Engine", now: Nanos) -> None:
        begin, every = round(self.at * 1e9), round(self.every * 1e9)
        if (now - 1 - begin) % every + 1 <= self._pause():  # the last `off` would come now or later
            self.off(engine, now)

    def _pause(self) -> Nanos:
        return max(1, min(round(self.pause * 1e9), round(self.every * 1e9) - 1))

    def strikes(self, begin: Nanos) -> Iterator[Strike]:
        for at, edge in super().strikes(begin):
            yield at, edge
            yield at + self._pause(), "off"

    def gauges(self, engine: "Engine") -> dict[str, float]:
        return {"gc_pauses": float(engine.harm.tally["gc_pauses"])}


class AllocRetry(Fault):
    """A share of the allocations fails at first, as with CUDA's caching allocator: everything cached that nobody uses is flushed,
    and the step waits for it. Which ones follows from the run's seed."""

    share: Part = Field(description="of the blocks taken, each by itself")
    pause: Span = Field(description="that each flush adds to the step")

    def begin(self, engine: "Engine", now: Nanos) -> None:
        engine.harm.single += 1
        for pool in engine.cache.pools:
            pool.doubts.append(Doubt(self, self.share, self.pause, engine))

    def end(self, engine: "Engine", now: Nanos) -> None:
        engine.harm.single -= 1
        for pool in engine.cache.pools:
            _drop(pool.doubts, self)

    def gauges(self, engine: "Engine") -> dict[str, float]:
        return {"alloc_retries": float(engine.harm.tally["alloc_retries"])}


class NodeLoss(Fault):
    """A node of a cluster goes down and, at the end, comes back empty: its jobs and its cache are lost. The cluster acts."""

    node: Annotated[int, Field(ge=0, le=9999)] = Field(description="which one, counted from 0")

    def begin(self, engine: "Engine", now: Nanos) -> None:
        raise TypeError("an engine has no nodes to lose")

    def end(self, engine: "Engine", now: Nanos) -> None:
        raise TypeError("an engine has no nodes to lose")


def _drop(found: list[Any], fault: Fault) -> None:
    """Take away the first of `found` that is this fault's: of equal faults it is all the same which."""
    found.pop(next(at for at, each in enumerate(found) if getattr(each, "fault", None) == fault))


FAULTS: dict[str, type[Fault]] = {
    "slow": Slow, "slow_tier": SlowTier, "pinned": Pinned, "leak": Leak, "double_free": DoubleFree,
    "fragmentation": Fragmentation, "reset_storm": ResetStorm, "oversized": Oversized, "refuse": Refuse, "stall": Stall,
    "gc_pause": GcPause, "alloc_retry": AllocRetry, "node_loss": NodeLoss,
}  # fmt: skip


def by_node(faults: Iterable[Fault], nodes: int) -> list[tuple[Fault, ...]]:
    """The faults of each node's engine: its own and those of every node, without the losses, which are the cluster's business.

    ValueError where one is for a node that is not there.
    """
    faults = tuple(faults)
    for fault in faults:
        kind = fault.told()["kind"]
        if isinstance(fault, NodeLoss) and nodes == 1:
            raise ValueError(f"the fault {kind} needs a cluster: with one node nobody would be left. Set `nodes`")
        if fault.node is not None and fault.node >= nodes:
            there = "only node 0" if nodes == 1 else f"nodes 0 to {nodes - 1}"
            raise ValueError(f"the fault {kind} is for node {fault.node}: there is {there}. Name one, or drop `node`")
    here = [fault for fault in faults if not isinstance(fault, NodeLoss)]
    return [tuple(fault for fault in here if fault.node in (None, number)) for number in range(nodes)]
