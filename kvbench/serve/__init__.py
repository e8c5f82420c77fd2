"""Serving the embedded engine over HTTP as vLLM serves a model: the door.

`kvbench serve` is a real server to whoever talks to it: OpenAI's API, vLLM's errors, metrics and KV events. Behind it is a
Machine (kvbench.engine), paced by the wall clock. What it writes is made up, yet exact: a reply that comes back in a later
prompt is the same tokens, and its blocks are found.
"""

from typing import NamedTuple, Protocol


class Written(NamedTuple):
    """An answer: its token ids, and the text of each of them, as many as there are ids."""

    ids: list[int]
    texts: list[str]


class Tokens(Protocol):
    """Text to token ids and back, and made-up answers.

    decode(encode(text)) is the text. encode of an answer's joined texts gives its ids again, where it stands alone (a chat's
    message) and, for one that is not `opening`, behind any text (a completion).
    """

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str:
        """ValueError for an id that is none."""

    def write(self, key: int, n: int, opening: bool, start: int = 0) -> Written:
        """n tokens, after the first `start` ones, of the answer named `key`; `opening`: nothing stands before the answer, so it
        begins without a space."""
