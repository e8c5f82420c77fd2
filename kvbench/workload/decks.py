"""Where the requests of a class come from: generated, a file of real prompts, or a trace. A deck deals first and later turns.

Every class draws from streams of its own, named by (phase stream, class, purpose), so that adding a class, a phase or a purpose
moves no other's draws.
"""

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from kvbench.core import Message, Record, Request, Seconds, Segment, UsedUpError, reply_key
from kvbench.workload import Lengths
from kvbench.workload.classes import Class
from kvbench.workload.prompts import Conversation, key, lead, mark, read_prompts
from kvbench.workload.traces import Row

Seeds = Mapping[str, np.random.SeedSequence]
"""Seed sequences of the run's streams by name: lengths, prompts and sampling. Read, never spawned from."""


class Ask(msgspec.Struct, kw_only=True):
    """What one turn asks; `session` is what its deck needs to deal the next turn, None where there is none."""

    messages: tuple[Message, ...]
    tokens: int
    max_tokens: int
    force: bool = False
    sampling: dict[str, Any] = {}
    group: int | None = None
    session: Any = None


class Deck(Protocol):
    """The requests of one class."""

    def first(self, regime: float) -> Ask:
        """The next arrival. `regime` multiplies drawn lengths; recorded ones stay. Raises ValueError where a trace is used up."""

    def later(self, session: Any, request: Request, record: Record) -> tuple[Seconds, Ask] | None:
        """The turn after `request`, which ended well as `record` says, and the think time before it; None at the end."""


class Streams:
    """The random streams and content keys of one class in one phase stream ("warmup", "steady").

    nonce: what sets this run's content apart, None for nothing. shared: the phase stream whose prefix groups and nonce are used.
    """

    def __init__(self, seeds: Seeds, nonce: int | None, stream: str, shared: str, cls: str) -> None:
        self.seeds, self.nonce, self.stream, self.shared, self.cls = seeds, nonce, stream, shared, cls
        seed = key(*seeds["prompts"].generate_state(4).tolist())
        self._own, self._common = key(seed, stream, cls), key(seed, shared, cls)

    def rng(self, purpose: str, detail: str = "", index: int = 0) -> np.random.Generator:
        root = self.seeds[purpose]
        names = (zlib.crc32(name.encode()) for name in (self.stream, self.cls, detail))
        return np.random.default_rng(np.random.SeedSequence(root.entropy, spawn_key=(*root.spawn_key, *names, index)))

    def own(self, *parts: int | str) -> int:
        """A key nobody else has: of this phase stream and class."""
        return key(self._own, *parts)

    def common(self, *parts: int | str) -> int:
        """A key that the phase streams with the same `shared` have in common."""
        return key(self._common, *parts)

    def nonce_key(self, stream: str, lap: int = 0) -> int | None:
        return None if self.nonce is None else key("nonce", self.nonce, stream, lap)


class Generated:
    """Prompts made of a nonce, perhaps a shared prefix, and a part of their own."""

    def __init__(self, spec: Class, streams: Streams) -> None:
        assert spec.prompt is not None  # Class checked it, and the output
        assert spec.output is not None
        assert spec.output.lengths is not None
        self.spec, self.streams, self.prompt, self.output = spec, streams, spec.prompt, spec.output.lengths
        self.nonce = streams.nonce_key(streams.shared)
        self.dealt = 0
        self._prompt, self._output = streams.rng("lengths", "prompt"), streams.rng("lengths", "output")
        self._prefix, self._sampling = streams.rng("prompts", "prefix"), streams.rng("sampling")
        self._prefixes: dict[int, Segment] = {}  # of each group seen so far

    def first(self, regime: float) -> Ask:
        index, self.dealt = self.dealt, self.dealt + 1
        group = self.spec.prefixes.pick(self._prefix) if self.spec.prefixes else None
        parts = [] if group is None else [self._shared(group)]
        parts.append((self.streams.own("unique", index), _drawn(self.prompt, self._prompt, regime)))
        session = _Talk(index, self.streams, self.spec.sessions.turns, regime) if self.spec.sessions else None
        return Ask(
            messages=(Message(segments=lead(self.nonce, parts)),),
            tokens=sum(tokens for _, tokens in parts),
            group=group,
            session=session,
            **self._answer(self._output, self._sampling, regime),
        )

    def later(self, session: "_Talk", request: Request, record: Record) -> tuple[Seconds, Ask] | None:
        assert self.spec.sessions is not None
        if request.turn + 1 >= session.turns:
            return None
        think = self.spec.sessions.think.pause(session.rng)
        new = _drawn(self.prompt, session.rng, session.regime)
        message = Message(segments=((self.streams.own("turn", session.index, request.turn + 1), new),))
        answer = self._answer(session.rng, session.rng, session.regime)
        ask = Ask(messages=(), tokens=new, group=request.group, session=session, **answer)
        return think, continued(ask, message, request, record)

    def _shared(self, group: int) -> Segment:
        """A group's prefix, as long for everyone: its length is drawn once, from the group's own stream."""
        if group not in self._prefixes:
            assert self.spec.prefixes is not None
            rng = np.random.default_rng(self.streams.common("prefix tokens", group))
            self._prefixes[group] = self.streams.common("prefix", group), self.spec.prefixes.tokens.sample(rng)
        return self._prefixes[group]

    def _answer(self, lengths: np.random.Generator, sampling: np.random.Generator, regime: float) -> dict[str, Any]:
        assert self.spec.output is not None
        drawn = _drawn(self.output, lengths, regime)
        return {"max_tokens": drawn, "force": self.spec.output.force, "sampling": self.spec.sampling.draw(sampling)}


