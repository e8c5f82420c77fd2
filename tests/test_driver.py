"""The driver in virtual time against a scripted target: schedule, continuous refill, gate, sessions, accounting."""

import asyncio
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from kvbench.clock import Clock, VirtualLoop
from kvbench.control.gate import Gate
from kvbench.core import CacheAccess, Event, Limits, Message, Record, Request, Seconds
from kvbench.driver import Driver
from kvbench.source import Source


class Scripted:
    """A target whose k-th request takes `service(k)` seconds; knows how many it held at once."""

    def __init__(self, clock: Clock, service: Callable[[int], float]) -> None:
        self.clock, self.service = clock, service
        self.inflight = self.most = 0
        self.sent: list[float] = []

    async def open(self) -> dict[str, Any]:
        return {}

    def encode(self, request: Request) -> bytes:
        return b"x"

    def gauges(self, now: Seconds) -> dict[str, float]:
        return {}

    def nodes(self, now: Seconds) -> list[dict[str, float]]:
        return []

    def events(self) -> list[Event]:
        return []

    def accesses(self) -> list[CacheAccess] | None:
        return None

    async def aclose(self) -> None: ...

    async def send(self, request: Request, record: Record) -> None:
        record.sent_ns = self.clock.ns()
        self.inflight += 1
        self.most = max(self.most, self.inflight)
        self.sent.append(self.clock.now())
        try:
            await self.clock.sleep_until(self.clock.now() + self.service(request.id))
            record.outcome, record.text, record.n_out = "ok", f"reply {request.id}", 3
        except asyncio.CancelledError:
            record.outcome = "cancelled"
            raise
        finally:
            self.inflight -= 1
            record.done_ns = record.end_ns = self.clock.ns()


class Plain:
    """Numbered requests; with `turns` above 1 every request opens a session whose history grows by the reply."""

    def __init__(self, turns: int = 1, think: float = 0.0) -> None:
        self.ids = itertools.count()
        self.turns, self.think = turns, think

    def next(self, at: Seconds) -> Request:
        number = next(self.ids)
        return Request(id=number, tokens=5, max_tokens=3, session=number if self.turns > 1 else None)

    def follow(self, request: Request, record: Record) -> tuple[Seconds, Request] | None:
        if request.turn + 1 >= self.turns:
            return None
        said = Message(role="assistant", text=record.text)
        turn = Request(
            id=next(self.ids),
            tokens=5,
            max_tokens=3,
            session=request.session,
            turn=request.turn + 1,
            messages=(*request.messages, said),
        )
        return self.think, turn


class Every:
    """Deterministic arrivals every `gap` seconds, `count` of them."""

    def __init__(self, gap: float, count: float = math.inf) -> None:
        self.gap, self.count, self.k = gap, count, 0

    @property
    def due(self) -> Seconds:
        return self.k * self.gap if self.k < self.count else math.inf

    def ahead(self, k: int) -> Seconds:
        return (self.k + k) * self.gap if self.k + k < self.count else math.inf

    def pop(self) -> Seconds:
        self.k += 1
        return (self.k - 1) * self.gap


class Crowd:
    def __init__(self, users: int, think: float = 0.0) -> None:
        self.concurrency, self.think = users, think

    def pause(self, rng: Any) -> Seconds:
        return self.think


def drive(
    *,
    service: Callable[[int], float],
    schedule: Any = None,
    users: Any = None,
    limits: Limits | None = None,
    content: Any = None,
    end: float = math.inf,
    requests: float = math.inf,
    until: float | None = None,
) -> tuple[list[Record], Scripted, Driver]:
    """Drive one phase to its end (or to `until`, then cancel) and return the filed records in order of id."""
    filed: list[Record] = []

    async def work() -> tuple[Scripted, Driver]:
        clock = Clock(asyncio.get_running_loop())
        target = Scripted(clock, service)
        driver = Driver(clock, target, Gate(limits or Limits()), filed.extend)
        driver.begin("steady", Source(content or Plain(), schedule, users), end, requests)
        if until is None:
            await driver.through.wait()
        else:
            await clock.sleep_until(until)
        driver.check()
        driver.end()
        driver.check()
        driver.cancel()
        await driver.settle()
        driver.check()
        driver.close()
        if driver.failure.done():
            driver.failure.result()
        return target, driver

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        target, driver = runner.run(work())
    return sorted(filed, key=lambda record: record.id), target, driver


def test_an_open_loop_does_not_wait_for_answers() -> None:
    records, target, _ = drive(service=lambda k: 1.0, schedule=Every(0.1, 20))
    assert target.sent == pytest.approx([0.1 * k for k in range(20)])
    assert target.most == 10
    assert [r.due_ns for r in records] == [round(0.1 * k * 1e9) for k in range(20)]


