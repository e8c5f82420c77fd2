"""What compose makes of an http target: the model it finds, the tokenizer it chooses, the secrets it sends and never shows. And
what agenda makes of the phases: epochs with classes of their own, sessions across them, stress that goes on where steady ends."""

import asyncio
import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from kvbench import compose
from kvbench.clock import Clock
from kvbench.core import Record
from kvbench.phases import Phase
from kvbench.scenario import Scenario, ScenarioError, load
from kvbench.target import TargetUnreachable
from tests.stub.stub import DONE, FIN, C, Reply, Seen, Stub, U, answer_json, stream
from tests.whole import Whole, simulated

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


def drive(
    tmp_path: Path, script: Callable[[Seen], Reply], *settings: str, only: str = "steady"
) -> tuple[compose.Opened, list[Seen], Record]:
    """Open the target that the settings describe and send one request of the scenario's phase `only` to it."""

    async def main() -> tuple[compose.Opened, list[Seen], Record]:
        async with Stub(script, gets=script) as stub:
            path = tmp_path / "c.yaml"
            path.write_text(TEXT)
            found = load(path, settings, stub.url)
            opened = await compose.open_target(found, Clock(asyncio.get_running_loop()))
            try:
                (phase,) = [one for one in compose.build_phases(found, 5, opened.count) if one.name == only]
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


def test_a_baseline_brings_text_so_ids_give_way_to_words(tmp_path: Path) -> None:
    opened, log, _ = drive(tmp_path, server(["m"]), "target.api=completions", "phases.baseline={}", only="baseline")
    assert opened.tokenizer["kind"] == "words"
    assert isinstance(body(log)["prompt"], str)


# ---- phases

SIM = "seed: 7\ntarget: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090}\n"


def scenario(folder: Path, text: str, *overrides: str) -> Scenario:
    (folder / "s.yaml").write_text(SIM + text)
    return load(folder / "s.yaml", overrides)


def opened_at(phase: Phase, start: float) -> Any:
    assert phase.source is not None
    return phase.source(start)


def keys(requests: list[Any]) -> set[int]:
    return {key for request in requests for key, _ in request.segments()}


EPOCHS = """
workload:
  arrivals: {shape: constant, rate: 1/s}
  classes: {chat: {prompt: 100, output: 10, prefixes: {groups: 2, tokens: 64}, slo: {ttft: 1s}}}
phases:
  steady:
    for: 40s
    epochs:
      - {for: 10s, arrivals: {shape: constant, rate: 1/s}}
      - for: 10s
        arrivals: {shape: constant, rate: 1/s}
        classes:
          chat: {weight: 50%, prompt: 300, output: 10, prefixes: {groups: 2, tokens: 64}, slo: {ttft: 1s}}
          other: {weight: 50%, prompt: 500, output: 10, slo: {e2e: 9s}}
"""


def test_epochs_with_classes_of_their_own(tmp_path: Path) -> None:
    """Classes of one name share their prefix groups, whatever the epoch; no other content comes twice."""
    found = scenario(tmp_path, EPOCHS)
    phases = compose.build_phases(found, 1)
    assert [phase.name for phase in phases] == ["steady-1", "steady-2", "steady-3", "steady-4"]
    asked = [[opened_at(phase, 10.0 * i).content.next(10.0 * i) for _ in range(30)] for i, phase in enumerate(phases)]
    assert {request.cls for request in asked[0] + asked[2]} == {"chat"}
    assert {request.cls for request in asked[1]} == {request.cls for request in asked[3]} == {"chat", "other"}
    assert {request.tokens for request in asked[2]} == {164}
    assert {request.tokens for request in asked[3]} == {364, 500}
    every = [request for part in asked for request in part]
    assert len({request.id for request in every}) == 120
    own = [request.segments()[-1][0] for request in every]
    assert len(set(own)) == 120
    groups = [{r.segments()[1][0] for r in part if r.group is not None} for part in asked]
    assert groups[0] == groups[1] == groups[2] == groups[3]
    assert len(groups[0]) == 2
    assert compose.build_slos(found) == {"chat": {"ttft": 1.0}, "other": {"e2e": 9.0}}


