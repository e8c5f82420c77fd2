"""Content to text: exact lengths, prefixes, calibration, what each API takes."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers

from kvbench.core import Message, Request
from kvbench.workload.tokenizers import File, Ids, Server, Words, common_words, numbers

DATA = Path(__file__).parents[1] / "data" / "tokenizer" / "tokenizer.json"
FILE = File(DATA)
ENGINE = Engine.from_file(str(DATA))
KEYS = st.integers(0, 2**80)


def request(*messages: Message) -> Request:
    return Request(id=0, messages=messages, tokens=0, max_tokens=1)


def content(tokenizer: Words | File, *segments: tuple[int, int]) -> str:
    rendered = tokenizer.render(request(Message(segments=segments)))
    return str(rendered["messages"][0]["content"])


@given(KEYS, st.integers(1, 300), st.integers(0, 9000))
@settings(max_examples=60, deadline=None)
def test_a_stream_is_endless_and_the_same_from_its_start(key: int, short: int, more: int) -> None:
    assert numbers(key, short + more, 944)[:short].tolist() == numbers(key, short, 944).tolist()


def test_first_numbers_of_keys_in_a_row_are_uniform() -> None:
    first = [int(numbers(key, 1, 50)[0]) for key in range(20_000)]
    assert chisquare(np.bincount(first, minlength=50)).pvalue > 1e-4
    inside = numbers(7, 20_000, 50)
    assert chisquare(np.bincount(inside, minlength=50)).pvalue > 1e-4


def test_keys_wider_than_64_bits_stay_apart() -> None:
    low = 0x0123456789ABCDEF
    streams = {tuple(numbers(high << 64 | low, 8, 944).tolist()) for high in range(100)}
    assert len(streams) == 100


def test_common_words_are_what_the_guide_says() -> None:
    words = common_words()
    assert len(words) == len(set(words)) == 944
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words)


@given(st.lists(st.tuples(KEYS, st.integers(1, 400)), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_a_file_gives_exactly_the_tokens_asked_for(segments: list[tuple[int, int]]) -> None:
    text = content(FILE, *segments)
    assert len(ENGINE.encode(text, add_special_tokens=False).ids) == sum(n for _, n in segments)
    assert FILE.count(text) == sum(n for _, n in segments)


def letters() -> Engine:
    """A tokenizer without a single word: a token a character, spaces included."""
    alphabet = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    engine = Engine(models.BPE(vocab=alphabet, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    engine.decoder = decoders.Fuse()
    return engine


def test_a_file_without_words_is_fitted_by_counting_and_says_its_error(tmp_path: Path) -> None:
    letters().save(str(tmp_path / "letters.json"))
    tokenizer = File(tmp_path / "letters.json")
    facts = tokenizer.facts()
    assert facts["exact"] is False
    assert 0 < facts["error"] <= 6.5 / 8  # at 8 tokens half of the longest word and its space may be missing or too much
    longest = max(len(word) for word in common_words()) + 1
    before = ""
    for n in range(20, 400, 7):
        text = tokenizer.segment(5, n)
        assert len(text) == tokenizer.count(text)
        assert abs(len(text) - n) <= longest / 2
        assert text.startswith(before), "a longer segment begins with the shorter"
        before = text


def test_text_is_drawn_from_the_generator_and_has_its_length() -> None:
    one, two, other = (FILE.text(123, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert one == two != other
    assert FILE.count(one) == 123


def test_a_file_that_is_none_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    for path in (tmp_path / "broken.json", tmp_path / "missing.json"):
        with pytest.raises(ValueError, match=f"{path.name}.*not a tokenizer"):
            File(path)


def test_calibration_finds_template_and_drops_words_that_the_server_splits() -> None:
    split = set(common_words()[:40])  # falls into the first two chunks of 32

    async def count(text: str) -> int:
        return 21 + sum(2 if word in split else 1 for word in text.split())

    tokenizer = asyncio.run(Server().calibrate(count))
    facts = tokenizer.facts()
    assert facts == {"kind": "server", "exact": True, "error": 0.0, "overhead": 21, "aim": "text", "how": facts["how"]}
    assert set(tokenizer.words) == set(common_words()[64:])
    assert asyncio.run(count(tokenizer.segment(9, 500))) == 521


def test_calibration_by_ratio_where_no_word_is_one_token() -> None:
    async def count(text: str) -> int:
        return 5 + 2 * len(text.split())

    tokenizer = asyncio.run(Words().calibrate(count))
    assert (tokenizer.ratio, tokenizer.overhead, tokenizer.facts()["error"]) == (2.0, 5, 0.0)
    assert len(tokenizer.segment(3, 600).split()) == 300
    assert tokenizer.count(tokenizer.segment(3, 600)) == 600


def test_calibration_states_the_error_that_is_left() -> None:
    async def count(text: str) -> int:
        return sum(1 + len(word) // 4 for word in text.split())

    tokenizer = asyncio.run(Words().calibrate(count))
    error = tokenizer.facts()["error"]
    assert 0 < error < 0.1
    got = [asyncio.run(count(tokenizer.segment(key, 512))) for key in range(50)]
    assert abs(np.mean(got) / 512 - 1) < 0.02


def test_counts_that_make_no_sense_are_refused() -> None:
    async def count(text: str) -> int:
        return 7

    with pytest.raises(ValueError, match="no tokenizer does"):
        asyncio.run(Words().calibrate(count))


def test_uncalibrated_words_claim_no_measurement() -> None:
    facts = Words().facts()
    assert facts["exact"] is False
    assert facts["error"] is None


def test_aim_takes_the_overhead_off_the_first_message_in_every_turn() -> None:
    tokenizer = File(DATA, aim="server", overhead=21)
    first = Message(segments=((1, 4), (2, 252)))
    later = (first, Message(role="assistant", text="yes"), Message(segments=((3, 50),)))
    opening = tokenizer.render(request(first))["messages"]
    turn = tokenizer.render(request(*later))["messages"]
    assert tokenizer.count(opening[0]["content"]) == 256 - 21
    assert turn[0] == opening[0], "what was sent in the first turn is sent again in the second"
    assert tokenizer.count(turn[2]["content"]) == 50


def test_completions_join_so_that_the_servers_own_tokens_follow_the_prompt() -> None:
    tokenizer = Words(api="completions")
    question, more = Message(segments=((1, 3),)), Message(segments=((2, 2),))
    one = tokenizer.render(request(question))["prompt"]
    two = tokenizer.render(request(question, Message(role="assistant", text=", she said."), more))["prompt"]
    assert two == f"{one}, she said. {tokenizer.segment(2, 2)}"


def test_real_messages_are_sent_as_they_are() -> None:
    raw = {"role": "user", "content": [{"type": "text", "text": "look"}], "name": "ada"}
    sent = Words().render(request(Message(role="system", text="be brief"), Message(raw=raw)))
    assert sent == {"messages": [{"role": "system", "content": "be brief"}, raw]}
    with pytest.raises(ValueError, match="takes text only"):
        Words(api="completions").render(request(Message(raw=raw)))


def test_ids_carry_recorded_ids_and_refuse_text() -> None:
    prompt = Ids(vocabulary=2000).render(request(Message(raw={"token_ids": [5, 6]}), Message(segments=((1, 3), (2, 4)))))[
        "prompt"
    ]
    assert prompt[:2] == [5, 6]
    assert len(prompt) == 9
    assert all(1000 <= i < 2000 for i in prompt[2:])
    with pytest.raises(ValueError, match="cannot write text"):
        Ids().render(request(Message(text="hello")))
    with pytest.raises(ValueError, match="needs tokenizer ids"):
        Words().render(request(Message(raw={"token_ids": [1]})))


def test_bad_settings_name_themselves() -> None:
    with pytest.raises(ValueError, match="overhead: -1"):
        Words(overhead=-1)
    with pytest.raises(ValueError, match="vocabulary: 1000"):
        Ids(vocabulary=1000)


def test_a_shared_prefix_is_written_once() -> None:
    tokenizer = Words()
    for key in range(100):
        content(tokenizer, (1, 4), (2, 2000), (1000 + key, 10))
    info = tokenizer._kept.cache_info()
    assert (info.misses, info.hits) == (2, 198)


@pytest.mark.alone
@pytest.mark.parametrize("tokenizer", [Words(), FILE, Ids()], ids=lambda t: t.name)
def test_a_hundred_tokens_cost_at_most_30_microseconds(tokenizer: Words | File | Ids) -> None:
    best = float("inf")
    for turn in range(20):
        start = time.perf_counter()
        for key in range(200):
            tokenizer.segment(turn * 200 + key, 100)
        best = min(best, (time.perf_counter() - start) / 200)
    print(f"{tokenizer.name}: {best * 1e6:.1f} us per 100 tokens")
    assert best <= 30e-6
