"""How answers are to be sampled: drawn per request, sent and recorded under the names the API has for them."""

from typing import Annotated, Any, Self

from numpy.random import Generator
from pydantic import BeforeValidator, Field, model_validator

from kvbench.units import Share
from kvbench.workload.spec import SLACK, Spec, weights


def _weighted(value: Any) -> dict[Any, float]:
    """Shares of `0.7` (always) or of `{0: 50%, 0.7: 50%}`."""
    return {value: 1.0} if isinstance(value, (int, float)) and not isinstance(value, bool) else weights(value)


WEIGHED = BeforeValidator(_weighted, json_schema_input_type=float | dict[str, str | float])
Temperatures = Annotated[dict[Annotated[float, Field(ge=0, le=2)], float], WEIGHED]
TopPs = Annotated[dict[Annotated[float, Field(gt=0, le=1)], float], WEIGHED]
TopKs = Annotated[dict[Annotated[int, Field(ge=-1)], float], WEIGHED]
MOST_ANSWERS = 128
Counts = Annotated[dict[Annotated[int, Field(ge=1, le=MOST_ANSWERS)], float], WEIGHED]


NEUTRAL = {"frequency": 0.0, "presence": 0.0, "repetition": 1.0}


class Penalty(Spec):
    """One combination of penalties. What is left at its neutral value is not sent."""

    frequency: float = Field(0.0, ge=-2, le=2, description="frequency_penalty")
    presence: float = Field(0.0, ge=-2, le=2, description="presence_penalty")
    repetition: float = Field(1.0, gt=0, le=2, description="repetition_penalty (not in OpenAI's API); 1 is neutral")
    weight: Share | None = Field(None, description="share of requests; all combinations have one, or none (equal shares)")

    def fields(self) -> dict[str, float]:
        """What is sent."""
        return {f"{name}_penalty": getattr(self, name) for name, neutral in NEUTRAL.items() if getattr(self, name) != neutral}


class Sampling(Spec):
    """Sampling features of a traffic class. What is not named is not sent, and the server's own default holds."""

    temperature: Temperatures | None = Field(None, description="0 to 2, or {0: 50%, 0.7: 50%}; 0 is greedy and is sent")
    top_p: TopPs | None = Field(None, description="above 0 to 1, or values with weights")
    top_k: TopKs | None = Field(None, description="-1 (all) and up, or values with weights; not in OpenAI's API")
    n: Counts | None = Field(None, description="answers per request, or values with weights; 1 is not sent")
    beam_width: Counts | None = Field(None, description="1 is not sent; more is sent as use_beam_search with n = width")
    penalties: tuple[Penalty, ...] = Field((), description="[{}, {frequency: 0.2}, {presence: 0.5, repetition: 1.1}]")
    seed: int | None = Field(None, description="sent with every request as it is")
    stop: tuple[str, ...] = Field((), max_length=16, description="sent with every request as it is")

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if max(self.n or [1]) > 1 and max(self.beam_width or [1]) > 1:
            raise ValueError("n and beam_width are both above 1: the API uses n for the width, so that one of them must stay 1")
        given = [penalty.weight for penalty in self.penalties if penalty.weight is not None]
        if given and len(given) < len(self.penalties):
            raise ValueError("penalties: some have a weight and some have none; all or none must")
        if given and round(abs(sum(given) - 1), 9) > SLACK:
            raise ValueError(f"penalties: the weights add up to {100 * sum(given):.6g} %: they must add up to 100 %")
        return self

    def draw(self, rng: Generator) -> dict[str, Any]:
        """The fields of one request. Each feature has its own draw, so that adding one moves no other."""
        luck = rng.random(6)
        drawn: dict[str, Any] = {}
        for (name, options), u in zip(self._plain().items(), luck, strict=False):
            if options:
                drawn[name] = _pick(list(options.items()), u)
        if drawn.get("n") == 1:
            del drawn["n"]
        if self.beam_width and (width := _pick(list(self.beam_width.items()), luck[4])) > 1:
            drawn |= {"use_beam_search": True, "n": width}
        if self.penalties:
            drawn |= _pick(self._combinations(), luck[5]).fields()
        if self.seed is not None:
            drawn["seed"] = self.seed
        if self.stop:
            drawn["stop"] = list(self.stop)
        return drawn

    def features(self) -> dict[str, dict[str, float]]:
        """What can be drawn, with its shares, for the plan and the features: {"temperature": {"0": 0.5, "0.7": 0.5}, ...}."""
        options = self._plain() | {"beam_width": self.beam_width}
        table = {name: {f"{value:g}": share for value, share in given.items()} for name, given in options.items() if given}
        combinations: dict[str, float] = {}
        for penalty, share in self._combinations():
            label = ", ".join(f"{name} {value:g}" for name, value in penalty.fields().items()) or "none"
            combinations[label] = combinations.get(label, 0.0) + share
        return table | ({"penalties": combinations} if combinations else {})

    def mean_n(self) -> float:
        """Expected answers (or beams) per request."""
        return _mean(self.n) * _mean(self.beam_width)  # one of them is always 1

    def _plain(self) -> dict[str, dict[Any, float] | None]:
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "n": self.n}

    def _combinations(self) -> list[tuple[Penalty, float]]:
        return [(p, 1 / len(self.penalties) if p.weight is None else p.weight) for p in self.penalties]


def _mean(options: dict[int, float] | None) -> float:
    return sum(value * share for value, share in options.items()) if options else 1.0


def _pick(options: list[tuple[Any, float]], luck: float) -> Any:
    """The option at which the running sum of shares passes `luck`, a number in [0, 1)."""
    for value, share in options:
        luck -= share
        if luck < 0:
            return value
    return options[-1][0]  # where shares were given as 33.3 % three times
