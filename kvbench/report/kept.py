"""What a run's baseline leaves for later runs (baseline.json), and what a run knows of its baseline before it starts."""

from pathlib import Path
from typing import Annotated, Any

import msgspec

NAME = "baseline.json"
Figure = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """baseline.json. tokens (of the prompt, not cached), ttft, tpot, e2e: by prompt, in the set's order; null where the request
    did not end ok.

    version, digest: of the prompt set. target: what was tested, as `kvbench.baseline.fingerprint` tells it. Times in s, powers
    in W. started: UTC, ISO 8601.
    """

    run: str
    started: str
    version: str
    digest: str
    target: dict[str, Any]
    tokens: list[Figure | None]
    ttft: list[Figure | None]
    tpot: list[Figure | None]
    e2e: list[Figure | None]
    idle_power: Figure | None = None
    base_power: Figure | None = None


class Layers(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per layer of a prefill of `tokens` tokens and of one decode step; how they are known, or the reason why not."""

    layers: int | None = None
    tokens: int | None = None
    prefill: Figure | None = None
    decode: Figure | None = None
    how: str | None = None
    reason: str | None = "the manifest does not say"


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """Of the manifest: the prompt set, what is tested, its layers as far as they are known, and the baseline to compare with.

    why: why there is none to compare with, "" where there is one.
    """

    version: str = ""
    digest: str = ""
    target: dict[str, Any] = {}
    layers: Layers = Layers()
    earlier: Kept | None = None
    why: str = "the manifest does not say"


def read(path: Path) -> Kept | None:
    """None where it is no whole baseline of this form."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Kept)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
