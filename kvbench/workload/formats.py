"""Trace formats: what a record of each looks like, read into rows and written from them. One class and one line per format."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from kvbench.workload.layout import Covers, Draft, Format, cells, covered, line, recorded
from kvbench.workload.rows import Fields, Row

_EXACT = 2**53  # JSON numbers above this lose digits in readers that use doubles


class Columns:
    """A time and two lengths, as Azure's and Vidur's CSV and LLMServingSim's JSON lines have them; written as CSV. No more.

    With a `tick` stamps are written as dates, from the year 2000 on.
    """

    guess, from_zero, loses = False, False, ""
    unit: Literal["s", "ms"] = "s"
    covers: Covers = "all"
    holds = frozenset({"n_out"})

    def __init__(self, time: str, n_in: str, n_out: str, tick: float) -> None:
        self.names = (time, n_in, n_out)
        self.needs = frozenset(self.names)
        self.tick = tick

    def read(self, records: Iterable[Fields], block: int | None) -> Iterator[Draft]:
        time, n_in, n_out = self.names
        for ordinal, record in enumerate(records):
            yield record.where, record.stamp(time), Row(None, record.whole(n_in), record.whole(n_out), ordinal=ordinal)

    def write(self, rows: Sequence[Row]) -> Iterator[str]:
        yield cells(*self.names)
        for row in rows:
            at = recorded(row)
            yield cells(_azure_stamp(at) if self.tick else repr(at), row.n_in, row.n_out)


def _azure_stamp(due: float) -> str:
    whole, part = divmod(round(due * 10**7), 10**7)
    return f"{datetime(2000, 1, 1, tzinfo=UTC) + timedelta(seconds=whole):%Y-%m-%d %H:%M:%S}.{part:07d}"


class BurstGPT:
    """BurstGPT's CSV. Holds sessions (turns counted in file order), the model and the log type; no block ids."""

    needs = frozenset({"Timestamp", "Request tokens", "Response tokens"})
    guess, from_zero, tick, loses = False, False, 0.0, "extra fields other than Model and Log Type"
    unit: Literal["s", "ms"] = "s"
    covers: Covers = "all"
    holds = frozenset({"n_out", "session", "turn", "extra"})
    kept = ("Model", "Log Type")

    def read(self, records: Iterable[Fields], block: int | None) -> Iterator[Draft]:
        turns: dict[str, int] = {}
        for ordinal, record in enumerate(records):
            session = record.text("Session ID")
            turn = turns.get(session, 0) if session else 0
            if session:
                turns[session] = turn + 1
            extra = {name: record.data[name] for name in self.kept if record.data.get(name)}
            n_in, n_out = record.whole("Request tokens"), record.whole("Response tokens")
            row = Row(None, n_in, n_out, session=session, turn=turn, extra=extra, ordinal=ordinal)
            yield record.where, record.stamp("Timestamp"), row

    def write(self, rows: Sequence[Row]) -> Iterator[str]:
        yield cells("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type", "Session ID")
        for row in rows:
            model, kind = (row.extra.get(name, "") for name in self.kept)
            yield cells(repr(recorded(row)), model, row.n_in, row.n_out, row.n_in + row.n_out, kind, row.session or "")


class Mooncake:
    """Mooncake's JSON lines: 512-token blocks, an id for each, the partial last one too. Holds no sessions; whole milliseconds.

    A record may carry its own `block_size`; it is written only where it is not 512, and other readers may not know it.
    """

    needs = frozenset({"timestamp", "input_length", "output_length"})
    guess, from_zero, tick, loses = True, False, 0.001, ""
    unit: Literal["s", "ms"] = "ms"
    covers: Covers = "all"
    holds = frozenset({"hashes", "n_out"})
    block = 512

    def read(self, records: Iterable[Fields], block: int | None) -> Iterator[Draft]:
        for ordinal, record in enumerate(records):
            yield record.where, record.stamp("timestamp"), self.row(record, block, ordinal)

    def row(self, record: Fields, block: int | None, ordinal: int) -> Row:
        size = record.whole("block_size", block or self.block)
        lengths = record.whole("input_length"), record.whole("output_length")
        return Row(None, *lengths, record.ids("hash_ids"), size, ordinal=ordinal)

    def write(self, rows: Sequence[Row]) -> Iterator[str]:
        for row in covered(rows, self.covers):
            yield line({"timestamp": round(recorded(row) * 1000)} | self.body(row))

    def body(self, row: Row) -> dict[str, Any]:
        body: dict[str, Any] = {"input_length": row.n_in, "output_length": row.n_out}
        if row.hashes:
            body |= {"hash_ids": row.hashes} | ({} if row.block == self.block else {"block_size": row.block})
        return body


