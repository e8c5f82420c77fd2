"""Which engine, device or process a series is of, by its labels."""

from typing import NamedTuple

from kvbench.collect.exposition import Labels
from kvbench.collect.servers import DEVICE, PARTS

MOST = 200_000  # series whose place is remembered
_MODEL = ("model_name", "model")
_OTHERS = PARTS | {"pid", "le"}


class Spot(NamedTuple):
    """The engine (or device) of a series, the part of that engine's number, the process that counted it."""

    engine: Labels
    part: Labels
    pid: str


class Labeller:
    """Remembers what it found: the same labels come at every reading. `servers`: names that tell the engines of several apart."""

    def __init__(self, servers: list[str]) -> None:
        self.servers = servers
        self._spots: dict[tuple[bool, Labels], tuple[Spot, float]] = {}
        self._shown: dict[tuple[int, Labels], dict[str, str]] = {}
        self._taken: set[frozenset[tuple[str, str]]] = set()

    def spot(self, meaning: str, labels: Labels) -> tuple[Spot, float]:
        """Where a series stands, and the upper edge of the bucket that it is."""
        device = meaning.startswith("gpu_")
        found = self._spots.get((device, labels))
        if found is None:
            engine = tuple((key, value) for key, value in labels if (key in DEVICE if device else key not in _OTHERS))
            part = tuple((key, value) for key, value in labels if key in PARTS)
            given = dict(labels)
            found = Spot(engine, part, given.get("pid", "")), _edge(given.get("le", "inf"))
            if len(self._spots) >= MOST:
                self._spots.clear()  # labels that are others at every reading must not fill the memory
            self._spots[device, labels] = found
        return found

    def shown(self, server: int, engine: Labels) -> dict[str, str]:
        """As few labels as tell the engine from others: without the model's name, where no other has the rest in common."""
        found = self._shown.get((server, engine))
        if found is None:
            head = {"server": self.servers[server]} if len(self.servers) > 1 else {}
            found = {DEVICE.get(key, key): value for key, value in engine if key not in _MODEL} | head
            if frozenset(found.items()) in self._taken:
                found = dict(engine) | head
            self._taken.add(frozenset(found.items()))
            self._shown[server, engine] = found
        return found


def _edge(text: str) -> float:
    """Not a number where it is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")
