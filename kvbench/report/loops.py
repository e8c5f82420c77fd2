"""The two loops of a run as a person reads them: what the law held, where the level went, what the watch decided; and what was
noted on the way. Each part is empty where a run had none of it."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvbench import units
from kvbench.metrics import names
from kvbench.report.text import block, columns, count, number, pairs, times

MOST = 8  # decisions, rungs or snapshots shown; summary.json has all
TITLES = {"stale": "held still on a stale signal", "fallbacks": "fell back to feedback", "saturated": "held nothing up"}


def control(summary: Mapping[str, Any], width: int) -> RenderableType:
    found = summary["control"]
    if found["law"] in (None, "none"):
        return Group()
    return block("Control", pairs(controlled(found)))


def controlled(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The measures as lines; what a law does not have is left out with its reason said once."""
    rows = [("law", _law(found))]
    if found["signal"] is not None:
        rows += [("settled", _settled(found)), ("held", _held(found))]
    rate = found["law_rate"]
    if rate["min"] is not None:
        free = f"; no limit at {rate['unlimited']:,} of {rate['n']:,} decisions" if rate["unlimited"] else ""
        rows.append(("law rate", f"{count(rate['min'])} to {count(rate['max'])}/s, mean {count(rate['mean'])}/s{free}"))
    above, again = found["time_above"], found["preemptions"]["value"]
    cost = [f"shed {units.share(found['shed_share']['value'])}"]
    if above["value"] is not None:
        cost.append(f"above {above['limit'].replace('%', ' %')} of the KV cache for {units.share(above['value'])} of the time")
    cost += [f"{again:,.0f} preemptions"] if again is not None else []
    return [*rows, ("cost", ", ".join(cost))]


def _law(found: Mapping[str, Any]) -> str:
    told = found["told"]
    aim = f" holds {found['signal']} at {amount(found['set_point'], found['unit'])}" if found["signal"] else ""
    counted = [f"{told['updates']:,} decisions"] if isinstance(told.get("updates"), int) else []
    told_of = {name: told[name] for name in TITLES if isinstance(told.get(name), int) and told[name]}
    counted += [f"{TITLES[name]} {times(n)}" for name, n in told_of.items()]
    return f"{found['law']}{aim}" + (f": {', '.join(counted)}" if counted else "")


def _settled(found: Mapping[str, Any]) -> str:
    row, band = found["settling"], amount(found["band"], found["unit"])
    if row["value"] is None:
        return f"- ({row['reason']})"
    return f"{units.duration(row['value'])} after {row['after']} at {units.duration(row['since'])}, to within {band} of it"


def _held(found: Mapping[str, Any]) -> str:
    if found["overshoot"]["value"] is None:
        return f"- ({found['overshoot']['reason']})"
    over, error = (amount(found[name]["value"], found["unit"]) for name in ("overshoot", "mean_error"))
    inside, iae = units.share(found["in_band"]["value"]), f"{number(found['iae'])} {found['iae']['unit']}"
    return f"overshoot {over}, mean error {error} (integral {iae}), in its band for {inside} of the time"


def amount(value: float | None, unit: str | None) -> str:
    """A value of the signal, or a distance between two."""
    if value is None:
        return "-"
    return units.duration(value) if unit == "s" else units.share(value) if unit == "share" else count(value)


def level(summary: Mapping[str, Any], width: int) -> RenderableType:
    found = summary["levels"]
    if not found["rungs"]:
        return Group()
    table = columns("level", "from", "for", "offered/s", "ok/s", "kv mean", "then")
    for row in found["rungs"][-MOST:]:
        times = units.duration(row["start"]), units.duration(row["seconds"])
        rates = (number(row, name) for name in ("offered_rate", "ok_rate"))
        table.add_row(f"{row['level']:.4g} {row['kind']}", *times, *rates, units.share(row["kv_usage"]["mean"]), _then(row))
    return block("Level", Group(*_stress(found["stress"]), table, *_rest(len(found["rungs"]), "earlier rungs")))


def _then(row: Mapping[str, Any]) -> str:
    return "held" if row["held"] else "not held" if row["ended"] else "cut off"


def _stress(found: Mapping[str, Any]) -> list[Text]:
    if "ended" not in found:
        return []
    if found["held"] is None:
        return [Text(found["reason"])]
    rates = f"{number(found, 'offered_rate')}/s offered, {number(found, 'ok_rate')}/s ok"
    named = found["ended"].startswith(f"level {found['ended_at']:.4g} ")  # the level's own reason says it
    where = "" if named else f" at {found['ended_at']:.4g}"
    return [Text(f"held up to level {found['held']:.4g} ({rates}); ended{where}: {found['ended']}")]


