"""The reader of metrics pages against prometheus-client's own parser over whole pages."""

import asyncio
import itertools
import math
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvbench.collect.exposition import NotAPageError, Page, Reader, families
from kvbench.collect.scrape import SLICE, unhurried
from tests.collect.pages import DATA

VLLM = (DATA / "vllm-0.32-cpu.prom").read_text()
Values = list[tuple[str, tuple[tuple[str, str], ...], float]]


def by_the_parser(text: str) -> Values:
    found = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return sorted((s.name, tuple(sorted(s.labels.items())), s.value) for s in found)


def by_us(reader: Reader, *parts: bytes) -> Values:
    page = Page()
    for _ in reader.reading(parts, page):
        pass
    return sorted((row.name, row.labels, row.value) for rows in page.rows.values() for row in rows)


def test_every_number_of_a_real_page() -> None:
    """At the first reading (all heads new), and at the next (all of them known)."""
    reader, whole = Reader(None), by_the_parser(VLLM)
    assert len(whole) > 400
    assert by_us(reader, VLLM.encode()) == whole
    assert by_us(reader, VLLM.replace(" 0.0\n", " 17.5\n").encode()) == by_the_parser(VLLM.replace(" 0.0\n", " 17.5\n"))


def test_only_what_is_asked_for() -> None:
    found = by_us(Reader({"vllm:num_preemptions_total", "vllm:time_to_first_token_seconds_count"}), VLLM.encode())
    assert [name for name, *_ in found] == ["vllm:num_preemptions_total", "vllm:time_to_first_token_seconds_count"]


LABEL = st.text(
    alphabet=st.characters(exclude_categories=("Cs",), exclude_characters="\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"), max_size=8
)


@st.composite
def pages(draw: st.DrawFn) -> str:
    registry = CollectorRegistry()
    for number in range(draw(st.integers(1, 4))):
        gauge = Gauge(f"g{number}:x_{number}", "what {it} is # \\ ", ["a", "b"], registry=registry)
        for labels in draw(st.lists(st.tuples(LABEL, LABEL), max_size=4)):
            gauge.labels(*labels).set(draw(st.floats(allow_nan=False)))
    return generate_latest(registry).decode()


@settings(max_examples=60, deadline=None)
@given(pages(), st.lists(st.integers(0, 400), max_size=4))
def test_random_pages_in_parts_of_any_size(text: str, cuts: list[int]) -> None:
    """Labels with quotes, braces, commas, line breaks and characters of several bytes, cut anywhere."""
    raw = text.encode()
    ends = sorted({min(cut, len(raw)) for cut in cuts} | {0, len(raw)})
    parts = [raw[a:b] for a, b in itertools.pairwise(ends)]
    reader, whole = Reader(None), by_the_parser(text)
    assert by_us(reader, *parts) == whole
    assert by_us(reader, *parts) == whole


def test_times_exemplars_and_infinities() -> None:
    lines = ['a{x="}"} 1 1700000000000', "b\t2", 'c{x="1"} +Inf', "d NaN", 'e{le="1"} 5 # {trace="}"} 0.7', ""]
    found = {name: value for name, _, value in by_us(Reader(None), "\r\n".join(lines).encode())}
    assert (found["a"], found["b"]) == (1, 2)
    assert found["c"] == math.inf
    assert math.isnan(found["d"])
    assert found["e"] == 5
    reader = Reader(None)
    assert [by_us(reader, b"b\t12\n"), by_us(reader, b"b\t15\n")] == [[("b", (), 12)], [("b", (), 15)]]
    assert [by_us(reader, b'e{le="1"} 5 # {t="}"} 0.7\n'), by_us(reader, b'e{le="1"} 6 # {t="}"} 0.7\n')] == [
        [("e", (("le", "1"),), 5)], [("e", (("le", "1"),), 6)],
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["<html>", '{"detail": 1}'[1:], "[1, 2]", 'a{x="1"} one', "a 1_0"])
def test_what_is_no_page_is_said_to_be_none(text: str) -> None:
    with pytest.raises(NotAPageError, match=r"line 2|Prometheus"):
        by_us(Reader(None), b"ok 1\n" + text.encode() + b"\n")
    assert by_us(Reader(None), b"ok 1\n") == [("ok", (), 1)]


def test_metrics_are_listed_with_type_and_help() -> None:
    found = {family.name: family for family in families(VLLM)}
    preemptions = found["vllm:num_preemptions"]
    assert (preemptions.kind, preemptions.series) == ("counter", 1)
    assert "preemption" in preemptions.help


def test_others_have_their_turn_between_parts() -> None:
    """Work of ten parts of which each takes longer than a slice gives the loop as many turns."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def work() -> Iterator[None]:
        for _ in range(10):
            sum(range(20_000))
            yield

    async def play() -> None:
        beside = asyncio.ensure_future(other())
        await unhurried(work())
        beside.cancel()

    asyncio.run(play())
    assert turns >= 9


def test_a_full_page_never_holds_the_loop_for_a_millisecond() -> None:
    """The whole page of a vLLM, every sample of it, when nothing of it is known yet: a slice ends with the part that exceeds it.
    By CPU time, the least of several readings of each part: another process in the middle of one is no work of ours."""
    body = [VLLM.encode()[at : at + 16384] for at in range(0, len(VLLM), 16384)]

    def parts(reader: Reader) -> Iterator[float]:
        began = time.thread_time()
        for _ in reader.reading(body, Page()):
            yield time.thread_time() - began
            began = time.thread_time()

    least = [min(each) for each in zip(*(parts(Reader(None)) for _ in range(5)), strict=True)]
    reader = Reader(None)
    whole = [sum(parts(reader)) for _ in range(5)]
    print(f"\npart at most {1e3 * max(least):.2f} ms, page new {1e3 * sum(least):.1f} ms, known {1e3 * min(whole[1:]):.2f} ms")
    assert max(least) + SLICE / 1e9 < 1e-3
    assert min(whole[1:]) < whole[0] / 3, "what stands before a value is parsed once"
