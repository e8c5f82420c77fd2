"""The gate against hand-computed instants, and its accounting under random use."""

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvbench.control.gate import Gate
from kvbench.core import Limits


def run_gate(limits: Limits, arrivals: list[float], service: float) -> tuple[dict[int, float], dict[int, float]]:
    """Play arrivals of a fixed service time through a gate, in event order; (release instants, shed instants) by arrival."""
    gate = Gate(limits)
    released: dict[int, float] = {}
    shed: dict[int, float] = {}
    ends: list[float] = []
    pending = list(enumerate(arrivals))
    while True:
        now = min([pending[0][1] if pending else math.inf, min(ends, default=math.inf), gate.wake(0.0)])
        if math.isinf(now):
            assert len(gate) == 0
            return released, shed
        if ends and min(ends) <= now:
            ends.remove(min(ends))
            gate.leave(now)
        out, gone = gate.pump(now)
        for item, at in out:
            released[item] = at
            ends.append(at + service)
        shed.update(dict(gone))
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


def test_rate_zero_waits_for_ever_and_patience_still_ends() -> None:
    gate = Gate(Limits(rate=0.0, burst=1.0, patience=2.0))
    assert gate.enter("a", 0.0)
    assert not gate.enter("b", 0.0)
    assert gate.wake(0.0) == 2.0
    assert gate.pump(2.0) == ([], [("b", 2.0)])


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
