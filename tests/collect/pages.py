"""A /metrics page of each kind of server, by the names that its source gives them, and a stub that counts what it answers.

Written for kvbench; the values are made up. The page of a real vLLM is in tests/data/metrics.
"""

from collections.abc import Iterable
from pathlib import Path

from kvbench.collect.exposition import Page, Reader
from kvbench.collect.fleet import Fleet
from kvbench.collect.servers import known
from tests.stub.stub import Reply, Seen, Stub, answer_json

DATA = Path(__file__).parent.parent / "data/metrics"
TEXT = (("Content-Type", "text/plain; version=0.0.4; charset=utf-8"),)


def text_of(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"


def read(text: str, names: frozenset[str] | None = known()) -> Page:
    page = Page()
    for _ in Reader(names).reading([text.encode()], page):
        pass
    return page


def take(fleet: Fleet, *texts: str, server: int = 0) -> Fleet:
    """Pages of one server, one after the other."""
    for text in texts:
        for _ in fleet.take(server, read(text)):
            pass
    return fleet


def joined(text: str) -> dict[str, float | None]:
    """What one page comes to over all of its engines."""
    return {reading.name: reading.value for reading in take(Fleet(["one"]), text).readings() if not reading.labels}


def vllm(
    engine: str = "0", *, usage: float = 0.0, queries: float = 0, hits: float = 0, finished: float = 0, prompt: float = 0,
    generated: float = 0, preempted: float = 0, more: str = "",
) -> str:  # fmt: skip
    """The lines of one engine of vLLM that matter most."""
    labels = f'{{engine="{engine}",model_name="m"{more}}}'
    ended = f'{{engine="{engine}",finished_reason="length",model_name="m"{more}}}'
    return text_of([
        f"vllm:kv_cache_usage_perc{labels} {usage}",
        f"vllm:num_requests_running{labels} 1.0",
        f"vllm:num_requests_waiting{labels} 0.0",
        f"vllm:num_preemptions_total{labels} {preempted}",
        f"vllm:prefix_cache_queries_total{labels} {queries}",
        f"vllm:prefix_cache_hits_total{labels} {hits}",
        f"vllm:prompt_tokens_total{labels} {prompt}",
        f"vllm:generation_tokens_total{labels} {generated}",
        f"vllm:request_success_total{ended} {finished}",
    ])  # fmt: skip


def page_reply(text: str) -> Reply:
    return Reply([(0, text.encode())], 200, TEXT, "length")


def counting(stub: Stub, seen: Seen, tokens: tuple[int, int], **plus: float) -> Reply:
    """The page of a server that has answered what this stub has; `plus`: what others had of it, by the words of `vllm`."""
    if seen.path != "/metrics":
        return answer_json({}, 404)
    ended = sum(1 for post in stub.posts if post.writes)
    ours = {"finished": ended, "prompt": ended * tokens[0], "generated": ended * tokens[1], "queries": ended * tokens[0]}
    return page_reply(vllm(**{name: ours.get(name, 0) + plus.get(name, 0) for name in {*ours, *plus}}))


SGLANG = text_of([
    'sglang:token_usage{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.28',
    'sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 7.0',
    'sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 2.0',
    'sglang:num_retracted_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 1.0',
    'sglang:num_retracted_requests_total{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 4.0',
    'sglang:cache_hit_rate{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.8',
    'sglang:max_total_num_tokens{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 50000.0',
    'sglang:cached_tokens_total{cache_source="device",model_name="m"} 600.0',
    'sglang:cached_tokens_total{cache_source="host",model_name="m"} 100.0',
    'sglang:prompt_tokens_total{model_name="m"} 1000.0',
    'sglang:generation_tokens_total{model_name="m"} 300.0',
    'sglang:num_requests_total{model_name="m"} 12.0',
    'sglang:num_aborted_requests_total{model_name="m"} 1.0',
])  # fmt: skip
TRTLLM = text_of([
    'trtllm_kv_cache_utilization{model_name="m"} 0.4',
    'trtllm_kv_cache_hit_rate{model_name="m"} 0.25',
    'trtllm_kv_cache_tokens_per_block{model_name="m"} 32.0',
    'trtllm_kv_cache_max_blocks{model_name="m"} 100.0',
    'trtllm_kv_cache_reused_blocks_total{model_name="m"} 10.0',
    'trtllm_kv_cache_missed_blocks_total{model_name="m"} 30.0',
    'trtllm_num_requests_running{model_name="m"} 3.0',
    'trtllm_num_requests_waiting{model_name="m"} 1.0',
    'trtllm_num_paused_requests{model_name="m"} 2.0',
    'trtllm_num_requests_completed_total{model_name="m"} 9.0',
    'trtllm_request_error_total{model_name="m"} 1.0',
])  # fmt: skip
LMDEPLOY = text_of([
    'lmdeploy:gpu_cache_usage_perc{engine="0",model_name="m"} 0.5',
    'lmdeploy:num_requests_running{engine="0",model_name="m"} 4.0',
    'lmdeploy:num_requests_waiting{engine="0",model_name="m"} 0.0',
    'lmdeploy:prefix_cache_hit_rate{engine="0",model_name="m"} 0.125',
    'lmdeploy:cached_tokens_total{engine="0",model_name="m"} 64.0',
])  # fmt: skip
TGI = text_of([
    "tgi_queue_size 3",
    "tgi_batch_current_size 5",
    "tgi_batch_current_max_tokens 4096",
    "# TYPE tgi_request_success counter",
    'tgi_request_success{method="generate"} 8',
    'tgi_request_success{method="generate_stream"} 4',
    "tgi_request_failure 1",
    "tgi_request_input_length_sum 800",
    "tgi_request_input_length_count 12",
    "tgi_request_generated_tokens_sum 240",
    "tgi_request_generated_tokens_count 12",
])  # fmt: skip
LLAMACPP = text_of([
    "# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.",
    "# TYPE llamacpp:prompt_tokens_total counter",
    "llamacpp:prompt_tokens_total 120",
    "llamacpp:tokens_predicted_total 60",
    "llamacpp:requests_processing 1",
    "llamacpp:requests_deferred 2",
])  # fmt: skip
DYNAMO = text_of([
    'dynamo_frontend_requests_total{endpoint="chat_completions",model="m",request_type="stream",status="success"} 20',
    'dynamo_frontend_requests_total{endpoint="chat_completions",model="m",request_type="stream",status="error"} 1',
    'dynamo_frontend_inflight_requests{model="m"} 6',
    'dynamo_frontend_queued_requests{model="m"} 2',
    'dynamo_frontend_cached_tokens_sum{model="m"} 300',
    'dynamo_frontend_input_sequence_tokens_sum{model="m"} 1200',
    'dynamo_frontend_output_sequence_tokens_sum{model="m"} 400',
    'dynamo_component_kvstats_active_blocks{worker_id="1"} 30',
    'dynamo_component_kvstats_total_blocks{worker_id="1"} 100',
    'dynamo_component_kvstats_active_blocks{worker_id="2"} 50',
    'dynamo_component_kvstats_total_blocks{worker_id="2"} 100',
])  # fmt: skip
_GPU = 'gpu="{0}",UUID="GPU-{0}",device="nvidia{0}",modelName="NVIDIA H200",Hostname="h",pod="{1}"'
DCGM = text_of(
    line
    for gpu, used, watts in ((0, 60000, 500.5), (1, 20000, 300.5))
    for line in (
        f"DCGM_FI_DEV_FB_USED{{{_GPU.format(gpu, 'a')}}} {used}",
        f"DCGM_FI_DEV_FB_FREE{{{_GPU.format(gpu, 'a')}}} {79000 - used}",
        f"DCGM_FI_DEV_FB_RESERVED{{{_GPU.format(gpu, 'a')}}} 1000",
        f"DCGM_FI_DEV_GPU_UTIL{{{_GPU.format(gpu, 'a')}}} {50 + 50 * gpu}",
        f"DCGM_FI_DEV_POWER_USAGE{{{_GPU.format(gpu, 'a')}}} {watts}",
        f"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{_GPU.format(gpu, 'a')}}} 2000000",
        f"DCGM_FI_DEV_GPU_TEMP{{{_GPU.format(gpu, 'a')}}} {60 + gpu}",
        f"DCGM_FI_DEV_SM_CLOCK{{{_GPU.format(gpu, 'a')}}} 1980",
    )
)
AGENT = text_of([
    'kvbench_gpu_memory{gpu="0",uuid="GPU-0"} 0.75',
    'kvbench_gpu_power_w{gpu="0",uuid="GPU-0"} 400.0',
    'kvbench_gpu_energy_j_total{gpu="0",uuid="GPU-0"} 1234.5',
])  # fmt: skip
