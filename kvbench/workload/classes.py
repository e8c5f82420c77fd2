"""Traffic classes as a scenario names them: how much of the traffic, how long, what is shared, how sampled, what is owed."""

from collections.abc import Mapping
from typing import Any, Literal, Self, cast

from pydantic import Field, GetJsonSchemaHandler, field_validator, model_serializer, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from kvbench.units import Share, Span
from kvbench.workload import Lengths
from kvbench.workload.lengths import LENGTHS, AnyLengths
from kvbench.workload.prompts import Prefixes, Source
from kvbench.workload.sampling import Sampling
from kvbench.workload.schedule import FixedPause, Think
from kvbench.workload.spec import SLACK, Spec, choices, written
from kvbench.workload.traces import TraceFile

Limit = Literal["response_ttft", "response", "ttft", "tpot", "e2e"]


def at_least_one(lengths: Lengths, name: str) -> Lengths:
    """`lengths`, which must not give 0: a prompt or an answer of no tokens is no request."""
    if lengths.bounds()[0] < 1:
        raise ValueError(f"{name} can be {lengths.bounds()[0]} tokens long: the least is 1")
    return lengths


class Output(Spec):
    """How long answers are: a number or a distribution of tokens, and whether the server is held to exactly that."""

    lengths: AnyLengths | None = Field(None, description="max_tokens of a request; left out where a trace or file brings its own")
    force: bool = Field(False, description="hold the server to the drawn length (ignore_eos, min_tokens)")

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        """`{dist: ..., force: true}` and plain numbers, as scenarios write them."""
        if isinstance(value, Mapping) and "lengths" not in value:
            rest = {name: inner for name, inner in value.items() if name != "force"}
            return ({"lengths": rest} if rest else {}) | {name: inner for name, inner in value.items() if name == "force"}
        return value if isinstance(value, (Mapping, Output)) else {"lengths": value}

    @field_validator("lengths")
    @classmethod
    def _some(cls, value: Lengths | None) -> Lengths | None:
        return None if value is None else at_least_one(value, "output")

    @model_serializer
    def _write(self) -> dict[str, Any]:
        flat = {} if self.lengths is None else written(cast(Spec, self.lengths), "dist", LENGTHS)
        return flat | {"force": self.force}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        force = {"type": "boolean", "default": False, "description": cls.model_fields["force"].description}
        bare = {"type": "object", "properties": {}, "additionalProperties": False}
        tree = choices("dist", LENGTHS, {"type": "integer", "minimum": 1}, bare)
        for form in tree["anyOf"]:
            if "properties" in form:
                form["properties"] = {**form["properties"], "force": force}
        return {"description": cls.__doc__, **tree}


class Sessions(Spec):
    """Conversations: each turn's prompt is the whole history, real answers included, and something new."""

    turns: AnyLengths = Field(description="turns of a conversation: a number or a distribution")
    think: Think = Field(FixedPause(mean=0.0), description="from an answer to the next turn: 5s or {dist: exponential, mean: 5s}")

    @field_validator("turns")
    @classmethod
    def _some(cls, value: Lengths) -> Lengths:
        if value.bounds()[0] < 1:
            raise ValueError("a session can have 0 turns: the least is 1")
        return value


class Class(Spec):
    """One traffic class: generated prompts (`prompt`), real ones (`source`) or a recorded trace (`trace`)."""

    weight: Share = Field(1.0, le=1, description="share of the arrivals; the classes of a workload add up to 100%")
    prompt: AnyLengths | None = Field(None, description="prompt tokens, the nonce included, a shared prefix not")
    output: Output | None = Field(None, description="answer tokens; without it a trace's or file's own, a trace's forced")
    prefixes: Prefixes | None = Field(None, description="shared beginnings, on top of `prompt`")
    sessions: Sessions | None = Field(None, description="conversations; `prompt` is then the new part of each turn")
    sampling: Sampling = Field(Sampling.model_validate({}), description="how answers are sampled")
    slo: dict[Limit, Span] = Field({}, description="limits of one request: what goodput counts")
    source: Source | None = Field(None, description="real prompts from a file")
    trace: TraceFile | None = Field(None, description="a recorded trace: lengths, sharing and sessions of its rows, in its order")

    @field_validator("prompt")
    @classmethod
    def _some(cls, value: Lengths | None) -> Lengths | None:
        return None if value is None else at_least_one(value, "prompt")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = [name for name in ("prompt", "source", "trace") if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise ValueError(f"{' and '.join(kinds) or 'none'} given: a class has exactly one of prompt, source and trace")
        if self.prompt is not None and (self.output is None or self.output.lengths is None):
            raise ValueError("output is missing: a class with `prompt` says how long answers are, such as output: 128")
        if self.prefixes is not None and self.prompt is None:
            raise ValueError(f"prefixes go with `prompt`: a {kinds[0]} brings its own shared beginnings")
        if self.sessions is not None and self.trace is not None:
            raise ValueError("sessions go with `prompt` and `source`: a trace brings its own sessions")
        return self

    def mean_tokens(self) -> tuple[float, float] | None:
        """Expected (prompt, answer) tokens of an arrival, all its turns together; None where only the file knows."""
        if self.prompt is None or self.output is None or self.output.lengths is None:
            return None
        turns, prompt, output = 1.0, self.prompt.mean(), self.output.lengths.mean()
        prefix = self.prefixes.share * self.prefixes.tokens.mean() if self.prefixes else 0.0
        pairs = 0.0  # how often a turn's parts are sent again in later turns: the mean of t (t - 1) / 2
        if self.sessions:
            turns = self.sessions.turns.mean()
            pairs = _pairs(self.sessions.turns)
        return turns * (prefix + prompt) + pairs * (prompt + output), turns * output

    def longest(self) -> tuple[int, int] | None:
        """The most (prompt, prompt and answer) tokens of one request, for the model's context; None where only the file knows."""
        if self.prompt is None or self.output is None or self.output.lengths is None:
            return None
        prompt, output = self.prompt.bounds()[1], self.output.lengths.bounds()[1]
        prefix = self.prefixes.tokens.bounds()[1] if self.prefixes else 0
        turns = self.sessions.turns.bounds()[1] if self.sessions else 1
        whole = prefix + turns * (prompt + output)
        return whole - output, whole


def _pairs(turns: Lengths) -> float:
    """The mean of t (t - 1) / 2, from the quantiles of t."""
    steps = 1000
    return sum(t * (t - 1) / 2 for t in (turns.quantile((i + 0.5) / steps) for i in range(steps))) / steps


def shares(classes: Mapping[str, Class]) -> dict[str, float]:
    """The classes' weights as shares that add up to 1. Raises ValueError where they do not add up to 100 %."""
    total = sum(cls.weight for cls in classes.values())
    if round(abs(total - 1), 9) > SLACK:
        named = ", ".join(f"{name} {100 * cls.weight:.4g}%" for name, cls in classes.items())
        raise ValueError(f"the weights of the classes add up to {100 * total:.6g} % ({named}): they must add up to 100 %")
    return {name: cls.weight / total for name, cls in classes.items()}
