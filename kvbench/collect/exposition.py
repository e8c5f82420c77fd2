"""The text that a /metrics page is (Prometheus' format 0.0.4), read a little at a time: in between, the loop may send.

prometheus-client's parser does the reading. It takes tens of milliseconds over a server's page: so here it sees only what is
known, and what stands before a value (a name with its labels) only once.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]
"""A series' labels, sorted by name."""

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*(?=[{ \t])")
LONGEST = 1 << 16  # bytes of a line: what is longer would be joined, and read, in one piece
_MOST = 200_000  # series whose heads are kept: a page whose labels change at every reading must not fill the memory


class NotAPageError(ValueError):
    """What was read is not of Prometheus' text format. The text names the first line that is not."""


class Row(NamedTuple):
    """One series and its value."""

    name: str
    labels: Labels
    value: float


class Family(NamedTuple):
    """What a page declares of a metric: its type and help text, and how many series it has."""

    name: str
    kind: str
    help: str
    series: int


@dataclass
class Page:
    """The known samples of one reading, by the name they have on the page. `declared`: every metric with a TYPE line."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    declared: set[str] = field(default_factory=set)
    lines: int = 0
    size: int = 0

    def has(self, name: str) -> bool:
        """A counter with labels has no series before it first counts: its TYPE line then shows that it is there."""
        return name in self.rows or name in self.declared or name.removesuffix("_total") in self.declared


class Reader:
    """Reads one server's page again and again. `names`: of the samples that are wanted; None: of all."""

    def __init__(self, names: Collection[str] | None) -> None:
        self.names = names
        self._heads: dict[str, tuple[str, Labels]] = {}

    def reading(self, body: Iterable[bytes], page: Page) -> Iterator[None]:
        """Fill `page` from the parts of a body, pausing after every line that took work. Raises NotAPageError."""
        for line in _lines(body):
            page.lines += 1
            page.size += len(line) + 1
            line = line.lstrip(" \t") if line[:1] in (" ", "\t") else line
            if line[:1] == "#":
                if "TYPE" in line[:12] and len(words := line[1:].split(None, 2)) > 1 and words[0] == "TYPE":
                    page.declared.add(words[1])
            elif line and not line.isspace():
                found = _NAME.match(line)
                if found is None and line[0] != "{":  # a name in quotes is none that is known
                    raise NotAPageError(f"line {page.lines} is not of Prometheus' text format: {line[:60]!r}")
                if found is not None and (self.names is None or found.group() in self.names):
                    row = self._row(line, found.end(), page.lines)
                    page.rows.setdefault(row.name, []).append(row)
                    yield
            if page.lines % 64 == 0:
                yield

    def _row(self, line: str, name_end: int, number: int) -> Row:
        cut = line.rfind("}") + 1 or name_end
        head, tail = line[:cut], line[cut:].strip()
        known = self._heads.get(head)
        if known is not None and "_" not in tail:
            try:
                return Row(*known, float(tail))
            except ValueError:
                pass  # with a time after the value, or no number: the parser knows
        try:
            (family,) = text_string_to_metric_families(line + "\n")
            (sample,) = family.samples
        except (ValueError, LookupError):  # what the parser raises on a line that is none
            raise NotAPageError(f"line {number} is not of Prometheus' text format: {line[:60]!r}") from None
        row = Row(sample.name, tuple(sorted(sample.labels.items())), float(sample.value))
        if " # " not in line and len(self._heads) < _MOST:  # an exemplar's braces come after the value
            self._heads[head] = row.name, row.labels
        return row


def families(text: str) -> list[Family]:
    """Every metric of a page with its help, by the parser alone: for people, not for a run. Raises NotAPageError."""
    try:
        found = [
            Family(each.name, each.type, each.documentation, len(each.samples)) for each in text_string_to_metric_families(text)
        ]
    except (ValueError, LookupError) as error:
        raise NotAPageError(f"not of Prometheus' text format: {error}") from None
    return found


def _lines(body: Iterable[bytes]) -> Iterator[str]:
    """The lines of a body that comes in parts of any size. What is not UTF-8 is replaced."""
    rest: list[bytes] = []
    size = 0
    for part in body:
        for place, piece in enumerate(part.split(b"\n")):
            if place:
                yield _text(rest)
                rest, size = [], 0
            rest.append(piece)
            size += len(piece)
            if size > LONGEST:
                raise NotAPageError(f"a line is longer than {LONGEST >> 10} KiB: {b''.join(rest)[:60]!r}")
    if size:
        yield _text(rest)


def _text(parts: list[bytes]) -> str:
    return b"".join(parts).decode("utf-8", "replace").rstrip("\r")
