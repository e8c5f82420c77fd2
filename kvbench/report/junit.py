"""junit.xml: budgets, stop rules and the verdict as test cases, for CI systems. A budget that was not evaluated is a failure."""

import re
from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from kvbench.metrics import names
from kvbench.report.files import RunFiles

_FORBIDDEN = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # what XML 1.0 cannot hold, escaped or not

Case = tuple[str, str, str | None]  # class, name, failure


def page(summary: Mapping[str, Any], files: RunFiles) -> str:
    """The suite. A case fails with the sentence that the terminal shows."""
    rows = cases(summary)
    body = "".join(_case(*row) for row in rows)
    failed = sum(failure is not None for _, _, failure in rows)
    name = _text(f"kvbench {summary['run']['name'] or ''}".strip())
    seconds = summary["stop"]["seconds"]
    head = f'<testsuite name={quoteattr(name)} tests="{len(rows)}" failures="{failed}" errors="0" time="{seconds:.3f}">'
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<testsuites>\n{head}\n{body}</testsuite>\n</testsuites>\n'


def cases(summary: Mapping[str, Any]) -> list[Case]:
    stop, verdict = summary["stop"], summary["verdict"]
    found: list[Case] = [
        (
            "budget",
            f"{row['name']} {row['compare']} {names.show(row['limit'], names.parse(row['name']))}",
            None if row["status"] == "pass" else row["text"],
        )
        for row in summary["budgets"]
    ]
    fired = stop["rule"] if stop["by"] == "rule" else None
    for row in summary["stop_rules"]:
        ended = f"ended {stop['phase']}: {stop['reason']}" if row["rule"] == fired else None
        unread = f"not evaluated: {row['why']}" if row["checks"] and row["unread"] == row["checks"] else None
        found.append(("stop", row["rule"], ended or unread))
    invalid = "; ".join(row["text"] for row in verdict["reasons"] if row["level"] == "INVALID")
    found.append(("verdict", "the run can be trusted", invalid or None))
    code, why = summary["exit"]["code"], summary["exit"]["reason"]
    told = (0, 3, 4) if stop["by"] == "watch" else (0, 3, 4, 5)  # codes whose reason is a case above, or none
    found.append(("run", "requests succeeded and the run ended in order", why if code not in told else None))
    return found


def _case(group: str, name: str, failure: str | None) -> str:
    head = f"<testcase classname={quoteattr('kvbench.' + group)} name={quoteattr(_text(name))}"
    if failure is None:
        return f"{head}/>\n"
    text = _text(failure)
    return f"{head}><failure message={quoteattr(text)}>{escape(text)}</failure></testcase>\n"


def _text(text: str) -> str:
    return _FORBIDDEN.sub(" ", text)
