"""Where several layer groups lack different parts of a prefix, each token is computed up to the highest layer that lacks it."""

import pytest

from kvbench.core import Seconds
from kvbench.engine import Job, Step
from kvbench.engine.engine import Engine
from kvbench.engine.groups import LayersSpec
from kvbench.profile import load_engine, load_hardware, load_model

GROUPS = [{"layers": "1-6"}, {"layers": "7-12"}, {"layers": "13+"}]


class Recorder:
    """Every step takes a second, and is kept."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def seconds(self, step: Step) -> Seconds:
        self.steps.append(step)
        return 1.0


@pytest.mark.parametrize(
    ("found", "layers"),  # blocks of 4 that each group still has of 40 tokens; tokens computed x the highest of 32 layers
    [
        ((0, 5, 9), 20 * 6 + 16 * 12 + 4 * 32),
        ((5, 0, 9), 20 * 12 + 16 * 12 + 4 * 32),  # tokens 20 to 36 are missing in both: the middle group's last layer counts
        ((0, 9, 0), 36 * 32 + 4 * 32),
        ((9, 9, 3), 24 * 32 + 4 * 32),  # 12 tokens are there in every group
        ((3, 5, 9), 8 * 6 + 16 * 12 + 4 * 32),
    ],
)
def test_a_token_is_computed_up_to_the_highest_layer_that_lacks_it(found: tuple[int, int, int], layers: int) -> None:
    built = Engine(
        load_model("llama-3.1-8b"),
        load_hardware("rtx-4090"),
        load_engine("vllm", block=4, blocks=401),
        layers=LayersSpec.model_validate({"groups": GROUPS}),
    )
    built.cost = recorder = Recorder()
    for at in (0.0, 10.0):
        built.submit(Job(int(at), ((1, 40),), 1), at)
        while built.wake() < float("inf"):
            built.advance(built.wake())
            built.check()
        if not at:
            for group, left in zip(built.cache.groups, found, strict=True):
                group.pool.discard(list(group.pool.index)[left:])
    ((chunk, before),) = recorder.steps[-1].prefill
    assert before == 4 * min(found)
    assert recorder.steps[-1].shares == pytest.approx((layers / 32 / chunk,))
