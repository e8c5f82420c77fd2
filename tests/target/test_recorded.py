"""Recorded answers of real servers, read whole and in every possible cut, give the text and the counts that stand in them."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core import Record
from tests.target.wire import cut

STREAMS = Path(__file__).parent.parent / "data" / "streams"

# file: (outcome, cause, text, token events, n_in, n_out, source, cached, finish, streamed), read off the files by hand
TRUTH: dict[str, tuple[object, ...]] = {
    "vllm/chat_plain": ("ok", "", "Hello! How can I assist you today", 0, 31, 8, "usage", 0, "length", False),
    "vllm/chat_stream_continuous_usage": (
        "ok", "",
        '"daily" \n\nthere are multiple hundred foo afaababaabybaaby ***\nno\nI am unable',
        24, 33, 24, "usage", 0, "length", True,
    ),
    "vllm/chat_stream_nousage": (
        "ok", "",
        "No, no, I'm sorry, but my abilities are designed to assist within",
        16, None, 16, "events", None, "length", True,
    ),
    "vllm/chat_stream_one_token": ("ok", "", "Hello", 1, 31, 1, "usage", 0, "length", True),
    "vllm/chat_stream_usage": ("ok", "", "トバ．**デーナコマキクワイ", 13, 171, 24, "usage", 0, "length", True),
    "vllm/chat_stream_usage_cached": (
        "ok", "",
        "The sea. Its treasure trove of wonders. Beyond the limits of mere sensation, the sea holds infinite secrets. The sea",
        24, 164, 24, "usage", 128, "length", True,
    ),
    "vllm/completion_stream": (
        "ok", "",
        " Paris, the capital of Europe. Indeed, overlooking the Louvre's abundance of Paris' iconic landmarks"
        " in the past rejuven",
        24, 5, 24, "usage", 0, "length", True,
    ),
    "vllm/completion_token_ids_prompt": ("ok", "", " gullt the Balance pyrzh had", 8, 100, 8, "usage", 0, "length", True),
    "vllm/error_bad_body": ("failed", "http_400", None, 0, None, None, "", None, None, True),
    "vllm/error_context_too_long": ("failed", "http_400", None, 0, None, None, "", None, None, True),
    "vllm/error_unknown_model": ("failed", "http_404", None, 0, None, None, "", None, None, True),
    "llama/chat_plain": ("ok", "", "Hello! How can I help you today", 0, 31, 8, "usage", None, "length", False),
    "llama/chat_stream_continuous_usage": (
        "ok", "", "1\n2\n34685\n4098767\nand so on.", 22, None, 22, "events", None, "stop", True,
    ),
    "llama/chat_stream_nousage": (
        "ok", "", "19:02\n\nThese are all the final digits of 1", 16, None, 16, "events", None, "length", True,
    ),
    "llama/chat_stream_one_token": ("ok", "", "Hello", 1, None, 1, "events", None, "length", True),
    "llama/chat_stream_usage": ("ok", "", "קולבע לינד בתשוארי, חמ", 18, None, 18, "events", None, "length", True),
    "llama/chat_stream_usage_cached": (
        "ok", "",
        "The sea is a vast, mysterious place. In some cultures, the sea holds great power and magic. The sea has",
        24, None, 24, "events", None, "length", True,
    ),
    "llama/completion_stream": (
        "ok", "",
        " Paris, and it's a major European city with iconic landmarks like the Eiffel Tower. The city is famous for its",
        24, None, 24, "events", None, "length", True,
    ),
    "llama/error_bad_body": ("failed", "http_500", None, 0, None, None, "", None, None, True),
    # this server answers for any model name
    "llama/error_unknown_model": ("ok", "", " and 10.5, which", 8, None, 8, "events", None, "length", True),
}  # fmt: skip


def seen(record: Record) -> tuple[object, ...]:
    return (
        record.outcome, record.cause, record.text, len(record.token_ns), record.n_in, record.n_out, record.source, record.cached,
        record.finish, record.streamed,
    )  # fmt: skip


@pytest.mark.parametrize("name", TRUTH)
def test_whole_and_byte_by_byte(name: str) -> None:
    wire = (STREAMS / f"{name}.http").read_bytes()
    assert seen(cut([wire])[0]) == TRUTH[name]
    assert seen(cut(wire[i : i + 1] for i in range(len(wire)))[0]) == TRUTH[name]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(TRUTH)), st.lists(st.integers(1, 9000), max_size=6))
def test_any_cut_gives_the_same_record(name: str, cuts: list[int]) -> None:
    wire = (STREAMS / f"{name}.http").read_bytes()
    places = sorted({0, len(wire), *(place for place in cuts if place < len(wire))})
    record, _ = cut(wire[a:b] for a, b in pairwise(places))
    assert seen(record) == TRUTH[name]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([name for name in sorted(TRUTH) if "stream" in name]), st.floats(0, 1))
def test_a_stream_that_breaks_off_is_never_ok_unless_it_had_finished(name: str, share: float) -> None:
    wire = (STREAMS / f"{name}.http").read_bytes()
    kept = wire[: int(share * len(wire))]
    record, _ = cut([kept] if kept else [])
    finished = b'"finish_reason": "' in kept or b'"finish_reason":"' in kept
    if record.outcome == "ok":
        assert finished
    else:
        assert (record.outcome, record.cause) == ("failed", "truncated" if kept else "disconnected")


def test_per_chunk_usage_counts_up_with_the_tokens() -> None:
    record, _ = cut([(STREAMS / "vllm/chat_stream_continuous_usage.http").read_bytes()])
    assert record.token_n == list(range(1, 25))


def test_error_texts_are_the_servers_own() -> None:
    record, _ = cut([(STREAMS / "vllm/error_unknown_model.http").read_bytes()])
    assert record.error == "The model `nope` does not exist. Valid aliases: smollm2. (NotFoundError, 404)"
    record, _ = cut([(STREAMS / "llama/error_bad_body.http").read_bytes()])
    assert "greater than or equal to 0" in record.error
    assert len(record.error) <= 300
