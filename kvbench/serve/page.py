"""The /metrics page: vLLM's names, types, labels and buckets, for what the embedded engine really knows; the rest is absent.

Tokens and times are counted here as replies are written; queues, blocks and look-ups are read from the engine when it is asked
for the page. Seconds are those of the server's clock, as a client sees them. The nodes of a cluster are engines "0", "1", ... as
vLLM's data-parallel ranks are: each has a series of its own, which begins again at 0 where a node was lost and came back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
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
    """One job that ended. generated, decode: of each answer; per_token: of those with more than one token. queued: until its
    first admission; prefill, inference: from there to the first and to the last token."""

    prompt: int
    generated: list[int]
    n: int
    asked: int  # max_tokens
    computed: int  # prompt tokens that were not found
    preempted: int
    whole: Seconds
    queued: Seconds
    prefill: Seconds
    inference: Seconds
    decode: list[Seconds]
    per_token: list[Seconds]


class Page:
    """The counters, and their text. `facts`: Machine.facts(); `started`: wall clock when the server was. `engine`, everywhere:
    the number of a cluster's node; 0 where there is none."""

    def __init__(self, machine: Machine, model: str, facts: dict[str, Any], started: float) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        nodes = facts.get("nodes") or [facts]
        self.registry.register(_Engines(machine, model, started))
        counters = {name: self._counter(name, what) for name, what in _COUNTED}
        split = {name: self._counter(name, what, label) for name, what, label in dict.fromkeys(row[:3] for row in _SPLIT)}
        length = lengths(facts["max_context"])
        histograms = {name: self._histogram(name, what, buckets or length) for name, what, buckets in _OBSERVED}
        self._count: list[dict[str, Counter]] = []
        self._observe: list[dict[str, Histogram]] = []
        for number in range(len(nodes)):
            labels = {"engine": str(number), "model_name": model}
            self._count.append({name: family.labels(**labels) for name, family in counters.items()})
            for name, _, label, value in _SPLIT:
                self._count[-1][f"{name} {value}"] = split[name].labels(**labels, **{label: value})
            self._observe.append({name: family.labels(**labels) for name, family in histograms.items()})
        refused = Counter("vllm:admission_rejections", "Requests turned away", ["model_name", "reason"], registry=self.registry)
        self._refused = refused.labels(model_name=model, reason="max_num_queued_reqs")
        self._http = Counter(
            "http_requests", "Requests by method, status and handler", ["handler", "method", "status"], registry=self.registry
        )
        self._config(facts, nodes)

    def _config(self, facts: dict[str, Any], nodes: Sequence[Mapping[str, Any]]) -> None:
        """What is known of each engine's cache, as labels."""
        told = {
            "block_size": facts["block_tokens"], "enable_prefix_caching": True,
            "gpu_memory_utilization": facts.get("gpu_memory_utilization"),
        }  # fmt: skip
        names = sorted([*told, "num_gpu_blocks", "kv_cache_size_tokens", "engine"])
        info = Gauge("vllm:cache_config_info", "The cache's settings", names, registry=self.registry)
        for number, node in enumerate(nodes):
            own = {"num_gpu_blocks": node["blocks"] + 1, "kv_cache_size_tokens": node["kv_tokens"], "engine": number}
            info.labels(**{name: str(value) for name, value in (told | own).items()}).set(1)

    def _counter(self, name: str, what: str, *more: str) -> Counter:
        return Counter(f"vllm:{name}", what, ["engine", "model_name", *more], registry=self.registry)

    def _histogram(self, name: str, what: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"vllm:{name}", what, ["engine", "model_name"], registry=self.registry, buckets=buckets)

    def prompt(self, engine: int, tokens: int, cached: int, below: int) -> None:
        """A job has its first token. below: of the cached tokens, those that came up from a tier."""
        count = self._count[engine]
        count["prompt_tokens"].inc(tokens)
        count["prompt_tokens_cached"].inc(cached)
        count["prompt_tokens_by_source local_compute"].inc(tokens - cached)
        count["prompt_tokens_by_source local_cache_hit"].inc(cached - below)
        count["prompt_tokens_by_source external_kv_transfer"].inc(below)

    def step(self, engine: int, tokens: int) -> None:
        """A step gave tokens: with the prompt tokens computed of jobs whose first it gave, so many."""
        self._observe[engine]["iteration_tokens_total"].observe(tokens)

    def generated(self, engine: int, tokens: int) -> None:
        self._count[engine]["generation_tokens"].inc(tokens)

    def first(self, engine: int, seconds: Seconds) -> None:
        self._observe[engine]["time_to_first_token_seconds"].observe(seconds)

    def gap(self, engine: int, seconds: Seconds) -> None:
        self._observe[engine]["inter_token_latency_seconds"].observe(seconds)

    def ended(self, engine: int, row: Row) -> None:
        self._count[engine]["request_success length"].inc()
        for name, values in (
            ("request_prompt_tokens", [row.prompt]),
            ("request_max_num_generation_tokens", [max(row.generated)]),
            ("request_params_max_tokens", [row.asked]),
            ("request_params_n", [row.n]),
            ("request_prefill_kv_computed_tokens", [row.computed]),
            ("request_num_preemptions", [row.preempted]),
            ("e2e_request_latency_seconds", [row.whole]),
            ("request_queue_time_seconds", [row.queued]),
            ("request_prefill_time_seconds", [row.prefill]),
            ("request_inference_time_seconds", [row.inference]),
            ("request_generation_tokens", row.generated),
            ("request_decode_time_seconds", row.decode),
            ("request_time_per_output_token_seconds", row.per_token),
        ):
            for value in values:
                self._observe[engine][name].observe(value)

    def aborted(self, engine: int) -> None:
        self._count[engine]["request_success abort"].inc()

    def failed(self, engine: int) -> None:
        self._count[engine]["request_success error"].inc()

    def refused(self) -> None:
        self._refused.inc()

    def asked(self, handler: str, method: str, status: int) -> None:
        self._http.labels(handler=handler, method=method, status=f"{status // 100}xx").inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Engines(Collector):
    """What the engines themselves count, read at each scrape. Its caller has advanced them to now. A node that is down is told of
    by nothing, and what waits for a node by a name of our own: no engine has it."""

    def __init__(self, machine: Machine, model: str, started: float) -> None:
        self.machine, self.model, self.started = machine, model, started

    def collect(self) -> Iterator[Metric]:
        whole = self.machine.gauges()
        nodes = self.machine.gauges_by_node() or [whole]
        up = {str(number): gauges for number, gauges in enumerate(nodes) if "running" in gauges}
        for name, what, key in _GAUGES:
            gauge = GaugeMetricFamily(f"vllm:{name}", what, labels=["engine", "model_name"])
            for engine, gauges in up.items():
                gauge.add_metric([engine, self.model], gauges[key])
            yield gauge
        what = "Waiting requests by reason"
        gauge = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", what, labels=["engine", "model_name", "reason"])
        for engine, gauges in up.items():
            gauge.add_metric([engine, self.model, "capacity"], gauges["waiting"])
        yield gauge
        for name, what, count in _COUNTERS:
            counter = CounterMetricFamily(f"vllm:{name}", what, labels=["engine", "model_name"])
            for engine, gauges in up.items():
                counter.add_metric([engine, self.model], count(gauges), created=self.started)
            yield counter
        what = "Prefix-cache hit tokens by tier; told at admission"
        counter = CounterMetricFamily("vllm:prompt_tokens_cached_by_source", what, labels=["engine", "model_name", "source"])
        for engine, gauges in up.items():
            for source, found in _sources(gauges).items():
                counter.add_metric([engine, self.model, source], found, created=self.started)
        yield counter
        if "held" in whole:
            gauge = GaugeMetricFamily("kvbench:num_requests_held", "Requests that no node has yet", labels=["model_name"])
            gauge.add_metric([self.model], whole["held"])
            yield gauge


