"""Tokens and rates: by whom they were counted, what was asked against what came, and how many arrived per second."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvbench.core import Record, Seconds
from kvbench.report.cuts import NONE, Cuts
from kvbench.report.intervals import Floats, ratio_interval


def sources(records: Sequence[Record]) -> dict[str, Any]:
    """Counts of requests that ended ok, by who counted them. Sources are never added up."""
    found: dict[str, dict[str, int]] = {}
    for record in records:
        if record.outcome == "ok":
            row = found.setdefault(record.source or "none", {"requests": 0, "n_in": 0, "n_out": 0, "reasoning": 0})
            row["requests"] += 1
            row["n_in"] += record.n_in or 0
            row["n_out"] += record.n_out or 0
            row["reasoning"] += record.reasoning or 0
    return found


def asked(records: Sequence[Record], got_name: str, asked_name: str) -> dict[str, Any]:
    """Mean tokens asked for and got, over requests that ended ok and whose count is known; the source beside it."""
    pairs = [(_wanted(r, asked_name), getattr(r, got_name), r.source) for r in records if r.outcome == "ok"]
    known = [(want, got, source) for want, got, source in pairs if got is not None]
    if not known:
        return {"asked": None, "got": None, "n": 0, "reason": "no count of a request that ended ok"}
    want, got = (np.array([row[k] for row in known], float) for k in (0, 1))
    return {
        "asked": float(want.mean()),
        "got": float(got.mean()),
        "n": len(known),
        "difference": float((got - want).mean()),
        "ratio": float(got.sum() / want.sum()) if want.sum() else None,
        "exact": int((got == want).sum()),
        "sources": dict(Counter(source or "none" for *_, source in known).most_common()),
    }


def _wanted(record: Record, name: str) -> int:
    """Tokens asked for: max_tokens holds for each choice (or beam), and the server counts the tokens of all of them."""
    return record.asked_out * int(record.sampling.get("n", 1)) if name == "asked_out" else record.asked_in


class Arrivals:
    """When each token arrived. rows: index of its request; times: seconds; weights: tokens of its event.

    An event's tokens are its usage's difference where every event carried usage; else the request's tokens spread evenly over its
    events. Tokens without an event (not streamed, nothing visible) arrive at the end of the answer.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        times: list[Floats] = []
        weights: list[Floats] = []
        for record in records:
            at, weight = _events(record)
            times.append(at)
            weights.append(weight)
        lengths = [len(at) for at in times]
        self.rows = np.repeat(np.arange(len(records)), lengths)
        self.times = np.concatenate(times) if times else np.zeros(0)
        self.weights = np.concatenate(weights) if weights else np.zeros(0)

    def without(self, cuts: Cuts) -> "Arrivals":
        """The same on the axis without the cuts."""
        rest, keep = Arrivals([]), cuts.kept(self.times)
        rest.records, rest.rows, rest.weights = self.records, self.rows[keep], self.weights[keep]
        rest.times = cuts.squeezed(self.times)
        return rest

    def throughput(self, start: Seconds, end: Seconds, seed: int) -> dict[str, Any]:
        """Output tokens/s in [start, end): all that arrived, those of requests that ended ok, and by source."""
        if end <= start:
            return {"value": None, "reason": "the interval is empty", "unit": "tokens/s", "n": 0}
        inside = (self.times >= start) & (self.times < end)
        by_row = np.bincount(self.rows[inside], self.weights[inside], minlength=len(self.records))
        split: dict[str, float] = defaultdict(float)
        succeeded = 0.0
        for row in np.flatnonzero(by_row).tolist():
            record, tokens = self.records[row], float(by_row[row])
            split[record.source or "events"] += tokens
            succeeded += tokens if record.outcome == "ok" else 0.0
        seconds = end - start
        return {
            "value": float(by_row.sum()) / seconds,
            "n": round(float(by_row.sum())),
            "unit": "tokens/s",
            "interval": per_second(self.times[inside], self.weights[inside], start, end, seed),
            "succeeded_only": succeeded / seconds,
            "by_source": {name: tokens / seconds for name, tokens in split.items()},
            "mixed_sources": len(split) > 1,
        }


