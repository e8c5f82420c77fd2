"""The /metrics page: vLLM's names, types, labels and buckets, for what the embedded engine really knows; the rest is absent.

Tokens and times are counted here as replies are written; queues, blocks and look-ups are read from the engine when it is asked
for the page. Seconds are those of the server's clock, as a client sees them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvbench.core import Seconds
from kvbench.engine import Machine

_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
    2560.0,
)  # fmt: skip
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_N = (1, 2, 5, 10, 20)


def lengths(most: int) -> list[int]:
    """1, 2, 5, 10, ... up to `most` tokens."""
    found: list[int] = []
    ten = 1
    while ten <= most:
        found += [step * ten for step in (1, 2, 5) if step * ten <= most]
        ten *= 10
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """One job that ended. generated, decode: of each answer; per_token: of those with more than one token."""

    prompt: int
    generated: list[int]
    n: int
    asked: int  # max_tokens
    computed: int  # prompt tokens that were not found
    preempted: int
    whole: Seconds
    decode: list[Seconds]
    per_token: list[Seconds]


class Page:
    """The counters, and their text. `facts`: Machine.facts(); `started`: wall clock when the server was."""

    def __init__(self, machine: Machine, model: str, facts: dict[str, Any], started: float) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"engine": "0", "model_name": model}
        self.registry.register(_Engine(machine, self._labels, started))
        length = lengths(facts["max_context"])
        self._prompt = self._counter("prompt_tokens", "Prompt tokens whose answer has begun")
        self._found = self._counter("prompt_tokens_cached", "Prompt tokens found in a cache")
        by = self._many("prompt_tokens_by_source", "Prompt tokens by where their KV came from", "source")
        self._computed, self._hit = (
            by.labels(**self._labels, source="local_compute"),
            by.labels(**self._labels, source="local_cache_hit"),
        )
        by = self._many("prompt_tokens_cached_by_source", "Cached prompt tokens by tier", "source")
        self._device = by.labels(**self._labels, source="device")
        self._generation = self._counter("generation_tokens", "Tokens generated")
        by = self._many("request_success", "Requests that ended, by how", "finished_reason")
        ways = (by.labels(**self._labels, finished_reason=why) for why in ("length", "abort", "error"))
        self._ended, self._aborted, self._failed = ways
        refused = Counter("vllm:admission_rejections", "Requests turned away", ["model_name", "reason"], registry=self.registry)
        self._refused = refused.labels(model_name=model, reason="max_num_queued_reqs")
        self._first = self._histogram("time_to_first_token_seconds", "From a request's arrival to its first token", _TTFT)
        self._gap = self._histogram("inter_token_latency_seconds", "Between two tokens", _TOKEN)
        self._per_token = self._histogram("request_time_per_output_token_seconds", "Mean of an answer's gaps", _TOKEN)
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the last token", _REQUEST)
        self._decode = self._histogram("request_decode_time_seconds", "From first to last token", _REQUEST)
        self._prompts = self._histogram("request_prompt_tokens", "Prompt tokens of a request", length)
        self._generated = self._histogram("request_generation_tokens", "Tokens of an answer", length)
        self._longest = self._histogram("request_max_num_generation_tokens", "Tokens of a request's longest answer", length)
        self._asked = self._histogram("request_params_max_tokens", "max_tokens as asked for", length)
        self._n = self._histogram("request_params_n", "n as asked for", _N)
        self._misses = self._histogram("request_prefill_kv_computed_tokens", "Prompt tokens computed", length)
        self._preempted = self._histogram("request_num_preemptions", "Preemptions of a request", _PREEMPTIONS)
        self._http = Counter(
            "http_requests", "Requests by method, status and handler", ["handler", "method", "status"], registry=self.registry
        )
        self._config(facts)

    def _config(self, facts: dict[str, Any]) -> None:
        """What is known of the cache, as labels."""
        told = {
            "block_size": facts["block_tokens"], "num_gpu_blocks": facts["blocks"] + 1, "enable_prefix_caching": True,
            "gpu_memory_utilization": facts.get("gpu_memory_utilization"), "kv_cache_size_tokens": facts["kv_tokens"],
            "engine": "0",
        }  # fmt: skip
        info = Gauge("vllm:cache_config_info", "The cache's settings", sorted(told), registry=self.registry)
        info.labels(**{name: str(value) for name, value in told.items()}).set(1)

    def _many(self, name: str, what: str, label: str) -> Counter:
        return Counter(f"vllm:{name}", what, ["engine", "model_name", label], registry=self.registry)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"vllm:{name}", what, list(self._labels), registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, what: str, buckets: Any) -> Histogram:
        found = Histogram(f"vllm:{name}", what, list(self._labels), registry=self.registry, buckets=buckets)
        return found.labels(**self._labels)

    def prompt(self, tokens: int, cached: int) -> None:
        """A job has its first token."""
        self._prompt.inc(tokens)
        self._computed.inc(tokens - cached)
        for found in (self._found, self._hit, self._device):
            found.inc(cached)

    def generated(self, tokens: int) -> None:
        self._generation.inc(tokens)

    def first(self, seconds: Seconds) -> None:
        self._first.observe(seconds)

    def gap(self, seconds: Seconds) -> None:
        self._gap.observe(seconds)

    def ended(self, row: Row) -> None:
        self._ended.inc()
        self._prompts.observe(row.prompt)
        self._longest.observe(max(row.generated))
        self._asked.observe(row.asked)
        self._n.observe(row.n)
        self._misses.observe(row.computed)
        self._preempted.observe(row.preempted)
        self._whole.observe(row.whole)
        for histogram, values in ((self._generated, row.generated), (self._decode, row.decode), (self._per_token, row.per_token)):
            for value in values:
                histogram.observe(value)

    def aborted(self) -> None:
        self._aborted.inc()

    def failed(self) -> None:
        self._failed.inc()

    def refused(self) -> None:
        self._refused.inc()

    def asked(self, handler: str, method: str, status: int) -> None:
        self._http.labels(handler=handler, method=method, status=f"{status // 100}xx").inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Engine(Collector):
    """What the engine itself counts, read at each scrape. Its caller has advanced it to now."""

    def __init__(self, machine: Machine, labels: dict[str, str], started: float) -> None:
        self.machine, self.labels, self.started = machine, labels, started

    def collect(self) -> Iterator[Metric]:
        gauges = self.machine.gauges()
        for name, what, key in _GAUGES:
            yield self._gauge(name, what, gauges[key], {})
        yield self._gauge(
            "num_requests_waiting_by_reason", "Waiting requests by reason", gauges["waiting"], {"reason": "capacity"}
        )
        for name, what, key in _COUNTERS:
            family = CounterMetricFamily(f"vllm:{name}", what, labels=list(self.labels))
            family.add_metric(list(self.labels.values()), gauges[key], created=self.started)
            yield family

    def _gauge(self, name: str, what: str, value: float, more: dict[str, str]) -> Metric:
        labels = self.labels | more
        family = GaugeMetricFamily(f"vllm:{name}", what, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family


_GAUGES = (
    ("num_requests_running", "Answers in the batch", "running"),
    ("num_requests_waiting", "Answers that wait for a place in it", "waiting"),
    ("kv_cache_usage_perc", "Share of the KV blocks that requests hold, 0 to 1", "kv_usage"),
)
_COUNTERS = (
    ("prefix_cache_queries", "Prompt tokens looked up", "query_tokens"),
    ("prefix_cache_hits", "Of those, found", "hit_tokens"),
    ("num_preemptions", "Times that an answer lost its blocks", "preemptions"),
)
