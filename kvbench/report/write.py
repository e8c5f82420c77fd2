"""The files a finished run leaves beside its records: summary.json, report.html, junit.xml; baseline.json where it took one."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvbench.report import Page, accounting, baseline, html, junit, kept
from kvbench.report.files import RunFiles, load
from kvbench.report.summary import summarise


def finish(directory: Path) -> dict[str, Any]:
    """Summarise the run in `directory`, check that its requests add up, and only then write every page.

    Raises AccountingError (an internal error of kvbench: exit code 1), ValueError (no run there), OSError (the disk).
    """
    files = load(directory)
    summary = summarise(files)
    accounting.check(summary["accounting"])
    for name, page in PAGES.items():
        write_page(directory / name, page(summary, files))
    profiled = summary["captures"]["profiled"]  # slowed by it, and like one that was cut short nothing to compare with
    if summary["baseline"]["n"] and summary["baseline"]["complete"] and not profiled:
        write_page(directory / kept.NAME, msgspec.json.encode(baseline.kept(summary, files)).decode() + "\n")
    return summary


def write_page(path: Path, text: str) -> None:
    """Replace `path` at once: a reader sees the old page or the new one, never half of it."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def as_json(summary: Mapping[str, Any], files: RunFiles) -> str:
    """Strict JSON: a number that is not finite would raise here, not reach a reader."""
    return json.dumps(summary, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


PAGES: dict[str, Page] = {"summary.json": as_json, "report.html": html.page, "junit.xml": junit.page}
