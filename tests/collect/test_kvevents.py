"""KV events of a real vLLM 0.32 folded with what was asked: the hits that its answers state."""

import base64
import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.collect.kvframes import Change, read
from kvbench.collect.residents import Asked, Residents
from kvbench.metrics import kv

DATA = Path(__file__).parent.parent / "data" / "kvevents"
LINES = (DATA / "vllm-0.32.jsonl").read_text().splitlines()
FRAMES = [[base64.b64decode(part) for part in json.loads(line)["parts_base64"]] for line in LINES]
REQUESTS = json.loads((DATA / "requests.json").read_text())


def folded(cached: bool) -> tuple[Residents, list]:
    """The recorded stream and its eight requests, `t` when each was sent; each had ended when the next was."""
    residents, zero = Residents(), 1795984120.0
    for frame in FRAMES:
        batch = read(frame[2])
        for change in batch.changes:
            residents.change(batch.time - zero, batch.rank, change)
    ends = [*(request["t"] for request in REQUESTS[1:]), REQUESTS[-1]["t"] + 1.5]
    for request, end in zip(REQUESTS, ends, strict=True):
        told = request["usage"]["cached_tokens"] if cached else None
        residents.asked(Asked(request["i"], request["t"] - zero, end - zero, request["prompt_ids"], told))
    return residents, list(residents.until(float("inf")))


@pytest.mark.parametrize("cached", [True, False])
def test_eight_requests_that_share_256_tokens_hit_as_their_answers_say(cached: bool) -> None:
    residents, lines = folded(cached)
    block = residents.blocks[0]
    ops = Counter(line.op for line in lines)
    stated = sum(request["usage"]["cached_tokens"] for request in REQUESTS)
    looked_up = sum((request["usage"]["prompt_tokens"] - 1) // block for request in REQUESTS)
    assert stated == 7 * 256
    assert ops["hit"] * block == stated
    assert ops["hit"] + ops["miss"] == looked_up
    assert residents.unresolved == 0
    found = kv.fold(lines, 60.0, 1.0, None)
    assert found["block_hit_rate"] == pytest.approx(stated / block / looked_up)
    assert sum(found["misses"].values()) == ops["miss"]
    first = [line for line in lines if line.op == "miss" and line.job == REQUESTS[0]["i"]]
    assert {line.reason for line in first} == {"compulsory"}
    later = [line for line in lines if line.op == "miss" and line.job == REQUESTS[1]["i"]]
    assert [line.reason for line in later] == ["divergence"] + ["compulsory"] * (len(later) - 1)


def test_every_block_that_a_request_held_is_let_go() -> None:
    """Prompts and answers alike; the last eight blocks are of a request that is not among the eight."""
    _, lines = folded(True)
    cleared = next(line.t for line in lines if line.op == "reset")
    stored = {line.key for line in lines if line.op == "alloc" and line.t < cleared}
    assert len(stored) == 14 + 7 * 6 + 8
    assert {line.key for line in lines if line.op == "free"} == stored


def test_frames_are_vllms() -> None:
    first = read(FRAMES[0][2])
    assert FRAMES[0][0] == b"kv"
    assert [int.from_bytes(frame[1], "big") for frame in FRAMES] == list(range(17))
    assert (first.rank, first.ignored) == (0, 0)
    assert [change.kind for change in first.changes] == ["stored"]
    assert first.changes[0].parent is None
    assert first.changes[0].tokens[0][:3] == (1000, 1001, 1002)
    assert first.changes[0].tier == "gpu"


def test_the_older_form_of_events_is_read_too() -> None:
    said = [
        1.5,
        [["BlockStored", [1, 2], None, [7, 8, 9, 10], 2, None, "GPU"], ["BlockRemoved", [1]], ["AllBlocksCleared"], ["New", 1]],
    ]
    batch = read(msgspec.msgpack.encode(said))
    assert batch == (1.5, (
        Change("stored", ("0" * 15 + "1", "0" * 15 + "2"), None, ((7, 8), (9, 10)), 2),
        Change("removed", ("0" * 15 + "1",)),
        Change("cleared"),
    ), 0, 1)  # fmt: skip
    hashes = msgspec.msgpack.encode([1.5, [{"type": "BlockRemoved", "block_hashes": [b"\x01" * 32], "medium": "CPU"}], 3])
    assert read(hashes) == (1.5, (Change("removed", ("01" * 8,), tier="cpu"),), 3, 0)


PLAIN = st.none() | st.integers(-(2**40), 2**40) | st.text(max_size=5) | st.floats()
PACKED = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=4), max_leaves=12).map(msgspec.msgpack.encode)


