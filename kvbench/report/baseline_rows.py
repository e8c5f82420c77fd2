"""The baseline as a person reads it: in a terminal and, with its table by prompt length, in report.html."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType

from kvbench import units
from kvbench.report.text import block, count, pairs

HEAD = ("prompt tokens", "n", "ttft p50", "tpot p50", "e2e p50")
SAME = 0.0005  # relative change that rounds to nothing


def baseline(summary: Mapping[str, Any], width: int) -> RenderableType:
    """A block of the terminal report; nothing where no baseline was measured."""
    lines = rows(summary["baseline"])
    return block("Baseline (one request at a time)", pairs(lines)) if lines else Group()


def rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and what is said of them; `found` is the summary's baseline. Empty where there is none."""
    if found["reason"] is not None:
        return []
    offered, ended = found["outcomes"]["offered"], found["ended"] or "the files end in it"
    cut = "" if found["complete"] else f"; cut short ({ended}), so not kept"
    version = found["prompts"]["version"] or "prompt set not told"
    return [
        ("prompts", f"{found['n']:,} of {offered:,} ended ok ({version}){cut}"),
        ("cold start", _cold(found["cold_start"])),
        ("the others", _latency(found["latency"])),
        ("prefill", _prefill(found["prefill"])),
        ("per layer", _layers(found["layers"])),
        ("power", _powers(found["power"])),
        *_compared(found["compared"]),
    ]


def lengths(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Medians by prompt length, under HEAD."""
    for row in found.get("lengths", ()):
        span = f"{row['from']:,} to {row['below'] - 1:,}" if row["below"] else f"{row['from']:,} and more"
        yield span, f"{row['n']:,}", *(units.duration(row[name]) for name in ("ttft_p50", "tpot_p50", "e2e_p50"))


def _cold(found: Mapping[str, Any]) -> str:
    parts = []
    for name, row in found.items():
        if row["value"] is None:
            parts.append(f"{name} - ({row['reason']})")
            continue
        beside = f", {row['times']:.3g} x the median of the other {row['n']:,}" if row["times"] is not None else ""
        parts.append(f"{name} {units.duration(row['value'])}{beside}")
    return "; ".join(parts)


def _latency(found: Mapping[str, Any]) -> str:
    parts = [f"{name} p50 {units.duration(found[name]['p50'])}" for name in ("ttft", "tpot", "e2e")]
    if found["decode_rate"]["p50"] is not None:
        parts.append(f"decode {count(found['decode_rate']['p50'])} tokens/s")
    return f"{', '.join(parts)} (n {found['e2e']['n']:,})"


def _prefill(found: Mapping[str, Any]) -> str:
    if found["per_1000"] is None:
        return f"- ({found['reason']})"
    fit = f", R^2 {found['r2']:.3f}" if found["r2"] is not None else ""
    return f"{units.duration(found['per_1000'])} per 1,000 tokens after {units.duration(found['fixed'])} (n {found['n']:,}{fit})"


def _layers(found: Mapping[str, Any]) -> str:
    if found["reason"] is not None:
        return f"- ({found['reason']})"
    prefill = f"{units.duration(found['prefill'])} in a prefill of {found['tokens']} tokens"
    return f"{prefill}, {units.duration(found['decode'])} in a decode step; {found['layers']} layers, {found['how']}"


def _powers(found: Mapping[str, Any]) -> str:
    """Idle and base; where both lack it for one reason, that once."""
    reasons = {row["reason"] for row in found.values()}
    if len(reasons) == 1 and None not in reasons:
        return f"- ({reasons.pop()})"
    return ", ".join(
        f"{name} - ({row['reason']})" if row["mean"] is None else f"{name} {row['mean']:.4g} W (n {row['n']:,})"
        for name, row in found.items()
    )


def _compared(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The first line names the run that all of them are compared with."""
    if found["run"] is None:
        return [("compared", f"- ({found['reason']})")]
    if not found["rows"]:
        return [("compared", f"- (the baseline of {found['run']} has no figure that this one has)")]
    first, *others = found["rows"]
    return [("compared", _change(first, f"the baseline of {found['run']}")), *(("", _change(row, "")) for row in others)]


def _change(row: Mapping[str, Any], other: str) -> str:
    """One figure now, how it moved, and what it was. `other`: in the first line, what all of them are compared with."""
    change = row["change"]
    if row["now"] == row["then"] or (change is not None and abs(change) < SAME):
        moved = "the same as" if other else "the same"
    else:
        by = "" if change is None else f"{units.share(abs(change))} "
        moved = f"{by}{'above' if row['now'] > row['then'] else 'below'}"
    return f"{row['figure']} {_amount(row, 'now')}, {' '.join(filter(None, (moved, other)))} ({_beside(row)})"


def _beside(row: Mapping[str, Any]) -> str:
    then = _amount(row, "then")
    if "n_now" not in row:
        return then
    both = "" if row["n"] == row["n_now"] == row["n_then"] else f", over the {row['n']:,} prompts of both"
    return f"{then}; n {row['n_now']:,} and {row['n_then']:,}{both}"


def _amount(row: Mapping[str, Any], key: str) -> str:
    return units.duration(row[key]) if row["unit"] == "s" else f"{row[key]:.4g} {row['unit']}"
