"""What lines of a server's log mean: rules as data (profiles/logs/*.yaml), a regular expression and how grave its match is."""

import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator

_ENDLESS = re.compile(r"\((?:\?:)?(?:\\.|\[[^\]]*\]|[^()\\[\]])[+*]\)[+*]")  # such as (a+)+: a line can take it for ever
Level = Literal["note", "warning", "harm"]


class LogRule(BaseModel):
    """Lines in which `match` is found are one kind of happening."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,47}$", description="what happened, such as out_of_memory")
    match: str = Field(description="regular expression, found anywhere in a line")
    level: Level = Field("warning", description="note, warning, or harm: something broke")
    values: str = Field("", description="regular expression with named groups, kept with the event where it is found")

    @field_validator("match", "values")
    @classmethod
    def _compiles(cls, text: str) -> str:
        try:
            re.compile(text)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        if found := _ENDLESS.search(text):
            raise ValueError(f"{found.group()} repeats a repetition, which can take hours over one line: repeat it once")
        return text

    @cached_property
    def found(self) -> re.Pattern[str]:
        return re.compile(self.match)

    @cached_property
    def valued(self) -> re.Pattern[str] | None:
        return re.compile(self.values) if self.values else None


class Match(NamedTuple):
    """One line that a rule knows. values: texts of the groups that were found, numbers where they are plain ones."""

    rule: LogRule
    values: dict[str, Any]


def first(rules: Iterable[LogRule], line: str) -> Match | None:
    """The first rule that the line matches; a line is one happening."""
    for rule in rules:
        if rule.found.search(line):
            values = rule.valued.search(line) if rule.valued is not None else None
            kept = {name: _number(text) for name, text in values.groupdict().items() if text is not None} if values else {}
            return Match(rule, kept)
    return None


def _number(text: str) -> float | int | str:
    plain = text.replace(",", "")
    for kind in (int, float):
        try:
            return kind(plain)
        except ValueError:
            continue
    return text
