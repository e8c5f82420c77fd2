"""What lies between nodes: a line that carries bytes, and a store of blocks that every node can reach.

A block in the store is named by its key, as in a pool: content of one key is the same on every node. The store gives up what was
used longest ago.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvbench.core import Nanos, Seconds
from kvbench.engine import Key


class Line:
    """A one-way line: one transfer at a time, first come first served, at `bandwidth` bytes/s; bytes arrive `latency` s after."""

    __slots__ = ("bandwidth", "carried", "free", "latency")

    def __init__(self, bandwidth: float, latency: Seconds = 0.0) -> None:
        self.bandwidth, self.latency = bandwidth, latency
        self.free: Nanos = 0  # when the last transfer has left
        self.carried = 0.0  # bytes so far

    def arrival(self, size: float, now: Nanos) -> Nanos:
        """When `size` bytes given to the line at `now` would have arrived."""
        return max(now, self.free) + self._lasts(size) + round(self.latency * 1e9)

    def send(self, size: float, now: Nanos) -> Nanos:
        """Carry `size` bytes. Returns when they have arrived."""
        arrived = self.arrival(size, now)
        self.free = max(now, self.free) + self._lasts(size)
        self.carried += size
        return arrived

    def _lasts(self, size: float) -> Nanos:
        return round(size / self.bandwidth * 1e9)


def carry(out: Line, into: Line, size: float, now: Nanos) -> Nanos:
    """Send `size` bytes out of one node and into another: it begins when both lines are free, and both are busy until it left."""
    begin = max(now, out.free, into.free)
    out.send(size, begin)
    return into.send(size, begin)


class Store:
    """Room for `blocks` blocks of `size` bytes. Reads share one line and writes another."""

    def __init__(self, blocks: int, size: float, read: Line, write: Line) -> None:
        if blocks < 1:
            raise ValueError(f"a store of {blocks} blocks holds nothing: one block is {size:g} bytes")
        self.blocks, self.size = blocks, size
        self.reads, self.writes = read, write
        self.evicted = 0
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def found(self, keys: Sequence[Key]) -> int:
        """How many of `keys` are here, up to the first that is not."""
        for at, key in enumerate(keys):
            if key not in self._keys:
                return at
        return len(keys)

    def fetch(self, keys: Sequence[Key], now: Nanos) -> Nanos:
        """Read the blocks of `keys`, which are here. Returns when the last has arrived."""
        for key in reversed(keys):  # the tail of a chain is given up before its head
            self._keys.move_to_end(key)
        return self.reads.send(len(keys) * self.size, now)

    def write(self, count: int, now: Nanos) -> Nanos:
        """Send `count` blocks. Returns when they have arrived: `keep` them then."""
        return self.writes.send(count * self.size, now)

    def keep(self, keys: Iterable[Key]) -> None:
        """What was written is here from now on."""
        for key in reversed(list(keys)):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self.blocks:
            self._keys.popitem(last=False)
            self.evicted += 1

    def clear(self) -> None:
        self._keys.clear()

    def check(self) -> None:
        """Assert that no more is kept than there is room for. Slow: for tests."""
        assert len(self._keys) <= self.blocks, "the store holds more than it has room for"
