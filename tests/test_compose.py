"""What compose makes of an http target: the model it finds, the tokenizer it chooses, the secrets it sends and never shows."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvbench import compose
from kvbench.clock import Clock
from kvbench.core import Record
from kvbench.scenario import ScenarioError, load
from kvbench.target import TargetUnreachable
from tests.stub.stub import DONE, FIN, C, Reply, Seen, Stub, U, answer_json, stream

TEXT = """\
target: {kind: "null"}
workload: {arrivals: {shape: constant, rate: 5/s}, prompt: 300, output: 2}
phases: {steady: {for: 1s}}
"""


def server(
    models: list[str], tokenize: Callable[[str], int] | None = None, template: int | None = None
) -> Callable[[Seen], Reply]:
    """A server that lists `models` and, given a count, has /tokenize; with a `template` of so many tokens also of messages."""

    def reply(seen: Seen) -> Reply:
        if seen.path == "/v1/models":
            return answer_json({"data": [{"id": name, "max_model_len": 4096} for name in models]})
        if seen.path == "/tokenize" and tokenize:
            asked = seen.json()
            if "messages" in asked and template is not None:
                return answer_json({"tokens": list(range(template + tokenize(asked["messages"][0]["content"])))})
            return answer_json({"tokens": list(range(tokenize(asked["prompt"])))} if "prompt" in asked else {"error": "no"})
        if seen.method == "POST" and seen.path in ("/v1/chat/completions", "/v1/completions"):
            return stream(C("a"), C("b"), FIN, U(300, 2), DONE)
        return answer_json({"error": "no such thing"}, 404)

    return reply


def drive(tmp_path: Path, script: Callable[[Seen], Reply], *settings: str) -> tuple[compose.Opened, list[Seen], Record]:
    """Open the target that the settings describe and send one request of the scenario to it."""

    async def main() -> tuple[compose.Opened, list[Seen], Record]:
        async with Stub(script, gets=script) as stub:
            path = tmp_path / "c.yaml"
            path.write_text(TEXT)
            found = load(path, settings, stub.url)
            opened = await compose.open_target(found, Clock(asyncio.get_running_loop()))
            try:
                (phase,) = compose.build_phases(found, 5, opened.count)
                assert phase.source is not None
                request = phase.source(0.0).content.next(0.0)
                request.body = opened.target.encode(request)
                record = Record(id=0)
                await opened.target.send(request, record)
            finally:
                await opened.target.aclose()
            return opened, stub.log, record

    return uvloop.run(main())


def body(log: list[Seen]) -> Any:
    (sent,) = [seen for seen in log if "completions" in seen.path]
    return sent.json()


def test_the_model_is_the_servers_own(tmp_path: Path) -> None:
    opened, log, record = drive(tmp_path, server(["first", "second"]))
    assert record.outcome == "ok"
    assert body(log)["model"] == opened.facts["model"] == "first"
    assert opened.facts["max_context"] == 4096
    assert opened.facts["warnings"] == []
    assert body(drive(tmp_path, server(["first", "second"]), "target.model=second")[1])["model"] == "second"
    with pytest.raises(TargetUnreachable, match=r"name one with target\.model"):
        drive(tmp_path, server([]))


def test_without_tokenize_the_words_are_not_measured(tmp_path: Path) -> None:
    opened, log, _ = drive(tmp_path, server(["m"]))
    assert (opened.tokenizer["kind"], opened.tokenizer["error"]) == ("words", None)
    assert len(body(log)["messages"][0]["content"].split()) == 300
    with pytest.raises(TargetUnreachable, match="no /tokenize"):
        drive(tmp_path, server(["m"]), "target.tokenizer=server")


def test_with_tokenize_the_prompt_is_as_long_as_asked(tmp_path: Path) -> None:
    """This server counts three tokens for two words and 21 on top: 300 tokens are 200 words."""
    opened, log, _ = drive(tmp_path, server(["m"], lambda text: 21 + len(text.split()) * 3 // 2))
    assert opened.tokenizer["kind"] == "server"
    assert opened.tokenizer["overhead"] == pytest.approx(21, abs=1)
    assert len(body(log)["messages"][0]["content"].split()) == pytest.approx(200, abs=2)
    words = {word for seen in log if seen.path == "/tokenize" for word in [seen.json().get("prompt")]}
    assert body(log)["messages"][0]["content"] not in words  # no prompt of the run was shown to the server before


def test_the_chat_template_is_counted_where_the_server_can_say(tmp_path: Path) -> None:
    """vLLM's /tokenize takes messages: 30 tokens of template beside a token a word. The completions API has no template."""
    one_a_word = server(["m"], lambda text: len(text.split()), template=30)
    opened, log, _ = drive(tmp_path, one_a_word)
    assert (opened.tokenizer["overhead"], opened.tokenizer["error"]) == (30, 0.0)
    assert len(body(log)["messages"][0]["content"].split()) == 300  # the text is what was asked for; the template comes on top
    plain = drive(tmp_path, one_a_word, "target.api=completions", "target.tokenizer=server")[0]
    assert (plain.tokenizer["overhead"], plain.tokenizer["error"]) == (0, 0.0)


