"""Group E of the public cases, as whole runs: however the stream is cut and spelt, the same requests succeed."""

from pathlib import Path

import pytest

from tests.stub.stub import DONE, FIN, C, Reply, Stub, U
from tests.whole import Whole, against, served

AB = b'data: {"choices":[{"index":0,"delta":{"content":"a b"}}]}\n\n'
END = FIN + U(8, 1) + DONE


def bytewise(data: bytes, ms: float = 0.2) -> list[tuple[float, bytes]]:
    return [(ms * k, data[k : k + 1]) for k in range(len(data))]


def run(replies: list[Reply], folder: Path, users: int = 1, target: str = "") -> Whole:
    text = served(f"{{shape: closed, concurrency: {users}}}", f"{{steady: {{requests: {len(replies)}}}}}", target=target)
    return against(Stub(lambda seen: replies[seen.number]), text, folder)


def test_e01_a_cut_anywhere_changes_nothing(tmp_path: Path) -> None:
    cuts = [Reply([(0, AB[:at]), (20, AB[at:]), (21, END)]) for at in (5, AB.index(b" b"), AB.index(b"b"))]
    found = run([*cuts, Reply(bytewise(AB + END))], tmp_path)
    assert [(r.outcome, len(r.token_ns), r.n_out) for r in found.records] == [("ok", 1, 1)] * 4
    assert found.summary["streaming"]["malformed"] == found.summary["streaming"]["ignored"] == 0


def test_e02_every_spelling_of_an_event_is_read_and_a_half_event_is_not(tmp_path: Path) -> None:
    spellings = [
        AB.replace(b"data: ", b"data:"), AB.replace(b"data: ", b"data:  "), AB.replace(b"\n", b"\r\n"), AB.replace(b"\n", b"\r"),
        b"\xef\xbb\xbf" + AB,
    ]  # fmt: skip
    unterminated = [b"data: [DONE]", C("z", finish="stop").rstrip()[:-4]]
    found = run([Reply([(0, each + END)]) for each in spellings] + [Reply([(0, AB + tail)]) for tail in unterminated], tmp_path)
    assert [(r.outcome, len(r.token_ns)) for r in found.records] == [("ok", 1)] * 6 + [("failed", 1)]


def test_e03_keep_alives_under_load_are_no_tokens_and_keep_a_request_alive(tmp_path: Path) -> None:
    """64 at once: `:` and other fields between the events, 100 ms apart; idle limit 250 ms, 400 ms to the answer."""
    noise = [(100.0, b":\n\n"), (200.0, b": keep-alive\n\n"), (300.0, b"id: 7\nretry: 500\n\nevent: message\n\n")]
    reply = Reply([(0, b":\n\n"), *noise, (400.0, C("a")), (401.0, END)])
    found = run([reply] * 64, tmp_path, users=64, target="timeouts: {idle: 250ms}")
    assert found.summary["outcomes"]["ok"] == 64
    assert found.summary["latency"]["ttft"]["min"] >= 0.4
    assert [len(r.token_ns) for r in found.records] == [1] * 64


@pytest.mark.parametrize(("text", "replaced"), [("héllo 世界 🚀", 0), ("a?b", 1)])
def test_e05_characters_cut_between_reads_are_whole_and_invalid_ones_counted(text: str, replaced: int, tmp_path: Path) -> None:
    """One byte at a time, 1 ms apart, as the answer of a session's first turn: its second turn repeats the text to the letter."""
    told = C(text).replace(b"?", b"\xff")
    bodies = []

    def script(seen: object) -> Reply:
        bodies.append(seen.json())  # type: ignore[attr-defined]  # a Seen
        return Reply([*bytewise(told, 1.0), (float(len(told)) + 1, END)])

    workload = "sessions: {turns: 2, think: 1ms}"
    found = against(
        Stub(script), served("{shape: closed, concurrency: 1}", "{steady: {requests: 2}}", workload=workload), tmp_path
    )
    assert [(r.outcome, r.replaced) for r in found.records] == [("ok", replaced)] * 2
    assert bodies[1]["messages"][1]["content"] == text.replace("?", "�")
    assert found.summary["streaming"]["replaced_utf8"] == 2 * replaced
