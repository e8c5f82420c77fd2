"""What waits to be encoded, by hand: four layers of 100 bytes per token, blocks of 4 tokens, steps of 8 s with 10 tokens each."""

from typing import Literal

import pytest

from kvbench.engine.encoder import Encoder
from kvbench.engine.evict.policies import POLICIES
from kvbench.engine.holding import Group
from kvbench.engine.pool import Pool


def encoder(layer: float, cap: float, *encodings: Literal["sync", "async"]) -> Encoder:
    """A group of two layers for each of `encodings`; 10 tokens of a layer take `layer` seconds."""
    groups = []
    for at, encoding in enumerate(encodings):
        pool = Pool(11, 4, POLICIES["lru"](10, 0))
        groups.append(Group(str(at), pool, 2 * at + 1, 2 * at + 2, 100.0, layer * 2 * 4 / 10, encoding, 200.0))
    return Encoder(groups, cap)


def planned(built: Encoder, tokens: int = 10) -> Encoder:
    for at in range(len(built.groups)):
        built.made(at, tokens)
    return built


def test_encoding_at_the_end_of_a_step_stages_all_of_it() -> None:
    built = planned(encoder(1.0, 1e9, "sync", "sync"))
    assert built.step(0.0, 8.0) == 0
    assert built.staged == 4000  # 10 tokens x 400 bytes
    assert built.step(8.0, 1.0) == 0
    assert built.staged == 0


def test_a_fast_encoder_in_the_background_stages_one_layer() -> None:
    built = planned(encoder(1.0, 1e9, "async", "async"))  # a layer every 2 s, encoded in 1
    assert built.step(0.0, 8.0) == 0
    assert built.staged == 1000
    built.step(8.5, 1.0)
    assert built.staged == 1000  # the last layer is half encoded: all its bytes are there still
    built.step(9.0, 1.0)
    assert built.staged == 0


def test_both_at_once_add_up() -> None:
    built = planned(encoder(1.0, 1e9, "sync", "async"))
    built.step(0.0, 8.0)
    assert built.staged == 3000  # two layers until the end, and one at a time of the others


def test_a_slow_encoder_falls_behind_and_steps_wait_where_there_is_no_room() -> None:
    roomy = planned(encoder(3.0, 1e9, "async", "async"))
    assert roomy.step(0.0, 8.0) == 0
    assert roomy.staged == 2000  # made at 2, 4, 6, 8; encoded at 5, 8, 11, 14
    tight = planned(encoder(3.0, 1000, "async", "async"))
    assert tight.step(0.0, 8.0) == pytest.approx(3)  # made at 2, 4 + 1, 7 + 1, 10 + 1
    assert tight.staged == 1000
    tight.check()
    tight.step(11.0, 1.0)
    assert tight.staged == 1000
    tight.step(14.0, 1.0)
    assert tight.staged == 0


def test_a_layer_larger_than_the_room_is_staged_alone() -> None:
    built = planned(encoder(3.0, 10, "async", "async"))
    assert built.step(0.0, 8.0) == pytest.approx(3)
    assert built.staged == 1000
    built.check()


def test_what_one_step_left_waits_before_the_next_one_has_room() -> None:
    built = planned(encoder(3.0, 1000, "async", "async"))
    built.step(0.0, 8.0)  # until 11; the last layer is encoded at 14
    assert planned(built).step(11.0, 8.0) == pytest.approx(1 + 1 + 1 + 1)  # made at 13 + 1, 16 + 1, 19 + 1, 22 + 1
