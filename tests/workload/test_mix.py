"""Classes and the mix: draws that do not move each other, sessions, real prompts, traces, and what a bad class says."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.stats import chisquare

from kvbench.core import Message, Record, Request, reply_key
from kvbench.workload.mix import Class, Mix, Output, shares
from kvbench.workload.prompts import NONCE_TOKENS

TEXT = {"text": True}
CHAT = {
    "weight": "80%",
    "prompt": {"dist": "power_law", "alpha": 1.8, "min": 64, "max": 2048},
    "output": {"dist": "power_law", "alpha": 2.1, "min": 16, "max": 1024, "force": True},
    "prefixes": {"groups": 20, "zipf": 1.1, "tokens": 512, "share": "60%"},
    "sampling": {"temperature": {0: "50%", 0.7: "50%"}},
    "slo": {"response_ttft": "800ms", "tpot": "50ms"},
}
PLAIN = {"prompt": 100, "output": 10}


def make(**given: Any) -> Class:
    return Class.model_validate(given, context=TEXT)


def seeds(seed: int = 7) -> dict[str, np.random.SeedSequence]:
    names = ("arrivals", "lengths", "prompts", "sampling")
    return dict(zip(names, np.random.SeedSequence(seed).spawn(len(names)), strict=True))


def mix(classes: dict[str, Class] | Class, nonce: int | None = 1, seed: int = 7, **more: Any) -> Mix:
    return Mix({"default": classes} if isinstance(classes, Class) else classes, seeds(seed), nonce, **more)


def deal(source: Mix, count: int) -> list[Request]:
    return [source.next(float(i)) for i in range(count)]


def ended(request: Request, **more: Any) -> Record:
    return Record(id=request.id, outcome="ok", **more)


def keys(requests: list[Request]) -> set[int]:
    return {key for request in requests for key, _ in request.segments()}


def parts(request: Request) -> tuple[Any, ...]:
    return request.messages, request.tokens, request.max_tokens, request.sampling, request.group


def test_a_request_is_what_its_class_says() -> None:
    requests = deal(mix(make(**{**CHAT, "weight": "100%"})), 2000)
    assert [request.id for request in requests] == list(range(2000))
    assert [request.due for request in requests[:3]] == [0.0, 1.0, 2.0]
    for request in requests:
        sizes = [n for _, n in request.segments()]
        own = request.tokens - (512 if request.group is not None else 0)
        assert 64 <= own <= 2048
        assert sum(sizes) == request.tokens
        expected = [NONCE_TOKENS, own - NONCE_TOKENS] if request.group is None else [NONCE_TOKENS, 512 - NONCE_TOKENS, own]
        assert sizes == expected, "the nonce is inside the length, and inside the prefix where there is one"
        assert 16 <= request.max_tokens <= 1024
        assert request.force
        assert request.sampling in ({"temperature": 0.0}, {"temperature": 0.7})
    assert len({request.segments()[-1][0] for request in requests}) == 2000, "own parts are unique"
    assert len({request.segments()[0] for request in requests}) == 1, "one nonce for the run"
    grouped = [request for request in requests if request.group is not None]
    assert len({(request.group, request.segments()[1]) for request in grouped}) == len({request.group for request in grouped})


@given(seed=st.integers(0, 2**32), stream=st.sampled_from(["steady", "warmup"]))
@settings(max_examples=10, deadline=None)
def test_the_same_seed_deals_the_same(seed: int, stream: str) -> None:
    spec = make(**{**CHAT, "weight": "100%"})
    one, two = (deal(mix(spec, seed=seed, stream=stream), 20) for _ in range(2))
    assert one == two
    assert [r.tokens for r in one] != [r.tokens for r in deal(mix(spec, seed=seed + 1, stream=stream), 20)]


@given(seed=st.integers(0, 2**32), weight=st.integers(5, 95))
@settings(max_examples=15, deadline=None)
def test_adding_a_class_or_a_stream_moves_no_other_draw(seed: int, weight: int) -> None:
    alone = deal(mix({"chat": make(**{**CHAT, "weight": "100%"})}, seed=seed), 100)
    one = {"chat": make(**{**CHAT, "weight": f"{weight}%"}), "bulk": make(weight=f"{100 - weight}%", **PLAIN)}
    both = mix(one, seed=seed)
    deal(mix(one, seed=seed, stream="warmup"), 30)  # another phase, in between
    chats = [request for request in deal(both, 100) if request.cls == "chat"]
    assert [parts(request) for request in chats] == [parts(request) for request in alone[: len(chats)]]


def test_changing_outputs_moves_no_prompt() -> None:
    one = deal(mix(make(**{**CHAT, "weight": "100%"})), 50)
    two = deal(mix(make(**{**CHAT, "weight": "100%", "output": 5, "sampling": {}})), 50)
    assert [request.messages for request in one] == [request.messages for request in two]


def test_lengths_of_prompts_outputs_phases_and_classes_are_independent() -> None:
    same = {"dist": "uniform", "min": 1, "max": 10_000}
    spec = make(prompt=same, output=same)
    steady, warm = deal(mix(spec), 2000), deal(mix(spec, stream="warmup"), 2000)
    prompts, outputs, others = [r.tokens for r in steady], [r.max_tokens for r in steady], [r.tokens for r in warm]
    halves = deal(mix({name: make(weight="50%", prompt=same, output=same) for name in "ab"}), 4000)
    a, b = ([r.tokens for r in halves if r.cls == name][:1900] for name in "ab")
    for one, two in ((prompts, outputs), (prompts, others), (a, b)):
        assert abs(np.corrcoef(one, two)[0, 1]) < 4 / 1900**0.5


def test_classes_come_by_weight() -> None:
    classes = {name: make(weight=weight, **PLAIN) for name, weight in (("a", "70%"), ("b", "20%"), ("c", "10%"))}
    drawn = Counter(request.cls for request in deal(mix(classes), 10_000))
    assert chisquare([drawn[name] for name in "abc"], [7000, 2000, 1000]).pvalue > 1e-4


def test_weights_that_do_not_add_up_are_refused() -> None:
    classes = {"a": make(weight="70%", **PLAIN), "b": make(weight="20%", **PLAIN)}
    with pytest.raises(ValueError, match=r"add up to 90 % \(a 70%, b 20%\)"):
        mix(classes)
    thirds = {name: make(weight="33.3%", **PLAIN) for name in "abc"}
    assert shares(thirds) == pytest.approx(dict.fromkeys("abc", 1 / 3))


def test_streams_share_nothing_unless_told_to() -> None:
    spec = make(**{**CHAT, "weight": "100%"})
    ids = itertools.count()
    warm, steady, sharing = (
        mix(spec, ids=ids, **how) for how in ({"stream": "warmup"}, {}, {"stream": "warmup", "shared": "steady"})
    )
    a, b, c = (deal(source, 500) for source in (warm, steady, sharing))
    assert not keys(a) & keys(b)
    common = keys(b) & keys(c)
    prefixes = {segment for request in b for segment in request.segments()[:-1]}
    assert common <= {key for key, _ in prefixes}
    assert b[0].segments()[0][0] in common, "the nonce is the run's, or the prefixes would not be shared"
    assert len({request.id for request in a + b + c}) == 1500


def test_another_nonce_changes_the_first_token_and_nothing_else() -> None:
    spec = make(**{**CHAT, "weight": "100%"})
    one, two, none = (deal(mix(spec, nonce=nonce), 100) for nonce in (1, 2, None))
    for a, b in zip(one, two, strict=True):
        assert a.segments()[0] != b.segments()[0]
        assert a.segments()[1:] == b.segments()[1:]
    assert [request.tokens for request in none] == [request.tokens for request in one]
    assert one[0].segments()[0][0] not in keys(none)


def test_a_prefix_length_is_the_groups_own() -> None:
    spec = make(prompt=10, output=1, prefixes={"groups": 30, "zipf": 0, "tokens": {"dist": "uniform", "min": 100, "max": 900}})
    lengths: dict[int | None, set[int]] = {}
    for request in deal(mix(spec), 600):
        lengths.setdefault(request.group, set()).add(request.tokens - 10)
    assert len(lengths) == 30
    assert all(len(found) == 1 and 100 <= min(found) <= 900 for found in lengths.values())
    assert len(set().union(*lengths.values())) > 20


def test_the_regime_multiplies_lengths_and_leaves_prefixes() -> None:
    spec = make(prompt=100, output=10, prefixes={"groups": 1, "tokens": 50})
    one, two, tiny = deal(mix(spec, regime=lambda at: [1.0, 2.5, 0.001][int(at)]), 3)
    assert (one.tokens, one.max_tokens) == (150, 10)
    assert (two.tokens, two.max_tokens) == (300, 25)
    assert (tiny.tokens, tiny.max_tokens) == (51, 1)


TALK = {"prompt": 100, "output": 10, "sessions": {"turns": 3, "think": "2s"}}


def test_a_session_grows_by_what_was_really_said() -> None:
    source = mix(make(**TALK))
    first = source.next(0.0)
    assert (first.session, first.turn, first.tokens) == (first.id, 0, 100)
    think, second = source.follow(first, ended(first, text="the answer", n_in=117, n_out=30, reasoning=21)) or (0, first)
    assert (think, second.session, second.turn) == (2.0, first.session, 1)
    assert second.messages[0] == first.messages[0]
    assert second.messages[1] == Message(role="assistant", text="the answer")
    assert second.tokens == 117 + (30 - 21) + 100, "the server's count, the answer without its reasoning, and the new part"
    assert second.id != first.id
    _, third = source.follow(second, ended(second, text="more")) or (0, second)
    assert len(third.messages) == 5
    assert third.messages[:3] == second.messages
    assert third.tokens == second.tokens + 0 + 100, "nothing counted: what was asked for"
    assert source.follow(third, ended(third, text="end")) is None
    assert source.follow(third, ended(third, text="end")) is None


def test_on_the_engine_the_answer_is_named_by_its_key() -> None:
    source = mix(make(**TALK))
    first = source.next(0.0)
    follow = source.follow(first, ended(first, n_in=100, n_out=10))
    assert follow is not None
    assert follow[1].segments()[: len(first.segments()) + 1] == [*first.segments(), (reply_key(first.id), 10)]
    assert sum(n for _, n in follow[1].segments()) == follow[1].tokens == 210


@pytest.mark.parametrize("outcome", ["failed", "rejected", "timeout", "cancelled", "shed", "dropped", "withdrawn"])
def test_a_turn_that_did_not_end_well_ends_the_session(outcome: Any) -> None:
    source = mix(make(**TALK))
    first = source.next(0.0)
    assert source.follow(first, Record(id=first.id, outcome=outcome)) is None
    assert source.follow(first, ended(first, text="late")) is None


def test_sessions_are_the_same_whatever_the_order_of_their_answers() -> None:
    talk = make(
        prompt={"dist": "uniform", "min": 5, "max": 500},
        output={"dist": "uniform", "min": 5, "max": 500},
        sessions={"turns": {"dist": "uniform", "min": 2, "max": 9}, "think": {"dist": "exponential", "mean": "3s"}},
    )
    forward, backward = mix(talk), mix(talk)
    seen = []
    for source, order in ((forward, range(20)), (backward, reversed(range(20)))):
        firsts = deal(source, 20)
        follows = {i: source.follow(firsts[i], ended(firsts[i], n_in=1, n_out=1)) for i in order}
        seen.append({i: (think, next_.max_tokens, next_.messages[-1]) for i, (think, next_) in follows.items() if next_})  # type: ignore[misc]
    assert seen[0] == seen[1]


def test_a_request_without_a_session_has_no_next_turn() -> None:
    source = mix(make(**PLAIN))
    request = source.next(0.0)
    assert request.session is None
    assert source.follow(request, ended(request)) is None


def written(folder: Path, name: str, *records: Any) -> str:
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder / name)


def test_real_prompts_with_their_own_sampling_and_length(tmp_path: Path) -> None:
    file = written(tmp_path, "log.jsonl", {"prompt": "tell me all", "sampling_params": {"max_tokens": 16, "temperature": 0.2}})
    spec = make(source={"file": file}, sampling={"temperature": 0.9, "top_p": 0.5})
    first, again = deal(mix(spec, count=lambda text: len(text.split())), 2)
    assert (first.max_tokens, first.sampling) == (16, {"temperature": 0.2, "top_p": 0.5})
    text = first.messages[0].text
    assert text is not None
    assert text.endswith("] tell me all")
    assert first.tokens == 4
    assert again.messages[0].text != text, "the second time through the file is no cache hit by accident"
    plain = mix(spec, nonce=None).next(0.0)
    assert plain.messages[0].text == "tell me all"
    assert sum(n for _, n in plain.segments()) == plain.tokens == 3, "11 bytes at 4 a token"


def test_a_recorded_conversation_goes_on_with_its_own_next_question(tmp_path: Path) -> None:
    turns = [{"from": who, "value": text} for who, text in (("human", "one"), ("gpt", "old"), ("human", "two"))]
    file = written(tmp_path, "talk.jsonl", {"conversations": turns})
    source = mix(make(source={"file": file}, output=5, sessions={"turns": 9}), nonce=None)
    first = source.next(0.0)
    follow = source.follow(first, ended(first, text="new"))
    assert follow is not None
    assert [(m.role, m.text) for m in follow[1].messages] == [("user", "one"), ("assistant", "new"), ("user", "two")]
    assert source.follow(follow[1], ended(follow[1], text="x")) is None


def test_files_that_do_not_fit_the_class_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "log.jsonl", {"prompt": "a"}, {"prompt": "b", "params": {"max_tokens": 3}})
    with pytest.raises(ValueError, match="1 prompts have no max_tokens"):
        mix(make(source={"file": file}))
    with pytest.raises(ValueError, match="second human turn"):
        mix(make(source={"file": file}, output=4, sessions={"turns": 2}))


ROWS = [
    {"timestamp": 0, "input_length": 1000, "output_length": 11, "hash_ids": [1, 2]},
    {"timestamp": 500, "input_length": 600, "output_length": 12, "hash_ids": [1, 3]},
    {"timestamp": 900, "input_length": 100, "output_length": 13, "hash_ids": [4]},
]


def test_a_trace_is_replayed_row_by_row(tmp_path: Path) -> None:
    written(tmp_path, "trace.jsonl", *ROWS)
    spec = make(trace={"file": "trace.jsonl", "format": "mooncake"})
    source = mix(spec, folder=tmp_path)
    one, two, three = deal(source, 3)
    assert [(r.tokens, r.max_tokens, r.force) for r in (one, two, three)] == [(1000, 11, True), (600, 12, True), (100, 13, True)]
    assert [n for _, n in one.segments()] == [NONCE_TOKENS, 512 - NONCE_TOKENS, 488], "blocks stay where they are"
    assert one.segments()[:2] == two.segments()[:2]
    assert one.segments()[2] != two.segments()[2]
    with pytest.raises(ValueError, match="all 3 arrivals are used"):
        source.next(3.0)


def test_a_lap_of_a_trace_shares_nothing_with_the_one_before(tmp_path: Path) -> None:
    written(tmp_path, "trace.jsonl", *ROWS)
    spec = make(trace={"file": "trace.jsonl", "wrap": "again"}, output={"force": False})
    requests = deal(mix(spec, folder=tmp_path), 6)
    assert [r.tokens for r in requests] == [1000, 600, 100] * 2
    assert not any(r.force for r in requests)
    nonce = requests[0].segments()[0][0]
    assert keys(requests[:3]) & keys(requests[3:]) == {nonce}


def test_a_traces_later_turns_follow_their_own(tmp_path: Path) -> None:
    row = {"n_in": 40, "n_out": 4, "session": "s"}
    turns = [{**row, "due": 0}, {**row, "turn": 1, "think": 1.5, "n_in": 80}, {"due": 1, "n_in": 7, "n_out": 1}]
    written(tmp_path, "trace.jsonl", *turns)
    source = mix(make(trace={"file": "trace.jsonl", "format": "kvbench"}), folder=tmp_path)
    first, other = deal(source, 2)
    assert (first.session, other.session, other.tokens) == (first.id, None, 7)
    follow = source.follow(first, ended(first))
    assert follow is not None
    assert (follow[0], follow[1].tokens, len(follow[1].messages)) == (1.5, 80, 1)
    assert source.follow(follow[1], ended(follow[1])) is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"output": 3}, "none given: a class has exactly one of prompt, source and trace"),
        ({"prompt": 5, "output": 3, "trace": "x.jsonl"}, "prompt and trace given"),
        ({"prompt": 5}, "output is missing"),
        ({"prompt": 5, "output": {"force": True}}, "output is missing"),
        ({"prompt": 0, "output": 3}, "prompt can be 0 tokens"),
        ({"prompt": 5, "output": 0}, "output can be 0 tokens"),
        ({"prompt": 5, "output": 3, "sessions": {"turns": 0}}, "0 turns"),
        ({"trace": "x.jsonl", "prefixes": {"groups": 2, "tokens": 3}}, "prefixes go with `prompt`"),
        ({"trace": "x.jsonl", "sessions": {"turns": 2}}, "a trace brings its own sessions"),
        ({"prompt": 5, "output": 3, "weight": 0.5}, "has no unit"),
        ({"prompt": 5, "output": 3, "slo": {"ttft_p99": "1s"}}, "response_ttft"),
        ({"prompt": 5, "output": {"dist": "power_low", "alpha": 2, "max": 9}}, "power_law"),
    ],
)
def test_a_class_that_makes_no_sense_says_why(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        make(**given)


def test_a_class_is_written_as_it_was_read() -> None:
    spec = make(**CHAT, sessions={"turns": 4, "think": {"dist": "exponential", "mean": "3s"}})
    again = json.loads(json.dumps(spec.model_dump(mode="json", by_alias=True)))
    assert Class.model_validate(again) == spec
    assert again["output"] == {"dist": "power_law", "min": 16, "max": 1024, "alpha": 2.1, "force": True}
    assert Output.model_validate(7).model_dump() == {"dist": "fixed", "value": 7, "force": False}
    assert {"prompt", "output", "prefixes", "sessions", "source", "trace"} <= Class.model_json_schema()["properties"].keys()


def test_the_plan_of_a_class() -> None:
    assert make(**PLAIN).mean_tokens() == (100, 10)
    assert make(**PLAIN).longest() == (100, 110)
    prefixed = make(**PLAIN, prefixes={"groups": 2, "tokens": 50, "share": "40%"})
    assert prefixed.mean_tokens() == pytest.approx((120, 10))
    assert prefixed.longest() == (150, 160)
    # three turns: prompts of 100, 100 + 110, 100 + 220
    assert make(**TALK).mean_tokens() == pytest.approx((630, 30))
    assert make(**TALK).longest() == (320, 330)
    assert make(trace="x.jsonl").longest() is None