def test_requests_longer_than_the_servers_context_are_said_before_the_run(tmp_path: Path) -> None:
    """The server's models hold 4,096 tokens: 300 + 2 fit, 4,095 + 2 do not."""
    assert drive(tmp_path, server(["m"]))[0].facts["warnings"] == []
    (line,) = drive(tmp_path, server(["m"]), "workload.prompt=4095")[0].facts["warnings"]
    assert "4,097 tokens" in line
    assert "4,096" in line


def test_completions_get_token_ids(tmp_path: Path) -> None:
    opened, log, _ = drive(tmp_path, server(["m"]), "target.api=completions")
    assert opened.tokenizer["kind"] == "ids"
    assert len(body(log)["prompt"]) == 300
    talk = drive(tmp_path, server(["m"]), "target.api=completions", "workload.sessions={turns: 2}")[1]
    assert isinstance(body(talk)["prompt"], str)  # a session's answers are text, and ids cannot carry text


def test_keys_are_sent_and_shown_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "hunter2")
    monkeypatch.setenv("MY_HEADER", "swordfish")
    opened, log, _ = drive(tmp_path, server(["m"]), "target.key_env=MY_KEY", "target.headers={X-Api-Key: $MY_HEADER, X-Plain: a}")
    assert all(seen.headers["authorization"] == "Bearer hunter2" for seen in log)
    assert all((seen.headers["x-api-key"], seen.headers["x-plain"]) == ("swordfish", "a") for seen in log)
    shown = json.dumps([opened.facts, opened.tokenizer])
    assert "hunter2" not in shown
    assert "swordfish" not in shown
    with pytest.raises(ScenarioError, match=r"target\.key_env: the environment variable NO_KEY is not set"):
        drive(tmp_path, server(["m"]), "target.key_env=NO_KEY")


def test_what_this_machine_lacks_is_a_scenario_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ScenarioError, match=r"target: tokenizer: .*not a tokenizer\.json"):
        drive(tmp_path, server(["m"]), "target.tokenizer=tokenizer.json")


def test_extra_body_and_stream(tmp_path: Path) -> None:
    _, log, _ = drive(tmp_path, server(["m"]), "target.extra_body={top_k: 5, max_tokens: null}")
    assert body(log)["top_k"] == 5
    assert "max_tokens" not in body(log)
    assert body(log)["stream"] is True


def test_sim_and_null_open_at_once(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(TEXT)

    async def kinds() -> list[str]:
        sim = "target={kind: sim, model: llama-3.1-8b, hardware: rtx-4090}"
        found = [await compose.open_target(load(path, more), Clock(asyncio.get_running_loop())) for more in ([], [sim])]
        return [opened.facts["kind"] for opened in found]

    assert uvloop.run(kinds()) == ["null", "sim"]
