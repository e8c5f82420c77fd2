"""What a reader should know before believing a number, and what to do next. Every line carries its figures."""

from typing import Any

from kvbench import units
from kvbench.report.files import RunFiles

OFF_BY = 0.02  # relative difference of asked and got lengths that is worth a line
PRESSED = 0.9  # share of the pool from which the cache is short
OFTEN = 0.05  # share of a law's decisions from which it is worth a line that they were not its own
BLIND = 0.1  # share of checks without a value above which a stop rule is told of: most need a while for their first one
GOOD = 0.9  # goodput below which more load is no advice


def warnings(summary: dict[str, Any], files: RunFiles) -> list[str]:
    """In order of how much they can mislead."""
    return [
        *_incomplete(summary),
        *_target(summary),
        *_rules(summary),
        *_loops(summary),
        *_stream(summary),
        *_lengths(summary),
        *_cold(summary, files),
    ]


def _incomplete(summary: dict[str, Any]) -> list[str]:
    run, head = summary["run"], summary["headline"]
    lines = []
    if run["partial"]:
        lines.append(f"the run is partial: {summary['stop']['reason']}")
    for title, lost in (("torn last", run["torn_lines"]), ("damaged", run["damaged_lines"])):
        lines += [f"{count} {title} line{'s' if count > 1 else ''} of {name} dropped" for name, count in lost.items()]
    if run["missing_files"]:
        lines.append(f"not there: {', '.join(run['missing_files'])}")
    if "steady" not in head["cohort"] or "did not run" in head["cohort"]:
        lines.append(f"no steady phase on record: the headline is of {head['cohort']}")
    if summary["accounting"]["total"]["in_flight"]:
        inflight = summary["accounting"]["total"]["in_flight"]
        lines.append(f"{inflight} requests were in flight when the files end: they have no latency")
    if not summary["self_check"]["ok"]:
        lines.append(f"internal error of kvbench: negative durations {summary['self_check']['negative_durations']}")
    return lines


def _target(summary: dict[str, Any]) -> list[str]:
    """What looked wrong when the server was asked, before the run: a model it does not list, requests longer than its context."""
    return [f"before the run: {line}" for line in summary["target"].get("warnings", ())]


def _rules(summary: dict[str, Any]) -> list[str]:
    """Stop rules that guarded nothing, or had nothing to judge for a good part of the run: neither passed nor fired."""
    lines = []
    for row in summary["stop_rules"]:
        unread, checks = row["unread"], row["checks"]
        if checks and unread == checks:
            lines.append(f"the stop rule {row['rule']} was never evaluated: {row['why']}")
        elif checks and unread > BLIND * checks:
            lines.append(f"the stop rule {row['rule']} had nothing to judge at {unread} of {checks} checks: {row['why']}")
    return lines


def _loops(summary: dict[str, Any]) -> list[str]:
    """A law that did not see what it was to hold, or did not decide by itself; a watch that gave up."""
    told, gave_up = summary["control"]["told"], summary["watch"]["counts"].get("gave_up")
    lines, updates = [], told.get("updates")
    for name, what in (
        ("stale", "held still, its signal missing or stale"),
        ("fallbacks", "fell back to feedback, for want of a learned answer"),
    ):
        n = told.get(name)
        if isinstance(updates, int) and isinstance(n, int) and n > OFTEN * updates:
            lines.append(f"the law {summary['control']['law']} {what}, at {n:,} of {updates:,} decisions")
    if gave_up:
        lines.append("the watch gave up: the level stays where it fell to (the watch's decisions say why)")
    return lines


