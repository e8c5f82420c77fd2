"""How fast kvbench itself is: a whole run against the instant stub, beside a bare client and wrk on the same stub, in turn.

usage: python tests/bench/hot_path.py [ROUNDS]      prints requests/s of each round and the ratios of the medians
Machines are noisy: only the ratios of one run mean something.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from tests.whole import instant, kvbench  # noqa: E402 - after the path that makes it importable

REQUESTS, USERS, TOKENS = 30_000, 64, 32
SCENARIO = """
name: hot-path
seed: 1
target: {{kind: http, url: "{url}", model: m, tokenizer: words}}
workload:
  arrivals: {{shape: closed, concurrency: {users}}}
  prompt: {{dist: fixed, value: 12}}
  output: {{dist: fixed, value: {tokens}}}
phases: {{steady: {{requests: {requests}}}}}
"""


def whole_run(url: str) -> float:
    """Requests/s of a whole `kvbench run`, windows and journal on, over the steady phase; every token time is in its records."""
    with tempfile.TemporaryDirectory() as folder:
        scenario = Path(folder) / "hot.yaml"
        scenario.write_text(SCENARIO.format(url=url, users=USERS, tokens=TOKENS, requests=REQUESTS))
        done = kvbench("run", scenario, "-q", "--out", Path(folder) / "results")
        directory = next((Path(folder) / "results").iterdir())
        summary = json.loads((directory / "summary.json").read_text())
        total = summary["accounting"]["total"]
        assert total["ok"] == REQUESTS, done.stdout + done.stderr
        with (directory / "requests.jsonl").open() as lines:
            assert all(len(json.loads(line)["token_ns"]) == TOKENS for line in lines)
        return float(summary["rates"]["ok"]["value"])


def bare(url: str) -> float:
    command = [sys.executable, ROOT / "tests/bench/bare_client.py", *map(str, (REQUESTS, USERS, TOKENS)), url.rsplit(":", 1)[1]]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def wrk(url: str) -> float:
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write('wrk.method = "POST"\nwrk.headers["Content-Type"] = "application/json"\nwrk.body = "{}"\n')
        script.flush()
        command = ["wrk", "-t1", f"-c{USERS}", "-d3s", "-s", script.name, f"{url}/v1/chat/completions"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"Requests/sec:\s+([\d.]+)", printed)
    assert found, printed
    return float(found[1])


CLIENTS = {"kvbench run": whole_run, "bare client": bare, "wrk": wrk}


def race(rounds: int = 3) -> dict[str, list[float]]:
    """Requests/s per client and round, interleaved."""
    found: dict[str, list[float]] = {name: [] for name in CLIENTS}
    with instant(TOKENS) as url:
        for _ in range(rounds):
            for name, client in CLIENTS.items():
                found[name].append(client(url))
    return found


if __name__ == "__main__":
    rates = race(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
    for name, each in rates.items():
        print(f"{name:<12} {'  '.join(f'{rate:>9,.0f}' for rate in each)}   median {median(each):>9,.0f} requests/s")
    ours = median(rates["kvbench run"])
    print(f"kvbench / bare client {ours / median(rates['bare client']):.2f}   kvbench / wrk {ours / median(rates['wrk']):.2f}")