_COUNTED = (
    ("prompt_tokens", "Prompt tokens whose answer has begun"),
    ("prompt_tokens_cached", "Prompt tokens found in a cache"),
    ("generation_tokens", "Tokens generated"),
)
_SPLIT = (
    ("prompt_tokens_by_source", "Prompt tokens by where their KV came from", "source", "local_compute"),
    ("prompt_tokens_by_source", "Prompt tokens by where their KV came from", "source", "local_cache_hit"),
    ("prompt_tokens_by_source", "Prompt tokens by where their KV came from", "source", "external_kv_transfer"),
    ("request_success", "Requests that ended, by how", "finished_reason", "length"),
    ("request_success", "Requests that ended, by how", "finished_reason", "abort"),
    ("request_success", "Requests that ended, by how", "finished_reason", "error"),
)
_OBSERVED: tuple[tuple[str, str, Sequence[float]], ...] = (  # buckets: those of lengths where none are given
    ("time_to_first_token_seconds", "From a request's arrival to its first token", _TTFT),
    ("inter_token_latency_seconds", "Between two tokens", _TOKEN),
    ("request_time_per_output_token_seconds", "Mean of an answer's gaps", _TOKEN),
    ("e2e_request_latency_seconds", "From arrival to the last token", _REQUEST),
    ("request_queue_time_seconds", "From arrival to the first admission", _REQUEST),
    ("request_prefill_time_seconds", "From the first admission to the first token", _REQUEST),
    ("request_inference_time_seconds", "From the first admission to the last token", _REQUEST),
    ("request_decode_time_seconds", "From first to last token", _REQUEST),
    (
        "iteration_tokens_total",
        "Tokens of a step that gave some: generated, and prompt tokens computed for first ones",
        _ITERATION,
    ),
    ("request_prompt_tokens", "Prompt tokens of a request", ()),
    ("request_generation_tokens", "Tokens of an answer", ()),
    ("request_max_num_generation_tokens", "Tokens of a request's longest answer", ()),
    ("request_params_max_tokens", "max_tokens as asked for", ()),
    ("request_params_n", "n as asked for", _N),
    ("request_prefill_kv_computed_tokens", "Prompt tokens computed", ()),
    ("request_num_preemptions", "Preemptions of a request", _PREEMPTIONS),
)
_GAUGES = (
    ("num_requests_running", "Answers in the batch", "running"),
    ("num_requests_waiting", "Answers that wait for a place in it", "waiting"),
    ("kv_cache_usage_perc", "Share of the KV blocks that requests hold, 0 to 1", "kv_usage"),
)
_TIERS = {"hit_tokens_host": "host", "hit_tokens_ssd": "disk", "hit_tokens_remote": "external_unspecified"}


