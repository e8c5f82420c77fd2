"""What a sequence holds of KV memory, and what of a prompt is there already: by layer group."""

from dataclasses import dataclass
from typing import Literal

from kvbench.engine.chain import Chain
from kvbench.engine.pool import Pool


@dataclass(slots=True)
class Group:
    """Layers `first` to `last` (counted from 1) in one pool. A block holds `block` tokens of them in `bytes` bytes.

    window: tokens a layer looks back on, its own included; None: all. state: one block a sequence, whatever its length.
    """

    name: str
    pool: Pool
    first: int
    last: int
    bytes: float
    encode: float = 0.0  # seconds to encode a block
    encoding: Literal["sync", "async"] = "sync"  # in the step that fills it, or beside later ones
    raw: float = 0.0  # bytes per token before it is encoded
    least: int = 0  # tokens: shorter sequences are not encoded
    wide: int = 1  # blocks of the pool that one block takes while it is not encoded
    lookups: int = 0  # prompt tokens looked up, once per job at its first admission
    hits: int = 0  # of those, found
    device: int = 0  # of the found, on the device
    window: int | None = None
    state: bool = False
    block: int = 0  # the pool's where not given

    def __post_init__(self) -> None:
        self.block = self.block or self.pool.tokens

    def wanted(self, tokens: int, known: int, came: int) -> int:
        """Blocks that a sequence takes at most on its way to `tokens` tokens, beyond the `came` that were found, encoded.

        known: as long as it is, whatever is computed of it. While that is below `least` each of its blocks takes `wide`.
        """
        own = max(0, -(-tokens // self.block) - came)
        if known >= self.least:
            return own
        return max(own, self.wide * max(0, -(-min(tokens, self.least - 1) // self.block) - came))

    def longest(self) -> int:
        """Tokens of the longest sequence that fits when nothing else is there, whatever it begins with."""
        usable = self.pool.usable
        short = self.least > 0 and usable < self.wanted(self.least - 1, 0, 0)
        return (usable // self.wide if short else usable) * self.block

    def first_needed(self, computed: int) -> int:
        """The first block that a token after the `computed` first attends to."""
        return 0 if self.window is None else max(0, computed - self.window + 1) // self.block


class Table:
    """What one sequence holds of one group."""

    __slots__ = ("beside", "blocks", "came", "chain", "passed", "published")

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.blocks: list[int] = []
        self.passed = 0  # leading blocks that fell out of the window: the null block stands for them
        self.published = 0  # leading blocks that are, or were, in the pool's index
        self.came = 0  # leading blocks that were found, encoded, when the sequence entered (coded.py)
        self.beside: list[int] = []  # blocks that hold, with its own, what is not encoded yet (coded.py)

    def valid(self, tokens: int, block: int) -> dict[int, int]:
        """Valid tokens in the blocks that are not full, of a sequence with `tokens` tokens."""
        loose = range(self.published, len(self.blocks))
        return {self.blocks[at]: max(0, min(block, tokens - at * block)) for at in loose}


class Holding:
    """What one sequence holds of every group."""

    __slots__ = ("edge", "job", "length", "partial", "sought", "tables")

    def __init__(self, tables: list[Table], job: int) -> None:
        self.tables = tables
        self.job = job
        self.edge = 1  # the next number of tokens that takes a new block or fills one
        self.partial: list[tuple[int, float]] = []  # (up to this token, share of the layers to compute), beyond what was found
        self.length = 0  # tokens of it that are known, or that it has grown to; kept where sequences can be too short (coded.py)
        self.sought = False  # what lies below has been told that it waits

    def share(self, start: int, stop: int) -> float:
        """Mean share of the layers to compute for tokens [start, stop)."""
        work, at = 0.0, start
        for upto, share in self.partial:
            if upto > at:
                end = min(upto, stop)
                work += share * (end - at)
                at = end
            if at == stop:
                break
        return (work + stop - at) / (stop - start)


@dataclass(frozen=True, slots=True)
class Found:
    """How much of a prompt is there. tokens: a prefix that every group has, on the device or below; of those `below` are not on
    the device. counts: leading blocks per group on the device; lower: blocks per group after those that come up from below."""

    tokens: int
    below: int
    counts: tuple[int, ...]
    lower: tuple[int, ...]
