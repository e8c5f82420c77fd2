"""Other people's benchmark clients, unchanged, against `kvbench serve`: what they count is what the server counts.

Each needs its command on PATH or in the variable named here, and a directory with a Hugging Face tokenizer in KVBENCH_TOKENIZER:
`vllm` (KVBENCH_VLLM; `pip install vllm`) and `guidellm` (KVBENCH_GUIDELLM; `pip install guidellm`). `make test-real` installs
both and sets all three. Twenty short requests each.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.whole import ROOT

TOKENIZER = os.environ.get("KVBENCH_TOKENIZER", "")
CLIENTS = {name: os.environ.get(f"KVBENCH_{name.upper()}") or shutil.which(name) for name in ("vllm", "guidellm")}
OFFLINE = os.environ | {"HF_HUB_OFFLINE": "1"}
MODEL = "smollm2-135m"

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not TOKENIZER, reason="no tokenizer directory in KVBENCH_TOKENIZER"),
]


@pytest.fixture
def server() -> Iterator[str]:
    tokenizer = str(Path(TOKENIZER) / "tokenizer.json")
    command = [sys.executable, "-m", "kvbench", "serve", "--port", "0", "--model", MODEL, "--hardware", "l4", "--tokenizer"]
    with subprocess.Popen([*command, tokenizer], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        try:
            assert found
            yield found.group(0)
        finally:
            process.send_signal(signal.SIGINT)


def counter(server: str, name: str) -> int:
    with urllib.request.urlopen(f"{server}/metrics", timeout=10) as answer:
        found = re.search(rf"^vllm:{name}\{{.*\}} (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found
    return int(float(found.group(1)))


def client(name: str) -> str:
    command = CLIENTS[name]
    if command is None:
        pytest.skip(f"no {name} on PATH, nor in KVBENCH_{name.upper()}")
    return command


def test_vllms_benchmark_client(server: str, tmp_path: Path) -> None:
    command = [
        client("vllm"), "bench", "serve", "--backend", "openai", "--base-url", server, "--endpoint", "/v1/completions",
        "--model", MODEL, "--tokenizer", TOKENIZER, "--dataset-name", "random", "--random-input-len", "200",
        "--random-output-len", "32", "--num-prompts", "20", "--request-rate", "4", "--ignore-eos", "--save-result",
        "--result-dir", str(tmp_path), "--result-filename", "result.json",
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=280, env=OFFLINE, capture_output=True)
    said = json.loads((tmp_path / "result.json").read_text())
    assert (said["completed"], said["total_output_tokens"]) == (20, 640)
    assert counter(server, "generation_tokens_total") == 640
    assert counter(server, "prompt_tokens_total") == said["total_input_tokens"] == 4000
    assert said["mean_tpot_ms"] == pytest.approx(2.17, rel=0.15)  # 2.17 on the engine itself (docs/guides/serve.md)


def test_guidellm(server: str, tmp_path: Path) -> None:
    command = [
        client("guidellm"), "run", "--backend", f"kind=openai_http,target={server},model={MODEL}",
        "--profile", "kind=poisson,rate=4", "--constraint", "kind=max_requests,count=20",
        "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
        "--data", "kind=synthetic_text,prompt_tokens=200,output_tokens=32",
        "--output", f"kind=json,path={tmp_path / 'result.json'}", "--disable-progress",
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=280, env=OFFLINE, capture_output=True)
    said = json.loads((tmp_path / "result.json").read_text())["benchmarks"][0]["metrics"]
    assert said["prompt_token_count"]["successful"]["mean"] == 200
    assert said["output_token_count"]["successful"]["mean"] == 32
    assert counter(server, "generation_tokens_total") == 32 * counter(server, "request_params_n_count")
    assert said["inter_token_latency_ms"]["successful"]["median"] == pytest.approx(2.17, rel=0.15)