def _sources(gauges: Mapping[str, float]) -> dict[str, float]:
    """Prompt tokens found, by vLLM's name of where. Between nodes content moves before it is looked up: never by p2p."""
    below = {source: gauges.get(name, 0.0) for name, source in _TIERS.items()}
    return {"device": gauges["hit_tokens"] - sum(below.values()), "p2p": 0.0, **below}


def _missed(gauges: Mapping[str, float]) -> float:
    """Prompt tokens that the device had not, where there is something below to ask for them."""
    return gauges["query_tokens"] - _sources(gauges)["device"] if any(name in gauges for name in _TIERS) else 0.0


_COUNTERS: tuple[tuple[str, str, Callable[[Mapping[str, float]], float]], ...] = (
    ("prefix_cache_queries", "Prompt tokens looked up", lambda gauges: gauges["query_tokens"]),
    ("prefix_cache_hits", "Of those, found on the device", lambda gauges: _sources(gauges)["device"]),
    ("external_prefix_cache_queries", "Prompt tokens looked up below the device", _missed),
    ("external_prefix_cache_hits", "Of those, found", lambda gauges: gauges["hit_tokens"] - _sources(gauges)["device"]),
    ("num_preemptions", "Times that an answer lost its blocks", lambda gauges: gauges["preemptions"]),
)