def watch(summary: Mapping[str, Any], width: int) -> RenderableType:
    found = summary["watch"]
    if found["reason"]:
        return Group()
    counts = ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in found["counts"].items()) or "no window was judged"
    lines = [Text(f"windows and decisions: {counts}")]
    lines += [Text(unjudged(name, told)) for name, told in found["skipped"].items()]
    lines += [Text(decided(row)) for row in found["decisions"][-MOST:]]
    return block("Watch", Group(*lines, *_rest(len(found["decisions"]), "earlier decisions")))


def unjudged(name: str, told: Mapping[str, int]) -> str:
    """In how many windows a metric was not judged, the most frequent reason first."""
    reasons = sorted(told.items(), key=lambda each: -each[1])
    return f"{name} was not judged in {sum(told.values()):,} windows: " + ", ".join(f"{why} {n:,}" for why, n in reasons)


def decided(row: Mapping[str, Any]) -> str:
    """One decision with its numbers."""
    said = f"{units.duration(row['t'])}  {row['action'].replace('_', ' ')}"
    if row.get("metric") and row.get("value") is not None:
        said += f": {row['metric']} {measured(row['value'], row['metric'])}"
        expected, z = row.get("expected"), row.get("z")
        against = f"against {measured(expected, row['metric'])}" if expected is not None else ""
        away = f"{z:.3g} sigma away" if z is not None else ""
        said += f" {against}{', ' if against and away else ''}{away}" + (f" (n {row['n']:,.0f})" if row.get("n") else "")
    said += f"; level {row['level']:.4g}" if row.get("level") is not None else ""
    return said + (f" to {row['to']:.4g}" if row.get("to") is not None else "") + (f"; {row['why']}" if row.get("why") else "")


def measured(value: float | None, metric: str) -> str:
    """A value with its metric's unit, where the metric is one that is known."""
    try:
        return names.show(value, names.parse(metric))
    except ValueError:
        return "-" if value is None else count(value)


def changes(summary: Mapping[str, Any], width: int) -> RenderableType:
    marks = summary["changes"]["marks"]
    lines = [Text(changed(mark)) for mark in marks[:MOST]]
    return block("Change points", Group(*lines, *_rest(len(marks), "changes"))) if marks else Group()


def changed(mark: Mapping[str, Any]) -> str:
    """A metric that left its level, beyond what the load explains, and what may have done it."""
    before, after = (measured(mark[side], mark["metric"]) for side in ("before", "after"))
    cause = f"; {mark['explained_by']['what']}" if mark["explained_by"] else "; nothing on record explains it"
    return f"{units.duration(mark['t'])}  {mark['metric']} from {before} to {after}{cause}"


def snapshots(summary: Mapping[str, Any], width: int) -> RenderableType:
    rows = summary["snapshots"]["rows"]
    if not rows:
        return Group()
    table = columns("until", "offered/s", "ok/s", "ttft p50", "p99", "tpot p50", "kv mean", "max", "errors")
    for row in rows[:MOST]:
        found = row["values"]
        shown = ("offered_rate", "ok_rate", "ttft_p50", "ttft_p99", "tpot_p50", "kv_usage_mean", "kv_usage_max", "error_rate")
        table.add_row(units.duration(row["end"]), *(bare(found[name], name) for name in shown))
    return block("Snapshots", Group(table, *_rest(len(rows), "snapshots")))


def bare(value: float | None, metric: str) -> str:
    """A value for a column whose head names the rate's unit."""
    return count(value) if value is not None and metric in ("offered_rate", "ok_rate") else measured(value, metric)


def first_uses(summary: Mapping[str, Any], width: int) -> RenderableType:
    said = apart(summary["first_uses"], summary["latency"])
    return block("First uses", Text(said)) if said else Group()


def apart(found: Mapping[str, Any], latency: Mapping[str, Any]) -> str:
    """What was kept apart from the headline, and its first tokens beside the headline's; "" where nothing was."""
    if not found["n"]:
        return ""
    own, rest = (
        " and ".join(f"{q} {units.duration(row[q])}" for q in ("p50", "p99")) for row in (found["ttft"], latency["ttft"])
    )
    return f"{found['n']:,} requests of {found['groups']:,} prefix groups, kept apart: ttft {own}; in the headline {rest}"


def _rest(n: int, what: str) -> list[Text]:
    return [Text(f"and {n - MOST} more {what}: see summary.json", style="dim")] if n > MOST else []


BLOCKS: tuple[Callable[[Mapping[str, Any], int], RenderableType], ...] = (
    first_uses, control, level, watch, changes, snapshots,
)  # fmt: skip
"""In the order in which the terminal shows them."""
