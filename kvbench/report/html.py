"""report.html: one file that needs nothing else. Everything that came from a server or a scenario is escaped."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kvbench import units
from kvbench.report import baseline_rows, captures, chart, devices, loops, outcome, render, sentences, telemetry
from kvbench.report.files import RunFiles
from kvbench.report.intervals import STATISTICS

STYLE = """
:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}table{border-collapse:collapse;font-size:.85rem}
.wide{overflow-x:auto}td,th{padding:.15rem .6rem .15rem 0;text-align:right;white-space:nowrap;vertical-align:top}
td:first-child,th:first-child{text-align:left}th{font-weight:normal;opacity:.7}
.text td,.text th{text-align:left;white-space:normal}
.text td:first-child{white-space:nowrap}
.VALID{color:#1a7f37}.DEGRADED{color:#9a6700}.INVALID,.fail{color:#cf222e}small,.dim{opacity:.7}
figure{margin:1rem 0}svg{width:100%;height:auto}svg line{stroke:currentColor;opacity:.15}
svg text{font-size:11px;fill:currentColor;text-anchor:end;opacity:.7}
polyline{fill:none;stroke-width:1.5}.l0{stroke:#0969da}.l1{stroke:#cf222e}.l2{stroke:#8250df}
.k0{color:#0969da}.k1{color:#cf222e}.k2{color:#8250df}
"""


def page(summary: Mapping[str, Any], files: RunFiles) -> str:
    """The whole report."""
    name = escape(str(summary["run"]["name"] or "kvbench run"))
    found, exit_ = summary["verdict"], summary["exit"]
    parts = [
        f'<h1><span class="{found["verdict"]}">{found["verdict"]}</span> {name}</h1>',
        f"<p>exit {exit_['code']}: {escape(exit_['reason'])}</p>",
        _list(f"{reason['level']}: {reason['text']} (n {reason['n']:,}). {reason['advice']}" for reason in found["reasons"]),
        _facts(summary),
        _section("What to do next", _list(summary["next"])),
        _section("Over time", _charts(files)),
        _section("Requests", _requests(summary)),
        _section("Latency", _latency(summary)),
        _section("Latency, as the server measured it", _servers_own(summary)),
        _section("Throughput", _table((), sentences.throughput(summary), "text")),
        _section("KV cache", _table((), sentences.cache(summary), "text")),
        _section("Budgets", _budgets(summary)),
        _section("Classes and phases", _groups(summary)),
        _section("Baseline", _baseline(summary)),
        _section("GPUs and machines", _table((), devices.rows(summary["devices"]), "text")),
        _section("Telemetry", _table((), [*telemetry.rows(summary["telemetry"]), *captures.rows(summary["captures"])], "text")),
        _section("Control", _control(summary)),
        _section("Load level", _levels(summary)),
        _section("Watch", _watch(summary)),
        _section("Change points", _list(loops.changed(mark) for mark in summary["changes"]["marks"])),
        _section("Snapshots", _snapshots(summary)),
        _section("Request features", _features(summary)),
        _section("Verdict, check by check", _checks(summary)),
        _section("Notes", _list([*summary["warnings"], *sentences.missing(summary)])),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}</title><style>{STYLE}</style>'
    body = "\n".join(part for part in parts if part)
    return f"<!doctype html>\n<html lang=en><head>{head}</head><body>\n{body}\n</body></html>\n"


def _checks(summary: Mapping[str, Any]) -> str:
    return _table(("check", "value", "degraded / invalid", "outcome"), render.checks(summary), "text")


def _section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>\n{body}" if body else ""


def _list(lines: Any) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _table(head: Sequence[str], rows: Any, style: str = "") -> str:
    body = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="wide {style}"><table><tr>{top}</tr>{body}</table></div>' if body else ""


def _cell(value: Any) -> str:
    return "-" if value is None else escape(str(value))


def _facts(summary: Mapping[str, Any]) -> str:
    run, stop, head = summary["run"], summary["stop"], summary["headline"]
    rows = [
        ("headline", f"{head['n']:,} {head['cohort']}; rates over {units.duration(head['seconds'])}"),
        ("ended", f"{outcome.ended(stop)}, after {units.duration(stop['seconds'])}"),
        *((name, run[name]) for name in ("clock", "seed", "nonce", "started")),
        ("target", sentences.described(summary["target"])),
        ("tokenizer", sentences.tokenized(summary["tokenizer"])),
        ("directory", run["directory"]),
    ]
    return _table((), rows, "text")


def _charts(files: RunFiles) -> str:
    """Rates, first-token quantiles and gauges from windows.jsonl; the law's rate and the load level from samples.jsonl."""
    rows = files.windows

    def of(name: str) -> list[chart.Point]:
        return [(window.end, window.values.get(name)) for window in rows]

    def read(name: str) -> list[chart.Point]:
        return [(sample.t, sample.value) for sample in files.samples if sample.name == name]

    law = read("law_rate")
    limited = any(rate is not None for _, rate in law)
    return "".join((
        chart.lines("Requests/s", "/s", {"offered": of("offered_rate"), "ok": of("ok_rate")}),
        chart.lines("Time to first token", "s", {"p50": of("ttft_p50"), "p99": of("ttft_p99")}),
        chart.lines("KV cache in use", "share", {"kv usage": of("kv_usage_mean")}),
        chart.lines("Rate that the law lets in", "/s", {"law": law, "offered": of("offered_rate")} if limited else {}),
        chart.lines("Load level", "", {"level": read("level")}),
        chart.lines("Requests at the server", "", {"running": of("running_mean"), "waiting": of("waiting_mean")}),
        *(chart.lines(title, unit, devices.drawn(files.samples, name)) for name, title, unit in GPUS),
    ))  # fmt: skip


GPUS = (
    ("gpu_memory", "GPU memory in use", "share"),
    ("gpu_utilization", "GPU utilization (share of the time in which a kernel ran)", "share"),
    ("gpu_power_w", "GPU power", " W"),
)
"""The charts of GPUs: gauge, title, unit."""


def _requests(summary: Mapping[str, Any]) -> str:
    account = summary["accounting"]
    columns = [name for name, value in account["total"].items() if isinstance(value, int)]
    groups = (*account["phases"].items(), ("total", account["total"]))
    rows = [(name, *(f"{row[column]:,}" for column in columns)) for name, row in groups]
    failures = [(f["n"], f"{f['outcome']}:{f['class']}", "; ".join(f["examples"])) for f in summary["failures"]]
    return _table(("phase", *(name.replace("_", " ") for name in columns)), rows) + _table(
        ("n", "outcome", "what was said"), failures, "text"
    )


def _latency(summary: Mapping[str, Any]) -> str:
    rows = []
    for name, row in summary["latency"].items():
        if not row["n"]:
            rows.append((name, 0, *("-" for _ in STATISTICS), row["reason"]))
            continue
        cells = [units.duration(row[s]) + ("*" if row["supported"].get(s, True) is False else "") for s in STATISTICS]
        interval = _interval(row["interval"].get("p99")) or _interval(row["interval"].get("mean"))
        rows.append((name, f"{row['n']:,}", *cells, interval))
    head = ("metric", "n", *STATISTICS, "95 % interval (p99, else mean)")
    notes = ["* fewer samples than the quantile needs: n &lt; 10 / (1 - q)"]
    if any("?" in row[-1] for row in rows):
        notes.append("?: too few samples to bound the quantile on that side")
    return _table(head, rows) + f"<p><small>{'<br>'.join(notes)}</small></p>"


def _servers_own(summary: Mapping[str, Any]) -> str:
    """Its histograms over the whole run, which know a quantile to within a bucket; our median of the same beside it."""
    told = summary["server"]
    ours = {f"server_{name}": units.duration(summary["latency"][name]["p50"]) for name in ("ttft", "tpot", "itl", "e2e")}
    rows = [
        (name, f"{row['n']:,}", units.duration(row.get("mean")), _bounds(row["p50"]), _bounds(row["p99"]), ours.get(name, ""))
        for name, row in told["metrics"].items()
        if name.startswith("server_") and row.get("n") and isinstance(row.get("p50"), Mapping)
    ]
    if not rows:
        return ""
    over = f"<p><small>by its own histograms, {escape(told['window']['text'])}; ours is of the headline requests</small></p>"
    return _table(("metric", "n", "mean", "p50 within", "p99 within", "our p50"), rows) + over


def _bounds(row: Mapping[str, Any]) -> str:
    low, high = row["low"], row["high"]
    return f"above {units.duration(low)}" if high is None else f"{units.duration(low)} to {units.duration(high)}"


def _interval(ends: Sequence[float | None] | None) -> str:
    if not ends or ends == [None, None]:
        return ""
    return " to ".join("?" if end is None else units.duration(end) for end in ends)


def _budgets(summary: Mapping[str, Any]) -> str:
    return _table(("budget", "verdict"), [(row["text"], row["status"]) for row in summary["budgets"]], "text")


def _groups(summary: Mapping[str, Any]) -> str:
    rows = [(f"class {name}", row, row["goodput"]["value"]) for name, row in summary["classes"].items()]
    rows += [(f"phase {row['name']}", row, None) for row in summary["phases"]]
    cells = [
        (
            name, f"{row['outcomes']['offered']:,}", f"{row['outcomes']['ok']:,}", units.share(good),
            *(units.duration(row["latency"][metric][s]) for metric in ("ttft", "response_ttft", "tpot") for s in ("p50", "p99")),
        )
        for name, row, good in rows
    ]  # fmt: skip
    head = ("", "offered", "ok", "goodput", "ttft p50", "p99", "response_ttft p50", "p99", "tpot p50", "p99")
    first = loops.apart(summary["first_uses"], summary["latency"])
    return _table(head, cells) + (f"<p>first uses: {escape(first)}</p>" if first else "")


def _baseline(summary: Mapping[str, Any]) -> str:
    found = summary["baseline"]
    return _table((), baseline_rows.rows(found), "text") + _table(baseline_rows.HEAD, baseline_rows.lengths(found))


def _control(summary: Mapping[str, Any]) -> str:
    found = summary["control"]
    return _table((), loops.controlled(found), "text") if found["law"] not in (None, "none") else ""


def _levels(summary: Mapping[str, Any]) -> str:
    rows = [
        (
            f"{row['level']:.4g}", row["phase"], units.duration(row["start"]), units.duration(row["seconds"]),
            _mean(row["offered_rate"]), _mean(row["ok_rate"]), units.share(row["kv_usage"]["mean"]),
            "held" if row["held"] else "not held", row["why"], row["ended"],
        )
        for row in summary["levels"]["rungs"]
    ]  # fmt: skip
    head = ("level", "phase", "from", "for", "offered/s", "ok/s", "kv mean", "", "why", "ended by")
    return _table(head, rows)


def _watch(summary: Mapping[str, Any]) -> str:
    found = summary["watch"]
    counts = [(name.replace("_", " "), f"{n:,}") for name, n in found["counts"].items()]
    return _table((), counts) + _list(loops.decided(row) for row in found["decisions"])


def _snapshots(summary: Mapping[str, Any]) -> str:
    rows = summary["snapshots"]["rows"]
    names = rows[0]["values"] if rows else ()
    cells = [(units.duration(row["end"]), *(loops.measured(row["values"][name], name) for name in names)) for row in rows]
    return _table(("until", *names), cells)


def _mean(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}"


def _reuse(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    if found["value"] is None:
        return [("reuse_distance", f"- ({found['reason']})")]
    groups = found["value"].items()
    return [
        ("reuse_distance" if len(groups) == 1 else f"reuse_distance, group {name}",
         f"{row['p50']:,.0f} blocks at p50, {row['p90']:,.0f} at p90, {row['p99']:,.0f} at p99 (n {row['n']:,})")
        for name, row in groups
    ]  # fmt: skip


def _features(summary: Mapping[str, Any]) -> str:
    found = summary["features"]
    p99 = found["output_length_p99"]
    bins = ", ".join(f"{row['from']}-{row['below'] - 1}: {row['n']}" for row in found["input_length"]["bins"] if row["n"])
    rows = [("input_length (tokens: requests)", bins or "-")]
    rows.append(("output_length_p99", p99["reason"] or f"{p99['value']:g} tokens (n {p99['n']:,})"))
    for name in ("beam_width", "temperature", "penalties"):
        mix = [f"{key}: {units.share(part)}" for key, part in found[name]["shares"].items()]
        rows.append((name, ", ".join(mix) or "-"))
    rows.append(("head_activity_variance", f"- ({found['head_activity_variance']['reason']})"))
    rows += _reuse(found["reuse_distance"])
    sets = [
        (
            json.dumps(row["parameters"]) if row["parameters"] else "(none)",
            f"{row['requests']:,}",
            f"{row['ok']:,}",
            _mean(row["mean_n_out"]),
        )
        for row in found["sampling"]
    ]
    head = ("sampling parameters", "requests", "ok", "mean output tokens")
    return _table(("feature", "of the headline requests"), rows, "text") + _table(head, sets)
