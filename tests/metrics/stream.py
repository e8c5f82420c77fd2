"""A streamed answer as a record with known times, for tests of what is made of records."""

from typing import Any

from kvbench.core import Record

S = 1_000_000_000


def stream(number: int, start: float, tokens: list[float], **kwargs: Any) -> Record:
    """Due, released and sent at `start`; ends ok with the last of `tokens` (all in seconds)."""
    at, times = round(start * S), [round(t * S) for t in tokens]
    end = times[-1] if times else at
    base: dict[str, Any] = {
        "id": number,
        "outcome": "ok",
        "source": "usage",
        "due_ns": at,
        "release_ns": at,
        "sent_ns": at,
        "written_ns": at,
        "token_ns": times,
        "n_in": 10,
        "n_out": len(times),
        "first_ns": times[0] if times else None,
        "content_ns": times[0] if times else None,
        "done_ns": end,
        "end_ns": end,
    }
    return Record(**(base | kwargs))
