"""What the live history costs: bounds with room for a slow machine, in CPU time. Run with `-s` to see the figures."""

import time
from collections.abc import Callable

import pytest

from kvbench.core import Record
from kvbench.metrics.slots import Slots
from kvbench.metrics.window import window
from kvbench.stop import Rule

S = 1_000_000_000
MS = 1_000_000
pytestmark = pytest.mark.alone


def records(count: int, tokens: int) -> list[Record]:
    """One a millisecond, a token each 20 ms, with usage."""
    out = []
    for k in range(count):
        due = k * MS
        times = [due + 50 * MS + j * 20 * MS + k * 7919 % MS for j in range(tokens)]
        end = times[-1] if times else due + MS
        first = times[0] if times else None
        out.append(
            Record(
                id=k, outcome="ok", source="usage", due_ns=due, release_ns=due, sent_ns=due + 9000, written_ns=due + 20000,
                first_ns=first, content_ns=first, done_ns=end, end_ns=end, n_in=100, n_out=tokens, cached=0, token_ns=times,
            )
        )  # fmt: skip
    return out


def best(work: Callable[[], None], tries: int = 5) -> float:
    spent = []
    for _ in range(tries):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return min(spent)


def fold_seconds(batch: list[Record]) -> float:
    slots = Slots(60)
    slots.fold(batch[:256])  # touches the memory once

    def work() -> None:
        for k in range(0, len(batch), 256):
            slots.fold(batch[k : k + 256])

    return best(work) / len(batch)


def test_a_fold_costs_microseconds_a_request_and_tens_of_nanoseconds_a_token() -> None:
    bare, long = fold_seconds(records(5120, 0)), fold_seconds(records(2560, 128))
    token = (long - bare) / 128
    print(f"fold: {bare * 1e6:.2f} us a request, {token * 1e9:.0f} ns a token event")
    assert bare < 12e-6
    assert token < 240e-9


def test_a_window_and_its_rules_cost_little_beside_their_second() -> None:
    slots = Slots(slos={"default": {"ttft": 0.1}})
    slots.fold(records(20_000, 8))
    for second in range(20):
        slots.gauge("kv_usage", second + 0.5, 0.5)
    slots.close(20)
    live = [Record(id=k, due_ns=19 * S, release_ns=19 * S, sent_ns=19 * S) for k in range(500)]
    texts = ({"kv_usage": ">= 90%"}, {"success_rate": "< 99.9%", "over": "10m"}, {"response_ttft_p99": "> 10s", "over": "1m"})
    guards = [Rule.model_validate(text).arm() for text in texts]

    def check() -> None:
        assert not any(guard.check(slots, 20.0, live) for guard in guards)

    def read() -> None:
        assert window(slots, 10, 20, live, 20.0).counts["ok"] > 0

    one, rules = best(read), best(check)
    print(f"window: {one * 1e3:.2f} ms with 500 in flight; three rules: {rules * 1e3:.2f} ms")
    assert one < 8e-3
    assert rules < 8e-3
