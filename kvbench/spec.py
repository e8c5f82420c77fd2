"""Between a file and pydantic: fields whose class is named by one of their keys, and errors that say where and what.

`OneOf("shape", ARRIVALS)` reads `{shape: wave, mean: 3/s, ...}` as ARRIVALS["wave"](mean=3, ...). The same dict feeds the JSON
Schema and the hints, so a new implementation needs no edit here.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import GetJsonSchemaHandler, ValidationError, ValidationInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError, core_schema

from kvbench.problem import KeyPath, Problem, SourceError, describe, show
from kvbench.yaml_source import Source

Tree = dict[str, Any]


class OneOf:
    """Annotation of a field that holds one of `table`'s models, named by its key `tag`; `default` where the key may be left out.

    `later` names what is known to come, so that the error can say so.
    """

    def __init__(self, tag: str, table: Mapping[str, type[Any]], later: Iterable[str] = ()) -> None:
        self.tag, self.table, self.later = tag, table, tuple(later)

    def read(self, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, tuple(self.table.values())):
            return value
        if not isinstance(value, dict):
            raise ValueError(f"write a mapping with `{self.tag}: {' | '.join(self.table)}`")
        if self.tag not in value:
            fault((), f"has no `{self.tag}:`; known are {', '.join(self.table)}")
        rest = dict(value)
        name = rest.pop(self.tag)
        name = "null" if name is None and "null" in self.table else name  # an unquoted null names the null target
        if not isinstance(name, str) or name not in self.table:
            if name in self.later:
                fault((self.tag,), f"{name!r} is not in this version of kvbench yet; it has {', '.join(self.table)}")
            fault((self.tag,), f"unknown {self.tag} {describe(name)}; known are {', '.join(self.table)}{hint(name, self.table)}")
        return self.table[name].model_validate(rest, context=info.context)

    def write(self, value: Any) -> Tree:
        name = next(name for name, model in self.table.items() if type(value) is model)
        return {self.tag: name, **value.model_dump(mode="json", by_alias=True)}

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.with_info_plain_validator_function(
            self.read, serialization=core_schema.plain_serializer_function_ser_schema(self.write, when_used="json")
        )

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        choices = []
        for name, model in self.table.items():
            inner = dict(handler.resolve_ref_schema(handler(model.__pydantic_core_schema__)))
            inner["properties"] = {self.tag: {"const": name}, **inner.get("properties", {})}
            inner["required"] = [self.tag, *inner.get("required", ())]
            choices.append(inner)
        return {"oneOf": choices}


def fault(path: KeyPath, text: str) -> NoReturn:
    """Raise a validation error at `path`, relative to the model whose validator calls it."""
    kind = PydanticCustomError("scenario", "{text}", {"text": text})
    raise ValidationError.from_exception_data("scenario", [InitErrorDetails(type=kind, loc=path, input=None)])


def hint(word: Any, known: Iterable[str]) -> str:
    """The nearest known word, as the end of a sentence; "" where none is near."""
    near = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


@dataclass(frozen=True)
class Reader:
    """What is needed to explain errors: the JSON Schema, for hints; `later`: key paths (list indexes left out) that are refused
    for a reason of their own; `moved`: the prefix under which keys are validated, and where the user wrote them."""

    schema: Callable[[], Tree]
    later: Mapping[str, str]
    moved: tuple[KeyPath, KeyPath] = ((), ())

    def explain(self, error: ValidationError, source: Source) -> SourceError:
        """Every error of `error` with its place in `source`."""
        return SourceError([self._problem(line, source) for line in error.errors(include_url=False)])

    def _problem(self, line: ErrorDetails, source: Source) -> Problem:
        path = tuple(part for part in line["loc"] if part != "[key]")
        validated, written = self.moved
        if path[: len(validated)] == validated:
            path = written + path[len(validated) :]
        path = as_written(path, source.data)
        return Problem(source.place(path), show(path), self._text(line, path, source))

    def _text(self, line: ErrorDetails, path: KeyPath, source: Source) -> str:
        kind = line["type"]
        if kind == "extra_forbidden":
            reason = self.later.get(show([part for part in path if isinstance(part, str)]))
            names = keys_at(self.schema(), source.data, path[:-1])
            allowed = f"; allowed are {', '.join(names)}" if names else ""
            return reason or f"unknown key {path[-1]!r}{hint(path[-1], names)}{allowed}"
        if kind == "missing":
            example = example_at(self.schema(), source.data, path)
            return f"is missing; for example {path[-1]}: {example}" if example else "is missing"
        if kind in ("value_error", "scenario"):
            return line["msg"].removeprefix("Value error, ")
        said = WORDS.get(kind, f"{line['msg'][0].lower()}{line['msg'][1:]}")
        return f"{said}, this is {describe(line['input'])}"


WORDS = dict.fromkeys(("dict_type", "model_type", "model_attributes_type", "mapping_type"), "must be a mapping of keys")
WORDS |= dict.fromkeys(("list_type", "tuple_type"), "must be a list")
"""Where pydantic speaks of Python types, users read of YAML."""


def as_written(path: KeyPath, data: Any) -> KeyPath:
    """`path` without the names that only our models have: those missing from the data where a later one is there."""
    found: list[str | int] = []
    rest = list(path)
    while rest:
        if isinstance(data, dict) and rest[0] not in data:
            known = next((i for i, part in enumerate(rest) if part in data), 0)
            rest = rest[known:]
        part = rest.pop(0)
        found.append(part)
        if isinstance(data, dict):
            data = data.get(part)
        else:
            data = data[part] if isinstance(data, list) and isinstance(part, int) and part < len(data) else None
    return tuple(found)


def keys_at(schema: Tree, data: Any, path: KeyPath) -> list[str]:
    """The keys that a mapping at `path` may have, by the JSON Schema; `data` decides between alternatives. [] where unknown."""
    return list(_node_at(schema, data, path).get("properties", {}))


def example_at(schema: Tree, data: Any, path: KeyPath) -> str:
    """How the value at `path` may be written, by the JSON Schema; "" where it has no example of one line."""
    found = _node_at(schema, data, path).get("examples", ())
    return " or ".join(str(each) for each in found if isinstance(each, (str, int, float)))


def _node_at(schema: Tree, data: Any, path: KeyPath) -> Tree:
    """The schema's node for what `data` has at `path`; {} where it has none."""
    node = _narrow(schema, schema, data)
    for part in path:
        if isinstance(part, int):
            data, inner = data[part] if isinstance(data, list) else None, node.get("items")
        else:
            data = data.get(part) if isinstance(data, dict) else None
            inner = node.get("properties", {}).get(part, node.get("additionalProperties"))
        if not isinstance(inner, dict):
            return {}
        node = _narrow(inner, schema, data)
    return node


def _narrow(node: Tree, schema: Tree, data: Any) -> Tree:
    """`node` with its reference followed, and of its alternatives the one that `data` chose."""
    while "$ref" in node:
        node = schema["$defs"][node["$ref"].rsplit("/", 1)[-1]]
    choices = [_narrow(choice, schema, data) for choice in node.get("oneOf") or node.get("anyOf") or node.get("allOf") or ()]
    if not choices:
        return node
    data = data if isinstance(data, dict) else {}
    return max(choices, key=lambda choice: _likeness(choice, data))


def _likeness(choice: Tree, data: Tree) -> float:
    """How well `data` answers to a choice: by its tag where it has one, else by its keys."""
    properties = choice.get("properties", {})
    tags = {key: value["const"] for key, value in properties.items() if "const" in value}
    told = [data[key] == name for key, name in tags.items() if key in data]
    return 1000 * (all(told) if told else 0) + len(properties.keys() & data.keys()) + (0.5 if properties else 0)


def plain(value: Any) -> Any:
    """Data as strict JSON takes it: infinities as text, since JSON has none."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
