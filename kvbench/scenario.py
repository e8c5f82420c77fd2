"""A scenario file as a frozen, validated object: what load, against what, until when, judged how.

`load` is the way in. Everything wrong with a file is told at once, each with file:line, the key, the value, what is allowed and
the nearest known key. Later versions' keys are refused by name, never ignored. compose.py builds the parts of a run from it.
"""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from kvbench.collect.collectors import COLLECTORS
from kvbench.collect.nsight import Nsight
from kvbench.control.law import Open
from kvbench.control.laws import LAWS
from kvbench.endpoint import TARGETS, Http, Null, Sim, Spec
from kvbench.metrics.names import known
from kvbench.problem import KeyPath, SourceError
from kvbench.sink.sinks import SINKS
from kvbench.spec import OneOf, Reader, fault, plain
from kvbench.stop import Budget, Rule, preallocated
from kvbench.timetable import SHAPES, Classes, Dynamic, Fixed, Phases, Prefill, Windows, beside
from kvbench.verdict import CHECKS, checks
from kvbench.watch import WatchSpec
from kvbench.workload.classes import Class
from kvbench.workload.schedule import Closed
from kvbench.workload.traces import TraceFile
from kvbench.yaml_source import Source, read_file

ScenarioError = SourceError

LATER = {
    **{f"workload.{key}": "belongs into one of the classes, since there are `classes`" for key in Class.model_fields},
    "target.nodes": "several nodes are not in this version of kvbench yet",
    "target.router": "several nodes are not in this version of kvbench yet",
}


class Workload(Spec):
    """What arrives when. One traffic class may be written flat, without `classes`."""

    arrivals: Annotated[Any, OneOf("shape", SHAPES)] = Field(description="the load shape")
    classes: Classes = Field(description="traffic, drawn by weight")
    nonce: Annotated[bool, WithJsonSchema({"enum": ["on", "off", True, False], "default": "on"})] = Field(
        True, description="off: runs may warm each other's cache, and the report says so"
    )

    @field_validator("nonce", mode="before")
    @classmethod
    def _on_off(cls, value: Any) -> Any:
        if value not in (True, False, "on", "off"):
            raise ValueError(f"write on or off, not {value!r}")
        return value in (True, "on")

    @field_validator("arrivals")
    @classmethod
    def _readable(cls, value: Any, info: ValidationInfo) -> Any:
        return beside(value, info) if isinstance(value, TraceFile) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """With the keys of a single class beside the others."""
        tree = handler.resolve_ref_schema(handler(core))
        single = handler.resolve_ref_schema(handler(Class.__pydantic_core_schema__))
        tree["properties"] |= {key: value for key, value in single["properties"].items() if key not in tree["properties"]}
        tree["required"] = ["arrivals"]
        return tree


_METRICS = {name: {"type": ["string", "number"]} for name in known()}
_RULE = {
    "type": "object",
    "description": 'A metric with a comparison, such as kv_usage: ">= 90%", and how it is read.',
    "properties": {
        **{key: Rule.model_json_schema()["properties"][key] for key in ("for", "over", "min_requests", "preallocated")},
        **_METRICS,
    },
    "additionalProperties": False,
    "minProperties": 1,
}
_BUDGET = {
    "type": "object",
    "description": "Limits by metric, such as response_ttft_p99: 800ms; a comparison where lower is not better.",
    "properties": {"strict": Budget.model_json_schema()["properties"]["strict"], **_METRICS},
    "additionalProperties": False,
}


Guards = Annotated[list[Annotated[Rule, WithJsonSchema(_RULE)]], Field(max_length=100)]
Limited = Annotated[Budget, WithJsonSchema(_BUDGET)]


