"""The target as a scenario names it: the embedded engine, a real server, or nothing. Data; compose.py builds what answers."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from kvbench.engine.faults import FAULTS, SlowTier, by_node
from kvbench.engine.groups import LayersSpec, sizes
from kvbench.engine.knob import layers_plan, settings
from kvbench.engine.node import Role
from kvbench.engine.tiers import TiersSpec
from kvbench.fleet import ClusterSpec
from kvbench.launch import Launch
from kvbench.profile import (
    EngineProfile,
    Hardware,
    Model,
    kv_blocks,
    kv_groups,
    layout,
    load_engine,
    load_hardware,
    load_model,
    names,
)
from kvbench.spec import OneOf, fault, hint, plain
from kvbench.target.connection import Timeouts
from kvbench.units import Share

_SECRET = re.compile(r"authorization|cookie|token|secret|password|api[-_]?key", re.IGNORECASE)
_SECRET_FIELD = re.compile(r"authorization|secret|password|api[-_]?key", re.IGNORECASE)  # min_tokens is none
_ENVIRONMENT = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_URL = re.compile(r"https?://[^/\s?#@]+(/[^\s?#@]*)?")
_OURS = ("messages", "prompt", "stream", "model")  # kvbench's own business; other fields of a body may be set or removed


class Spec(BaseModel):
    """Part of a scenario: immutable, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def under(folder: object, name: str) -> Path:
    """The file `name` as a scenario in `folder` means it. Raises ValueError where there is no such file."""
    path = Path(str(folder or "."), name).expanduser()
    if not path.is_file():
        raise ValueError(f"no file {str(path)!r} (paths are relative to the scenario file)")
    return path


class Sim(Spec):
    """The embedded KV-cache engine: a model on hardware, in virtual time."""

    model: str = Field(description="a model profile, for example llama-3.1-8b")
    hardware: str = Field(description='a hardware profile, with a count where there are several: "8 x h100"')
    engine: str = Field("vllm", description="an engine profile")
    block: Annotated[int, Field(ge=1, le=65536)] | None = Field(None, description="tokens per KV block")
    settings: dict[str, Any] = Field({}, description="engine settings in place of the engine profile's")
    cache_log: Annotated[Share, Field(gt=0, le=1)] | None = Field(
        None, description="keep the cache's accesses in cache.jsonl, for this share of the blocks"
    )
    layers: LayersSpec | None = Field(None, description="groups of layers with their own codec, block size and quota")
    cache_profile_aggressiveness: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="0 saves compute, 1 saves memory: codecs, retention and admission, where not written out"
    )
    cluster: ClusterSpec | None = Field(None, description="several engines behind one router; `hardware` is each node's")
    tiers: TiersSpec | None = Field(None, description="what lies under the device's KV memory: host, drives, a remote store")
    faults: Annotated[list[Annotated[Any, OneOf("kind", FAULTS)]], Field(max_length=1000)] = Field(
        [], description="what goes wrong, and when"
    )

    @model_validator(mode="after")
    def _fits(self) -> "Sim":
        """Every profile exists and the model fits; each fault at its own key."""
        parts: list[Any] = []
        for key, read in (("model", self.load_model), ("hardware", self.load_hardware), ("engine", self.load_engine)):
            try:
                parts.append(read())
            except ValueError as error:
                at = "settings" if key == "engine" and self.settings and self.engine in names("engines") else key
                fault((at,), str(error))
        if self.cluster is None:
            try:
                kv_blocks(*parts)
            except ValueError as error:
                fault(("hardware",), str(error))
        self._nodes(*parts)
        layers = self.load_layers()
        if layers is not None:
            try:
                sizes(layers, *parts)
            except ValueError as error:
                fault(("layers", "groups") if self.layers is not None else ("cache_profile_aggressiveness",), str(error))
        tiers = [name for name, tier in self.tiers.named() if tier.bytes > 0] if self.tiers else []
        for number, each in enumerate(self.faults):
            if isinstance(each, SlowTier) and each.tier not in tiers:
                known = ", ".join(tiers) or "there is none"
                fault(("faults", number, "tier"), f"{each.tier!r} is no tier of target.tiers ({known})")
        return self

    def _nodes(self, model: Model, hardware: Hardware, engine: EngineProfile) -> None:
        """The model fits on every node, and faults are for nodes that are there."""
        if (self.tiers or self.cluster) and any(kind != "full" for _, kind, *_ in kv_groups(model)):
            what = "tiers below the device" if self.tiers else "a cluster"
            fault(
                ("model",),
                f"{self.model} has layers that are not full attention: {what} cannot hold or move their KV here. "
                "Leave target.tiers and target.cluster out, or take a model of full attention",
            )
        try:
            by_node(self.faults, len(self.cluster.members()) if self.cluster else 1)
        except ValueError as error:
            fault(("faults",), str(error))
        if self.cluster is not None:
            try:
                self.cluster.fits(model, self.hardware, engine, self.faults)
            except ValueError as error:
                fault(("cluster",), str(error))

    def nodes(self) -> list[tuple[Hardware, Role]]:
        """Hardware and role of each node of a cluster, by number; of a single engine its own."""
        if self.cluster is None:
            return [(self.load_hardware(), "mixed")]
        return [(load_hardware(one.hardware or self.hardware), one.role) for one in self.cluster.members()]

    def room(self, hardware: Hardware) -> int:
        """Tokens that the cache of one engine on `hardware` holds."""
        model, engine, layers = self.load_model(), self.load_engine(), self.load_layers()
        if layers is not None:
            return min((one.blocks - 1) * one.block for one in sizes(layers, model, hardware, engine))
        blocks, arranged = kv_blocks(model, hardware, engine), layout(model, engine.block, hardware.count)
        if len(arranged.groups) == 1:
            return (blocks - 1) * engine.block  # one is never used
        return arranged.tokens(blocks, engine.limit(model), engine.max_num_batched_tokens)

    def load_model(self) -> Model:
        return load_model(self.model)

    def load_hardware(self) -> Hardware:
        return load_hardware(self.hardware)

    def load_engine(self) -> EngineProfile:
        knob = self.cache_profile_aggressiveness
        chosen = ({} if knob is None else settings(knob)) | self.settings
        return load_engine(self.engine, **chosen, **({"block": self.block} if self.block else {}))

    def load_layers(self) -> LayersSpec | None:
        """The groups as written out, else as the knob has them; None where neither is given."""
        if self.layers is not None or self.cache_profile_aggressiveness is None:
            return self.layers
        return layers_plan(self.cache_profile_aggressiveness, self.load_model().layers)


