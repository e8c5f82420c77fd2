"""What the server's own counters and histograms came to over the run, under the names that it gives them."""

from typing import Any

from kvbench import units
from kvbench.counted import NONE, totals
from kvbench.report.cache import counter
from kvbench.report.files import RunFiles

SOURCE = "prometheus"


def server(files: RunFiles) -> dict[str, Any]:
    """The run's totals: from just before its first request to the first quiet reading after its last answer, as `window` says."""
    told = totals(files.events)
    pages = [page for facts in files.manifest.get("collectors") or () for page in facts.get("pages") or ()]
    row: dict[str, Any] = {
        "pages": [{key: page.get(key) for key in ("url", "kinds", "engines", "settings", "instantaneous")} for page in pages],
        "events": [
            {"t": event.t, **{key: event.data.get(key) for key in ("state", "labels", "metrics", "reason")}}
            for event in files.all("collector")
            if event.data.get("source") == SOURCE and event.data.get("state") in ("reset", "appeared", "gone")
        ],
        "not_exposed": [name for facts in files.manifest.get("collectors") or () for name in facts.get("not_exposed") or ()],
    }
    if told is None and any(sample.source == SOURCE for sample in files.samples):
        told = _cut_off(files, {name for page in pages for name in page.get("names") or ()})
    if told is None:
        return row | {"window": None, "metrics": {}, "hit_rate": {"value": None, "n": 0, "reason": NONE}, "reason": NONE}
    metrics = told["metrics"]
    hits, queries = (metrics.get(name, {}).get("value") for name in ("hit_tokens_total", "query_tokens_total"))
    rate: dict[str, Any] = {"value": None, "n": 0, "reason": "not exposed by the server, or nothing was looked up"}
    if hits is not None and queries:
        rate = {"value": hits / queries, "n": round(queries), "reason": None}
    start, end = told["start"], told["end"]
    whole = "every request's whole life" if told["complete"] else "the last page did not come, so the end is missing"
    text = f"from {units.duration(-start)} before the run to {units.duration(end)}: {whole}"
    window = {"start": start, "end": end, "complete": told["complete"], "text": text}
    cost = {key: told.get(key) for key in ("scrape_max_s", "loop_held_max_s")}
    return row | {"window": window, "metrics": metrics, "hit_rate": rate, "cost": cost, "reason": None}


def _cut_off(files: RunFiles, names: set[str]) -> dict[str, Any]:
    """The totals of a run that was killed before they were told: what the counters' samples came to until then."""
    times = [sample.t for sample in files.samples if sample.source == SOURCE]
    start, end = min(times), max(times)
    metrics = {each: counter(files.samples, each, start, end) for each in sorted(names) if each.endswith("_total")}
    return {"start": start, "end": end, "complete": False, "metrics": metrics}


def name(files: RunFiles, engine: dict[str, Any]) -> None:
    """Write beside each number of the target what the target calls it."""
    for facts in files.manifest.get("collectors") or ():
        for page in facts.get("pages") or ():
            for metric, names in (page.get("names") or {}).items():
                if metric in engine:
                    engine[metric]["names"] = sorted({*engine[metric].get("names", ()), *names})
