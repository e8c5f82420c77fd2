"""Pieces of a page in a terminal: blocks, tables, numbers, and text of others made harmless."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


def plain(text: object) -> str:
    """Text of others (servers, file names) without what could drive a terminal."""
    return "".join(char if char.isprintable() else " " for char in str(text))


def shortened(text: str, most: int) -> str:
    """At most so many characters, cut between words where there are some."""
    if len(text) <= most:
        return text
    head = text[: most - 3]
    return (head.rsplit(maxsplit=1)[0] if " " in head.strip() else head).rstrip(" ,;:") + "..."


def times(n: int) -> str:
    return "once" if n == 1 else f"{n:,} times"


def number(row: Mapping[str, Any], key: str = "value") -> str:
    """A value of a summary's row, - where it is null."""
    value = row.get(key)
    return "-" if value is None else count(value)


def count(value: float) -> str:
    """Four figures, and none lost before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def block(title: str, body: RenderableType) -> RenderableType:
    """A titled, indented part of a page; without a title, after an empty line."""
    return Group(Text(f"\n{title}", style="bold"), Padding(body, (0, 0, 0, 2))) if title else Group(Text(""), body)


def pairs(rows: list[tuple[str, str]]) -> Table:
    """Names and what is said of them."""
    found = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    found.add_column(no_wrap=True, min_width=10, style="dim")
    found.add_column(overflow="fold")
    for name, value in rows:
        found.add_row(name, Text(plain(value)))
    return found


def columns(first: str, *names: str) -> Table:
    """An empty table: its first column to the left, those of numbers to the right."""
    found = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    found.add_column(first, no_wrap=True)
    for name in names:
        found.add_column(name, justify="right", no_wrap=True)
    return found