def _stream(summary: dict[str, Any]) -> list[str]:
    stream, latency, ok = summary["streaming"], summary["latency"], summary["outcomes"]["ok"]
    lines = []
    if stream["not_streaming"]:
        whole = stream["not_streaming"]
        lines.append(f"not streaming: {whole} of {ok} answers came whole and have no ttft, tpot, icl and itl")
    if stream["no_visible_output"]:
        lines.append(f"no visible output: {stream['no_visible_output']} of {ok} answers had no text and have no ttft and tpot")
    if stream["coalesced"]:
        per_read = stream["events_per_read"]
        lines.append(f"coalesced: {per_read:.3g} events per read, so icl and itl show the network; tpot is the decode speed")
    if latency["tpot"]["approximate"]:
        rough, n = latency["tpot"]["approximate"], latency["tpot"]["n"]
        lines.append(f"tpot is approximate for {rough} of {n} requests: events are not tokens, and no chunk carried its usage")
    lines += [
        f"{stream[name]} {what}"
        for name, what in (
            ("malformed", "malformed events: each failed its request"),
            ("ignored", "events of a kind that kvbench does not know were ignored"),
            ("replaced_utf8", "invalid UTF-8 sequences were replaced in the text"),
        )
        if stream[name]
    ]
    upload = latency["upload"]["p50"]
    if upload is not None and upload > 1e-3:
        lines.append(f"requests took {units.duration(upload)} (p50) to leave, which ttft includes and ttft_written leaves out")
    return lines


def _lengths(summary: dict[str, Any]) -> list[str]:
    found, lines = summary["tokens"], []
    for name, got in (("prompt", "counted"), ("output", "received")):
        row = found[name]
        if row["asked"] and abs(row["difference"]) > OFF_BY * row["asked"]:
            by = ", ".join(row["sources"])
            mean = f"{row['asked']:.4g} asked, {row['got']:.4g} {got} on average (by {by})"
            lines.append(f"{name} tokens: {mean}; rates use what was {got}")
    if len(found["by_source"]) > 1:
        lines.append(f"token counts come from several sources ({', '.join(found['by_source'])}): listed apart, not added")
    if found["output_rate"].get("mixed_sources"):
        lines.append("token throughput adds arrivals counted by several sources; `by_source` has them apart")
    return lines


def _cold(summary: dict[str, Any], files: RunFiles) -> list[str]:
    lines = []
    emptied = summary["target"].get("reset")
    if files.manifest and (files.scenario.get("workload") or {}).get("nonce") is False and not emptied:
        lines.append("the nonce is off: an earlier run may have warmed the prefix cache, so hit rates and ttft may flatter")
    http = (files.scenario.get("target") or {}).get("kind") == "http"
    preempted = summary["engine"]["preemptions_total"]["value"]
    if http and preempted:
        lines.append(f"{preempted:.0f} preemptions: the server's own hit rate may count recomputed tokens as hits")
    return lines


def next_steps(summary: dict[str, Any]) -> list[str]:
    """At most a handful of lines, the most pressing first."""
    lines = [f"{reason['title']}: {reason['advice']}" for reason in summary["verdict"]["reasons"] if reason["level"] == "INVALID"]
    outcomes, engine = summary["outcomes"], summary["engine"]
    if summary["failures"]:
        worst = summary["failures"][0]
        said = f' ("{worst["examples"][0][:60]}")' if worst["examples"] else ""
        lines.append(f"look at what ended {worst['outcome']}:{worst['class']} ({worst['n']}){said}")
    usage, preempted = engine["kv_usage"]["max"], engine["preemptions_total"]["value"]
    if usage is not None and usage >= PRESSED:
        taken = f" and {preempted:.0f} preemptions" if preempted else ""
        short = f"the KV cache was short (max {units.share(usage)}{taken})"
        lines.append(f"{short}: lower the rate, shorten contexts, or give it more memory")
    elif engine["waiting"]["max"] and engine["waiting"]["max"] > 1 and usage is not None:
        free = units.share(1 - usage)
        lines.append(f"requests queued at the server with {free} of the KV cache free: compute gave way before memory")
    if outcomes["shed"]:
        lines.append(f"shed by the limits: {outcomes['shed']}. Their users got no answer, and goodput counts them")
    if not lines and summary["exit"]["code"] == 0:
        lines.append(_unpressed(summary))
    return lines[:5]


def _unpressed(summary: dict[str, Any]) -> str:
    """Where neither memory nor a queue nor a limit showed."""
    reasons, good = summary["verdict"]["reasons"], summary["goodput"]["value"]
    if reasons:
        return f"before raising the load, settle what the verdict names: {', '.join(reason['title'] for reason in reasons)}"
    if good is not None and good < GOOD:
        return f"goodput is {units.share(good)}: answers miss the limits of their class (slo). Lower the rate, or relax them"
    return "there is room: raise the load (a stair shows where it ends)"
