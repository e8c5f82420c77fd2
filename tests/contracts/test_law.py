"""The contract of control laws, held against every one of LAWS: on any windows, fresh, stale or odd."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.control.follow import Follower
from kvbench.control.law import SIGNALS
from kvbench.control.laws import LAWS
from kvbench.core import Window

EVERY = sorted(LAWS)
ACTIVE = [name for name in EVERY if name not in ("none", "bucket")]  # those that decide anything during a run
FOLLOWERS = [name for name in EVERY if issubclass(LAWS[name], Follower)]
GAUGES = ("kv_usage", "waiting", "running", "gpu_memory")


def spec(name: str, **more: Any) -> Any:
    cls: Any = LAWS[name]
    return cls.model_validate({**cls.example, **more}, context={"text": True})


def window(end: float, values: dict[str, float | None] | None = None, age: float = 0.0, **counts: int) -> Window:
    """The five seconds before `end`."""
    known = {"kv_usage_last": 0.5, "waiting_last": 1.0, "running_last": 10.0, "ttft_p50": 0.2, "admitted_rate": 4.0}
    base = {"admitted": 20, "offered": 25, "sent": 20, "ok": 18, "held": 2, "inflight": 10}
    return Window(
        start=end - 5, end=end, counts=base | counts, values=known | (values or {}), age=dict.fromkeys(GAUGES, age)
    )  # fmt: skip


odd = st.one_of(st.none(), st.floats(0, 1e9), st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 1.0, 1e300]))
usual = st.floats(0, 1)
windows = st.lists(
    st.fixed_dictionaries(
        {
            "values": st.fixed_dictionaries(
                {
                    "kv_usage_last": st.one_of(usual, odd), "waiting_last": st.one_of(st.floats(0, 500), odd),
                    "running_last": odd, "ttft_p50": odd, "gpu_memory_last": odd, "admitted_rate": odd, "offered_rate": odd,
                }
            ),
            "age": st.sampled_from([0.0, 1.0, 2.9, 3.1, 60.0, math.inf]),
            "held": st.integers(0, 1000), "shed": st.integers(0, 1000), "ok": st.integers(0, 1000),
            "inflight": st.integers(0, 1000),
        }
    ),
    max_size=40,
)  # fmt: skip


def play(law: Any, seen: list[dict[str, Any]]) -> list[Any]:
    return [law.update(window(float(at + 5), **one)) for at, one in enumerate(seen)]


@pytest.mark.parametrize("name", EVERY)
def test_every_setting_is_described_and_the_first_line_says_what_it_does(name: str) -> None:
    cls = LAWS[name]
    assert cls.__doc__
    assert cls.__doc__.splitlines()[0].endswith(".")
    assert [field for field, info in cls.model_fields.items() if not info.description] == []


@pytest.mark.parametrize("name", ACTIVE)
@settings(max_examples=40, deadline=None)
@given(seen=windows, offered=st.one_of(st.none(), st.floats(0.01, 1e4)))
def test_limits_are_sound_on_any_window(name: str, seen: list[dict[str, Any]], offered: float | None) -> None:
    """A rate is a number from 0 up; patience and the cap stay what the scenario says; the state can be written down."""
    asked = spec(name, patience="7s", inflight=64, retry_after="3s")
    law = asked.arm(offered)
    for limits in [asked.limits(), *play(law, seen)]:
        assert limits.rate >= 0  # and no NaN
        assert limits.burst >= 1
        assert (limits.patience, limits.retry_after) == (7.0, 3.0)
        assert 1 <= limits.inflight <= 64
    assert all(math.isfinite(value) for value in law.state().values())
    assert law.told()["updates"] == len(seen)
    json.dumps(law.told(), allow_nan=False)


@pytest.mark.parametrize("name", FOLLOWERS)
@settings(max_examples=40, deadline=None)
@given(seen=windows, offered=st.one_of(st.none(), st.floats(0.01, 1e4)))
def test_the_rate_stays_within_its_bounds(name: str, seen: list[dict[str, Any]], offered: float | None) -> None:
    """Below the least rate only where the KV cache is nearly full: the gate is then shut, or nearly."""
    law = spec(name, min="0.5/s", max="20/s").arm(offered)
    for limits in (law.update(window(float(at + 5), **one)) for at, one in enumerate(seen)):
        assert limits.rate <= 20
        assert limits.rate >= 0.5 or law.ceiling.share < 1


@pytest.mark.parametrize("name", ACTIVE)
@pytest.mark.parametrize("how", ["old", "missing", "not a number"])
def test_a_law_holds_still_on_stale_and_missing_signals(name: str, how: str) -> None:
    law = spec(name).arm(5.0)
    for at in range(10):
        before = law.update(window(5.0 + at, {"kv_usage_last": 0.3 + 0.02 * at, "waiting_last": float(at)}))
    names = ("kv_usage_last", "waiting_last", "running_last", "ttft_p50", "gpu_memory_last")
    gone: Any = {"old": {}, "missing": dict.fromkeys(names), "not a number": dict.fromkeys(names, math.nan)}[how]
    if how == "old":
        gone = {"kv_usage_last": 0.99, "waiting_last": 400.0}
    for at in range(20):
        assert law.update(window(15.0 + at, gone, age=3.5 if how == "old" else 0.0)) == before
    assert law.told().get("stale", 20) == 20


@pytest.mark.parametrize("name", ACTIVE)
def test_the_same_windows_give_the_same_limits(name: str) -> None:
    seen = [{"values": {"kv_usage_last": 0.02 * at, "waiting_last": float(at % 7)}} for at in range(45)]
    assert play(spec(name).arm(5.0), seen) == play(spec(name).arm(5.0), seen)


@pytest.mark.parametrize("name", ACTIVE)
def test_what_contains_our_own_gate_is_never_read(name: str) -> None:
    """Response latency and gate wait change nothing: a law that saw them would close a loop through itself."""
    slow = {f"{metric}_{way}": 100.0 for metric in ("response_ttft", "response", "gate_wait") for way in ("p50", "p99", "max")}
    seen = [{"kv_usage_last": 0.02 * at, "waiting_last": float(at % 7)} for at in range(45)]
    quick = play(spec(name).arm(5.0), [{"values": one} for one in seen])
    assert play(spec(name).arm(5.0), [{"values": one | slow} for one in seen]) == quick
    assert not any(signal.value.startswith(("response", "gate")) for signal in SIGNALS.values())


@pytest.mark.parametrize("name", [name for name in EVERY if "kv_limit" in LAWS[name].model_fields])
def test_a_full_cache_shuts_the_gate_of_every_law_that_follows_it(name: str) -> None:
    law = spec(name).arm(5.0)
    for at in range(5):
        law.update(window(5.0 + at))
    assert law.update(window(10.0, {"kv_usage_last": 0.95})).rate == 0
    assert law.update(window(11.0, {"kv_usage_last": 0.3})).rate > 0


@pytest.mark.parametrize("name", EVERY)
def test_the_limits_before_a_law_is_asked_are_the_scenarios(name: str) -> None:
    asked = spec(name, patience="7s", inflight=64, retry_after="3s")
    assert (asked.limits().patience, asked.limits().inflight, asked.limits().retry_after) == (7.0, 64, 3.0)
    assert (asked.arm(5.0) is None) == (name not in ACTIVE)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("key", "text"), [("every", "1500ms"), ("every", "2m"), ("over", "500ms"), ("over", "11m")])
def test_periods_are_whole_seconds(name: str, key: str, text: str) -> None:
    with pytest.raises(ValueError, match="whole seconds"):
        spec(name, **{key: text})
