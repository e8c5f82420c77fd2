"""A spool of something that has no end: what is delivered for good is deleted, and no more than so many bytes wait."""

import errno
from pathlib import Path

from kvbench import units
from kvbench.sink.influx import Claimed
from kvbench.sink.spool import Mark

DEAD = 16 << 20  # bytes of refused lines that are kept


class Standing(Claimed):
    """Begins with what its directory holds from before. `most`: bytes of lines that wait; what comes meanwhile is refused. On the
    disk are at most two segments more, of which the database has every line."""

    def __init__(self, directory: Path, most: int) -> None:
        super().__init__(directory)
        self.most = most
        for number in self._numbers():
            if number < self._segment:
                self._path(number).unlink()
            else:
                data = self._path(number).read_bytes()
                self.lines += data.count(b"\n", self._offset if number == self._segment else 0)

    def append(self, data: bytes) -> None:
        if self._waiting() + len(data) > self.most:
            raise OSError(errno.EDQUOT, f"{units.size(self.most)} wait for the database there, and no more are kept")
        super().append(data)

    def bury(self, data: bytes, why: str) -> None:
        dead = self.directory / "dead.lp"
        if dead.exists() and dead.stat().st_size > DEAD:
            self.dead += data.count(b"\n")
        else:
            super().bury(data, why)

    def _settle(self, mark: Mark) -> None:
        super()._settle(mark)
        for number in self._numbers():
            if number < mark.segment:
                self._path(number).unlink(missing_ok=True)

    def _waiting(self) -> int:
        return sum(self._path(number).stat().st_size for number in self._numbers() if number >= self._segment) - self._offset