class Http(Spec):
    """A real server that speaks OpenAI's API (vLLM, SGLang, llama.cpp, TensorRT-LLM, Dynamo, ...)."""

    url: str | None = Field(None, description="http(s)://host:port, with a path prefix where the server has one")
    urls: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = Field(None, description="several, used in turn")
    api: Literal["chat", "completions"] = Field("chat", description="/v1/chat/completions or /v1/completions")
    stream: bool = Field(True, description="ask for a stream; without one there is no time to first token")
    model: str | None = Field(None, description="the model to ask for; the server's first where not given")
    key_env: str | None = Field(None, description="environment variable that holds the API key")
    headers: dict[str, str] = Field({}, description="further headers; a value $NAME is read from the environment")
    ca_file: str | None = Field(None, description="certificates to trust, in place of the system's")
    extra_body: dict[str, Any] = Field({}, description="further fields of every request body, sent as they are")
    timeouts: Timeouts = Field(Timeouts(), description="how long to wait, each on its own")
    retries: Annotated[int, Field(ge=0, le=100)] = Field(0, description="more tries after a failed one, counted")
    reset: Literal["auto", "vllm", "sglang", "dynamo", "llamacpp"] | None = Field(
        None,
        description="empty the server's prefix cache before the run, in this server's way; auto: in that of the server found",
    )
    tokenizer: str | None = Field(None, description="words, server, ids or a tokenizer.json; the best there is if not given")
    launch: Launch | None = Field(None, description="start this server with the run, and end it after the run")

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        return value if value is None else _url(value)

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, value: list[str] | None) -> list[str] | None:
        return value if value is None else [_url(url) for url in value]

    @field_validator("key_env")
    @classmethod
    def _is_name(cls, value: str | None) -> str | None:
        if value is not None and not _NAME.fullmatch(value):
            raise ValueError("not the name of an environment variable (the key itself never stands in a scenario)")
        return value

    @field_validator("headers")
    @classmethod
    def _no_secrets(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or re.search(r"[\r\n\0]", text):
                fault((name,), "not an HTTP header")
            if _SECRET.search(name) and not _ENVIRONMENT.fullmatch(text):
                fault((name,), "a secret comes from the environment: use key_env, or write the header's value as $NAME")
        return value

    @field_validator("extra_body")
    @classmethod
    def _not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name in _OURS:
                fault((name,), "is set by kvbench (target.model, target.stream, workload)")
            if _SECRET_FIELD.search(name):
                fault((name,), "a secret does not stand in a scenario: use key_env or headers with $NAME")
        return dict(plain(value))

    @field_validator("ca_file")
    @classmethod
    def _ca_exists(cls, value: str | None, info: ValidationInfo) -> str | None:
        return value if value is None else str(under((info.context or {}).get("folder"), value))

    @field_validator("tokenizer")
    @classmethod
    def _known_tokenizer(cls, value: str | None, info: ValidationInfo) -> str | None:
        kinds = ("words", "server", "ids")
        if value is None or value in kinds:
            return value
        if "/" in value or "." in value:
            return str(under((info.context or {}).get("folder"), value))
        raise ValueError(f"unknown tokenizer {value!r}; known are {', '.join(kinds)} or a file{hint(value, kinds)}")

    @model_validator(mode="after")
    def _one_address(self) -> "Http":
        if (self.url is None) == (self.urls is None):
            fault((), "give either `url: http://host:port` or `urls: [...]`")
        if self.tokenizer == "ids" and self.api == "chat":
            fault(("tokenizer",), "token ids need api: completions (the chat API takes text only)")
        if "first" in self.timeouts.model_fields_set and self.timeouts.total < self.timeouts.first:  # a default gives way
            fault(("timeouts", "total"), "total is shorter than first: the first-byte limit could never be reached")
        return self

    def addresses(self) -> list[str]:
        return self.urls or [self.url or ""]


class Null(Spec):
    """Answers at once: what is measured is kvbench itself."""


def _url(text: str) -> str:
    """A base URL without its last slash. Raises ValueError; the message never holds a password."""
    if "@" in text:
        raise ValueError("a user or password does not stand in a URL: use key_env")
    if not _URL.fullmatch(text):
        raise ValueError(f"{text!r} is not a server's address: write http://host:port")
    return text.rstrip("/").removesuffix("/v1")


TARGETS: dict[str, type[Spec]] = {"sim": Sim, "http": Http, "null": Null}
