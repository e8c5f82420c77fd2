"""What a client asks for, checked: the body of a chat or completion request into prompts of token ids and numbers.

Fields that shape the text (temperature, stop, tools, response_format, logprobs, echo, ...) are taken and change nothing: the
engine reads no text and its answers are made up. An answer has exactly max_tokens tokens, whatever min_tokens and ignore_eos say.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from kvbench.serve import Tokens

DEFAULT = {"chat": 256, "completions": 16}  # tokens of an answer where the client names none, if the context has room for them
MOST = 1 << 31

_Shape = TypeVar("_Shape")


class RefusedError(Exception):
    """The client is told so: `status`, and vLLM's error body with `kind` as its type."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param

    def body(self) -> bytes:
        said = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": said})


def bad(param: str | None, message: str, value: object = None) -> RefusedError:
    """A 400 in vLLM's words: the parameter and its value at the message's end."""
    told = "" if value is None else f" (parameter={param}, value={value})"
    return RefusedError(400, "BadRequestError", message + told, param)


class Part(msgspec.Struct):
    """Of a message's content; only text can be served."""

    type: str = "text"
    text: str | None = None


class Said(msgspec.Struct):
    """A message of a chat."""

    role: str
    content: str | list[Part] | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct):
    """A request's body. `prompt` is text, a list of texts, token ids or a list of lists of them."""

    model: str | None = None
    messages: list[Said] | None = None
    prompt: Any = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, ready for the engine: each of `prompts` (token ids) gets `n` answers of `max_tokens` tokens."""

    api: Literal["chat", "completions"]
    prompts: list[list[int]]
    max_tokens: int
    n: int
    stream: bool
    usage: bool  # in an event of its own at the stream's end
    running_usage: bool  # in every event
    salt: str
    priority: int


def read(api: Literal["chat", "completions"], raw: bytes, tokens: Tokens, model: str, limit: int) -> Ask:
    """`limit`: the longest prompt + answer. Raises RefusedError for what is not to be served."""
    body = decoded(raw, Body)
    known(body.model, model)
    prompts = [written(body.messages, tokens)] if api == "chat" else _prompts(body.prompt, tokens)
    named = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    options = body.stream_options or StreamOptions()
    longest = max(map(len, prompts))
    if not min(map(len, prompts)):
        raise bad("prompt" if api == "completions" else "messages", "The prompt must have at least one token")
    if longest >= limit:
        said = (
            f"This model's maximum context length is {limit} tokens. However, your prompt contains {longest} input tokens, which "
            "exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
        )
        raise bad("input_tokens", said, longest)
    if wanted is None:
        wanted = min(DEFAULT[api], limit - longest)
    if wanted < 1:
        raise bad(named, f"{named} must be at least 1, got {wanted}.", wanted)
    if longest + wanted > limit:
        raise bad("input_tokens", f"This model's maximum context length is {limit} tokens. However, {wanted} output tokens were "
                  f"asked for and the prompt has {longest} input tokens: {longest + wanted} in all. Ask for fewer of either.",
                  longest)  # fmt: skip
    n = 1 if body.n is None else body.n
    if not 1 <= n <= 128:
        raise bad("n", f"n must be from 1 to 128, got {n}.", n)
    return Ask(
        api, prompts, wanted, n, bool(body.stream), bool(options.include_usage or options.continuous_usage_stats),
        bool(options.continuous_usage_stats), body.cache_salt or "", body.priority or 0,
    )  # fmt: skip


def decoded(raw: bytes, shape: type[_Shape]) -> _Shape:
    try:
        return msgspec.json.decode(raw, type=shape)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise bad(None, f"The body is not what is expected here: {error}") from None


def known(asked: str | None, model: str) -> None:
    if asked and asked != model:
        message = f"The model `{asked}` does not exist. Valid aliases: {model}."
        raise RefusedError(404, "NotFoundError", message, "model")


def written(messages: list[Said] | None, tokens: Tokens) -> list[int]:
    """A chat's tokens: those of its messages, one after the other. There is no template around them."""
    if not messages:
        raise bad("messages", "messages must have at least one message")
    return [token for message in messages for text in _texts(message) for token in tokens.encode(text)]


def _texts(message: Said) -> list[str]:
    content = message.content
    if content is None or isinstance(content, str):
        return [content] if content else []
    other = next((part.type for part in content if part.text is None), None)
    if other is not None:
        raise bad("messages", f"a part of type {other!r} has no text: this server takes text only")
    return [part.text for part in content if part.text]


def _prompts(prompt: Any, tokens: Tokens) -> list[list[int]]:
    if isinstance(prompt, str):
        return [tokens.encode(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(one, str) for one in prompt):
            return [tokens.encode(one) for one in prompt]
        if are_ids(prompt):
            return [prompt]
        if all(isinstance(one, list) and are_ids(one) for one in prompt):
            return prompt
    raise bad("prompt", "prompt must be text, a list of texts, token ids or a list of lists of token ids")


def are_ids(found: Any) -> bool:
    return isinstance(found, list) and all(type(one) is int and 0 <= one < MOST for one in found)
