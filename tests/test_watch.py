"""The watch on windows made up here: what load explains is no anomaly, what it does not explain is, and what follows."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import stats

from kvbench.core import Window
from kvbench.level import Level
from kvbench.metrics import names
from kvbench.residuals import Residuals, Shares, _student, model
from kvbench.watch import Decision, Watch, WatchSpec

LENGTH = 10.0
Alter = Callable[[float, dict[str, float]], None]


def window(start: float, rate: float, values: dict[str, float | None], n: int = 100) -> Window:
    ended = {"ttft_p50": n, "tpot_p50": n, "error_rate": n, "success_rate": n, "ttft_p99": n}
    found = {"offered_rate": rate, **values}
    return Window(
        start=start, end=start + LENGTH, counts={"inflight": 7}, values=found, n={key: ended.get(key, 10) for key in found}
    )


def served(load: Callable[[float], float], seconds: float, seed: int = 0, alter: Alter | None = None) -> list[Window]:
    """Windows of a server that is loaded with `load(t)` requests/s: Poisson arrivals, KV usage that lags them by half a minute,
    latencies that bend up with usage, all with noise. `alter(t, values)` makes it ill."""
    rng, usage, found = np.random.default_rng(seed), load(0.0) / 20, []
    for start in np.arange(0.0, seconds, LENGTH):
        rate = rng.poisson(LENGTH * load(start)) / LENGTH
        usage += (rate / 20 - usage) * (1 - math.exp(-LENGTH / 30))
        values: dict[str, float] = {
            "kv_usage_mean": usage * rng.lognormal(0, 0.08),
            "ttft_p50": 0.05 / (1 - usage) * rng.lognormal(0, 0.1),
            "tpot_p50": 0.02 * (1 + usage) * rng.lognormal(0, 0.03),
            "error_rate": float(rng.binomial(100, 0.005)) / 100,
        }
        if alter is not None:
            alter(float(start), values)
        found.append(window(float(start), rate, dict(values)))
    return found


def slow(since: float, factor: float = 4.0) -> Alter:
    def alter(t: float, values: dict[str, float]) -> None:
        if t >= since:
            values["ttft_p50"] *= factor
            values["tpot_p50"] *= factor

    return alter


def watching(windows: Iterable[Window], level: Level | None = None, **spec: Any) -> tuple[list[Decision], Watch]:
    watch = WatchSpec.model_validate(spec).arm()
    level = level or watch.level()
    level.moved = min(level.moved, -1.0)  # its phase began before the first window
    return [decision for each in windows for decision in watch.look(each, level, each.end)], watch


def actions(decisions: list[Decision], *kinds: str) -> list[tuple[str, float]]:
    return [(d.data["action"], d.data["end"]) for d in decisions if d.data["action"] in kinds]


def sine(t: float) -> float:
    return 8 + 7 * math.sin(2 * math.pi * t / 300)


def stair(t: float) -> float:
    return float(4 * 1.2 ** (t // 300))


def steady(t: float) -> float:
    return 8.0


# ---- what load explains


@pytest.mark.parametrize("load", [sine, steady], ids=["sine", "steady"])
def test_a_healthy_hour_raises_no_alarm(load: Callable[[float], float]) -> None:
    assert actions(watching(served(load, 3600))[0], "anomaly") == []


def test_a_sine_would_be_an_anomaly_if_load_were_no_reason() -> None:
    """The same values under a load that is told as constant: the crests are then out of line for nothing known."""
    windows = served(sine, 1800, 1, slow(900.0, 3.0))
    told, _ = watching(windows)
    blind, _ = watching(_flattened(windows))
    assert actions(told, "anomaly")[0][1] <= 930.0
    expected = [d.data["sigma"] / d.data["expected"] for d in told if d.data.get("metric") == "ttft_p50"]
    flat = [d.data["sigma"] / d.data["expected"] for d in blind if d.data.get("metric") == "ttft_p50"]
    assert max(expected) < 0.5 * max(flat, default=math.inf)


def _flattened(windows: list[Window]) -> list[Window]:
    flat: dict[str, float | None] = {"offered_rate": 8.0}
    return [Window(start=w.start, end=w.end, counts=w.counts, values=w.values | flat, n=w.n) for w in windows]


def test_a_stair_into_loads_never_seen_is_no_anomaly() -> None:
    for seed in range(3):
        decisions, _ = watching(served(stair, 2100, seed))  # up to 11.9/s: usage 0.6
        assert actions(decisions, "anomaly") == []


def test_a_fault_on_a_step_never_seen_is_one_all_the_same() -> None:
    for seed in range(3):
        decisions, _ = watching(served(stair, 1560, seed, slow(1500.0)))  # the step at 1500 s and the fault together
        assert actions(decisions, "anomaly")[0][1] <= 1530.0


def test_a_load_lower_than_any_seen_excuses_nothing() -> None:
    """Half the load and twice the time to first token: extrapolation widens upwards only."""
    windows = served(lambda t: 8.0 if t < 600 else 2.0, 700, 1, slow(600.0, 2.5))
    assert actions(watching(windows, metrics=["tpot_p50"])[0], "anomaly")[0][1] <= 630.0


# ---- what it does not explain


@pytest.mark.parametrize("seed", range(5))
def test_a_fault_at_minute_three_is_confirmed_within_three_windows(seed: int) -> None:
    decisions, _ = watching(served(steady, 300, seed, slow(180.0)))
    assert actions(decisions, "anomaly")[0][1] <= 210.0


def test_one_window_out_of_line_is_flagged_and_no_anomaly() -> None:
    def alter(t: float, values: dict[str, float]) -> None:
        values["ttft_p50"] *= 10 if t == 400 else 1

    assert actions(watching(served(steady, 600, 1, alter))[0], "flag", "anomaly") == [("flag", 410.0)]


def test_two_of_three_are_an_anomaly_told_once() -> None:
    def alter(t: float, values: dict[str, float]) -> None:
        values["ttft_p50"] *= 10 if t in (400, 420, 430, 440) else 1

    found = actions(watching(served(steady, 600, 1, alter))[0], "flag", "anomaly")
    assert found == [("flag", 410.0), ("anomaly", 430.0), ("flag", 440.0), ("flag", 450.0)]


def test_better_is_no_anomaly() -> None:
    assert actions(watching(served(steady, 600, 1, slow(300.0, 0.25)))[0], "flag", "anomaly") == []


def test_of_what_is_better_high_a_fall_is_one() -> None:
    def rates(factor: float) -> list[Window]:
        rng = np.random.default_rng(1)
        return [window(t, 8.0, {"ok_rate": rng.poisson(80) / 10 * (factor if t >= 400 else 1)}) for t in np.arange(0.0, 600, 10)]

    assert actions(watching(rates(0.3), metrics=["ok_rate"])[0], "anomaly") == [("anomaly", 420.0)]
    assert actions(watching(rates(3.0), metrics=["ok_rate"])[0], "flag", "anomaly") == []


@pytest.mark.parametrize("factor", [0.2, 4.0])
def test_of_what_is_neither_both_sides_are(factor: float) -> None:
    rng = np.random.default_rng(1)
    shares = [0.2 * rng.lognormal(0, 0.05) * (factor if t >= 400 else 1) for t in range(0, 600, 10)]
    windows = [window(10.0 * i, 8.0, {"cached_share_mean": share}) for i, share in enumerate(shares)]
    assert actions(watching(windows, metrics=["cached_share"])[0], "anomaly") == [("anomaly", 420.0)]


def test_a_metric_that_never_moves_may_move_by_what_it_resolves() -> None:
    def at(value: float) -> list[tuple[str, float]]:
        windows = [window(t, 8.0, {"waiting_mean": value if t >= 400 else 0.0}) for t in np.arange(0.0, 600, 10)]
        return actions(watching(windows, metrics=["waiting"])[0], "anomaly")

    assert at(0.4) == []
    assert at(30.0) == [("anomaly", 420.0)]


# ---- shares of requests


def test_shares_are_judged_by_the_binomial_chance_of_so_many() -> None:
    """2,000 healthy requests of which 10 failed, then 8 of 100: against scipy's beta-binomial with the same prior."""
    shares = model(names.parse("error_rate"), 3.0)
    assert isinstance(shares, Shares)
    for _ in range(20):
        shares.learn(np.zeros(3), 0.005, 100)
    seen = shares.judge(np.zeros(3), 0.08, 100)
    chance = sum(stats.betabinom.pmf(k, 100, 10.5, 1990.5) for k in range(8, 101))
    assert stats.norm.sf(seen.z) == pytest.approx(chance, rel=1e-6)
    assert seen.value == pytest.approx(10.5 / 2001)
    assert seen.sigma == pytest.approx(stats.betabinom.std(100, 10.5, 1990.5) / 100)


