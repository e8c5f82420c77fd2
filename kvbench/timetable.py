"""When a run does what, as the scenario names it: baseline, warm-up, steady (in epochs), stress, drain; and its windows."""

import itertools
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, Field, GetJsonSchemaHandler, ValidationInfo, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from kvbench import units
from kvbench.core import Seconds
from kvbench.endpoint import Spec, under
from kvbench.level import Ladder
from kvbench.spec import OneOf, fault
from kvbench.units import Duration, Multiple, Share, Span
from kvbench.warmup import LEAST
from kvbench.workload.arrivals import ARRIVALS
from kvbench.workload.classes import Class, shares
from kvbench.workload.schedule import Closed
from kvbench.workload.traces import TraceFile

Count = Annotated[int, Field(ge=1, le=10**9)]
SHAPES: dict[str, type[Any]] = {**ARRIVALS, "trace": TraceFile, "closed": Closed}
EPOCHS = 10_000  # most epochs of a run
RUNGS = 10_000  # most steps of stress


def beside(trace: TraceFile, info: ValidationInfo, *path: str) -> TraceFile:
    """`trace` with its file's path from here, not from the scenario. A missing file is a fault at `path`.file."""
    try:
        return trace.model_copy(update={"file": str(under((info.context or {}).get("folder"), trace.file))})
    except ValueError as error:
        fault((*path, "file"), str(error))


def _add_up(value: dict[str, Class], info: ValidationInfo) -> dict[str, Class]:
    shares(value)
    found = dict(value)
    for name, one in value.items():
        if not re.fullmatch(r"[\w-]{1,64}", name):
            fault((name,), "a class name is letters, digits, - and _")
        if one.trace:
            found[name] = one.model_copy(update={"trace": beside(one.trace, info, name, "trace")})
    return found


Classes = Annotated[dict[str, Class], Field(min_length=1, max_length=1000), AfterValidator(_add_up)]


class Baseline(Spec):
    """The standard prompt set, one prompt at a time, before anything else: cold start, unloaded latency, idle power."""

    prompts: Annotated[int, Field(ge=1, le=100)] = Field(100, description="how many of the 100 standard prompts")
    idle_power: Duration = Field(0.0, description="how long nothing is sent before the first of them, so that idle power shows")


class Skip(Spec):
    """No warm-up: the first measured request meets the server as it is."""


class Fixed(Spec):
    """So many requests, or so long, with content that no measured request shares. The measured shape, from its start."""

    requests: Count | None = Field(None, description="how many requests")
    for_: Span | None = Field(None, alias="for", description="how long")

    @model_validator(mode="after")
    def _one_bound(self) -> "Fixed":
        if (self.requests is None) == (self.for_ is None):
            fault((), "a fixed warm-up has one bound: `requests: 20` or `for: 30s`")
        return self


class Prefill(Spec):
    """Fills a share of the KV cache: prompts of the workload's lengths, one-token answers, a few at a time, no law in between."""

    fill: Share = Field(gt=0, le=1, validation_alias=AliasChoices("fill", "prefill"), description="the share that is filled")
    content: Literal["own", "shared"] = Field(
        "own", description="own: nothing that a measured request shares; shared: the run's own prefix groups, with other endings"
    )
    capacity: Count | None = Field(None, description="tokens that the cache holds, where the target does not say it")
    concurrency: Annotated[int, Field(ge=1, le=10_000)] = Field(4, description="requests in flight")
    max: Span = Field(600.0, description="ends it also where the share is not reached")
    requests: Count = Field(20_000, description="so does this many requests")


class Dynamic(Spec):
    """The measured shape with content of its own, until TTFT and throughput are stationary (MSER-5), within bounds."""

    min: Duration = Field(20.0, description="not before")
    max: Span = Field(300.0, description="ends it also where they never are")
    batch: Span = Field(5.0, description=f"whole seconds whose mean is one value of the test, which needs {LEAST} of them")

    @model_validator(mode="after")
    def _order(self) -> "Dynamic":
        if self.batch % 1 or self.batch > 60:
            fault(("batch",), "must be whole seconds, 1s to 60s")
        if self.min > self.max:
            fault(("min",), f"is longer than max, {units.duration(self.max)}")
        if self.max < LEAST * self.batch:
            batch, needs = units.duration(self.batch), units.duration(LEAST * self.batch)
            fault(("max",), f"the test needs {LEAST} batches of {batch}, so at least {needs} (or a shorter `batch`)")
        return self


class OnDemand(Spec):
    """No phase: a prefix group is warm after its first use, and first uses are kept apart from the headline."""


WARMUPS: dict[str, type[Spec]] = {"none": Skip, "fixed": Fixed, "prefill": Prefill, "dynamic": Dynamic, "on_demand": OnDemand}


class _Policy(OneOf):
    """A warm-up by its policy; `{prefill: 50%}` is short for `{policy: prefill, fill: 50%}`."""

    def read(self, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, dict) and "prefill" in value and "policy" not in value:
            return Prefill.model_validate(value, context=info.context)
        return super().read(value, info)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        tree = super().__get_pydantic_json_schema__(schema, handler)
        long = next(choice for choice in tree["oneOf"] if choice["properties"][self.tag] == {"const": "prefill"})
        named = {"prefill" if key == "fill" else key: inner for key, inner in long["properties"].items() if key != self.tag}
        short = {key: inner for key, inner in long.items() if key != "title"} | {"properties": named, "required": ["prefill"]}
        return {"oneOf": [*tree["oneOf"], short]}