class Bailian(Mooncake):
    """Qwen-Bailian's JSON lines: 16-token blocks, chats linked to their parents. A chat and its descendants are one session,
    named by its first chat; the turn is the depth. Holds that and `type`; session names are lost to chat numbers.
    """

    needs = frozenset({"chat_id", "parent_chat_id", "timestamp", "input_length", "output_length"})
    tick, loses = 0.0, "names of sessions (chat numbers instead), extra fields other than type"
    unit: Literal["s", "ms"] = "s"
    holds = frozenset({"hashes", "n_out", "session", "turn", "extra"})
    block = 16

    def read(self, records: Iterable[Fields], block: int | None) -> Iterator[Draft]:
        seen: dict[str, tuple[str, int]] = {}  # chat -> its session and turn
        for ordinal, record in enumerate(records):
            chat, parent = record.text("chat_id") or "", record.text("parent_chat_id") or "-1"
            session, depth = seen.get(parent, (chat, -1))  # a parent outside the file: the session begins here
            seen[chat] = (session, depth + 1)
            extra = {"type": kind} if (kind := record.text("type")) else {}
            row = replace(self.row(record, block, ordinal), session=session, turn=depth + 1, extra=extra)
            yield record.where, record.stamp("timestamp"), row

    def write(self, rows: Sequence[Row]) -> Iterator[str]:
        last: dict[str, int] = {}
        for chat, row in enumerate(covered(rows, self.covers)):
            name = row.session or f"\0{chat}"
            head = {"chat_id": chat, "parent_chat_id": last.get(name, -1), "timestamp": recorded(row), "turn": row.turn + 1}
            last[name] = chat
            yield line(head | self.body(row) | ({"type": row.extra["type"]} if "type" in row.extra else {}))


def _stamp(draft: Draft) -> float:
    return float(draft[1] or 0)


class Weka:
    """Agent sessions of kv-cache-tester: one JSON object per session, 64-token blocks, ids for the full blocks only.

    Ids of "local" scope are moved apart, so that equal ids of two sessions differ; a sub-agent is a session of its own that
    shares its parent's ids. A turn without think_time is given the gap between the stamps less the api_time. Stamps count from
    the start of each conversation: all sessions begin at 0. Written with "global" scope, one session per line; the start of a
    session within the run is lost, and the order of rows across sessions.
    """

    needs = frozenset({"requests", "block_size"})
    guess, from_zero, tick, loses = False, True, 0.0, "the start of each session within the run (all at 0 instead)"
    unit: Literal["s", "ms"] = "s"
    covers: Covers = "full"
    holds = frozenset({"hashes", "n_out", "session", "turn", "think"})

    def read(self, records: Iterable[Fields], block: int | None) -> Iterator[Draft]:
        base = 0
        drafts: list[Draft] = []
        for number, record in enumerate(records):
            size = record.whole("block_size", block)
            session = record.text("id") or f"session-{number}"
            shift = 0 if record.data.get("hash_id_scope") == "global" else base
            for where, stamp, row in self._session(record, session, 0.0):
                hashes = tuple(i + shift for i in row.hashes)
                base = max(base, max(hashes, default=-1) + 1)
                drafts.append((where, stamp, replace(row, hashes=hashes, block=size, ordinal=len(drafts))))
        yield from sorted(drafts, key=_stamp)  # sessions lie one after the other in the file and side by side in time

    def _session(self, record: Fields, session: str, start: float) -> Iterator[Draft]:
        requests = record.data["requests"]
        if not isinstance(requests, list) or not all(isinstance(r, dict) for r in requests):
            raise ValueError(f"{record.where}: requests must be a list of objects")
        turn, ended = 0, 0.0
        for number, data in enumerate(requests, 1):
            fields = Fields(f"{record.where} request {number}", data)
            if "requests" in data:
                agent = Fields(fields.where, data)
                yield from self._session(agent, f"{session}/{fields.text('agent_id') or number}", agent.number("t", start))
                continue
            stamp = fields.number("t")
            stamp += start if stamp < start else 0.0  # a sub-agent's may count from its own start
            think = fields.number("think_time", max(0.0, stamp - ended)) if turn else None
            ended = stamp + fields.number("api_time", 0.0)
            row = Row(None, fields.whole("in"), fields.whole("out"), fields.ids("hash_ids"), 0, session, turn, think)
            yield fields.where, stamp, row
            turn += 1

    def write(self, rows: Sequence[Row]) -> Iterator[str]:
        sessions: dict[str, list[Row]] = {}
        for row in covered(rows, self.covers):
            sessions.setdefault(row.session or f"row-{row.ordinal}", []).append(row)
        for name, turns in sessions.items():
            turns = sorted(turns, key=lambda row: row.turn)
            start = recorded(turns[0])
            blocks = {row.block for row in turns if row.hashes} or {64}
            if len(blocks) > 1:
                raise ValueError(f"session {name} mixes blocks of {sorted(blocks)} tokens: this format has one size per session")
            requests = [self._request(row, start) for row in turns]
            yield line({"id": name, "block_size": blocks.pop(), "hash_id_scope": "global", "requests": requests})

    def _request(self, row: Row, start: float) -> dict[str, Any]:
        request = {"t": recorded(row) - start, "type": "s", "in": row.n_in, "out": row.n_out, "hash_ids": row.hashes}
        return request | ({} if row.think is None else {"think_time": row.think})


