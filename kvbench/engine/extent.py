"""An extent allocator over a range of bytes: what KV memory was before pages, and what object stores and CUDA's caching allocator
still are. It fragments: free bytes that are no use, since no one extent of them is long enough.

Sizes fall into 8 bins per power of two (a float with 3 bits of mantissa, as TLSF and OffsetAllocator have them): bin k holds what
is at least floor k and less than floor k + 1. Allocation costs O(log n) beside a list insertion, or O(1) in the binned fits.
"""

from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Protocol

MANTISSA = 3


def bin_of(size: int) -> int:
    """The bin a hole of `size` bytes is filed in: the last whose floor is not above it."""
    exponent = max(0, size.bit_length() - 1 - MANTISSA)
    return (exponent << MANTISSA) + (size >> exponent)


def bin_size(size: int) -> int:
    """`size` rounded up to the floor of a bin: at most 1/8 more."""
    exponent = max(0, size.bit_length() - 1 - MANTISSA)
    return -(-size >> exponent) << exponent


class Fit(Protocol):
    """Which hole serves a request, and how long the extent cut from it is. Holes are (offset, size); told of every change."""

    @abstractmethod
    def add(self, offset: int, size: int) -> None: ...

    @abstractmethod
    def drop(self, offset: int, size: int) -> None: ...

    @abstractmethod
    def find(self, size: int) -> int | None:
        """Offset of a hole of at least `size` bytes, or None where this fit sees none."""

    @abstractmethod
    def taken(self, size: int) -> int:
        """Bytes that a request for `size` occupies."""


class Exact:
    """Requests occupy what they ask for."""

    def taken(self, size: int) -> int:
        return size


class First(Exact):
    """The hole with the lowest address."""

    def __init__(self) -> None:
        self._bins: dict[int, list[tuple[int, int]]] = {}  # in order of address

    def add(self, offset: int, size: int) -> None:
        insort(self._bins.setdefault(bin_of(size), []), (offset, size))

    def drop(self, offset: int, size: int) -> None:
        number = bin_of(size)
        holes = self._bins[number]
        del holes[bisect_left(holes, (offset, size))]
        if not holes:
            del self._bins[number]

    def find(self, size: int) -> int | None:
        least = bin_of(size)
        found = min((holes[0][0] for number, holes in self._bins.items() if number > least), default=None)
        for offset, long in self._bins.get(least, ()):  # some of this bin are too short
            if found is not None and offset > found:
                break
            if long >= size:
                return offset
        return found


class Best(Exact):
    """The shortest hole that is long enough; of equal ones that with the lowest address."""

    def __init__(self) -> None:
        self._holes: list[tuple[int, int]] = []  # (size, offset)

    def add(self, offset: int, size: int) -> None:
        insort(self._holes, (size, offset))

    def drop(self, offset: int, size: int) -> None:
        del self._holes[bisect_left(self._holes, (size, offset))]

    def find(self, size: int) -> int | None:
        at = bisect_left(self._holes, (size, 0))
        return self._holes[at][1] if at < len(self._holes) else None


class Good(Exact):
    """The hole freed last in the first bin all of whose holes are long enough: O(1), and blind to the bin of the size itself.

    An extent of an odd size that came free is thus not found again for the same size: OffsetAllocator, and Mooncake's before it
    rounded.
    """

    def __init__(self) -> None:
        self._bins: dict[int, dict[int, None]] = {}
        self._filled = 0  # bit k: bin k has holes

    def add(self, offset: int, size: int) -> None:
        number = bin_of(size)
        self._bins.setdefault(number, {})[offset] = None
        self._filled |= 1 << number

    def drop(self, offset: int, size: int) -> None:
        number = bin_of(size)
        holes = self._bins[number]
        del holes[offset]
        if not holes:
            self._filled &= ~(1 << number)

    def find(self, size: int) -> int | None:
        least = bin_of(bin_size(size))
        above = self._filled >> least
        if not above:
            return None
        return next(reversed(self._bins[least + (above & -above).bit_length() - 1]))


class Rounded(Good):
    """Good fit on sizes rounded up to a bin: at most 1/9 of an extent is waste, and what comes free is found again."""

    def taken(self, size: int) -> int:
        return bin_size(size)


