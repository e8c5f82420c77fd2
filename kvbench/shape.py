"""The shape of a transformer: enough for its size, for what it keeps per token or sequence, and for the work of one token.

Sizes are bytes. What is kept: full attention kv_heads x (key width + value width) per token; sliding windows the same, of which
only the last `window` tokens are needed; latent attention (kv_rank + rope_dim) per token, keys and values in one; linear
attention and Mamba a constant per sequence. Formulas: docs/guides/size.md.
"""

from typing import Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Keeps = Literal["full", "window", "linear"]


class Profile(BaseModel):
    """Data with a name and a source, from profiles/."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = ""
    source: str = Field(description="where the numbers come from")


class Latent(BaseModel):
    """Multi-head latent attention: what is cached is one compressed vector per token and layer."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kv_rank: int = Field(gt=0, description="kv_lora_rank: width of the cached latent")
    rope_dim: int = Field(gt=0, description="qk_rope_head_dim: width of the cached rotary key")
    q_rank: int = Field(ge=0, description="q_lora_rank; 0 where queries are not compressed")
    nope_dim: int = Field(gt=0, description="qk_nope_head_dim")
    v_dim: int = Field(gt=0, description="v_head_dim")
    index_bytes: float = Field(default=0, ge=0, description="a sparse-attention indexer's own bytes per token and layer")


class Experts(BaseModel):
    """Mixture of experts: every token passes through `active` of `count` routed experts and all `shared` ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    count: int = Field(gt=0)
    active: int = Field(gt=0)
    intermediate: int = Field(gt=0, description="inner width of one expert")
    shared: int = Field(default=0, ge=0)
    dense_layers: int = Field(default=0, ge=0, description="layers with an ordinary MLP")


class Layers(BaseModel):
    """`layers` layers of one kind in a model that has several. What is left out is the model's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    layers: int = Field(gt=0, description="how many; where they stand does not matter to sizes")
    kind: Keeps = Field(default="full", description="what such a layer keeps: every token, a window, or one state per sequence")
    heads: int | None = Field(default=None, gt=0)
    kv_heads: int | None = Field(default=None, gt=0)
    head_dim: int | None = Field(default=None, gt=0)
    v_head_dim: int | None = Field(default=None, gt=0)
    window: int | None = Field(default=None, gt=0, description="tokens a window layer looks back on, its own included")
    state: int | None = Field(default=None, gt=0, description="bytes a linear layer keeps per sequence")
    projections: int | None = Field(default=None, gt=0, description="weights of one layer's projections, where not computed")

    @model_validator(mode="after")
    def _belongs(self) -> Self:
        for key, kind in (("window", "window"), ("state", "linear")):
            if (getattr(self, key) is not None) != (self.kind == kind):
                raise ValueError(f"`{key}` goes with kind: {kind}, and only there (this is kind: {self.kind})")
        if self.kind == "linear" and self.projections is None:
            raise ValueError("kind: linear needs `projections`: its weights do not follow from heads")
        return self


class Kept(NamedTuple):
    """What one kind of layer keeps on each device. `token`: bytes per token and layer; `state`: per sequence and layer."""

    layers: int
    kind: Keeps
    window: int | None
    token: float
    state: float


