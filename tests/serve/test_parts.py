"""The parts of `kvbench serve` by themselves: tokens, names of content, shapes of answers and of the page, KV events."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvbench.compose import build_machine
from kvbench.endpoint import Sim
from kvbench.engine import Job, Machine
from kvbench.serve import Tokens, asks, shapes
from kvbench.serve.content import Contents
from kvbench.serve.events import Ledger
from kvbench.serve.page import Page, Row, lengths
from kvbench.serve.replies import answer_key
from kvbench.serve.tokens import Plain, Real

DATA = Path(__file__).parent.parent / "data"
SMALL = Sim.model_validate({"model": "llama-3.1-8b", "hardware": "rtx-4090", "settings": {"blocks": 200}})


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_any_text_comes_back_to_the_letter(text: str) -> None:
    plain = Plain()
    assert plain.decode(plain.encode(text)) == text


@pytest.mark.parametrize("tokens", [Plain(), Real(DATA / "tokenizer" / "tokenizer.json")], ids=["plain", "file"])
@pytest.mark.parametrize("opening", [True, False])
def test_an_answer_is_the_same_tokens_when_it_comes_back(tokens: Tokens, opening: bool) -> None:
    before = "" if opening else "the sea, and"
    for key in range(20):
        written = tokens.write(key, 50, opening)
        assert len(written.ids) == len(written.texts) == 50
        assert tokens.encode(before + "".join(written.texts)) == tokens.encode(before) + written.ids
    assert tokens.write(1, 9, opening) != tokens.write(2, 9, opening)
    whole = tokens.write(7, 9000, opening)  # longer than the table of steps
    parts = [tokens.write(7, stop - start, opening, start) for start, stop in ((0, 1), (1, 8000), (8000, 9000))]
    assert [token for part in parts for token in part.ids] == whole.ids
    assert [text for part in parts for text in part.texts] == whole.texts


def test_one_word_of_the_list_is_one_token_and_anything_else_three_bytes() -> None:
    plain = Plain()
    assert len(plain.encode("sea and land and water")) == 5
    assert len(plain.encode("qqqqqqq")) == 3
    with pytest.raises(ValueError, match="is none"):
        plain.decode([1 << 26])


def played(machine: Machine, job: Job, at: float) -> Any:
    """The job's end. The machine does nothing else."""
    machine.advance(at)
    assert machine.submit(job, at) is None
    while True:
        for span in machine.advance(machine.tick()):
            if span.done:
                return span.done[0]


@pytest.mark.parametrize(("asked", "said"), [(33, 40), (32, 40), (47, 17), (16, 5)])
@pytest.mark.parametrize("choice", [0, 1])
def test_an_answer_in_the_next_prompt_is_found(asked: int, said: int, choice: int) -> None:
    """All full blocks of prompt and answer, less the last token, which is sampled and never computed."""
    machine, contents = build_machine(SMALL, 0), Contents(16)
    ids = list(range(1000, 1000 + asked))
    first = contents.prompt(ids, 0)
    played(machine, Job(0, first.segments, said, n=2), 0.0)
    answer = list(range(5000, 5000 + said))
    contents.answered(first, answer_key(0, choice), answer)
    second = contents.prompt([*ids, *answer, 1, 2, 3, *range(40)], 0)
    assert second.tokens == sum(tokens for _, tokens in second.segments) == asked + said + 43
    assert played(machine, Job(1, second.segments, 1), 9.0).cached == (asked + said - 1) // 16 * 16
    third = contents.prompt([*ids, *answer[:-1], 0, *range(40)], 0)  # differs in the answer's last token
    assert played(machine, Job(2, third.segments, 1), 19.0).cached == (asked + said - 1) // 16 * 16
    if asked % 16:
        third = contents.prompt([*ids, answer[0] + 1, *answer[1:]], 0)  # in its first
        assert played(machine, Job(3, third.segments, 1), 29.0).cached == asked // 16 * 16


def test_equal_prefixes_are_shared_and_salts_apart() -> None:
    machine, contents = build_machine(SMALL, 0), Contents(16)
    ids = list(range(100))
    played(machine, Job(0, contents.prompt(ids, 0).segments, 2), 0.0)
    assert played(machine, Job(1, contents.prompt([*ids[:70], 7, 7], 0).segments, 2), 5.0).cached == 64
    assert played(machine, Job(2, contents.prompt(ids, 5).segments, 2, salt=5), 9.0).cached == 0


