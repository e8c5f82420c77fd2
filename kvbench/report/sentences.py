"""What every page says of the whole run in rows of (name, text): what answered, throughput, KV cache, what was not measured."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvbench import units
from kvbench.report import accesses, energy, machine
from kvbench.report.text import count, number

Rows = list[tuple[str, str]]
REAL = {  # checks that virtual time on the embedded engine has nothing for
    "loop_lag_p99", "client_cpu", "clock_steps", "workers_lost",
    "server_requests", "count_mismatch", "recompute_in_hits", "collector_gap", "collectors_lost", "required_lost",
    "gpus_lost", "messages_lost",
}  # fmt: skip


def described(target: Mapping[str, Any]) -> str:
    """What answered, from the facts in the manifest, as a reader would say it."""
    servers = ", ".join(f"{one['url']} ({one['software'] or 'software not told'})" for one in target.get("servers", ()))
    if target.get("kind") == "http":
        return f"{servers or 'a server'}: {target.get('model') or 'model not told'}"
    if target.get("kind") == "null":
        return "nothing: requests are answered at once, which measures kvbench itself"
    if not {"model", "hardware", "devices", "engine", "blocks", "block_tokens", "kv_tokens"} <= target.keys():
        return "(not recorded)"
    return f"the embedded engine: {target['model']} on {devices(target)} ({target['engine']} profile), {_pool(target)}"


def devices(target: Mapping[str, Any]) -> str:
    """The hardware of the embedded engine's facts, node by node where there are several."""
    if not target.get("nodes"):
        return f"{target['devices']} x {target['hardware']}" if target["devices"] > 1 else str(target["hardware"])
    kinds: dict[str, int] = {}
    for node in target["nodes"]:
        role = "" if node["role"] == "mixed" else f" for {node['role']}"
        kind = f"{node['devices']} x {node['hardware']}{role}"
        kinds[kind] = kinds.get(kind, 0) + 1
    return " and ".join(f"{n} node{'s' if n > 1 else ''} of {kind}" for kind, n in kinds.items())


def _pool(target: Mapping[str, Any]) -> str:
    """Blocks and the tokens that fit, of all nodes. Layer groups need blocks each: their product is no number of tokens."""
    blocks, tokens, groups = target["blocks"], target["kv_tokens"], target.get("groups")
    if not groups:
        return f"KV pool {blocks:,} blocks of {target['block_tokens']} = {tokens:,} tokens"
    nodes, each = target.get("nodes") or (), [one["blocks"] for one in groups]  # as the first node has them
    alike = len({(node["hardware"], node["devices"]) for node in nodes}) == 1
    where = "" if len(nodes) < 2 else " on each node" if alike else " on node 0"
    if (nodes[0] if nodes else target)["blocks"] != sum(each):
        return f"one KV pool for {len(groups)} layer groups ({each[0]:,} blocks{where}), {tokens:,} tokens fit"
    counts = " + ".join(f"{n:,}" for n in each)
    return f"KV pools of {len(groups)} layer groups ({counts} blocks{where}), {tokens:,} tokens fit"


def tokenized(facts: Mapping[str, Any]) -> str:
    """How prompts became the server's tokens, and how far off their lengths may be."""
    if facts.get("kind") is None:
        return f"- ({facts.get('reason')})"
    off = f"off by {units.share(facts['error'])}" if isinstance(facts.get("error"), float) else "not measured"
    parts = [
        str(facts["kind"]) if facts["kind"] != "none" else "",
        str(facts.get("how") or ""),
        "exact" if facts.get("exact") else off,
    ]
    return "; ".join(part for part in parts if part)


def throughput(summary: Mapping[str, Any]) -> Rows:
    """Rates, tokens, goodput, energy, and how evenly requests left."""
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
    return rows


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


def cache(summary: Mapping[str, Any]) -> Rows:
    """The pool, its queue, what was found in it, and what stands below and beside it."""
    engine, told = summary["engine"], summary["told"]
    usage = engine["kv_usage"]
    rows: Rows = []
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
    rows += machine.rows(summary)
    return rows + list(accesses.rows(summary["cache"]))


def missing(summary: Mapping[str, Any]) -> Iterator[str]:
    """What was not measured, by the reason; what virtual time has nothing for as a number."""
    reasons: dict[str, list[str]] = {}
    virtual = 0
    for row in summary["verdict"]["not_measured"]:
        if row["check"] == "workers_lost":  # one process, as ever
            continue
        if summary["run"]["clock"] == "virtual" and row["check"] in REAL:
            virtual += 1
        else:
            reasons.setdefault(row["reason"], []).append(row["title"])
    for reason, titles in reasons.items():
        yield f"not measured: {'; '.join(titles)} ({reason})"
    if virtual:
        yield f"not measured: {virtual} checks of a real client and server; summary.json says which"
