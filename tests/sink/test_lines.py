"""Line protocol against a parser of this file's own, written from the format's description; instants; schema; tags."""

import math
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core import Event, Record, Sample, Window
from kvbench.sink.lines import LONGEST_TEXT, Moments, count, number, tag, text
from kvbench.sink.points import CAP, ITEM_TAGS, RUN_TAGS, Points, engine_of, tags_of

WALL = 1_700_000_000.25
ZERO = 1_700_000_000_250_000_000


def parse(line: str) -> tuple[str, dict[str, str], dict[str, Any], int]:
    """(measurement, tags, fields, ns). AssertionError where it is no line of the protocol."""
    assert "\n" not in line
    at = 0

    def token(stops: str) -> str:
        """Up to an unescaped character of `stops`; `\\,`, `\\=` and `\\ ` are the characters."""
        nonlocal at
        found = ""
        while at < len(line) and line[at] not in stops:
            if line[at] == "\\":
                assert line[at + 1] in ",= ", f"a backslash before {line[at + 1]!r}"
                at += 1
            found += line[at]
            at += 1
        assert found
        return found

    measurement = token(", ")
    tags: dict[str, str] = {}
    while line[at] == ",":
        at += 1
        name = token("=")
        at += 1
        assert name not in tags
        tags[name] = token(", =")
    assert list(tags) == sorted(tags), "sorted tags"
    assert line[at] == " "
    fields: dict[str, Any] = {}
    while line[at] in " ," and (not fields or line[at] == ","):
        at += 1
        name = token("=")
        at += 1
        assert name not in fields
        if line[at] == '"':
            at += 1
            value = ""
            while line[at] != '"':
                if line[at] == "\\":
                    at += 1
                    assert line[at] in '"\\'
                value += line[at]
                at += 1
            at += 1
            fields[name] = value
        else:
            raw = ""
            while line[at] not in ", ":
                raw += line[at]
                at += 1
            if raw[-1] == "i":
                fields[name] = int(raw[:-1])
            else:
                assert set(raw) <= set(string.digits + ".+-e"), raw
                fields[name] = float(raw)
    assert line[at] == " "
    return measurement, tags, fields, int(line[at + 1 :])


def points(**tags: str) -> Points:
    return Points("run-1", WALL, tags)


ANY = st.text(max_size=40)
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=50, deadline=None)
@given(ANY, ANY, st.dictionaries(ANY, ANY, max_size=4), NUMBERS, st.floats(0, 1e6))
def test_any_sample_is_one_line_that_says_the_same(
    name: str, source: str, labels: dict[str, str], value: float, t: float
) -> None:
    made = points(scenario="a b,c=d\\")
    line = made.line(Sample(t=t, name=name, value=value, source=source, labels=labels))
    if not math.isfinite(value):
        assert (line, made.skipped) == ("", 1)
        return
    line.encode()  # a surrogate would not be text
    measurement, tags, fields, ns = parse(line)
    assert measurement in ("kvbench_gpu", "kvbench_server")
    assert (tags["run"], tags["scenario"], ns) == ("run-1", "a b,c=d/", ZERO + round(t * 1e9))
    assert value in fields.values()
    assert set(tags) <= {*RUN_TAGS, *ITEM_TAGS}
    assert all(isinstance(kept, str) for key, kept in fields.items() if key.startswith("label_"))
    for key, kept in labels.items():
        if tag(kept) and key not in ("source", "engine", *ITEM_TAGS):
            assert fields[f"label_{tag(key)}"] in {tag(value) for name, value in labels.items() if tag(name) == tag(key)}


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(ANY, st.one_of(NUMBERS, st.integers(), ANY, st.booleans(), st.none(), st.lists(ANY, max_size=2)), max_size=6),
    ANY,
)
def test_any_event_is_one_line(data: dict[str, Any], kind: str) -> None:
    line = points().line(Event(t=1.5, kind=kind, data=data))
    measurement, _, fields, ns = parse(line)
    assert (measurement, fields["t"], ns) == ("kvbench_event", 1.5, ZERO + 1_500_000_000)
    assert all(isinstance(value, float) for name, value in fields.items() if name != "text" and not name.startswith("label_"))


@settings(deadline=None)
@given(st.text(max_size=2000))
def test_text_comes_back_but_for_control_characters(value: str) -> None:
    back = parse(f"m a={text(value)} 1")[2]["a"]
    assert len(back) <= LONGEST_TEXT
    if len(value) <= LONGEST_TEXT and value.isprintable():
        assert back == value


def test_a_window_is_its_counts_and_what_was_measured() -> None:
    window = Window(start=10.0, end=20.0, counts={"offered": 30, "ok": 0},
                    values={"ttft_p99": 0.8, "hit_rate": 0, "tpot_p99": None, "ok": 7.5})  # fmt: skip
    line = points(scenario="wave", model="m").line(window)
    assert line == (
        "kvbench_window,model=m,run=run-1,scenario=wave t=20.0,window_s=10.0,offered=30i,ok=0i,ttft_p99=0.8,hit_rate=0.0 "
        "1700000020250000000"
    )


