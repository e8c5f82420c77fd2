"""The table of metric names, and how a name with its statistic (`ttft_p99`, `kv_usage_max`) is read. Others are errors."""

import difflib
import re
from typing import Literal, NamedTuple

from kvbench import units

Kind = Literal["latency", "gauge", "counter", "ratio", "rate", "count"]
Unit = Literal["s", "share", "/s", "W", "J", "C", "Hz", ""]


class Metric(NamedTuple):
    """kind decides the statistics; unit how a limit is written; better says which way a budget without a comparison reads."""

    kind: Kind
    unit: Unit
    what: str
    better: Literal["low", "high", ""] = ""


class Name(NamedTuple):
    """A metric with its statistic: `quantile` where that is one, else `statistic` alone ("mean", "max", "" for bare)."""

    metric: str
    statistic: str = ""
    quantile: float | None = None

    @property
    def of(self) -> Metric:
        return METRICS[self.metric]

    def __str__(self) -> str:
        return f"{self.metric}_{self.statistic}" if self.statistic else self.metric


QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}
STATISTICS: dict[Kind, tuple[str, ...]] = {
    "latency": (*QUANTILES, "mean", "min", "max"),  # always written
    "gauge": ("", "mean", "min", "max", "last"),  # bare: the mean over the interval
    "counter": ("", "rate", "last"),  # bare: the increase within the interval, resets allowed for
    "ratio": ("",),
    "rate": ("",),
    "count": ("",),
}


def parse(text: str) -> Name:
    """`ttft_p99` -> Name("ttft", "p99", 0.99). Raises ValueError that names the nearest known name, or the statistics allowed."""
    if text in METRICS:
        metric, statistic = text, ""
    else:
        metric, _, statistic = text.rpartition("_")
        if metric not in METRICS:
            raise ValueError(f"unknown metric {text!r}{_hint(text)}")
    allowed = STATISTICS[METRICS[metric].kind]
    if statistic not in allowed:
        ways = ", ".join(f"{metric}_{way}" if way else metric for way in allowed)
        raise ValueError(f"{text!r}: {metric} is written as one of {ways}")
    return Name(metric, statistic, QUANTILES.get(statistic))


def known() -> list[str]:
    """Every name that `parse` accepts."""
    return [str(Name(metric, way)) for metric, entry in METRICS.items() for way in STATISTICS[entry.kind]]


def limit(text: object, name: Name) -> float:
    """A limit as the user wrote it ("800ms", "90%", "2/s", 8) in base units. Raises ValueError on a missing or other unit."""
    unit = name.of.unit
    if unit == "":
        try:
            return float(str(text))
        except ValueError:
            raise ValueError(f"{text!r} is not a plain number, which {name} is") from None
    table, what, example = _WRITTEN[unit]
    if not isinstance(text, str) or re.fullmatch(r"\s*[+-]?[\d.]+(?:[eE][+-]?\d+)?\s*", text):
        raise ValueError(f"{text!r} has no unit: {name} is {what} in one of {', '.join(table)} (for example {example})")
    return float(f"{units.parse(text, table, what, example):.12g}")  # 99.9 x 0.01 is not 0.999, and 999 of 1000 has to meet it


def show(value: float | None, name: Name) -> str:
    """A value of this metric for people, with its unit; "-" when None."""
    if value is None:
        return "-"
    if name.of.unit == "s":
        return units.duration(value)
    if name.of.unit == "share":
        return f"{100 * value:.4g} %"
    number = f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return f"{number}{name.of.unit}" if name.of.unit in ("", "/s") else f"{number} {name.of.unit}"


def _hint(text: str) -> str:
    near = difflib.get_close_matches(text, known(), n=1, cutoff=0.6)
    return f": did you mean {near[0]!r}?" if near else ": docs/metrics.md lists the names"


_WRITTEN: dict[Unit, tuple[dict[str, float], str, str]] = {
    "s": (units.DURATIONS, "a duration", "800ms"),
    "share": (units.SHARES, "a share", "90%"),
    "/s": (units.RATES, "a rate", "2/s"),
    "W": ({"W": 1.0, "kW": 1e3}, "a power", "300W"),
    "J": ({"J": 1.0, "kJ": 1e3, "MJ": 1e6, "Wh": 3.6e3, "kWh": 3.6e6}, "an energy", "50kJ"),
    "C": ({"C": 1.0}, "a temperature in degrees Celsius", "85C"),
    "Hz": ({"Hz": 1.0, "MHz": 1e6, "GHz": 1e9}, "a frequency", "1.4GHz"),
}

