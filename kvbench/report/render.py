"""The summary as a person reads it in a terminal or a log: verdict first, then what ran, what came of it, and what to do next."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvbench import units
from kvbench.core import LEFT, STAYED
from kvbench.metrics.names import QUANTILES
from kvbench.report import baseline_rows, devices, loops, outcome, sentences, telemetry
from kvbench.report.text import block, columns, pairs, plain
from kvbench.verdict import amount

COLOURS = {"VALID": "bold green", "DEGRADED": "bold yellow", "INVALID": "bold red"}
SERVER = ("response_ttft", "ttft", "ttfc", "tpot", "itl", "icl", "e2e", "response", "ntpot")
SILENT = ("gate_wait", "connect", "upload")  # rows left out where they are all zero
HEADLINES = (*SERVER, "gate_wait", "lag", "connect", "upload")
MOST_ROWS = 12  # of phases, classes or epochs; summary.json has all
NARROW = ("p50", "p90", "p99", "p999", "max")  # statistics that fit 80 columns beside n and mean
WIDE = ("min", "p50", "p90", "p95", "p99", "p999", "max")


def terminal(summary: Mapping[str, Any], console: Console) -> None:
    """Print the summary. Width, colour and what the encoding can show are the console's."""
    for part in (
        verdict,
        ran,
        requests,
        latency,
        groups,
        throughput,
        cache,
        devices.shown,
        telemetry.shown,
        baseline_rows.baseline,
        *loops.BLOCKS,
        budgets,
        closing,
    ):
        console.print(part(summary, console.width), soft_wrap=False)


def verdict(summary: Mapping[str, Any], width: int) -> RenderableType:
    found = summary["verdict"]
    reasons, exit_ = found["reasons"], summary["exit"]
    judged = sum(row["level"] in ("OK", "INVALID", "DEGRADED") for row in found["checks"])
    first = f"{len(reasons)} of {judged} checks failed" if reasons else f"all {judged} checks passed"
    first += f"; {len(found['not_measured'])} not measured"
    lines: list[RenderableType] = [Text.assemble(_level(found["verdict"]), f"  {first}")]
    for reason in reasons:
        lines.append(Padding(Text.assemble(_level(reason["level"]), f" {reason['text']} (n {reason['n']:,})"), (0, 0, 0, 2)))
        lines.append(Padding(Text(reason["advice"], style="dim"), (0, 0, 0, 4)))
    lines.append(Text(plain(f"exit {exit_['code']}: {exit_['reason']}"), style="bold" if exit_["code"] else ""))
    return Group(*lines)


def _level(name: str) -> tuple[str, str]:
    return name, COLOURS[name]


def ran(summary: Mapping[str, Any], width: int) -> RenderableType:
    run, stop, head = summary["run"], summary["stop"], summary["headline"]
    nonce = run["nonce"] if run["nonce"] is not None else "off"
    clock = "virtual time" if run["clock"] == "virtual" else "real time"
    name, started = run["name"] or "(unnamed)", run["started"] or "(unknown)"
    rows = [
        ("ran", f"{name}, seed {run['seed']}, nonce {nonce}, {clock}, started {started}"),
        ("target", sentences.described(summary["target"])),
        ("ended", f"{outcome.ended(stop)}, after {units.duration(stop['seconds'])}"),
        ("headline", f"{head['n']:,} {head['cohort']}, followed to their end; rates over {units.duration(head['seconds'])}"),
    ]
    return block("", pairs(rows))


def requests(summary: Mapping[str, Any], width: int) -> RenderableType:
    account = summary["accounting"]
    total = account["total"]
    shown = ["offered", "admitted", "ok", "failed"]
    shown += [name for name in (*LEFT, *STAYED, "in_flight", "unrecorded") if total[name] and name not in shown]
    table = columns("", *(name.replace("_", " ") for name in shown))
    phases = list(account["phases"].items())
    for name, row in (*phases[:MOST_ROWS], ("total", total)):
        style = "bold" if name == "total" else ""
        table.add_row(Text(plain(name)), *(f"{row[column]:,}" for column in shown), style=style)
    lines: list[RenderableType] = [table]
    if len(phases) > MOST_ROWS:
        lines.append(Text(f"and {len(phases) - MOST_ROWS} more phases: see summary.json", style="dim"))
    for failure in summary["failures"][:6]:
        said = f': "{plain(failure["examples"][0])}"' if failure["examples"] else ""
        line = f"{failure['n']:,} {failure['outcome']}:{plain(failure['class'])}{said}"
        lines.append(Text(line, style="red", overflow="ellipsis", no_wrap=True))
    return block("Requests", Group(*lines))


