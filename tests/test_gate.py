"""The gate against hand-computed instants, and its accounting under random use."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.control.gate import SLACK, Gate
from kvbench.core import Limits

Change = tuple[float, Callable[[Gate, float], None]]


def limits_at(at: float, limits: Limits) -> Change:
    return at, lambda gate, now: gate.relimit(limits, now)


def hold_at(at: float, seconds: float) -> Change:
    return at, lambda gate, now: gate.hold(seconds, now)


def run_gate(
    limits: Limits, arrivals: Sequence[float], service: float, changes: Sequence[Change] = ()
) -> tuple[dict[int, float], dict[int, float]]:
    """Play arrivals of a fixed service time through a gate, in event order; (release instants, shed instants) by arrival."""
    gate = Gate(limits)
    released: dict[int, float] = {}
    shed: dict[int, float] = {}
    ends: list[float] = []
    pending = list(enumerate(arrivals))
    coming = sorted(changes, key=lambda change: change[0])
    while True:
        nexts = [pending[0][1] if pending else math.inf, coming[0][0] if coming else math.inf, min(ends, default=math.inf)]
        now = min([*nexts, gate.wake(0.0)])
        if math.isinf(now):
            assert len(gate) == 0
            assert gate.postponed == 0, "nobody was late"
            return released, shed
        if ends and min(ends) <= now:
            ends.remove(min(ends))
            gate.leave(now)
        for passing in (False, True):  # what the old limits allow goes before the new ones hold
            out, gone = gate.pump(now)
            for item, at in out:
                released[item] = at
                ends.append(at + service)
            shed.update(dict(gone))
            while not passing and coming and coming[0][0] <= now:
                coming.pop(0)[1](gate, now)
        while pending and pending[0][1] <= now:
            item, at = pending.pop(0)
            if gate.enter(item, at):
                released[item] = at
                ends.append(at + service)


def test_an_open_gate_lets_everything_pass() -> None:
    released, shed = run_gate(Limits(), [0.1 * k for k in range(20)], 5.0)
    assert released == {k: 0.1 * k for k in range(20)}
    assert shed == {}


def test_bucket_releases_at_the_instant_of_each_token() -> None:
    # 2 tokens at the start, then one each 0.5 s: five at once leave at 0, 0, 0.5, 1.0, 1.5
    released, _ = run_gate(Limits(rate=2.0, burst=2.0), [0.0] * 5, 0.01)
    assert [released[k] for k in range(5)] == [0.0, 0.0, 0.5, 1.0, 1.5]


def test_c01_waiting_at_the_cap_is_exact() -> None:
    """Case C01's arithmetic: 40 at 40/s, cap 4, service 190 ms: request k waits 0.09 * floor(k / 4) s."""
    released, _ = run_gate(Limits(inflight=4), [k / 40 for k in range(40)], 0.190)
    waits = [released[k] - k / 40 for k in range(40)]
    assert all(abs(wait - 0.09 * (k // 4)) < 1e-9 for k, wait in enumerate(waits))
    assert abs(sum(waits) / 40 - 0.405) < 1e-9


def test_patience_sheds_in_order_at_its_own_instant() -> None:
    released, shed = run_gate(Limits(inflight=1, patience=1.0), [0.0, 0.1, 0.2, 5.0], 3.0)
    assert released == {0: 0.0, 3: 5.0}
    assert shed == {1: 1.1, 2: 1.2}


def test_a_rate_change_rescales_the_remaining_gap() -> None:
    gate = Gate(Limits(rate=1.0, burst=1.0))
    assert gate.enter("a", 0.0)
    assert not gate.enter("b", 0.0)
    assert gate.wake(0.0) == 1.0
    gate.relimit(Limits(rate=2.0, burst=1.0), 0.5)  # half a token earned; the other half takes 0.25 s now
    assert gate.wake(0.5) == 0.75
    assert gate.pump(0.75)[0] == [("b", 0.75)]


def test_rate_zero_is_shut_whatever_was_saved_and_patience_still_ends() -> None:
    gate = Gate(Limits(rate=0.0, burst=1.0, patience=2.0))
    assert not gate.enter("a", 0.0)
    assert gate.wake(0.0) == 2.0
    assert gate.pump(2.0) == ([], [("a", 2.0)])
    assert not gate.enter("b", 3.0)
    gate.relimit(Limits(rate=1.0, burst=1.0, patience=2.0), 4.0)
    assert gate.pump(4.0) == ([("b", 4.0)], [])  # the token saved before, when the gate opens


@given(
    st.lists(st.floats(0, 20), min_size=1, max_size=60),
    st.sampled_from([0.5, 3.0, math.inf]),
    st.integers(1, 5),
    st.sampled_from([1, 3, math.inf]),
    st.sampled_from([0.0, 0.7, math.inf]),
    st.floats(0.01, 3),
)
def test_what_comes_leaves_once_and_limits_hold(
    arrivals: list[float], rate: float, burst: int, cap: float, patience: float, service: float
) -> None:
    arrivals = sorted(arrivals)
    released, shed = run_gate(Limits(rate=rate, burst=burst, inflight=cap, patience=patience), arrivals, service)
    assert sorted([*released, *shed]) == list(range(len(arrivals)))
    assert all(arrivals[k] <= at <= arrivals[k] + patience + 1e-9 for k, at in released.items())
    order = [released[k] for k in sorted(released)]
    assert all(a <= b + 1e-12 for a, b in pairwise(order)), "first come, first served"
    times = sorted(released.values())
    if math.isfinite(cap):
        for at in times:
            assert sum(1 for t in times if t <= at < t + service - 1e-9) <= cap
    if math.isfinite(rate):
        for i, start in enumerate(times):  # in any span the bucket passes at most burst + rate x span
            for j in range(i, len(times)):
                assert j - i + 1 <= burst + rate * (times[j] - start) + 1 + 1e-6


TICK = 1 / 1024


def ticked(
    limits: Limits, arrivals: list[int], service: int, changes: dict[int, Limits], holds: dict[int, int], until: int
) -> dict[int, float]:
    """The same by brute force: every tick adds its share of a token. All times in ticks; release instants in seconds."""
    tokens, inflight, closed = limits.burst, 0, 0
    queue: deque[int] = deque()
    ends: deque[int] = deque()
    released: dict[int, float] = {}
    pending = deque(enumerate(arrivals))

    def release(tick: int) -> None:
        nonlocal tokens, inflight
        tokens, inflight = tokens - 1, inflight + 1
        released[queue.popleft()] = tick * TICK
        ends.append(tick + service)

    for tick in range(until):
        if tick:
            tokens += limits.rate * TICK
            if queue and limits.rate and tokens > 1 + 1e-9 and inflight < limits.inflight and tick > closed:
                release(
                    tick
                )  # its token was whole between two ticks: what came since is kept, and this tick's change is too late
            tokens = min(limits.burst, tokens)
        while ends and ends[0] <= tick:
            ends.popleft()
            inflight -= 1
        if tick in changes:
            limits = changes[tick]
            tokens = min(limits.burst, tokens)
        if tick in holds:
            closed = max(closed, tick + holds[tick])
        while pending and pending[0][1] <= tick:
            queue.append(pending.popleft()[0])
        while queue and limits.rate and tokens > 1 - 1e-9 and inflight < limits.inflight and tick >= closed:
            release(tick)
    return released


LIMITS = st.builds(
    lambda rate, burst, inflight: Limits(rate=rate, burst=burst, inflight=inflight, retry_after=3.0),
    st.sampled_from([0.0, 0.3, 1.0, 2.5, 10.0, 40.0]),
    st.sampled_from([1.0, 2.0, 4.5]),
    st.sampled_from([1.0, 3.0, math.inf]),
)


@settings(max_examples=100, deadline=None)
@given(
    LIMITS,
    st.lists(st.integers(0, 6000), min_size=1, max_size=25),
    st.integers(5, 2000),
    st.dictionaries(st.integers(1, 6000), LIMITS, max_size=5),
    st.dictionaries(st.integers(1, 6000), st.integers(1, 2500), max_size=2),
)
def test_changes_of_limits_and_holds_agree_with_a_tick_by_tick_simulation(
    limits: Limits, arrivals: list[int], service: int, changes: dict[int, Limits], holds: dict[int, int]
) -> None:
    """Rates, bursts and caps that change at any moment: release instants by arithmetic are those of a bucket that fills tick by
    tick, to a tick per request (a late release makes what waits for its place later)."""
    arrivals = sorted(arrivals)
    last = Limits(rate=50.0, burst=2.0, inflight=5, retry_after=3.0)  # so that everything is out in the end
    changes = {**changes, 7000: last}
    moves = [limits_at(tick * TICK, new) for tick, new in changes.items()]
    moves += [hold_at(tick * TICK, length * TICK) for tick, length in holds.items()]
    found, shed = run_gate(limits, [tick * TICK for tick in arrivals], service * TICK, moves)
    expected = ticked(limits, arrivals, service, changes, holds, 7000 + 2500 + 25 * service)
    assert shed == {}
    assert found.keys() == expected.keys()
    for item, at in expected.items():
        assert abs(found[item] - at) <= (item + 2) * TICK, f"request {item}: {found[item]:.6f}, tick by tick {at:.6f}"


def test_a_rate_that_changes_twice_within_a_gap_rescales_what_remains_each_time() -> None:
    """1/s from 0: a quarter of a token by 0.25; 3/s then, another 0.6 by 0.45; 0.5/s from there: 0.15 left take 0.3 s."""
    moves = [limits_at(0.25, Limits(rate=3.0)), limits_at(0.45, Limits(rate=0.5))]
    released, _ = run_gate(Limits(rate=1.0), [0.0, 0.0], 0.01, moves)
    assert released[1] == pytest.approx(0.75)


def test_a_larger_cap_lets_in_when_it_was_set_and_not_before() -> None:
    """Cap 1 from 0, 3 from 2.0: those that came at 0.1 and 0.2 leave at 2.0. A wait at our own gate, not our own lateness."""
    released, _ = run_gate(Limits(inflight=1), [0.0, 0.1, 0.2], 10.0, [limits_at(2.0, Limits(inflight=3))])
    assert released == {0: 0.0, 1: 2.0, 2: 2.0}


def test_a_place_that_was_free_all_along_delays_no_token() -> None:
    """Cap 5 with one in flight, which leaves at 1.2. The token of 1.0 is noticed at 1.21: it was there at 1.0."""
    gate = Gate(Limits(rate=1.0, inflight=5))
    assert gate.enter("a", 0.0)
    assert not gate.enter("b", 0.5)
    gate.leave(1.005)
    assert gate.pump(1.01)[0] == [("b", 1.0)]


def test_without_a_rate_an_earlier_request_is_not_held_for_a_later_one() -> None:
    """Ends of answers are looked at in any order; where nothing limits, none of them waits."""
    gate = Gate(Limits())
    assert gate.enter("late", 2.0)
    gate.relimit(Limits(patience=9.0), 2.5)
    assert gate.enter("early", 1.5)
    assert gate.blocked == 0


def test_a_limit_on_an_open_gate_starts_with_a_full_bucket() -> None:
    """Bumpless: the first request after the change enters at once, the next a gap later."""
    released, _ = run_gate(Limits(), [0.0, 1.0, 1.0, 1.0], 0.01, [limits_at(0.5, Limits(rate=4.0))])
    assert released == {0: 0.0, 1: 1.0, 2: 1.25, 3: 1.5}


def test_a_bucket_shallower_than_a_request_still_fills_while_its_limits_change() -> None:
    """0.5/s with a burst of 0.2, told anew every 100 ms with a rate that differs a little: a request each 2 s, not none."""
    moves = [limits_at(k / 10, Limits(rate=0.5 + 1e-9 * (k % 2), burst=0.2)) for k in range(1, 100)]
    released, _ = run_gate(Limits(rate=0.5, burst=0.2), [0.0, 0.0, 0.0], 0.01, moves)
    assert [released[k] for k in range(3)] == pytest.approx([0.0, 2.0, 4.0])


def test_a_hold_releases_nothing_before_its_end_and_patience_goes_on() -> None:
    """429 at 1.0 asks for 2 s. Those that came meanwhile leave at 3.0; the one whose patience ends at 2.9 is shed then."""
    arrivals = [0.0, 0.9, 1.2, 2.5, 3.5]
    released, shed = run_gate(Limits(patience=1.7, retry_after=60.0), arrivals, 0.01, [hold_at(1.0, 2.0)])
    assert released == {0: 0.0, 1: 0.9, 3: 3.0, 4: 3.5}
    assert shed == {2: 2.9}


def test_a_hold_is_as_long_as_was_granted_and_holds_overlap() -> None:
    gate = Gate(Limits(retry_after=5.0))
    assert gate.wake(0.0) == math.inf
    gate.hold(600.0, 1.0)  # an hour may be asked; 5 s are granted
    gate.hold(2.0, 1.5)  # within it
    gate.hold(4.0, 3.0)  # a second longer
    assert not gate.enter("a", 3.0)
    assert gate.wake(3.0) == 7.0
    assert gate.pump(6.999) == ([], [])
    assert gate.pump(7.0)[0] == [("a", 7.0)]
    gate.hold(1.0, 10.0)
    assert gate.told() == {"blocked": 1, "postponed": 0, "holds": 2, "closed": 7.0}
    assert Gate(Limits()).told()["holds"] == 0


def test_retry_after_is_not_heeded_unless_asked() -> None:
    gate = Gate(Limits())
    gate.hold(30.0, 1.0)
    assert gate.enter("a", 1.0)
    assert gate.holds == 0


def test_a_bucket_that_was_closed_is_full_and_no_more() -> None:
    """10/s, burst 3, closed from 1 to 9: three of the six that wait leave at 9.0, the others 100 ms apart."""
    released, _ = run_gate(Limits(rate=10.0, burst=3.0, retry_after=60.0), [0.0, *[5.0] * 6], 0.01, [hold_at(1.0, 8.0)])
    assert [released[k] for k in range(1, 7)] == pytest.approx([9.0, 9.0, 9.0, 9.1, 9.2, 9.3])


@pytest.mark.parametrize("queued", [True, False], ids=["waiting", "falling due"])
def test_b11_after_a_stall_of_ours_a_bucket_lets_out_its_burst_and_counts_the_rest(queued: bool) -> None:
    """50/s, burst 4, nobody looks from 0 to 0.5 s and 25 requests fall due meanwhile. At once leave burst + 50 x SLACK = 5 of
    them, and not 25 (which would be the rate of a second in an instant); the rest leave at 50/s from there, and are counted."""
    gate = Gate(Limits(rate=50.0, burst=4.0))
    for k in range(4):
        assert gate.enter(k, 0.0)  # the bucket is empty
    dues = [0.02 * (k + 1) for k in range(25)]
    at_once = 0
    if queued:
        assert not any(gate.enter(due, 0.0) for due in dues)
    else:
        gate.settle(0.5)
        at_once = sum(gate.enter(due, due) for due in dues)
    released, _ = gate.pump(0.5)
    at_once += len(released)
    assert at_once == 4 + 50 * SLACK
    assert gate.postponed >= 20
    rest = []
    while len(gate):
        rest += gate.pump(gate.wake(0.5))[0]
    assert [at for _, at in rest] == pytest.approx([0.5 + 0.02 * (k + 1) for k in range(20)])
    assert [item for item, _ in [*released, *rest]] == dues[-len(released) - 20 :], "first come, first served"


def test_b11_an_idle_bucket_is_full_and_owes_nothing() -> None:
    gate = Gate(Limits(rate=50.0, burst=4.0))
    for now in (0.0, 3.0, 3.1, 9.0):
        gate.settle(now)
        assert all(gate.enter(k, now) for k in range(4))
        assert not gate.enter("fifth", now)
        assert [item for item, _ in gate.pump(now + 0.02)[0]] == ["fifth"]
    assert (gate.postponed, gate.blocked) == (0, 4)


def test_b08_places_freed_together_are_refilled_at_the_rate() -> None:
    """50/s behind a cap of 16 that frees 16 places a second: one leaves at once, the others 20 ms apart: six in any 100 ms."""
    gate = Gate(Limits(rate=50.0, burst=1.0, inflight=16))
    released: list[float] = []
    arrivals = deque(k / 50 for k in range(200))
    now = 0.0
    while now < 4.0:
        now = min(arrivals[0] if arrivals else math.inf, gate.wake(now), math.floor(now) + 1.0)
        if now == math.floor(now) and now > 0:
            for _ in range(gate.inflight):
                gate.leave(now)
        released += [at for _, at in gate.pump(now)[0]]
        if arrivals and arrivals[0] <= now:
            due = arrivals.popleft()
            if gate.enter(due, due):
                released.append(due)
    assert len(released) == 16 * 4 + 1  # the first at 0.0 of every second's sixteen, and the one at 4.0
    assert max(sum(start <= at < start + 0.1 for at in released) for start in released) <= 6
    assert gate.blocked == 200 - 16
