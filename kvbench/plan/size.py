"""Does it fit, and how many: memory of a model on devices, KV bytes per token, blocks and concurrency as vLLM counts them.

Everything is bytes per device unless it says otherwise. Formulas: docs/guides/size.md; blocks: kvbench/layout.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvbench.layout import Layout, layout
from kvbench.profile import EngineProfile, Hardware, activation_bytes, kv_room
from kvbench.shape import Kept, Layers, Model

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # tensor-parallel sizes in use are powers of two


class Line(NamedTuple):
    """One line of the answer. `unit`: B, blocks, tokens, x or "". `how`: the formula with its numbers put in."""

    section: str
    key: str
    what: str
    value: float
    unit: str
    how: str


class Ask(NamedTuple):
    """Requests that should be in memory at once, `prompt` + `output` tokens each."""

    requests: int
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Sized:
    """A model on devices. `length`: longest prompt + answer; `inflight`: tokens of one request computed in one step, most.

    `given`: bytes for KV blocks as a server logged them, in place of computing them.
    """

    model: Model
    hardware: Hardware
    engine: EngineProfile
    length: int
    inflight: int
    given: float | None = None

    @property
    def layout(self) -> Layout:
        return layout(self.model, self.engine.block, self.hardware.count)

    @property
    def room(self) -> float:
        """Bytes for KV blocks; negative where the weights alone do not fit."""
        return kv_room(self.model, self.hardware, self.engine) if self.given is None else self.given

    @property
    def blocks(self) -> int:
        """Blocks with the null block, at least 0."""
        return self.engine.blocks or max(0, int(self.room // self.layout.block_bytes))

    @property
    def request_blocks(self) -> int:
        return self.layout.request_blocks(self.length, self.inflight)

    @property
    def concurrency(self) -> float:
        return self.layout.concurrency(self.blocks, self.length, self.inflight)

    @property
    def tokens(self) -> int:
        return self.layout.tokens(self.blocks, self.length, self.inflight)

    @property
    def longest(self) -> int:
        """Longest request that fits alone; 0 where none does."""
        low, high = 0, self.model.max_len + 1
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.layout.request_blocks(middle, self.inflight) <= self.blocks - 1
            low, high = (middle, high) if fits else (low, middle)
        return low

    def need(self, ask: Ask) -> int:
        """Blocks that the asked requests take together when they are longest."""
        return ask.requests * self.layout.request_blocks(ask.prompt + ask.output, self.inflight)

    def holds(self, ask: Ask) -> int:
        """How many such requests are in memory at once: by blocks (one is never used) and by the engine's limit of sequences."""
        each = self.layout.request_blocks(ask.prompt + ask.output, self.inflight)
        return min(max(0, self.blocks - 1) // each, self.engine.max_num_seqs)

    def fits(self, ask: Ask | None = None) -> bool:
        """A request of `length` fits, and so do the asked ones."""
        return self.request_blocks <= self.blocks - 1 and (ask is None or self.holds(ask) >= ask.requests)

    def enough(self, ask: Ask | None = None) -> int | None:
        """The fewest devices, a power of two that divides the heads, on which it all fits; None where memory was given, too."""
        if self.given is not None or self.engine.blocks is not None:
            return None
        for count in (n for n in COUNTS if self.model.heads % n == 0):
            on = Sized(self.model, self.hardware.model_copy(update={"count": count}), self.engine, self.length, self.inflight)
            if on.fits(ask):
                return count
        return None


def lines(sized: Sized) -> Iterator[Line]:
    """The whole answer, top to bottom."""
    if sized.engine.blocks is None:
        yield from _memory(sized)
    yield from _kept(sized)
    yield from _blocks(sized)


def _memory(sized: Sized) -> Iterator[Line]:
    model, hardware, engine = sized.model, sized.hardware, sized.engine
    at = "memory per device"
    if sized.given is not None:
        yield Line(at, "room", "room for KV blocks", sized.given, "B", "as given")
        return
    usable, weights = hardware.memory * engine.gpu_memory_utilization, model.weights / hardware.count
    activations = activation_bytes(model, hardware.count, engine)
    yield Line(at, "memory", "memory", hardware.memory, "B", hardware.name)
    yield Line(at, "usable", "usable", usable, "B", f"{hardware.memory:,.0f} x {engine.gpu_memory_utilization:.0%}")
    how = f"{model.parameters:,} parameters x {model.weight_bytes:g} B / {hardware.count}"
    yield Line(at, "weights", "weights", weights, "B", how)
    inner = max(model.intermediate, model.experts.intermediate * model.experts.active if model.experts else 0)
    how = f"{engine.max_num_batched_tokens:,} tokens x 2 B x (4 x {model.hidden:,} + 2 x {inner:,} / {hardware.count})"
    how += f" + {engine.max_num_seqs:,} x {model.vocab:,} logits x 8 B"
    yield Line(at, "activations", "activations, peak", activations, "B", how)
    yield Line(at, "reserve", "reserve", engine.reserve, "B", f"runtime and graphs, of engine profile {engine.name}")
    how = f"{usable:,.0f} - {weights:,.0f} - {activations:,.0f} - {engine.reserve:,.0f}"
    yield Line(at, "room", "room for KV blocks", sized.room, "B", how)


def _kept(sized: Sized) -> Iterator[Line]:
    model, count = sized.model, sized.hardware.count
    at = "KV cache per token and device"
    parts = model.kinds or (Layers(layers=model.layers),)
    for part, kept in zip(parts, model.kept(count), strict=True):
        what = f"{kept.layers} layers, {_named(model, kept)}"
        if kept.kind == "linear":
            how = f"{kept.layers} x {part.state or 0:,} B / {count}, whatever the length"
            yield Line(at, "state", f"{what}: per sequence", kept.layers * kept.state, "B", how)
        else:
            yield Line(at, "kind", what, kept.layers * kept.token, "B", f"{kept.layers} x {_formula(model, part, count)}")
    total = model.kv_token_bytes(count)
    how = f"{total:,.0f} B a token" + ("" if count == 1 else f"; {model.kv_token_bytes():,.0f} B before it is split")
    yield Line(at, "kv_token_bytes", "together", total, "B", how)


def _named(model: Model, kept: Kept) -> str:
    if kept.kind == "window":
        return f"window of {kept.window:,} tokens"
    if kept.kind == "linear":
        return "linear attention"
    return "latent attention" if model.latent else "full attention"


def _formula(model: Model, part: Layers, count: int) -> str:
    """Bytes per token of one layer, in numbers."""
    if model.latent is not None:
        index = f" + {model.latent.index_bytes:g} B of the indexer" if model.latent.index_bytes else ""
        return f"({model.latent.kv_rank} + {model.latent.rope_dim}) x {model.kv_bytes:g} B{index}"
    kv_heads = part.kv_heads or model.kv_heads
    keys = part.head_dim or model.head_dim
    values = part.v_head_dim or part.head_dim or model.v_head_dim or model.head_dim
    heads = f"{kv_heads}" if count == 1 else f"{-(-kv_heads // count)}"
    split = "" if count == 1 else f" ({kv_heads} KV heads on {count} devices)"
    wide = f"2 x {heads} x {keys}" if keys == values else f"{heads} x ({keys} + {values})"
    return f"{wide} x {model.kv_bytes:g} B{split}"


def _blocks(sized: Sized) -> Iterator[Line]:
    found, at = sized.layout, "blocks"
    tokens = max(group.block for group in found.groups)
    if len(found.groups) > 1:
        how = "; ".join(f"{group.layers} {group.kind}" + f" x {group.block} tokens" for group in found.groups)
        yield Line(at, "groups", f"groups of at most {found.width} layers", len(found.groups), "", how)
    page = found.block_bytes / found.width
    how = (
        f"{found.width} layers x {page:,.0f} B"
        if len(found.groups) > 1
        else f"{tokens} tokens x {page / tokens * found.width:,.0f} B"
    )
    yield Line(at, "block_bytes", "bytes per block", found.block_bytes, "B", how)
    how = "as given" if sized.engine.blocks else f"{sized.room:,.0f} / {found.block_bytes:,.0f}, rounded down"
    yield Line(at, "blocks", "blocks", sized.blocks, "blocks", how)
    how = " + ".join(_needed(sized, i) for i in range(len(found.groups)))
    yield Line(at, "request_blocks", f"a request of {sized.length:,} tokens needs", sized.request_blocks, "blocks", how)
    how = f"{sized.blocks:,} / {sized.request_blocks:,}, as vLLM prints it"
    yield Line(at, "concurrency", f"requests of {sized.length:,} tokens at once", sized.concurrency, "x", how)
    yield Line(
        at,
        "tokens",
        "GPU KV cache size",
        sized.tokens,
        "tokens",
        f"{sized.concurrency:.4f} x {sized.length:,}, as vLLM prints it",
    )


def _needed(sized: Sized, index: int) -> str:
    """Blocks of one group for the longest request, in numbers."""
    group = sized.layout.groups[index]
    if group.kind == "linear":
        return "1"
    if group.window is None:
        return f"ceil({sized.length:,} / {group.block})"
    return f"ceil(min({group.window} - 1 + {sized.inflight:,}, {sized.length:,}) / {group.block}) + 1"
