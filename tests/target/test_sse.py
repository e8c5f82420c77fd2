"""The event-stream parser against a character-by-character reading of the standard, for every way to cut the bytes."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.target.sse import SseParser


def by_the_book(stream: bytes) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """The standard's algorithm, one byte at a time: the events dispatched, and the undispatched rest's data."""
    if stream.startswith(b"\xef\xbb\xbf"):
        stream = stream[3:]
    events: list[tuple[bytes, bytes]] = []
    line, data, name = b"", b"", b""
    position = 0
    while position < len(stream):
        byte = stream[position : position + 1]
        position += 1
        if byte not in b"\r\n":
            line += byte
            continue
        if byte == b"\r" and stream[position : position + 1] == b"\n":
            position += 1
        if not line:
            if data:
                events.append((name, data[:-1]))
            data = name = b""
        elif not line.startswith(b":"):
            field, _, value = line.partition(b":")
            if value.startswith(b" "):
                value = value[1:]
            if field == b"data":
                data += value + b"\n"
            elif field == b"event":
                name = value
        line = b""
    return events, data


def parsed(pieces: list[bytes]) -> list[tuple[bytes, bytes]]:
    parser, events = SseParser(), []
    for piece in pieces:
        datas = parser.feed(piece)
        events += [(parser.names.get(position, b""), data) for position, data in enumerate(datas)]
    return events


LINES = [
    b"data: {}",
    b"data:x",
    b"data:  y",
    b"data",
    b"event: error",
    b"event:x",
    b": ping",
    b":",
    b"id: 7",
    b"data: \xff",
    b"",
    b"",
]
BREAKS = [b"\n", b"\r\n", b"\r", b""]  # the last: a line that runs into the next one
STREAMS = st.builds(
    lambda mark, lines: mark + b"".join(line + ending for line, ending in lines),
    st.sampled_from([b"", b"", b"\xef\xbb\xbf", b"\xef\xbb"]),
    st.lists(st.tuples(st.sampled_from(LINES), st.sampled_from(BREAKS)), max_size=12),
)


@settings(max_examples=300)
@given(STREAMS, st.lists(st.integers(0, 120), max_size=8))
def test_any_cut_gives_the_events_of_the_standard(stream: bytes, cuts: list[int]) -> None:
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[a:b] for a, b in pairwise(places)]
    assert parsed(pieces) == by_the_book(stream)[0]


@settings(max_examples=300)
@given(STREAMS)
def test_byte_by_byte_gives_the_events_of_the_standard(stream: bytes) -> None:
    assert parsed([stream[i : i + 1] for i in range(len(stream))]) == by_the_book(stream)[0]


@pytest.mark.parametrize(
    ("rest", "event"),
    [
        (b"data: [DONE]", b"[DONE]"),
        (b"data: [DONE]\n", b"[DONE]"),
        (b'data: {"a": 1}\n', b'{"a": 1}'),
        (b'data: {"a": 1', None),
        (b"data: bye", None),
        (b": ping", None),
        (b"", None),
    ],
)
def test_unterminated_last_event(rest: bytes, event: bytes | None) -> None:
    parser = SseParser()
    assert parser.feed(b"data: 1\n\n" + rest) == [b"1"]
    assert parser.end() == event


def test_a_name_belongs_to_its_event_alone() -> None:
    parser = SseParser()
    assert parser.feed(b"data: 1\n\nevent: error\ndata: 2\n\ndata: 3\n\n") == [b"1", b"2", b"3"]
    assert parser.names == {1: b"error"}
    assert parser.feed(b"data: 4\n\n") == [b"4"]
    assert parser.names == {}
