"""Codecs against the arithmetic of published forms: bits = b + meta / group."""

import pytest
from pydantic import ValidationError

from kvbench.engine.codec import load_codec
from kvbench.profile import names


@pytest.mark.parametrize(
    ("name", "bits", "ratio"),
    [
        ("fp16", 16, 1.0), ("fp8", 8, 2.0), ("int8", 8.125, 1.97), ("int4-g32", 5.0, 3.20), ("int4-g64", 4.5, 3.56),
        ("int4-g128", 4.25, 3.76), ("int2-g64", 2.5, 6.40), ("sparse-25", 4.03125, 3.97), ("sparse-12", 2.015625, 7.94),
        ("delta", 4.075, 3.93),
    ],
)  # fmt: skip
def test_effective_bits_count_everything(name: str, bits: float, ratio: float) -> None:
    codec = load_codec(name)
    assert codec.effective_bits == pytest.approx(bits)
    assert codec.effective_ratio == pytest.approx(ratio, abs=0.006)


def test_nominal_ratios_are_what_names_promise() -> None:
    ratios = [load_codec(name).nominal_ratio for name in ("fp16", "int8", "int4-g64", "int2-g64", "sparse-25", "sparse-12")]
    assert ratios == [1, 2, 4, 8, 4, 8]


@pytest.mark.parametrize("name", names("codecs"))
def test_every_codec_says_where_its_loss_and_times_come_from(name: str) -> None:
    codec = load_codec(name)
    assert all((codec.source, codec.times_source, codec.loss_source))
    assert (codec.loss is None) == codec.loss_source.startswith("unknown: ")


def test_anchors_come_with_their_distance_and_an_unknown_name_with_the_nearest() -> None:
    with pytest.raises(ValidationError, match="anchor_bits and anchor_every"):
        type(load_codec("fp16")).model_validate(load_codec("fp16").model_dump() | {"anchor_every": 4})
    with pytest.raises(ValueError, match="did you mean 'int4-g64'"):
        load_codec("int4_g65")
