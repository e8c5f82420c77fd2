"""Requests under way: tokens of the engine's spans into events on the wire, one write per request and moment. No clock.

An answer's text is made up as it is needed, from the number of its job: the same requests in the same order get the same
answers, and no two requests the same one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvbench.core import Nanos, Seconds, reply_key
from kvbench.engine import Done, Job, Machine, Span
from kvbench.serve import Tokens, Written, shapes
from kvbench.serve.asks import Ask, RefusedError
from kvbench.serve.content import Contents, Prompt
from kvbench.serve.http import Connection
from kvbench.serve.page import Page, Row

AHEAD = 256  # tokens of an answer that are made up at a time
LOST = {  # why an answer that has begun does not go on
    "oom": "KV memory ran out, and the blocks of this request were taken for others.",
    "node_lost": "The node that worked on this request was lost.",
}


def answer_key(job_id: int, choice: int) -> int:
    """The content key under which the engine generates an answer (engine/batch.py)."""
    return reply_key(job_id) if choice == 0 else hash((reply_key(job_id), choice))


@dataclass(slots=True)
class Choice:
    """One answer of at most `most` tokens: what it says, and how far it is. Times are the engine's."""

    key: int
    most: int
    write: Callable[[int, int], Written]  # so many tokens, after so many others
    written: Written = field(default_factory=lambda: Written([], []))
    got: int = 0
    first: Nanos = 0
    last: Nanos = 0

    def upto(self, n: int) -> Written:
        """At least its first n tokens. They are made up as they are needed: n answers of the longest length take seconds."""
        have = len(self.written.ids)
        if have < n:
            more = self.write(min(self.most, max(n, have + AHEAD)) - have, have)
            self.written.ids.extend(more.ids)
            self.written.texts.extend(more.texts)
        return self.written

    def ids(self, n: int) -> list[int]:
        """Of its first n tokens at least."""
        return self.upto(n).ids


@dataclass(slots=True)
class Part:
    """One prompt of a request, which is one job."""

    job: Job
    prompt: Prompt
    choices: list[Choice]
    done: Done | None = None
    node: int = 0  # of a cluster, that gave the last token

    def usage(self, block: int) -> tuple[int, int, int, int]:
        """(prompt tokens, generated, cached, tokens in blocks new to the cache), of a job that is done."""
        assert self.done is not None
        n_in, cached = self.done.n_in, self.done.cached
        return n_in, self.done.n_out, cached, n_in // block * block - cached


@dataclass(slots=True)
class Reply:
    """One request and the connection that waits for it."""

    ask: Ask
    head: shapes.Head
    connection: Connection
    arrived: Nanos
    parts: list[Part] = field(default_factory=list)
    events: list[bytes] = field(default_factory=list)  # not yet on the wire
    failed: RefusedError | None = None

    @property
    def over(self) -> bool:
        return self.failed is not None or all(part.done for part in self.parts)


