"""The real Nsight Systems of the test set-up (.ci/nsys.sh): captures, exports, and its own reports as an oracle."""

import csv
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOME = Path(os.environ.get("KVBENCH_NSYS", ROOT / ".venv/tools/nsys"))
NSYS = HOME / "target-linux-x64/nsys"
STEPS = 12
needed = pytest.mark.skipif(
    not NSYS.exists(),
    reason=f"NO NSIGHT SYSTEMS at {NSYS}: captures, exports and reports are not checked against the real one; "
    "sh .ci/nsys.sh .venv/tools/nsys says why it cannot be had",
)


def nsys(*arguments: str | Path, timeout: float = 100) -> str:
    """Run it; stdout. Its progress goes to stderr."""
    command = [str(NSYS), *map(str, arguments)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def capture(folder: Path) -> tuple[Path, int, int]:
    """A capture of `layered.py`; UTC ns before and after its marked range. One of 23 had no ranges: once more then."""
    app, options = Path(__file__).parent / "layered.py", ["-t", "nvtx", "--sample=none", "--cpuctxsw=none", "-f", "true"]
    for made in (folder / "capture.nsys-rep", folder / "again.nsys-rep"):
        said = nsys("profile", *options, "-o", made.with_suffix(""), sys.executable, app, str(STEPS))
        marks = re.search(r"^(\d{19}) (\d{19})$", said, re.MULTILINE)
        assert marks is not None, said
        with sqlite3.connect(export(made, folder / "tried.sqlite")) as db:
            some = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'NVTX_EVENTS'").fetchone()
        db.close()
        if some:
            return made, int(marks[1]), int(marks[2])
    raise AssertionError(f"two captures without ranges: {said}")


def export(path: Path, made: Path, *options: str) -> Path:
    nsys("export", "-t", "sqlite", "-f", "true", *options, "-o", made, path)
    return made


def report(path: Path, *names: str) -> list[dict[str, str]]:
    """A report's rows, under the first of its names that this nsys knows; columns without their unit."""
    for name in names:
        said = nsys("stats", "-q", "--report", name, "--format", "csv", "--output", "-", path)
        head, _, rest = said.strip().partition("\n")
        if head:
            columns = [re.sub(r" \((ns|%|MB)\)$", "", column) for column in next(csv.reader([head]))]
            return [dict(zip(columns, row, strict=True)) for row in csv.reader(StringIO(rest))]
    raise AssertionError(f"none of the reports {names} says anything of {path}")


class Synthetic:
    """A copy of a real export with GPU work in it that never was, for our sums and nsys' own to agree on."""

    def __init__(self, full: Path, path: Path) -> None:
        shutil.copy(full, path)
        self.path, self.db, self.correlation = path, sqlite3.connect(path), 0

    def done(self) -> Path:
        self.db.commit()
        self.db.close()
        return self.path

    def string(self, text: str) -> int:
        row = self.db.execute("SELECT id FROM StringIds WHERE value = ?", (text,)).fetchone()
        if row is not None:
            return int(row[0])
        number = int(self.db.execute("SELECT max(id) + 1 FROM StringIds").fetchone()[0])
        self.db.execute("INSERT INTO StringIds (id, value) VALUES (?, ?)", (number, text))
        return number

    def insert(self, table: str, **values: object) -> None:
        """A row; columns that must not be NULL and are not given are 0."""
        columns = self.db.execute(f"PRAGMA table_info({table})").fetchall()
        assert columns, f"no table {table}"
        row = {c[1]: 0 for c in columns if c[3]} | {k: v for k, v in values.items() if k in {c[1] for c in columns}}
        marks = ", ".join("?" * len(row))
        self.db.execute(
            f"INSERT INTO {table} ({', '.join(f'{chr(34)}{c}{chr(34)}' for c in row)}) VALUES ({marks})", [*row.values()]
        )

    def launch(self, thread: int, start: int, end: int, call: str = "cudaLaunchKernel_v7000") -> dict[str, int]:
        """An API call, and what its operation has of it."""
        self.correlation += 1
        self.insert(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=start,
            end=end,
            globalTid=thread,
            correlationId=self.correlation,
            nameId=self.string(call),
        )
        return {"correlationId": self.correlation, "globalPid": thread & ~0xFFFFFF, "contextId": 1}

    def kernel(self, name: str, start: int, end: int, launched: dict[str, int], stream: int = 7, **more: int) -> None:
        names = {"demangledName": self.string(f"void {name}<Traits>(Params)"), "shortName": self.string(name)}
        self.insert("CUPTI_ACTIVITY_KIND_KERNEL", start=start, end=end, streamId=stream, **names, **launched, **more)

    def ranges(self) -> list[tuple[int, int, int, str]]:
        """(start, end, thread, name) of every push/pop range, in order of start."""
        query = (
            "SELECT n.start, n.end, n.globalTid, COALESCE(n.text, s.value) FROM NVTX_EVENTS n "
            "LEFT JOIN StringIds s ON s.id = n.textId WHERE n.eventType = 59 AND n.end IS NOT NULL ORDER BY n.start"
        )
        return self.db.execute(query).fetchall()
