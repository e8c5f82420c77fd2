"""One meaning, many names: what each kind of server calls a number, and how the numbers of several engines make one.

Names are those on the page, newest first, as the servers' sources and recorded pages have them (vLLM 0.8 to 0.33, SGLang 0.5,
TensorRT-LLM 1.3, LMDeploy 0.14, TGI 3, llama.cpp, Dynamo, DCGM-exporter 4).
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

Kind = Literal["gauge", "counter", "histogram"]


class Meaning(NamedTuple):
    """join: how the engines' values make one: counts are added up; of shares the mean is taken, the fullest's beside it."""

    kind: Kind
    unit: str  # s, share, W, J, C, Hz, tokens, or "" for a plain count
    join: Literal["sum", "mean", "max"]
    what: str
    instant: bool = False  # of a moment or of one batch, whatever its name says: never averaged


class Way(NamedTuple):
    """How a page gives one engine's value: the sum of `add` / the sum of `over` x `times` x `scale`, over series for which `only`
    holds. `times` is a gauge."""

    add: tuple[str, ...]
    over: tuple[str, ...] = ()
    times: str = ""
    scale: float = 1.0
    only: tuple[str, tuple[str, ...]] | None = None  # a label, and the values of it that count

    def names(self) -> tuple[str, ...]:
        return (*self.add, *self.over, *((self.times,) if self.times else ()))


def by(*names: str, scale: float = 1.0, only: tuple[str, tuple[str, ...]] | None = None) -> tuple[Way, ...]:
    """The same number under one name or another: the first that a page has counts."""
    return tuple(Way((name,), scale=scale, only=only) for name in names)


def _times(prefix: str, names: Mapping[str, str]) -> dict[str, tuple[Way, ...]]:
    return {meaning: by(prefix + name) for meaning, name in names.items()}


MEANINGS: dict[str, Meaning] = {
    "kv_usage": Meaning("gauge", "share", "mean", "KV blocks (or tokens) in use / those there are"),
    "running": Meaning("gauge", "", "sum", "requests in the batch"),
    "waiting": Meaning("gauge", "", "sum", "requests in the queue"),
    "preemptions_total": Meaning("counter", "", "sum", "times a running request lost its KV (SGLang: retracted)"),
    "hit_tokens_total": Meaning("counter", "tokens", "sum", "prompt tokens found in the cache"),
    "query_tokens_total": Meaning("counter", "tokens", "sum", "prompt tokens looked up in it"),
    "prompt_tokens_total": Meaning("counter", "tokens", "sum", "prompt tokens taken in"),
    "generation_tokens_total": Meaning("counter", "tokens", "sum", "tokens generated"),
    "finished_total": Meaning("counter", "", "sum", "requests that ended"),
    "refused_total": Meaning("counter", "", "sum", "requests turned away or given up"),
    "evicted_tokens_total": Meaning("counter", "tokens", "sum", "cached tokens that were evicted"),
    "external_hit_tokens_total": Meaning("counter", "tokens", "sum", "prompt tokens found in a cache outside of the device"),
    "external_query_tokens_total": Meaning("counter", "tokens", "sum", "prompt tokens looked up in it"),
    "paused": Meaning("gauge", "", "sum", "requests that lost their place and wait for it", instant=True),
    "hit_rate_now": Meaning("gauge", "share", "mean", "hit rate of the server's last batch, or of all its life", instant=True),
    "server_ttft": Meaning("histogram", "s", "sum", "arrival to first token, as the server saw it"),
    "server_itl": Meaning("histogram", "s", "sum", "between two tokens"),
    "server_tpot": Meaning("histogram", "s", "sum", "mean of an answer's gaps"),
    "server_e2e": Meaning("histogram", "s", "sum", "arrival to last token"),
    "server_queue": Meaning("histogram", "s", "sum", "arrival to admission"),
    "server_prefill": Meaning("histogram", "s", "sum", "admission to first token"),
    "server_decode": Meaning("histogram", "s", "sum", "first to last token"),
    "server_inference": Meaning("histogram", "s", "sum", "admission to last token"),
    "request_preemptions": Meaning("histogram", "", "sum", "preemptions of a request"),
    "request_prompt_tokens": Meaning("histogram", "tokens", "sum", "prompt tokens of a request"),
    "request_generation_tokens": Meaning("histogram", "tokens", "sum", "tokens of an answer"),
    "step_tokens": Meaning("histogram", "tokens", "sum", "tokens computed in a step"),
    "block_lifetime": Meaning("histogram", "s", "sum", "from a block's allocation to its eviction"),
    "block_idle_before_evict": Meaning("histogram", "s", "sum", "from a block's last use to its eviction"),
    "block_reuse_gap": Meaning("histogram", "s", "sum", "between two uses of a block"),
    "gpu_memory": Meaning("gauge", "share", "max", "device memory in use / device memory"),
    "gpu_utilization": Meaning("gauge", "share", "mean", "share of the time in which a kernel ran"),
    "gpu_power_w": Meaning("gauge", "W", "sum", "power drawn"),
    "gpu_energy_j_total": Meaning("counter", "J", "sum", "energy drawn"),
    "gpu_temperature_c": Meaning("gauge", "C", "max", "temperature of the hottest"),
    "gpu_sm_clock_hz": Meaning("gauge", "Hz", "mean", "clock of the multiprocessors"),
}

EXPECTED = (
    "kv_usage", "running", "waiting", "preemptions_total", "hit_tokens_total", "query_tokens_total", "prompt_tokens_total",
    "generation_tokens_total", "finished_total",
)  # fmt: skip
"""What every inference server is asked for: null, and said so, where it has none."""

_LATENCIES = {
    "server_ttft": "time_to_first_token_seconds",
    "server_itl": "inter_token_latency_seconds",
    "server_e2e": "e2e_request_latency_seconds",
}
_VLLM = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "preemptions_total": "num_preemptions_total",
    "prompt_tokens_total": "prompt_tokens_total",
    "generation_tokens_total": "generation_tokens_total",
    "finished_total": "request_success_total",
    "refused_total": "admission_rejections_total",
    "external_hit_tokens_total": "external_prefix_cache_hits_total",
    "external_query_tokens_total": "external_prefix_cache_queries_total",
    **_LATENCIES,
    "server_queue": "request_queue_time_seconds",
    "server_prefill": "request_prefill_time_seconds",
    "server_decode": "request_decode_time_seconds",
    "server_inference": "request_inference_time_seconds",
    "request_preemptions": "request_num_preemptions",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generation_tokens",
    "step_tokens": "iteration_tokens_total",
    "block_lifetime": "kv_block_lifetime_seconds",
    "block_idle_before_evict": "kv_block_idle_before_evict_seconds",
    "block_reuse_gap": "kv_block_reuse_gap_seconds",
}
_GPU = [name for name in MEANINGS if name.startswith("gpu_")]

SERVERS: dict[str, dict[str, tuple[Way, ...]]] = {
    "vllm": {
        "kv_usage": by("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "hit_tokens_total": by("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        "query_tokens_total": by("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        "server_tpot": by("vllm:request_time_per_output_token_seconds", "vllm:time_per_output_token_seconds"),
        **_times("vllm:", _VLLM),
    },
    "sglang": {
        "kv_usage": by("sglang:token_usage", "sglang:full_token_usage"),
        "running": by("sglang:num_running_reqs"),
        "waiting": by("sglang:num_queue_reqs"),
        "preemptions_total": by("sglang:num_retracted_requests_total"),
        "paused": by("sglang:num_retracted_reqs"),
        "hit_tokens_total": by("sglang:cached_tokens_total"),
        "query_tokens_total": by("sglang:prompt_tokens_total"),
        "prompt_tokens_total": by("sglang:prompt_tokens_total"),
        "generation_tokens_total": by("sglang:generation_tokens_total"),
        "finished_total": by("sglang:num_requests_total", "sglang:e2e_request_latency_seconds_count"),
        "refused_total": by("sglang:num_aborted_requests_total"),
        "evicted_tokens_total": by("sglang:evicted_tokens_total"),
        "hit_rate_now": by("sglang:cache_hit_rate"),
        "server_tpot": by("sglang:request_time_per_output_token_seconds", "sglang:time_per_output_token_seconds"),
        "server_queue": by("sglang:queue_time_seconds"),
        **_times("sglang:", _LATENCIES),
    },
    "trtllm": {
        "kv_usage": by("trtllm_kv_cache_utilization"),
        "running": by("trtllm_num_requests_running"),
        "waiting": by("trtllm_num_requests_waiting"),
        "paused": by("trtllm_num_paused_requests"),
        "hit_tokens_total": (
            *by("trtllm_prompt_cached_tokens_total"),
            Way(("trtllm_kv_cache_reused_blocks_total",), times="trtllm_kv_cache_tokens_per_block"),
        ),
        "query_tokens_total": (
            Way(("trtllm_prompt_tokens_total",)),
            Way(("trtllm_kv_cache_reused_blocks_total", "trtllm_kv_cache_missed_blocks_total"),
                times="trtllm_kv_cache_tokens_per_block"),
        ),
        "prompt_tokens_total": by("trtllm_prompt_tokens_total"),
        "generation_tokens_total": by("trtllm_generation_tokens_total"),
        "finished_total": by("trtllm_num_requests_completed_total", "trtllm_request_success_total"),
        "refused_total": by("trtllm_request_error_total"),
        "hit_rate_now": by("trtllm_kv_cache_hit_rate", "trtllm_kv_cache_iter_reuse_rate"),
        "server_tpot": by("trtllm_time_per_output_token_seconds"),
        "server_queue": by("trtllm_request_queue_time_seconds"),
        "server_ttft": by("trtllm_time_to_first_token_seconds"),
        "server_e2e": by("trtllm_e2e_request_latency_seconds"),
    },
    "lmdeploy": {
        "kv_usage": by("lmdeploy:gpu_cache_usage_perc"),
        "running": by("lmdeploy:num_requests_running"),
        "waiting": by("lmdeploy:num_requests_waiting"),
        "hit_tokens_total": by("lmdeploy:cached_tokens_total"),
        "prompt_tokens_total": by("lmdeploy:prompt_tokens_total"),
        "query_tokens_total": by("lmdeploy:prompt_tokens_total"),
        "generation_tokens_total": by("lmdeploy:generation_tokens_total"),
        "finished_total": by("lmdeploy:request_success_total", "lmdeploy:request_inference_time_seconds_count"),
        "hit_rate_now": by("lmdeploy:prefix_cache_hit_rate"),
        "server_ttft": by("lmdeploy:time_to_first_token_seconds"),
        "server_itl": by("lmdeploy:iter_token_latency"),
        "server_tpot": by("lmdeploy:time_per_output_token_seconds"),
        "server_queue": by("lmdeploy:request_queue_time_seconds"),
        "server_prefill": by("lmdeploy:request_prefill_time_seconds"),
        "server_decode": by("lmdeploy:request_decode_time_seconds"),
        "server_inference": by("lmdeploy:request_inference_time_seconds"),
    },
    "tgi": {
        "running": by("tgi_batch_current_size"),
        "waiting": by("tgi_queue_size"),
        "prompt_tokens_total": by("tgi_request_input_length_sum"),
        "generation_tokens_total": by("tgi_request_generated_tokens_sum"),
        "finished_total": by("tgi_request_success_total", "tgi_request_success"),
        "refused_total": by("tgi_request_failure_total", "tgi_request_failure"),
        "server_e2e": by("tgi_request_duration"),
        "server_queue": by("tgi_request_queue_duration"),
        "server_inference": by("tgi_request_inference_duration"),
        "server_tpot": by("tgi_request_mean_time_per_token_duration"),
        "request_prompt_tokens": by("tgi_request_input_length"),
        "request_generation_tokens": by("tgi_request_generated_tokens"),
    },
    "llamacpp": {
        "kv_usage": by("llamacpp:kv_cache_usage_ratio"),
        "running": by("llamacpp:requests_processing"),
        "waiting": by("llamacpp:requests_deferred"),
        "prompt_tokens_total": by("llamacpp:prompt_tokens_total"),
        "generation_tokens_total": by("llamacpp:tokens_predicted_total"),
    },
    "dynamo": {
        "kv_usage": (
            *by("dynamo_component_gpu_cache_usage_percent", "dynamo_component_kvstats_gpu_cache_usage_percent"),
            Way(("dynamo_component_kvstats_active_blocks",), over=("dynamo_component_kvstats_total_blocks",)),
        ),
        "running": by("dynamo_frontend_inflight_requests", "dynamo_component_inflight_requests"),
        "waiting": by("dynamo_frontend_queued_requests"),
        "hit_tokens_total": by("dynamo_frontend_cached_tokens_sum"),
        "query_tokens_total": by("dynamo_frontend_input_sequence_tokens_sum"),
        "prompt_tokens_total": by("dynamo_frontend_input_sequence_tokens_sum"),
        "generation_tokens_total": by("dynamo_frontend_output_sequence_tokens_sum"),
        "finished_total": by("dynamo_frontend_requests_total"),
        "hit_rate_now": by("dynamo_frontend_kv_hit_rate", "dynamo_component_kvstats_gpu_prefix_cache_hit_rate"),
        "server_ttft": by("dynamo_frontend_time_to_first_token_seconds"),
        "server_itl": by("dynamo_frontend_inter_token_latency_seconds"),
        "server_e2e": by("dynamo_frontend_request_duration_seconds"),
    },
    "dcgm": {
        "gpu_memory": (
            Way(("DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_RESERVED"),
                over=("DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_FB_RESERVED")),
            Way(("DCGM_FI_DEV_FB_USED",), over=("DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE")),
        ),
        "gpu_utilization": by("DCGM_FI_DEV_GPU_UTIL", scale=0.01),
        "gpu_power_w": by("DCGM_FI_DEV_POWER_USAGE"),
        "gpu_energy_j_total": by("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", scale=1e-3),
        "gpu_temperature_c": by("DCGM_FI_DEV_GPU_TEMP"),
        "gpu_sm_clock_hz": by("DCGM_FI_DEV_SM_CLOCK", scale=1e6),
    },
    "kvbench-agent": {name: by(f"kvbench_{name}", name) for name in _GPU},
}  # fmt: skip
"""Where a page shows several servers (an engine and Dynamo around it) the first of this order that has a meaning gives it."""

PARTS = frozenset({
    "finished_reason", "reason", "source", "cache_source", "status", "method", "handler", "error_type", "request_type",
    "endpoint", "quantile",
})  # fmt: skip
"""Labels that divide one engine's number. All others tell engines apart, but for pid: of several processes one is alive."""

