"""What the bytes of one answer mean for its Record: tokens, counts, outcome. No sockets and no clock."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from kvbench.core import Nanos, OutcomeName, Record
from kvbench.target.openai import Chunk, Usage, Whole, bears_token, body_text, complaint_text, is_old_error, reused
from kvbench.target.sse import DONE, SseParser

REJECTED = (429, 503)
SHORT = 300  # characters of a server's complaint, or of its finish_reason, that a record keeps
HELD = 1 << 24  # bytes of a body that is not a stream; a longer one cannot be an answer

_Shape = TypeVar("_Shape", Chunk, Whole)
_DECODE = msgspec.json.Decoder(Chunk).decode


def blot(text: str, secrets: Sequence[str]) -> str:
    """`text` without the secrets that a server repeated in it."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


class Answer:
    """One response being read into `record`: `start` at its headers, `feed` per read, then exactly one of `end` and `stop`.

    Token-bearing is an event with answer text, reasoning, a refusal, a tool call or a function call in any choice; role-only,
    empty and usage-only events, comments and unknown fields (encrypted reasoning) are not. `finished` is set by [DONE].
    """

    def __init__(self, record: Record, keep_text: bool, secrets: Sequence[str] = ()) -> None:
        self.record = record
        self._secrets = secrets  # never to appear in what is kept of a complaint
        self.status = 0
        self.retry_after = b""
        self.finished = False
        self.unterminated = False  # the last event lacked its blank line
        self.keeps_text = keep_text
        self._texts: list[str] = []
        self._sse: SseParser | None = None  # None: not a stream, or not known yet
        self._whole = False  # known not to be a stream
        self._held = b""  # such a body, as far as it is here
        self._usage: Usage | None = None
        self._usage_whole = False  # the usage seen is that of all choices
        self._closed_ns: Nanos | None = None  # finish_reason or [DONE]
        self._events = 0
        self._detailed = False  # token_n or token_choice is being kept

    def start(self, status: int, event_stream: bool, retry_after: bytes) -> None:
        """The headers are here. `event_stream`: the server says text/event-stream; where it does not, the first byte decides."""
        self.status = self.record.status = status
        self.retry_after = retry_after
        if event_stream and 200 <= status < 300:
            self._sse = SseParser()

    def encoded(self, coding: str) -> None:
        """The headers say that the body is compressed, though identity was asked for: nothing in it can be timed or read."""
        self.record.cause = "encoded"
        self._keep_error(f"the body is {coding}-encoded, though identity was asked for: is there a proxy that compresses?")

    def feed(self, data: bytes, now: Nanos) -> None:
        """Body bytes that arrived at `now`."""
        if self._sse is None:
            self._sse = self._hold(data)
            if self._sse is None:
                return
        events = self._sse.feed(data)
        if self._sse.overlong:
            self._sse.overlong = 0
            self.record.malformed += 1
            self._keep_error("malformed: an event without an end")
        if self._sse.names:
            events = self._sift(events, self._sse.names)
        if events:
            self._read(events, now)

    def _read(self, events: list[bytes], now: Nanos) -> None:
        """The hot loop: one typed decode per event, everything unusual in a call of its own."""
        record, keeps_text, detailed, spoke = self.record, self.keeps_text, self._detailed, False
        token_ns = record.token_ns
        before = len(token_ns)
        self._events += len(events)
        if events[-1] == DONE:  # cheaper here than as an event that does not decode
            self.finished, self._closed_ns = True, now
            del events[-1]
        for payload in events:
            try:
                chunk = _DECODE(payload)
            except (msgspec.DecodeError, RecursionError):
                repaired = self._odd(payload, now)
                if repaired is None:
                    continue
                chunk = repaired
            choices, usage = chunk.choices, chunk.usage
            if not choices or chunk.error is not None:
                self._bare(chunk, payload)
                choices = choices or []
            if usage is not None:
                self._usage = usage
            for choice in choices:
                delta = choice.delta
                said = choice.text if delta is None else delta.content
                if said or (delta is not None and bears_token(delta)):
                    if detailed or usage is not None or choice.index:
                        detailed = self._detail(choice.index, usage)
                    token_ns.append(now)
                    if said:
                        spoke = True
                        if keeps_text and not choice.index and isinstance(said, str):
                            self._texts.append(said)
                if choice.finish_reason is not None:
                    record.finish = choice.finish_reason
                    self._closed_ns = now
        if len(token_ns) > before:
            record.reads += 1
            if not before:
                record.first_ns = now
            if spoke and record.content_ns is None:
                record.content_ns = now

    def _detail(self, index: int, usage: Usage | None) -> bool:
        """Before a token is noted. `token_n` lives while every token-bearing event so far carried usage, `token_choice` from
        the first index above 0. True while either is kept."""
        record = self.record
        if usage is None or usage.completion_tokens is None:
            record.token_n = None
        elif record.token_n is not None:
            record.token_n.append(usage.completion_tokens)
        elif not record.token_ns:
            record.token_n = [usage.completion_tokens]
        if record.token_choice is not None:
            record.token_choice.append(index)
        elif index:
            record.token_choice = [0] * len(record.token_ns) + [index]
        self._detailed = record.token_n is not None or record.token_choice is not None
        return self._detailed

    def _sift(self, events: list[bytes], names: dict[int, bytes]) -> list[bytes]:
        """Events with names: `error` fails the request, other names say nothing about the data."""
        for position, name in names.items():
            if name == b"error":
                self._events += 1
                self._error_event(events[position])
        return [event for position, event in enumerate(events) if names.get(position) != b"error"]

    def _bare(self, chunk: Chunk, payload: bytes) -> None:
        """An event without choices (usage, or nothing we know), or with an error."""
        if chunk.error is not None:
            self._complaint(chunk.error)
        elif chunk.usage is not None:
            self._usage_whole, self.record.cached = True, reused(chunk.timings)
        elif is_old_error(payload):
            self._error_event(payload)
        elif chunk.choices is None:
            self.record.ignored += 1

    def _hold(self, data: bytes) -> SseParser | None:
        """Keep what is not a stream. Where the headers left that open the first byte of a 2xx body decides: a parser, or None."""
        if not self._whole and 200 <= self.status < 300:
            first = data.lstrip()[:1]
            if first and first not in b'{[<"':
                return SseParser()
            self._whole = bool(first)
        if len(self._held) < HELD:
            self._held += data
        return None

    def _odd(self, payload: bytes, now: Nanos) -> Chunk | None:
        """An event that does not decode: [DONE], or a damaged one."""
        if payload.strip() == DONE:
            self.finished, self._closed_ns = True, now
            return None
        return self._repair(payload, Chunk)

    def _repair(self, payload: bytes, shape: type[_Shape]) -> _Shape | None:
        """Invalid UTF-8 is replaced and counted. What is no JSON of that shape even so is malformed: the request has failed."""
        text = payload.decode("utf-8", "replace")
        replaced = text.count("\ufffd") - payload.count(b"\xef\xbf\xbd")
        if replaced:
            self.record.replaced += replaced
            try:
                return msgspec.json.decode(text, type=shape)
            except (msgspec.DecodeError, RecursionError):
                pass
        self.record.malformed += 1
        self._keep_error(f"malformed: {text}")
        return None

    def _error_event(self, payload: bytes) -> None:
        try:
            said = msgspec.json.decode(payload)
        except (msgspec.DecodeError, RecursionError):
            said = payload.decode("utf-8", "replace")
        self._complaint(said.get("error") or said if isinstance(said, dict) else said)

    def _complaint(self, said: Any) -> None:
        """The server reports an error inside a 2xx: the request has failed, whatever follows."""
        if said is not False and said != "":  # some servers write an empty `error` beside a good answer
            self.record.cause = self.record.cause or ("error_body" if self._sse is None else "stream_error")
            self._keep_error(complaint_text(said))

    def _keep_error(self, text: str) -> None:
        self.record.error = self.record.error or blot(text, self._secrets)[:SHORT]

    def end(self, now: Nanos) -> None:
        """The body ended as HTTP says it should."""
        if self._sse is not None:
            last = self._sse.end()
            if last is not None:
                self.unterminated = True
                events = self._sift([last], self._sse.names)
                if events:
                    self._read(events, now)
        elif 200 <= self.status < 300:
            self._read_whole(now)
        self._settle("failed", "truncated" if self._events else "empty", now)

    def stop(self, now: Nanos, outcome: OutcomeName, cause: str, why: str = "") -> None:
        """It ended otherwise: the connection was lost or never made, a timeout, a cancellation, bytes that are not HTTP."""
        self._settle(outcome, cause, now, why)

    def _read_whole(self, now: Nanos) -> None:
        """A body that is no stream, read as one JSON answer: there are no token times in it."""
        record = self.record
        record.streamed = False
        if not self._held.strip():
            return
        chunk: Whole | None
        try:
            chunk = msgspec.json.decode(self._held, type=Whole)
        except (msgspec.DecodeError, RecursionError):
            chunk = self._repair(self._held, Whole)
            if chunk is None:
                return
        self._usage, self._usage_whole, record.cached = chunk.usage, True, reused(chunk.timings)
        if chunk.error is not None:
            self._complaint(chunk.error)
        elif not chunk.choices and is_old_error(self._held):
            self._error_event(self._held)
        for choice in chunk.choices or ():
            self._closed_ns = now
            record.finish = choice.finish_reason or record.finish
            said = choice.text if choice.message is None else choice.message.content
            if self.keeps_text and not choice.index and isinstance(said, str):
                self._texts.append(said)

    def _settle(self, outcome: OutcomeName, cause: str, now: Nanos, why: str = "") -> None:
        """The outcome, and the counts. What the server said comes before what ended the reading; `outcome`, `cause` and `why` are
        for an answer that was neither refused, nor wrong, nor complete. Cancelled stays cancelled."""
        record = self.record
        if outcome == "cancelled":
            record.outcome, record.cause = outcome, cause
        elif self.status and not 200 <= self.status < 300:
            record.outcome = "rejected" if self.status in REJECTED else "failed"
            record.cause = f"http_{self.status}"
            self._keep_error(body_text(self._held))
        elif record.cause:  # the server complained
            record.outcome = "failed"
        elif record.malformed:
            record.outcome, record.cause = "failed", "malformed"
        elif self._closed_ns is not None:
            record.outcome = "ok"
        else:
            record.outcome, record.cause = outcome, cause
            self._keep_error(why)
        if record.finish is not None:
            record.finish = blot(record.finish, self._secrets)[:SHORT]
        record.end_ns = now
        record.done_ns = record.token_ns[-1] if record.token_ns else self._closed_ns
        if self._texts:
            record.text = "".join(self._texts)
        self._count()

    def _count(self) -> None:
        record, usage = self.record, self._usage
        if usage is not None:
            record.n_in = usage.prompt_tokens
            if usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens is not None:
                record.cached = usage.prompt_tokens_details.cached_tokens
            if usage.completion_tokens_details is not None:
                record.reasoning = usage.completion_tokens_details.reasoning_tokens
            # usage beside the tokens of one of several choices is that choice's alone
            if usage.completion_tokens is not None and (self._usage_whole or record.token_choice is None):
                record.n_out, record.source = usage.completion_tokens, "usage"
        if record.n_out is None and (record.token_ns or (record.outcome == "ok" and record.streamed)):
            record.n_out, record.source = len(record.token_ns), "events"