def test_only_the_newest_answers_are_remembered() -> None:
    contents = Contents(4, kept=3)
    first, last = contents.prompt([1, 2, 3, 4], 0), contents.prompt([5, 6, 7, 8], 0)
    contents.answered(first, 99, list(range(8)))
    contents.answered(last, 77, list(range(8)))
    assert contents.prompt([5, 6, 7, 8, *range(8)], 0).segments[-1] == (77, 8)
    assert contents.prompt([1, 2, 3, 4, *range(8)], 0).segments[-1] != (99, 8)


def keys(value: Any) -> Any:
    """The skeleton of a JSON value: keys and types in order; null beside anything, as optional fields are."""
    if isinstance(value, dict):
        return {key: keys(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [keys(value[0])] if value else []
    return type(value).__name__


def recorded(name: str) -> list[Any]:
    """The events of a stream, or the body, as a real vLLM sent it."""
    raw = (DATA / "streams" / "vllm" / f"{name}.http").read_text()
    found = re.findall(r"^data: (\{.*\})$", raw, re.MULTILINE)
    return [json.loads(text) for text in found] or [json.loads(raw[raw.index("\n\n{") if "\n\n{" in raw else raw.index("{") :])]


@pytest.mark.parametrize(
    ("name", "api", "running"),
    [
        ("chat_stream_usage", "chat", False),
        ("chat_stream_continuous_usage", "chat", True),
        ("chat_stream_one_token", "chat", False),
        ("completion_stream", "completions", False),
    ],
)
def test_the_events_of_a_stream_have_vllms_keys(name: str, api: Any, running: bool) -> None:
    events = recorded(name)
    head = shapes.Head(api, "id", 1, "smollm2")
    tokens = len(events) - 1 - (api == "chat")
    ours = [head.opening(0)] if api == "chat" else []
    ours += [head.token(0, "x", at + 1 == tokens) for at in range(tokens)]
    if running:
        ours = [event | {"usage": shapes.running_usage(33, 1)} for event in ours]
    created = 0 if api == "chat" else None
    ours.append(head.counted(shapes.streamed_usage(5, 2, 0, created)))
    assert [sorted(event) for event in ours] == [sorted(event) for event in events]
    assert [keys(event["choices"]) for event in ours] == [keys(event["choices"]) for event in events]
    assert keys(ours[-1]["usage"]) == keys(events[-1]["usage"])


def test_a_whole_answer_has_vllms_keys() -> None:
    theirs = recorded("chat_plain")[0]
    ours = json.loads(shapes.Head("chat", "id", 1, "m").whole(["x"], shapes.whole_usage(31, 8, 0, 0)))
    assert keys(ours) == keys(theirs)


@pytest.mark.parametrize(
    ("name", "body", "limit"),
    [
        ("error_context_too_long", {"prompt": [1] * 2900, "max_tokens": 8, "stream": True}, 2048),
        ("error_unknown_model", {"model": "nope", "prompt": "x", "max_tokens": 8}, 2048),
        ("error_bad_body", {"prompt": "x", "max_tokens": -3}, 2048),
    ],
)
def test_errors_are_vllms_to_the_letter(name: str, body: dict[str, Any], limit: int) -> None:
    with pytest.raises(asks.RefusedError) as refused:
        asks.read("completions", json.dumps(body).encode(), Plain(), "smollm2", limit)
    assert json.loads(refused.value.body()) == recorded(name)[0]
    assert refused.value.status == recorded(name)[0]["error"]["code"]


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("completions", b"{"),
        ("completions", b"[]"),
        ("completions", b'{"prompt": null}'),
        ("completions", b'{"prompt": [1, "a"]}'),
        ("completions", b'{"prompt": [-1]}'),
        ("completions", b'{"prompt": ""}'),
        ("completions", b'{"prompt": "a", "n": 0}'),
        ("completions", b'{"prompt": "a", "max_tokens": "5"}'),
        ("completions", b'{"prompt": "a", "max_tokens": 100000}'),
        ("chat", b"{}"),
        ("chat", b'{"messages": []}'),
        ("chat", b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}'),
    ],
)
def test_what_cannot_be_understood_is_a_400(api: Any, body: bytes) -> None:
    with pytest.raises(asks.RefusedError) as refused:
        asks.read(api, body, Plain(), "m", 2048)
    assert refused.value.status == 400
    assert set(json.loads(refused.value.body())["error"]) == {"message", "type", "param", "code"}


def test_prompts_in_every_form() -> None:
    def read(prompt: Any) -> list[list[int]]:
        return asks.read("completions", json.dumps({"prompt": prompt}).encode(), Plain(), "m", 2048).prompts

    one = Plain().encode("the sea")
    assert read("the sea") == [one]
    assert read(["the sea", "the sea"]) == [one, one]
    assert read([7, 8]) == [[7, 8]]
    assert read([[7, 8], [9]]) == [[7, 8], [9]]
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": " sea"}]
    chat = json.dumps({"messages": [{"role": "user", "content": parts}], "max_completion_tokens": 3, "max_tokens": 9})
    ask = asks.read("chat", chat.encode(), Plain(), "m", 2048)
    assert (ask.prompts, ask.max_tokens) == ([one], 3)


