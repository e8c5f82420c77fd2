"""Content into block keys: a chain of hashes, so that a key names everything from the sequence's start to the block's end."""

from collections.abc import Iterable

from kvbench.core import Segment
from kvbench.engine import Key

ROOT: Key = 0x9E3779B97F4A7C15  # parent of a first block


def root(*apart: int) -> Key:
    """Where chains begin whose content is not to be shared: of a tenant's or adapter's salt, of a layer group in a shared
    pool."""
    return hash((ROOT, *apart)) if any(apart) else ROOT


class Chain:
    """Block hashes of one sequence, computed on demand: hash(parent, the (key, offset, tokens) slices inside the block).

    Tuples of integers hash alike in every process, so runs are reproducible; 64 bits make a collision among 10^7 blocks a
    one-in-a-million event. Costs about 0.2 us per block inside a segment.
    """

    __slots__ = ("_at", "_block", "_offset", "_segments", "keys", "root")

    def __init__(self, segments: Iterable[Segment], block: int, root: Key = ROOT) -> None:
        self.root = root
        self.keys: list[Key] = []
        self._segments = [segment for segment in segments if segment[1] > 0]
        self._block = block
        self._at = self._offset = 0  # the first token not yet hashed: segment and offset inside it

    def upto(self, count: int) -> list[Key]:
        """The list of keys, at least `count` of them known (the content must be that long)."""
        keys, block = self.keys, self._block
        while len(keys) < count:
            content, tokens = self._segments[self._at]
            whole = min((tokens - self._offset) // block, count - len(keys))
            if whole == 0:
                self._seam()
                continue
            parent = keys[-1] if keys else self.root
            end = self._offset + whole * block
            for offset in range(self._offset, end, block):
                parent = hash((parent, content, offset, block))
                keys.append(parent)
            self._offset = end
        return keys

    def _seam(self) -> None:
        """Append the block that begins in the present segment and ends in a later one."""
        slices: list[int] = []
        left = self._block
        while left:
            content, tokens = self._segments[self._at]
            taken = min(left, tokens - self._offset)
            if taken:
                slices += (content, self._offset, taken)
            left -= taken
            self._offset += taken
            if left:
                self._at, self._offset = self._at + 1, 0
        self.keys.append(hash((self.keys[-1] if self.keys else self.root, *slices)))

    def parent(self, at: int) -> Key:
        """The key before block `at`, which must be known."""
        return self.keys[at - 1] if at else self.root
