"""What every tokenizer promises (kvbench/workload/__init__.py)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core import Message, Request, Segment
from kvbench.workload import Tokenizer
from kvbench.workload.tokenizers import TOKENIZERS, File

DATA = Path(__file__).parents[1] / "data" / "tokenizer" / "tokenizer.json"
MAKE: dict[str, Callable[[], Tokenizer]] = {
    "words": TOKENIZERS["words"],
    "server": TOKENIZERS["server"],
    "ids": TOKENIZERS["ids"],
    "file": lambda: TOKENIZERS["file"](DATA),
    "words, completions": lambda: TOKENIZERS["words"](api="completions"),
    "file, completions": lambda: TOKENIZERS["file"](DATA, api="completions"),
}
READY = {name: make() for name, make in MAKE.items()}
EACH = pytest.mark.parametrize("kind", MAKE)


def rendered(tokenizer: Tokenizer, *segments: Segment) -> list[Any]:
    """The prompt as a list of its words or ids."""
    body = tokenizer.render(Request(id=0, messages=(Message(segments=segments),), tokens=0, max_tokens=1))
    assert set(body) in ({"messages"}, {"prompt"})
    prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    return list(prompt.split(" ") if isinstance(prompt, str) else prompt)


def test_every_tokenizer_is_held_to_the_contract() -> None:
    assert {name.split(",")[0] for name in MAKE} == set(TOKENIZERS)
    assert all(READY[name].name == name.split(",")[0] for name in MAKE)


@EACH
@given(key=st.integers(0, 2**70), short=st.integers(1, 200), more=st.integers(0, 200))
@settings(max_examples=25, deadline=None)
def test_a_segment_is_a_prefix_of_a_longer_one(kind: str, key: int, short: int, more: int) -> None:
    tokenizer = READY[kind]
    assert rendered(tokenizer, (key, short + more))[:short] == rendered(tokenizer, (key, short))


@EACH
@given(segments=st.lists(st.tuples(st.integers(0, 2**60), st.integers(1, 60)), min_size=1, max_size=6))
@settings(max_examples=25, deadline=None)
def test_content_depends_on_the_segments_alone(kind: str, segments: list[Segment]) -> None:
    ready = rendered(READY[kind], *segments)
    assert len(ready) == sum(n for _, n in segments)
    alone = [item for segment in segments for item in rendered(READY[kind], segment)]
    assert ready == alone, "segments are put one behind the other, whatever stands before them"
    again = rendered(READY[kind] if isinstance(READY[kind], File) else MAKE[kind](), *segments)
    assert ready == again


@EACH
def test_unequal_keys_differ_from_the_first_token_on(kind: str) -> None:
    first = [rendered(READY[kind], (key, 1))[0] for key in range(1, 2001)]
    common = max(first.count(item) for item in set(first))
    assert common <= 25, "2,000 keys over at least 256 words: 8 of a kind expected"
    assert rendered(READY[kind], (1, 8)) != rendered(READY[kind], (2, 8))


@EACH
def test_facts_say_what_the_manifest_needs(kind: str) -> None:
    tokenizer: Any = READY[kind]
    facts = tokenizer.facts()
    assert set(facts) == {"kind", "exact", "error", "how", "overhead", "aim"}
    assert facts["exact"] == (facts["error"] == 0)
    assert tokenizer.count("a few words of text") > 0