class LMCache:
    """LMCache's lookup-hash log: hex hashes of any width for the full chunks. Holds no output length (1 is read), no sessions."""

    needs = frozenset({"chunk_hashes", "seq_len", "chunk_size"})
    guess, from_zero, tick, loses = False, False, 0.0, ""
    unit: Literal["s", "ms"] = "s"
    covers: Covers = "full"
    holds = frozenset({"hashes"})

    def read(self, records: Iterable[Fields], block: int | None) -> Iterator[Draft]:
        for ordinal, record in enumerate(records):
            size = record.whole("chunk_size", block)
            row = Row(None, record.whole("seq_len"), 1, record.ids("chunk_hashes"), size, ordinal=ordinal)
            yield record.where, record.stamp("timestamp"), row

    def write(self, rows: Sequence[Row]) -> Iterator[str]:
        for number, row in enumerate(covered(rows, self.covers)):
            head = {"timestamp": recorded(row), "request_id": f"row-{number}", "model_name": ""}
            chunks = {"chunk_size": row.block or 256, "seq_len": row.n_in, "dtypes": [], "shapes": []}
            yield line(head | chunks | {"chunk_hashes": [hex(i) for i in row.hashes]})


class Kvbench:
    """kvbench's own JSON lines: due (s), n_in, n_out, hashes, block, session, turn, think (s), extra. Holds all of a row.

    Ids above 2**53 are written as decimal texts. Absent: no time (lengths only), no hashes, no session, turn 0, no think.
    A later turn of a session that has `think` follows its predecessor; its `due` is then what was recorded.
    """

    needs = frozenset({"n_in", "n_out"})
    guess, from_zero, tick, loses = False, True, 0.0, ""
    unit: Literal["s", "ms"] = "s"
    covers: Covers = "either"
    holds = frozenset({"hashes", "n_out", "session", "turn", "think", "extra"})
    fields = ("due", "n_in", "n_out", "hashes", "block", "session", "turn", "think", "extra")

    def read(self, records: Iterable[Fields], block: int | None) -> Iterator[Draft]:
        for ordinal, record in enumerate(records):
            if unknown := sorted(set(record.data) - set(self.fields)):
                raise ValueError(f"{record.where}: unknown field {unknown[0]!r}: a row has {', '.join(self.fields)}")
            extra = record.data.get("extra", {})
            if not isinstance(extra, dict):
                raise ValueError(f"{record.where}: extra is {extra!r}: it must be an object")
            hashes = record.ids("hashes")
            size = record.whole("block", block) if hashes else 0
            think = record.number("think") if record.data.get("think") is not None else None
            stamp = record.number("due") if record.data.get("due") is not None else None
            lengths = record.whole("n_in"), record.whole("n_out")
            row = Row(None, *lengths, hashes, size, record.text("session"), record.whole("turn", 0), think, extra, None, ordinal)
            yield record.where, stamp, row

    def write(self, rows: Sequence[Row]) -> Iterator[str]:
        for row in rows:
            record: dict[str, Any] = {"due": row.at if row.due is None else row.due, "n_in": row.n_in, "n_out": row.n_out}
            if row.hashes:
                record |= {"block": row.block, "hashes": [i if i <= _EXACT else str(i) for i in row.hashes]}
            record |= {"session": row.session, "turn": row.turn or None, "think": row.think, "extra": row.extra or None}
            yield line({name: value for name, value in record.items() if value is not None})


FORMATS: dict[str, Format] = {  # recognised in this order
    "kvbench": Kvbench(),
    "weka": Weka(),
    "lmcache": LMCache(),
    "bailian": Bailian(),
    "mooncake": Mooncake(),
    "azure": Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", 1e-7),
    "vidur": Columns("arrived_at", "num_prefill_tokens", "num_decode_tokens", 0.0),
    "burstgpt": BurstGPT(),
    "llmservingsim": Columns("arrival_time", "input_toks", "output_toks", 0.0),
}
