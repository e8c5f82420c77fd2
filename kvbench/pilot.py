"""Closes the two loops, once a second: windows -> law -> gate (how much may enter), and windows -> watch -> level (how much is
offered). Stop rules are asked here too. Reads closed slots, and has no clock of its own."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from kvbench.control import Law
from kvbench.core import Event, Limits, Record, Sample, Seconds
from kvbench.driver import Driver
from kvbench.level import Level, Move
from kvbench.metrics.slots import Slots
from kvbench.metrics.window import window
from kvbench.phases import Phase, Until
from kvbench.stop import Rule
from kvbench.watch import Watch

LEVELLED = ("steady", "stress")  # phases that the level scales and the watch looks at


@dataclass(frozen=True)
class Controls:
    """What holds a run: `limits` from its start, a law asked every `every` seconds about the last `over`, stop rules, a watch
    that looks at windows of `width` seconds."""

    limits: Limits = field(default_factory=Limits)
    law: Law | None = None
    every: Seconds = 1.0
    over: Seconds = 5.0
    rules: Sequence[Rule] = ()
    watch: Watch | None = None
    width: Seconds = 10.0


class Pilot:
    """After each `tick`: `stopped` says why the run has to stop, `enough` why the phase ends in the ordinary way; "" else."""

    def __init__(self, controls: Controls, slots: Slots, driver: Driver, tell: Callable[[Event | Sample], None]) -> None:
        self.controls, self.slots, self.driver, self.tell = controls, slots, driver, tell
        self.guards = [rule.arm() for rule in controls.rules]
        self.level = controls.watch.level() if controls.watch is not None else Level()
        self.limits = controls.limits
        self.stopped = self.enough = ""
        self._phase: Phase | None = None
        self._until: Until | None = None
        self._since = self._asked = self._seen = self._snapped = 0.0

    def begin(self, phase: Phase, start: Seconds) -> None:
        """A phase starts: before its first request is offered."""
        self._phase, self.enough = phase, ""
        self._until = phase.until(start) if phase.until is not None else None
        self._since = self._asked = self._seen = self._snapped = float(math.ceil(start - 1e-9))
        self.driver.relimit(self.limits if phase.controlled else Limits())
        if phase.kind in LEVELLED:
            self.level.begin(start, phase.ladder)

    def begun(self) -> None:
        """Its source is in place: offer at the level of the phases before."""
        if self._phase is not None and self._phase.kind in LEVELLED and self.level.value != 1:
            self.driver.relevel(self.level.value)

    def end(self) -> None:
        self._phase = None

    def tick(self, at: Seconds, live: Sequence[Record]) -> None:
        """The slots before `at` are closed. `live`: what is in flight or waits at the gate."""
        phase = self._phase
        if phase is None or phase.kind == "drain" or self.stopped:
            return
        if phase.controlled:
            self._control(at, live)
        if phase.kind in LEVELLED:
            self._steer(phase, at, live)
        if phase.snapshot is not None and at - self._snapped >= phase.snapshot - 1e-9:
            shot = window(self.slots, self._snapped, at, live, at)
            self._snapped = at
            self._event(at, "snapshot", phase=phase.name, window=msgspec.to_builtins(shot))
        if self._until is not None:
            self.enough = self._until.check(self.slots, at, live) or ""
        self._guard(phase, at, live)

    def told(self) -> dict[str, Any]:
        """For the end of the run."""
        law, watch = self.controls.law, self.controls.watch
        found = {"law": law.told() if law is not None else None, "level": self.level.value}
        return found | {"watch": watch.told() if watch is not None else None}

    def _control(self, at: Seconds, live: Sequence[Record]) -> None:
        """Ask the law, and let its limits hold from now on. Its window never reaches back before the phase it holds in."""
        law = self.controls.law
        if law is None or at - self._asked < self.controls.every - 1e-9:
            return
        self._asked = at
        seen = window(self.slots, max(self._since, at - self.controls.over), at, live, at)
        newest = {f"{name}_last": gauge.last for name, gauge in self.slots.gauges.items()}  # read at `at`: of the next window
        self.limits = law.update(msgspec.structs.replace(seen, values=seen.values | newest))
        self.driver.relimit(self.limits)
        rate = self.limits.rate if math.isfinite(self.limits.rate) else None
        for name, value in {"rate": rate, **law.state()}.items():
            self.tell(Sample(t=at, name=f"law_{name}", value=value, source="law"))

    def _steer(self, phase: Phase, at: Seconds, live: Sequence[Record]) -> None:
        """The level's own steps, then what the watch decides about a window that is whole."""
        self._move(phase, at, self.level.tick(at))
        if self.level.done:
            self.enough = self.level.done
        watch, width = self.controls.watch, self.controls.width
        if watch is not None and at - self._seen >= width - 1e-9:
            whole = window(self.slots, self._seen, at, live, at)
            self._seen = at
            for decision in watch.look(whole, self.level, at):
                self._event(at, "watch", phase=phase.name, **decision.data)
                self._move(phase, at, decision.move)
                if decision.stop:
                    self._stop(phase, at, "watch", str(decision.data.get("metric", "watch")), decision.stop)
        if watch is not None or phase.ladder is not None:
            self.tell(Sample(t=at, name="level", value=self.level.value, source="kvbench"))

    def _move(self, phase: Phase, at: Seconds, move: Move | None) -> None:
        if move is not None:
            self.driver.relevel(move.level)
            self._event(at, "level", phase=phase.name, level=move.level, why=move.why, **move.data)

    def _guard(self, phase: Phase, at: Seconds, live: Sequence[Record]) -> None:
        for guard in self.guards if not self.stopped else ():
            reason = guard.check(self.slots, at, live)
            if reason is not None:
                self._stop(phase, at, "rule", str(guard.rule), reason)
                return

    def _stop(self, phase: Phase, at: Seconds, by: Literal["rule", "watch"], rule: str, reason: str) -> None:
        """The event's reason is the bare one; the run's says who spoke. `rule`: of the watch, the metric."""
        self.stopped = f"{'stop rule' if by == 'rule' else 'watch'}: {reason}"
        self._event(at, "stop", by=by, rule=rule, reason=reason, phase=phase.name, phase_kind=phase.kind)

    def _event(self, at: Seconds, kind: str, **data: Any) -> None:
        self.tell(Event(t=at, kind=kind, data=data))
