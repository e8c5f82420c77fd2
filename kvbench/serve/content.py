"""What the engine calls the tokens it is given: equal prefixes of ids are equal content, an answer that comes back included.

The engine knows content by keys (kvbench.core.Segment) and calls its own answers by keys of its own. A prompt's full blocks
are named by the hash of all ids up to their end; blocks that an answer was part of, under the same hash, are remembered as
that answer's.
"""

from collections import OrderedDict
from typing import NamedTuple

from kvbench.core import Segment

KEPT = 1 << 20  # blocks of answers that are remembered: 100 MB, and more than most pools hold
_MASK = (1 << 60) - 1  # keys of the engine's own answers begin above


class Prompt(NamedTuple):
    """A prompt as the engine takes it; `name` of its last full block and the ids after that, to go on from."""

    segments: tuple[Segment, ...]
    tokens: int
    name: int
    rest: list[int]


class Answered(NamedTuple):
    """The answer `key` begins at token `begin`."""

    key: int
    begin: int


class Contents:
    """Names of content, by blocks of `block` tokens. At most `kept` blocks of answers are remembered, the newest."""

    def __init__(self, block: int, kept: int = KEPT) -> None:
        self.block, self.kept = block, kept
        self._answers: OrderedDict[int, Answered] = OrderedDict()

    def prompt(self, ids: list[int], salt: int) -> Prompt:
        """`salt`: content is shared among prompts of one salt only."""
        block, answers = self.block, self._answers
        full = len(ids) // block * block
        found: list[Segment] = []
        name, reading = salt, -1  # the answer that the block before belongs to
        for at in range(0, full, block):
            before, name = name, _name(name, ids[at : at + block])
            known = answers.get(name)
            if known is not None and known.key == reading:
                found[-1] = (known.key, at + block - known.begin)
            elif known is not None and known.begin >= at:
                if known.begin > at:
                    found.append((_name(before, ids[at : known.begin]), known.begin - at))
                found.append((known.key, at + block - known.begin))
                reading = known.key
            else:
                found.append((name, block))
                reading = -1
        if full < len(ids):
            found.append((_name(name, ids[full:]), len(ids) - full))
        return Prompt(tuple(found), len(ids), name, ids[full:])

    def answered(self, prompt: Prompt, key: int, ids: list[int]) -> None:
        """`ids` were generated after `prompt` as the content `key`."""
        name, begin = prompt.name, prompt.tokens
        joined = prompt.rest + ids
        for at in range(0, len(joined) // self.block * self.block, self.block):
            name = _name(name, joined[at : at + self.block])
            self._answers[name] = Answered(key, begin)
            self._answers.move_to_end(name)
        while len(self._answers) > self.kept:
            self._answers.popitem(last=False)


def _name(before: int, ids: list[int]) -> int:
    """The same in every process: tuples of integers hash alike."""
    return hash((before, *ids)) & _MASK
