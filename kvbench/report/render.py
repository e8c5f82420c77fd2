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
from kvbench.report import accesses, baseline_rows, energy, loops, outcome, telemetry
from kvbench.report.text import block, columns, count, number, pairs, plain
from kvbench.verdict import amount

COLOURS = {"VALID": "bold green", "DEGRADED": "bold yellow", "INVALID": "bold red"}
SERVER = ("response_ttft", "ttft", "ttfc", "tpot", "itl", "icl", "e2e", "response", "ntpot")
SILENT = ("gate_wait", "connect", "upload")  # rows left out where they are all zero
HEADLINES = (*SERVER, "gate_wait", "lag", "connect", "upload")
MOST_ROWS = 12  # of phases, classes or epochs; summary.json has all
NARROW = ("p50", "p90", "p99", "p999", "max")  # statistics that fit 80 columns beside n and mean
REAL = {  # checks that virtual time on the embedded engine has nothing for
    "loop_lag_p99", "client_cpu", "clock_steps", "workers_lost",
    "server_requests", "count_mismatch", "recompute_in_hits", "collector_gap", "collectors_lost", "required_lost",
}  # fmt: skip
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
        ("target", described(summary["target"])),
        ("ended", f"{outcome.ended(stop)}, after {units.duration(stop['seconds'])}"),
        ("headline", f"{head['n']:,} {head['cohort']}, followed to their end; rates over {units.duration(head['seconds'])}"),
    ]
    return block("", pairs(rows))


def described(target: Mapping[str, Any]) -> str:
    """What answered, from the facts in the manifest, as a reader would say it."""
    servers = ", ".join(f"{one['url']} ({one['software'] or 'software not told'})" for one in target.get("servers", ()))
    if target.get("kind") == "http":
        return f"{servers or 'a server'}: {target.get('model') or 'model not told'}"
    if target.get("kind") == "null":
        return "nothing: requests are answered at once, which measures kvbench itself"
    if not {"model", "hardware", "devices", "engine", "blocks", "block_tokens", "kv_tokens"} <= target.keys():
        return "(not recorded)"
    several = f"{target['devices']} x " if target["devices"] > 1 else ""
    cut = f"in {len(target['groups'])} layer groups" if target.get("groups") else f"of {target['block_tokens']}"
    pool = f"KV pool {target['blocks']:,} blocks {cut} = {target['kv_tokens']:,} tokens"
    return f"the embedded engine: {target['model']} on {several}{target['hardware']} ({target['engine']} profile), {pool}"


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
    rates, tokens, good = summary["rates"], summary["tokens"], summary["goodput"]
    note = f" ({rates['requested']['note']})" if rates["requested"].get("note") else ""
    named = f"requested {number(rates['requested'])}{note}, "
    named += ", ".join(f"{name} {number(rates[name])}" for name in ("offered", "sent", "ok"))
    out, prompt, output = tokens["output_rate"], tokens["prompt"], tokens["output"]
    sources = ", ".join(f"{name} {row['requests']:,}" for name, row in tokens["by_source"].items()) or "none"
    rows = [("requests/s", named)]
    succeeded, read = number(out, "succeeded_only"), number(tokens["input_rate"])
    rows.append(("tokens/s", f"out {number(out)} ({succeeded} of ok requests), in {read}"))
    if prompt["n"]:
        rows.append(("prompt", f"mean {count(prompt['asked'])} tokens asked, {count(prompt['got'])} counted"))
    if output["n"]:
        asked, got = count(output["asked"]), count(output["got"])
        rows.append(("output", f"mean {asked} tokens asked, {got} got; counted by (requests): {sources}"))
    if good["value"] is not None:
        rate = f", {good['rate']:.4g}/s" if good.get("rate") is not None else ""
        rows.append(("goodput", f"{units.share(good['value'])} of {good['n']:,} offered{rate}"))
    else:
        rows.append(("goodput", f"- ({good['reason']})"))
    rows += energy.rows(summary["energy"])
    rows.append(("pacing", "; ".join(_pacing(summary["pacing"]))))
    stall = summary["streaming"]["longest_stall"]
    if stall["value"] is not None:
        rows.append(("stall", f"longest {units.duration(stall['value'])} within request {stall['request']}"))
    return block("Throughput", pairs(rows))


def _pacing(pacing: Mapping[str, Any]) -> Iterator[str]:
    burst, second, due = (pacing[f"max_{name}"] for name in ("sends_per_100ms", "sends_per_second", "due_per_second"))
    yield f"at most {burst:,} sends within 100 ms, {second:,} within 1 s (due: {due:,})"
    yield f"held at the gate: {pacing['blocked_at_gate']:,}"
    if pacing["late_sends"]:
        yield f"{pacing['late_sends']:,} left late, up to {units.duration(pacing['longest_lag'])}"
    if pacing["postponed"]:
        yield f"{pacing['postponed']:,} held by the bucket since this client had been late"
    if pacing["holds"]:
        yield f"closed {pacing['holds']:,} times by Retry-After, {units.duration(pacing['closed'])} in all"
    elif pacing["asked_to_wait"]:
        yield f"{pacing['asked_to_wait']:,} answers asked for a pause (Retry-After), which control.retry_after would grant"


def cache(summary: Mapping[str, Any], width: int) -> RenderableType:
    engine, told = summary["engine"], summary["told"]
    usage = engine["kv_usage"]
    rows = []
    if usage["mean"] is None:
        rows.append(("kv usage", f"- ({usage['reason']})"))
    else:
        above = [f"{units.share(part)} of the time above {name}" for name, part in usage.get("time_above", {}).items()]
        rows.append(("kv usage", ", ".join([f"mean {units.share(usage['mean'])}", f"max {units.share(usage['max'])}", *above])))
    queue = [(name, engine[name]) for name in ("running", "waiting") if engine[name]["mean"] is not None]
    if queue:
        rows.append(("queue", ", ".join(f"{name} mean {count(row['mean'])} max {count(row['max'])}" for name, row in queue)))
    if engine["preemptions_total"]["value"] is not None:
        again = engine["recompute_tokens_total"]["value"]
        taxed = f", {again:,.0f} tokens computed again" if again else ""
        rows.append(("preempted", f"{engine['preemptions_total']['value']:,.0f} times{taxed}"))
    rate = engine["hit_rate"]
    if rate["value"] is not None:
        rows.append(("hit rate", f"{units.share(rate['value'])} of {rate['n']:,} prompt tokens that the engine looked up"))
    if told["hit_rate"] is not None:
        hit, prompts = units.share(told["hit_rate"]), told["prompt_tokens"]
        rows.append(("cached", f"{hit} of {prompts:,} prompt tokens, as the answers say"))
    elif rate["value"] is None:
        rows.append(("hit rate", f"- ({told['reason']})"))
    rows += accesses.rows(summary["cache"])
    return block("KV cache", pairs(rows))


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
    missing: dict[str, list[str]] = {}
    virtual = 0
    for row in summary["verdict"]["not_measured"]:
        if summary["run"]["clock"] == "virtual" and row["check"] in REAL:
            virtual += 1
        else:
            missing.setdefault(row["reason"], []).append(row["title"])
    lines += [Text(f"not measured: {'; '.join(titles)} ({reason})", style="dim") for reason, titles in missing.items()]
    if virtual:
        lines.append(Text(f"not measured: {virtual} checks of a real client and server; summary.json says which", style="dim"))
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
