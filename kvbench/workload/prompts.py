"""What a prompt is made of: content keys, the nonce, prefix groups with Zipf popularity, and real prompts read from files.

Content is named, not written: a segment (key, tokens) of `kvbench.core`. The tokenizer turns names into text, and the embedded
engine needs only the names. Keys are hashes of what the content is for, so that no draw of one part can move another.
"""

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationInfo, field_validator

from kvbench.core import Message, Segment
from kvbench.units import Share
from kvbench.workload import Lengths
from kvbench.workload.lengths import AnyLengths
from kvbench.workload.sampling import MOST_ANSWERS
from kvbench.workload.spec import Spec

NONCE_TOKENS = 4
"""Tokens a run's nonce takes: 40 bits of words, 60 of ids. It only has to differ within the first cache block."""

SAMPLING_KEYS = frozenset(
    ("temperature", "top_p", "top_k", "min_p", "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty",
     "length_penalty", "use_beam_search", "logit_bias", "seed", "stop", "min_tokens", "ignore_eos")
)  # fmt: skip
"""What is taken over from a recorded request; anything else in it belongs to its server, not to its load."""

_ESCAPED = re.compile(r"\\u[dD]")  # where half a surrogate pair may be


def key(*parts: int | str) -> int:
    """A content key: 60 bits (`core.reply_key` names replies above them), the same for the same parts on every machine.

    Ints of any width are kept whole: block ids of a trace may have 64 bits and more.
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 4


def lead(nonce: int | None, segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """`segments` with the nonce in the place of their first tokens: the sum stays. The last token is always the prompt's own."""
    room = min(NONCE_TOKENS, sum(tokens for _, tokens in segments) - 1)
    if nonce is None or room < 1:
        return tuple(segments)
    rest, left = [], room
    for name, tokens in segments:
        cut = min(left, tokens)
        left -= cut
        if tokens > cut:
            rest.append((name, tokens - cut))
    return ((nonce, room), *rest)


def mark(messages: Sequence[Message], nonce: int, ids: Sequence[int]) -> tuple[Message, ...]:
    """A real prompt with the nonce in front of its first content, on top of it. `ids`: token ids that are safe to use."""
    word = f"[{nonce:015x}] "
    for i, message in enumerate(messages):
        raw = message.raw or {}
        if message.text is not None:
            marked = Message(role=message.role, text=word + message.text)
        elif "token_ids" in raw:
            extra = np.random.default_rng(nonce).choice(ids, NONCE_TOKENS).tolist()
            marked = Message(role=message.role, raw={"token_ids": extra + raw["token_ids"]})
        elif isinstance(raw.get("content"), str):
            marked = Message(role=message.role, raw={**raw, "content": word + raw["content"]})
        elif isinstance(raw.get("content"), list):
            marked = Message(role=message.role, raw={**raw, "content": [{"type": "text", "text": word}, *raw["content"]]})
        else:
            continue  # a tool call has no content to mark
        return (*messages[:i], marked, *messages[i + 1 :])
    return tuple(messages)


class Prefixes(Spec):
    """Shared beginnings: `share` of the requests begin with one of `groups` prefixes, the k-th as popular as k^-zipf."""

    groups: int = Field(ge=1, le=1_000_000, description="how many different prefixes there are")
    zipf: float = Field(1.0, ge=0, le=20, description="popularity of the k-th group ~ k^-zipf; 0: all alike")
    tokens: AnyLengths = Field(description="tokens of a prefix, on top of `prompt`; a distribution is drawn once per group")
    share: Share = Field(1.0, le=1, description="share of the requests that have a prefix")

    @field_validator("tokens")
    @classmethod
    def _some(cls, value: Lengths) -> Lengths:
        if value.bounds()[0] < 1:
            raise ValueError("a prefix can be 0 tokens long: the least is 1 (`share` says how many requests have one)")
        return value

    @cached_property
    def popularity(self) -> NDArray[np.float64]:
        """The probability of each group among requests that have one, shape (groups,)."""
        weight: NDArray[np.float64] = np.arange(1, self.groups + 1, dtype=np.float64) ** -self.zipf
        popularity: NDArray[np.float64] = weight / weight.sum()
        return popularity

    @cached_property
    def _cumulative(self) -> list[float]:
        return list(np.cumsum(self.popularity)[:-1])

    def pick(self, rng: np.random.Generator) -> int | None:
        """The group of the next request, None for none. Always two draws, so that `share` moves no other request's group."""
        has, which = rng.random(2)
        return bisect_right(self._cumulative, which) if has < self.share else None


class Source(Spec):
    """Real prompts from a file: JSON lines, or one JSON list."""

    file: Path = Field(description="the file; relative to the scenario file")
    format: Literal["auto", "openai", "sharegpt", "vllm"] = Field("auto", description="auto goes by the keys of each record")
    order: Literal["file", "random"] = Field("file", description="random: a new seeded shuffle for each pass over the file")

    @field_validator("file")
    @classmethod
    def _exists(cls, value: Path, info: ValidationInfo) -> Path:
        path = Path((info.context or {}).get("folder", "."), value).expanduser()
        if not path.is_file():
            raise ValueError(f"no file {str(path)!r} (paths are relative to the scenario file)")
        return path


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """One record of a file: the messages of its first request, what the user says in later turns, and what else was recorded."""

    opening: tuple[Message, ...]
    later: tuple[Message, ...] = ()
    max_tokens: int | None = None
    sampling: dict[str, Any] = {}