class Scenario(Spec):
    """What load, against what, until when, judged how."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = Field(description="names the run directory")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="of everything random")
    target: Annotated[Any, OneOf("kind", TARGETS)] = Field(description="who answers")
    workload: Workload = Field(description="what arrives when")
    control: Annotated[Any, OneOf("law", LAWS)] = Field(Open(), description="how much may enter")
    phases: Phases = Field(description="the run, in order")
    stop: Guards = Field([], description="guards: each ends the run with exit code 5")
    budget: Limited | None = Field(None, description="limits that the whole run must keep, else exit code 3")
    watch: WatchSpec | None = Field(None, description="marks windows that are worse than healthy ones under the same load")
    verdict: dict[str, Any] = Field({}, description="thresholds of the verdict in place of kvbench's own")
    collect: Annotated[list[Annotated[Any, OneOf("kind", COLLECTORS)]], Field(max_length=32)] | None = Field(
        None, description="what else is read while it runs; left out: the server's own /metrics, where it has them; []: nothing"
    )
    sinks: Annotated[list[Annotated[Any, OneOf("kind", SINKS)]], Field(max_length=8)] = Field(
        [], description="where the numbers go while it runs, beside the run directory"
    )
    windows: Windows = Field(Windows(), description="the sliding windows")
    out: Annotated[str, Field(min_length=1)] = Field("results", description="where run directories go")

    @field_validator("budget", mode="before")
    @classmethod
    def _each_line(cls, value: Any) -> Any:
        """Each limit by itself, so that each error has its own line."""
        for name, limit in value.items() if isinstance(value, dict) else ():
            try:
                Budget.model_validate({name: limit})
            except ValidationError as error:
                fault((name,), error.errors()[0]["msg"].removeprefix("Value error, "))
        return value

    @field_validator("verdict")
    @classmethod
    def _known_checks(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Each check by itself, so that each error has its own line."""
        for name, levels in value.items():
            if not isinstance(levels, dict):
                fault((name,), "write it as {degraded: ..., invalid: ...}")
            if name in CHECKS and CHECKS[name].unit != "count" and info.context:
                for level, limit in levels.items():
                    if isinstance(limit, (int, float)):
                        fault((name, level), f"{limit!r} has no unit")
            try:
                checks({name: levels})
            except ValueError as error:
                fault((name,), str(error))
        return value

    @model_validator(mode="after")
    def _bounded(self) -> "Scenario":
        """Something must end steady, and a shape that gives everything at once needs a count."""
        steady, arrivals = self.phases.steady, self.workload.arrivals
        if steady.seconds() is None and steady.requests is None and steady.tokens is None and not isinstance(arrivals, TraceFile):
            fault(("phases", "steady"), "nothing ends it: give `for`, `requests` or `tokens`")
        if not steady.epochs and steady.requests is None and _at_once(arrivals):
            fault(("phases", "steady"), "an infinite rate sends everything at once: say how many with `requests`")
        limits = {name: one.slo for name, one in self.workload.classes.items()}
        for place, epoch in enumerate(steady.epochs or ()):
            if _at_once(epoch.arrivals):
                fault(("phases", "steady", "epochs", place, "arrivals"), "an infinite rate, and an epoch has no count to end it")
            for name, one in (epoch.classes or {}).items():
                if limits.setdefault(name, one.slo) != one.slo:
                    path = ("phases", "steady", "epochs", place, "classes", name)
                    fault(path, "has other limits (slo) than the class of this name elsewhere: give it another name")
        return self

    @model_validator(mode="after")
    def _unmeasured(self) -> "Scenario":
        """What is not measured fits what is."""
        phases, (arrivals, classes) = self.phases, self.opening()
        warmup = phases.warmup
        if _at_once(arrivals) and (isinstance(warmup, Dynamic) or (isinstance(warmup, Fixed) and warmup.requests is None)):
            fault(("phases", "warmup"), "an infinite rate sends everything at once: warm up with `policy: fixed` and `requests`")
        if isinstance(warmup, Prefill) and warmup.content == "shared" and not any(one.prefixes for one in classes.values()):
            fault(("phases", "warmup", "content"), "shared: no class has `prefixes`, so there is nothing to share; use own")
        if isinstance(warmup, Prefill) and isinstance(self.target, Null):
            fault(("phases", "warmup"), "the null target has no cache to fill")
        if phases.stress and _at_once(self.closing()[0]):
            fault(("phases", "stress"), "steady sends everything at once: there is no rate to raise")
        if phases.baseline and isinstance(self.target, Http) and self.target.tokenizer == "ids":
            fault(("phases", "baseline"), "the standard prompts are text, which `target.tokenizer: ids` cannot send: use another")
        return self

    @model_validator(mode="after")
    def _triggered(self) -> "Scenario":
        """One collector opens capture windows, so that they cannot overlap, and what opens them can happen."""
        found = [at for at, one in enumerate(self.collect or ()) if isinstance(one, Nsight)]
        epochs = [f"steady-{number + 1}" for number in range(len(self.phases.steady.turns()))]
        if len(found) > 1:
            fault(("collect", found[1]), "a second nsight: two could open windows at once. Write one, with `at` or a trigger")
        for at, one in enumerate(self.collect or ()):
            if isinstance(one, Nsight) and one.trigger == "anomaly" and self.watch is None:
                fault(("collect", at, "trigger"), "anomaly: nothing looks for one. Write `watch: {}`, or use another trigger")
            if isinstance(one, Nsight) and one.through == "launch" and getattr(self.target, "launch", None) is None:
                fault(("collect", at, "through"), "launch: target.launch starts no server. Give it, or use `session` or server")
            if isinstance(one, Nsight) and one.phase != "steady" and one.phase not in epochs:
                there = f"its epochs are steady-1 to steady-{len(epochs)}" if epochs else "it has no epochs"
                fault(("collect", at, "phase"), f"{one.phase}: windows open in steady, or in one epoch of it, and {there}")
        return self

    def opening(self) -> tuple[Any, dict[str, Class]]:
        """What a warm-up plays: the workload's own arrivals, and the classes with which steady begins."""
        return self.workload.arrivals, self._part(0)[1]

    def closing(self) -> tuple[Any, dict[str, Class]]:
        """Arrivals and classes with which steady ends: those of stress."""
        turns = self.phases.steady.turns()
        return self._part(turns[-1][0] if turns else 0)

    def traffic(self) -> list[dict[str, Class]]:
        """Every set of classes: the workload's, and those of epochs with their own."""
        return [self.workload.classes, *(epoch.classes for epoch in self.phases.steady.epochs or () if epoch.classes)]

    def _part(self, place: int) -> tuple[Any, dict[str, Class]]:
        epochs = self.phases.steady.epochs
        if not epochs:
            return self.workload.arrivals, self.workload.classes
        return epochs[place].arrivals, epochs[place].classes or self.workload.classes

    @model_validator(mode="after")
    def _judgeable(self) -> "Scenario":
        """The embedded engine is known by now; a server tells what it is when it is opened (compose.open_target)."""
        if isinstance(self.target, Sim):
            engine = self.target.load_engine()
            facts = {"engine": engine.name, "gpu_memory_utilization": engine.preallocates}
            for at, text in preallocated(self.stop, facts):
                fault(("stop", at, str(self.stop[at].when.metric)), text)
        return self

    def resolved(self) -> dict[str, Any]:
        """The scenario with its defaults, in SI units, as strict JSON takes it. Holds no secret: none can be written."""
        return dict(plain(self.model_dump(mode="json", by_alias=True)))


