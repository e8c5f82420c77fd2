"""Every length distribution against what it claims: one suite over the dict, so that a new one is tested by being in it."""

import math
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, TypeAdapter

from kvbench.workload.lengths import LENGTHS, AnyLengths, parse_lengths

EVERY = sorted(LENGTHS)
DRAWS = 20_000


def example(name: str) -> Any:
    cls: Any = LENGTHS[name]
    return parse_lengths({"dist": name, **cls.example}, {"text": True})


def drawn(lengths: Any, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.array([lengths.sample(rng) for _ in range(DRAWS)])


@pytest.mark.parametrize("name", EVERY)
def test_samples_are_whole_reproducible_and_reach_the_bounds(name: str) -> None:
    lengths = example(name)
    assert type(lengths.sample(np.random.default_rng(0))) is int
    sample = drawn(lengths)
    low, high = lengths.bounds()
    assert low <= sample.min() <= sample.max() <= high
    assert (sample == drawn(example(name))).all()
    assert low == high or (sample != drawn(lengths, 2)).any()
    assert lengths.quantile(0) == low
    assert lengths.quantile(1) == high


@pytest.mark.parametrize("name", EVERY)
def test_the_mean_is_that_of_the_samples(name: str) -> None:
    lengths, sample = example(name), drawn(example(name))
    assert type(lengths.mean()) is float
    assert abs(sample.mean() - lengths.mean()) <= 4 * sample.std() / math.sqrt(DRAWS)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("q", [0.1, 0.25, 0.5, 0.9, 0.99])
def test_quantiles_are_those_of_the_samples(name: str, q: float) -> None:
    """The least length with at least the share q at or below it: on either side of it the samples are short of, and beyond, q."""
    sample, at = drawn(example(name)), example(name).quantile(q)
    slack = 4 * math.sqrt(q * (1 - q) / DRAWS)
    assert (sample < at).mean() <= q + slack
    assert (sample <= at).mean() >= q - slack


@pytest.mark.parametrize("name", EVERY)
def test_a_distribution_is_a_field_and_survives_being_written_down(name: str) -> None:
    class Holder(BaseModel):
        prompt: AnyLengths

    cls: Any = LENGTHS[name]
    held = Holder.model_validate({"prompt": {"dist": name, **cls.example}}, context={"text": True})
    assert held.prompt == example(name)
    written = held.model_dump(mode="json")["prompt"]
    assert written["dist"] == name
    assert Holder.model_validate({"prompt": written}).prompt == held.prompt
    assert cls.__doc__
    assert all(field.description for field in cls.model_fields.values())
    forms = TypeAdapter(Holder).json_schema()["properties"]["prompt"]["anyOf"]
    assert name in [form.get("properties", {}).get("dist", {}).get("const") for form in forms]
