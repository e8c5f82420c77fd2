"""`cache_profile_aggressiveness`: one number from "save compute" (0) to "save memory" (1). Table: docs/engine/layers.md."""

from typing import Any

from kvbench.engine.groups import LayersSpec

LADDER = (
    (0.0, ("fp16", "fp16", "fp16")),
    (0.2, ("fp16", "fp16", "fp8")),
    (0.4, ("fp16", "fp8", "int4-g128")),
    (0.6, ("fp8", "int4-g64", "int4-g64")),
    (0.8, ("fp8", "int4-g64", "int2-g64")),
    (1.0, ("int4-g64", "int2-g64", "sparse-12")),
)
"""From this number on, the codecs of the low, middle and high layers: 6/32, 6/32 and 20/32 of them."""
YOUNG = 30.0  # seconds for which content is kept at 0
SHORT = 64  # tokens below which a sequence's content is not kept at 1


def layers_plan(aggressiveness: float, layers: int) -> LayersSpec:
    """The codec plan for a model of `layers` layers. Bytes per token do not rise with `aggressiveness`."""
    codecs = next(codecs for least, codecs in reversed(LADDER) if aggressiveness >= least)
    ends = [max(1, round(layers * 6 / 32)), max(2, round(layers * 12 / 32)), layers]
    if layers < 3 or len(set(codecs)) == 1:
        return LayersSpec.model_validate({"groups": [{"layers": "1+", "codec": codecs[0]}]})
    first, groups = 1, []
    for codec, last in zip(codecs, ends, strict=True):
        groups.append({"layers": f"{first}-{last}", "codec": codec})
        first = last + 1
    return LayersSpec.model_validate({"groups": groups})


def settings(aggressiveness: float) -> dict[str, Any]:
    """Retention and admission: settings of the engine profile."""
    found: dict[str, Any] = {"retain": YOUNG * (1 - aggressiveness), "retain_tokens": round(SHORT * aggressiveness)}
    found["admission"] = "prompt" if aggressiveness < 0.6 else "chunk"
    return found