TALK = """
workload:
  arrivals: {shape: constant, rate: 0.5/s}
  classes: {chat: {prompt: 60, output: 10, sessions: {turns: 6, think: 3s}}}
phases:
  steady:
    for: 40s
    epochs:
      - {for: 10s, arrivals: {shape: constant, rate: 0.5/s}}
      - {for: 10s, arrivals: {shape: constant, rate: 1/s}, classes: {brief: {prompt: 30, output: 5}}}
  drain: {for: 1m}
"""


def test_sessions_go_on_across_epochs(tmp_path: Path) -> None:
    """Six turns three seconds apart take a session of the first epoch into the second, whose own classes have none."""
    run = simulated(SIM + TALK, tmp_path)
    records = run.records
    talks: dict[int, list[Any]] = {}
    for record in records:
        if record.session is not None:
            talks.setdefault(record.session, []).append(record)
    first = [turns for turns in talks.values() if turns[0].phase == "steady-1"]
    assert len(first) == 5
    for turns in first:
        assert [record.turn for record in turns] == list(range(6))
        assert {record.cls for record in turns} == {"chat"}
        assert [later.asked_in - before.asked_in for before, later in pairwise(turns)] == [70] * 5  # the history grows
    assert any(len({record.phase for record in turns}) > 1 for turns in first)
    assert {r.cls for r in records if r.phase == "steady-2"} == {"chat", "brief"}
    rows = {row["name"]: row for row in run.summary["phases"]}
    assert set(rows) == {"steady-1", "steady-2", "steady-3", "steady-4", "drain"}
    assert sum(row["outcomes"]["offered"] for row in rows.values()) == len(records)


def test_users_keep_their_number_across_epochs_also_while_they_think(tmp_path: Path) -> None:
    """A user in the pause between two turns is one of them: three users in the first epoch, five in the second, three again."""
    few, many = (f"{{for: 20s, arrivals: {{shape: closed, concurrency: {users}}}}}" for users in (3, 5))
    run = simulated(SIM + TALK, tmp_path, f"phases.steady={{epochs: [{few}, {many}, {few}]}}")
    talks: dict[int, list[Any]] = {}
    for record in run.records:
        talks.setdefault(record.session, []).append(record)
    spans = [(turns[0].due_ns / 1e9, turns[-1].end_ns / 1e9) for turns in talks.values()]

    def talking(at: float) -> int:
        return sum(start <= at < end for start, end in spans)

    assert [talking(at) for at in (5, 15, 19.9, 21, 30, 39)] == [3, 3, 3, 5, 5, 5]
    assert talking(55) == 3  # those too many have stopped as their talks ended


NIGHT = """
workload: {arrivals: {shape: constant, rate: 0.1/s}, prompt: 200, output: 8}
windows: {length: 1m, slide: 1m}
control: {law: none, every: 1m}
phases:
  steady:
    for: 2h
    snapshot: 5m
    epochs:
      - {for: 5m, arrivals: {shape: poisson, rate: 0.2/s}}
      - {for: 5m, arrivals: {shape: wave, mean: 0.1/s, amplitude: 50%, period: 5m}, classes: {long: {prompt: 900, output: 8}}}
  drain: {for: 1m}
"""


def test_a_night_of_epochs(tmp_path: Path) -> None:
    """Two hours of five minutes each: 24 rows, each with its own load and a snapshot, one cohort, in seconds of real time."""
    run = simulated(SIM + NIGHT, tmp_path)
    rows = [row for row in run.summary["phases"] if row["kind"] == "steady"]
    assert [row["name"] for row in rows] == [f"steady-{n}" for n in range(1, 25)]
    assert [round(row["end"] - row["start"]) for row in rows] == [300] * 24
    offered = [row["outcomes"]["offered"] for row in rows]
    assert sum(offered) == len(run.records)
    for odd, even in zip(offered[::2], offered[1::2], strict=True):
        assert abs(odd - 60) < 5 * math.sqrt(60)
        assert abs(even - 30) < 5 * math.sqrt(30)
    assert {r.cls for r in run.records if int(r.phase.split("-")[1]) % 2 == 0} == {"long"}
    shots = [event for event in run.lines("events.jsonl") if event["kind"] == "snapshot"]
    assert len(shots) == 24
    assert run.code == 0