class Extents:
    """Extents of [0, total), under one of FITS. ValueError for a total or a size that is not positive, and for an unknown fit."""

    def __init__(self, total: int, fit: str = "first") -> None:
        if total < 1:
            raise ValueError(f"total is {total}: an allocator has at least 1 byte")
        if fit not in FITS:
            raise ValueError(f"fit {fit!r} is unknown: one of {', '.join(FITS)}")
        self.total = self.free_bytes = total
        self.asked = 0  # bytes that live requests asked for: at most what they occupy
        self._fit = FITS[fit]()
        self._live: dict[int, tuple[int, int]] = {}  # offset -> (bytes occupied, bytes asked for)
        self._holes: dict[int, int] = {}  # offset -> size
        self._ends: dict[int, int] = {}  # end of a hole -> its offset
        self._add(0, total)

    @property
    def largest(self) -> int:
        """Bytes of the largest hole. Looks at every hole."""
        return max(self._holes.values(), default=0)

    @property
    def fragmentation(self) -> float:
        """1 - largest hole / free bytes; 0 where nothing is free."""
        return 1 - self.largest / self.free_bytes if self.free_bytes else 0.0

    @property
    def utilization(self) -> float:
        """Bytes asked for by what is live / total."""
        return self.asked / self.total

    def allocate(self, size: int) -> int | None:
        """The offset of an extent of `size` bytes, or None where the fit finds no hole for it."""
        if size < 1:
            raise ValueError(f"size is {size}: an extent has at least 1 byte")
        taken = min(self._fit.taken(size), self.total) if size <= self.total else size
        # The empty range serves what is as long as it is, though no bin may be.
        offset = 0 if not self._live and taken <= self.total else self._fit.find(taken)
        if offset is None:
            return None
        hole = self._drop(offset)
        if hole > taken:
            self._add(offset + taken, hole - taken)
        self._live[offset] = (taken, size)
        self.free_bytes -= taken
        self.asked += size
        return offset

    def free(self, offset: int) -> None:
        """Give back the extent at `offset`; it joins holes beside it. RuntimeError where none begins there: a double free."""
        if offset not in self._live:
            raise RuntimeError(f"no extent at {offset}: freed twice, or never allocated")
        taken, size = self._live.pop(offset)
        self.free_bytes += taken
        self.asked -= size
        begin, end = offset, offset + taken
        if end in self._holes:
            end += self._drop(end)
        if begin in self._ends:
            begin = self._ends[begin]
            self._drop(begin)
        self._add(begin, end - begin)

    def _add(self, offset: int, size: int) -> None:
        self._holes[offset] = size
        self._ends[offset + size] = offset
        self._fit.add(offset, size)

    def _drop(self, offset: int) -> int:
        size = self._holes.pop(offset)
        del self._ends[offset + size]
        self._fit.drop(offset, size)
        return size

    def __iter__(self) -> Iterator[int]:
        """Offsets of live extents, the oldest first."""
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)

    def check(self) -> None:
        """Assert that extents and holes tile the range, and that no two holes touch. Slow: for tests."""
        assert not set(self._live) & set(self._holes), "an offset is both live and free"
        tiles = [(offset, taken, False) for offset, (taken, _) in self._live.items()]
        tiles += [(offset, size, True) for offset, size in self._holes.items()]
        at, hole = 0, False
        for offset, size, free in sorted(tiles):
            assert offset == at, f"a gap or an overlap at {min(at, offset)}"
            assert not (hole and free), f"two holes meet at {offset}"
            at, hole = offset + size, free
        assert at == self.total, "extents and holes do not fill the range"
        assert self.free_bytes == sum(self._holes.values()), "free bytes are miscounted"
        assert self.asked == sum(size for _, size in self._live.values()), "asked bytes are miscounted"
        assert all(size <= taken for taken, size in self._live.values()), "an extent is shorter than asked"
        assert self._ends == {offset + size: offset for offset, size in self._holes.items()}, "ends of holes disagree"


FITS: dict[str, type[First] | type[Best] | type[Good]] = {"first": First, "best": Best, "good": Good, "bin": Rounded}
