"""The numbers of one request, each with one formula, used by the live slots and by the report alike (docs/metrics.md).

Formulas work on `Stamps`: nanoseconds (and counts) as floats with NaN for "not measured", either of one request or as arrays of
shape [requests], so that a batch costs what NumPy costs. Results are seconds. Outcomes play no part here: callers choose whose
latencies they take (the report and the slots: those of requests that ended ok).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbench.core import Nanos, Record, Seconds

NAN = math.nan


class Stamps(NamedTuple):
    """What the formulas read: floats for one request, float64 arrays [requests] for a batch (hence Any). Times in ns.

    span and between are the two halves of tpot: time from first to last token-bearing event, and the tokens in that time; with
    several choices both are sums over choices. between is NaN below 1.
    """

    due: Any
    release: Any
    connect: Any
    sent: Any
    written: Any
    first: Any
    content: Any
    done: Any
    end: Any
    n_in: Any
    n_out: Any
    cached: Any
    span: Any
    between: Any


class Formula(NamedTuple):
    """of: the value in ns. at: the stamp at which it becomes known. since: where the age of an unknown one starts, or None."""

    of: Callable[[Stamps], Any]
    at: str
    since: str | None = None
    server: bool = True  # False: about this tool, so taken from every request that was sent, whatever its outcome


FORMULAS: dict[str, Formula] = {
    "gate_wait": Formula(lambda s: s.release - s.due, "release", server=False),
    "connect": Formula(lambda s: s.connect, "sent", server=False),
    "lag": Formula(lambda s: s.sent - s.release - s.connect, "sent", server=False),
    "upload": Formula(lambda s: s.written - s.sent, "written", server=False),
    "ttft": Formula(lambda s: s.first - s.sent, "first", "sent"),
    "ttft_written": Formula(lambda s: s.first - s.written, "first", "written"),
    "response_ttft": Formula(lambda s: s.first - s.due, "first", "due"),
    "ttfc": Formula(lambda s: s.content - s.sent, "content", "sent"),
    "e2e": Formula(lambda s: s.done - s.sent, "done", "sent"),
    "response": Formula(lambda s: s.done - s.due, "done", "due"),
    "tpot": Formula(lambda s: s.span / s.between, "done"),
    "ntpot": Formula(lambda s: (s.done - s.sent) / s.n_out, "done"),
}


def value(record: Record, name: str) -> Seconds | None:
    """One of FORMULAS for one request, in seconds; None where it was not measured."""
    return _seconds(FORMULAS[name].of(stamps(record)))


def values(record: Record) -> dict[str, Seconds | None]:
    """All FORMULAS for one request, in seconds."""
    at = stamps(record)
    return {name: _seconds(formula.of(at)) for name, formula in FORMULAS.items()}


def columns(records: Sequence[Record]) -> dict[str, NDArray[np.float64]]:
    """All FORMULAS for many requests: float64 arrays [requests] in seconds, NaN where not measured."""
    at = gather(records)
    return {name: formula.of(at) / 1e9 for name, formula in FORMULAS.items()}


def meets(record: Record, slo: Mapping[str, Seconds]) -> bool:
    """Ended ok and within every limit of its class (METRICS names, seconds). A missing value does not meet a limit."""
    if record.outcome != "ok":
        return False
    at = stamps(record)
    return all(FORMULAS[name].of(at) <= limit * 1e9 for name, limit in slo.items())  # NaN <= x is False


def approximate(record: Record) -> bool:
    """True where tpot divides by tokens whose arrival was not seen one by one: no per-chunk usage, and events are not tokens."""
    return record.token_n is None and (record.source == "events" or record.n_out != len(record.token_ns))


def icl(record: Record) -> list[Seconds]:
    """Gaps between token-bearing events, per choice, in order of arrival. Empty where not streamed or fewer than two events."""
    return [gap / 1e9 for _, gap in gaps(record)]


def itl(record: Record) -> list[tuple[Seconds, int]] | None:
    """(gap per token, tokens): each later event's gap divided by its tokens, to be counted once per token.

    None where the tokens of an event are not known: no per-chunk usage, and events differ from tokens or were all there was to
    count. An event without a new token adds its gap to the next one's.
    """
    found = token_gaps(record)
    return None if found is None else [(gap / 1e9, tokens) for _, gap, tokens in found]


def gaps(record: Record) -> list[tuple[Nanos, Nanos]]:
    """icl with its time: (when the later event arrived, gap), ns."""
    if not record.streamed:
        return []
    if record.token_choice is None:
        times = record.token_ns
        return [(b, b - a) for a, b in pairwise(times)]
    before: dict[int, Nanos] = {}
    found = []
    for choice, at in zip(record.token_choice, record.token_ns, strict=True):
        if choice in before:
            found.append((at, at - before[choice]))
        before[choice] = at
    return found


def token_gaps(record: Record) -> list[tuple[Nanos, float, int]] | None:
    """itl with its time: (when the event arrived, gap per token, tokens), ns."""
    if not record.streamed or (record.token_n is None and approximate(record)):
        return None
    if record.token_n is None:
        return [(at, gap, 1) for at, gap in gaps(record)]
    before: dict[int, Nanos] = {}
    counted, found = 0, []
    choices = record.token_choice or [0] * len(record.token_ns)
    for choice, at, total in zip(choices, record.token_ns, record.token_n, strict=True):
        tokens, counted = total - counted, total
        if tokens < 1:
            continue
        if choice in before:
            found.append((at, (at - before[choice]) / tokens, tokens))
        before[choice] = at
    return found


def events_per_read(record: Record) -> float | None:
    """Token-bearing events per network read that carried one: 1 when nothing coalesces."""
    return len(record.token_ns) / record.reads if record.reads else None


def negative(records: Sequence[Record]) -> dict[str, int]:
    """How many requests have a negative duration, by name; each is an internal error of this tool. Empty when well."""
    found = {name: int((column < 0).sum()) for name, column in columns(records).items()}
    found["icl"] = sum(1 for record in records if any(gap < 0 for _, gap in gaps(record)))
    return {name: count for name, count in found.items() if count}


def stamps(record: Record) -> Stamps:
    """The Stamps of one request, as floats."""
    return Stamps._make(_row(record))


def gather(records: Sequence[Record]) -> Stamps:
    """The Stamps of many requests, as float64 arrays [requests]."""
    fields = np.fromiter(chain.from_iterable(map(_row, records)), np.float64, len(records) * len(Stamps._fields))
    return Stamps._make(np.ascontiguousarray(fields.reshape(-1, len(Stamps._fields)).T))


def _row(r: Record) -> tuple[float, ...]:
    """The fields of Stamps in order. Reads each attribute once: this runs for every request."""
    release, sent, written, done, end = r.release_ns, r.sent_ns, r.written_ns, r.done_ns, r.end_ns
    n_in, n_out, cached = r.n_in, r.n_out, r.cached
    first: float | None = None
    content: float | None = None
    span = between = NAN
    if r.streamed:
        first, content = r.first_ns, r.content_ns
        if len(r.token_ns) > 1:
            span, between = _decode(r)
    return (
        r.due_ns,
        NAN if release is None else release,
        NAN if sent is None else r.connect_ns,
        NAN if sent is None else sent,
        NAN if written is None else written,
        NAN if first is None else first,
        NAN if content is None else content,
        NAN if done is None else done,
        NAN if end is None else end,
        NAN if n_in is None else n_in,
        n_out or NAN,
        NAN if cached is None else cached,
        span,
        between,
    )


def _decode(r: Record) -> tuple[float, float]:
    """(time from first to last event, tokens that arrived in it); the tokens of the events stamped `first` are not part of it."""
    times = r.token_ns
    if r.token_choice is not None:
        span, at_first = _decode_choices(r)
    else:
        start = times[0]
        span, events = times[-1] - start, times.count(start)
        at_first = events if r.token_n is None else r.token_n[events - 1]
    total = r.token_n[-1] if r.token_n is not None else len(times) if r.n_out is None else r.n_out
    return span, total - at_first if total > at_first else NAN


def _decode_choices(r: Record) -> tuple[int, int]:
    """Sums over choices: time from first to last event, and tokens in the events stamped with their choice's first time."""
    start: dict[int, int] = {}
    last: dict[int, int] = {}
    at_first = counted = 0
    totals = r.token_n or range(1, len(r.token_ns) + 1)
    for choice, at, total in zip(r.token_choice or (), r.token_ns, totals, strict=True):
        if at == start.setdefault(choice, at):
            at_first += total - counted
        counted, last[choice] = total, at
    return sum(last[choice] - start[choice] for choice in start), at_first


def _seconds(nanos: float) -> Seconds | None:
    return None if math.isnan(nanos) else nanos / 1e9