class Model(Profile):
    """A transformer's shape. Layers of different kinds are listed in `kinds`; without it all are full attention, alike."""

    layers: int = Field(gt=0)
    hidden: int = Field(gt=0)
    heads: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    v_head_dim: int | None = Field(default=None, gt=0, description="width of values where it is not that of keys")
    intermediate: int = Field(gt=0, description="inner width of the dense MLP")
    mlp_matrices: Literal[2, 3] = Field(default=3, description="3 where the MLP is gated (SwiGLU), 2 where it is not")
    vocab: int = Field(gt=0)
    tied_embeddings: bool = False
    positions: int = Field(default=0, ge=0, description="learned position embeddings, where the model has them")
    max_len: int = Field(gt=0, description="longest context")
    weight_bytes: float = Field(default=2, gt=0, description="bytes per weight, the mean where they differ")
    kv_bytes: float = Field(default=2, gt=0, description="bytes per cached number")
    latent: Latent | None = None
    experts: Experts | None = None
    kinds: tuple[Layers, ...] = Field(default=(), description="layers by what they keep; their counts add up to `layers`")

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        listed = sum(part.layers for part in self.kinds)
        if self.kinds and listed != self.layers:
            raise ValueError(f"kinds: {listed} layers are listed and the model has {self.layers}")
        if self.kinds and self.latent is not None and any(part.kind == "window" for part in self.kinds):
            raise ValueError("kinds: a window of latent attention is not known here")
        return self

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention projections, in a layer that is nothing special."""
        if self.latent is None:
            return self._projections(self.heads, self.kv_heads, self.head_dim, self.v_head_dim or self.head_dim)
        m = self.latent
        asked = self.heads * (m.nope_dim + m.rope_dim)
        query = (self.hidden + asked) * m.q_rank if m.q_rank else self.hidden * asked
        keys = self.hidden * (m.kv_rank + m.rope_dim) + m.kv_rank * self.heads * (m.nope_dim + m.v_dim)
        return query + keys + self.heads * m.v_dim * self.hidden

    def _projections(self, heads: int, kv_heads: int, head_dim: int, v_head_dim: int) -> int:
        return self.hidden * (heads + kv_heads) * (head_dim + v_head_dim)

    def _mixing(self, part: Layers) -> int:
        """Weights of one layer's projections."""
        if part.projections is not None:
            return part.projections
        if self.latent is not None:
            return self.attention_parameters
        head_dim = part.head_dim or self.head_dim
        v_head_dim = part.v_head_dim or part.head_dim or self.v_head_dim or self.head_dim
        return self._projections(part.heads or self.heads, part.kv_heads or self.kv_heads, head_dim, v_head_dim)

    @property
    def expert_parameters(self) -> int:
        """Weights of one routed expert in one layer; 0 for dense models."""
        return 0 if self.experts is None else self.mlp_matrices * self.hidden * self.experts.intermediate

    @property
    def expert_layers(self) -> int:
        return 0 if self.experts is None else self.layers - self.experts.dense_layers

    @property
    def common_parameters(self) -> int:
        """Weights that every token passes through in the layers: attention, dense MLPs, shared experts, routers."""
        parts = self.kinds or (Layers(layers=self.layers),)
        total = sum(part.layers * self._mixing(part) for part in parts)
        total += (self.layers - self.expert_layers) * self.mlp_matrices * self.hidden * self.intermediate
        if self.experts is not None:
            total += self.expert_layers * (self.experts.shared * self.expert_parameters + self.hidden * self.experts.count)
        return total

    @property
    def active_parameters(self) -> int:
        """Weights one token is multiplied with in the layers (the output head, used by sampled tokens only, is apart)."""
        return self.common_parameters + (self.expert_layers * self.experts.active * self.expert_parameters if self.experts else 0)

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        """All weights. Norms and biases (well below 0.1 %) are left out."""
        routed = self.expert_layers * self.experts.count * self.expert_parameters if self.experts else 0
        embeddings = (1 if self.tied_embeddings else 2) * self.head_parameters + self.positions * self.hidden
        return self.common_parameters + routed + embeddings

    @property
    def weights(self) -> float:
        """Bytes of all weights."""
        return self.parameters * self.weight_bytes

    def kept(self, count: int = 1) -> list[Kept]:
        """What each kind of layer keeps on each of `count` tensor-parallel devices. Fewer heads than devices are replicated."""
        found = []
        for part in self.kinds or (Layers(layers=self.layers),):
            token, state = 0.0, 0.0
            if part.kind == "linear":
                state = (part.state or 0) / count
            elif self.latent is not None:
                token = (self.latent.kv_rank + self.latent.rope_dim) * self.kv_bytes + self.latent.index_bytes
            else:
                head_dim = part.head_dim or self.head_dim
                wide = head_dim + (part.v_head_dim or part.head_dim or self.v_head_dim or self.head_dim)
                token = -(-(part.kv_heads or self.kv_heads) // count) * wide * self.kv_bytes
            found.append(Kept(part.layers, part.kind, part.window, token, state))
        return found

    def kv_token_bytes(self, count: int = 1) -> float:
        """KV bytes per token on each of `count` tensor-parallel devices, while a sequence is within every window."""
        return sum(part.layers * part.token for part in self.kept(count))
