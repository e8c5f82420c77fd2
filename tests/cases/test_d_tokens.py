"""Group D: what counts as a token, and when. Times are exact: events are put before the reader at stated milliseconds."""

import json

import pytest

from kvbench.core import Record
from tests.stub.stub import DONE, FIN, JSON, ROLE, C, R, Reply, U, answer_json, delta, sse, stream, usage
from tests.target.wire import MS, one, read


def ms(stamp: int | None) -> float | None:
    return None if stamp is None else stamp / MS


def gaps(record: Record) -> list[float]:
    return [(b - a) / MS for a, b in zip(record.token_ns, record.token_ns[1:], strict=False)]


def test_d01_reasoning_is_the_first_token_and_content_has_its_own_time() -> None:
    record = read([(50, ROLE), (200, R("t1")), (220, R("t2")), (1000, C("ans")), (1001, FIN), (1002, U(10, 40)), (1002, DONE)])
    assert (record.outcome, ms(record.first_ns), ms(record.content_ns), record.n_out) == ("ok", 200, 1000, 40)
    assert record.text == "ans"


def test_d01_reasoning_cut_off_by_length_is_ok_without_content() -> None:
    record = read([(50, ROLE), (200, R("t1")), (210, sse(delta({"reasoning": "t2"}, "length"))), (220, DONE)])
    assert (record.outcome, record.finish, ms(record.first_ns), record.content_ns) == ("ok", "length", 200, None)
    assert len(record.token_ns) == 2


@pytest.mark.parametrize("opening", [ROLE, sse(delta({"role": "assistant", "content": None})), sse(delta({"role": "assistant"}))])
def test_d03_an_opening_without_text_is_no_token(opening: bytes) -> None:
    record = read([(5, opening), (10, b": ping\n\n"), (300, C("x")), (320, C("y")), (320, FIN), (321, U(4, 2)), (321, DONE)])
    assert (ms(record.first_ns), gaps(record), ms(record.done_ns), record.n_out) == (300, [20], 320, 2)


def test_d03_role_then_finish_has_no_first_token() -> None:
    record = read([(5, ROLE), (9, FIN), (9, DONE)])
    assert (record.outcome, record.first_ns, record.token_ns, record.n_out) == ("ok", None, [], 0)


def test_d04_usage_without_visible_output_leaves_ttft_null_and_keeps_the_end() -> None:
    record = read([(4700, FIN + U(5, 1000) + DONE)])
    assert (record.outcome, record.first_ns, record.token_ns) == ("ok", None, [])
    assert (ms(record.done_ns), record.n_out, record.source) == (4700, 1000, "usage")


def test_d05_the_wait_for_the_first_token_is_no_gap() -> None:
    record = read([(1000 + 10 * i, C("x")) for i in range(10)] + [(1100, FIN + DONE)])
    assert gaps(record) == [10] * 9


def test_d06_usage_in_every_chunk_gives_tokens_per_event() -> None:
    chunks = [(100 + 40 * i, C("four", usage=usage(7, 4 * (i + 1)))) for i in range(4)]
    record = read([*chunks, (230, FIN), (230, U(7, 16) + DONE)])
    assert (ms(record.first_ns), gaps(record), record.token_n, record.n_out) == (100, [40, 40, 40], [4, 8, 12, 16], 16)
    plain = read([(at, C("four")) for at, _ in chunks] + [(230, FIN + U(7, 16) + DONE)])
    assert (plain.token_n, plain.n_out, len(plain.token_ns)) == (None, 16, 4)  # events and tokens differ: approximate


def test_d06_usage_missing_from_one_chunk_leaves_no_half_list() -> None:
    record = read([(1, C("a", usage=usage(7, 1))), (2, C("b")), (3, C("c", usage=usage(7, 3))), (4, FIN + U(7, 3) + DONE)])
    assert (record.token_n, record.n_out, len(record.token_ns)) == (None, 3, 3)
    late = read([(1, C("a")), (2, C("b", usage=usage(7, 2))), (3, FIN + DONE)])
    assert late.token_n is None


def test_d08_tool_calls_are_tokens() -> None:
    call = [{"index": 0, "function": {"arguments": '{"x": 1}'}}]
    record = read(
        [
            (435.8, C("ok", usage=usage(9, 1))),
            (619.4, sse(delta({"tool_calls": call}, usage=usage(9, 17)))),
            (801.8, sse(delta({"tool_calls": call}, usage=usage(9, 31)))),
            (802.0, sse(delta({}, "tool_calls")) + DONE),
        ]
    )
    assert (ms(record.first_ns), record.n_out, record.token_n, record.finish) == (435.8, 31, [1, 17, 31], "tool_calls")
    assert gaps(record) == pytest.approx([183.6, 182.4])


@pytest.mark.parametrize("fields", [{"tool_calls": [{"index": 0, "id": "c1"}]}, {"function_call": {"name": "f"}}])
def test_d08_a_reply_of_tool_calls_alone_succeeds_with_a_first_token(fields: dict[str, object]) -> None:
    record = read([(5, ROLE), (70, sse(delta(fields))), (80, sse(delta({}, "tool_calls"))), (80, DONE)])
    assert (record.outcome, ms(record.first_ns), record.content_ns) == ("ok", 70, None)


def test_d10_no_token_one_token_no_connection() -> None:
    nothing = read([(3, FIN + U(4, 0) + DONE)])
    single = read([(3, C("x")), (4, FIN + U(4, 1) + DONE)])
    failed = one(stream(DONE), urls=["http://127.0.0.1:1"])
    assert (nothing.n_out, single.n_out, len(single.token_ns)) == (0, 1, 1)
    assert (failed.outcome, failed.cause, failed.sent_ns, failed.n_out) == ("failed", "connect_refused", None, None)
    assert failed.end_ns is not None