def latency(summary: Mapping[str, Any], width: int) -> RenderableType:
    statistics = WIDE if width >= 105 else NARROW
    table = columns("", "n", "mean", *map(_spoken, statistics))
    starred = False
    for name in HEADLINES:
        row = summary["latency"][name]
        if not row["n"] or (name == "icl" and summary["latency"]["itl"]["n"]) or (name in SILENT and not row["max"]):
            continue  # where every event is a token icl repeats itl
        cells = []
        for statistic in statistics:
            star = row["supported"].get(statistic, True) is False
            starred |= star
            cells.append(units.duration(row[statistic]) + ("*" if star else ""))
        table.add_row(name, f"{row['n']:,}", units.duration(row["mean"]), *cells)
    if not table.row_count:
        return block("Latency", Text("none: no request ended ok"))
    lines: list[RenderableType] = [table]
    if starred:
        lines.append(Text(f"* fewer samples than the quantile needs ({_needs(statistics)})", style="dim"))
    counted = summary["latency"]["response"].get("with_timeouts")
    if counted:
        bound = ">= " if "p99" in counted["at_least"] else ""
        lines.append(Text(f"with {_endless(counted)}: response p99 {bound}{units.duration(counted['p99'])}"))
    return block("Latency (requests that ended ok)", Group(*lines))


def _endless(counted: Mapping[str, Any]) -> str:
    """What the line below the latencies counts in."""
    parts = ((counted["timeouts"], "timeouts"), (counted["cancelled"], "cut off by the end of the run"))
    return " and ".join(f"{n:,} {what}" for n, what in parts if n)


def groups(summary: Mapping[str, Any], width: int) -> RenderableType:
    """Traffic classes and the epochs of steady, where there is more than one."""
    classes = list(summary["classes"].items())
    epochs = [(row["name"], row) for row in summary["phases"] if row["kind"] == "steady"]
    shown = [group for group in (classes, epochs) if len(group) > 1]
    if not shown:
        return Group()
    table = columns("", "offered", "ok", "goodput", "response_ttft p50", "p99", "tpot p50", "p99")
    for name, row in (pair for group in shown for pair in group[:MOST_ROWS]):
        outcomes, good = row["outcomes"], row.get("goodput", {}).get("value")
        times = (row["latency"][metric][s] for metric in ("response_ttft", "tpot") for s in ("p50", "p99"))
        cells = (f"{outcomes['offered']:,}", f"{outcomes['ok']:,}", units.share(good), *map(units.duration, times))
        table.add_row(Text(plain(name)), *cells)
    return block("Classes and epochs", table)


def _needs(shown: tuple[str, ...]) -> str:
    return ", ".join(f"{_spoken(name)}: {round(10 / (1 - q)):,}" for name, q in QUANTILES.items() if q >= 0.9 and name in shown)


def _spoken(statistic: str) -> str:
    return "p99.9" if statistic == "p999" else statistic


def throughput(summary: Mapping[str, Any], width: int) -> RenderableType:
    return block("Throughput", pairs(sentences.throughput(summary)))


def cache(summary: Mapping[str, Any], width: int) -> RenderableType:
    return block("KV cache", pairs(sentences.cache(summary)))


def budgets(summary: Mapping[str, Any], width: int) -> RenderableType:
    if not summary["budgets"]:
        return Group()
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    styles = {"pass": "green", "fail": "bold red", "not evaluated": "bold yellow"}
    for row in summary["budgets"]:
        table.add_row(Text(row["status"].upper(), style=styles[row["status"]]), Text(plain(row["text"])))
    return block("Budgets", table)


def closing(summary: Mapping[str, Any], width: int) -> RenderableType:
    lines = [Text(f"! {plain(line)}", style="yellow") for line in summary["warnings"]]
    lines += [Text(line, style="dim") for line in sentences.missing(summary)]
    parts: list[RenderableType] = []
    if lines:
        parts.append(block("Notes", Group(*lines)))
    if summary["next"]:
        parts.append(block("What to do next", Group(*(Text(f"> {plain(line)}") for line in summary["next"]))))
    where = summary["run"]["directory"]
    charts = f"{where}/report.html" if Path(where, "report.html").exists() else f"kvbench report {where} --html writes them"
    parts.append(Text(f"\nfiles: {plain(where)}\ncharts: {plain(charts)}"))
    return Group(*parts)


def checks(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Every check of the verdict as text: title, value, where DEGRADED and INVALID begin, outcome."""
    for row in summary["verdict"]["checks"]:
        limits = [row[level] for level in ("degraded", "invalid")]
        shown = ["-" if limit is None else f"{row['worse']} {amount(limit, row['unit'])}" for limit in limits]
        yield row["title"], amount(row["value"], row["unit"]), " / ".join(shown), row["level"] or f"not measured: {row['reason']}"
