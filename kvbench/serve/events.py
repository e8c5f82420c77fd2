"""KV events over ZMQ in vLLM's framing: what becomes resident, what leaves, and the clearing of everything.

A message is (topic, sequence number in 8 bytes, msgpack of [time, [events], rank]); the replay endpoint answers a first sequence
number with the messages kept since, and then an empty one with the number -1. Only the device's blocks are told of (medium GPU).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvbench.core import Nanos
from kvbench.engine import Job, Key
from kvbench.engine.chain import Chain, root
from kvbench.engine.tape import Access

KEPT = 10_000  # messages that can be replayed
MARK = 100_000  # messages that wait for a subscriber before they are dropped
END = (-1).to_bytes(8, "big", signed=True)
_UNSIGNED = (1 << 64) - 1
_ENDLESS = 1 << 62


@dataclass(slots=True)
class _Known:
    """A job under way. places: (choice, block of its chain) by key, of what was stored and of the prompt."""

    places: dict[Key, tuple[int, int]]
    chains: list[Chain]
    prompt: list[int]
    answers: list[Callable[[int], list[int]]]
    salt: str

    def place(self, key: Key, before: Key | None, block: int) -> tuple[int, int] | None:
        """Where `key` stands, which follows `before`. A sequence stores its blocks in order, so that is known; None where not."""
        if key not in self.places and before in self.places:
            choice, at = self.places[before]
            shared = at + 1 == len(self.prompt) // block  # here the choices part
            for one in range(len(self.chains)) if shared else (choice,):
                if self.chains[one].upto(at + 2)[at + 1] == key:
                    self.places[key] = one, at + 1
                    break
        return self.places.get(key)

    def tokens(self, choice: int, start: int, stop: int) -> list[int]:
        n = len(self.prompt)
        own = self.answers[choice](stop - n)[max(0, start - n) : stop - n] if stop > n else []
        return self.prompt[start:stop] + own


class Ledger:
    """Accesses of one replica into events, in order. `take` hands over those since the last call, a batch for each moment.

    The token ids behind a key are known while a request that has them is under way, which it is when its blocks are stored.
    """

    def __init__(self, block: int) -> None:
        self.block = block
        self._batches: list[tuple[Nanos, list[dict[str, Any]]]] = []
        self._events: list[dict[str, Any]] = []  # of the last of them
        self._resident: set[tuple[int, Key]] = set()
        self._leaving: list[tuple[int, Key]] = []  # in a reset that is being told of
        self._known: dict[int, _Known] = {}

    def watch(self, job: Job, prompt: list[int], answers: Sequence[tuple[int, Callable[[int], list[int]]]], salt: str) -> None:
        """A job begins. answers: content key of each choice, and what gives its first n token ids at least, when they are due."""
        chains = [Chain((*job.segments, (key, _ENDLESS)), self.block, root(job.salt, 0)) for key, _ in answers]
        places = {chains[0].parent(0): (0, -1)}
        places |= {key: (0, at) for at, key in enumerate(chains[0].upto(len(prompt) // self.block))}
        self._known[job.id] = _Known(places, chains, prompt, [ids for _, ids in answers], salt)

    def forget(self, job_id: int) -> None:
        self._known.pop(job_id, None)

    def hear(self, access: Access) -> None:
        """A listener of the engine's tape."""
        if not self._batches or self._batches[-1][0] != access.t:
            self._events = []
            self._batches.append((access.t, self._events))
        if access.op == "reset":
            self._reset(access.key, access.group)
        elif access.tier != "gpu" or access.key is None:
            return
        elif access.op == "store":
            self._stored(access.key, access.parent, access.job, access.group)
        elif access.op == "evict" and (access.group, access.key) in self._resident:
            self._removed(access.key, access.group)

    def _reset(self, key: Key | None, group: int) -> None:
        """One row for each block that leaves, then one for the whole. A fault's reset spares what requests hold."""
        if key is not None:
            if (group, key) in self._resident:
                self._leaving.append((group, key))
            return
        leaving, self._leaving = self._leaving, []
        if self._resident == set(leaving):
            self._resident.clear()
            self._events.append({"type": "AllBlocksCleared"})
        else:
            for one in leaving:
                self._removed(one[1], one[0])

    def _stored(self, key: Key, before: Key | None, job_id: int, group: int) -> None:
        known = self._known.get(job_id)
        place = known.place(key, before, self.block) if known is not None else None
        if known is None or place is None:
            return  # no request of ours: what a cluster moves between its nodes
        choice, at = place
        block, parent = self.block, known.chains[choice].keys[at - 1] & _UNSIGNED if at else None
        self._resident.add((group, key))
        ids = known.tokens(choice, at * block, (at + 1) * block)
        extra = [known.salt] if known.salt and not at else None
        last = self._events[-1] if self._events else {}
        if last.get("type") == "BlockStored" and last["block_hashes"][-1] == parent and last["group_idx"] == group:
            last["block_hashes"].append(key & _UNSIGNED)
            last["token_ids"] += ids
            last["extra_keys"].append(extra)
            return
        self._events.append({
            "type": "BlockStored", "block_hashes": [key & _UNSIGNED], "parent_block_hash": parent, "token_ids": ids,
            "block_size": block, "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [extra], "group_idx": group,
            "kv_cache_spec_kind": "full_attention",
        })  # fmt: skip

    def _removed(self, key: Key, group: int) -> None:
        self._resident.discard((group, key))
        last = self._events[-1] if self._events else {}
        if last.get("type") == "BlockRemoved" and last["group_idx"] == group:
            last["block_hashes"].append(key & _UNSIGNED)
            return
        self._events.append({
            "type": "BlockRemoved", "block_hashes": [key & _UNSIGNED], "medium": "GPU", "group_idx": group,
        })  # fmt: skip

    def take(self) -> list[tuple[Nanos, list[dict[str, Any]]]]:
        """(engine time in ns, events) of each moment that has any."""
        batches, self._batches = self._batches, []
        return [batch for batch in batches if batch[1]]


