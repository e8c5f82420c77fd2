"""Records into the live history: every event of a record goes to the one-second slot of its own time.

Due, release, sent and each token count when they happen; a latency when it becomes known; the outcome, and with it the prompt
tokens, when the request ends. Latencies of the server are those of requests that ended ok, and of a timeout what it did get to (a
first token); what a timeout or a cancelled request had not got to counts as at least its age (right-censored).
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbench.core import STAYED, Nanos, Record, Seconds
from kvbench.metrics import request
from kvbench.metrics.request import FORMULAS, Stamps
from kvbench.metrics.ring import CENSORED, LATENCIES, ROW, Floats, Ints, Ring

_ICL, _ITL = LATENCIES.index("icl"), LATENCIES.index("itl")
_SERVER = np.array([[formula.server] for formula in FORMULAS.values()])
_WHOLE = np.array([[formula.at == "done"] for formula in FORMULAS.values()])
_UNSEEN = (0, 0, 0, 0)

Mask = NDArray[np.bool_]


class Slots(Ring):
    """`slos`: limits per class (names of FORMULAS, seconds), for goodput; a class without limits meets them.

    `negative`: durations below zero, by name; they are left out, and each is an internal error that the run reports.
    """

    def __init__(self, seconds: int = 600, slos: Mapping[str, Mapping[str, Seconds]] | None = None) -> None:
        super().__init__(seconds)
        self.slos: Final = {cls: dict(slo) for cls, slo in (slos or {}).items() if slo}
        for cls, slo in self.slos.items():
            if unknown := slo.keys() - FORMULAS.keys():
                raise ValueError(f"slo of class {cls!r}: {min(unknown)!r} is not one of {', '.join(FORMULAS)}")
        self.negative: dict[str, int] = {}
        self._seen: dict[int, list[int]] = {}  # per live record: due, release, sent counted (0 or 1 each); tokens counted

    def peek(self, live: Iterable[Record], now_ns: Nanos) -> None:
        """Count what live records show before now_ns (due, release, sent, tokens), each thing once; `fold` adds what is left."""
        rows: list[int] = []
        times: list[Nanos] = []
        tokens: list[list[Nanos]] = []
        for record in live:
            seen = self._seen.setdefault(record.id, [0, 0, 0, 0])
            if not seen[2]:
                for row, at in enumerate((record.due_ns, record.release_ns, record.sent_ns)):  # the rows of these three counters
                    if at is not None and not seen[row] and at < now_ns:
                        seen[row] = 1
                        rows.append(row)
                        times.append(at)
            arrived = record.token_ns
            if len(arrived) > seen[3]:
                upto = len(arrived) if arrived[-1] < now_ns else bisect_left(arrived, now_ns)
                tokens.append(arrived[seen[3] : upto])
                seen[3] = max(upto, seen[3])
        self.add_counts(np.array(rows, np.intp), np.array(times, np.int64), 1)
        arrivals = np.fromiter(chain.from_iterable(tokens), np.int64)
        self.add_counts(ROW["tokens_out"], arrivals, 1)

    def fold(self, records: Sequence[Record]) -> None:
        """Add ended records, whole, each once, in any order."""
        for _ in self.folding(records):
            pass

    def folding(self, records: Sequence[Record]) -> Iterator[None]:
        """`fold` in parts of well under a millisecond for a batch of 100, so that a caller may do something else in between."""
        if not records:
            return
        at = request.gather(records)
        yield
        outcomes = [record.outcome for record in records]
        seen = np.zeros((len(records), 4), np.int64)
        if self._seen:
            seen[:] = [self._seen.pop(record.id, _UNSEEN) for record in records]
        self._fold_counts(records, at, outcomes, seen)
        yield
        self._fold_latencies(at, outcomes)
        if any(outcome in ("timeout", "cancelled") for outcome in outcomes):
            self._fold_ages(records, at)
        yield
        events = np.array([len(record.token_ns) for record in records])
        times = np.fromiter(chain.from_iterable([record.token_ns for record in records]), np.int64, int(events.sum()))
        tokens = self._tokens(records, events)
        self._fold_tokens(records, events, times, tokens, seen[:, 3])
        self._fold_gaps(records, events, times, tokens)

    def _fold_counts(self, records: Sequence[Record], at: Stamps, outcomes: Sequence[str], seen: Ints) -> None:
        row = np.array([ROW.get(outcome, -1) for outcome in outcomes])
        left = np.array([outcome not in STAYED for outcome in outcomes])
        ok = row == ROW["ok"]
        end = np.where(np.isnan(at.end), np.where(np.isnan(at.done), at.due, at.done), at.end)
        asked = ok & ~np.isnan(at.n_in)
        told = asked & ~np.isnan(at.cached)
        one = np.ones(len(records))
        parts: list[tuple[int | Ints, Floats, Mask, Floats]] = [  # counter, when, whether, how many
            (ROW["offered"], at.due, seen[:, 0] == 0, one),
            (ROW["admitted"], at.release, left & ~np.isnan(at.release) & (seen[:, 1] == 0), one),
            (ROW["sent"], at.sent, ~np.isnan(at.sent) & (seen[:, 2] == 0), one),
            (row, end, row >= 0, one),
            (ROW["tokens_in"], end, asked, at.n_in),
            (ROW["cached_tokens"], end, told, at.cached),
            (ROW["cached_of"], end, told, at.n_in),
            (ROW["cached_unknown"], end, asked & ~told, one),
        ]
        if self.slos:
            parts.append((ROW["good"], end, self._good(records, at, ok), one))
        mask = np.stack([whether for _, _, whether, _ in parts])
        rows = np.stack([np.broadcast_to(counter, len(records)) for counter, _, _, _ in parts])[mask]
        times = np.stack([when for _, when, _, _ in parts])[mask].astype(np.int64)
        self.add_counts(rows, times, np.stack([many for _, _, _, many in parts])[mask].astype(np.int64))

    def _good(self, records: Sequence[Record], at: Stamps, ok: Mask) -> Mask:
        """Which ended ok within every limit of their class: `request.meets`, for a batch."""
        good = ok.copy()
        for cls, slo in self.slos.items():
            other = np.array([record.cls != cls for record in records])
            for name, limit in slo.items():
                good &= other | (FORMULAS[name].of(at) <= limit * 1e9)
        return good

    def _fold_latencies(self, at: Stamps, outcomes: Sequence[str]) -> None:
        value = np.stack([formula.of(at) for formula in FORMULAS.values()])
        known = np.stack([getattr(at, formula.at) for formula in FORMULAS.values()])
        ok = np.array([outcome == "ok" for outcome in outcomes])
        alive = ok | np.array([outcome == "timeout" for outcome in outcomes])
        wanted = ~np.isnan(value) & (~_SERVER | np.where(_WHOLE, ok, alive))
        below = value < 0
        if below.any():
            wanted &= ~below
            for name, row in zip(FORMULAS, below, strict=True):
                self._misstamped(name, int(row.sum()))
        self.add_values(np.nonzero(wanted)[0], known[wanted].astype(np.int64), value[wanted])

    def _fold_ages(self, records: Sequence[Record], at: Stamps) -> None:
        gave_up = np.array([record.outcome in ("timeout", "cancelled") for record in records]) & ~np.isnan(at.end)
        streamed = np.array([record.streamed for record in records])
        for row, name in enumerate(CENSORED):
            formula = FORMULAS[name]
            unknown = gave_up if formula.at == "done" else gave_up & streamed & np.isnan(getattr(at, formula.at))
            age = at.end - getattr(at, formula.since or "sent")
            mask = unknown & (age >= 0)
            self.add_ages(row, at.end[mask].astype(np.int64), age[mask])

    def _tokens(self, records: Sequence[Record], events: Ints) -> Ints:
        """Tokens of each event [events]. Where not known one by one each event has its share, so that totals are exact."""
        tokens = np.ones(int(events.sum()), np.int64)
        start = 0
        for record, n in zip(records, events.tolist(), strict=True):
            if record.token_n:
                tokens[start : start + n] = np.diff(record.token_n, prepend=0)
            elif n and record.n_out is not None and record.n_out != n:
                tokens[start : start + n] = np.diff(np.arange(n + 1) * record.n_out // n)
            start += n
        return tokens

    def _fold_tokens(self, records: Sequence[Record], events: Ints, times: Ints, tokens: Ints, seen: Ints) -> None:
        """Tokens at their times, less those that `peek` has counted; what was told of and never seen arrives at the end."""
        if seen.any():
            place = np.arange(len(times)) - np.repeat(np.cumsum(events) - events, events)
            tokens = tokens - (place < np.repeat(seen, events))  # it took each event for one token
        self.add_counts(ROW["tokens_out"], times, tokens)
        for i in np.nonzero(events == 0)[0].tolist():
            when = records[i].done_ns or records[i].end_ns
            if records[i].n_out and when is not None:
                self.count("tokens_out", when, records[i].n_out or 0)

    def _fold_gaps(self, records: Sequence[Record], events: Ints, times: Ints, tokens: Ints) -> None:
        """icl and itl: at once for a batch; record by record for choices, and for events without a new token."""
        ok = np.array([record.outcome == "ok" and record.streamed for record in records])
        exact = ok & np.array([record.token_n is not None or not request.approximate(record) for record in records])
        apart = np.array([record.token_choice is not None for record in records])
        owner = np.repeat(np.arange(len(records)), events)
        apart[owner[tokens < 1]] = True
        within = (ok & ~apart)[owner[1:]] & (owner[1:] == owner[:-1])
        gaps, when = np.diff(times)[within].astype(np.float64), times[1:][within]
        one_by_one = (exact & ~apart)[owner[1:]][within]
        if one_by_one.all() and (tokens == 1).all():
            self._add_gaps((_ICL, _ITL), when, gaps, 1)
        else:
            self._add_gaps((_ICL,), when, gaps, 1)
            many = tokens[1:][within][one_by_one]
            self._add_gaps((_ITL,), when[one_by_one], gaps[one_by_one] / many, many)
        for i in np.nonzero(ok & apart)[0].tolist():
            self._fold_gaps_of(records[i])

    def _fold_gaps_of(self, record: Record) -> None:
        found = np.array(request.gaps(record), np.int64).reshape(-1, 2)
        self._add_gaps((_ICL,), found[:, 0], found[:, 1].astype(np.float64), 1)
        per_token = request.token_gaps(record)
        if per_token:
            when, gap, tokens = zip(*per_token, strict=True)
            self._add_gaps((_ITL,), np.array(when, np.int64), np.array(gap), np.array(tokens, np.int64))

    def _add_gaps(self, rows: Sequence[int], when: Ints, gap: Floats, tokens: Ints | int) -> None:
        if len(gap) and gap.min() < 0:
            fine = gap >= 0
            for row in rows:
                self._misstamped(LATENCIES[row], int((~fine).sum()))
            when, gap, tokens = when[fine], gap[fine], tokens if isinstance(tokens, int) else tokens[fine]
        self.add_series(rows, when, gap, tokens)

    def _misstamped(self, name: str, count: int) -> None:
        if count:
            self.negative[name] = self.negative.get(name, 0) + count
