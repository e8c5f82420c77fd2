"""How a model's KV cache is cut into blocks, and what a request needs of them: vLLM's arithmetic, hybrid models included.

Source: vLLM 0.33, v1/core/kv_cache_utils.py (read, not copied); golden numbers in tests/plan/test_size.py. Layers of one kind
share block tables; there is one pool of equal blocks, so a block holds `width` layers of one group for `Group.block` tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kvbench.shape import Keeps, Kept, Model

_SPREAD = 1.5  # kinds whose counts are closer than this are padded to the larger count instead of being cut to the smaller
_ALIGN = 16  # tokens: a block that must grow to hold a linear layer's state grows by this much


class Group(NamedTuple):
    """Layers that share a block table. `block`: tokens in one of its blocks; `token`, `state`: bytes per layer and device."""

    layers: int
    kind: Keeps
    window: int | None
    block: int
    token: float
    state: float

    def blocks(self, length: int, inflight: int) -> int:
        """Blocks a request of `length` tokens needs, most; at most `inflight` of its tokens are computed in one step."""
        if self.kind == "linear":
            return 1
        if self.window is None:
            return -(-length // self.block)
        return -(-min(self.window - 1 + inflight, length) // self.block) + 1


@dataclass(frozen=True, slots=True)
class Layout:
    """Groups of layers over one pool. `block_bytes`: of a block on each device; `padded`: layers' worth that is left empty."""

    groups: tuple[Group, ...]
    width: int
    block_bytes: float
    padded: int

    def request_blocks(self, length: int, inflight: int) -> int:
        """Blocks that a request of `length` tokens needs at most, summed over groups."""
        return sum(group.blocks(length, inflight) for group in self.groups)

    def concurrency(self, blocks: int, length: int, inflight: int) -> float:
        """Requests of `length` tokens that `blocks` hold at once, as vLLM prints it."""
        return blocks / self.request_blocks(length, inflight)

    def tokens(self, blocks: int, length: int, inflight: int) -> int:
        """vLLM's "GPU KV cache size" in tokens: concurrency times length, so for hybrids it depends on `length`."""
        return int(self.concurrency(blocks, length, inflight) * length)


def layout(model: Model, block: int, count: int = 1) -> Layout:
    """The blocks of `model` on each of `count` tensor-parallel devices; `block`: tokens in a block of the widest layers."""
    kept = model.kept(count)
    if len({(part.kind, part.window) for part in kept}) == 1 and kept[0].kind != "linear":
        token = sum(part.layers * part.token for part in kept)
        group = Group(model.layers, kept[0].kind, kept[0].window, block, token / model.layers, 0.0)
        return Layout((group,), model.layers, block * token, 0)
    kinds = _merged(kept)
    block, page = _page(kinds, block)
    counts = [part.layers for part in kinds]
    width = max(counts) if max(counts) < _SPREAD * min(counts) else min(counts)
    groups, padded = [], 0
    for part in kinds:
        own = int(page // part.token) if part.token else block
        tables = -(-part.layers // width)
        padded += tables * width - part.layers
        for i in range(tables):  # dealt out evenly, as vLLM does; sizes do not depend on it
            layers = part.layers // tables + (i < part.layers % tables)
            groups.append(Group(layers, part.kind, part.window, own, part.token, part.state))
    return Layout(tuple(groups), width, width * page, padded)


def _merged(kept: list[Kept]) -> list[Kept]:
    """Entries that keep the same thing, added up: only what is kept makes a kind."""
    found: dict[tuple[Keeps, int | None, float, float], int] = {}
    for part in kept:
        found[part[1:]] = found.get(part[1:], 0) + part.layers
    return [Kept(layers, *what) for what, layers in found.items()]


def _page(kinds: list[Kept], block: int) -> tuple[int, float]:
    """(tokens per block of the widest layers, bytes of one layer's part of a block): all parts are equal, so that blocks are."""
    widest, state = max(part.token for part in kinds), max(part.state for part in kinds)
    if not widest:
        return block, state
    if state > block * widest:
        block = -(-int(state) // int(_ALIGN * widest)) * _ALIGN
    return block, block * widest


def kv_groups(model: Model, count: int = 1) -> list[tuple[int, Keeps, int | None, float]]:
    """(layers, kind, window, bytes per token and layer on each device) of every kind of layer."""
    return [(part.layers, part.kind, part.window, part.token) for part in _merged(model.kept(count))]
