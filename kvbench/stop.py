"""Rules that end a run before harm is done, and budgets that judge it afterwards.

A rule is `{kv_usage: ">= 90%", for: 2m, over: 10s, min_requests: 100}`: a statistic of docs/metrics.md over the last `over` of
closed slots, a comparison, and how long it must hold. A missing value neither fires nor passes: it stops the clock of `for`
without setting it back, and is counted, so that the run can say that a rule could not be read.
`gpu_memory` is not judged on a server that takes its memory when it starts (`preallocated`).
A budget is `{response_ttft_p99: 800ms, error_rate: 0.1%, goodput: ">= 99%"}`. Without a comparison a latency, an error share or
another thing that is better low is read as `<=`; what is better high, or neither, has to say.
"""

import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvbench import units
from kvbench.core import Record, Seconds
from kvbench.metrics import Stat, names
from kvbench.metrics.names import Name
from kvbench.metrics.slots import Slots
from kvbench.metrics.window import Interval, statistic
from kvbench.units import Duration, Span

FEWEST = 20  # requests behind the first quantile that is supported, a p50
OPTIONS = ("for", "hold", "over", "min_requests", "preallocated")
PREALLOCATING = re.compile(r"vllm|sglang|tensorrt|trt-?llm|lmdeploy", re.IGNORECASE)  # as servers name themselves
COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_CONDITION = re.compile(r"\s*(>=|<=|>|<)?\s*(.*?)\s*")


class Stop(Protocol):
    """Asked once a second, after the slots are closed, until it gives a reason with its numbers."""

    def check(self, slots: Slots, now: Seconds, live: Sequence[Record]) -> str | None: ...


class Condition(BaseModel):
    """A statistic, a comparison and a limit in base units."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = Field(description="a metric with its statistic, such as response_ttft_p99")
    compare: Literal[">=", "<=", ">", "<"] = Field(description="how the value is held against the limit")
    limit: float = Field(description="seconds, a share, per second or a plain number, by the metric")

    def holds(self, value: float) -> bool:
        return bool(COMPARISONS[self.compare](value, self.limit))

    @property
    def metric(self) -> Name:
        return names.parse(self.name)

    def __str__(self) -> str:
        return f"{self.name} {self.compare} {names.show(self.limit, self.metric)}"


def condition(name: str, text: object, default: str | None = None) -> Condition:
    """`("kv_usage", ">= 90%")` read strictly: the name has to exist, the limit to have its unit. Raises ValueError."""
    metric = names.parse(name)
    found = _CONDITION.fullmatch(text) if isinstance(text, str) else None
    compare, limit = (found[1], found[2]) if found else (None, text)
    if compare is None and default is None:
        raise ValueError(f"{name}: {text!r} needs a comparison: write one of {', '.join(COMPARISONS)} before it")
    number = names.limit(limit, metric)
    if not math.isfinite(number):
        raise ValueError(f"{name}: {text!r} is not a limit: it has to be a finite number")
    return Condition.model_validate({"name": name, "compare": compare or default, "limit": number})


class Rule(BaseModel):
    """Stops the run when a statistic has been past its limit for long enough, such as {kv_usage: ">= 90%", for: 2m}."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    when: Condition = Field(description="written as the metric's own name: `kv_usage: '>= 90%'`")
    hold: Duration = Field(0.0, alias="for", description="how long it has to hold at every reading; 0: once is enough")
    over: Span = Field(10.0, le=600, description="the statistic's own span, at most 10m")
    min_requests: int | None = Field(
        None,
        ge=0,
        description="requests the statistic has to stand on; left out, the fewest that one bad request cannot decide, "
        "of a quantile at least 20",
    )
    preallocated: Literal["refused", "judged"] = Field(
        "refused", description="gpu_memory on a server that takes its memory when it starts: refused, or judged all the same"
    )

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        """`{<metric>: "<comparison> <limit>", for, over, min_requests, preallocated}`: the one other key is the metric."""
        if not isinstance(data, Mapping) or "when" in data:
            return data
        options = {key: value for key, value in data.items() if key in OPTIONS}
        metrics = [key for key in data if key not in options]
        if len(metrics) != 1:
            given = ", ".join(map(repr, metrics)) or "none"
            raise ValueError(f"a stop rule has one metric beside for, over, min_requests and preallocated: {given} given")
        return options | {"when": condition(str(metrics[0]), data[metrics[0]])}

    @model_validator(mode="after")
    def _of_memory(self) -> "Rule":
        if self.preallocated == "judged" and self.when.metric.metric != "gpu_memory":
            raise ValueError(f"preallocated belongs to gpu_memory, not to {self.when.name}: leave it out")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        return _as_written(handler(schema), "when", {"kv_usage": ">= 90%", "for": "2m"})

    @property
    def needs(self) -> int:
        """Requests that the statistic has to stand on before it is read; 0 for gauges and rates per second."""
        if self.min_requests is not None:
            return self.min_requests
        name, limit = self.when.metric, self.when.limit
        if name.quantile is not None:
            return max(FEWEST, math.ceil(1 / (1 - name.quantile) - 1e-9))  # fewer, and the quantile is the maximum
        if name.of.kind != "ratio":
            return 0
        worst = 1 - limit if name.of.better == "high" else limit
        return math.ceil(1 / worst - 1e-9) if 0 < worst < 1 else 1

    def arm(self) -> "Guard":
        """A fresh guard for one run."""
        return Guard(self)

    def __str__(self) -> str:
        held = f" for {units.duration(self.hold)}" if self.hold else ""
        return f"{self.when}{held} (over {units.duration(self.over)})"


