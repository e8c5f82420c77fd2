"""How a server is set up, as far as it says: blocks, their size, tokens of KV cache, context, version. For the manifest."""

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from kvbench.collect.exposition import Page
from kvbench.collect.scrape import LONG, UNANSWERED, Headers, parts
from kvbench.collect.series import LARGEST
from kvbench.collect.servers import CONFIG

PATIENCE = aiohttp.ClientTimeout(total=2)  # settings are nice to have: the run does not wait long for them
_INFO = "vllm:cache_config_info"
_KEPT = (
    "block_size", "num_gpu_blocks", "num_cpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency", "sliding_window",
    "gpu_memory_utilization", "enable_prefix_caching", "prefix_caching_hash_algo", "cache_dtype", "swap_space",
    "kv_offloading_size",
)  # fmt: skip
_ASKED: dict[str, tuple[str, tuple[str, ...]]] = {  # what a kind of server can be asked besides, and what is kept of its words
    "sglang": ("/get_server_info", (
        "version", "max_total_num_tokens", "page_size", "context_length", "mem_fraction_static", "max_running_requests",
        "dp_size", "tp_size", "kv_cache_dtype", "schedule_policy", "chunked_prefill_size", "disable_radix_cache",
    )),
    "llamacpp": ("/props", ("total_slots", "build_info", "n_ctx")),
    "tgi": ("/info", ("version", "max_total_tokens", "max_input_tokens", "max_batch_total_tokens", "max_concurrent_requests")),
}  # fmt: skip


def configured(page: Page) -> list[dict[str, Any]]:
    """Settings that a page shows, one row per engine: capacity_tokens is of that engine, and `capacity` says how it is known."""
    rows: list[dict[str, Any]] = []
    for row in page.rows.get(_INFO, ()):
        labels = dict(row.labels)
        rows.append({"engine": labels.get("engine"), **{key: _number(labels[key]) for key in _KEPT if key in labels}})
    others: dict[str, dict[str, Any]] = {}
    for name, key in CONFIG.items():
        for row in page.rows.get(name, ()) if key else ():
            labels = dict(row.labels)
            if not abs(row.value) < LARGEST:
                continue
            engine = ",".join(labels[each] for each in ("engine", "dp_rank", "tp_rank", "worker_id") if each in labels)
            others.setdefault(engine, {"engine": engine or None}).setdefault(key, row.value)
    return [row | _capacity(row) for row in (*rows, *others.values())]


def _capacity(row: Mapping[str, Any]) -> dict[str, Any]:
    told, blocks, size = (row.get(key) for key in ("kv_cache_size_tokens", "num_gpu_blocks", "block_size"))
    if _positive(told):
        return {"capacity_tokens": told, "capacity": "told by the server"}
    if _positive(blocks) and _positive(size):
        return {"capacity_tokens": blocks * size, "capacity": "blocks x block size: uniform layout assumed"}  # type: ignore[operator]
    return {"capacity_tokens": None, "capacity": "not exposed"}


async def asked(session: aiohttp.ClientSession, base: str, headers: Headers, kinds: set[str]) -> dict[str, Any]:
    """What a server of a known kind says when it is asked: settings that are on our list, for they lie beside secrets."""
    found: dict[str, Any] = {}
    for kind in sorted(kinds & _ASKED.keys()):
        path, keys = _ASKED[kind]
        try:
            async with session.get(base + path, allow_redirects=False, headers=headers, timeout=PATIENCE) as answer:
                said = json.loads(b"".join(await parts(answer, LONG))) if answer.status == 200 else None
        except (*UNANSWERED, ValueError, RecursionError):
            continue
        if isinstance(said, dict):
            flat = {**said, **(said.get("default_generation_settings") or {})} if kind == "llamacpp" else said
            found |= {key: flat[key] for key in keys if isinstance(flat.get(key), (str, int, float, bool))}
    return found


def _number(text: str) -> Any:
    """A label's value as a number or a truth, where it is one."""
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    try:
        number = float(text)
    except ValueError:
        return text
    if not abs(number) < LARGEST:
        return text
    return int(number) if number.is_integer() and "." not in text else number


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