METRICS: dict[str, Metric] = {
    # per request, seconds
    "gate_wait": Metric("latency", "s", "release - due: how long the limits held the request", "low"),
    "connect": Metric("latency", "s", "waiting for a connection", "low"),
    "lag": Metric("latency", "s", "sent - release - connect: how late this tool was", "low"),
    "upload": Metric("latency", "s", "written - sent: how long the request took to leave", "low"),
    "ttft": Metric("latency", "s", "first - sent: time to the first token, thinking included", "low"),
    "ttft_written": Metric("latency", "s", "first - written: the same from the last byte of the request", "low"),
    "response_ttft": Metric("latency", "s", "first - due: the same with all waiting", "low"),
    "ttfc": Metric("latency", "s", "first answer text - sent", "low"),
    "e2e": Metric("latency", "s", "done - sent", "low"),
    "response": Metric("latency", "s", "done - due", "low"),
    "tpot": Metric("latency", "s", "time per output token after the first", "low"),
    "icl": Metric("latency", "s", "gap between token-bearing events", "low"),
    "itl": Metric("latency", "s", "gap per token, counted once per token", "low"),
    "ntpot": Metric("latency", "s", "e2e / output tokens", "low"),
    # shares of requests and tokens
    "success_rate": Metric("ratio", "share", "1 - error_rate", "high"),
    "error_rate": Metric("ratio", "share", "(failed + timeout + rejected) / (those + ok)", "low"),
    "rejection_rate": Metric("ratio", "share", "answered 429 or 503 / finished", "low"),
    "shed_rate": Metric("ratio", "share", "shed by a law / (finished + shed + dropped)", "low"),
    "drop_rate": Metric("ratio", "share", "dropped by this tool / (finished + shed + dropped)", "low"),
    "goodput": Metric("ratio", "share", "ok within every limit of its class / (finished + shed + dropped)", "high"),
    "hit_rate": Metric("ratio", "share", "prompt tokens found in the prefix cache / prompt tokens", "high"),
    "oom_rate": Metric("ratio", "share", "requests that failed for lack of KV memory / requests that the engine took", "low"),
    # per second of the interval
    "offered_rate": Metric("rate", "/s", "requests due"),
    "admitted_rate": Metric("rate", "/s", "requests released by the limits"),
    "sent_rate": Metric("rate", "/s", "requests sent"),
    "ok_rate": Metric("rate", "/s", "requests that ended ok", "high"),
    "goodput_rate": Metric("rate", "/s", "requests that ended ok within every limit of their class", "high"),
    "input_tokens_rate": Metric("rate", "/s", "prompt tokens of requests that were answered"),
    "output_tokens_rate": Metric("rate", "/s", "tokens that arrived", "high"),
    "inflight": Metric("count", "", "requests sent and not over, at the end of the interval"),
    "held": Metric("count", "", "requests due and waiting at our gate, at the end of the interval", "low"),
    # gauges of the server or the embedded engine
    "kv_usage": Metric("gauge", "share", "KV blocks referenced by a live request / usable blocks", "low"),
    "kv_usage_fullest": Metric("gauge", "share", "kv_usage of the fullest of several engines; kv_usage is their mean", "low"),
    "cached_share": Metric("gauge", "share", "KV blocks that hold reusable content / usable blocks"),
    "running": Metric("gauge", "", "requests in the server's batch"),
    "waiting": Metric("gauge", "", "requests in the server's queue", "low"),
    "gpu_memory": Metric(
        "gauge", "share", "device memory in use / device memory; flat where the server takes it at the start", "low"
    ),
    "gpu_utilization": Metric("gauge", "share", "share of the time in which a kernel ran; mean of the target's GPUs"),
    "gpu_power_w": Metric("gauge", "W", "power that the target's GPUs draw together", "low"),
    "gpu_temperature_c": Metric("gauge", "C", "temperature of the hottest GPU", "low"),
    "gpu_sm_clock_hz": Metric("gauge", "Hz", "clock of the GPUs' multiprocessors, mean"),
    "power": Metric("gauge", "W", "power that the embedded engine's devices draw together, modelled", "low"),
    "slot_efficiency": Metric("gauge", "share", "valid tokens in referenced KV blocks / the tokens they could hold", "high"),
    "reserved_share": Metric("gauge", "share", "KV bytes held beyond the next token's block / KV bytes", "low"),
    "host_cpu": Metric("gauge", "share", "CPU of the client's machine in use", "low"),
    "host_memory": Metric("gauge", "share", "memory of the client's machine in use", "low"),
    "gpu_energy_j_total": Metric("counter", "J", "energy that the target's GPUs drew", "low"),
    "energy_total": Metric("counter", "J", "energy that the embedded engine's devices drew, modelled", "low"),
    "preemptions_total": Metric("counter", "", "times a running request lost its blocks", "low"),
    "oom_total": Metric("counter", "", "requests that failed for lack of KV memory", "low"),
    "admitted_total": Metric("counter", "", "requests that the engine took, and did not turn away for the time being"),
    "hit_tokens_total": Metric("counter", "", "prompt tokens found in the server's cache"),
    "query_tokens_total": Metric("counter", "", "prompt tokens looked up in the server's cache"),
    "prompt_tokens_total": Metric("counter", "", "prompt tokens that the server took in"),
    "generation_tokens_total": Metric("counter", "", "tokens that the server generated"),
    "finished_total": Metric("counter", "", "requests that ended, by the server's count, whoever sent them"),
    "recompute_tokens_total": Metric("counter", "", "tokens computed again after preemption", "low"),
    "computed_tokens_total": Metric("counter", "", "tokens that the server computed, prompts and answers"),
}