def preallocated(rules: Sequence[Rule], facts: Mapping[str, Any]) -> list[tuple[int, str]]:
    """The rules that cannot be judged on the target that `facts` (Target.open) tell of: (place in `rules`, what to do)."""
    who = _takes_all(facts)
    if not who:
        return []
    text = (
        f"{who} takes its device memory when it starts and keeps it, so this says nothing of the load: use kv_usage, "
        "or write `preallocated: judged` beside it"
    )
    asked = ((at, rule) for at, rule in enumerate(rules) if rule.when.metric.metric == "gpu_memory")
    return [(at, text) for at, rule in asked if rule.preallocated == "refused"]


def _takes_all(facts: Mapping[str, Any]) -> str:
    """What preallocates there, with its share where that is known; "" where nothing is known to."""
    share = facts.get("gpu_memory_utilization")
    if share is not None:
        return f"engine {facts.get('engine')} (gpu_memory_utilization {units.share(share)})"
    told = (server.get(key) for server in facts.get("servers", ()) for key in ("owner", "software"))
    return ", ".join(dict.fromkeys(name for name in told if isinstance(name, str) and PREALLOCATING.search(name)))


class Guard:
    """One rule during one run. `unread`: how many checks found no value to hold against the limit; `why`: the last reason."""

    def __init__(self, rule: Rule) -> None:
        self.rule: Final = rule
        self.checks = self.unread = 0
        self.why = ""
        self._held: Seconds | None = None  # how long the condition has held at every reading; None: it does not
        self._last: Seconds | None = None  # when it was last read; None: the check before had no value

    def check(self, slots: Slots, now: Seconds, live: Sequence[Record]) -> str | None:
        """The reason to stop, with its numbers, or None. The statistic is that of closed slots; `now` counts for `for`."""
        rule = self.rule
        self.checks += 1
        stat = statistic(slots, rule.when.metric, rule.over, live)
        if self._missing(stat, slots, live):
            self.unread += 1
            self._last = None
            return None
        value = stat.value if stat.value is not None else math.nan
        if rule.when.holds(value):
            self._held = 0.0 if self._held is None else self._held + (0.0 if self._last is None else now - self._last)
        else:
            self._held = None
        self._last = now
        if self._held is None or self._held < rule.hold - 1e-9:
            return None
        return self._reason(stat)

    def _missing(self, stat: Stat, slots: Slots, live: Sequence[Record]) -> bool:
        rule = self.rule
        if stat.value is None:
            self.why = stat.reason
        elif (n := self._requests(stat, slots, live)) < rule.needs:
            self.why = f"{n} of at least {rule.needs} requests"
        elif stat.lower_bound and rule.when.compare in ("<", "<=") and rule.when.holds(stat.value):
            self.why = "too much is in flight to say"  # at least this much: not known to be below the limit
        else:
            return False
        return True

    def _requests(self, stat: Stat, slots: Slots, live: Sequence[Record]) -> int:
        """What min_requests counts: the statistic's own n; for gauges, rates, gaps and tokens the requests that ended."""
        name = self.rule.when.metric
        if name.of.kind in ("latency", "ratio") and name.metric not in ("icl", "itl", "hit_rate"):
            return stat.n
        if not self.rule.needs:
            return 0
        return Interval(slots, max(0, slots.closed - math.ceil(self.rule.over)), slots.closed, live).finished

    def _reason(self, stat: Stat) -> str:
        rule, name = self.rule, self.rule.when.metric
        least = "at least " if stat.lower_bound else ""
        held = f", held for {units.duration(self._held)}" if rule.hold else ""
        value = f"{name} is {least}{names.show(stat.value, name)}"
        return f"{value} over {units.duration(rule.over)} (n={stat.n}); the rule is {rule.when}{held}"


