"""The standard prompt set: 100 prompts of our own wording, fixed for ever, so that baselines of different days compare.

profiles/prompts/README.md says what is in it. A change of one byte is a new version in a new file.
"""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kvbench.profile import root
from kvbench.workload.classes import Class
from kvbench.workload.mix import estimate

VERSION = "standard-v1"


class Standard(NamedTuple):
    """What is known of the set: its version, the SHA-256 of its file, and per prompt, in file order, tokens (estimated) and
    max_tokens."""

    version: str
    digest: str
    tokens: tuple[int, ...]
    max_tokens: tuple[int, ...]

    def median(self) -> int:
        """Tokens of the median prompt, an observed one."""
        return sorted(self.tokens)[(len(self.tokens) - 1) // 2]

    def beyond(self, context: int, count: int) -> int:
        """How many of the first `count` prompts may not fit into a context of so many tokens, answer included."""
        return sum(p + a > context for p, a in zip(self.tokens[:count], self.max_tokens[:count], strict=True))


def path() -> Path:
    return root() / "prompts" / f"{VERSION}.jsonl"


def standard_class() -> Class:
    """The set as a traffic class: file order, greedy sampling, each prompt with its own max_tokens."""
    return Class.model_validate({"source": {"file": path(), "format": "openai"}})


@cache  # the file never changes
def standard() -> Standard:
    """Raises ValueError where a line is not of this version: the file was mixed up."""
    data = path().read_bytes()
    records = [json.loads(line) for line in data.decode().splitlines()]
    for number, record in enumerate(records, 1):
        if record["version"] != VERSION:
            raise ValueError(f"{path()}:{number}: version {record['version']!r} in the file of {VERSION}")
    tokens = tuple(sum(estimate(message["content"]) for message in record["messages"]) for record in records)
    return Standard(VERSION, hashlib.sha256(data).hexdigest(), tokens, tuple(record["max_tokens"] for record in records))
