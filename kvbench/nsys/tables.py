"""An export's tables by the names of their columns.

Exports of 2022 to 2024 differ: tables are left out when empty, columns come and go. What an export lacks reads as absent, never
as an error, and columns that are not asked for do not matter. Numbers come as int64 columns with ABSENT for NULL.
"""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from kvbench.nsys import CaptureError, Ints

ABSENT = -(2**63)  # NULL, or a column that is not there
FARTHEST = 2**62  # ns: an instant beyond it makes no sense, and differences of those within it do not overflow
LONGEST = 2**50  # ns, 13 days: a span beyond it makes no sense, and sums of those within it do not overflow
_BROKEN = (sqlite3.Error, UnicodeDecodeError)  # the second where SQLite's own message quotes damaged bytes
_CHUNK = 50_000  # rows in Python's hands at once


def sane(column: Ints) -> NDArray[np.bool_]:
    """Which of these are instants at all: not ABSENT, and near enough to reckon with."""
    return (column > -FARTHEST) & (column < FARTHEST)


def spans(start: Ints, end: Ints) -> NDArray[np.bool_]:
    """Which of these are spans of time: instants both, in their order, and not too far apart."""
    known = sane(start) & sane(end) & (start <= end)
    known[known] = end[known] - start[known] <= LONGEST
    return known


class Tables:
    """A read-only export. Raises CaptureError where it is none or is damaged, also later: while rows are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.connection = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)
            self.connection.text_factory = lambda text: text.decode("utf-8", "replace")
            names = self.connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            self._columns = {str(name): self._of(str(name)) for (name,) in names if name is not None}
        except _BROKEN as error:
            raise self._damaged(error) from None

    def close(self) -> None:
        self.connection.close()

    def has(self, table: str, *columns: str) -> bool:
        """Is there such a table, with all of these columns?"""
        return table in self._columns and self._columns[table].issuperset(columns)

    def chunks(self, table: str, *columns: str, numeric: bool = True) -> Iterator[list[tuple[Any, ...]]]:
        """The rows of `table`, in pieces, with ABSENT (numeric) or None for what is NULL or has no column."""
        if table not in self._columns:
            return
        how, none = ('COALESCE(CAST("{}" AS INTEGER), {})', str(ABSENT)) if numeric else ('"{}"', "NULL")
        wanted = [how.format(name, none) if name in self._columns[table] else none for name in columns]
        try:
            cursor = self.connection.execute(f'SELECT {", ".join(wanted)} FROM "{table}"')
            while rows := cursor.fetchmany(_CHUNK):
                yield rows
        except _BROKEN as error:
            raise self._damaged(error) from None

    def numbers(self, table: str, *columns: str) -> dict[str, Ints]:
        """Columns of whole numbers by name, all of one length; empty where there is no such table."""
        parts = [np.array(rows, np.int64) for rows in self.chunks(table, *columns)]
        every = np.concatenate(parts) if parts else np.empty((0, len(columns)), np.int64)
        return {name: every[:, i].copy() for i, name in enumerate(columns)}

    def rows(self, table: str, *columns: str) -> list[tuple[Any, ...]]:
        """All rows as they are; for small tables."""
        return [row for part in self.chunks(table, *columns, numeric=False) for row in part]

    def pairs(self, *tables: str) -> dict[str, str]:
        """The name and value columns of the first of `tables` that is there."""
        for table in tables:
            if self.has(table, "name", "value"):
                return {str(name): str(value) for name, value in self.rows(table, "name", "value") if value is not None}
        return {}

    def strings(self) -> dict[int, str]:
        """StringIds: what numbers of names stand for."""
        return {
            key: str(value) for key, value in self.rows("StringIds", "id", "value") if isinstance(key, int) and value is not None
        }

    def _of(self, table: str) -> frozenset[str]:
        quoted = table.replace('"', '""')
        return frozenset(str(row[1]) for row in self.connection.execute(f'PRAGMA table_info("{quoted}")'))

    def _damaged(self, error: Exception) -> CaptureError:
        return CaptureError(f"{self.path}: SQLite cannot read it ({error}): damaged or cut off; export the capture again")
