"""Group D of the public cases, as whole runs: what the summary says of first tokens, gaps, decode speed and counts.

Exact arithmetic is in test_d_tokens.py, on stated stamps; here the stub writes on a real clock, so times have a tolerance.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.stub.stub import DONE, FIN, ROLE, C, R, Reply, Stub, U, answer_json, delta, sse, stream, usage
from tests.whole import Whole, against, kvbench, served

pytestmark = pytest.mark.alone
CLOSE = 0.012  # s: a loopback and two event loops on a busy machine


def run(replies: list[Reply], folder: Path, *, users: int = 1, target: str = "") -> Whole:
    """One request for each reply, in order."""
    text = served(f"{{shape: closed, concurrency: {users}}}", f"{{steady: {{requests: {len(replies)}}}}}", target=target)
    return against(Stub(lambda seen: replies[seen.number]), text, folder)


def row(found: Whole, name: str) -> dict[str, Any]:
    latency: dict[str, Any] = found.summary["latency"][name]
    return latency


def test_d01_reasoning_starts_ttft_and_content_has_its_own(tmp_path: Path) -> None:
    answered = Reply([(50, ROLE), (200, R("t1")), (220, R("t2")), (1000, C("ans")), (1001, FIN), (1002, U(10, 40)), (1003, DONE)])
    cut = Reply([(50, ROLE), (200, R("t1")), (220, R("t2")), (221, sse(delta({}, "length")) + DONE)])
    found = run([answered, cut], tmp_path, users=2)
    assert found.summary["outcomes"]["ok"] == 2
    assert (row(found, "ttft")["n"], row(found, "ttfc")["n"]) == (2, 1)
    assert row(found, "ttft")["max"] == pytest.approx(0.2, abs=CLOSE)
    assert row(found, "ttfc")["max"] == pytest.approx(1.0, abs=CLOSE)
    assert found.summary["tokens"]["by_source"]["usage"] == {"requests": 1, "n_in": 10, "n_out": 40, "reasoning": 0}


@pytest.mark.parametrize("opening", [ROLE, sse(delta({"role": "assistant", "content": None})), sse(delta({"role": "assistant"}))])
def test_d03_an_opening_without_text_is_no_token(opening: bytes, tmp_path: Path) -> None:
    steps = [(5, opening), (10, b": ping\n\n"), (300, C("x")), (320, C("y")), (321, FIN + U(4, 2) + DONE)]
    found = run([Reply(steps), stream(opening, FIN, DONE)], tmp_path)
    assert (row(found, "ttft")["n"], row(found, "itl")["n"]) == (1, 1)
    assert row(found, "ttft")["p50"] == pytest.approx(0.300, abs=CLOSE)
    assert row(found, "itl")["p50"] == pytest.approx(0.020, abs=CLOSE)
    assert found.records[1].first_ns is None
    assert found.summary["streaming"]["no_visible_output"] == 1


def test_d04_no_visible_output_is_flagged_and_averaged_into_nothing(tmp_path: Path) -> None:
    """A tenth of its time: 470 ms, then usage of 1,000 tokens without any text; one plain answer beside it."""
    plain = Reply([(100, C("a")), (120, C("b")), (121, FIN + U(5, 2) + DONE)])
    found = run([Reply([(470, FIN + U(5, 1000) + DONE)]), plain], tmp_path)
    silent = found.records[0]
    assert (silent.outcome, silent.first_ns, silent.token_ns, silent.n_out) == ("ok", None, [], 1000)
    assert [row(found, name)["n"] for name in ("ttft", "itl", "tpot")] == [1, 1, 1]
    assert row(found, "ttft")["mean"] == pytest.approx(0.1, abs=CLOSE)
    assert row(found, "e2e")["max"] == pytest.approx(0.47, abs=CLOSE)
    assert "no visible output: 1 of 2 answers had no text and have no ttft and tpot" in found.summary["warnings"]


def test_d05_the_wait_for_the_first_token_is_no_gap(tmp_path: Path) -> None:
    found = run([Reply([*((1000 + 40.0 * k, C("x")) for k in range(10)), (1361, FIN + U(8, 10) + DONE)])], tmp_path)
    assert row(found, "itl")["n"] == 9
    assert row(found, "itl")["p50"] == pytest.approx(0.040, abs=CLOSE)
    assert row(found, "itl")["max"] < 0.1
    assert row(found, "ttft")["p50"] == pytest.approx(1.0, abs=CLOSE)


def test_d06_usage_in_every_chunk_makes_itl_exact_and_its_absence_is_said(tmp_path: Path) -> None:
    times = (100, 140, 180, 220)
    counted = [(float(at), C("four", usage=usage(7, 4 * (k + 1)))) for k, at in enumerate(times)]
    plain = [(float(at), C("four")) for at in times]
    last = [(221.0, FIN + U(7, 16) + DONE)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    exact, rough = run([Reply(counted + last)], tmp_path / "a"), run([Reply(plain + last)], tmp_path / "b")
    for found in (exact, rough):
        assert row(found, "ttft")["p50"] == pytest.approx(0.100, abs=CLOSE)
        assert (row(found, "icl")["n"], row(found, "icl")["p50"]) == (3, pytest.approx(0.040, abs=CLOSE))
        assert found.summary["tokens"]["output"]["got"] == 16
    assert row(exact, "tpot")["p50"] == pytest.approx(0.010, rel=0.1)
    assert (row(exact, "itl")["n"], row(exact, "itl")["mean"]) == (12, pytest.approx(0.010, rel=0.1))
    assert row(exact, "tpot")["approximate"] == 0
    assert row(rough, "tpot")["p50"] == pytest.approx(0.008, rel=0.1)
    assert (row(rough, "tpot")["approximate"], row(rough, "itl")["n"]) == (1, 0)
    assert "see icl" in row(rough, "itl")["reason"]
    assert any(line.startswith("tpot is approximate for 1 of 1 requests") for line in rough.summary["warnings"])


def test_d08_tool_calls_are_tokens(tmp_path: Path) -> None:
    def call(count: int) -> bytes:
        return sse(delta({"tool_calls": [{"index": 0, "function": {"arguments": "1"}}]}, usage=usage(9, count)))

    end = sse(delta({}, "tool_calls")) + DONE
    mixed = Reply([(435.8, C("ok", usage=usage(9, 1))), (619.4, call(17)), (801.8, call(31)), (802.0, end)])
    alone = Reply([(70, call(5)), (71, end)])
    found = run([mixed, alone], tmp_path, users=2)
    assert found.summary["outcomes"]["ok"] == 2
    assert row(found, "ttft")["max"] == pytest.approx(0.4358, abs=CLOSE)
    assert row(found, "ttft")["min"] == pytest.approx(0.070, abs=CLOSE)
    assert sorted(r.n_out for r in found.records) == [5, 31]
    assert row(found, "tpot")["p50"] == pytest.approx(0.0122, rel=0.05)
    itl = row(found, "itl")
    assert itl["n"] == 16 + 14
    assert (itl["min"], itl["max"]) == (pytest.approx(0.0115, rel=0.08), pytest.approx(0.0130, rel=0.08))


def test_d10_no_token_one_token_no_connection_end_the_run_by_policy(tmp_path: Path) -> None:
    """The third is answered by a reset: nothing divides by zero, the run goes on to its end, and exit follows the verdict."""
    replies = [
        stream(FIN, U(4, 0), DONE),
        stream(C("x"), FIN, U(4, 1), DONE),
        Reply(framing="raw", after="rst"),
        stream(C("x"), FIN),
    ]
    found = run(replies, tmp_path)
    assert (found.summary["outcomes"]["ok"], found.summary["outcomes"]["failed"]) == (3, 1)
    for name in ("tpot", "itl", "icl"):
        assert (row(found, name)["n"], row(found, name)["p50"]) == (0, None)
    assert (row(found, "ttft")["n"], row(found, "ntpot")["n"]) == (2, 2)
    assert found.code == 4  # fewer than 30 requests in steady


def test_d11_counts_name_their_source_and_sources_are_not_added(tmp_path: Path) -> None:
    text = [C("he"), C("ll"), C("o"), FIN]
    found = run([stream(*text, U(9, 12), DONE), stream(*text, DONE)], tmp_path)
    assert [(r.n_out, r.source) for r in found.records] == [(12, "usage"), (3, "events")]
    tokens = found.summary["tokens"]
    assert tokens["by_source"]["usage"]["n_out"] == 12
    assert tokens["by_source"]["events"]["n_out"] == 3
    assert tokens["output_rate"]["mixed_sources"] is True
    assert set(tokens["output_rate"]["by_source"]) == {"usage", "events"}
    assert "token counts come from several sources (usage, events): listed apart, not added" in found.summary["warnings"]


def test_d13_usage_without_choices_and_unknown_events_extend_nothing(tmp_path: Path) -> None:
    def reply(choices: dict[str, Any]) -> Reply:
        last = sse({**choices, "usage": usage(5, 2)})
        return Reply([(50, C("a")), (70, C("b")), (71, FIN), (300, sse({"id": "x"})), (400, last), (450, DONE)])

    found = run([reply({"choices": []}), reply({}), reply({"choices": None})], tmp_path, users=3)
    assert [(r.outcome, r.n_in, r.n_out, r.ignored) for r in found.records] == [("ok", 5, 2, 1)] * 3
    assert row(found, "e2e")["max"] == pytest.approx(0.070, abs=CLOSE)
    assert row(found, "itl")["max"] == pytest.approx(0.020, abs=CLOSE)
    assert found.summary["streaming"]["ignored"] == 3
    assert "3 events of a kind that kvbench does not know were ignored" in found.summary["warnings"]


@pytest.mark.parametrize("form", ["delta", "message", "text"])
def test_d14_one_reply_in_three_forms_has_one_count(form: str, tmp_path: Path) -> None:
    """As stream deltas, as a whole message, as /v1/completions' text: 482 tokens by usage in all three."""
    whole = {"choices": [{"index": 0, "message": {"content": "a b"}, "finish_reason": "stop"}], "usage": usage(8, 482)}
    legacy = [sse({"choices": [{"index": 0, "text": text, "finish_reason": None}]}) for text in ("a", " b")]
    reply, target = {
        "delta": (stream(C("a"), C(" b"), FIN, U(8, 482), DONE), ""),
        "message": (answer_json(whole), "stream: false"),
        "text": (stream(*legacy, FIN, U(8, 482), DONE), "api: completions"),
    }[form]
    found = run([reply] * 2, tmp_path, target=target)
    assert found.summary["outcomes"]["ok"] == 2
    assert found.summary["tokens"]["by_source"] == {"usage": {"requests": 2, "n_in": 16, "n_out": 964, "reasoning": 0}}