@pytest.mark.parametrize(("bad", "anomaly"), [(0, False), (1, False), (2, True), (20, True)])
def test_errors_of_40_requests_beside_none_of_1480(bad: int, anomaly: bool) -> None:
    """One may be chance (1.3 %); two are less likely than 3 sigma (0.04 %)."""
    windows = [window(t, 8.0, {"error_rate": bad / 40 if t >= 400 else 0.0}, n=40) for t in np.arange(0.0, 600, 10)]
    assert bool(actions(watching(windows, metrics=["error_rate"])[0], "anomaly")) == anomaly


def test_success_is_the_same_from_the_other_side() -> None:
    windows = [window(t, 8.0, {"success_rate": 0.8 if t >= 400 else 1.0}) for t in np.arange(0.0, 600, 10)]
    decisions, _ = watching(windows, metrics=["success_rate"])
    assert actions(decisions, "anomaly") == [("anomaly", 420.0)]
    assert decisions[-1].data["expected"] > 0.99


def test_the_hit_rate_counts_tokens_and_is_not_binomial() -> None:
    assert isinstance(model(names.parse("hit_rate"), 3.0), Residuals)


# ---- what is not judged


def test_too_few_requests_are_not_judged_and_that_is_said() -> None:
    windows = [
        window(t, 1.0, {"ttft_p50": 0.05 if t < 400 else 5.0, "kv_usage_mean": 0.2}, n=19) for t in np.arange(0.0, 600, 10)
    ]
    decisions, watch = watching(windows, metrics=["ttft_p50", "kv_usage"])
    assert actions(decisions, "flag", "anomaly") == []
    assert watch.told()["judged"]["ttft_p50"] == 0
    assert watch.told()["skipped"]["ttft_p50"] == {"settling": 3, "fewer than 20 requests": 57}
    assert watch.told()["judged"]["kv_usage"] > 40
    enough, _ = watching([Window(start=w.start, end=w.end, counts={}, values=w.values, n={"ttft_p50": 20}) for w in windows])
    assert actions(enough, "anomaly") == [("anomaly", 420.0)]