class Replies:
    """All requests under way. `page` is told of what happens to them; times on it are the clock's, `speed` of the engine's."""

    def __init__(self, machine: Machine, contents: Contents, tokens: Tokens, page: Page, speed: float) -> None:
        self.machine, self.contents, self.tokens, self.page, self.speed = machine, contents, tokens, page, speed
        self.live: dict[int, tuple[Reply, Part, int]] = {}  # by job; the part's first index among the request's choices
        self._touched: dict[int, Reply] = {}  # with events to be written, by identity
        self._ended: dict[int, Done] = {}  # in the moment that is being delivered
        self._computed = 0  # prompt tokens of jobs whose first token the present span gave
        self._next = 0

    def job(self, ask: Ask, ids: list[int], salt: int) -> Part:
        """The next job, for one prompt of a request."""
        number, self._next = self._next, self._next + 1
        prompt = self.contents.prompt(ids, salt)
        job = Job(number, prompt.segments, ask.max_tokens, ask.n, salt, ask.priority)
        opening = ask.api == "chat"
        keys = [answer_key(number, at) for at in range(ask.n)]

        def writer(key: int) -> Callable[[int, int], Written]:
            return lambda n, start: self.tokens.write(key, n, opening, start)

        choices = [Choice(key, ask.max_tokens, writer(key)) for key in keys]
        return Part(job, prompt, choices)

    def enter(self, reply: Reply) -> None:
        """All its jobs are with the engine."""
        for at, part in enumerate(reply.parts):
            self.live[part.job.id] = (reply, part, at * reply.ask.n)
        if reply.ask.stream:
            reply.connection.begin()

    def deliver(self, spans: list[Span], now: Seconds) -> list[Reply]:
        """All that happened up to the moment `now`. Returns the requests that failed; nothing is left of them in the engine."""
        failed: dict[int, Reply] = {}
        self._ended = {done.id: done for span in spans for done in span.done}  # the engine knows of these no longer
        for span in spans:
            self.page.generated(span.node, len(span.tokens) * len(span.times))
            self._computed = 0
            for job_id, choice in span.tokens:
                reply, part, at = self.live[job_id]
                part.node = span.node
                self._took(reply, part, part.choices[choice], at + choice, span.times)
            for computed in [self._computed, *[0] * (len(span.times) - 1)] if span.tokens else ():
                self.page.step(span.node, computed + len(span.tokens))
            for done in span.done:
                reply = self._end(done)
                if reply.failed is not None:
                    failed[id(reply)] = reply
        for reply in failed.values():
            self.drop(reply, now)
            self._give_up(reply)
        return list(failed.values())

    def _end(self, done: Done) -> Reply:
        reply, part, _ = self.live.pop(done.id)
        part.done = done
        self._remember(part)
        if done.failed:
            reply.failed = reply.failed or RefusedError(500, "InternalServerError", LOST.get(done.failed, done.failed))
            self.page.failed(part.node)
        elif reply.failed is None and reply.over:
            self._finish(reply)
        return reply

    def _took(self, reply: Reply, part: Part, choice: Choice, index: int, times: list[Nanos]) -> None:
        begin = choice.got
        choice.got += len(times)
        self._time(reply, part, choice, times)
        texts = choice.upto(choice.got).texts
        if not reply.ask.stream:
            return
        head, count = reply.head, reply.ask.max_tokens
        if not begin and reply.ask.api == "chat":
            self._say(reply, head.opening(index), part, 0)
        for at in range(begin, choice.got):
            self._say(reply, head.token(index, texts[at], at + 1 == count), part, at + 1)

    def _time(self, reply: Reply, part: Part, choice: Choice, times: list[Nanos]) -> None:
        """Tell the page of tokens at `times`, the last of those that `choice` has by now."""
        if choice.got == len(times):
            choice.first = choice.last = times[0]
            self.page.first(part.node, (times[0] - reply.arrived) / self.speed / 1e9)
            if not any(one.got for one in part.choices if one is not choice):
                done = self._ended.get(part.job.id) or self.machine.progress(part.job.id)
                self.page.prompt(part.node, done.n_in, done.cached, done.below)
                self._computed += done.n_in - done.cached
            times = times[1:]
        for time in times:
            self.page.gap(part.node, (time - choice.last) / self.speed / 1e9)
            choice.last = time

    def _say(self, reply: Reply, fields: dict[str, object], part: Part, completion: int) -> None:
        if reply.ask.running_usage:
            fields["usage"] = shapes.running_usage(part.prompt.tokens, completion)
        reply.events.append(shapes.event(fields))
        self._touched[id(reply)] = reply

    def _remember(self, part: Part) -> None:
        """Its answers may come back in a later prompt."""
        for choice in part.choices:
            self.contents.answered(part.prompt, choice.key, choice.upto(choice.got).ids[: choice.got])

    def _finish(self, reply: Reply) -> None:
        ask = reply.ask
        counts = [part.usage(self.contents.block) for part in reply.parts]
        prompt, completion, cached, created = (sum(column) for column in zip(*counts, strict=True))
        told = created if ask.api == "chat" else None
        for part in reply.parts:
            self._record(reply, part)
        if ask.stream:
            if ask.usage:
                reply.events.append(shapes.event(reply.head.counted(shapes.streamed_usage(prompt, completion, cached, told))))
            reply.events.append(shapes.DONE)
            self._touched[id(reply)] = reply
        else:
            texts = ["".join(choice.upto(choice.got).texts[: choice.got]) for part in reply.parts for choice in part.choices]
            reply.connection.respond(200, reply.head.whole(texts, shapes.whole_usage(prompt, completion, cached, told)))

    def _give_up(self, reply: Reply) -> None:
        """As vLLM, whose streams end with the error in place of what was to come."""
        assert reply.failed is not None
        if not reply.ask.stream:
            reply.connection.respond(reply.failed.status, reply.failed.body())
            return
        reply.events += [shapes.error(reply.failed.body()), shapes.DONE]
        self._touched[id(reply)] = reply

    def flush(self) -> None:
        """Write what has gathered, and end the streams that are whole."""
        touched, self._touched = self._touched, {}
        for reply in touched.values():
            events, reply.events = b"".join(reply.events), []
            reply.connection.send(events)
            if reply.over:
                reply.connection.end()

    def _record(self, reply: Reply, part: Part) -> None:
        """A job is over: its row of the page's histograms."""
        done, last = part.done, max(choice.last for choice in part.choices)
        assert done is not None
        scale = 1e9 * self.speed
        decode = [(choice.last - choice.first) / scale for choice in part.choices]
        first = min(choice.first for choice in part.choices)
        begun = first if done.begun is None else done.begun
        per_token = [seconds / (choice.got - 1) for seconds, choice in zip(decode, part.choices, strict=True) if choice.got > 1]
        self.page.ended(part.node, Row(
            prompt=done.n_in, generated=[choice.got for choice in part.choices], n=reply.ask.n, asked=reply.ask.max_tokens,
            computed=done.n_in - done.cached, preempted=done.preempted, whole=(last - reply.arrived) / scale,
            queued=(begun - reply.arrived) / scale, prefill=(first - begun) / scale, inference=(last - begun) / scale,
            decode=decode, per_token=per_token,
        ))  # fmt: skip

    def drop(self, reply: Reply, now: Seconds) -> None:
        """Its client has gone: cancel what is left of it at `now`, which the engine has been advanced to."""
        self._touched.pop(id(reply), None)
        for part in reply.parts:
            if part.job.id in self.live:
                self._remember(part)
                del self.live[part.job.id]
                self.machine.cancel(part.job.id, now)
                self.page.aborted(part.node)
