"""Group G of the public cases, end to end: runs do not warm each other, warm-up does not warm the measured prompts."""

import itertools
import json
from pathlib import Path

from tests.stub.stub import DONE, FIN, C, R, Reply, Seen, Stub, U, sse, usage
from tests.whole import against

TEXT = """
name: case
seed: 7
target: {kind: http, url: "{url}", model: m, tokenizer: words}
workload:
  arrivals: {shape: closed, concurrency: 1}
  prompt: {dist: fixed, value: 64}
  output: {dist: fixed, value: 2}
phases: {steady: {requests: 20}}
"""


class Caching:
    """A server that remembers every prompt's first words: 50 ms for unseen ones, 1 ms for seen, and it tells cached tokens."""

    def __init__(self, template: int = 0) -> None:
        self.seen: set[str] = set()
        self.hits = 0
        self.prompts: list[str] = []
        self.template = template

    def __call__(self, request: Seen) -> Reply:
        text = "\n".join(str(message["content"]) for message in request.json()["messages"])
        self.prompts.append(text)
        start = " ".join(text.split()[:16])
        hit = start in self.seen
        self.hits += hit
        self.seen.add(start)
        counts = usage(64 + self.template, 2) | {"prompt_tokens_details": {"cached_tokens": 48 if hit else 0}}
        return Reply(steps=[(1 if hit else 50, C("a") + C("b") + FIN + sse({"choices": [], "usage": counts}) + DONE)])


def test_g01_a_second_run_of_the_same_scenario_meets_a_cold_cache(tmp_path: Path) -> None:
    server = Caching()
    first, second = (against(Stub(server), TEXT, folder) for folder in (tmp_path / "a", tmp_path / "b") if folder.mkdir() is None)
    assert server.hits == 0, "each run has its own nonce at token 0"
    for run in (first, second):
        assert (run.summary["told"]["hit_rate"], run.summary["told"]["prompt_tokens"]) == (0.0, 20 * 64)
        (check,) = [each for each in run.summary["verdict"]["checks"] if each["check"] == "prefix_hits"]
        assert (check["level"], check["value"], check["n"]) == ("OK", 0.0, 20)
    nonces = {json.loads((run.directory / "manifest.json").read_text())["nonce"] for run in (first, second)}
    assert len(nonces) == 2


def test_g01_with_the_nonce_off_the_report_warns_of_the_warm_cache(tmp_path: Path) -> None:
    server = Caching()
    runs = [
        against(Stub(server), TEXT.replace("workload:", "workload:\n  nonce: off"), folder)
        for folder in (tmp_path / "a", tmp_path / "b")
        if folder.mkdir() is None
    ]
    assert server.hits == 20, "the second run repeats the first to the letter"
    cold, warm = (run.summary for run in runs)
    assert (cold["told"]["hit_rate"], warm["told"]["hit_rate"]) == (0.0, 48 / 64)
    assert warm["told"]["cached_tokens"] == 20 * 48
    for summary in (cold, warm):
        assert summary["warnings"][-1].startswith("the nonce is off: an earlier run may have warmed the prefix cache")
    (check,) = [each for each in warm["verdict"]["checks"] if each["check"] == "prefix_hits"]
    assert (check["value"], check["level"]) == (None, None)
    assert "on purpose" in check["reason"]


def test_g03_warm_up_never_sends_a_measured_prompt(tmp_path: Path) -> None:
    """1 warm-up request, 5 measured: the server sees no hit, and no token-count preflight came before."""
    server = Caching()
    text = TEXT.replace(
        "phases: {steady: {requests: 20}}", "phases: {warmup: {policy: fixed, requests: 1}, steady: {requests: 5}}"
    )
    run = against(stub := Stub(server), text, tmp_path)
    assert len(server.prompts) == len(stub.posts) == 6
    assert server.hits == 0
    assert [r.measured for r in run.records] == [False] + [True] * 5
    assert run.summary["headline"]["n"] == 5


def test_g04_asked_and_counted_prompt_tokens_stand_side_by_side(tmp_path: Path) -> None:
    """64 asked, the chat template adds 21: both are reported, the source is named, throughput uses the server's."""
    run = against(Stub(Caching(template=21)), TEXT, tmp_path)
    prompt = run.summary["tokens"]["prompt"]
    assert (prompt["asked"], prompt["got"], prompt["difference"], prompt["sources"]) == (64, 85, 21, {"usage": 20})
    assert run.summary["tokens"]["input_rate"]["n"] == 20 * 85
    assert any(line.startswith("prompt tokens: 64 asked, 85 counted on average (by usage)") for line in run.summary["warnings"])
    assert all((r.asked_in, r.n_in, r.source) == (64, 85, "usage") for r in run.records)


def test_g06_history_holds_the_answer_and_never_the_thinking(tmp_path: Path) -> None:
    """Turn 1 streams reasoning, then the answer: turn 2's assistant message is the answer alone."""
    bodies: list[dict[str, object]] = []
    numbers = itertools.count()

    def talk(request: Seen) -> Reply:
        bodies.append(request.json())
        return Reply(steps=[(1, R("think ") + R("hard") + C(f"answer {next(numbers)}") + FIN + U(64, 4) + DONE)])

    text = TEXT.replace("prompt:", "sessions: {turns: 3, think: 10ms}\n  prompt:").replace("requests: 20", "requests: 3")
    run = against(Stub(talk), text, tmp_path)
    assert [r.turn for r in run.records] == [0, 1, 2]
    roles = [[message["role"] for message in body["messages"]] for body in bodies]  # type: ignore[attr-defined,index]  # JSON
    assert roles == [["user"], ["user", "assistant", "user"], ["user", "assistant", "user", "assistant", "user"]]
    said = [m["content"] for m in bodies[2]["messages"] if m["role"] == "assistant"]  # type: ignore[attr-defined,index]  # JSON
    assert said == ["answer 0", "answer 1"]
    assert bodies[1]["messages"][0] == bodies[0]["messages"][0]  # type: ignore[index]  # JSON
