"""A trained policy as data: which action in which state, how often each state was seen in training, and how it was trained.

Files are written by `kvbench laws train`; those of profiles/laws/ are known by name. Nothing in them depends on a time, a machine
or a user: training again with the same seed writes the same bytes.
"""

import difflib
from bisect import bisect_right
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Final, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvbench.profile import root

FEATURES: Final = ("error", "waiting", "trend", "kv_usage")
"""What a state is made of, from outside to inside of the table: share of the requests that ended and were not served, requests
waiting in the server, change of the KV usage in a second, KV usage."""


class Policy(BaseModel):
    """Actions by state. A state is one bin of every feature; the table lists them with the last feature running fastest."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = ""
    trained: dict[str, Any] = Field(description="how: scenario and its digest, seeds, episodes, reward, versions, scores")
    share: float = Field(gt=0, le=1, description="KV usage of one request, until the run has shown its own")
    kv_limit: float = Field(gt=0, le=1, description="KV usage that the actions were trained to keep below")
    edges: dict[str, list[float]] = Field(description="between the bins of each feature; a value on an edge is in the upper bin")
    actions: list[float] = Field(min_length=1, description="factors on the requests for which there is room, rising")
    table: list[int] = Field(description="by state: the action's index")
    seen: list[int] = Field(description="by state: control periods of the training that were spent in it")
    enough: int = Field(ge=1, description="a state seen less often than this is not known")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if tuple(self.edges) != FEATURES:
            raise ValueError(f"edges has {', '.join(self.edges)}: it must have {', '.join(FEATURES)}, in that order")
        if any(list(edges) != sorted(set(edges)) for edges in (self.actions, *self.edges.values())):
            raise ValueError("edges and actions rise from each to the next")
        states = self.states
        if len(self.table) != states or len(self.seen) != states:
            raise ValueError(f"table and seen have {len(self.table)} and {len(self.seen)} entries for {states} states")
        if not all(0 <= action < len(self.actions) for action in self.table):
            raise ValueError(f"table holds indices of actions, 0 to {len(self.actions) - 1}")
        return self

    @property
    def states(self) -> int:
        return prod(len(edges) + 1 for edges in self.edges.values())

    def state(self, values: dict[str, float]) -> int:
        """The index of the state that has these values of FEATURES."""
        found = 0
        for name, edges in self.edges.items():
            found = found * (len(edges) + 1) + bisect_right(edges, values[name])
        return found

    def known(self, state: int) -> bool:
        return self.seen[state] >= self.enough


def folder() -> Path:
    return root() / "laws"


def names() -> list[str]:
    return sorted(path.stem for path in folder().glob("*.yaml"))


def is_file(name: str) -> bool:
    """Whether a scenario that writes `name` means a file and not a shipped policy."""
    return "/" in name or name.endswith((".yaml", ".yml"))


def load(name: str) -> Policy:
    """A policy file, or a shipped policy by name. ValueError that names the known ones where there is none, or says what is wrong
    with the file."""
    return read(Path(name)) if is_file(name) else shipped(name)


@cache  # read for every scenario that is checked; the files are the package's own
def shipped(name: str) -> Policy:
    """As load, of those that come with kvbench."""
    known = names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        own = f"or ./{name}.yaml, a file that `kvbench laws train` made"
        raise ValueError(f"unknown policy {name!r}{hint} (known: {', '.join(known) or 'none'}; {own})")
    return read(folder() / f"{name}.yaml")


def read(path: Path) -> Policy:
    """A policy file. ValueError where it is not one."""
    try:
        return Policy.model_validate({"name": path.stem, **yaml.safe_load(path.read_text())})
    except (OSError, TypeError, yaml.YAMLError, ValidationError) as error:
        raise ValueError(f"policy {path.stem!r} cannot be read: {error}") from None


def write(policy: Policy) -> str:
    """The file's text: rows of one value of every outer feature, columns by KV usage."""
    data = policy.model_dump()
    width = len(policy.edges[FEATURES[-1]]) + 1
    lines = [
        "# Written by `kvbench laws train`. Rows of table and seen: " + " x ".join(FEATURES[:-1]) + "; columns: " + FEATURES[-1]
    ]
    scalars = ("trained", "share", "kv_limit", "edges", "actions", "enough")
    lines.append(
        yaml.safe_dump({key: data[key] for key in scalars}, sort_keys=False, default_flow_style=None, width=130).rstrip()
    )
    for key in ("table", "seen"):
        cells = [str(value) for value in data[key]]
        wide = max(map(len, cells))
        rows = [", ".join(cell.rjust(wide) for cell in cells[at : at + width]) for at in range(0, len(cells), width)]
        lines.append(f"{key}: [\n" + ",\n".join(f"  {row}" for row in rows) + "\n]")
    return "\n".join(lines) + "\n"