def _at_once(arrivals: Any) -> bool:
    return not isinstance(arrivals, (TraceFile, Closed)) and bool(arrivals.rate(0.0) == float("inf"))


def load(path: Path | str, overrides: Iterable[str] = (), target: str | None = None) -> Scenario:
    """Read and validate a scenario. `overrides`: "a.b=c" each, c in YAML; `target`: a URL that takes the target's place.

    Raises ScenarioError with everything that is wrong.
    """
    source = read_file(Path(path))
    if target is not None:
        _retarget(source, target)
    for assignment in overrides:
        source.set(assignment)
    _one_seed(source.data)
    source.data.setdefault("name", re.sub(r"[^A-Za-z0-9._-]", "-", Path(path).stem))
    data, folder = source.data, Path(path).parent
    moved: tuple[KeyPath, KeyPath] = ((), ())
    if isinstance(workload := data.get("workload"), dict) and "classes" not in workload:
        data, moved = data | {"workload": _one_class(workload)}, (("workload", "classes", "default"), ("workload",))
    try:
        return Scenario.model_validate(data, context={"text": True, "folder": folder, "base": folder})
    except ValidationError as error:
        raise Reader(schema, LATER, moved).explain(error, source) from None


@cache  # made for every error message, and the same for ever
def schema() -> dict[str, Any]:
    """The JSON Schema of a scenario file."""
    tree = Scenario.model_json_schema(by_alias=True)
    tree["required"].remove("name")  # the file's name where it is not given
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **plain(tree)}


def _one_seed(data: dict[str, Any]) -> None:
    """Chaos takes the run's seed where it has none of its own. What is malformed is left for validation to refuse."""
    workload, phases = data.get("workload"), data.get("phases")
    steady = phases.get("steady") if isinstance(phases, dict) else None
    epochs = steady.get("epochs") if isinstance(steady, dict) else None
    for part in (workload, *(epochs if isinstance(epochs, list) else ())):
        arrivals = part.get("arrivals") if isinstance(part, dict) else None
        if isinstance(arrivals, dict) and arrivals.get("shape") == "chaos":
            arrivals.setdefault("seed", data.get("seed", 0))


def _one_class(workload: dict[str, Any]) -> dict[str, Any]:
    """A workload written flat as one with a single class. A replayed trace brings its content along where none is given."""
    whole = {key: value for key, value in workload.items() if key in Workload.model_fields}
    single = {key: value for key, value in workload.items() if key not in whole}
    arrivals = workload.get("arrivals")
    if isinstance(arrivals, dict) and arrivals.get("shape") == "trace" and not {"prompt", "source", "trace"} & single.keys():
        single["trace"] = {key: value for key, value in arrivals.items() if key != "shape"}
    return whole | {"classes": {"default": single}}


def _retarget(source: Source, url: str) -> None:
    """Point at a server. An http target keeps its other settings; any other gives way to a plain one."""
    where = f"--target {url}"
    target = source.data.get("target")
    kept = target if isinstance(target, dict) and target.get("kind") == "http" else {"kind": "http"}
    source.data["target"] = {**{key: value for key, value in kept.items() if key not in ("urls", "launch")}, "url": url}
    source.replaced(("target", "url") if kept is target else ("target",), Source(where, None))