class _Talk:
    """A generated session: how many turns, under which length regime it began, and its own random stream."""

    def __init__(self, index: int, streams: Streams, turns: Lengths, regime: float) -> None:
        self.index, self.regime = index, regime
        self.rng = streams.rng("lengths", "session", index)
        self.turns = turns.sample(self.rng)


class FromFile:
    """Real prompts. Their own text is kept; the nonce stands before it, on top, and is a new one for each pass over the file."""

    def __init__(self, spec: Class, streams: Streams, count: Callable[[str], int]) -> None:
        assert spec.source is not None
        self.spec, self.streams, self.count = spec, streams, count
        prompts = read_prompts(spec.source)
        self.skipped = prompts.skipped
        if spec.output is None or spec.output.lengths is None:
            without = sum(conversation.max_tokens is None for conversation in prompts.conversations)
            if without:
                raise ValueError(f"{spec.source.file}: {without} prompts have no max_tokens: give the class an `output`")
        if spec.sessions and not any(conversation.later for conversation in prompts.conversations):
            raise ValueError(f"{spec.source.file}: no conversation has a second human turn (sessions need the sharegpt form)")
        self.ids = sorted({i for c in prompts.conversations for m in c.opening for i in (m.raw or {}).get("token_ids", ())})
        self._order = prompts.order(spec.source, streams.own("order"))
        self._output, self._sampling = streams.rng("lengths", "output"), streams.rng("sampling")
        self.dealt = 0

    def first(self, regime: float) -> Ask:
        index, self.dealt = self.dealt, self.dealt + 1
        lap, conversation = next(self._order)
        nonce = self.streams.nonce_key(self.streams.stream, lap)
        if nonce is None and self.streams.stream != "steady":
            nonce = self.streams.own("nonce", lap)  # a warm-up shares no prompt with what is measured
        opening = conversation.opening if nonce is None else mark(conversation.opening, nonce, self.ids)
        messages = tuple(self._sized(message) for message in opening)
        session = None
        if self.spec.sessions and conversation.later:
            rng = self.streams.rng("lengths", "session", index)
            session = _Said(conversation, rng, self.spec.sessions.turns.sample(rng))
        return self._ask(messages, conversation, self._output, self._sampling, session)

    def later(self, session: "_Said", request: Request, record: Record) -> tuple[Seconds, Ask] | None:
        turn = request.turn + 1
        if self.spec.sessions is None or turn >= session.turns or turn > len(session.conversation.later):
            return None
        think = self.spec.sessions.think.pause(session.rng)
        message = self._sized(session.conversation.later[turn - 1])
        ask = self._ask((message,), session.conversation, session.rng, session.rng, session)
        return think, continued(ask, message, request, record)

    def _sized(self, message: Message) -> Message:
        """With a segment for the embedded engine: the content by its hash, and its tokens as counted or estimated."""
        ids = (message.raw or {}).get("token_ids")
        text = message.text if message.text is not None else str((message.raw or {}).get("content") or "")
        tokens = len(ids) if ids else max(1, self.count(text))
        name = key("text", str(ids) if ids else text)
        return msgspec.structs.replace(message, segments=((name, tokens),))

    def _ask(self, messages: tuple[Message, ...], conversation: Conversation, lengths: Any, sampling: Any, session: Any) -> Ask:
        output = self.spec.output
        drawn = output.lengths.sample(lengths) if output and output.lengths else conversation.max_tokens or 1
        return Ask(
            messages=messages,
            tokens=sum(tokens for message in messages for _, tokens in message.segments),
            max_tokens=drawn,
            force=bool(output and output.force),
            sampling=self.spec.sampling.draw(sampling) | conversation.sampling,
            session=session,
        )


