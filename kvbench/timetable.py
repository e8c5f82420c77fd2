"""When a run does what, as the scenario names it: warm-up, steady (in epochs), drain, and how often it is looked at."""

from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from kvbench.endpoint import Spec, under
from kvbench.spec import OneOf, fault
from kvbench.units import Duration, Span
from kvbench.workload.arrivals import ARRIVALS
from kvbench.workload.schedule import Closed
from kvbench.workload.traces import TraceFile

Count = Annotated[int, Field(ge=1, le=10**9)]
SHAPES: dict[str, type[Any]] = {**ARRIVALS, "trace": TraceFile, "closed": Closed}


def beside(trace: TraceFile, info: ValidationInfo, *path: str) -> TraceFile:
    """`trace` with its file's path from here, not from the scenario. A missing file is a fault at `path`.file."""
    try:
        return trace.model_copy(update={"file": str(under((info.context or {}).get("folder"), trace.file))})
    except ValueError as error:
        fault((*path, "file"), str(error))


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


WARMUPS: dict[str, type[Spec]] = {"none": Skip, "fixed": Fixed}
WARMUPS_LATER = ("prefill", "dynamic", "on_demand")


class Epoch(Spec):
    """A stretch of steady with its own arrivals."""

    for_: Span = Field(alias="for", description="how long")
    arrivals: Annotated[Any, OneOf("shape", SHAPES)] = Field(description="as workload.arrivals")

    @field_validator("arrivals")
    @classmethod
    def _readable(cls, value: Any, info: ValidationInfo) -> Any:
        return beside(value, info) if isinstance(value, TraceFile) else value


class Steady(Spec):
    """The phase that is measured. Its bounds end the run normally; whichever comes first."""

    for_: Span | None = Field(None, alias="for", description="how long")
    requests: Count | None = Field(None, description="until so many requests were offered")
    tokens: Count | None = Field(None, description="until so many output tokens were received")
    epochs: Annotated[list[Epoch], Field(min_length=1, max_length=10_000)] | None = Field(None, description="arrivals in turn")

    @model_validator(mode="after")
    def _epochs_bound(self) -> "Steady":
        given = [
            key for key, value in (("for", self.for_), ("requests", self.requests), ("tokens", self.tokens)) if value is not None
        ]
        if self.epochs and given:
            fault((given[0],), "steady lasts as long as its epochs: leave out its own bounds, or `epochs`")
        return self

    def seconds(self) -> float | None:
        """How long it lasts at most; None: another bound ends it."""
        return sum(epoch.for_ for epoch in self.epochs) if self.epochs else self.for_


class Drain(Spec):
    """After steady: nothing new is offered, and what is in flight may end."""

    for_: Duration = Field(alias="for", description="how long to wait for answers")


class Phases(Spec):
    """The run, in order. A phase that is not named does not run."""

    warmup: Annotated[Any, OneOf("policy", WARMUPS, later=WARMUPS_LATER)] = Field(Skip(), description="first")
    steady: Steady = Field(description="what is measured")
    drain: Drain | None = Field(None, description="after")


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