class Publisher:
    """One PUB socket, and a ROUTER for replays where one is asked for. Never blocks: slow subscribers lose messages, and see it.

    As in vLLM an endpoint with a `*` (or ipc, inproc) is bound, any other connected to. ValueError where that is not possible
    or pyzmq is missing. add_reader, remove_reader: the loop's.
    """

    def __init__(
        self, endpoint: str, replay: str | None, topic: str, add_reader: Callable[..., Any], remove_reader: Callable[[int], Any]
    ) -> None:
        try:
            import zmq  # an extra
        except ImportError:
            raise ValueError("KV events need the package pyzmq: pip install -e '.[events]'") from None
        self._zmq: Any = zmq
        self._context: Any = zmq.Context()
        self._topic, self._number = topic.encode(), 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT)
        self._remove_reader, self._replay = remove_reader, None
        self._socket = self._open(zmq.PUB, endpoint)
        if replay is not None:
            self._replay = self._open(zmq.ROUTER, replay)
            add_reader(self._replay.getsockopt(zmq.FD), self._answer)

    def _open(self, kind: int, endpoint: str) -> Any:
        socket = self._context.socket(kind)
        socket.set_hwm(MARK)
        socket.linger = 0
        bound = kind == self._zmq.ROUTER or "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc:", "inproc:"))
        try:
            (socket.bind if bound else socket.connect)(endpoint)
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(
                f"KV events: {endpoint}: {error}: write tcp://*:5557 (bound) or tcp://host:5557 (connected)"
            ) from None
        return socket

    def publish(self, time: float, events: list[dict[str, Any]], rank: int) -> None:
        payload = msgspec.msgpack.encode([time, events, rank])
        number = self._number.to_bytes(8, "big")
        self._number += 1
        self._kept.append((number, payload))
        try:
            self._socket.send_multipart((self._topic, number, payload), self._zmq.NOBLOCK)
        except self._zmq.Again:  # nobody is connected to take it: it can be replayed
            pass

    def _answer(self) -> None:
        """The loop's: something happened at the replay socket. Its descriptor tells of changes only, so everything is read."""
        while self._replay is not None:
            try:
                asked = self._replay.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            if len(asked) != 3:
                continue
            client, _, start = asked
            frames = [(self._topic, number, payload) for number, payload in self._kept if number >= start]
            for frame in [*frames, (b"", END, b"")]:
                try:
                    self._replay.send_multipart((client, b"", *frame), self._zmq.NOBLOCK)
                except self._zmq.Again:  # it does not read: it may ask again
                    break

    def close(self) -> None:
        if self._replay is not None:
            self._remove_reader(self._replay.getsockopt(self._zmq.FD))
            self._replay.close(0)
            self._replay = None
        self._context.destroy(linger=0)
