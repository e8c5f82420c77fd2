"""What the watch decided: every decision but the healthy windows, which are counted."""

from collections import Counter
from typing import Any

from kvbench.report.files import RunFiles

QUIET = ("healthy",)  # actions that are counted and not listed: there is one for every window


def watched(files: RunFiles) -> dict[str, Any]:
    """Decisions in order with their numbers; per metric the windows judged, and by reason those that were not, which the
    run's end tells. `reason` where nothing was watched."""
    spec = files.scenario.get("watch")
    events = files.all("watch")
    if not spec and not events:
        none: dict[str, Any] = {"metrics": None, "action": None, "counts": {}, "decisions": [], "judged": {}, "skipped": {}}
        return none | {"reason": "the scenario has no watch"}
    end = files.last("run_end")
    told = (end.data.get("watch") if end is not None else None) or {}
    return {
        "metrics": (spec or {}).get("metrics"),
        "action": (spec or {}).get("action"),
        "counts": dict(Counter(event.data["action"] for event in events)),
        "decisions": [{"t": event.t, **event.data} for event in events if event.data["action"] not in QUIET],
        "judged": told.get("judged") or {},
        "skipped": told.get("skipped") or {},
        "reason": None,
    }
