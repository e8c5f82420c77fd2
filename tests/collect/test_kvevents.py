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


def test_lines_are_told_once_and_in_order() -> None:
    residents = Residents()
    residents.change(2.0, 0, Change("stored", ("b" * 16,), None, ((1, 2),), 2))
    residents.change(1.0, 0, Change("stored", ("a" * 16,), None, ((3, 4),), 2))
    assert [line.key[0] for line in residents.until(1.5)] == ["a"]
    assert [line.key[0] for line in residents.until(9)] == ["b"]
