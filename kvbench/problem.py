"""What is wrong with what a user wrote: where, which key, what is allowed. All of it at once, as one error."""

from typing import Any, NamedTuple

KeyPath = tuple[str | int, ...]
MAX_SHOWN = 20  # problems printed at once


class Problem(NamedTuple):
    """One thing wrong: where ("file:line" or "--set a.b=c"), which key, and what, with what is allowed."""

    where: str
    key: str
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in self if part)


class SourceError(ValueError):
    """What is wrong with a file, all of it. Printed one problem a line, the first 20."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        shown = [str(problem) for problem in self.problems[:MAX_SHOWN]]
        if len(self.problems) > MAX_SHOWN:
            shown.append(f"... and {len(self.problems) - MAX_SHOWN} more")
        super().__init__("\n".join(shown))


def show(path: KeyPath | list[str | int]) -> str:
    """A key path as users write it: ("stop", 0, "for") -> "stop[0].for"."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def describe(value: Any) -> str:
    """A value in a message, shortened."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
