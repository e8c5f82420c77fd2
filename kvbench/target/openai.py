"""The OpenAI-compatible dialect: a request's body, the shape of an answer's events, and the texts of its errors."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvbench.core import Request

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


def body(request: Request, model: str, prompt: Mapping[str, Any], options: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
    """The JSON body: `prompt` (messages or prompt), `options` (stream, stream_options), then the request's sampling, then
    the user's `extra`, which wins over all; a null there removes the key (`max_tokens: null`)."""
    fields: dict[str, Any] = {"model": model, **prompt, "max_tokens": request.max_tokens, **options, **request.sampling}
    if request.force:
        fields |= {"ignore_eos": True, "min_tokens": request.max_tokens}
    fields |= extra
    for key, value in extra.items():
        if value is None:
            del fields[key]
    return msgspec.json.encode(fields)


Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # anything else counts nothing, and the event that says it is malformed


class CachedTokens(msgspec.Struct, gc=False):
    cached_tokens: Count | None = None


class ReasoningTokens(msgspec.Struct, gc=False):
    reasoning_tokens: Count | None = None


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: ReasoningTokens | None = None


class Delta(msgspec.Struct, gc=False):
    """Part of an answer, or a whole message. Fields are `Any` where servers disagree on the type; true means "something came"."""

    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: Any = None
    tool_calls: Any = None
    function_call: Any = None


class Choice(msgspec.Struct, gc=False):
    index: Count = 0
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class WholeChoice(Choice, gc=False):
    message: Delta | None = None


class Chunk(msgspec.Struct, gc=False):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    timings: Any = None


class Whole(msgspec.Struct):
    choices: list[WholeChoice] | None = None
    usage: Usage | None = None
    error: Any = None
    timings: Any = None


def bears_token(delta: Delta) -> bool:
    """Whether an event without answer text bears a token all the same: reasoning, a tool or function call, a refusal."""
    return bool(delta.reasoning_content or delta.reasoning or delta.tool_calls or delta.function_call or delta.refusal)


def reused(timings: Any) -> int | None:
    """Prompt tokens that llama.cpp took from its cache, by the `timings` at an answer's end; None where it does not say."""
    count = timings.get("cache_n") if isinstance(timings, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and count >= 0 else None


def is_old_error(payload: bytes) -> bool:
    """{"object": "error", "message": ...}: how servers reported an error before they nested it."""
    try:
        return isinstance(said := msgspec.json.decode(payload), dict) and said.get("object") == "error"
    except msgspec.DecodeError:  # invalid UTF-8, which the typed decoder skipped over
        return False


def complaint_text(said: Any) -> str:
    """{"message": m, "type": t, "code": c} as "m (t, c)"; anything else as it is."""
    if isinstance(said, dict):
        kind = ", ".join(str(said[key]) for key in ("type", "code") if said.get(key) is not None)
        message = said.get("message") or msgspec.json.encode(said).decode()
        return f"{message} ({kind})" if kind else str(message)
    return str(said)


def body_text(held: bytes) -> str:
    """What an error body says: its `error` or `detail` where it is JSON, else its text."""
    try:
        said = msgspec.json.decode(held)
    except (msgspec.DecodeError, RecursionError):
        return held.decode("utf-8", "replace").strip()
    if isinstance(said, dict):
        said = said.get("error") or said.get("detail") or said
    return complaint_text(said)
