"""`kvbench serve` over its real socket: a plain OpenAI client, the harness itself, and what the page of metrics says of both."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from kvbench.cli import app
from kvbench.cli.serve import _described
from kvbench.compose import build_machine
from kvbench.endpoint import Sim
from tests.whole import ROOT

SPEED = "20x"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    command = [sys.executable, "-m", "kvbench", "serve", "--port", "0", "--speed", SPEED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert found, line
            yield found.group(0)
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made


def page(server: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{server}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_a_chat_and_its_next_turn_find_what_went_before(client: openai.OpenAI) -> None:
    question = {"role": "user", "content": "one two three four " * 40}
    first = client.chat.completions.create(model="llama-3.1-8b", messages=[question], max_tokens=64)
    assert first.usage.completion_tokens == 64
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    again = {"role": "user", "content": "and five?"}
    second = client.chat.completions.create(model="llama-3.1-8b", messages=[question, answer, again], max_tokens=4)
    whole = first.usage.total_tokens - 1  # the last token of an answer is sampled and never cached
    assert (
        second.usage.prompt_tokens_details.cached_tokens >= whole // 16 * 16 - 16
    )  # less a block where a template's tokens differ
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens


def test_a_stream_has_every_token_and_its_usage(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="llama-3.1-8b", prompt="hello", max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[-1].usage.completion_tokens == 12
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert sum(bool(chunk.choices and chunk.choices[0].text) for chunk in chunks) <= 12


def test_errors_are_the_servers_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="hello", max_tokens=2)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 131072"):
        client.completions.create(model="llama-3.1-8b", prompt=[5] * 131_073, max_tokens=2)


def test_the_harness_and_the_page_count_the_same(server: str, tmp_path: Path) -> None:
    before = page(server)
    text = """
name: served
seed: 2
target: {kind: http, url: URL, api: chat, tokenizer: server}
workload:
  arrivals: {shape: constant, rate: 20/s}
  prompt: {dist: uniform, min: 64, max: 200}
  output: {dist: fixed, value: 16, force: true}
  prefixes: {groups: 2, zipf: 1.0, tokens: 96, share: 50%}
phases: {steady: {for: 2s}, drain: {for: 10s}}
""".replace("URL", server).replace("verdict: {}\n", "")
    path = tmp_path / "served.yaml"
    path.write_text(text)
    command = [sys.executable, "-m", "kvbench", "run", str(path), "--out", str(tmp_path), "--quiet"]
    subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True)
    summary = json.loads(next(tmp_path.glob("served-*/summary.json")).read_text())
    rows = [json.loads(line) for line in next(tmp_path.glob("served-*/requests.jsonl")).read_text().splitlines()]
    ok = [row for row in rows if row["outcome"] == "ok"]
    assert len(ok) == 40 == summary["accounting"]["total"]["ok"]
    after = page(server)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["vllm:prompt_tokens_total"] == sum(row["n_in"] for row in ok)
    assert grown["vllm:generation_tokens_total"] == sum(row["n_out"] for row in ok) == 40 * 16
    assert grown["vllm:prefix_cache_hits_total"] == sum(row["cached"] for row in ok) > 0
    assert grown["vllm:prefix_cache_queries_total"] == sum(row["n_in"] for row in ok)


def test_a_client_that_leaves_frees_its_blocks(server: str) -> None:
    host, port = server.removeprefix("http://").split(":")
    body = b'{"model":"llama-3.1-8b","prompt":"long","max_tokens":4000,"stream":true}'
    with socket.create_connection((host, int(port)), timeout=10) as talk:
        talk.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        talk.recv(100)
    for _ in range(100):
        found = page(server)
        if not found["vllm:num_requests_running"] and not found["vllm:kv_cache_usage_perc"]:
            break
        time.sleep(0.02)
    assert found["vllm:num_requests_running"] == found["vllm:kv_cache_usage_perc"] == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--set", "blok=3"], "blok"),
        (["--model", "llama-9"], "unknown profile"),
        (["--speed", "fast"], "not a factor"),
        (["--kv-replay", "tcp://127.0.0.1:1"], "--kv-events"),
        (["--hardware", "l4", "--model", "llama-3.1-70b"], "does not fit"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(options: list[str], said: str) -> None:
    command = [sys.executable, "-m", "kvbench", "serve", "--port", "0", *options]
    ended = subprocess.run(command, cwd=ROOT, timeout=30, capture_output=True, text=True)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_a_port_in_use_is_said_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = CliRunner().invoke(app, ["serve", "--port", port])
    assert (ended.exit_code, ended.stderr) == (
        2,
        f"kvbench serve: port {port} of 127.0.0.1 is in use: name another with --port, or 0 for one that is free\n",
    )


def test_the_banner_names_nodes_router_and_policy() -> None:
    parts: dict[str, Any] = {"model": "llama-3.1-8b", "hardware": "rtx-4090"}
    spec = Sim.model_validate(parts | {"cluster": {"replicas": 3, "router": "prefix_affine"}, "settings": {"policy": "s3fifo"}})
    said = _described(spec, build_machine(spec, 0).facts())
    assert said == "llama-3.1-8b on 3 nodes of 1 x rtx-4090, routed by prefix_affine, cache policy s3fifo"
    plain = Sim(**parts)
    assert _described(plain, build_machine(plain, 0).facts()) == "llama-3.1-8b on rtx-4090, cache policy lru"


def test_a_share_to_keep_without_a_file_is_warned_of(tmp_path: Path) -> None:
    text = (ROOT / "scenarios/smoke.yaml").read_text()
    (tmp_path / "s.yaml").write_text(re.sub(r"(?m)^target: \{", "target: {cache_log: 50%, ", text))
    command = [sys.executable, "-m", "kvbench", "serve", str(tmp_path / "s.yaml"), "--port", "0"]
    for more, said in (([], "nothing is kept without --cache-log FILE"), (["--cache-log", str(tmp_path / "c.jsonl")], "")):
        process = subprocess.Popen([*command, *more], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert "serving" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert said in errors
        assert bool(errors) == bool(said)