def series(text: str) -> dict[str, tuple[str, set[tuple[str, ...]]]]:
    """By name: the type and the sets of label names, with the buckets' bounds."""
    found = {}
    for family in text_string_to_metric_families(text):
        labels = {
            (*sorted(sample.labels), *([sample.labels["le"]] if "le" in sample.labels else [])) for sample in family.samples
        }
        found[family.name] = (family.type, labels)
    return found


def test_what_is_on_the_page_is_named_as_vllms() -> None:
    """Types, label names and the bounds of buckets; settings of the cache that vLLM tells and we do not have may be absent."""
    machine = build_machine(SMALL, 0)
    facts = machine.facts() | {"max_context": 1024}
    page = Page(machine, "m", facts, 1.0)
    page.asked("/v1/completions", "POST", 200)
    ours, theirs = series(page.text().decode()), series((DATA / "metrics" / "vllm-0.32-cpu.prom").read_text())
    settings = ours.pop("vllm:cache_config_info")
    assert settings[0] == theirs["vllm:cache_config_info"][0]
    assert set(next(iter(settings[1]))) <= set(next(iter(theirs["vllm:cache_config_info"][1])))
    assert len(ours) > 30
    for name in ("request_queue_time_seconds", "request_prefill_time_seconds", "request_inference_time_seconds",
                 "iteration_tokens_total", "external_prefix_cache_queries", "external_prefix_cache_hits"):  # fmt: skip
        assert f"vllm:{name}" in ours
    for name, told in ours.items():
        assert told == theirs[name], name


def test_lengths_are_one_two_five() -> None:
    assert lengths(2048) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]


def test_the_page_counts_what_ended() -> None:
    page = Page(build_machine(SMALL, 0), "m", build_machine(SMALL, 0).facts(), 1.0)
    page.ended(0, Row(
        prompt=40, generated=[3, 3], n=2, asked=3, computed=24, preempted=1, whole=2.0, queued=0.5, prefill=0.25, inference=1.5,
        decode=[1.0, 1.0], per_token=[0.5, 0.5],
    ))  # fmt: skip
    text = page.text().decode()
    for line in (
        "request_prompt_tokens_sum{L} 40.0", "request_generation_tokens_count{L} 2.0", "request_num_preemptions_sum{L} 1.0",
        "request_queue_time_seconds_sum{L} 0.5", "request_prefill_time_seconds_sum{L} 0.25",
        "request_inference_time_seconds_sum{L} 1.5", "request_prefill_kv_computed_tokens_sum{L} 24.0",
        "request_time_per_output_token_seconds_sum{L} 1.0",
    ):  # fmt: skip
        assert "vllm:" + line.replace("{L}", '{engine="0",model_name="m"}') in text


def test_kv_events_tell_what_is_resident_and_nothing_else() -> None:
    """Blocks stored less blocks removed are those in the engine's index; each event's tokens are its blocks'."""
    ledger = Ledger(16)
    machine, contents, held = build_machine(SMALL, 0, [ledger.hear]), Contents(16), {}
    for number in range(12):
        ids = [*range(100), *range(1000 * number, 1000 * number + 400)]
        prompt = contents.prompt(ids, 0)
        job, answer = Job(number, prompt.segments, 40, salt=number % 2), list(range(7000, 7040))
        ledger.watch(job, ids, [(answer_key(number, 0), lambda _, answer=answer: answer)], "")
        played(machine, job, 10.0 * number)
        ledger.forget(number)
        for event in [event for _, events in ledger.take() for event in events]:
            if event["type"] == "BlockStored":
                assert len(event["token_ids"]) == 16 * len(event["block_hashes"])
                parent = event["parent_block_hash"]
                for at, key in enumerate(event["block_hashes"]):
                    held[key] = [*(held[parent] if parent is not None else []), *event["token_ids"][16 * at : 16 * at + 16]]
                    parent = key
                    assert held[key] == [*ids, *answer][: len(held[key])]
            else:
                assert event["type"] == "BlockRemoved"
                for key in event["block_hashes"]:
                    del held[key]
    pool: Any = machine.cache.pools[0]  # type: ignore[attr-defined]
    assert {key & (1 << 64) - 1 for key in pool.index} == set(held)
    assert len(held) > 150
    assert machine.reset(500.0)
    assert [[event["type"] for event in events] for _, events in ledger.take()] == [["AllBlocksCleared"]]