class Prompts(msgspec.Struct, frozen=True, kw_only=True):
    """A file's conversations in its order, and how many records had nothing to ask (no human turn, empty text)."""

    conversations: tuple[Conversation, ...]
    skipped: int = 0

    def order(self, source: Source, seed: int) -> Iterator[tuple[int, Conversation]]:
        """(pass, conversation), for ever; pass 0 is the first time through the file."""
        turn = 0
        while True:
            index = np.arange(len(self.conversations))
            if source.order == "random":
                np.random.default_rng(key(seed, turn)).shuffle(index)
            for i in index.tolist():
                yield turn, self.conversations[i]
            turn += 1


def read_prompts(source: Source) -> Prompts:
    """All of a file. ValueError names the file, the line (or the record of a list) and what is wrong with it."""
    found, skipped = [], 0
    for place, record in _records(source.file):
        try:
            conversation = READERS[_format(record, source.format)](record)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        if conversation is None:
            skipped += 1
        else:
            found.append(conversation)
    if not found:
        raise ValueError(f"{source.file}: no prompts in it ({skipped} records without a human turn)")
    return Prompts(conversations=tuple(found), skipped=skipped)


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot read the prompts: {error}") from None
    if text.lstrip().startswith("["):
        yield from ((f"{path}: record {i}", record) for i, record in enumerate(_json(text, str(path)), 1))
        return
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: U+2028 may stand inside a JSON string
        if line.strip():
            yield f"{path}:{number}", _json(line, f"{path}:{number}")


def _json(text: str, place: str) -> Any:
    try:
        found = json.loads(text)
        if _ESCAPED.search(text):
            json.dumps(found, ensure_ascii=False).encode()  # raises where one stands alone: it could not be sent
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON: {error}") from None
    return found


def _format(record: Any, asked: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f"a record is a JSON object, not {type(record).__name__}")
    if asked != "auto":
        return asked
    if "conversations" in record:
        return "sharegpt"
    if "prompt" in record or "prompt_token_ids" in record or "sampling_params" in record:
        return "vllm"
    if "messages" in record or "body" in record:
        return "openai"
    raise ValueError(f"unknown form with keys {sorted(record)[:8]}: expected conversations, messages, prompt or prompt_token_ids")


def _openai(record: dict[str, Any]) -> Conversation | None:
    """A recorded chat request ({"messages": ...}, or a batch line with it under "body"): sent whole, but for a last answer."""
    body = record.get("body", record)
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise ValueError("messages: expected a list of {role, content}")
    messages = [_message(message) for message in body["messages"]]
    while messages and messages[-1].role == "assistant":
        messages.pop()
    if not any(message.text or message.raw for message in messages):
        return None
    return Conversation(opening=tuple(messages), max_tokens=_max_tokens(body), sampling=_sampling(body))


def _message(message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages: {str(message)[:60]!r} is not an object with a role")
    if message.keys() == {"role", "content"} and isinstance(message["content"], str):
        return Message(role=message["role"], text=message["content"])
    return Message(role=message["role"], raw=message)


def _sharegpt(record: dict[str, Any]) -> Conversation | None:
    """{"conversations": [{"from": "human", "value": ...}, ...]}: the first human turn opens, the others follow in a session."""
    turns = record.get("conversations")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError("conversations: expected a list of {from, value}")
    said: list[Message] = []
    system: list[Message] = []
    for turn in turns:
        text = turn.get("value")
        if not isinstance(text, str):
            raise ValueError(f"conversations: value: {str(text)[:40]!r} is not text")
        if turn.get("from") in ("human", "user") and text.strip():
            said.append(Message(text=text))
        elif turn.get("from") == "system" and text.strip() and not said:
            system.append(Message(role="system", text=text))
    return Conversation(opening=(*system, said[0]), later=tuple(said[1:])) if said else None


def _vllm(record: dict[str, Any]) -> Conversation | None:
    """A request as a vLLM front end logs it: prompt, prompt_token_ids or messages, and sampling_params (or params) beside it."""
    params = record.get("sampling_params", record.get("params", {})) or {}
    if not isinstance(params, dict):
        raise ValueError(f"sampling_params: {str(params)[:40]!r} is not an object")
    ids, text = record.get("prompt_token_ids"), record.get("prompt")
    if ids:
        if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
            raise ValueError("prompt_token_ids: expected a list of ids")
        opening: tuple[Message, ...] = (Message(raw={"token_ids": ids}),)
    elif isinstance(text, str):
        opening = (Message(text=text),) if text.strip() else ()
    else:
        whole = _openai(record)
        opening = whole.opening if whole else ()
    return Conversation(opening=opening, max_tokens=_max_tokens(params), sampling=_sampling(params)) if opening else None


def _max_tokens(body: dict[str, Any]) -> int | None:
    value = body.get("max_completion_tokens") or body.get("max_tokens")
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"max_tokens: {value!r} is not a whole number of at least 1")
    return value


def _sampling(body: dict[str, Any]) -> dict[str, Any]:
    """What a server would be asked, as it stands; only `n` has to make sense here, since tokens are counted by it."""
    n = body.get("n")
    if n is not None and (not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_ANSWERS):
        raise ValueError(f"n: {str(n)[:40]!r} is not a whole number from 1 to {MOST_ANSWERS}")
    return {name: value for name, value in body.items() if name in SAMPLING_KEYS and value is not None}


READERS: dict[str, Callable[[dict[str, Any]], Conversation | None]] = {"openai": _openai, "sharegpt": _sharegpt, "vllm": _vllm}
