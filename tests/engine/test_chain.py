"""Content keys of different salts: tenants and adapters share nothing, whatever a prompt's segments are."""

import pytest

from kvbench.engine import Job
from kvbench.engine.chain import Chain, root
from kvbench.engine.engine import Engine
from kvbench.profile import load_engine, load_hardware, load_model

SHAPES = {
    "whole blocks": ((1, 64),),
    "a seam in the first block": ((1, 3), (2, 61)),
    "a block of single tokens": (*((each, 1) for each in range(1, 17)), (17, 48)),
}


@pytest.mark.parametrize("segments", SHAPES.values(), ids=list(SHAPES))
def test_no_key_is_shared_between_salts(segments: tuple[tuple[int, int], ...]) -> None:
    chains = [set(Chain(segments, 16, root(*apart)).upto(4)) for apart in ((), (5, 0), (6, 0), (0, 5))]
    assert len(set().union(*chains)) == 16


@pytest.mark.parametrize("segments", SHAPES.values(), ids=list(SHAPES))
def test_a_tenant_finds_its_own_content_only(segments: tuple[tuple[int, int], ...]) -> None:
    built = Engine(load_model("llama-3.1-8b"), load_hardware("rtx-4090"), load_engine("vllm", blocks=101, block=16))
    cached = []
    for number, salt in enumerate((0, 5, 6, 5, 0)):
        assert built.submit(Job(number, (*segments, (99, 5)), 1, salt=salt), 10.0 * number) is None
        while built.wake() < float("inf"):
            cached += [done.cached for span in built.advance(built.wake()) for done in span.done]
    assert cached == [0, 0, 0, 64, 64]