DEVICE = {"gpu": "gpu", "UUID": "uuid", "uuid": "uuid", "GPU_I_ID": "mig", "Hostname": "host"}
"""Labels that tell devices apart, and what they are called here. Others come and go with what runs on a device."""


def known() -> frozenset[str]:
    """Every sample name on a page that has a meaning."""
    found = set(CONFIG)
    for ways in (ways for meanings in SERVERS.values() for ways in meanings.items()):
        for name in (name for way in ways[1] for name in way.names()):
            histogram = MEANINGS[ways[0]].kind == "histogram"
            found |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"} if histogram else {name}
    return frozenset(found)


CONFIG: dict[str, str] = {
    "vllm:cache_config_info": "",  # its labels are the settings
    "sglang:max_total_num_tokens": "kv_cache_size_tokens",
    "trtllm_kv_cache_max_blocks": "num_gpu_blocks",
    "trtllm_kv_cache_tokens_per_block": "block_size",
    "dynamo_frontend_model_total_kv_blocks": "num_gpu_blocks",
    "dynamo_frontend_model_kv_cache_block_size": "block_size",
    "dynamo_component_total_blocks": "num_gpu_blocks",
    "dynamo_component_kvstats_total_blocks": "num_gpu_blocks",
    "tgi_batch_current_max_tokens": "max_batch_tokens",
}
"""Names whose value is a setting of the server, and what it is called in the manifest."""
