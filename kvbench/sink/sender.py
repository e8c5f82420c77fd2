"""Lines to a database, off the hot path: offered from the run's thread, kept on disk and sent by one thread of this class."""

import re
import threading
from collections import deque

from kvbench.clock import stopwatch
from kvbench.core import Seconds
from kvbench.sink.database import Database, Reply
from kvbench.sink.spool import Spool

BATCH = 1 << 20  # bytes of a write at most
POLL: Seconds = 0.5  # between two looks at what was offered
SHORTEST: Seconds = 0.1  # wait before the first retry; doubles
LONGEST: Seconds = 5.0
BACKLOG = 500_000  # lines that wait in memory for a disk that hangs
_DROPPED = re.compile(r"dropped=(\d+)")


class Sender:
    """`offer` lines, then `end`; it closes the database. After that, or when stopped: `remaining` lines are not delivered.

    lost: lines that a full or hanging disk did not take. halted: why nothing more is sent ("" while there is hope); lines
    still go to the disk then. notes: what a person should know, once each. behind: why the database lacks lines now, "" where it
    takes them.
    """

    def __init__(self, spool: Spool, database: Database) -> None:
        self.spool, self.database = spool, database
        self.offered = self.lost = 0
        self.halted = self.behind = ""
        self.last: Reply | None = None  # the latest answer that was a failure
        self.notes: list[str] = []
        self._most, self._backoff = BATCH, SHORTEST
        self._pending: deque[str] = deque()
        self._wake = threading.Event()
        self._ending = self._abandoned = False
        self._thread = threading.Thread(target=self._work, name="kvbench-sender", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, line: str) -> None:
        """Never blocks. A line without its line feed."""
        self.offered += 1
        if len(self._pending) < BACKLOG:
            self._pending.append(line)
        else:
            self.lost += 1

    def end(self) -> None:
        """No more lines come: the thread ends when all are delivered, or cannot be."""
        self._ending = True
        self._wake.set()

    def abandon(self) -> None:
        """Stop trying. Returns at once; a write under way may take until its timeout, and is not waited for."""
        self._ending = self._abandoned = True
        self._wake.set()

    def ended(self, within: Seconds) -> bool:
        """True when the thread has ended, waiting `within` seconds for it."""
        self._thread.join(within)
        return not self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Lines that are not on the disk yet."""
        return len(self._pending)

    @property
    def remaining(self) -> int:
        return self.spool.lines - self.spool.acked + len(self._pending)

    def _work(self) -> None:
        try:
            while not self._abandoned:
                final = self._ending
                self._keep()
                data = b"" if self.halted else self.spool.read(self._most)
                if data:
                    self._deliver(data)
                elif final:
                    return
                else:
                    self._wait(POLL)
            self._keep()
        except OSError as error:  # the spool's own files went away
            self._halt(f"the spool {self.spool.directory} cannot be used: {error.strerror or error}")
        except Exception as error:  # of ours; the run goes on, and its points are in its directory
            self._halt(f"internal error while sending to {self.database.where}: {type(error).__name__}: {error}")
        finally:
            self.database.close()

    def _keep(self) -> None:
        """What was offered goes to the disk."""
        lines = [self._pending.popleft() for _ in range(len(self._pending))]
        if not lines:
            return
        try:
            self.spool.append(("\n".join(lines) + "\n").encode("utf-8", "replace"))
        except OSError as error:
            self.lost += len(lines)
            self._note(f"lines were lost since {self.spool.directory} could not be written: {error.strerror or error}")

    def _deliver(self, data: bytes) -> None:
        """One batch, in parts where it is too long or holds a bad line. What fails for now stays, to be read again."""
        parts = [data]
        while parts and not self._abandoned:
            part = parts.pop()
            reply = self.database.post(part)
            if reply.partial:
                self._bury_named(part, reply)
            elif reply.refused or reply.status == 413:
                if reply.status == 413:
                    self._most = max(1 << 12, len(part) // 2)
                if (halves := _halves(part)) is not None:
                    parts += halves
                    continue
                self.spool.bury(part, str(reply))
                self._note(f"{self.database.where} refused lines, which are in dead.lp: {reply}")
            elif not reply.ok:
                self._later(reply)
                return
            self.spool.ack(part)
            self._backoff, self.behind = SHORTEST, ""

    def _later(self, reply: Reply) -> None:
        """Wait before the next try, or have done with trying."""
        self.last, self.behind = reply, f"{self.database.where} answered {reply}" if reply.status is not None else str(reply)
        if not reply.passing:
            self._halt(f"{self.database.where} answered {reply}: nothing more is sent")
            return
        if reply.status is None:
            self.spool.rewind()
        elif reply.status == 404:
            self._note(f"{self.database.where} answered {reply}: does the database or bucket still exist?")
        wait = min(self._backoff, POLL) if self._ending else self._backoff
        self._backoff = min(2 * self._backoff, LONGEST)
        self._wait(max(wait, reply.after or 0.0))

    def _bury_named(self, data: bytes, reply: Reply) -> None:
        """A partial write: the good lines are stored and not sent again; those that the answer names or counts are dead."""
        named = [line for line in data.splitlines(keepends=True) if line.strip().decode("utf-8", "replace") in reply.said]
        counted = _DROPPED.search(reply.said)
        self.spool.bury(b"".join(named), str(reply))
        self.spool.dead += max(0, int(counted[1]) - len(named)) if counted else 0
        self._note(f"{self.database.where} stored some lines without others (dead.lp): {reply}")

    def _wait(self, seconds: Seconds) -> None:
        """That long, or until the end is asked for; what is offered meanwhile goes to the disk."""
        until = stopwatch() + seconds * 1e9
        while (left := (until - stopwatch()) / 1e9) > 0 and not self._abandoned:
            if self._wake.wait(min(left, POLL)):
                self._wake.clear()
                return
            self._keep()

    def _halt(self, why: str) -> None:
        self.halted = self.behind = why
        self._note(why)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _halves(data: bytes) -> list[bytes] | None:
    """Lines in two parts, the second first; None where there is one line."""
    middle = data.find(b"\n", len(data) // 2) + 1
    if middle in (0, len(data)):
        middle = data.rfind(b"\n", 0, len(data) // 2) + 1
    return [data[middle:], data[:middle]] if 0 < middle < len(data) else None