class Verdict(BaseModel):
    """One budget line judged. value None, verdict "not evaluated": nothing to judge, which fails a gate."""

    model_config = ConfigDict(frozen=True)
    name: str
    limit: str
    value: float | None
    n: int
    verdict: Literal["pass", "fail", "not evaluated"]
    low_confidence: bool = False
    reason: str = ""


class Budget(BaseModel):
    """What the whole run has to keep, such as {response_ttft_p99: 800ms, error_rate: 0.1%, goodput: ">= 99%"}."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    lines: tuple[Condition, ...] = Field((), description="written as metric: limit")
    strict: bool = Field(False, description="a quantile with fewer than 10 values beyond it fails instead of being marked")

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        """`{<metric>: "[comparison] <limit>", ..., strict?}`. A metric that is better low may leave out `<=`."""
        if not isinstance(data, Mapping) or "lines" in data:
            return data
        lines = []
        for name, text in data.items():
            if name != "strict":
                low = names.parse(str(name)).of.better == "low"
                lines.append(condition(str(name), text, "<=" if low else None))
        return {"lines": tuple(lines), "strict": data.get("strict", False)}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        return _as_written(handler(schema), "lines", {"response_ttft_p99": "800ms", "goodput": ">= 99%"})

    def judge(self, stats: Mapping[str, Stat]) -> list[Verdict]:
        """Each line against the run's statistic of that name; one that is absent, or has no value, is not evaluated."""
        return [self._judge(line, stats.get(line.name, Stat(None, reason="not measured"))) for line in self.lines]

    def _judge(self, line: Condition, stat: Stat) -> Verdict:
        limit = f"{line.compare} {names.show(line.limit, line.metric)}"
        if stat.value is None:
            none = stat.reason or "no samples"
            return Verdict(name=line.name, limit=limit, value=None, n=stat.n, verdict="not evaluated", reason=none)
        if stat.lower_bound and line.compare in ("<", "<=") and line.holds(stat.value):
            kept, why = False, "the quantile falls among requests that got no answer"  # so it is not known to be within the limit
        elif not stat.supported:
            kept, why = line.holds(stat.value) and not self.strict, f"n={stat.n} is too few for {line.name}"
        else:
            kept, why = line.holds(stat.value), ""
        return Verdict(
            name=line.name,
            limit=limit,
            value=stat.value,
            n=stat.n,
            verdict="pass" if kept else "fail",
            low_confidence=not stat.supported,
            reason=why,
        )


def _as_written(schema: dict[str, Any], parsed: str, example: dict[str, str]) -> dict[str, Any]:
    """The JSON Schema of the file's form, where the metric's name is the key, not of the parsed field."""
    properties = {key: entry for key, entry in schema["properties"].items() if key != parsed}
    metrics = {"type": ["string", "number"], "description": "a limit of the metric that is the key"}
    kept = {key: schema[key] for key in ("title", "description") if key in schema}
    return kept | {
        "type": "object",
        "properties": properties,
        "propertyNames": {"enum": [*properties, *names.known()]},
        "additionalProperties": metrics,
        "examples": [example],
    }