class _Said:
    """A session replayed from a file: what its user goes on to say, and at most how many turns are asked."""

    def __init__(self, conversation: Conversation, rng: np.random.Generator, turns: int) -> None:
        self.conversation, self.rng, self.turns = conversation, rng, turns


class FromTrace:
    """Rows of a trace in their order. Equal block ids are equal content within a lap of a phase stream, and only there."""

    def __init__(self, spec: Class, streams: Streams, folder: Path) -> None:
        assert spec.trace is not None
        self.spec, self.streams = spec, streams
        self.trace = spec.trace.read(folder)
        self.rows, self.turns = _openers(self.trace.rows)
        self._order = self._arrivals()
        self._sampling, self._output = streams.rng("sampling"), streams.rng("lengths", "output")

    def first(self, regime: float) -> Ask:
        try:
            lap, row = next(self._order)
        except StopIteration:
            raise UsedUpError(
                f"{self.trace.facts.get('file')}: all {len(self.rows)} arrivals are used: ask for fewer, or set `wrap: again`"
            ) from None
        follows = self.turns.get(row.session) if row.session is not None else None
        return self._ask(row, lap, (lap, iter(follows)) if follows else None)

    def later(self, session: tuple[int, Iterator[Row]], request: Request, record: Record) -> tuple[Seconds, Ask] | None:
        lap, follows = session
        row = next(follows, None)
        return None if row is None else (row.think or 0.0, self._ask(row, lap, session))

    def _arrivals(self) -> Iterator[tuple[int, Row]]:
        assert self.spec.trace is not None
        lap = 0
        while True:
            for row in self.rows:
                yield lap, row
            if self.spec.trace.wrap == "refuse":
                return
            lap += 1

    def _ask(self, row: Row, lap: int, session: Any) -> Ask:
        parts = [(self.streams.own("trace", lap, name), tokens) for name, tokens in self.trace.segments(row)]
        output = self.spec.output
        return Ask(
            messages=(Message(segments=lead(self.streams.nonce_key(self.streams.stream), parts)),),
            tokens=row.n_in,
            max_tokens=output.lengths.sample(self._output) if output and output.lengths else row.n_out,
            force=output.force if output else True,  # a replay means the recorded lengths, unless the scenario says otherwise
            sampling=self.spec.sampling.draw(self._sampling),
            session=session,
        )


def _openers(rows: list[Row]) -> tuple[list[Row], dict[str, list[Row]]]:
    """Rows that arrive by themselves, and by session those that wait for their predecessor: due None, not the session's first."""
    arrive: list[Row] = []
    follow: dict[str, list[Row]] = defaultdict(list)
    seen: set[str] = set()
    for row in rows:
        if row.due is None and row.session in seen and row.session is not None:
            follow[row.session].append(row)
            continue
        arrive.append(row)
        if row.session is not None:
            seen.add(row.session)
    return arrive, dict(follow)


def _drawn(lengths: Lengths, rng: np.random.Generator, regime: float) -> int:
    return max(1, round(lengths.sample(rng) * regime))


def continued(ask: Ask, message: Message, request: Request, record: Record) -> Ask:
    """`ask` with the history in front of `message`: what was asked before and the answer's content, never its reasoning.

    The history's tokens are the server's own count where it gave one, else what was asked for.
    """
    said = max(0, (record.n_out or 0) - (record.reasoning or 0)) // request.sampling.get("n", 1)  # the first choice goes on
    if record.text is not None:
        reply = Message(role="assistant", text=record.text)
    else:
        reply = Message(role="assistant", segments=((reply_key(request.id), said),) if said else ())
    before = request.tokens if record.n_in is None else record.n_in
    ask.messages = (*request.messages, reply, message)
    ask.tokens += before + said
    return ask
