"""What a reader should know before believing a number, and what to do next. Every line carries its figures."""

from typing import Any

from kvbench import units
from kvbench.report import captures
from kvbench.report.files import RunFiles
from kvbench.report.text import shortened, times

OFF_BY = 0.02  # relative difference of asked and got lengths that is worth a line
PRESSED = 0.9  # share of the pool from which there is no room to speak of
SHORT = 0.01  # share of the time above 95 % of the pool from which the cache was short
QUEUED = 1.0  # requests waiting at the server, on average: a queue, and no moment of one
SLOWED = 0.5  # share of the mean ttft that waiting there takes, from which the queue is what users feel
OFTEN = 0.05  # share of a law's decisions from which it is worth a line that they were not its own
BLIND = 0.1  # share of checks without a value above which a stop rule is told of: most need a while for their first one
GOOD = 0.9  # goodput below which more load is no advice


def warnings(summary: dict[str, Any], files: RunFiles) -> list[str]:
    """In order of how much they can mislead."""
    return [
        *_incomplete(summary),
        *_ended(files),
        *captures.notes(summary["captures"]),
        *_target(summary),
        *_rules(summary),
        *_shared(summary),
        *_lost(files),
        *_harmed(summary),
        *_loops(summary),
        *_stream(summary),
        *_lengths(summary),
        *_cold(summary, files),
        *_served(summary),
    ]


def _served(summary: dict[str, Any]) -> list[str]:
    """The server's counters: a hit rate that may hold recompute, and engines that came and went."""
    told = summary["server"]
    lines = []
    preempted = told["metrics"].get("preemptions_total", {}).get("value")
    rate, steady = told["hit_rate"]["value"], summary["engine"]["preemptions_total"]["value"]
    if preempted and rate is not None:
        again = "may count what preempted requests looked up again as queries and hits"
        within = f", {steady:,.0f} of them in steady" if steady is not None else ""
        lines.append(
            f"the server preempted {times(round(preempted))} over the run{within}: its hit rate of {units.share(rate)} {again}"
        )
    for event in told["events"]:
        engine = ", ".join(f"{key} {value}" for key, value in (event["labels"] or {}).items()) or "the server"
        lines.append(f"at {units.duration(event['t'])} {engine}: {event['reason']} ({', '.join(event['metrics'][:3])}, ...)")
    return lines


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


def _ended(files: RunFiles) -> list[str]:
    """A launched server that did not outlive the run."""
    lines = []
    for event in files.all("server_exit"):
        said = " | ".join(event.data.get("lines") or ["nothing"])
        lines.append(f"at {units.duration(event.t)} {event.data.get('reason')}; it said last: {said}")
        after = sum(r.outcome == "ok" and r.sent_ns is not None and r.sent_ns / 1e9 > event.t for r in files.records)
        if after:
            lines.append(f"{after:,} requests sent after that were answered: by another server, so these figures are not its own")
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


def _shared(summary: dict[str, Any]) -> list[str]:
    """GPUs without memory of their own: what gpu_memory then is of."""
    told = [row["facts"].get("memory_source") for row in summary["telemetry"]["collectors"]]
    gpus = ", ".join(sorted(gpu for sources in told if isinstance(sources, dict) for gpu in sources))
    judged = "gpu_memory, and every rule on it, is of the system's memory"
    return [f"GPU {gpus} has no memory of its own: {judged}"] if gpus else []


def _lost(files: RunFiles) -> list[str]:
    """GPUs that fell off the bus while the run went on."""
    told = ((event.t, event.data) for event in files.all("collector") if event.data.get("state") == "gpu_lost")
    since = "what all GPUs draw is without it from then on"
    return [f"GPU {data.get('gpu')} was lost at {units.duration(t)}: {data.get('reason')}; {since}" for t, data in told]


def harm(files: RunFiles) -> list[dict[str, Any]]:
    """What broke, by the server's log (rules of level harm) and by PyTorch's allocator: when first, how often, the line."""
    found: dict[str, dict[str, Any]] = {}
    grave = {str(event.data.get("rule")) for event in files.all("server_log") if event.data.get("level") == "harm"}
    for event in files.all("server_log"):
        rule, more = str(event.data.get("rule")), event.data.get("more")
        if rule in grave:
            row = found.setdefault(rule, {"t": event.t, "what": rule, "n": 0, "line": event.data.get("line")})
            row["n"] += more if isinstance(more, int) else 1
    for event in files.all("allocator"):
        more = event.data.get("more")
        if event.data.get("what") == "num_ooms" and isinstance(more, int):
            row = found.setdefault("num_ooms", {"t": event.t, "what": "num_ooms", "n": 0, "line": None})
            row["n"] += more
    return sorted(found.values(), key=lambda row: row["t"])


