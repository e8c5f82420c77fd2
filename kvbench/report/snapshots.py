"""Looks at a steady phase while it went on: one row per `snapshot` event, from the window that the event carries."""

from typing import Any

from kvbench.report.files import RunFiles

COUNTED = ("offered", "ok", "failed", "shed", "inflight", "held")
SHOWN = (
    "offered_rate", "ok_rate", "output_tokens_rate", "ttft_p50", "ttft_p99", "response_ttft_p99", "tpot_p50",
    "kv_usage_mean", "kv_usage_max", "waiting_mean", "hit_rate", "error_rate", "goodput",
)  # fmt: skip


def snapshots(files: RunFiles) -> dict[str, Any]:
    """Rows in order, each with its counts, values and how many samples stand behind them. `reason` where there are none."""
    rows = [_row(event.data) for event in files.all("snapshot")]
    return {"rows": rows, "reason": None if rows else "no phase of this run took snapshots, or it ended before the first"}


def _row(data: dict[str, Any]) -> dict[str, Any]:
    window = data["window"]
    counts, values, n = (window.get(part) or {} for part in ("counts", "values", "n"))
    return {
        "phase": data.get("phase"), "start": window["start"], "end": window["end"],
        "counts": {name: counts.get(name) for name in COUNTED},
        "values": {name: values.get(name) for name in SHOWN},
        "n": {name: n.get(name, 0) for name in SHOWN},
    }  # fmt: skip