def test_a_gpu_and_a_server_have_measurements_of_their_own() -> None:
    made = points()
    gpu = made.line(Sample(t=0.0, name="power", value=300, source="nvml", labels={"uuid": "GPU-1", "gpu": "0"}))
    assert gpu == "kvbench_gpu,gpu=0,run=run-1,source=nvml,uuid=GPU-1 power=300.0 1700000000250000000"
    one = made.line(Sample(t=0.0, name="running", value=3, source="prometheus", labels={"engine": "1", "le": "0.5"}))
    assert one == 'kvbench_server,replica=1,run=run-1,source=prometheus running=3.0,label_le="0.5" 1700000000250000000'
    assert made.line(Sample(t=0.0, name="running", value=None, source="target")) == ""


def test_a_name_of_a_tag_is_no_field() -> None:
    made = points()
    for name in ("time", "run", "gpu"):
        assert parse(made.line(Sample(t=0.0, name=name, value=1.0)))[2] == {f"{name}_": 1.0}


def test_an_event_carries_its_numbers_and_all_of_it_as_text() -> None:
    line = points().line(Event(t=2.0, kind="stop", data={"phase": "steady", "reason": 'it said "no"', "n": 3, "hit": True}))
    _, tags, fields, _ = parse(line)
    assert tags == {"run": "run-1", "kind": "stop", "phase": "steady"}
    assert fields == {"t": 2.0, "n": 3.0, "text": '{"phase":"steady","reason":"it said \\"no\\"","n":3,"hit":true}'}


def test_the_clock_of_the_run_starts_with_its_first_event() -> None:
    made = points()
    made.line(Event(t=0.0, kind="run_start", data={"wall": 1_700_000_001.5}))
    assert parse(made.line(Event(t=1.0, kind="stop")))[3] == 1_700_000_002_500_000_000


def test_a_request_is_what_its_formulas_say() -> None:
    record = Record(id=7, cls="chat", outcome="ok", due_ns=1_000_000_000, release_ns=1_000_000_000, sent_ns=1_100_000_000,
                    first_ns=1_350_000_000, done_ns=2_100_000_000, end_ns=2_100_000_001, n_in=10, n_out=4)  # fmt: skip
    measurement, tags, fields, ns = parse(points().line(record))
    assert (measurement, ns) == ("kvbench_request", ZERO + 2_100_000_001)
    assert tags == {"run": "run-1", "class": "chat", "phase": "steady", "outcome": "ok"}
    assert {name: fields[name] for name in ("id", "n_in", "n_out", "measured")} == {
        "id": 7,
        "n_in": 10,
        "n_out": 4,
        "measured": 1,
    }
    assert (fields["ttft"], fields["response_ttft"], fields["e2e"]) == (0.25, 0.35, 1.0)
    assert "tpot" not in fields  # the token times are not known


@pytest.mark.parametrize("value", [0, 0.5, 1e300, -3, 10**20])
def test_a_number_is_a_float_whatever_python_calls_it(value: float) -> None:
    assert isinstance(parse(f"m a={number(value)} 1")[2]["a"], float)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
def test_what_no_server_takes_is_nothing(value: float) -> None:
    assert number(value) == ""


def test_an_integer_is_of_64_bits() -> None:
    assert [count(value) for value in (2**63 - 1, -(2**63), 2**63)] == ["9223372036854775807i", "-9223372036854775808i", ""]


def test_tags_beyond_the_cap_are_a_field_and_said_once() -> None:
    made = points()
    lines = [made.line(Sample(t=float(n), name="x", value=1.0, labels={"host": f"h{n}"})) for n in range(CAP + 5)]
    assert len({parse(line)[1].get("host") for line in lines}) == CAP + 1
    _, tags, fields, _ = parse(lines[-1])
    assert ("host" in tags, fields["label_host"]) == (False, f"h{CAP + 4}")
    assert parse(made.line(Sample(t=1e4, name="x", value=1.0, labels={"host": "h3"})))[1]["host"] == "h3"
    assert made.notes == ["tag host of kvbench_server has more than 1,000 values: further ones are the field label_host"]


def test_the_run_tags_are_those_of_its_facts() -> None:
    assert tags_of({"scenario": "wave", "model": None, "engine": "", "extra": "x"}, {"lab": "2"}) == {
        "lab": "2",
        "scenario": "wave",
    }


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), max_size=200), st.integers(1, 8))
def test_no_two_points_of_a_series_share_an_instant(at: list[int], depth: int) -> None:
    moments = Moments(depth)
    given_ = [moments.at(ns) for ns in at]
    assert len(set(given_)) == len(at)
    again = Moments(depth)
    assert [again.at(ns) for ns in at] == given_, "the same points get the same instants"


def test_what_comes_in_order_or_a_little_late_keeps_its_instant() -> None:
    moments = Moments(4)
    assert [moments.at(ns) for ns in (10, 20, 15, 30, 15, 1)] == [10, 20, 15, 30, 31, 32]


@pytest.mark.parametrize(
    ("target", "kinds", "engine"),
    [
        ({"engine": "vllm"}, [], "vllm"),
        ({}, [["sglang"], ["dcgm"], ["kvbench-agent"]], "sglang"),
        ({}, [["vllm"], ["sglang"]], None),
        ({}, [], None),
    ],
)
def test_the_engine_is_the_profile_or_the_one_kind_of_server(target: dict[str, str], kinds: list[list[str]], engine: str) -> None:
    assert (
        engine_of(target, [{"source": "nvml"}, {"source": "prometheus", "pages": [{"kinds": each} for each in kinds]}]) == engine
    )
