"""The standard prompt set: fixed to the byte, spread in length, dealt in its order, and alike nothing but itself."""

import hashlib
import json
import re
from collections import Counter
from math import log2
from pathlib import Path
from typing import Any

import pytest

from kvbench.compose import seeds
from kvbench.workload import standard as module
from kvbench.workload.mix import Mix
from kvbench.workload.standard import Standard, standard, standard_class

FILE = Path(__file__).parents[2] / "profiles" / "prompts" / "standard-v1.jsonl"
RECORDS = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
TEXTS = [record["messages"][0]["content"] for record in RECORDS]


def dealt(nonce: int | None, count: int) -> list[Any]:
    mix = Mix({"standard": standard_class()}, seeds(7), nonce, stream="baseline")
    return [mix.next(0.0) for _ in range(count)]


def test_version_1_never_changes() -> None:
    """A change of the file is a new version: baselines that say standard-v1 must all have sent this."""
    digest = "e76f10de8623f3d0a31fd0c58124679f5d0d21869c380fa111a8d8bb41c54ab1"  # sha256sum
    assert hashlib.sha256(FILE.read_bytes()).hexdigest() == digest
    assert (standard().version, standard().digest) == ("standard-v1", digest)
    assert FILE.stat().st_size < 150_000


def test_a_hundred_different_prompts_of_one_version() -> None:
    assert [record["id"] for record in RECORDS] == list(range(1, 101))
    assert {record["version"] for record in RECORDS} == {"standard-v1"}
    assert {record["temperature"] for record in RECORDS} == {0}
    assert all(1 <= record["max_tokens"] <= 192 for record in RECORDS)
    assert len({record["task"] for record in RECORDS}) > 50
    assert len({text[:16] for text in TEXTS}) == 100  # no two begin alike: none finds another's blocks


def test_lengths_spread_over_two_orders_of_magnitude() -> None:
    lengths = [len(text.encode()) / 4 for text in TEXTS]
    assert min(lengths) < 21
    assert 1800 < max(lengths) < 2000
    octaves = Counter(int(log2(length)) for length in lengths)
    assert all(octaves[octave] >= 5 for octave in range(4, 11))  # 16 to 32, ..., 1,024 to 2,048
    assert max(octaves.values()) <= 30


def test_the_first_few_cover_the_range_and_the_very_first_is_ordinary() -> None:
    tokens = standard().tokens
    assert min(tokens[:10]) < 50
    assert max(tokens[:10]) > 350
    assert 0.8 < tokens[0] / standard().median() < 1.25


def test_prompts_are_dealt_in_file_order_as_they_stand_behind_the_nonce() -> None:
    requests = dealt(99, 101)
    texts = [request.messages[0].text for request in requests]
    assert [re.sub(r"^\[[0-9a-f]{15}\] ", "", text) for text in texts] == [*TEXTS, TEXTS[0]]
    assert texts[100] != texts[0]  # a second pass is another nonce's
    assert [request.max_tokens for request in requests[:100]] == [record["max_tokens"] for record in RECORDS]
    assert all(request.sampling == {"temperature": 0} and not request.force for request in requests)
    assert {request.messages[0].role for request in requests} == {"user"}


def test_on_the_engine_no_two_prompts_share_content_and_no_two_runs_do() -> None:
    here, there = dealt(1, 100), dealt(2, 100)
    keys = [request.segments()[0][0] for request in (*here, *there)]
    assert len(set(keys)) == 200
    assert [request.tokens for request in here] == [request.tokens for request in there]
    mark = 18 / 4  # "[15 hex] " at four bytes a token
    assert all(abs(r.tokens - len(text.encode()) / 4 - mark) <= 1 for r, text in zip(here, TEXTS, strict=True))


def test_how_many_go_beyond_a_context() -> None:
    few = Standard("v", "d", (100, 10, 50), (28, 5, 100))
    assert [few.beyond(context, 3) for context in (14, 15, 127, 128, 149, 150)] == [3, 2, 2, 1, 1, 0]
    assert few.beyond(100, 2) == 1
    assert few.median() == 50


def test_a_file_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "standard-v1.jsonl"
    lines = FILE.read_text(encoding="utf-8").splitlines()
    other.write_text("\n".join([lines[0], lines[1].replace("standard-v1", "standard-v2")]), encoding="utf-8")
    monkeypatch.setattr(module, "path", lambda: other)
    with pytest.raises(ValueError, match=r"standard-v1\.jsonl:2: version 'standard-v2' in the file of standard-v1"):
        standard.__wrapped__()