class Epoch(Spec):
    """A stretch of steady with its own arrivals, and classes where it names some."""

    for_: Span = Field(alias="for", description="how long")
    arrivals: Annotated[Any, OneOf("shape", SHAPES)] = Field(description="as workload.arrivals")
    classes: Classes | None = Field(None, description="as workload.classes, which hold where none are named")

    @field_validator("arrivals")
    @classmethod
    def _readable(cls, value: Any, info: ValidationInfo) -> Any:
        return beside(value, info) if isinstance(value, TraceFile) else value


class Steady(Spec):
    """The phase that is measured. Its bounds end the run normally; whichever comes first."""

    for_: Span | None = Field(None, alias="for", description="how long; epochs then take turns until it is over")
    requests: Count | None = Field(None, description="until so many requests were offered")
    tokens: Count | None = Field(None, description="until so many output tokens were received")
    snapshot: Span | None = Field(None, description="how often the numbers are kept: whole seconds, at most 10m")
    epochs: Annotated[list[Epoch], Field(min_length=1, max_length=EPOCHS)] | None = Field(
        None, description="arrivals in turn, one round or as many as `for` holds"
    )

    @model_validator(mode="after")
    def _sound(self) -> "Steady":
        if self.snapshot is not None and (self.snapshot % 1 or self.snapshot > 600):
            fault(("snapshot",), "must be whole seconds, 1s to 10m")
        if not self.epochs:
            return self
        for key, value in (("requests", self.requests), ("tokens", self.tokens)):
            if value is not None:
                fault((key,), "steady lasts as long as its epochs: leave out its own bounds but `for`, or `epochs`")
        if self.for_ is not None:
            lap = sum(epoch.for_ for epoch in self.epochs)
            if self.for_ < lap - 1e-6:
                fault(("for",), f"is shorter than one round of the epochs, {units.duration(lap)}: the last would never run")
            if (count := self.for_ / lap * len(self.epochs)) > EPOCHS:
                fault(("for",), f"makes {count:,.0f} epochs: at most {EPOCHS:,}. Make it shorter, or the epochs longer")
        return self

    def seconds(self) -> Seconds | None:
        """How long it lasts at most; None: another bound ends it."""
        return sum(lasts for _, lasts in self.turns()) if self.epochs else self.for_

    def turns(self) -> list[tuple[int, Seconds]]:
        """The epochs in the order in which they run, as (place in `epochs`, how long): the last is cut where `for` ends."""
        epochs = self.epochs or []
        if self.for_ is None or not epochs:
            return [(place, epoch.for_) for place, epoch in enumerate(epochs)]
        found: list[tuple[int, Seconds]] = []
        left = self.for_
        for place, epoch in itertools.cycle(enumerate(epochs)):
            if left < 1e-6:  # what float arithmetic leaves over is no epoch
                break
            found.append((place, min(epoch.for_, left)))
            left -= epoch.for_
        return found


class Stress(Spec):
    """After steady its load goes on and rises step by step, until a stop rule or `max`; neither is a failure here."""

    step: Share = Field(gt=0, le=100, description="of steady's own load, added with each step")
    every: Span = Field(description="how long a step lasts: whole seconds")
    max: Multiple = Field(gt=1, le=1000, description="the last step, as a multiple of steady's own load")

    @model_validator(mode="after")
    def _climbs(self) -> "Stress":
        if self.every % 1:
            fault(("every",), "must be whole seconds: the run looks once a second")
        if (count := (self.max - 1) / self.step) > RUNGS:
            fault(("step",), f"makes {count:,.0f} steps up to {units.multiple(self.max)}: at most {RUNGS:,}")
        return self

    def ladder(self) -> Ladder:
        return Ladder(self.step, self.every, self.max)


class Drain(Spec):
    """After what was offered: nothing new is, and what is in flight may end."""

    for_: Duration = Field(alias="for", description="how long to wait for answers")


class Phases(Spec):
    """The run, in order. A phase that is not named does not run."""

    baseline: Baseline | None = Field(None, description="first")
    warmup: Annotated[Any, _Policy("policy", WARMUPS)] = Field(Skip(), description="then; `{prefill: 50%}` in short")
    steady: Steady = Field(description="what is measured")
    stress: Stress | None = Field(None, description="what it takes to break it")
    drain: Drain | None = Field(None, description="last")


class Windows(Spec):
    """The sliding windows of the live view and of windows.jsonl: whole seconds, since they are sums of one-second slots."""

    length: Span = Field(default=10.0, description="what one window covers, at most 10m")
    slide: Span = Field(default=1.0, description="a new window as often as this")

    @model_validator(mode="after")
    def _whole(self) -> "Windows":
        for key, value in (("length", self.length), ("slide", self.slide)):
            if value % 1 or value > 600:
                fault((key,), "must be whole seconds, 1s to 10m")
        if self.slide > self.length:
            fault(("slide",), "is longer than a window: seconds between windows would never be seen")
        return self
