"""What a run says, as points: five measurements, the tags that are allowed, one type for each field (docs/guides/influxdb.md).

A pure function of the items in order: what is written while the run goes on and what is made of its directory later are the same
bytes, so that sending a line twice changes nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from kvbench.core import Event, Nanos, Record, Sample, Window
from kvbench.metrics import request
from kvbench.sink.lines import Moments, count, escaped, nanos, number, tag, text

CAP = 1000  # values that a tag may have in a run; more would be a series each, which is what fills a database
RUN_TAGS = ("run", "scenario", "model", "engine")  # of every point
ITEM_TAGS = (  # what an item may add
    "class", "collector", "gpu", "host", "kind", "mig", "node", "outcome", "phase", "replica", "server", "source", "uuid",
)  # fmt: skip
MACHINES = {"dcgm", "kvbench-agent"}  # kinds of pages that tell of devices, and not of a server
MANY = 10 * CAP  # series that are kept ready
NEAR, FAR = 64, 4096  # points of a series that may come in another order than their instants: readings; requests
RENAMED = {"engine": "replica"}  # labels whose name means something else among the run's tags
NAMES = {"time", *RUN_TAGS, *ITEM_TAGS}  # what no field may be called
_REQUEST_COUNTS = ("id", "status", "asked_in", "asked_out", "n_in", "n_out", "cached", "reasoning", "session", "turn", "attempts")
_counts_of = attrgetter(*_REQUEST_COUNTS)
_REQUEST_TIMES = [
    (name, request.FORMULAS[name]) for name in ("gate_wait", "lag", "ttft", "response_ttft", "e2e", "response", "tpot")
]


class _Series(NamedTuple):
    """head: measurement and tags (and the field, of a reading). tail: further fields. moments: taken instants."""

    head: str
    tail: str
    moments: Moments


class Points:
    """Lines of a run that began at `wall` (seconds since 1970). tags: constant ones of the user's, beside RUN_TAGS.

    skipped: fields that no server takes (NaN, infinities, integers beyond 64 bits). notes: what a person should know, once each.
    """

    def __init__(self, run: str, wall: float, tags: Mapping[str, str]) -> None:
        self.zero: Nanos = nanos(wall)
        self.constant = _tags({**tags, "run": run})
        self.skipped = 0
        self.notes: list[str] = []
        self._values: dict[tuple[str, str], set[str]] = {}  # (measurement, tag) -> the values it had
        self._gauges: dict[tuple[Any, ...], _Series] = {}
        self._rows: dict[tuple[str, tuple[tuple[str, str], ...]], _Series] = {}
        self._moments: dict[str, Moments] = {}
        self._fields: dict[str, str] = {}

    def line(self, item: Event | Sample | Window | Record) -> str:
        """One point without its line feed; "" where there is nothing to say."""
        if isinstance(item, Sample):
            return self._sample(item)
        if isinstance(item, Record):
            return self._request(item)
        return self._window(item) if isinstance(item, Window) else self._event(item)

    def mark(self, name: str) -> str:
        """A point of the sink itself, at the run's zero."""
        return f"{self._tagged('kvbench_sink', ())[0]} {name}=1i {self.zero}"

    def _sample(self, sample: Sample) -> str:
        if sample.value is None:
            return ""
        value = number(sample.value)
        if not value:
            self.skipped += 1
            return ""
        key = (sample.source, sample.name, *sample.labels.items())
        series = self._gauges.get(key) or self._gauge(sample, key)
        return f"{series.head}={value}{series.tail} {series.moments.at(self.zero + round(sample.t * 1e9))}"

    def _gauge(self, sample: Sample, key: tuple[Any, ...]) -> "_Series":
        """Of one name, which is a field: readings of several names at one instant make one point."""
        if len(self._gauges) >= MANY:
            self._gauges.clear()
        device = sample.name.startswith("gpu_") or "gpu" in sample.labels
        measurement = "kvbench_gpu" if device else "kvbench_server"
        head, tail = self._tagged(measurement, (("source", sample.source), *sample.labels.items()))
        made = self._gauges[key] = self._series(f"{head} {self._field(sample.name)}", tail, NEAR)
        return made

    def _window(self, window: Window) -> str:
        fields = {"t": number(window.end), "window_s": number(window.end - window.start)}
        self._add(fields, window.counts.items(), count)
        self._add(fields, window.values.items(), number)
        return self._point("kvbench_window", (), fields, window.end, NEAR)

    def _event(self, event: Event) -> str:
        data = event.data
        if event.kind == "run_start" and isinstance(data.get("wall"), float):
            self.zero = nanos(data["wall"])  # it is the first of all; `wall` was what was known before the clock started
        labels = [("kind", event.kind)]
        labels += [(name, data[name]) for name in ("phase", "source") if isinstance(data.get(name), str)]
        fields = {"t": number(event.t), "text": text(msgspec.json.encode(data).decode())}
        self._add(fields, ((name, value) for name, value in data.items() if _numeric(value)), number)
        return self._point("kvbench_event", tuple(labels), fields, event.t, NEAR)

    def _request(self, record: Record) -> str:
        over = record.end_ns if record.end_ns is not None else record.due_ns
        labels = (("class", record.cls), ("phase", record.phase), ("outcome", record.outcome))
        fields = {"measured": f"{int(record.measured)}i"}
        self._add(fields, zip(_REQUEST_COUNTS, _counts_of(record), strict=True), count)
        at = request.stamps(record)
        times = ((name, formula.of(at) / 1e9) for name, formula in _REQUEST_TIMES)
        self._add(fields, ((name, value) for name, value in times if value == value), number)  # NaN: not measured
        if record.cause:
            fields["cause"] = text(record.cause)
        return self._point("kvbench_request", labels, fields, over / 1e9, FAR)

    def _point(self, measurement: str, labels: tuple[tuple[str, str], ...], fields: dict[str, str], t: float, depth: int) -> str:
        series = self._rows.get((measurement, labels))
        if series is None:
            if len(self._rows) >= MANY:
                self._rows.clear()
            series = self._rows[measurement, labels] = self._series(*self._tagged(measurement, labels), depth)
        shown = ",".join([f"{name}={value}" for name, value in fields.items()])
        return f"{series.head} {shown}{series.tail} {series.moments.at(self.zero + round(t * 1e9))}"

    def _add(self, fields: dict[str, str], found: Iterable[tuple[str, Any]], form: Callable[[Any], str]) -> None:
        """What was measured, by field; of two with one name the first."""
        for name, value in found:
            if value is None:
                continue
            written = form(value)
            if written:
                fields.setdefault(self._field(name), written)
            else:
                self.skipped += 1

    def _field(self, name: str) -> str:
        """A field's key as a line holds it."""
        known = self._fields.get(name)
        if known is None:
            stored = tag(name) or "value"
            known = self._fields[name] = escaped(f"{stored}_" if stored in NAMES else stored)
        return known

    def _series(self, head: str, tail: str, depth: int) -> "_Series":
        moments = self._moments.get(head)
        if moments is None:
            moments = self._moments[head] = Moments(depth)
        return _Series(head, tail, moments)

    def _tagged(self, measurement: str, labels: tuple[tuple[str, str], ...]) -> tuple[str, str]:
        """(measurement with its tags, what became a field instead, as `,label_x="y"`)."""
        tags, extra = dict(self.constant), {}
        for name, value in labels:
            name, stored = RENAMED.get(name, name), tag(value)
            if not stored:
                continue
            if name in ITEM_TAGS and self._admitted(measurement, name, stored):
                tags[name] = stored
            else:
                extra[f"label_{tag(name)}"] = stored
        head = ",".join([measurement, *(f"{name}={escaped(tags[name])}" for name in sorted(tags))])
        return head, "".join(f",{escaped(name)}={text(extra[name])}" for name in sorted(extra))

    def _admitted(self, measurement: str, name: str, value: str) -> bool:
        """True where the tag had this value before or may still have a new one."""
        values = self._values.setdefault((measurement, name), set())
        if value in values:
            return True
        if len(values) < CAP:
            values.add(value)
            return True
        told = f"tag {name} of {measurement} has more than {CAP:,} values: further ones are the field label_{name}"
        if told not in self.notes:
            self.notes.append(told)
        return False


def engine_of(target: Mapping[str, Any], collectors: Iterable[Mapping[str, Any]]) -> str | None:
    """The tag `engine`: the embedded engine's profile, else the one kind of server whose page is read; None: not known."""
    kinds = {str(kind) for told in collectors for page in told.get("pages") or () for kind in page.get("kinds") or ()}
    served = sorted(kinds - MACHINES)
    return target.get("engine") or (served[0] if len(served) == 1 else None)


def tags_of(facts: Mapping[str, Any], own: Mapping[str, str]) -> dict[str, str]:
    """The constant tags: of the run's facts (scenario, model, engine) and the user's own."""
    return {**own, **{name: str(facts[name]) for name in RUN_TAGS[1:] if facts.get(name)}}


def _tags(tags: Mapping[str, str]) -> dict[str, str]:
    return {tag(name): tag(value) for name, value in tags.items() if tag(name) and tag(value)}


def _numeric(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
