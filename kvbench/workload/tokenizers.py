"""Content into what the API takes: text of so many tokens, or token ids.

A content key names an endless stream of numbers, each a word (or an id); a segment (key, n) is its beginning that has n tokens.
So a shorter segment is a prefix of a longer one whatever order they are asked for in, and nothing needs to be remembered, though
what may be shared (every segment of a message but its last) is kept to save the work.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from kvbench.core import Message, Request
from kvbench.workload import Tokenizer

Api = Literal["chat", "completions"]
Aim = Literal["text", "server"]
Count = Callable[[str], Awaitable[int]]
"""The server's count of a text's tokens: its /tokenize, or prompt_tokens of a one-token answer."""

SHARED = 4096  # rendered segments kept: 4,096 of 512 words are 13 MB
LEAST = 256  # words a vocabulary must have to be used: enough that unequal keys rarely begin alike
SHORT, LONG, CHUNK = 64, 512, 32  # words in the texts of a calibration
CANDIDATES = 4096  # entries of a tokenizer file that are tried as words
_A, _B, _30, _27, _32 = map(np.uint64, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 30, 27, 32))
_STEPS = np.arange(1, 8193, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def numbers(key: int, n: int, size: int, start: int = 0) -> NDArray[np.uint64]:
    """n numbers in [0, size), after the first `start` ones, of the stream named `key`; size < 2^32.

    The upper half of splitmix64 on a counter (Steele, Lea and Flood 2014), less its last shift, which only moves the lower half.
    """
    stop = start + n
    steps = _STEPS[start:stop] if stop <= len(_STEPS) else np.arange(start + 1, stop + 1, dtype=np.uint64) * _STEPS[0]
    x = steps + np.uint64(key % (2**64 - 59))  # a prime: keys of any width stay apart
    x ^= x >> _30
    x *= _A
    x ^= x >> _27
    x *= _B
    x >>= _32
    x *= np.uint64(size)
    x >>= _32
    return x


@cache
def common_words() -> tuple[str, ...]:
    """944 English words, each one token in nine vocabularies, with a space before it and without (docs/guides/prompts.md)."""
    return tuple(files("kvbench.workload").joinpath("words.txt").read_text("ascii").split())


class _Text:
    """Text of words joined by spaces, at `ratio` tokens a word. What the kinds differ in is where words and ratio come from.

    overhead: tokens the server adds to a text (chat template, BOS), where known; `aim="server"` takes them off the last
    segment of the first message, so that the server's count, not the text's, is what was asked for.
    """

    name: str

    def __init__(self, words: Sequence[str], ratio: float, api: Api, aim: Aim, overhead: int | None) -> None:
        if not 0.05 <= ratio <= 100:
            raise ValueError(f"ratio: {ratio!r} tokens a word; it must be from 0.05 to 100")
        if overhead is not None and overhead < 0:
            raise ValueError(f"overhead: {overhead!r} tokens; it must be at least 0")
        self.words, self.ratio, self.api, self.aim, self.overhead = words, ratio, api, aim, overhead
        self._kept = lru_cache(SHARED)(self.segment)

    def segment(self, key: int, n: int) -> str:
        """The first n tokens of the content named `key`, to the nearest word."""
        return self._write(key, max(1, round(n / self.ratio)))

    def _write(self, key: int, words: int) -> str:
        picks = numbers(key, words, len(self.words)).tolist()
        return " ".join(itemgetter(*picks)(self.words)) if words > 1 else self.words[picks[0]]  # half the time of a comprehension

    def text(self, tokens: int, rng: Generator) -> str:
        """A fresh text of `tokens` tokens."""
        return self.segment(int(rng.integers(2**60)), tokens)

    def render(self, request: Request) -> dict[str, Any]:
        """{"messages": [...]}, or {"prompt": text} for completions. Raises ValueError for content the API cannot carry."""
        less = self.overhead or 0 if self.aim == "server" else 0
        if self.api == "chat":
            return {"messages": [self._message(m, 0 if i else less) for i, m in enumerate(request.messages)]}
        prompt = ""
        for i, message in enumerate(request.messages):
            content = self._message(message, 0 if i else less)["content"]
            if not isinstance(content, str):
                raise ValueError("the completions API takes text only: this prompt has messages with parts")
            # an answer goes on where the prompt ended, so that the server finds its own tokens again
            prompt += content if not i or (message.role == "assistant" and message.text is not None) else " " + content
        return {"prompt": prompt}

    def _message(self, message: Message, less: int) -> dict[str, Any]:
        if message.raw is not None:
            if "token_ids" in message.raw:
                raise ValueError("a prompt of token ids needs tokenizer ids and api: completions")
            return message.raw
        if message.text is not None:
            return {"role": message.role, "content": message.text}
        parts = [self._kept(key, n) for key, n in message.segments[:-1]]
        parts += [self.segment(key, max(1, n - less)) for key, n in message.segments[-1:]]
        return {"role": message.role, "content": " ".join(parts)}


class Words(_Text):
    """Common English words, about a token each: exact on most of today's vocabularies, measured on none until calibrated."""

    name = "words"

    def __init__(
        self, api: Api = "chat", aim: Aim = "text", overhead: int | None = None, calibration: "Calibration | None" = None
    ) -> None:
        found = calibration or Calibration(1.0, overhead, common_words(), None)
        super().__init__(found.words, found.ratio, api, aim, found.overhead if overhead is None else overhead)
        self.calibration = calibration
        self._known = frozenset(found.words)

    def count(self, text: str) -> int:
        """An estimate: our own words at the ratio, any other at a token per four bytes."""
        own = other = 0
        for word in text.split():
            if word in self._known:
                own += 1
            else:
                other += -(-(len(word.encode()) + 1) // 4)
        return round(own * self.ratio) + other

    async def calibrate(self, count: Count) -> Self:
        """A copy that knows the server's tokens per word and overhead. Up to 38 texts are counted, no prompts of the run.

        Words that this server splits are dropped, if enough are left. Raises ValueError where the counts make no sense.
        """
        ratio, overhead, error = await _line(common_words(), count, 1)
        words = common_words()
        if (ratio, error) != (1.0, 0.0):
            chunks = [words[i : i + CHUNK] for i in range(0, len(words), CHUNK)]
            added = [await count(" ".join(chunk)) - len(chunk) for chunk in chunks]
            kept = tuple(word for chunk, more in zip(chunks, added, strict=True) if more == min(added) for word in chunk)
            if len(kept) >= LEAST:
                words = kept
                ratio, overhead, error = await _line(words, count, 2)
        return type(self)(self.api, self.aim, calibration=Calibration(ratio, overhead, words, error))

    def facts(self) -> dict[str, Any]:
        """For the manifest: the kind, whether lengths are exact, the measured relative error (None: not measured), and how."""
        error = self.calibration.error if self.calibration else None
        how = "one token a word, as in nine vocabularies; not measured on this server"
        if self.calibration:
            how = f"{self.ratio:.4g} tokens a word by the server's own counts of {len(self.words)} words"
        return {"kind": self.name, "exact": error == 0, "error": error, "how": how, "overhead": self.overhead, "aim": self.aim}


class Server(Words):
    """Words calibrated once, before the run, by the server's own counts (its /tokenize). Until then the same as `words`."""

    name = "server"


class Calibration(NamedTuple):
    """What a server's counts said: tokens a word, tokens added to a text, the words to use, the largest relative error seen."""

    ratio: float
    overhead: int | None
    words: tuple[str, ...]
    error: float | None


async def _line(words: Sequence[str], count: Count, salt: int) -> tuple[float, int, float]:
    """Ratio, overhead and largest relative error of the line through the counts of two short and two long texts."""
    picks = [numbers(1000 * salt + i, n, len(words)).tolist() for i, n in enumerate((SHORT, SHORT, LONG, LONG))]
    got = [await count(" ".join(words[i] for i in pick)) for pick in picks]
    ratio = (got[2] + got[3] - got[0] - got[1]) / (2 * (LONG - SHORT))
    if ratio <= 0:
        raise ValueError(f"the server counts {got[:2]} tokens in {SHORT} words but {got[2:]} in {LONG}: no tokenizer does")
    overhead = max(0, round((got[0] + got[1]) / 2 - ratio * SHORT))
    return ratio, overhead, max(abs(overhead + ratio * len(pick) - n) / n for pick, n in zip(picks, got, strict=True))


class File(_Text):
    """A tokenizer.json (Hugging Face tokenizers): text of exactly so many tokens as that file counts them.

    Its own one-token words are used where there are enough: then n tokens are n words. Else common words, fitted by counting.
    Raises ValueError where the file cannot be read or the extra is not installed.
    """

    name = "file"

    def __init__(self, path: Path | str, api: Api = "chat", aim: Aim = "text", overhead: int | None = None) -> None:
        try:
            from tokenizers import Tokenizer as Engine  # an extra, and 30 ms that runs without it need not pay
        except ImportError:
            raise ValueError("tokenizer: a file needs the package tokenizers: pip install -e '.[tokenizer]'") from None
        try:
            self._engine: Any = Engine.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"tokenizer: {path}: not a tokenizer.json: {error}") from None
        self._engine.no_padding()
        self._engine.no_truncation()
        words: Sequence[str] = self._whole_words()
        if len(words) < LEAST:
            words = common_words()
        counts = self._counts(" ".join(words[i] for i in numbers(seed, LEAST, len(words)).tolist()) for seed in range(8))
        super().__init__(words, sum(counts) / (8 * LEAST), api, aim, overhead)
        self.by_construction = set(counts) == {LEAST}
        sizes = [8, 30, 100, 300]
        got = self._counts(self.segment(seed, n) for seed, n in enumerate(sizes))
        self.error = 0.0 if self.by_construction else max(abs(a - n) / n for a, n in zip(got, sizes, strict=True))

    def count(self, text: str) -> int:
        """Tokens as the file counts them, without special tokens."""
        return len(self._engine.encode(text, add_special_tokens=False))

    def segment(self, key: int, n: int) -> str:
        if self.by_construction:
            return self._write(key, n)
        words, seen = max(1, round(n / self.ratio)), dict[int, int]()
        while words not in seen:  # the count grows with the words, so this closes in on the nearest and then turns in a circle
            seen[words] = self.count(self._write(key, words)) - n
            step = -seen[words] / self.ratio
            words = max(1, words + (round(step) or (step > 0) - (step < 0)))
        return self._write(key, min(seen, key=lambda w: (abs(seen[w]), w)))

    def _whole_words(self) -> list[str]:
        """Words that are one token alone and one token after a space."""
        entries = sorted(self._engine.get_vocab(with_added_tokens=False).values())
        texts = {text.strip() for text in self._engine.decode_batch([[entry] for entry in entries])}
        words = sorted(text for text in texts if 2 <= len(text) <= 12 and text.isascii() and text.isalpha() and text.islower())
        words = words[:: -(-len(words) // CANDIDATES)] if words else []
        alone, paired = self._counts(words), self._counts(f"{word} {word}" for word in words)
        return [word for word, one, two in zip(words, alone, paired, strict=True) if (one, two) == (1, 2)]

    def _counts(self, texts: Iterable[str]) -> list[int]:
        return [len(found) for found in self._engine.encode_batch(list(texts), add_special_tokens=False)]

    def facts(self) -> dict[str, Any]:
        how = "words added or left until the file's own count fits"
        if self.by_construction:
            how = f"{len(self.words)} words of the file that are one token each"
        exact = self.error == 0
        return {"kind": self.name, "exact": exact, "error": self.error, "how": how, "overhead": self.overhead, "aim": self.aim}


class Ids:
    """Random token ids for /v1/completions: as many as asked, by construction. The first ids (control, bytes) are left out."""

    name = "ids"

    def __init__(self, vocabulary: int = 32_000, skip: int = 1_000) -> None:
        if not 0 <= skip < vocabulary < 2**31:
            raise ValueError(f"vocabulary: {vocabulary!r} ids of which the first {skip!r} are left out: none remain, or too many")
        self.vocabulary, self.skip = vocabulary, skip
        self._kept = lru_cache(SHARED)(self.segment)

    def segment(self, key: int, n: int) -> list[int]:
        """The first n ids of the content named `key`. The list may be shared: not to be changed."""
        found: list[int] = (numbers(key, n, self.vocabulary - self.skip) + np.uint64(self.skip)).tolist()
        return found

    def text(self, tokens: int, rng: Generator) -> list[int]:
        """A fresh prompt of `tokens` ids."""
        return self.segment(int(rng.integers(2**60)), tokens)

    def render(self, request: Request) -> dict[str, Any]:
        """{"prompt": [ids]}. Raises ValueError for content that is text: a session's answers, real prompts."""
        found: list[int] = []
        for message in request.messages:
            if message.raw is not None and "token_ids" in message.raw:
                found += message.raw["token_ids"]
            elif message.raw is not None or message.text is not None:
                raise ValueError("tokenizer ids cannot write text (a session's answers, a real prompt): use another")
            else:
                for key, n in message.segments[:-1]:
                    found += self._kept(key, n)
                for key, n in message.segments[-1:]:
                    found += self.segment(key, n)
        return {"prompt": found}

    def count(self, text: str) -> int:
        """A rough count of a text, four bytes a token: ids are never text."""
        return max(1, round(len(text.encode()) / 4))

    def facts(self) -> dict[str, Any]:
        how = f"random ids in [{self.skip}, {self.vocabulary})"
        return {"kind": "ids", "exact": True, "error": 0.0, "how": how, "overhead": None, "aim": "text"}


TOKENIZERS: dict[str, Callable[..., Tokenizer]] = {"words": Words, "file": File, "server": Server, "ids": Ids}