def test_d16_tpot_is_20_ms_in_every_output(tmp_path: Path) -> None:
    """4 at once, 11 tokens 20 ms apart after 100 ms: in the file, on the console, by phase and class."""
    reply = Reply([*((100 + 20.0 * k, C("x")) for k in range(11)), (301, FIN + U(8, 11) + DONE)])
    found = run([reply] * 4, tmp_path, users=4)
    tpot = row(found, "tpot")
    assert (tpot["n"], tpot["mean"], tpot["p50"]) == (4, pytest.approx(0.020, rel=0.05), pytest.approx(0.020, rel=0.05))
    assert found.summary["phases"][0]["latency"]["tpot"]["mean"] == tpot["mean"]
    assert found.summary["classes"]["default"]["latency"]["tpot"]["p50"] == tpot["p50"]
    assert found.summary["tokens"]["output_rate"]["value"] == pytest.approx(44 / found.summary["headline"]["seconds"])
    console = kvbench("report", found.directory).stdout
    shown = re.search(r"^ *tpot +4 +([\d.]+) ms +([\d.]+) ms", console, re.MULTILINE)
    assert shown is not None, console
    assert float(shown[1]) == pytest.approx(1e3 * tpot["mean"], rel=0.01)
    again = json.loads(kvbench("report", found.directory, "--json").stdout)
    assert again["latency"]["tpot"] == tpot


@pytest.mark.parametrize("asked", ["stream: false", ""], ids=["not asked for", "ignored by the server"])
def test_d18_without_streaming_only_whole_latencies_exist(asked: str, tmp_path: Path) -> None:
    body = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}], "usage": usage(8, 2)}
    late = Reply([(100, json.dumps(body).encode())], headers=(("Content-Type", "application/json"),), framing="chunked")
    found = run([late] * 3, tmp_path, target=asked)
    for name in ("ttft", "itl", "tpot"):
        assert (row(found, name)["n"], row(found, name)["p50"]) == (0, None)
    assert row(found, "ttft")["reason"] == "not streaming"
    assert row(found, "e2e")["p50"] == pytest.approx(0.1, abs=CLOSE)
    said = [line for line in found.summary["warnings"] if "not streaming" in line]
    assert said == ["not streaming: 3 of 3 answers came whole and have no ttft, tpot, icl and itl"]
