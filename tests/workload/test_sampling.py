"""What is drawn for sampling, under which API names, and what is refused."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from kvbench.workload.sampling import Penalty, Sampling
from kvbench.workload.spec import weights


def sampling(**spec: Any) -> Sampling:
    return Sampling.model_validate(spec, context={"text": True})


def drawn(spec: Sampling, count: int = 4000) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    return [spec.draw(rng) for _ in range(count)]


def test_defaults_send_nothing() -> None:
    assert drawn(sampling(), 3) == [{}] * 3
    assert drawn(sampling(n=1, beam_width=1, penalties=[{}]), 3) == [{}] * 3
    assert drawn(sampling(beam_width={1: "100%"}, penalties=[{"repetition": 1}]), 3) == [{}] * 3
    assert sampling().features() == {}


def test_what_is_named_is_sent_under_the_names_of_the_api() -> None:
    spec = sampling(temperature=0, top_p=0.9, top_k=40, n=3, seed=5, stop=["END"])
    spec = spec.model_copy(update={"penalties": (Penalty(frequency=0.2, presence=-0.5, repetition=1.1),)})
    assert drawn(spec, 1) == [
        {
            "temperature": 0.0,
            "top_p": 0.9,
            "top_k": 40,
            "n": 3,
            "frequency_penalty": 0.2,
            "presence_penalty": -0.5,
            "repetition_penalty": 1.1,
            "seed": 5,
            "stop": ["END"],
        }
    ]
    assert type(drawn(spec, 1)[0]["n"]) is int


def test_beam_search_is_asked_for_as_vllm_has_it() -> None:
    assert drawn(sampling(beam_width=4), 1) == [{"use_beam_search": True, "n": 4}]
    mixed = Counter(frozenset(draw.items()) for draw in drawn(sampling(beam_width={1: "75%", 4: "25%"})))
    assert set(mixed) == {frozenset(), frozenset({("use_beam_search", True), ("n", 4)})}
    assert mixed[frozenset()] / 4000 == pytest.approx(0.75, abs=4 * math.sqrt(0.75 * 0.25 / 4000))


def test_shares_are_those_asked_for_and_features_are_independent() -> None:
    spec = sampling(temperature={0: "50%", 0.7: "50%"}, penalties=[{}, {"frequency": 0.2}, {"presence": 1}])
    pairs = Counter((draw["temperature"], draw.get("frequency_penalty"), draw.get("presence_penalty")) for draw in drawn(spec))
    assert len(pairs) == 6
    for count in pairs.values():  # 1/2 x 1/3 each
        assert count / 4000 == pytest.approx(1 / 6, abs=4 * math.sqrt(5 / 36 / 4000))


def test_penalties_with_weights() -> None:
    spec = sampling(penalties=[{"weight": "90%"}, {"repetition": 1.2, "weight": "10%"}])
    hit = sum("repetition_penalty" in draw for draw in drawn(spec))
    assert hit / 4000 == pytest.approx(0.1, abs=4 * math.sqrt(0.09 / 4000))


def test_adding_a_feature_moves_no_other() -> None:
    few = drawn(sampling(temperature={0: 1, 0.5: 1, 1: 1}), 200)
    more = drawn(sampling(temperature={0: 1, 0.5: 1, 1: 1}, top_p=0.5, top_k={1: 1, 2: 1}, beam_width={1: 1, 2: 1}), 200)
    assert [draw["temperature"] for draw in few] == [draw["temperature"] for draw in more]
    assert len({draw["temperature"] for draw in few}) == 3


def test_features_and_mean_n_for_the_plan() -> None:
    spec = sampling(temperature={0: "50%", 0.7: "50%"}, n={1: 3, 5: 1}, penalties=[{}, {"frequency": 0.2, "repetition": 1.1}])
    assert spec.features() == {
        "temperature": {"0": 0.5, "0.7": 0.5},
        "n": {"1": 0.75, "5": 0.25},
        "penalties": {"none": 0.5, "frequency_penalty 0.2, repetition_penalty 1.1": 0.5},
    }
    assert spec.mean_n() == pytest.approx(2.0)
    assert sampling(beam_width={1: 1, 4: 1}).mean_n() == pytest.approx(2.5)
    assert sampling().mean_n() == 1.0


def test_a_spec_survives_being_written_down() -> None:
    spec = sampling(temperature={0: "33.3%", 0.7: "33.3%", 1: "33.3%"}, n=2, penalties=[{"frequency": 0.2}], stop=["a"])
    assert Sampling.model_validate(spec.model_dump()) == spec
    assert Sampling.model_json_schema()["properties"]["temperature"]
    assert sum(weights({1: "33.3%", 2: "33.3%", 3: "33.3%"}).values()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("spec", "loc", "says"),
    [
        ({"temperature": 2.1}, ("temperature", "2.1", "[key]"), "less than or equal to 2"),
        ({"temperature": float("nan")}, ("temperature", "nan", "[key]"), "finite"),
        ({"temperature": {0: "50%", 0.7: "40%"}}, ("temperature",), "add up to 90 %"),
        ({"temperature": {0: "50%", 0.7: 1}}, ("temperature",), "mixes"),
        ({"temperature": {}}, ("temperature",), "no values"),
        ({"temperature": [0, 1]}, ("temperature",), "not a mapping"),
        ({"temperature": True}, ("temperature",), "not a mapping"),
        ({"temperature": {0: "-50%", 1: "150%"}}, ("temperature",), "out of range"),
        ({"temperature": {0: "50"}}, ("temperature",), "not a share"),
        ({"top_p": 0}, ("top_p", 0, "[key]"), "greater than 0"),
        ({"top_k": -2}, ("top_k", -2, "[key]"), "greater than or equal to -1"),
        ({"n": 0}, ("n", 0, "[key]"), "greater than or equal to 1"),
        ({"n": 1.5}, ("n", "1.5", "[key]"), "valid integer"),
        ({"n": 2, "beam_width": 2}, (), "both above 1"),
        ({"penalties": [{"frequency": 3}]}, ("penalties", 0, "frequency"), "less than or equal to 2"),
        ({"penalties": [{"repetition": 0}]}, ("penalties", 0, "repetition"), "greater than 0"),
        ({"penalties": [{"frequncy": 1}]}, ("penalties", 0, "frequncy"), "not permitted"),
        ({"penalties": [{"weight": "50%"}, {}]}, (), "all or none"),
        ({"penalties": [{"weight": "50%"}, {"weight": "40%"}]}, (), "add up to 90 %"),
        ({"temprature": 1}, ("temprature",), "not permitted"),
    ],
)
def test_refusals_name_place_and_range(spec: dict[str, Any], loc: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        sampling(**spec)
    (error,) = caught.value.errors()
    assert error["loc"] == loc
    assert says in error["msg"]