STAIR = """
workload:
  arrivals: {shape: stair, start: 1/s, step: 100%, every: 10s, process: deterministic}
  classes: {chat: {prompt: 100, output: 10, prefixes: {groups: 2, tokens: 64}}}
phases:
  steady: {for: 20s}
  stress: {step: 50%, every: 10s, max: 2x}
  drain: {for: 1m}
stop: [{kv_usage: ">= 99%"}]
"""


def test_stress_goes_on_where_steady_ends(tmp_path: Path) -> None:
    """Steady leaves the stair before its third step, so 4/s: ten seconds at level 1 on it, then 8/s x 1.5 and 16/s x 2."""
    steady, stress, _ = compose.build_phases(scenario(tmp_path, STAIR), 1)
    before, after = opened_at(steady, 3.0), opened_at(stress, 23.0)
    dues = [after.schedule.pop() for _ in range(41)]
    assert dues == pytest.approx([23 + 0.25 * i for i in range(40)] + [33.0])
    asked = [[source.content.next(23.0) for _ in range(40)] for source in (before, after)]
    own = [{request.segments()[-1][0] for request in part} for part in asked]
    assert not own[0] & own[1]
    assert keys(asked[0]) & keys(asked[1])  # the run's prefix groups
    run = simulated(SIM + STAIR, tmp_path)
    offered = [record.due_ns / 1e9 for record in run.records if record.phase == "stress"]
    counts = [int(np.sum((np.array(offered) >= 20 + 10 * k) & (np.array(offered) < 30 + 10 * k))) for k in range(3)]
    assert counts == pytest.approx([40, 120, 320], abs=2)
    assert not any(record.measured for record in run.records if record.phase == "stress")
    assert run.code == 0


def test_stress_of_closed_users_has_more_of_them(tmp_path: Path) -> None:
    users = "workload.arrivals={shape: closed, concurrency: 4}"
    run = simulated(SIM + STAIR, tmp_path, users)
    ends = {event["data"]["phase"]: event["t"] for event in run.lines("events.jsonl") if event["kind"] == "phase_end"}

    def running(at: float) -> int:
        return sum(record.sent_ns / 1e9 <= at < record.end_ns / 1e9 for record in run.records)

    assert [running(ends["steady"] + after) for after in (5.0, 15.0, 25.0)] == [4, 6, 8]


def test_stress_ends_by_a_stop_rule_without_failing(tmp_path: Path) -> None:
    """Sixteen requests a second of 2,000 tokens are too many for this pool: the rule ends the run, which is whole."""
    run = simulated(SIM + STAIR, tmp_path, "workload.classes.chat.prompt=2000", "stop=[{waiting: '>= 20'}]")
    end: dict[str, Any] = next(e["data"] for e in run.lines("events.jsonl") if e["kind"] == "stop")
    assert (end["phase"], run.code) == ("stress", 0)


def test_stress_follows_the_last_epoch(tmp_path: Path) -> None:
    stress = "phases.stress={step: 50%, every: 10s, max: 2x}"
    phases = compose.build_phases(scenario(tmp_path, EPOCHS, stress), 1)
    opened_at(phases[3], 30.0)
    source = opened_at(phases[4], 40.0)
    assert {source.content.next(40.0).cls for _ in range(30)} == {"chat", "other"}


def test_baseline_runs_one_prompt_at_a_time_before_all_else(tmp_path: Path) -> None:
    plain = "workload: {arrivals: {shape: constant, rate: 5/s}, prompt: 100, output: 5}\nphases: {steady: {for: 5s}}\n"
    run: Whole = simulated(
        SIM + plain, tmp_path, "phases.baseline={prompts: 6, idle_power: 4s}", "control={law: bucket, rate: 5/s}"
    )
    mine = [record for record in run.records if record.phase == "baseline"]
    assert len(mine) == 6
    assert min(record.due_ns for record in mine) == 4_000_000_000
    assert all(later.sent_ns >= before.end_ns for before, later in pairwise(mine))
    assert all(record.release_ns == record.due_ns for record in mine)  # no law holds them
    assert not any(record.measured for record in mine)
    assert {record.cls for record in mine} == {"standard"}