def test_a_gauge_that_is_not_there_is_not_judged() -> None:
    windows = [window(t, 8.0, {"kv_usage_mean": None}) for t in np.arange(0.0, 300, 10)]
    decisions, watch = watching(windows, metrics=["kv_usage"])
    assert decisions == []
    assert watch.told() == {"judged": {"kv_usage": 0}, "skipped": {"kv_usage": {"settling": 3, "no value": 27}}}


def test_the_window_in_which_the_level_moved_is_not_judged_nor_the_first_after_it() -> None:
    watch, level = WatchSpec.model_validate({"metrics": ["ttft_p50"]}).arm(), Level()
    level.moved = -1.0
    windows = served(steady, 600, 1, slow(400.0, 10))
    seen = []
    for each in windows:
        if each.end == 410.0:
            level.value, level.moved = 1.2, 405.0
        seen += watch.look(each, level, each.end)
    assert actions(seen, "flag", "anomaly")[:2] == [("flag", 420.0), ("anomaly", 430.0)]


def test_nothing_is_judged_before_enough_was_learned() -> None:
    """3 windows settle, then `learn` windows and the 2 that have to follow the last of them."""
    decisions, _ = watching(served(steady, 400, 1), learn=10)
    assert min(d.data["end"] for d in decisions) == 10 * (3 + 10 + 2 + 1)


def test_anomalous_windows_are_not_learned() -> None:
    decisions, _ = watching(served(steady, 3600, 1, slow(600.0)), metrics=["ttft_p50"])
    late = [d.data for d in decisions if d.data["action"] == "flag" and d.data["end"] == 3600.0]
    assert late[0]["expected"] < 0.12
    assert late[0]["learned"] == 60 - 3 - 1  # without those that settled and the one before, not followed by two healthy ones


def test_a_single_outlier_is_learned_once_it_proved_to_be_one() -> None:
    def alter(t: float, values: dict[str, float]) -> None:
        values["ttft_p50"] *= 3 if t == 400 else 1

    _, watch = watching(served(steady, 600, 1, alter), metrics=["ttft_p50"])
    assert watch._eyes[0].model.n == 60 - 3 - 2


# ---- what follows


def test_healthy_windows_are_decisions_too_and_reach_the_level() -> None:
    heard = []

    class Heard(Level):
        def healthy(self, now: float) -> None:
            heard.append(now)

    decisions, _ = watching(served(steady, 300, 1), Heard())
    assert [end for _, end in actions(decisions, "healthy")] == heard
    assert len(heard) >= 15


