"""The mix of traffic classes: which class the next request is of, and what it and the later turns of its session ask."""

import itertools
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from kvbench.core import Record, Request, Seconds
from kvbench.workload.classes import Class, Output, Sessions, shares
from kvbench.workload.decks import Ask, Deck, FromFile, FromTrace, Generated, Seeds, Streams

__all__ = ["Class", "Mix", "Output", "Sessions", "shares"]


def estimate(text: str) -> int:
    """Tokens of a text nobody counted: a token per four UTF-8 bytes, English's usual figure; off by half and more elsewhere."""
    return max(1, round(len(text.encode()) / 4))


class Mix:
    """Builds the requests of one phase stream, numbered in the order they are asked for.

    seeds: sequences of the run's streams "lengths", "prompts", "sampling". nonce: what sets this run's prompts apart from every
    other run's; None on purpose only. stream: "steady", "warmup", ...: no two streams share content, except that a stream given
    `shared="steady"` uses the prefix groups of steady (and its nonce) with parts of its own. ids: one counter for all mixes of a
    run. regime: multiplier of drawn lengths at a time (chaos); a session keeps that of its first turn. count: tokens of a real
    prompt's text. folder: what a trace's path is relative to.
    Raises ValueError where weights do not add up or a file cannot be read.
    """

    def __init__(
        self,
        classes: Mapping[str, Class],
        seeds: Seeds,
        nonce: int | None,
        *,
        stream: str = "steady",
        shared: str | None = None,
        ids: Iterator[int] | None = None,
        regime: Callable[[Seconds], float] = lambda at: 1.0,
        count: Callable[[str], int] = estimate,
        folder: Path = Path(),
    ) -> None:
        self._names = list(classes)
        self._upto = list(itertools.accumulate(shares(classes).values()))[:-1]
        self._ids = itertools.count() if ids is None else ids
        self._regime = regime
        self.decks: dict[str, Deck] = {}
        for name, spec in classes.items():
            self.decks[name] = _deck(spec, Streams(seeds, nonce, stream, shared or stream, name), count, folder)
        root = seeds["prompts"]
        spawn_key = (*root.spawn_key, zlib.crc32(stream.encode()))
        self._choice = np.random.default_rng(np.random.SeedSequence(root.entropy, spawn_key=spawn_key))
        self._sessions: dict[int, object] = {}  # what the deck of a live session needs, by session id

    def next(self, at: Seconds) -> Request:
        """The arrival due at `at`. Raises UsedUpError where a trace that must not wrap is used up."""
        name = self._names[bisect_right(self._upto, self._choice.random())]
        return self._request(name, self.decks[name].first(self._regime(at)), due=at)

    def follow(self, request: Request, record: Record) -> tuple[Seconds, Request] | None:
        """The think time after the end of `request`, and its session's next turn; None where there is none, or the turn failed.

        To be asked once for every request with a session, however it ended: what is kept for the session is released here.
        """
        state = self._sessions.pop(request.session, None) if request.session is not None else None
        if state is None or record.outcome != "ok":
            return None
        dealt = self.decks[request.cls].later(state, request, record)
        if dealt is None:
            return None
        think, ask = dealt
        return think, self._request(request.cls, ask, session=request.session, turn=request.turn + 1)

    def _request(self, name: str, ask: Ask, due: Seconds = 0.0, session: int | None = None, turn: int = 0) -> Request:
        number = next(self._ids)
        if ask.session is not None:
            session = number if session is None else session  # a session bears the id of its first request
            self._sessions[session] = ask.session
        return Request(
            id=number, cls=name, due=due, messages=ask.messages, tokens=ask.tokens, max_tokens=ask.max_tokens, force=ask.force,
            sampling=ask.sampling, session=session, turn=turn, group=ask.group,
        )  # fmt: skip


def _deck(spec: Class, streams: Streams, count: Callable[[str], int], folder: Path) -> Deck:
    if spec.source is not None:
        return FromFile(spec, streams, count)
    return FromTrace(spec, streams, folder) if spec.trace is not None else Generated(spec, streams)
