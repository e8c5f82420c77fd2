"""How KV is stored: bits per number with what goes along, what it costs to encode and read, what is lost. Data only.

Ratios are against 16-bit KV unless said otherwise. Effective bits count scales, zeros, anchors and indices.
"""

from typing import Self

from pydantic import Field, model_validator

from kvbench.profile import Profile, read
from kvbench.units import Duration, Share

BEFORE = 16  # bits per number of what nominal and effective ratios are measured against


class Codec(Profile):
    """A form of KV. Times are of one device's share of one token in one layer, where not said otherwise."""

    bits: float = Field(gt=0, le=16, description="bits per number that is kept")
    group: int = Field(default=1, ge=1, description="numbers that share one `meta_bits`")
    meta_bits: float = Field(default=0, ge=0, description="bits of scale and zero per group")
    keep: Share = Field(default=1.0, gt=0, le=1, description="share of the tokens that is kept")
    index_bits: float = Field(default=0, ge=0, description="bits that name a kept token, per `index_per` numbers")
    index_per: int = Field(default=256, ge=1, description="numbers one index stands for: keys and values of a head of 128")
    anchor_bits: float | None = Field(
        default=None, gt=0, le=16, description="bits per number of anchor tokens, where deltas are kept"
    )
    anchor_every: int = Field(default=1, ge=1, description="one token of so many is an anchor")
    min_tokens: int = Field(default=0, ge=0, description="KV of a sequence shorter than this stays as the model keeps it")
    encode: Duration = Field(
        default=0.0, description="to encode one token of one layer, in the step that fills a block or beside"
    )
    decode: Duration = Field(default=0.0, description="to decode one token of one layer, beyond reading its bytes")
    decode_step: Duration = Field(default=0.0, description="once per group of layers in every step that decodes")
    times_source: str = Field(description="where the times come from; `estimate` where nobody measured them")
    loss: float | None = Field(default=None, ge=0, description="relative change of perplexity")
    loss_source: str = Field(description="where the loss comes from, or why it is not known")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.anchor_bits is None) != (self.anchor_every == 1):
            raise ValueError("anchor_bits and anchor_every (2 or more) go together")
        return self

    @property
    def nominal_ratio(self) -> float:
        """16 / bits, of the share that is kept: what the name promises."""
        return BEFORE / (self.bits * self.keep)

    @property
    def effective_bits(self) -> float:
        """Bits per number of the original, everything included."""
        anchors = 0.0 if self.anchor_bits is None else (self.anchor_bits - self.bits) / self.anchor_every
        return self.keep * (self.bits + anchors + self.meta_bits / self.group + self.index_bits / self.index_per)

    @property
    def effective_ratio(self) -> float:
        return BEFORE / self.effective_bits


def load_codec(name: str) -> Codec:
    """ValueError naming the known ones and the nearest where there is none."""
    return Codec.model_validate(read("codecs", name))
