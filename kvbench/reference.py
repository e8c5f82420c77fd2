"""docs/scenario.md, written from the JSON Schema: every key, its form, its default and what it means."""

import json
from typing import Any

from kvbench.units import SIZES

Tree = dict[str, Any]

INTRO = """# Scenario files

A scenario says what load, against what, until when, judged how. It is one YAML document. Generated from the code by `make docs`.

- Quantities carry their unit: `100ms`, `5m`, `1m30s`, `2/s`, `90%`, `80GiB`. A bare number where a unit belongs is an error.
- YAML is read as version 1.2 has it: `on`, `off`, `yes` and `1:30` are text, a leading zero is refused, tags are refused.
- `kvbench check FILE` prints what a run would do; `kvbench schema` prints the JSON Schema; `--set a.b=c` overrides a key (a
  number indexes a list, as in `--set stop.0.for=1m`); `--target URL` replaces the target by a server.
- Paths are relative to the scenario file. Secrets come from environment variables only (`key_env`, headers as `$NAME`).
- A phase that is not named does not run. Bounds belong to one phase: `warmup.requests` and `steady.requests` are counted apart,
  and each epoch has its own `for`.
- One traffic class may be written flat under `workload`, without `classes`.
"""


def markdown(schema: Tree) -> str:
    """The reference as Markdown, in the order in which keys are met."""
    writer = _Writer(schema)
    writer.section("The file", schema)
    while writer.waiting:
        writer.section(*writer.waiting.pop(0))
    return INTRO + "\n" + "\n".join(writer.lines).rstrip() + "\n"


class _Writer:
    def __init__(self, schema: Tree) -> None:
        self.defs: Tree = schema.get("$defs", {})
        self.lines: list[str] = []
        self.waiting: list[tuple[str, Tree]] = []
        self.titles: dict[str, str] = {}  # of the section that describes such a thing: none is written twice

    def section(self, title: str, node: Tree) -> None:
        self.lines += [f"## {title}", ""]
        for name, choice in _choices(node) or [("", node)]:
            if name:
                self.lines += [f"### `{name}`", ""]
            self.lines += [choice.get("description", "").strip(), ""]
            self.table(choice)

    def table(self, node: Tree) -> None:
        properties = {key: inner for key, inner in node.get("properties", {}).items() if "const" not in inner}
        metrics = [key for key, inner in properties.items() if inner == {"type": ["string", "number"]}]
        rows = [(key, inner) for key, inner in properties.items() if key not in metrics]
        if rows:
            self.lines += ["| key | form | default | meaning |", "|---|---|---|---|"]
        for key, inner in rows:
            default = "required" if key in node.get("required", ()) else _default(inner)
            self.lines.append(f"| `{key}` | {self.form(key, inner)} | {default} | {_cell(self.meaning(inner))} |")
        if metrics:
            examples = "`kv_usage`, `success_rate` or `response_ttft_p99`"
            self.lines += ["", f"And one key per metric with its statistic (docs/metrics.md), such as {examples}."]
        self.lines.append("")

    def meaning(self, node: Tree) -> str:
        return str(node.get("description") or self.follow(node).get("description", "")).strip()

    def follow(self, node: Tree) -> Tree:
        while "$ref" in node:
            node = self.defs[node["$ref"].rsplit("/", 1)[-1]]
        return node

    def form(self, key: str, node: Tree) -> str:
        """What may stand there, short; a section of its own where that is a mapping."""
        node = self.follow(node)
        if found := [option for option in node.get("anyOf") or node.get("oneOf") or () if option != {"type": "null"}]:
            named = _choices(node)
            plain = [option for option in found if "properties" not in self.follow(option)]
            forms = [self.later(key, node)] if named else []
            forms += [self.form(key, option) for option in (plain if named else found)]
            return " or ".join(dict.fromkeys(forms))
        if node.get("properties"):
            return self.later(key, node)
        if "enum" in node:
            return ", ".join(f"`{value}`" for value in node["enum"])
        if node.get("type") == "array":
            return f"list of {self.form(key, node['items'])}" if node.get("items") else "list"
        if isinstance(node.get("additionalProperties"), dict):
            return f"mapping to {self.form(key, node['additionalProperties'])}"
        example = node.get("examples", [""])[0]
        return f"such as `{example}`" if example else _NAMES.get(str(node.get("type")), "any")

    def later(self, key: str, node: Tree) -> str:
        choices = _choices(node)
        mark = json.dumps([[name, *choice["properties"]] for name, choice in choices] or sorted(node["properties"]))
        if mark not in self.titles:
            self.titles[mark] = key if choices else node.get("title", key)
            self.waiting.append((self.titles[mark], node))
        title = self.titles[mark]
        return f"[{title}](#{title.lower()})"


_NAMES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true` or `false`", "object": "mapping"}


def _choices(node: Tree) -> list[tuple[str, Tree]]:
    """The alternatives of a mapping that one of its keys names, as ("shape: wave", its schema)."""
    found = []
    for option in node.get("oneOf") or node.get("anyOf") or ():
        tags = [(key, inner["const"]) for key, inner in option.get("properties", {}).items() if "const" in inner]
        found += [(f"{key}: {name}", option) for key, name in tags[:1]]
    return found


def _default(node: Tree) -> str:
    """The default as a user would write it."""
    value = node.get("default")
    if value is None or value == [] or isinstance(value, dict):
        return ""
    if value == "inf":
        return "none"
    example = str(node.get("examples", [""])[0])
    if isinstance(value, (int, float)) and example.endswith("B"):
        unit = max((unit for unit, size in SIZES.items() if value % size == 0), key=SIZES.__getitem__)
        return f"`{value / SIZES[unit]:g}{unit}`"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and example:
        return f"`{100 * value:g}%`" if example.endswith("%") else f"`{value:g}{'/s' if example.endswith('/s') else 's'}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{json.dumps(value).strip(chr(34))}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
