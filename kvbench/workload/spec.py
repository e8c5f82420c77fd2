"""What the specs of this room share: a frozen base, a choice by name (`{dist: power_law, ...}`), and weights that must add up."""

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from kvbench import units

S = TypeVar("S", bound="Spec")
SLACK = 0.001  # how far percentages may miss 100 %: three times 33.3 % is meant as a whole


class Spec(BaseModel):
    """Something a user can name in a scenario: immutable, with no key beyond its own, and its own implementation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def named(value: Any, key: str, table: Mapping[str, type[S]], context: Any = None) -> S:
    """`{key: NAME, ...rest}` as table[NAME] made from the rest. Raises ValueError naming the key and the nearest known name."""
    for cls in table.values():
        if isinstance(value, cls):
            return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is not a mapping with the key {key!r} (one of {', '.join(table)})")
    name = value.get(key)
    if not isinstance(name, str) or name not in table:
        near = difflib.get_close_matches(str(name), table, 1)
        found = f"the key {key!r} is missing" if name is None else f"{key}: {name!r} is unknown"
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{found}: allowed are {', '.join(table)}{hint}")
    return table[name].model_validate({k: v for k, v in value.items() if k != key}, context=context)


def written(spec: Spec, key: str, table: Mapping[str, type[Spec]]) -> dict[str, Any]:
    """The mapping that `named` reads back as an equal spec."""
    return {key: next(name for name, cls in table.items() if type(spec) is cls), **spec.model_dump()}


def choices(key: str, table: Mapping[str, type[Spec]], *others: dict[str, Any]) -> dict[str, Any]:
    """JSON Schema of what `named` accepts (specs without nested specs), or one of `others`."""
    forms = [(name, cls.model_json_schema()) for name, cls in table.items()]
    for name, form in forms:
        form["properties"] = {key: {"const": name}, **form["properties"]}
        form["required"] = [key, *form.get("required", [])]
    return {"anyOf": [*others, *(form for _, form in forms)]}


def weights(given: Any) -> dict[Any, float]:
    """Shares that sum to 1 from {value: "50%", ...} (which must add up to 100 %) or from {value: 3, ...} (relative).

    Raises ValueError for anything else: an empty mapping, a negative or non-finite weight, both forms mixed, a wrong or zero sum.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"{given!r} is not a mapping of values to weights")
    if not given:
        raise ValueError("{} has no values: at least one value with its weight is needed")
    numbers = {value: _weight(value, text) for value, text in given.items()}
    shares = [isinstance(text, str) for text in given.values()]
    if any(shares) and not all(shares):
        raise ValueError(f"{dict(given)!r} mixes percentages and bare weights: write all of them in one form")
    total = sum(numbers.values())
    if all(shares) and round(abs(total - 1), 9) > SLACK:
        raise ValueError(f"the shares add up to {100 * total:.6g} %: they must add up to 100 %")
    if total <= 0:
        raise ValueError("the weights add up to 0: at least one must be more than 0")
    return {value: number / total for value, number in numbers.items()}


def _weight(value: Any, text: Any) -> float:
    if isinstance(text, str):
        number = units.parse(text, units.SHARES, "a share", "50%")
    elif isinstance(text, (int, float)) and not isinstance(text, bool):
        number = float(text)
    else:
        raise ValueError(f"{text!r} is not a weight for {value!r}: write it as 50% or as a number")
    if not 0 <= number < float("inf"):
        raise ValueError(f"the weight {text!r} of {value!r} is out of range: it must be finite and at least 0")
    return number
