"""The learned law: actions by state, feedback where it was never trained, and a limit that no action passes."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvbench.control import policy as policies
from kvbench.control.learned import Act, Learned, feedback, unserved
from kvbench.control.policy import Policy
from kvbench.core import Window

EDGES = {"error": [0.1], "waiting": [2.0], "trend": [0.05], "kv_usage": [0.5, 0.8]}
STATES = 24  # 2 x 2 x 2 x 3


def policy(actions: list[float] | None = None, table: list[int] | None = None, seen: int = 100) -> Policy:
    return Policy(
        name="made", trained={}, share=0.02, kv_limit=0.9, edges=EDGES, actions=actions or [0.0, 0.5, 1.0],
        table=table or [1] * STATES, seen=[seen] * STATES, enough=30,
    )  # fmt: skip


def law(made: Policy | None = None, **keys: object) -> Act:
    return Act(Learned.model_construct(**{"kv_limit": 0.9, **keys}), made or policy())


def window(end: float, usage: float | None = 0.4, waiting: float | None = 0.0, inflight: int = 20, **counts: int) -> Window:
    values = {"kv_usage_last": usage, "waiting_last": waiting}
    return Window(
        start=end - 5, end=end, counts={"inflight": inflight, **counts}, values=values, age={"kv_usage": 0.0, "waiting": 0.0}
    )


def test_a_factor_acts_on_the_room_that_is_left() -> None:
    # 20 run at 40 %: 2 % each, as the policy had it. Room for (0.9 - 0.4) / 0.02 = 25, half of it: 12.5 a second, and the 2 a
    # second that ended (10 in 5 s).
    limits = law().update(window(10.0, ok=10))
    assert limits.rate == pytest.approx(12.5 + 2)
    assert limits.inflight == 20 + 12


def test_the_size_of_requests_is_measured() -> None:
    act = law()
    for second in range(40):
        limits = act.update(window(10.0 + second, usage=0.4, inflight=5))  # 8 % each: room for 6.25, half of it
    assert act.state()["footprint"] == pytest.approx(0.08, rel=1e-3)
    assert limits.rate == pytest.approx(0.5 * 0.5 / 0.08, rel=1e-3)


def test_a_state_is_one_bin_of_every_feature() -> None:
    made = policy()
    values = {"error": 0.0, "waiting": 0.0, "trend": 0.0, "kv_usage": 0.0}
    assert made.state(values) == 0
    assert made.state(values | {"kv_usage": 0.5}) == 1  # on an edge: the upper bin
    assert made.state(values | {"trend": 1.0}) == 3
    assert made.state(values | {"waiting": 7.0}) == 6
    assert made.state({"error": 1.0, "waiting": 9.0, "trend": 1.0, "kv_usage": 1.0}) == STATES - 1


def test_unseen_states_fall_back_to_feedback_and_are_counted() -> None:
    made = policy(table=[2] * STATES, seen=29)
    act = law(made)
    assert act.update(window(10.0)).rate == pytest.approx(0.5 * 25)  # feedback's half, not the table's whole
    assert act.update(window(11.0, waiting=1.0, inflight=21)).rate == pytest.approx(0.25 * 25)
    assert act.update(window(12.0, waiting=2.0, inflight=22)).rate == 0
    assert act.told()["fallbacks"] == 3
    assert [feedback(queue) for queue in (0, 1, 2, 50)] == [0.5, 0.25, 0, 0]
    known = law(policy(table=[2] * STATES, seen=30))
    assert known.update(window(10.0)).rate == pytest.approx(25)
    assert known.told()["fallbacks"] == 0


def test_a_missing_or_stale_signal_holds_still() -> None:
    act = law()
    before = act.update(window(10.0))
    assert act.update(window(11.0, usage=None)) == before
    old = window(12.0, usage=0.1)
    old.age["waiting"] = 3.5  # two control periods and a second are 3 s
    assert act.update(old) == before
    assert act.told()["stale"] == 2


def test_requests_that_were_not_served_are_the_error() -> None:
    assert unserved(window(5.0)) == 0
    assert unserved(window(5.0, ok=6, shed=2, failed=1, timeout=1)) == 0.4


@settings(max_examples=200, deadline=None)
@given(data=st.data(), explore=st.sampled_from([0.0, 0.5, 1.0]))
def test_no_action_passes_the_hard_limit(data: st.DataObject, explore: float) -> None:
    """Whatever the table and the windows: at the limit nothing enters, below it no more than there is room for."""
    actions = sorted(data.draw(st.sets(st.floats(0, 1), min_size=1, max_size=5)))
    index = st.integers(0, len(actions) - 1)
    made = policy(actions, data.draw(st.lists(index, min_size=STATES, max_size=STATES)), data.draw(st.integers(0, 60)))
    act = law(made, explore=explore)
    for second in range(12):
        usage, waiting = data.draw(st.floats(0, 1)), data.draw(st.integers(0, 40))
        inflight = waiting + data.draw(st.integers(0, 60))
        limits = act.update(window(10.0 + second, usage, waiting, inflight, shed=data.draw(st.integers(0, 9))))
        if usage >= 0.9:
            assert limits.rate == 0
        else:
            assert limits.inflight <= max(1, inflight + math.floor((0.9 - usage) / act.share + 1e-9))


def test_without_exploring_it_is_deterministic_and_exploring_is_seeded() -> None:
    table = [1] * STATES

    def rates(**keys: object) -> list[float]:
        act = law(policy([0.0, 0.5, 1.0], table), **keys)
        found = [act.update(window(10.0 + second)).rate for second in range(50)]
        return [*found, float(act.told()["explored"])]

    assert len(set(rates()[:-1])) == 1
    assert rates()[-1] == 0
    tried = rates(explore=0.3, seed=1)
    assert tried == rates(explore=0.3, seed=1) != rates(explore=0.3, seed=2)
    assert 5 <= tried[-1] <= 25  # of 50, 15 expected
    assert set(tried[:-1]) == {0.0, 12.5, 25.0}  # the best known action and those beside it


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ValidationError) as caught:
        Learned(policy="chaoss")
    text = str(caught.value)
    assert "unknown policy 'chaoss'; did you mean 'chaos'?" in text
    assert all(name in text for name in policies.names())


def test_shipped_policies_read_and_are_small() -> None:
    assert "chaos" in policies.names()
    for name in policies.names():
        found = policies.load(name)
        assert found.trained["episodes"] > 0
        assert (policies.folder() / f"{name}.yaml").stat().st_size < 50_000
        assert found.trained["load_seeds"][0] >= 1000  # smaller seeds are for comparisons


def test_a_policy_survives_its_file(tmp_path: Path) -> None:
    made = policy(table=[i % 3 for i in range(STATES)])
    path = tmp_path / "made.yaml"
    path.write_text(policies.write(made))
    assert policies.read(path) == made


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"table": [1]}, "1 and 24 entries for 24 states"),
        ({"table": [9] * STATES}, "0 to 2"),
        ({"actions": [1.0, 0.5]}, "rise"),
        ({"edges": {"kv_usage": [0.5]}}, "it must have error, waiting, trend, kv_usage"),
    ],
)
def test_a_malformed_policy_says_what_is_wrong(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(policies.write(policy().model_copy(update=change)) if "edges" not in change else "")
    if "edges" in change:
        import yaml

        path.write_text(yaml.safe_dump(policy().model_dump() | change, sort_keys=False))
    with pytest.raises(ValueError, match=r"policy 'bad' cannot be read") as caught:
        policies.read(path)
    assert said in str(caught.value)


def test_a_policy_may_be_a_file_beside_the_scenario(tmp_path: Path) -> None:
    """As written, from the scenario's folder; a file that is trained again is read again."""
    path = tmp_path / "laws" / "made.yaml"
    path.parent.mkdir()
    for share in (0.1, 0.2):
        path.write_text(policies.write(policy().model_copy(update={"share": share})))
        spec = Learned.model_validate({"policy": "./laws/made.yaml"}, context={"folder": tmp_path})
        assert spec.policy == str(path)
        assert spec.limits().rate == pytest.approx(0.9 / share)
        act = spec.arm(None)
        assert isinstance(act, Act)
        assert act.policy.share == share


def test_a_name_with_a_slash_is_a_file_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never the shipped policy of that name, even where nothing else tells them apart."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValidationError, match=r"no file 'chaos' \(paths are relative to the scenario file\)"):
        Learned(policy="./chaos")
    Path("chaos").write_text(policies.write(policy().model_copy(update={"share": 0.3})))
    spec = Learned(policy="./chaos")
    assert spec.limits().rate == pytest.approx(0.9 / 0.3)
    Path("bad.yaml").write_text("share: 1\n")
    with pytest.raises(ValidationError, match="policy 'bad' cannot be read"):
        Learned(policy="bad.yaml")
