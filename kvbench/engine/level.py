"""One tier under the device: what it holds, who leaves it, and the two lines on which bytes come in and go out."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvbench.core import Nanos
from kvbench.engine import BlockInfo, Key, Policy
from kvbench.engine.disk import Disk
from kvbench.engine.store import Line
from kvbench.profile import Tier

WARRANTY_YEARS = 5  # of data-centre drives, over which their endurance is stated
DAY_SECONDS = 86400


@dataclass(frozen=True, slots=True)
class Copy:
    """A block in a tier, from pool `pool`, in `size` bytes. `since`: when all of it has arrived."""

    pool: int
    key: Key
    size: float
    since: Nanos
    info: BlockInfo

    def arriving(self, since: Nanos) -> "Copy":
        return Copy(self.pool, self.key, self.size, since, self.info)


def ident(pool: int, key: Key) -> Key:
    """The name of a block of pool `pool` in a tier: pools may use the same keys for different layers."""
    return hash((pool, key)) if pool else key


def idle(lines: Iterable[Line], block: float) -> Nanos:
    """How long one block takes over lines that carry nothing else."""
    return sum(line.arrival(block, line.free) - line.free for line in lines)


def eta(lines: Iterable[Line], total: float, block: float, now: Nanos) -> Nanos:
    """When `total` bytes in blocks of `block` bytes, given to the first line at `now`, have left the last.

    Each line takes one transfer at a time, in order. Blocks follow each other, and each crosses a line whole before it enters
    the next: n blocks over two lines take n times the slower line's time and one time the other's.
    """
    at, lead = now, 0
    for line in lines:
        one = idle([line], block)
        at = max(line.arrival(total, now) + lead, at + one)
        lead += one
    return at


def across(lines: Iterable[Line], total: float, block: float, now: Nanos) -> Nanos:
    """As `eta`, and the lines are in use for it. A line is free for others while it waits for a slower one before it."""
    lines = list(lines)
    at = eta(lines, total, block, now)
    for line in lines:
        line.send(total, now)
    return at


class Level:
    """`capacity` bytes of the tier `drive`. A policy says who leaves. With a `disk` every block is written to it as well.

    `backlog`: bytes that may wait to be written; what comes beyond that is dropped. `moves`: a block that goes up to the
    device leaves (memory, unless it holds a copy of everything above); else it stays until its room is needed.
    """

    def __init__(
        self, name: str, drive: Tier, capacity: float, policy: Policy, backlog: float, moves: bool, disk: Disk | None = None
    ) -> None:
        self.name, self.drive, self.capacity, self.policy, self.moves = name, drive, capacity, policy, moves
        self.reads, self.writes = Line(drive.read, drive.latency), Line(drive.write, drive.latency)
        self.index: dict[Key, Copy] = {}
        self.used = 0.0
        self.dropped = 0  # blocks that were to be written and were not: too many waited, or the disk takes no more
        self.forced = 0  # blocks given up although the tier above holds them: it is as large as this one
        self.hits = 0.0  # tokens found here at the first admission of a job; of layer groups, each by the share of its layers
        self._backlog = backlog
        self._disk = disk
        for (pool, key), size in disk.recover().items() if disk is not None else ():
            self._keep(ident(pool, key), Copy(pool, key, size, 0, BlockInfo(key, 0, 0)))
            self.policy.free(ident(pool, key))

    def accepts(self, size: float, now: Nanos, lines: Iterable[Line]) -> bool:
        """Whether a write of `size` bytes over `lines` may wait for its turn."""
        if size > self.capacity or (self._disk is not None and self._disk.stopped):
            return False
        return all((line.free - now) * line.bandwidth <= self._backlog * 1e9 for line in lines if line.free > now)

    def victims(self, size: float, pinned: Callable[[Key], bool]) -> Iterator[tuple[Key, Copy]]:
        """Give up blocks until there is room for `size` bytes: those for which pinned(name) is false, while there are any."""
        while self.index and self.used + size > self.capacity:
            try:
                name = self.policy.evict(pinned, None)
            except KeyError:
                name = self.policy.evict(_never, None)
                self.forced += 1
            yield name, self._gone(name)

    def put(self, name: Key, copy: Copy) -> bool:
        """Hold a copy; there is room for it. False, and it is dropped, where the disk does not take it."""
        if self._disk is not None and not self._disk.write(copy.pool, copy.key, copy.size):
            self.dropped += 1
            return False
        self._keep(name, copy)
        return True

    def _keep(self, name: Key, copy: Copy) -> None:
        self.index[name] = copy
        self.used += copy.size
        self.policy.insert(name, copy.info)

    def rewrite(self, name: Key) -> None:
        """A copy is written once more, as it is."""
        copy = self.index[name]
        if self._disk is not None:
            self._disk.write(copy.pool, copy.key, copy.size)

    def has(self, name: Key) -> bool:
        """Whether the block is here and, on a disk, sound: one that is damaged is forgotten, and so a miss."""
        copy = self.index.get(name)
        if copy is None:
            return False
        if self._disk is None or self._disk.sound(copy.pool, copy.key, copy.size):
            return True
        self.remove(name)
        return False

    def use(self, name: Key) -> None:
        """The block went up."""
        copy = self.index[name]
        if self._disk is not None:
            self._disk.used(copy.pool, copy.key)
        self.policy.hit(name)

    def touch(self, name: Key) -> None:
        """The block was used, and nobody above holds it any more."""
        self.policy.hit(name)
        self.policy.free(name)

    def remove(self, name: Key) -> Copy:
        self.policy.remove(name)
        return self._gone(name)

    def _gone(self, name: Key) -> Copy:
        copy = self.index.pop(name)
        self.used -= copy.size
        if self._disk is not None:
            self._disk.forget(copy.pool, copy.key)
        return copy

    def clear(self) -> None:
        for name in list(self.index):
            self.policy.remove(name)
        self.index.clear()
        self.used = 0.0
        if self._disk is not None:
            self._disk.clear()

    def scale(self, factor: float) -> None:
        """Both lines at `factor` times their rates from now on. What is on its way arrives as planned."""
        self.reads.bandwidth *= factor
        self.writes.bandwidth *= factor

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()

    def gauges(self, now: Nanos) -> dict[str, float]:
        told = {
            f"hit_tokens_{self.name}": self.hits,
            f"tier_{self.name}_used": self.used / self.capacity,
            f"tier_{self.name}_written_bytes": self.writes.carried,
            f"tier_{self.name}_read_bytes": self.reads.carried,
            f"tier_{self.name}_dropped": float(self.dropped),
            f"tier_{self.name}_queue": max(0, self.writes.free - now) / 1e9,
        }
        if self.drive.endurance is not None and now > 0:
            wear = dwpd(self.writes.carried, max(self.drive.capacity, self.capacity), now / 1e9)
            told[f"{self.name}_dwpd"] = wear
            if wear:
                told[f"{self.name}_life_years"] = life_years(wear, self.drive.endurance)
        return told | ({} if self._disk is None else self._disk.gauges(self.name))

    def facts(self) -> dict[str, object]:
        told: dict[str, object] = {"profile": self.drive.name, "capacity": self.capacity}
        return told | ({} if self._disk is None else {"real": self._disk.facts()})

    def check(self) -> None:
        """Assert the invariants. Slow: for tests."""
        assert self.used <= self.capacity * (1 + 1e-9), f"{self.name} holds more than it has room for"
        assert abs(self.used - sum(copy.size for copy in self.index.values())) < 1, f"{self.name} is miscounted"
        assert all(ident(copy.pool, copy.key) == name for name, copy in self.index.items()), "a copy under another's name"
        if self._disk is not None:
            self._disk.check({(copy.pool, copy.key) for copy in self.index.values()})


def _never(name: Key) -> bool:
    return False


def dwpd(written: float, capacity: float, seconds: float) -> float:
    """Drive writes per day: bytes written / (capacity x days)."""
    return written / capacity / (seconds / DAY_SECONDS)


def life_years(wear: float, endurance: float) -> float:
    """How long a drive rated for `endurance` drive writes per day over its warranty lasts at `wear` of them."""
    return WARRANTY_YEARS * endurance / wear