def _harmed(summary: dict[str, Any]) -> list[str]:
    lines = []
    for row in summary["harm"]:
        first = f"first at {units.duration(row['t'])}" if row["n"] > 1 else f"at {units.duration(row['t'])}"
        if row["what"] == "num_ooms":
            lines.append(f"PyTorch's allocator ran out of memory {times(row['n'])}, {first}")
            continue
        said = f': "{shortened(str(row["line"]), 160)}"' if row["line"] else ""
        lines.append(f"the server's log tells of {row['what']} {times(row['n'])}, {first}{said}")
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
    if http and preempted and not summary["server"]["metrics"].get("preemptions_total", {}).get("value"):
        again = "the server's own hit rate may count recomputed tokens as hits"
        lines.append(f"{preempted:,.0f} preemptions in steady: {again}")
    return lines


def next_steps(summary: dict[str, Any]) -> list[str]:
    """At most a handful of lines, the most pressing first."""
    lines = [f"{reason['title']}: {reason['advice']}" for reason in summary["verdict"]["reasons"] if reason["level"] == "INVALID"]
    outcomes, failed = summary["outcomes"], summary["levels"]["stress"].get("failed")
    if summary["failures"]:
        worst = summary["failures"][0]
        said = f' ("{shortened(worst["examples"][0], 80)}")' if worst["examples"] else ""
        lines.append(f"look at what ended {worst['outcome']}:{worst['class']} ({worst['n']}){said}")
    lines += [f"find out what broke in the server: {line}" for line in _harmed(summary)[:2]]
    lines += _pressed(summary, failed)
    lines += [sink["notes"][-1] for sink in summary["telemetry"]["sinks"] if sink.get("notes") and not sink.get("complete")]
    if outcomes["shed"]:
        lines.append(f"shed by the limits: {outcomes['shed']:,}. Their users got no answer, and goodput counts them")
    if not lines and failed is None and summary["exit"]["code"] == 0:
        lines += _unpressed(summary)
    return lines[:5]


def _pressed(summary: dict[str, Any], failed: dict[str, Any] | None) -> list[str]:
    """What gave way first: at the level where stress failed, where it did, else over the headline. A law may hold the cache
    nearly full on purpose, and a request that waits for a moment is no queue: neither is a line."""
    found = failed or summary["engine"]
    where = f" at level {failed['level']:.4g}" if failed else ""
    usage, waiting, preempted = found["kv_usage"], found["waiting"]["mean"], found["preemptions_total"]["value"]
    above = usage.get("time_above", {}).get("95%", 0.0)
    if above >= SHORT or preempted:
        signs = [f"{units.share(above)} of the time above 95 %"] if above >= SHORT else []
        signs += [f"{preempted:,.0f} preemptions"] if preempted else []
        advice = "to go further, shorten" if failed else "lower the rate, shorten"
        return [f"the KV cache was short{where} ({', '.join(signs)}): {advice} contexts, or give it more memory"]
    if usage["max"] is None or usage["max"] >= PRESSED or waiting is None or waiting < QUEUED:
        return []
    if failed is None and not _felt(summary, waiting):
        return []
    queue = f"requests queued at the server{where} ({waiting:.3g} on average) with {units.share(1 - usage['max'])}"
    return [f"{queue} of the KV cache free: compute, or its limit on running requests, gave way before memory"]


def _felt(summary: dict[str, Any], waiting: float) -> bool:
    """Users noticed a queue of so many: goodput fell, or waiting (by Little's law) is a good part of the mean ttft."""
    good, rate, ttft = summary["goodput"]["value"], summary["rates"]["ok"]["value"], summary["latency"]["ttft"]["mean"]
    return (good is not None and good < GOOD) or bool(rate and ttft and waiting / rate >= SLOWED * ttft)


def _unpressed(summary: dict[str, Any]) -> list[str]:
    """Where neither memory nor a queue nor a limit showed; nothing where either was near."""
    reasons, good, engine = summary["verdict"]["reasons"], summary["goodput"]["value"], summary["engine"]
    if reasons:
        return [f"before raising the load, settle what the verdict names: {', '.join(reason['title'] for reason in reasons)}"]
    if good is not None and good < GOOD:
        return [f"goodput is {units.share(good)}: answers miss the limits of their class (slo). Lower the rate, or relax them"]
    near = (engine["kv_usage"]["max"] or 0) >= PRESSED or (engine["waiting"]["mean"] or 0) >= QUEUED
    return [] if near else ["there is room: raise the load (a stair shows where it ends)"]
