"""Tokens for a model that reads nothing: whole words where the list knows them, bytes where it does not.

The plain kind keeps no state: an id says what it stands for. A word of the harness's list, with a space before it or without,
is one token; anything else is one token for up to three bytes of its UTF-8. Every text comes back to the byte.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvbench.serve import Tokens, Written
from kvbench.workload.tokenizers import File, common_words, numbers

_PIECES = re.compile(r" ?[A-Za-z]+| ?[^\sA-Za-z]+|\s")
_BYTES = 4096  # ids from here on are bytes: one, then two, then three at a time; below are words
_STARTS = (_BYTES, _BYTES + 256, _BYTES + 256 + 256**2, _BYTES + 256 + 256**2 + 256**3)


class Plain:
    """Words and bytes. Ids are below 2**25."""

    def __init__(self) -> None:
        self._words = [text for word in common_words() for text in (word, " " + word)]
        self._ids = {text: at for at, text in enumerate(self._words)}

    def encode(self, text: str) -> list[int]:
        found: list[int] = []
        known = self._ids
        for piece in _PIECES.findall(text):
            one = known.get(piece)
            if one is None:
                found += _spelt(piece.encode("utf-8", "surrogatepass"))
            else:
                found.append(one)
        return found

    def decode(self, ids: list[int]) -> str:
        return b"".join(self._one(number) for number in ids).decode("utf-8", "replace")

    def _one(self, number: int) -> bytes:
        if 0 <= number < len(self._words):
            return self._words[number].encode()
        for length, start in enumerate(_STARTS[:3], 1):
            if start <= number < start + 256**length:
                return (number - start).to_bytes(length, "big")
        raise ValueError(f"token id {number} is none: the last one is {_STARTS[3] - 1}")

    def write(self, key: int, n: int, opening: bool, start: int = 0) -> Written:
        ids = [2 * word + 1 for word in numbers(key, n, len(self._words) // 2, start).tolist()]
        if opening and not start:
            ids[0] -= 1
        return Written(ids, [self._words[number] for number in ids])


def _spelt(data: bytes) -> list[int]:
    chunks = [data[at : at + 3] for at in range(0, len(data), 3)]
    return [_STARTS[len(chunk) - 1] + int.from_bytes(chunk, "big") for chunk in chunks]


class Real:
    """A tokenizer.json. Answers are made of its words that are one token each. ValueError where it has too few of them."""

    def __init__(self, path: Path | str) -> None:
        found = File(path)
        if not found.by_construction:
            raise ValueError(f"tokenizer: {path}: it has too few words that are one token each: answers could not be found again")
        from tokenizers import Tokenizer as Engine  # an extra; File has said so where it is missing

        self._engine: Any = Engine.from_file(str(path))
        self._engine.no_padding()
        self._engine.no_truncation()
        self._words = found.words
        self._alone = [self.encode(word)[0] for word in self._words]
        self._after = [self.encode(f"{word} {word}")[1] for word in self._words]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        try:
            text: str = self._engine.decode(ids, skip_special_tokens=False)
        except OverflowError:
            raise ValueError(f"token ids are from 0 to {self._engine.get_vocab_size() - 1}") from None
        return text

    def write(self, key: int, n: int, opening: bool, start: int = 0) -> Written:
        picks = numbers(key, n, len(self._words), start).tolist()
        ids = [self._after[pick] for pick in picks]
        texts = [" " + self._words[pick] for pick in picks]
        if opening and not start:
            ids[0], texts[0] = self._alone[picks[0]], self._words[picks[0]]
        return Written(ids, texts)


TOKENS: dict[str, Callable[..., Tokens]] = {"plain": Plain, "file": Real}
