"""Who asks later: closed users between an answer and their next question, and sessions between two turns."""

import heapq
import itertools
import math
from dataclasses import dataclass, field

from kvbench.core import Request, Seconds


@dataclass
class Crowd:
    """What falls due because of an answer, not of a schedule, in order. None stands for a user's next question, not yet built."""

    later: list[tuple[Seconds, int, Request | None]] = field(default_factory=list)
    asking: set[int] = field(default_factory=set)  # ids of users' requests that wait or run
    surplus: int = 0  # users who are to stop asking
    order: "itertools.count[int]" = field(default_factory=itertools.count)  # keeps equal due times in order

    @property
    def due(self) -> Seconds:
        return self.later[0][0] if self.later else math.inf

    def push(self, due: Seconds, request: Request | None) -> None:
        heapq.heappush(self.later, (due, next(self.order), request))

    def pop(self) -> Request | None:
        return heapq.heappop(self.later)[2]

    def clear(self) -> None:
        self.later.clear()

    def disperse(self) -> None:
        """The users go; turns of sessions stay, for whoever goes on with them."""
        self.later = [entry for entry in self.later if entry[2] is not None]
        heapq.heapify(self.later)

    def muster(self, wanted: int, now: Seconds) -> None:
        """Bring the users to `wanted`; whoever still waits for an answer from the phase before is one of them."""
        alive = len(self.asking) + sum(request is None or request.user for *_, request in self.later)
        for _ in range(wanted - alive):
            self.push(now, None)
        self.surplus = max(0, alive - wanted)

    def goes_on(self) -> bool:
        """Whether a user who could ask again does: not while there are too many."""
        if self.surplus:
            self.surplus -= 1
            return False
        return True