def test_d11_the_servers_count_wins_and_its_absence_is_named() -> None:
    text = [(1, C("he")), (2, C("ll")), (3, C("o"))]
    counted = read([*text, (4, FIN + U(9, 12) + DONE)])
    uncounted = read([*text, (4, FIN + DONE)])
    assert (counted.n_in, counted.n_out, counted.source) == (9, 12, "usage")
    assert (uncounted.n_in, uncounted.n_out, uncounted.source) == (None, 3, "events")


@pytest.mark.parametrize("choices", [{"choices": []}, {}, {"choices": None}])
def test_d13_usage_events_without_choices(choices: dict[str, object]) -> None:
    last = sse({**choices, "usage": usage(5, 2)})
    record = read([(1, C("a")), (2, C("b")), (3, FIN), (500, sse({"id": "x"})), (900, last), (950, DONE)])
    assert (record.outcome, record.n_in, record.n_out, record.ignored) == ("ok", 5, 2, 1)
    assert (ms(record.done_ns), gaps(record), ms(record.end_ns)) == (2, [1], 950)


def test_d14_one_reply_in_three_forms() -> None:
    whole = {"choices": [{"index": 0, "message": {"content": "a b"}, "finish_reason": "stop"}], "usage": usage(3, 2)}
    legacy = [sse({"choices": [{"index": 0, "text": text, "finish_reason": None}]}) for text in ("a", " b")]
    legacy_whole = {"choices": [{"index": 0, "text": "a b", "finish_reason": "stop"}], "usage": usage(3, 2)}
    for body in (
        b"".join([C("a"), C(" b"), FIN, U(3, 2), DONE]),
        b"".join([*legacy, FIN, U(3, 2), DONE]),
        json.dumps(whole).encode(),
        json.dumps(legacy_whole).encode(),
    ):
        record = read([(5, body)], event_stream=body.startswith(b"data"))
        assert (record.outcome, record.text, record.n_in, record.n_out, record.finish) == ("ok", "a b", 3, 2, "stop")


def test_d16_identical_streams_have_identical_gaps() -> None:
    records = [read([(100 + 20 * i, C("x")) for i in range(11)] + [(301, FIN + U(3, 11) + DONE)]) for _ in range(4)]
    for record in records:
        assert (record.token_ns[-1] - record.token_ns[0]) / (11 - 1) == 20 * MS


def test_d18_an_answer_that_is_not_a_stream_has_no_token_times() -> None:
    body = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}], "usage": usage(3, 2)}
    for asked in (True, False):
        record = one(answer_json(body), stream=asked)
        assert (record.outcome, record.streamed, record.first_ns, record.token_ns) == ("ok", False, None, [])
        assert (record.n_out, record.source) == (2, "usage")
        assert record.sent_ns is not None
        assert record.done_ns is not None
        assert record.done_ns > record.sent_ns


def test_several_choices_keep_their_own_times() -> None:
    def choice(index: int, text: str) -> bytes:
        return sse({"choices": [{"index": index, "delta": {"content": text}}]})

    record = read([(1, choice(0, "a")), (2, choice(0, "b")), (3, choice(1, "c")), (4, choice(0, "d")), (5, FIN + U(3, 4) + DONE)])
    assert (record.token_choice, record.n_out, record.text) == ([0, 0, 1, 0], 4, "abd")


def test_usage_beside_one_of_several_choices_is_not_the_total() -> None:
    def choice(index: int, count: int) -> bytes:
        return sse({"choices": [{"index": index, "delta": {"content": "x"}}], "usage": usage(3, count)})

    parts = [(1, choice(0, 1)), (2, choice(1, 1)), (3, choice(0, 2))]
    alone = read([*parts, (5, FIN + DONE)])
    assert (alone.token_n, alone.token_choice) == ([1, 1, 2], [0, 1, 0])
    assert (alone.n_in, alone.n_out, alone.source) == (3, 3, "events")
    total = read([*parts, (5, FIN + U(3, 7) + DONE)])
    assert (total.n_out, total.source) == (7, "usage")


def test_cached_and_reasoning_counts_are_null_unless_given() -> None:
    full = {"prompt_tokens_details": {"cached_tokens": 64}, "completion_tokens_details": {"reasoning_tokens": 5}}
    record = read([(1, C("a") + FIN + sse({"choices": [], "usage": usage(90, 8) | full}) + DONE)])
    assert (record.cached, record.reasoning) == (64, 5)
    nulls = {"prompt_tokens_details": None, "completion_tokens_details": None}
    for details in ({}, nulls):
        record = read([(1, C("a") + FIN + sse({"choices": [], "usage": usage(90, 8) | details}) + DONE)])
        assert (record.n_in, record.cached, record.reasoning) == (90, None, None)


def test_encrypted_reasoning_is_no_token() -> None:
    record = read(
        [(1, sse(delta({"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}))), (9, C("a") + FIN + DONE)]
    )
    assert ms(record.first_ns) == 9


def test_a_json_answer_under_the_wrong_content_type_is_still_read() -> None:
    body = json.dumps({"choices": [{"index": 0, "message": {"content": "hi"}}], "usage": usage(3, 2)}).encode()
    record = one(Reply([(0, body)], headers=(("Content-Type", "text/plain"),), framing="length"))
    assert (record.outcome, record.streamed) == ("ok", False)
    swapped = one(Reply([(0, C("a") + FIN + DONE)], headers=JSON))
    assert (swapped.outcome, swapped.streamed, len(swapped.token_ns)) == ("ok", True, 1)
