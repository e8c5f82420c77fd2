"""YAML with a line for every node: text in, plain data and the place of each value out. Knows nothing of scenarios.

Scalars are read as YAML 1.2 reads them (`off`, `yes` and `1:30` stay text; an integer with a leading zero is refused, since
YAML 1.1 takes it for octal). Anything that could hang or surprise is an error with its line: duplicate keys, tags, cycles,
aliases that multiply, deep nesting, big files, other encodings.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvbench.problem import KeyPath, Problem, SourceError, describe, show

MAX_BYTES = 2**20
MAX_DEPTH = 40
MAX_NODES = 50_000  # after aliases are expanded
USUAL = Path("scenarios")  # where a file may be meant that is not where it was said to be

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # only its event parser is used; the C one is ten times faster
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_BINARY = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_NULL, _TRUE, _FALSE = ("", "~", "null", "Null", "NULL"), ("true", "True", "TRUE"), ("false", "False", "FALSE")


@dataclass
class Source:
    """A file's data, and the place ("file:line" or "--set ...") of every key path in it."""

    name: str
    data: Any
    places: dict[tuple[str, ...], str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """Where `path` was written, or its nearest parent that was."""
        written = tuple(map(str, path))
        for length in range(len(written), -1, -1):
            if written[:length] in self.places:
                return self.places[written[:length]]
        return self.name

    def set(self, assignment: str) -> None:
        """Apply one `a.b=c`; c is YAML. A number in the path indexes a list. Raises SourceError that points to it."""
        where = f"--set {assignment}"
        name, equals, text = assignment.partition("=")
        path: list[str | int] = list(name.strip().split("."))
        if not equals or not all(path):
            raise SourceError([Problem(where, "", "write it as key.path=value")])
        value = read_text(text, where, numbered=False)
        node = self.data
        for depth, key in enumerate(path):
            if isinstance(node, list) and str(key).isdecimal() and int(key) < len(node):
                path[depth] = key = int(key)
            elif not isinstance(node, dict):
                what = f"a list of {len(node)}, counted from 0" if isinstance(node, list) else describe(node)
                raise SourceError([Problem(where, show(path[:depth]), f"has no key {key!r}: it is {what}")])
            if depth == len(path) - 1:
                node[key] = value.data
            else:
                if isinstance(node, dict) and node.get(key) is None:
                    node[key] = {}
                    self.places[tuple(map(str, path[: depth + 1]))] = where
                node = node[key]
        self.replaced(tuple(map(str, path)), value)

    def replaced(self, path: tuple[str, ...], value: "Source") -> None:
        """Record that what stood at `path` now comes from `value`."""
        self.places = {known: place for known, place in self.places.items() if known[: len(path)] != path}
        self.places |= {path + inner: place for inner, place in value.places.items()} | {path: value.place(())}


def read_file(path: Path) -> Source:
    """The data of a YAML file. Raises SourceError with file:line for anything that is not one plain YAML mapping."""
    name = str(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except IsADirectoryError:
        raise _wrong(name, 1, "this is a directory, not a file") from None
    except FileNotFoundError as error:
        meant = next((each for each in (USUAL / path.name, USUAL / f"{path.name}.yaml") if each.is_file()), None)
        hint = f" (did you mean {meant}?)" if meant else ""
        raise SourceError([Problem(name, "", f"cannot be read: {error.strerror}{hint}")]) from None
    except OSError as error:
        raise _wrong(name, 1, f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a NUL byte in the path itself
        raise _wrong(repr(name), 1, f"cannot be read: {error}") from None
    if len(raw) > MAX_BYTES:
        raise _wrong(name, 1, f"larger than {MAX_BYTES} bytes: a scenario is a page; put data in files it names")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _wrong(name, line, f"not UTF-8 (byte 0x{raw[error.start]:02x}): save the file as UTF-8") from None
    source = read_text(text, name)
    if source.data is None:
        raise _wrong(name, 1, "the file is empty: see docs/scenario.md and the scenarios that come with kvbench")
    if not isinstance(source.data, dict):
        raise SourceError([Problem(source.place(()), "", f"a scenario is a mapping of keys, this is {describe(source.data)}")])
    return source


def _wrong(name: str, line: int, text: str) -> SourceError:
    return SourceError([Problem(f"{name}:{line}", "", text)])


def read_text(text: str, name: str, numbered: bool = True) -> Source:
    """The data of one YAML document; `numbered`: places carry a line. Raises SourceError."""
    builder = _Builder(name, numbered)
    binary = _BINARY.search(text)
    if binary:
        builder.fail(text.count("\n", 0, binary.start()), f"control character {binary.group()!r}: this is not a text file")
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        lines = text.rstrip().split("\n")
        line = min(mark.line if mark else 0, len(lines) - 1)
        reason = " ".join(filter(None, (error.problem, error.context)))
        if "\t" in lines[line]:
            reason = f"the line holds a tab, and YAML is indented with spaces ({reason})"
        builder.fail(line, f"not YAML: {reason}")
    except yaml.YAMLError as error:
        builder.fail(0, f"not YAML: {' '.join(str(error).split())}")
    return Source(name, builder.result[0] if builder.result else None, builder.places)


@dataclass
class _Open:
    """A collection under construction: its data, path, line, and for mappings the key that waits for a value."""

    data: Any
    path: KeyPath
    line: int
    anchor: str | None
    key: Any = None
    waits: bool = False  # a key was read, its value not yet
    merged: list[Any] = field(default_factory=list)
    lines: dict[Any, int] = field(default_factory=dict)  # of its own keys
    first: int = 0  # nodes counted before it
    deep: int = 0  # levels below it


class _Builder:
    """Turns parser events into data, one at a time, with an explicit stack (deep files cannot overflow Python's)."""

    def __init__(self, name: str, numbered: bool) -> None:
        self.name, self.numbered = name, numbered
        self.stack: list[_Open] = []
        self.anchors: dict[str, tuple[Any, int, int]] = {}  # finished nodes: value, nodes it expands to, levels below it
        self.places: dict[tuple[str, ...], str] = {}
        self.result: list[Any] = []
        self.nodes = 0

    def fail(self, line: int, text: str) -> None:
        raise SourceError([Problem(self.at(line), show(self.path()) if self.stack else "", text)])

    def at(self, line: int) -> str:
        return f"{self.name}:{line + 1}" if self.numbered else self.name

    def path(self) -> KeyPath:
        """The path of the node that comes next."""
        if not self.stack:
            return ()
        top = self.stack[-1]
        if isinstance(top.data, list):
            return (*top.path, len(top.data))
        return (*top.path, str(top.key)) if top.waits else top.path

    def written(self) -> tuple[str, ...]:
        return tuple(map(str, self.path()))

    def take(self, event: Any) -> None:
        line = event.start_mark.line
        if isinstance(event, yaml.DocumentStartEvent) and self.result:
            self.fail(line, "a second document: a scenario is one document")
        elif isinstance(event, yaml.AliasEvent):
            self.alias(str(event.anchor), line)
        elif isinstance(event, yaml.ScalarEvent):
            self.check(event, line)
            value = self.scalar(event, line)
            if event.anchor:
                self.anchors[event.anchor] = (value, 1, 0)
            self.put(value, line, 1, 0)
        elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            self.check(event, line)
            self.bound(0, line)
            if self.stack and isinstance(self.stack[-1].data, dict) and not self.stack[-1].waits:
                self.fail(line, "a key must be plain text or a number")
            data: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
            self.stack.append(_Open(data, self.path(), line, event.anchor, first=self.nodes))
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            self.close()

    def check(self, event: Any, line: int) -> None:
        if event.tag and event.tag not in ("!", "tag:yaml.org,2002:str"):
            self.fail(line, f"tag {event.tag!r}: tags are not used in scenarios")

    def alias(self, anchor: str, line: int) -> None:
        if any(node.anchor == anchor for node in self.stack):
            self.fail(line, f"*{anchor} refers to itself: a cycle")
        if anchor not in self.anchors:
            self.fail(line, f"*{anchor} refers to nothing: no &{anchor} before it")
        value, nodes, deep = self.anchors[anchor]
        self.bound(deep, line)
        self.put(_copy(value) if self.nodes + nodes <= MAX_NODES else value, line, nodes, deep)

    def bound(self, deep: int, line: int) -> None:
        if len(self.stack) + deep >= MAX_DEPTH:
            self.fail(line, f"nested deeper than {MAX_DEPTH} levels")

    def close(self) -> None:
        node = self.stack.pop()
        for extra in node.merged:
            node.data |= {key: value for key, value in extra.items() if key not in node.data}
        nodes = self.nodes - node.first + 1
        if node.anchor:
            self.anchors[node.anchor] = (node.data, nodes, node.deep)
        self.put(node.data, node.line, 1, node.deep)

    def put(self, value: Any, line: int, nodes: int, deep: int) -> None:
        """Place a finished node in its parent."""
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            self.fail(line, f"more than {MAX_NODES} values (aliases multiply?)")
        if not self.stack:
            self.places[()] = self.at(line)
            self.result.append(value)
            return
        top = self.stack[-1]
        top.deep = max(top.deep, deep + 1)
        if isinstance(top.data, list):
            self.places[self.written()] = self.at(line)
            top.data.append(value)
        elif not top.waits:
            self.key(top, value, line)
        elif top.key == "<<":
            self.merge(top, value, line)
        else:
            self.places[self.written()] = self.at(top.lines[top.key])
            top.data[top.key], top.waits = value, False

    def key(self, top: _Open, key: Any, line: int) -> None:
        if key is None or isinstance(key, (dict, list, bool)):
            self.fail(line, f"{describe(key)} cannot be a key: write it in quotes")
        if key in top.lines:
            self.fail(line, f"key {key!r} is given twice (first on line {top.lines[key] + 1})")
        top.lines[key] = line
        top.key, top.waits = key, True

    def merge(self, top: _Open, value: Any, line: int) -> None:
        sources = value if isinstance(value, list) else [value]
        if not all(isinstance(source, dict) for source in sources):
            self.fail(line, f"<< merges mappings, this is {describe(value)}")
        top.merged += sources
        top.waits = False

    def scalar(self, event: Any, line: int) -> Any:
        """A plain scalar by YAML 1.2's core schema; quoted ones are text."""
        text: str = event.value
        if not event.implicit[0]:
            return text
        if text in _NULL:
            return None
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        if _OCTAL.fullmatch(text):
            self.fail(line, f"{text} has a leading zero, which YAML versions read differently: write it without, or in quotes")
        if len(text) <= 40 and _INT.fullmatch(text):
            return int(text.replace("_", ""))
        if len(text) <= 40 and _FLOAT.fullmatch(text):
            return float(text.replace("_", ""))
        return text


def _copy(value: Any) -> Any:
    """A copy of plain data, so that an override of one alias does not reach the others."""
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value
