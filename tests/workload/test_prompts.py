"""Keys, the nonce, prefix groups, and the files that real prompts come from."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.stats import chisquare

from kvbench.core import Message, reply_key
from kvbench.workload.prompts import NONCE_TOKENS, Prefixes, Source, key, lead, mark, read_prompts

SEGMENTS = st.lists(st.tuples(st.integers(0, 2**60), st.integers(1, 50)), min_size=1, max_size=6)


def test_keys_stay_below_replies_and_keep_wide_ids_apart() -> None:
    ids = [1, 2**32 + 1, 2**63, 2**64 - 1, 2**64 + 1, 2**128 + 1]
    keys = {key("trace", i) for i in ids}
    assert len(keys) == len(ids)
    assert all(0 <= k < reply_key(0) for k in keys)
    assert key("a", 1) == 0x9A7F386FD1AFB2A  # printf "('a', 1)" | b2sum -l 64, less its last digit
    assert key("a", "b") != key("ab") != key("a", 1)


@given(SEGMENTS)
def test_the_nonce_is_counted_inside_and_the_last_token_stays(segments: list[tuple[int, int]]) -> None:
    marked = lead(99, segments)
    assert sum(n for _, n in marked) == sum(n for _, n in segments)
    total = sum(n for _, n in segments)
    if total > 1:
        assert marked[0] == (99, min(NONCE_TOKENS, total - 1))
    assert marked[-1][0] == segments[-1][0]
    assert lead(None, segments) == tuple(segments)


def test_the_nonce_takes_the_place_of_the_first_tokens() -> None:
    assert lead(99, [(1, 512), (2, 30)]) == ((99, 4), (1, 508), (2, 30))
    assert lead(99, [(1, 2), (2, 30)]) == ((99, 4), (2, 28))
    assert lead(99, [(1, 3)]) == ((99, 2), (1, 1))
    assert lead(99, [(1, 1)]) == ((1, 1),)


def test_popularity_is_zipfs_by_hand() -> None:
    assert Prefixes(groups=3, zipf=1, tokens=8).popularity == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    assert Prefixes(groups=4, zipf=0, tokens=8).popularity == pytest.approx([0.25] * 4)
    assert Prefixes(groups=2, zipf=2, tokens=8).popularity == pytest.approx([0.8, 0.2])


@pytest.mark.parametrize("zipf", [0.0, 1.1, 2.5])
def test_groups_are_drawn_as_popular_as_they_are(zipf: float) -> None:
    prefixes = Prefixes(groups=20, zipf=zipf, tokens=8, share=0.6)
    rng = np.random.default_rng(5)
    drawn = [prefixes.pick(rng) for _ in range(40_000)]
    groups = [group for group in drawn if group is not None]
    assert abs(len(groups) - 24_000) < 4 * (40_000 * 0.6 * 0.4) ** 0.5
    weight = [k**-zipf for k in range(1, 21)]
    expected = [w / sum(weight) * len(groups) for w in weight]
    assert chisquare(np.bincount(groups, minlength=20), expected).pvalue > 1e-4


def test_share_moves_no_other_requests_group() -> None:
    some, all_ = (Prefixes(groups=9, tokens=8, share=share) for share in (0.5, 1.0))
    one, two = np.random.default_rng(3), np.random.default_rng(3)
    pairs = [(some.pick(one), all_.pick(two)) for _ in range(500)]
    assert all(a == b for a, b in pairs if a is not None)
    assert {a for a, _ in pairs if a is None}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"groups": 0, "tokens": 8}, "groups"),
        ({"groups": 2, "tokens": 0}, "tokens"),
        ({"groups": 2, "tokens": 8, "zipf": -1}, "zipf"),
        ({"groups": 2, "tokens": 8, "share": "120%"}, "share"),
        ({"groups": 2, "token": 8}, "token"),
    ],
)
def test_bad_prefixes_name_the_field(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as error:
        Prefixes.model_validate(given)
    assert field in {line["loc"][0] for line in error.value.errors()}


def write(folder: Path, *records: Any) -> Source:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return Source(file=file)


def test_openai_messages_are_kept_whole_but_for_a_last_answer(tmp_path: Path) -> None:
    tool = {"role": "tool", "content": "42", "tool_call_id": "a"}
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, tool, {"role": "assistant", "content": "gone"}]
    source = write(
        tmp_path,
        {"messages": talk, "temperature": 0.5, "model": "m", "max_tokens": 7, "stream": True},
        {"custom_id": "1", "url": "/v1/chat/completions", "body": {"messages": talk[:2], "max_completion_tokens": 9}},
    )
    one, two = read_prompts(source).conversations
    assert one.opening == (Message(role="system", text="s"), Message(role="user", text="u"), Message(role="tool", raw=tool))
    assert (one.max_tokens, one.sampling) == (7, {"temperature": 0.5})
    assert (two.opening, two.max_tokens) == (one.opening[:2], 9)


def test_sharegpt_opens_with_the_first_human_turn(tmp_path: Path) -> None:
    turns = [("gpt", "left over"), ("system", "s"), ("human", "one"), ("gpt", "a"), ("human", "two"), ("gpt", "b")]
    record = {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}
    nobody = {"conversations": [{"from": "gpt", "value": "only me"}]}
    prompts = read_prompts(write(tmp_path, record, nobody))
    assert prompts.skipped == 1
    (talk,) = prompts.conversations
    assert talk.opening == (Message(role="system", text="s"), Message(text="one"))
    assert talk.later == (Message(text="two"),)


def test_one_json_list_is_read_like_lines(tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    file.write_text(json.dumps([{"conversations": [{"from": "human", "value": "hi"}]}], indent=1))
    assert read_prompts(Source(file=file)).conversations[0].opening == (Message(text="hi"),)


def test_vllm_logs_give_text_ids_or_messages(tmp_path: Path) -> None:
    source = write(
        tmp_path,
        {"prompt": "tell me", "sampling_params": {"temperature": 0.0, "max_tokens": 16, "top_p": None, "detokenize": True}},
        {"prompt": None, "prompt_token_ids": [3, 5], "params": {"n": 2, "max_tokens": 4}},
        {"messages": [{"role": "user", "content": "u"}], "sampling_params": {"max_tokens": 5}},
    )
    text, ids, chat = read_prompts(source).conversations
    assert (text.opening, text.max_tokens, text.sampling) == ((Message(text="tell me"),), 16, {"temperature": 0.0})
    assert (ids.opening, ids.max_tokens, ids.sampling) == ((Message(raw={"token_ids": [3, 5]}),), 4, {"n": 2})
    assert (chat.opening, chat.max_tokens) == ((Message(text="u"),), 5)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "not list"),
        ('{"text": 1}', "unknown form with keys"),
        ('{"messages": "x"}', "messages: expected a list"),
        ('{"messages": [{"content": "x"}]}', "object with a role"),
        ('{"conversations": [{"from": "human", "value": 3}]}', "is not text"),
        ('{"prompt": "x", "sampling_params": "SamplingParams(n=1)"}', "sampling_params"),
        ('{"prompt_token_ids": ["a"]}', "list of ids"),
        ('{"prompt": "x", "sampling_params": {"max_tokens": 0.5}}', "max_tokens: 0.5"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=says) as error:
        read_prompts(Source(file=file))
    assert str(error.value).startswith(f"{file}:3: ")


def test_a_file_without_prompts_or_of_bytes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("")
    with pytest.raises(ValueError, match="no prompts in it"):
        read_prompts(Source(file=file))
    file.write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match="cannot read"):
        read_prompts(Source(file=file))
    with pytest.raises(ValidationError, match="no file"):
        Source(file=tmp_path / "missing.jsonl")


def test_random_order_is_a_new_shuffle_for_each_pass(tmp_path: Path) -> None:
    written = write(tmp_path, *({"prompt": f"p{i}"} for i in range(30)))
    prompts = read_prompts(written)
    plain = [c.opening[0].text for _, c in islice(prompts.order(written, 1), 60)]
    assert plain == [f"p{i}" for i in range(30)] * 2
    shuffled = Source(file=written.file, order="random")
    drawn = list(islice(prompts.order(shuffled, 1), 60))
    one, two = ([c.opening[0].text for lap, c in drawn if lap == n] for n in (0, 1))
    assert set(one) == set(two) == set(plain)
    assert len({tuple(one), tuple(two), tuple(plain[:30])}) == 3
    assert drawn == list(islice(prompts.order(shuffled, 1), 60))


def test_the_nonce_stands_before_the_first_content_of_a_real_prompt() -> None:
    call = Message(role="assistant", raw={"role": "assistant", "tool_calls": []})
    image = Message(raw={"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})
    marked = mark((call, image, Message(text="t")), 0xABC, [])
    assert marked[0] is call
    assert marked[1].raw == {"role": "user", "content": [{"type": "text", "text": "[000000000000abc] "}, image.raw["content"][0]]}  # type: ignore[index]
    assert mark((Message(text="t"),), 0xABC, [])[0].text == "[000000000000abc] t"
    ids = mark((Message(raw={"token_ids": [7, 8]}),), 5, [7, 8, 9])[0].raw
    assert ids is not None
    assert len(ids["token_ids"]) == NONCE_TOKENS + 2
    assert ids["token_ids"][-2:] == [7, 8]
    assert set(ids["token_ids"]) <= {7, 8, 9}