def test_b06_a_freed_place_is_refilled_at_once() -> None:
    """Case B06: concurrency 4, service times cycling 0.1, 0.1, 0.1, 1.0 s, 40 requests: no barrier."""
    records, target, _ = drive(service=lambda k: (0.1, 0.1, 0.1, 1.0)[k % 4], users=Crowd(4), requests=40)
    assert len(records) == 40
    assert target.most == 4
    assert max(r.end_ns or 0 for r in records) / 1e9 <= 4.2  # 13 s of work on 4 places; waves would take 10
    starts = sorted(r.sent_ns or 0 for r in records)[4:]
    ends = sorted(r.end_ns or 0 for r in records)[:36]
    assert starts == ends, "every start is the instant of an end"


@pytest.mark.parametrize("n", [1, 2, 3, 250])
def test_closed_loop_holds_exactly_n_in_flight(n: int) -> None:
    _, target, _ = drive(service=lambda k: 0.5 + 0.01 * (k % 7), users=Crowd(n), end=5.0, until=5.0)
    assert target.most == n


def test_think_time_separates_an_answer_from_the_next_question() -> None:
    records, _, _ = drive(service=lambda k: 1.0, users=Crowd(1, think=0.5), requests=4)
    assert [r.due_ns / 1e9 for r in records] == pytest.approx([0.0, 1.5, 3.0, 4.5])


def test_a_count_bound_is_exact_and_waits_for_the_answers() -> None:
    records, _, driver = drive(service=lambda k: 2.0, schedule=Every(0.1), requests=7)
    assert driver.offered == 7
    assert [r.outcome for r in records] == ["ok"] * 7


def test_what_is_due_at_the_end_belongs_to_no_one() -> None:
    _, _, driver = drive(service=lambda k: 0.01, schedule=Every(0.1), end=1.0, until=3.0)
    assert driver.offered == 10


def test_in_flight_at_the_end_is_cancelled_and_counted() -> None:
    """Case F02's population: 4 users, 8 s each, stopped at 10 s: 4 done, 4 cancelled."""
    records, _, driver = drive(service=lambda k: 8.0, users=Crowd(4), end=10.0, until=10.0)
    assert sorted(r.outcome for r in records) == ["cancelled"] * 4 + ["ok"] * 4
    assert driver.offered == 8


def test_c01_open_loop_behind_a_cap_keeps_both_views() -> None:
    """Case C01: 40 at 40/s, cap 4, service 190 ms."""
    records, _, _ = drive(service=lambda k: 0.19, schedule=Every(1 / 40, 40), limits=Limits(inflight=4))
    from_due = [((r.done_ns or 0) - r.due_ns) / 1e9 for r in records]
    from_send = [((r.done_ns or 0) - (r.sent_ns or 0)) / 1e9 for r in records]
    waits = [((r.release_ns or 0) - r.due_ns) / 1e9 for r in records]
    assert from_send == pytest.approx([0.19] * 40)
    assert waits == pytest.approx([0.09 * (k // 4) for k in range(40)], abs=1e-6)
    assert sum(waits) / 40 == pytest.approx(0.405, abs=1e-6)
    assert from_due[-1] == pytest.approx(1.0, abs=1e-6)


def test_b10_what_a_phase_did_not_send_is_withdrawn_with_it() -> None:
    """Case B10: 100/s for 5 s behind a cap of 10 and a 1 s service: 500 scheduled, 50 sent, 450 counted, none carried over."""
    records, _, driver = drive(service=lambda k: 1.0, schedule=Every(0.01, 500), limits=Limits(inflight=10), end=5.0, until=4.995)
    outcomes = [r.outcome for r in records]
    assert driver.offered == 500
    assert outcomes.count("withdrawn") == 450
    assert outcomes.count("ok") + outcomes.count("cancelled") == 50


def test_patience_sheds_and_says_when() -> None:
    records, _, _ = drive(service=lambda k: 10.0, schedule=Every(0.5, 3), limits=Limits(inflight=1, patience=1.0))
    assert [(r.outcome, (r.end_ns or 0) / 1e9) for r in records] == [("ok", 10.0), ("shed", 1.5), ("shed", 2.0)]


def test_a_session_goes_on_with_the_real_reply() -> None:
    content = Plain(turns=3, think=0.25)
    records, _, _ = drive(service=lambda k: 1.0, schedule=Every(10.0, 2), content=content)
    assert [(r.session, r.turn) for r in sorted(records, key=lambda r: r.due_ns)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (3, 0),
        (3, 1),
        (3, 2),
    ]
    assert [r.due_ns / 1e9 for r in records if r.session == 0] == pytest.approx([0.0, 1.25, 2.5])
    assert all(r.text is None for r in records), "replies are not kept"


def test_an_error_of_ours_fails_the_run_instead_of_hanging_it() -> None:
    def broken(k: int) -> float:
        raise ZeroDivisionError(k)

    with pytest.raises(ZeroDivisionError):  # a target must not raise; one that does is our defect and must surface
        drive(service=broken, schedule=Every(0.1, 1), until=1.0)
