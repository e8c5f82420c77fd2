"""A cluster as a scenario names it (`target.cluster`), and how it is built. Data, and the wiring of engine/cluster.py."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvbench.engine.cluster import Cluster
from kvbench.engine.engine import Engine
from kvbench.engine.faults import Fault, by_node
from kvbench.engine.node import Node, Role
from kvbench.engine.router import ROUTERS, RoundRobin, Routing
from kvbench.engine.state import Manners
from kvbench.engine.store import Line, Store
from kvbench.profile import EngineProfile, Hardware, Model, kv_blocks, load_hardware, load_tier
from kvbench.spec import OneOf, fault
from kvbench.units import Duration, Size, Span

MOST = 256  # nodes: each is an engine of its own
Count = Annotated[int, Field(ge=1, le=MOST)]
Build = Callable[[int, Hardware, int, tuple[Fault, ...]], Engine]
"""Makes the engine of one node: its number, hardware, seed and faults."""


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NodeSpec(_Spec):
    """Equal nodes of a cluster."""

    hardware: str | None = Field(default=None, description="of each node; target.hardware where not given")
    replicas: Count = Field(default=1, description="how many such nodes")
    role: Role = Field(default="mixed", description="prefill: answers' first tokens; decode: the others; mixed: both")


class TransferSpec(_Spec):
    """The line into and out of every node, by which prompts' KV moves from a prefill to a decode node."""

    bandwidth: Annotated[Size, Field(gt=0)] = Field(default=50e9, description="bytes/s, each way; one transfer at a time")
    latency: Duration = Field(default=5e-6, description="of one transfer, beyond its bytes")


class StoreSpec(_Spec):
    """A store of KV blocks that every node reads and the cluster writes."""

    tier: str = Field(default="remote-100g", description="a profile of profiles/tiers: bandwidths and latency")
    capacity: Annotated[Size, Field(gt=0)] | None = Field(default=None, description="bytes; the profile's where not given")
    cold: Span = Field(default=60.0, description="content unused for that long is written to it, in the background")

    @field_validator("tier")
    @classmethod
    def _known(cls, value: str) -> str:
        load_tier(value)
        return value

    def build(self, block: float) -> Store:
        """`block`: bytes of a block of all layers."""
        tier = load_tier(self.tier)
        room = int((self.capacity or tier.capacity) // block)
        return Store(room, block, Line(tier.read, tier.latency), Line(tier.write, tier.latency))


class ClusterSpec(_Spec):
    """Several engines behind one door."""

    replicas: Count | None = Field(default=None, description="equal nodes on target.hardware; or `nodes`")
    nodes: Annotated[list[NodeSpec], Field(min_length=1, max_length=MOST)] | None = Field(
        default=None, description="different nodes"
    )
    router: Annotated[Any, OneOf("kind", ROUTERS)] = Field(
        RoundRobin(), description="which node serves a request: a kind or {kind}"
    )
    transfer: TransferSpec = Field(default=TransferSpec(), description="between nodes")
    store: StoreSpec | None = Field(default=None, description="a store that all nodes share; none without")
    migrate: Annotated[Size, Field(gt=0)] | None = Field(
        None,
        description="bytes/s at which warm content of full nodes is copied to nodes with room, in the background; not without",
    )
    on_loss: Literal["retry", "fail"] = Field(default="retry", description="what becomes of the requests of a node that is lost")
    detect: Duration = Field(default=0.0, description="how long until a lost node is noticed; requests go there until then")
    refuse_above: Annotated[int, Field(ge=0, le=10**6)] | None = Field(
        default=None, description="requests that wait for a node, above which new ones are answered 503"
    )

    @field_validator("router", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _complete(self) -> "ClusterSpec":
        if (self.replicas is None) == (self.nodes is None):
            fault((), "takes either `replicas` (equal nodes) or `nodes` (a list), for example replicas: 3")
        roles = {node.role for node in self.nodes or ()} or {"mixed"}
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            if not roles - {role}:
                fault(("nodes",), f"every node's role is {role}: somebody has to {other}. Add a node of role {other} or mixed")
        if "decode" in roles and "prefill" not in roles:
            fault(("nodes",), "a decode node gets its requests from prefill nodes, and there is none. Add one, or make it mixed")
        if len(self.members()) > MOST:
            fault(("nodes",), f"{len(self.members())} nodes in all: at most {MOST}")
        return self

    def members(self) -> list[NodeSpec]:
        """One entry per node, in order of its number."""
        kinds = self.nodes or [NodeSpec(replicas=self.replicas or 1)]
        return [kind for kind in kinds for _ in range(kind.replicas)]

    def fits(self, model: Model, hardware: str, engine: EngineProfile, faults: Iterable[Fault]) -> None:
        """ValueError where the model does not fit on a node, or a fault is for a node that is not there."""
        members = self.members()
        for name in sorted({member.hardware or hardware for member in members}):
            kv_blocks(model, load_hardware(name), engine)
        by_node(faults, len(members))

    def build(
        self, model: Model, hardware: str, engine: EngineProfile, seed: int, faults: Iterable[Fault], make: Build
    ) -> Cluster:
        """The cluster. Node 0 has the seed itself, so that a cluster of one is that engine."""
        faults = tuple(faults)
        members = self.members()
        nodes = []
        for number, (member, own) in enumerate(zip(members, by_node(faults, len(members)), strict=True)):
            device = load_hardware(member.hardware or hardware)
            grown = seed if number == 0 else hash((seed, number)) % 2**63
            out, into = (Line(self.transfer.bandwidth, self.transfer.latency) for _ in range(2))
            nodes.append(Node(number, partial(make, number, device, grown, own), member.role, out, into))
        routing: Routing = self.router
        return Cluster(
            nodes,
            {"entry": routing.arm(), "decode": routing.arm()},
            store=self.store.build(nodes[0].token_bytes * nodes[0].cache.groups[0].block) if self.store else None,
            line=Line(self.migrate) if self.migrate else None,
            cold=self.store.cold if self.store else StoreSpec().cold,
            manners=Manners(self.on_loss, self.detect, self.refuse_above),
            faults=faults,
        )
