"""The bytes of answers, in vLLM's shape: events of a stream, whole answers, usage. No state, no clock."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

_encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"
FINGERPRINT = "kvbench"


def event(fields: dict[str, Any]) -> bytes:
    return b"data: " + _encode(fields) + b"\n\n"


def error(body: bytes) -> bytes:
    """An error's body in the middle of a stream."""
    return b"data: " + body + b"\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """What every part of one answer begins with."""

    api: Literal["chat", "completions"]
    id: str
    created: int
    model: str

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.api == "chat" else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def opening(self, index: int) -> dict[str, Any]:
        """The first event of a chat's answer: its role, and no token."""
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self.chunk([choice]) | {"prompt_token_ids": None, "prompt_text": None}

    def token(self, index: int, text: str, last: bool) -> dict[str, Any]:
        """An event with one token."""
        finish = "length" if last else None
        if self.api == "chat":
            stop = {"stop_reason": None} if last else {}
            delta = {"content": text}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, **stop, "token_ids": None}
        else:
            choice = {
                "index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None,
                "prompt_token_ids": None, "token_ids": None,
            }  # fmt: skip
        return self.chunk([choice])

    def counted(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The event with the usage, the last before [DONE]."""
        return self.chunk([]) | {"usage": usage, "system_fingerprint": FINGERPRINT}

    def whole(self, texts: list[str], usage: dict[str, Any]) -> bytes:
        """An answer that is not streamed."""
        if self.api == "chat":
            choices = [{"index": at, "message": _message(text), **_ENDED} for at, text in enumerate(texts)]
            more = {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None, "kv_transfer_params": None,
                    "ec_transfer_params": None, "metrics": None}  # fmt: skip
            kind = "chat.completion"
        else:
            choices = [{"index": at, "text": text, **_ENDED, "prompt_logprobs": None, "prompt_token_ids": None}
                       for at, text in enumerate(texts)]  # fmt: skip
            more, kind = {"kv_transfer_params": None}, "text_completion"
        said = self.chunk(choices) | {
            "object": kind, "service_tier": None, "system_fingerprint": FINGERPRINT, "usage": usage, **more,
        }  # fmt: skip
        return _encode(said)


_ENDED = {"logprobs": None, "finish_reason": "length", "stop_reason": None, "token_ids": None, "routed_experts": None}


def _message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "refusal": None, "annotations": None, "audio": None, "function_call": None,
            "reasoning": None}  # fmt: skip


def running_usage(prompt: int, completion: int) -> dict[str, Any]:
    """Of an answer under way."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion,
            "completion_tokens_details": None}  # fmt: skip


def streamed_usage(prompt: int, completion: int, cached: int, created: int | None) -> dict[str, Any]:
    """At a stream's end. `created`: prompt tokens in blocks that were new to the cache; None where the API does not tell them."""
    details = {"cached_tokens": cached} | ({} if created is None else {"created_cache_tokens": created})
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion,
            "prompt_tokens_details": details}  # fmt: skip


def whole_usage(prompt: int, completion: int, cached: int, created: int | None) -> dict[str, Any]:
    """Of an answer that is not streamed."""
    details = {"cached_tokens": cached, "created_cache_tokens": created, "multimodal_tokens": None}
    return streamed_usage(prompt, completion, cached, created) | {"prompt_tokens_details": details,
                                                                 "completion_tokens_details": None}  # fmt: skip
