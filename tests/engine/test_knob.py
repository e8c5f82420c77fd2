"""The one knob: memory per token never rises with it, and what is written out goes before it."""

import pytest

from kvbench.endpoint import Sim
from kvbench.engine.groups import sizes
from kvbench.engine.knob import layers_plan, settings
from kvbench.profile import load_engine, load_hardware, load_model


def token_bytes(aggressiveness: float) -> float:
    spec = layers_plan(aggressiveness, 32)
    sized = sizes(spec, load_model("llama-3.1-8b"), load_hardware("rtx-4090"), load_engine("vllm"))
    return sum(one.token for one in sized)


def test_bytes_per_token_fall_from_the_models_own_to_less_than_a_fifth() -> None:
    found = [token_bytes(a / 20) for a in range(21)]
    assert found == sorted(found, reverse=True)
    assert found[0] == 131_072
    assert found[8] == 4096 * (6 + 6 / 2 + 20 * 4.25 / 16)
    assert found[20] == 4096 * (6 * 4.5 + 6 * 2.5 + 20 * 2.015625) / 16


def test_retention_and_admission_go_from_computing_less_to_keeping_less() -> None:
    assert settings(0.0) == {"retain": 30.0, "retain_tokens": 0, "admission": "prompt"}
    assert settings(1.0) == {"retain": 0.0, "retain_tokens": 64, "admission": "chunk"}


def test_what_is_written_out_goes_before_the_knob() -> None:
    base = {"model": "llama-3.1-8b", "hardware": "rtx-4090", "cache_profile_aggressiveness": 1.0}
    spec = Sim.model_validate(base)
    assert spec.load_engine().retain_tokens == 64
    assert [group.codec for group in spec.load_layers().groups] == ["int4-g64", "int2-g64", "sparse-12"]  # type: ignore[union-attr]
    spec = Sim.model_validate(base | {"settings": {"retain_tokens": 5}, "layers": {"groups": [{"layers": "1+"}]}})
    assert spec.load_engine().retain_tokens == 5
    assert spec.load_layers() == spec.layers


@pytest.mark.parametrize("layers", [1, 3, 6, 12, 61, 126])
def test_every_depth_has_a_plan(layers: int) -> None:
    spans = [group.span(layers) for group in layers_plan(0.7, layers).groups]
    assert [layer for first, last in spans for layer in range(first, last + 1)] == list(range(1, layers + 1))
