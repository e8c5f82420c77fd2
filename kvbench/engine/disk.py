"""Blocks in real files: append-only segments in one directory, each block under a checksum, the index rebuilt from the files.

After a kill at any byte all whole records are found; a torn tail is cut off and counted. Power loss is another matter: nothing is
synced, and a checksum tells what did not get there.

Room is won back by segment: one without live blocks is deleted, and where files take more than OVERHEAD of what may be held,
the live blocks of the oldest are written once more (`moved`, the drive's write amplification).
"""

import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from kvbench.core import Nanos
from kvbench.engine import Key
from kvbench.engine.record import HEADER, content, decode, encode, records

Block = tuple[int, Key]
"""(pool, key)."""

SEGMENT = 64 * 2**20  # bytes after which a new file is begun
OVERHEAD = 1.25  # of the capacity: files take up to that and one segment


class _Place(NamedTuple):
    segment: int
    offset: int  # of the header
    length: int  # of the payload

    @property
    def bytes(self) -> int:
        return HEADER + self.length


class Disk:
    """Blocks in `folder`, up to `capacity` bytes of payload. `stopwatch` tells real nanoseconds: for MB/s, and nothing else.

    `holds`: whose KV the blocks are. Keys name content, and the KV of one content is another in another model.

    ValueError where the folder cannot be made, written or locked (one process at a time), or holds something else.
    """

    def __init__(
        self, folder: Path, capacity: float, stopwatch: Callable[[], Nanos], segment: int = SEGMENT, holds: str = ""
    ) -> None:
        self.folder, self.capacity, self.holds = folder, capacity, holds
        self.segment = int(min(segment, max(1, capacity // 4)))
        self.stopped = ""  # why it takes no more writes
        self.torn = self.damaged = 0  # tails cut off, and blocks that were not what was written
        self.written = self.read = self.moved = 0  # bytes of payload
        self._watch = stopwatch
        self._write_ns = self._read_ns = 0
        self._index: dict[Block, _Place] = {}
        self._sizes: dict[int, int] = {}  # bytes of each segment's file, oldest first
        self._live: dict[int, set[Block]] = {}
        self._sound: set[Block] = set()  # read and verified since they were last used
        self._files: dict[int, BinaryIO] = {}
        self._dead: set[int] = set()  # segments without a live block
        self._number = 0  # the segment that is written
        self._lock = self._open()
        self._number = max(self._sizes, default=0)
        self.bytes = sum(self._sizes.values())  # of all segment files
        self._dead = {segment for segment, live in self._live.items() if not live and segment != self._number}
        self.recovered = len(self._index)

    def _open(self) -> BinaryIO:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / "lock").open("ab")
        except OSError as error:
            raise ValueError(f"{str(self.folder)!r} cannot be written: {error.strerror}; name a directory that can") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise ValueError(f"{str(self.folder)!r} is in use by another run: each needs a directory of its own") from None
        try:
            paths = sorted(self.folder.glob(f"segment-{'[0-9]' * 12}.kv"))  # whatever else lies there is not ours
            self._claim(bool(paths))
            for path in paths:
                self._scan(int(path.stem.partition("-")[2]), path)
        except ValueError:
            lock.close()
            raise
        except OSError as error:
            lock.close()
            raise ValueError(f"{str(self.folder)!r} cannot be read: {error.strerror}") from None
        return lock

    def _claim(self, used: bool) -> None:
        """Say whose blocks these are. ValueError where there are some of another kind already."""
        told = self.folder / "holds"
        found = told.read_text(errors="replace") if told.is_file() else ""
        if used and found != self.holds:
            raise ValueError(
                f"{str(self.folder)!r} holds blocks of {found or 'an unknown kind'}, and these are of {self.holds or 'another'}: "
                "name another directory, or delete that one"
            )
        if self.holds:
            told.write_text(self.holds)

    def _path(self, segment: int) -> Path:
        return self.folder / f"segment-{segment:012d}.kv"

    def _scan(self, segment: int, path: Path) -> None:
        """Index a segment. Payloads are verified when they are read."""
        end = 0
        self._live[segment] = set()
        with path.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if size:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    found, end, damaged = records(data)
                for record in found:
                    self._point((record.pool, record.key), _Place(segment, record.offset, record.length))
                self.damaged += damaged
            if end < size:
                self.torn += 1
                file.truncate(end)
        self._sizes[segment] = end

    def _point(self, block: Block, place: _Place) -> None:
        self._unpoint(block)
        self._index[block] = place
        self._live[place.segment].add(block)

    def _unpoint(self, block: Block) -> None:
        old = self._index.pop(block, None)
        self._sound.discard(block)
        if old is not None:
            self._live[old.segment].discard(block)
            if not self._live[old.segment] and old.segment != self._number:
                self._dead.add(old.segment)

    def recover(self) -> dict[Block, float]:
        """Every block and its bytes, in the order in which they were written, as far as they fit the capacity (newest first)."""
        left, kept = self.capacity, dict[Block, float]()
        for block, place in reversed(self._index.items()):
            left -= place.length
            if left < 0:
                break
            kept[block] = float(place.length)
        for block in [block for block in self._index if block not in kept]:
            self.forget(*block)
        return dict(reversed(kept.items()))

    def write(self, pool: int, key: Key, size: float) -> bool:
        """Append a block. False where the disk is full or broken: then it takes no more, and says why in `stopped`."""
        if self.stopped:
            return False
        payload = content(pool, key, int(size))
        begun = self._watch()
        try:
            self._append((pool, key), payload)
            self._clean()
        except OSError as error:
            self._stop(error)
        self._write_ns += self._watch() - begun
        return (pool, key) in self._index

    def _append(self, block: Block, payload: bytes) -> None:
        record = encode(*block, payload)
        written = self._sizes.get(self._number, self.segment)
        if written and written + len(record) > self.segment:
            self._roll()
        file = self._file(self._number)
        offset = self._sizes[self._number]
        _write_all(file.fileno(), record, offset)
        self._sizes[self._number] = offset + len(record)
        self.bytes += len(record)
        self._point(block, _Place(self._number, offset, len(payload)))
        self.written += len(payload)

    def _roll(self) -> None:
        """Begin a new file."""
        self._number += 1
        self._sizes[self._number], self._live[self._number] = 0, set()
        if not self._live.get(self._number - 1, True):
            self._dead.add(self._number - 1)

    def _file(self, segment: int) -> BinaryIO:
        file = self._files.get(segment)
        if file is None:
            if len(self._files) >= 64:
                self._files.pop(next(iter(self._files))).close()
            fd = os.open(self._path(segment), os.O_RDWR | os.O_CREAT, 0o644)
            file = self._files[segment] = os.fdopen(fd, "r+b", buffering=0)
        return file

    def _stop(self, error: OSError) -> None:
        """Nothing is written any more; what is there can be read. A record that was cut short goes."""
        self.stopped = error.strerror or str(error)
        try:
            os.ftruncate(self._file(self._number).fileno(), self._sizes[self._number])
        except OSError:
            self.torn += 1  # the next one to open the folder cuts it off

    def _clean(self) -> None:
        """Win back room, oldest segment first, until the files take no more than they may."""
        for segment in sorted(self._dead):
            self._delete(segment)
        for oldest in list(self._sizes):
            if self.bytes <= OVERHEAD * self.capacity + self.segment or oldest == self._number:
                break
            for block in sorted(self._live[oldest], key=lambda block: self._index[block].offset):
                payload = self._payload(block)
                if payload is None:
                    self.damaged += 1
                    self._unpoint(block)
                else:
                    self._append(block, payload)
                    self.moved += len(payload)
            self._delete(oldest)

    def _delete(self, segment: int) -> None:
        file = self._files.pop(segment, None)
        if file is not None:
            file.close()
        self._path(segment).unlink(missing_ok=True)
        self._dead.discard(segment)
        self.bytes -= self._sizes.pop(segment)
        del self._live[segment]

    def _payload(self, block: Block) -> bytes | None:
        """What is stored of a block; None where it is not what was written."""
        place = self._index[block]
        return decode(os.pread(self._file(place.segment).fileno(), place.bytes, place.offset), *block)

    def sound(self, pool: int, key: Key, size: float) -> bool:
        """Whether the block is there and reads back as what its key says. It is read once, and again after `used`."""
        block = (pool, key)
        if block in self._sound:
            return True
        if block not in self._index:
            return False
        begun = self._watch()
        try:
            payload = self._payload(block)
        except OSError:
            payload = None
        self._read_ns += self._watch() - begun
        if payload is None or payload != content(pool, key, int(size)):
            self.damaged += 1
            return False
        self.read += len(payload)
        self._sound.add(block)
        return True

    def used(self, pool: int, key: Key) -> None:
        self._sound.discard((pool, key))

    def forget(self, pool: int, key: Key) -> None:
        """The block is given up. Its bytes go with its segment."""
        self._unpoint((pool, key))

    def clear(self) -> None:
        """Every block and file goes."""
        for segment in list(self._sizes):
            for block in list(self._live[segment]):
                self._unpoint(block)
            self._delete(segment)
        self._roll()

    def close(self) -> None:
        """Let go of the files and the lock."""
        for file in [*self._files.values(), self._lock]:
            file.close()
        self._files.clear()

    def gauges(self, name: str) -> dict[str, float]:
        told = {
            f"{name}_real_written_bytes": float(self.written),
            f"{name}_real_read_bytes": float(self.read),
            f"{name}_real_moved_bytes": float(self.moved),
            f"{name}_real_torn": float(self.torn),
            f"{name}_real_damaged": float(self.damaged),
            f"{name}_real_stopped": float(bool(self.stopped)),
        }
        if self._write_ns:
            told[f"{name}_real_write_rate"] = self.written / self._write_ns * 1e9
        if self._read_ns:
            told[f"{name}_real_read_rate"] = self.read / self._read_ns * 1e9
        return told

    def facts(self) -> dict[str, Any]:
        return {"directory": str(self.folder), "recovered_blocks": self.recovered, "torn": self.torn, "damaged": self.damaged}

    def check(self, blocks: set[Block]) -> None:
        """Assert that what is indexed is `blocks` and lies in the files. Slow: for tests."""
        assert set(self._index) == blocks, "the disk holds other blocks than its tier"
        assert all(block in self._live[place.segment] for block, place in self._index.items()), "a live block is miscounted"
        assert self.bytes <= OVERHEAD * self.capacity + 2 * self.segment + max(
            [0, *(place.bytes for place in self._index.values())]
        )
        assert all(self._path(segment).stat().st_size == size for segment, size in self._sizes.items() if size), "a file is odd"


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done