@given(st.binary(max_size=200) | PACKED)
def test_what_is_no_batch_is_a_value_error(payload: bytes) -> None:
    try:
        read(payload)
    except ValueError:
        pass


def test_reasons_are_those_of_the_moment() -> None:
    """By hand: one block of two tokens stored, evicted, looked up; stored again, cleared, looked up."""
    residents = Residents()
    stored = Change("stored", ("a" * 16,), None, ((1, 2),), 2)
    residents.change(1.0, 0, stored)
    residents.change(2.0, 0, Change("removed", ("a" * 16,)))
    residents.change(3.1, 0, stored)
    residents.change(4.0, 0, Change("cleared"))
    residents.change(5.1, 0, stored)
    for job, sent in ((1, 0.9), (2, 3.0), (3, 5.0), (4, 6.0)):
        residents.asked(Asked(job, sent, sent + 0.5, (1, 2, 3), 2 if job == 4 else 0))
    lines = list(residents.until(100.0))
    looked = [(line.job, line.op, line.reason) for line in lines if line.op in ("hit", "miss")]
    assert looked == [(1, "miss", "compulsory"), (2, "miss", "evicted"), (3, "miss", "reset"), (4, "hit", "")]
    assert [line.t for line in lines] == sorted(line.t for line in lines)


def looked(residents: Residents) -> list[tuple[float, int, str, str]]:
    """(when, job, key's first letter and hit or miss, reason)."""
    found = [line for line in residents.until(100.0) if line.op in ("hit", "miss")]
    return [(line.t, line.job, f"{line.key[0]} {line.op}", line.reason) for line in found]


A, B, C, X = ("a" * 16,), ("b" * 16,), ("c" * 16,), ("f" * 16,)
FIRST = Change("stored", A + B, None, ((1, 2), (3, 4)), 2)  # of prompt 1 2 3 4 9
SECOND = Change("stored", C, A[0], ((5, 6),), 2)  # what prompt 1 2 5 6 9 has to store beside it


def test_what_another_request_stored_does_not_say_when_this_one_looked_up() -> None:
    """Job 2 waits while job 1 stores their common block, and is let in at 3 s: by then another is known behind that block."""
    residents = Residents()
    residents.change(1.0, 0, FIRST)
    residents.change(3.0, 0, SECOND)
    residents.asked(Asked(1, 0.0, 2.0, (1, 2, 3, 4, 9), 0))
    residents.asked(Asked(2, 0.5, 4.0, (1, 2, 5, 6, 9), 2))
    residents.asked(Asked(3, 0.6, 4.0, (1, 2, 9), 2))  # had nothing to store: at 1 s at the earliest
    assert looked(residents) == [
        (1.0, 1, "a miss", "compulsory"), (1.0, 1, "b miss", "compulsory"), (1.0, 3, "a hit", ""),
        (3.0, 2, "a hit", ""), (3.0, 2, "c miss", "divergence"),
    ]  # fmt: skip


def test_requests_of_one_step_look_up_in_the_order_of_their_events() -> None:
    """All in one message: room is made for job 1, it stores; job 2 finds what job 1 stored; job 3 misses what made room. They
    end in the opposite order."""
    residents = Residents()
    old = Change("stored", X, None, ((7, 8),), 2)
    residents.change(0.1, 0, old)
    for change in (Change("removed", X), FIRST, SECOND, old):
        residents.change(1.0, 0, change)
    for asked in (
        Asked(3, 0.5, 2.0, (7, 8, 9), 0),
        Asked(2, 0.5, 3.0, (1, 2, 5, 6, 9), 2),
        Asked(1, 0.5, 4.0, (1, 2, 3, 4, 9), 0),
    ):
        residents.asked(asked)
    assert looked(residents) == [
        (1.0, 1, "a miss", "compulsory"), (1.0, 1, "b miss", "compulsory"),
        (1.0, 2, "a hit", ""), (1.0, 2, "c miss", "divergence"), (1.0, 3, "f miss", "evicted"),
    ]  # fmt: skip


def test_lines_are_told_once_and_in_order() -> None:
    residents = Residents()
    residents.change(2.0, 0, Change("stored", ("b" * 16,), None, ((1, 2),), 2))
    residents.change(1.0, 0, Change("stored", ("a" * 16,), None, ((3, 4),), 2))
    assert [line.key[0] for line in residents.until(1.5)] == ["a"]
    assert [line.key[0] for line in residents.until(9)] == ["b"]