def test_mark_only_marks() -> None:
    decisions, _ = watching(served(steady, 600, 1, slow(300.0)), action="mark")
    assert {d.data["action"] for d in decisions} == {"healthy", "flag", "anomaly"}
    assert all(d.move is None and d.stop is None for d in decisions)


def test_stop_gives_a_reason_with_its_numbers() -> None:
    decisions, _ = watching(served(steady, 320, 1, slow(300.0)), action="stop", metrics=["tpot_p50"])
    last = decisions[-1]
    assert last.data["action"] == "stop"
    assert last.stop is not None
    assert last.stop.startswith("tpot_p50 is ")
    assert "expected" in last.stop
    assert last.data["end"] == 320.0


def test_a_rollback_moves_the_level_with_the_confirming_window_and_holds() -> None:
    """A fault of two minutes: one fall, nothing until the hold is over and windows are healthy, then back in two rises."""
    watch = WatchSpec.model_validate({"action": "rollback", "hold": 60.0, "step": 0.2}).arm()
    level, moves = watch.level(), []
    level.begin(-10.0, None)

    def alter(t: float, values: dict[str, float]) -> None:
        if 300 <= t < 340:
            slow(0.0)(t, values)

    for each in served(steady, 900, 1, alter):
        moves += [("fall", each.end, d.move.level) for d in watch.look(each, level, each.end) if d.move is not None]
        if (rise := level.tick(each.end)) is not None:
            moves.append(("rise", each.end, rise.level))
    assert moves == [("fall", 320.0, 0.8), ("rise", 380.0, 0.9), ("rise", 440.0, 1.0)]


def test_an_anomaly_that_stays_makes_it_fall_further_after_each_hold_and_then_give_up() -> None:
    watch = WatchSpec.model_validate({"action": "rollback", "hold": 60.0, "tries": 3}).arm()
    level = watch.level()
    level.begin(-10.0, None)
    decisions = [d for each in served(steady, 1800, 1, slow(300.0)) for d in watch.look(each, level, each.end)]
    falls = [(d.data["end"], d.move.level) for d in decisions if d.move is not None]
    assert falls == [(320.0, 0.8), (380.0, 0.64), (440.0, 0.512)]
    assert actions(decisions, "gave_up") == [("gave_up", 500.0)]
    assert len(actions(decisions, "anomaly")) == 2  # of ttft and tpot, each told once
    assert level.value == pytest.approx(0.512)


def test_the_same_windows_give_the_same_decisions() -> None:
    one, two = (watching(served(sine, 900, 4, slow(600.0)))[0] for _ in range(2))
    assert one == two


# ---- the scenario's key


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"metrics": ["ttft_p95"]}, "a window holds ttft_p50, ttft_p90, ttft_p99, ttft_max"),
        ({"metrics": ["upload_p50"]}, "windows hold no upload"),
        ({"metrics": ["ttft_p5"]}, "ttft is written as one of"),
        ({"metrics": ["latency"]}, "unknown metric 'latency'"),
        ({"metrics": ["kv_usage_min"]}, "a window holds kv_usage, kv_usage_mean"),
        ({"metrics": ["kv_usage", "kv_usage"]}, "named twice"),
        ({"metrics": []}, "at least 1 item"),
        ({"confirm": 4}, "confirm must be at most `of`"),
        ({"window": "1500ms"}, "whole seconds"),
        ({"window": "20m"}, "less than or equal to 600"),
        ({"step": "100%"}, "less than 1"),
        ({"action": "panic"}, "'mark', 'rollback' or 'stop'"),
        ({"wait": "1s"}, "Extra inputs"),
    ],
)
def test_a_spec_that_cannot_work_is_refused(spec: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        WatchSpec.model_validate(spec)


@pytest.mark.parametrize("metrics", [["inflight"], ["preemptions_total", "preemptions_total_rate"], ["goodput", "hit_rate"]])
def test_every_kind_of_window_statistic_can_be_watched(metrics: list[str]) -> None:
    assert WatchSpec.model_validate({"metrics": metrics}).arm().judged == dict.fromkeys(metrics, 0)


@pytest.mark.parametrize("dof", [5, 10, 30, 100])
def test_few_windows_widen_the_interval_as_student_says(dof: int) -> None:
    exact = stats.t.isf(stats.norm.sf(3.0), dof) / 3.0
    assert _student(3.0, dof) == pytest.approx(exact, rel=0.12 if dof < 10 else 0.02)