def _events(record: Record) -> tuple[Floats, Floats]:
    if not record.token_ns:
        at = record.done_ns or record.end_ns
        if not record.n_out or at is None:
            return np.zeros(0), np.zeros(0)
        return np.array([at / 1e9]), np.array([float(record.n_out)])
    times = np.array(record.token_ns, dtype=np.float64) / 1e9
    if record.token_n is not None:
        return times, np.diff(np.array(record.token_n, dtype=np.float64), prepend=0.0)
    tokens = record.n_out if record.n_out is not None else len(times)
    return times, np.full(len(times), tokens / len(times))


def per_second(times: Floats, weights: Floats, start: Seconds, end: Seconds, seed: int) -> list[float] | None:
    """Interval of a rate from its whole seconds."""
    whole = int(end - start)
    slots = np.bincount(np.minimum((times - start).astype(int), whole), weights, minlength=whole + 1)[:whole]
    return ratio_interval(slots.astype(np.float64), np.ones(whole), seed)


class Rates:
    """Requests/s of any interval, named apart: due, let in, sent, ended ok; each request counts at its own time."""

    def __init__(self, records: Sequence[Record]) -> None:
        stamps = {
            "offered": [r.due_ns for r in records],
            "admitted": [r.release_ns for r in records if r.release_ns is not None],
            "sent": [r.sent_ns for r in records if r.sent_ns is not None],
            "ok": [r.end_ns for r in records if r.outcome == "ok" and r.end_ns is not None],
        }
        self.times = {name: np.sort(np.array(stamp, dtype=np.float64)) / 1e9 for name, stamp in stamps.items()}

    def without(self, cuts: Cuts) -> "Rates":
        """The same on the axis without the cuts."""
        rest = Rates([])
        rest.times = {name: cuts.squeezed(times) for name, times in self.times.items()}
        return rest

    def count(self, name: str, start: Seconds, end: Seconds) -> int:
        """How many of one kind fell in [start, end)."""
        low, high = np.searchsorted(self.times[name], [start, end])
        return int(high - low)

    def within(self, start: Seconds, end: Seconds, requested: float | None, seed: int) -> dict[str, Any]:
        """[start, end). requested: what the plan asked for, None where it states no rate."""
        found: dict[str, Any] = {"unit": "requests/s", "seconds": end - start}
        found["requested"] = {"value": requested, "reason": None if requested is not None else "the plan states no rate"}
        for name, times in self.times.items():
            inside = times[slice(*np.searchsorted(times, [start, end]))]
            if end <= start:
                found[name] = {"value": None, "n": 0, "reason": "the interval is empty"}
                continue
            interval = per_second(inside, np.ones(len(inside)), start, end, seed)
            found[name] = {"value": len(inside) / (end - start), "n": len(inside), "interval": interval}
        return found


def input_throughput(records: Sequence[Record], start: Seconds, end: Seconds, cuts: Cuts = NONE) -> dict[str, Any]:
    """Prompt tokens/s of requests that were answered in [start, end), `cuts` left out; they count at the answer's end, as in the
    windows."""
    if end <= start:
        return {"value": None, "reason": "the interval is empty", "unit": "tokens/s", "n": 0}
    low, high = round(start * 1e9), round(end * 1e9)
    inside = [r for r in records if r.outcome == "ok" and r.end_ns is not None and low <= r.end_ns < high]
    ends = np.array([(r.end_ns or 0) / 1e9 for r in inside])
    inside = [r for r, counts in zip(inside, cuts.kept(ends).tolist(), strict=True) if counts]
    seconds = cuts.at(end) - cuts.at(start)
    if seconds <= 0:
        return {"value": None, "reason": "captures took all of it", "unit": "tokens/s", "n": 0}
    counted = [r.n_in for r in inside if r.n_in is not None]
    if inside and not counted:
        return {"value": None, "reason": "the server does not say how long prompts were", "unit": "tokens/s", "n": 0}
    return {"value": sum(counted) / seconds, "n": sum(counted), "unit": "tokens/s"}
