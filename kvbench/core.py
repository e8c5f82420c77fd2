"""The vocabulary every room shares. Imports nothing of ours; holds data, not behaviour.

Times are seconds on the run's clock (0 at the start of the run). Stamps on a Record are integer nanoseconds on the same
clock (suffix `_ns`): they are taken once per network read and written once to disk, and integers cost half of floats there.
"""

from typing import Any, Literal

import msgspec

Seconds = float
Nanos = int
Segment = tuple[int, int]
"""(content key, tokens): the first `tokens` tokens of an endless text named by `key`. Equal keys share a prefix; content of
one key is the same everywhere, so prompts that begin with the same segments share their KV blocks."""


def reply_key(request_id: int) -> int:
    """Content key of what the embedded engine generates for a request, so that a session's next turn can name it in its history.

    Workload keys stay below 2**60; keys are never negative (tokenizers seed generators with them).
    """
    return (1 << 60) + request_id


OutcomeName = Literal["", "ok", "rejected", "failed", "timeout", "cancelled", "shed", "dropped", "withdrawn"]
LEFT = ("ok", "failed", "rejected", "timeout", "cancelled")  # outcomes of requests that were admitted
STAYED = ("shed", "dropped", "withdrawn")  # outcomes of requests that never left


class UsedUpError(ValueError):
    """There is no more content of a kind that is not to be repeated, such as the rows of a trace. Whoever asks for it stops."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a prompt. Content is `raw` (sent verbatim), else `text`, else `segments` rendered by the tokenizer."""

    role: str = "user"
    segments: tuple[Segment, ...] = ()
    text: str | None = None
    raw: dict[str, Any] | None = None


class Request(msgspec.Struct, kw_only=True):
    """What is to be sent. Built ahead of its due time; `body` is the target's encoding of it, also made ahead."""

    id: int
    cls: str = "default"
    due: Seconds = 0.0
    messages: tuple[Message, ...] = ()
    tokens: int  # prompt tokens asked for (an estimate where the text is the user's own)
    max_tokens: int
    force: bool = False  # make the server produce exactly max_tokens
    sampling: dict[str, Any] = {}  # temperature, n, beam_width, frequency_penalty, ... as the API names them
    session: int | None = None
    turn: int = 0
    group: int | None = None  # prefix group, where the class has them
    measured: bool = True  # False in warm-up
    phase: str = "steady"
    user: bool = False  # asked by a user of a closed loop, who will ask again
    body: bytes = b""

    def segments(self) -> list[Segment]:
        """The prompt as one run of content, for the embedded engine and for prefix arithmetic."""
        return [segment for message in self.messages for segment in message.segments]


class Record(msgspec.Struct, kw_only=True):
    """What is known of one request so far. The target writes stamps and counts; the driver the rest; the journal files it once.

    due: the schedule's; release: the limits first allowed it; sent: first byte left; written: last byte of the request left;
    first: last byte of the first event that carried text, reasoning or a tool call; content: the same for answer text alone;
    done: the last token-bearing event, or the terminator where there was none. None: not reached or not measured.
    """

    id: int
    cls: str = "default"
    phase: str = "steady"
    measured: bool = True
    session: int | None = None
    turn: int = 0
    group: int | None = None
    url: str = ""
    due_ns: Nanos = 0
    release_ns: Nanos | None = None
    sent_ns: Nanos | None = None
    written_ns: Nanos | None = None
    first_ns: Nanos | None = None
    content_ns: Nanos | None = None
    done_ns: Nanos | None = None
    end_ns: Nanos | None = None  # when the request was over for us (error, timeout, terminator); >= done
    connect_ns: Nanos = 0  # time spent waiting for a connection, inside [release, sent]
    outcome: OutcomeName = ""
    cause: str = (
        ""  # class of a failure or timeout: http_500, stream_error, truncated, malformed, connect, first, idle, total, ...
    )
    error: str = ""  # what the server or the socket said, shortened
    status: int | None = None
    finish: str | None = None
    asked_in: int = 0
    asked_out: int = 0
    n_in: int | None = None
    n_out: int | None = None
    cached: int | None = None
    reasoning: int | None = None
    source: str = ""  # of n_in and n_out: usage | tokenizer | events | engine
    attempts: int = 1
    throttled: int = 0  # attempts answered 429 or 503 before the last
    retry_after: float | None = None  # seconds that the last 429 or 503 asked us to wait
    reads: int = 0  # network reads that carried at least one token-bearing event
    malformed: int = 0
    ignored: int = 0  # events that parsed but that we know nothing about
    replaced: int = 0  # invalid UTF-8 sequences replaced in the text
    streamed: bool = True
    stale: bool = False  # sent again on a fresh connection after a kept-alive one proved closed
    preempted: int = 0  # engine only: times this request lost its blocks
    sampling: dict[str, Any] = {}
    token_ns: list[Nanos] = []  # arrival of each token-bearing event, in order of arrival
    token_n: list[int] | None = None  # cumulative completion tokens at each of them, where every one carried usage
    token_choice: list[int] | None = None  # choice index of each of them, where n > 1
    text: str | None = None  # the answer; kept only while a session needs it, never journalled


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to the run: a phase began, a rule fired, a law moved. `data` holds its numbers."""

    t: Seconds
    kind: str
    data: dict[str, Any] = {}


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of a gauge or counter by a collector."""

    t: Seconds
    name: str
    value: float | None
    source: str = ""
    labels: dict[str, str] = {}


class CacheAccess(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of cache.jsonl: a look-up or a change of a KV cache, as the embedded engine or a server's KV events tell it.

    op: hit, miss (a full block of a prompt looked up at an admission), alloc (a block was taken), free (its last reference went),
    evict, reset, spill, restore, migrate. again: a look-up that is no first admission's (recompute after a preemption, a second
    answer), which hit rates leave out. A block is told once its content is known: `alloc` then carries the time it was taken,
    so lines are in order of telling, not of t. key: 16 hex digits, "" where the block never filled. reason: of a miss. tokens:
    valid ones in a block, with alloc and free. full: with alloc, when the block was full.
    """

    t: Seconds
    op: str
    key: str = ""
    group: int = 0
    job: int | None = None
    block: int = 0
    tier: str = "gpu"
    node: int = 0
    reason: str = ""
    again: bool = False
    tokens: int = 0
    full: Seconds | None = None


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much may enter: `rate` requests/s through a bucket of `burst`, `inflight` at once, each waiting at most `patience`.

    A 429 or 503 with Retry-After closes the gate for that long, at most `retry_after`.
    """

    rate: float = float("inf")
    burst: float = 1.0
    inflight: float = float("inf")
    patience: Seconds = float("inf")
    retry_after: Seconds = 0.0


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The half-open interval [start, end) in numbers. Names are those of docs/metrics.md; None is "not measured".

    counts: offered, admitted, sent, ok, failed, rejected, timeout, cancelled, shed, dropped, withdrawn, tokens_in, tokens_out,
    inflight (at `end`), held (waiting at our gate at `end`). values: rates, quantiles and gauges by metric name with its
    statistic (`ttft_p99`, `kv_usage_mean`). n: how many samples stand behind a value. age: seconds since a gauge was last read.
    """

    start: Seconds
    end: Seconds
    counts: dict[str, int]
    values: dict[str, float | None]
    n: dict[str, int] = {}
    age: dict[str, Seconds] = {}
