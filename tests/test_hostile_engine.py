"""Inputs nobody means, for what the engine brought: configs, answers over HTTP, tiers and their files, groups of layers."""

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from kvbench.cli import app
from kvbench.core import CacheAccess
from kvbench.engine.disk import Disk
from kvbench.engine.groups import LayersSpec, sizes
from kvbench.metrics.kv import fold
from kvbench.plan.config_json import read
from kvbench.profile import load_engine, load_hardware, load_model
from kvbench.scenario import ScenarioError
from tests.serve.test_wire import SIM, opened, post, said, served
from tests.whole import ROOT, simulated

CONFIG: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 1024, "vocab_size": 1000, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


def config(folder: Path, **keys: Any) -> Path:
    """A config.json; a key that is None is left out."""
    file = folder / "config.json"
    file.write_text(json.dumps({key: value for key, value in {**CONFIG, **keys}.items() if value is not None}))
    return file


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_a_config_nested_beyond_reason_is_not_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="is not JSON"):
        read(tmp_path / "config.json")


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", 2**40), ("num_hidden_layers", 10**30), ("vocab_size", 10**30)])
def test_numbers_that_no_model_has_are_refused_at_once(key: str, value: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{key} is .*no model's"):
        read(config(tmp_path, **{key: value}))


def test_a_mark_at_a_configs_start_is_no_fault(tmp_path: Path) -> None:
    file = config(tmp_path)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert read(file)[0].layers == 4


def test_a_null_head_dim_is_a_missing_one(tmp_path: Path) -> None:
    file = config(tmp_path, hidden_size=500)
    file.write_text(file.read_text().replace("{", '{"head_dim": null, ', 1))
    with pytest.raises(ValueError, match="head_dim is missing"):
        read(file)


@pytest.mark.parametrize(
    ("keys", "kv_heads"),
    [
        (
            {"model_type": "falcon", "num_kv_heads": 8, "multi_query": True},
            1,
        ),  # as in falcon-7b's file: the 71 there are not kept
        ({"model_type": "falcon", "num_kv_heads": 4, "multi_query": True, "new_decoder_architecture": True}, 4),
        ({"model_type": "gpt_bigcode", "multi_query": True}, 1),
    ],
)
def test_multi_query_models_keep_one_head(keys: dict[str, Any], kv_heads: int, tmp_path: Path) -> None:
    assert read(config(tmp_path, num_key_value_heads=None, **keys))[0].kv_heads == kv_heads


@pytest.mark.parametrize(("kind", "tied"), [("gemma", True), ("opt", True), ("falcon", True), ("llama", False)])
def test_a_class_that_ties_embeddings_by_default_has_them_tied(kind: str, tied: bool, tmp_path: Path) -> None:
    assert read(config(tmp_path, model_type=kind, tie_word_embeddings=None))[0].tied_embeddings is tied


def test_qwens_window_is_not_used_unless_they_say_so(tmp_path: Path) -> None:
    assert read(config(tmp_path, model_type="qwen2", sliding_window=128))[0].kinds == ()
    used = {"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True}
    assert read(config(tmp_path, **used))[0].kinds == ()  # Qwen2Config: the first max_window_layers, 28, have none
    kinds = read(config(tmp_path, **used, max_window_layers=0))[0].kinds
    assert [(part.kind, part.layers) for part in kinds] == [("window", 4)]


def test_dense_layers_and_experts_by_other_names(tmp_path: Path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    found = read(config(tmp_path, model_type="qwen3_moe", mlp_only_layers=[0, 2], **experts))[0].experts
    assert found is not None
    assert found.dense_layers == 2
    ernie = {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    }
    found = read(config(tmp_path, model_type="ernie4_5_moe", **ernie))[0].experts
    assert found is not None
    assert (found.count, found.active, found.shared, found.dense_layers) == (8, 2, 2, 1)


@pytest.mark.parametrize("key", ["attn_layer_indices", "block_types", "mamba_d_state", "full_attn_idxs", "attn_type_list"])
def test_layers_that_keep_no_kv_are_not_counted_as_attention(key: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no size can be given"):
        read(config(tmp_path, **{key: [1]}))


def test_a_setting_that_is_no_yaml_is_said() -> None:
    ended = CliRunner().invoke(app, ["size", "llama-3.1-8b", "h100", "--set", "block=[1"])
    assert ended.exit_code == 2
    assert "--set block=[1" in ended.output


def test_a_disk_that_is_full_is_said_and_not_traced() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "kvbench", "size", "llama-3.1-8b", "h100"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: what was to be printed")


def exchanged(raw: bytes, answers: int) -> tuple[list[tuple[int, bytes]], str]:
    """What a connection is answered, and the page of metrics afterwards."""
    found: list[tuple[int, bytes]] = []
    page: list[bytes] = []

    async def work(_: Any, port: int) -> None:
        reader, writer = await opened(port)
        writer.write(raw)
        found.extend([await said(reader) for _ in range(answers)])
        reader, writer = await opened(port)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        page.append((await said(reader))[1])

    served(work)
    return found, page[0].decode()


def test_answers_are_counted_by_the_status_that_they_had() -> None:
    """One that waits for the engine had, when it was counted, the status of the answer before it, or none."""
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    raw = post("/v1/chat/completions", chat) + post("/tokenize", {}) + post("/v1/chat/completions", chat)
    answers, page = exchanged(raw, 3)
    assert [status for status, _ in answers] == [200, 400, 200]
    counted = [line.partition("{")[2] for line in page.splitlines() if line.startswith("http_requests_total")]
    assert 'handler="/v1/chat/completions",method="POST",status="2xx"} 2.0' in counted
    assert not [line for line in counted if "0xx" in line or ("chat" in line and "4xx" in line)]


def test_a_head_request_gets_no_body_and_a_whole_url_is_a_path() -> None:
    """A body after HEAD would be taken for the next answer."""

    async def work(_: Any, port: int) -> None:
        reader, writer = await opened(port)
        writer.write(b"HEAD /nope HTTP/1.1\r\n\r\nGET http://there/%68ealth?x=1 HTTP/1.1\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404")
        assert (await said(reader))[0] == 200

    served(work)


def test_the_longest_answers_are_not_made_up_before_they_are_needed() -> None:
    """128 answers of 40,000 tokens: seconds in which nobody else was served, and all of it for a request that was refused."""
    begun = time.process_time()
    answers, _ = exchanged(post("/v1/completions", {"prompt": [5] * 100, "n": 128, "max_tokens": 100_000}), 1)
    assert answers[0][0] == 400
    assert time.process_time() - begun < 1.5


TEXT = f"""
name: hostile
seed: 3
target: {json.dumps({**SIM, "cache_log": "100%", "settings": {"blocks": 150}})[:-1]}, TARGET}}
workload:
  arrivals: {{shape: poisson, rate: 4/s}}
  prompt: {{dist: uniform, min: 20, max: 700}}
  output: {{dist: uniform, min: 5, max: 100, force: true}}
  prefixes: {{groups: 6, tokens: 256, share: 70%}}
  nonce: off
phases: {{steady: {{for: 15s}}, drain: {{for: 60s}}}}
"""


def test_hits_in_tiers_are_hits_of_the_log(tmp_path: Path) -> None:
    """A block that comes up was looked up and found: tokens cached by the records are the log's hits, and the summary's."""
    whole = simulated(TEXT.replace("TARGET", '"tiers": {"host": {"capacity": "300MiB"}, "ssd": {"capacity": "4GiB"}}'), tmp_path)
    ops = Counter((line["op"], line.get("tier", "gpu")) for line in whole.lines("cache.jsonl") if not line.get("again"))
    assert ops["hit", "host"] > 0
    assert ops["hit", "ssd"] > 0
    hits = sum(count for (op, _), count in ops.items() if op == "hit")
    assert hits * 16 == sum(record.cached or 0 for record in whole.records)
    found = fold((msgspec.convert(line, CacheAccess) for line in whole.lines("cache.jsonl")), 60.0, 1.0, None)
    assert (found["hits"], found["lookups"]) == (hits, hits + ops["miss", "gpu"])


def test_a_hit_below_does_not_touch_the_devices_block() -> None:
    lines = [
        CacheAccess(t=0.0, op="alloc", key="a", tokens=16), CacheAccess(t=1.0, op="free", key="a"),
        CacheAccess(t=5.0, op="hit", key="a", tier="host", job=1), CacheAccess(t=7.0, op="evict", key="a"),
    ]  # fmt: skip
    found = fold(lines, 10.0, 1.0, 160.0)
    assert (found["hits"], found["lookups"]) == (1, 1)
    assert found["idle_before_evict"]["p50"] == 6.0


def test_files_of_one_model_are_not_another_ones(tmp_path: Path) -> None:
    """Keys name content: under another model the same keys would be found, and nothing that they hold would be right."""
    tiers = f'"tiers": {{"ssd": {{"capacity": "60MB", "real": "{tmp_path}/kv"}}}}'
    text = TEXT.replace("TARGET", tiers).replace("llama-3.1-8b", "smollm2-135m").replace("15s", "4s")
    simulated(text, tmp_path)
    assert list((tmp_path / "kv").glob("segment-*"))
    simulated(text, tmp_path)  # the same again is welcome
    for change in (("smollm2-135m", "qwen3-0.6b"), ('"tiers"', '"block": 32, "tiers"')):
        with pytest.raises(ScenarioError, match="holds blocks of smollm2-135m, 16 tokens a block"):
            simulated(text.replace(*change), tmp_path)


def test_files_of_others_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    for name in ("segment-foo.kv", "segment-.kv", "segment--5.kv", "segment-99999999999999999999.kv"):
        (tmp_path / name).write_text("mine")
    disk = Disk(tmp_path, 1e6, lambda: 0)
    assert disk.write(0, 7, 100.0)
    disk.close()
    assert (tmp_path / "segment-foo.kv").read_text() == "mine"
    again = Disk(tmp_path, 1e6, lambda: 0)
    again.close()
    assert again.recovered == 1


def test_a_directory_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"tiers\.ssd\.real: is empty"):
        simulated(TEXT.replace("TARGET", '"tiers": {"ssd": {"capacity": "6MB", "real": ""}}'), tmp_path)


@pytest.mark.parametrize("layers", [["1-99999999999999999999"], ["1-16", "16-32"], ["1-15", "17-32"], ["32-1"], ["1+", "33+"]])
def test_layers_that_are_not_the_models_are_refused_at_once(layers: list[str]) -> None:
    spec = LayersSpec.model_validate({"groups": [{"layers": one} for one in layers]})
    with pytest.raises(ValueError, match="is in one group, in order"):
        sizes(spec, load_model("llama-3.1-8b"), load_hardware("h100"), load_engine("vllm"))


def test_the_knob_on_a_model_of_windows_is_faulted_at_its_own_key(tmp_path: Path) -> None:
    text = TEXT.replace("TARGET", '"cache_profile_aggressiveness": 1').replace("llama-3.1-8b", "gemma-3-4b")
    with pytest.raises(ScenarioError, match=r"target\.cache_profile_aggressiveness: gemma-3-4b"):
        simulated(text, tmp_path)
