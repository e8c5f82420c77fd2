"""What is known of a baseline before it is measured: its prompts, what is tested, its layers, and what it is compared with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench.endpoint import Http, Sim
from kvbench.engine import Step
from kvbench.engine.cost import Roofline
from kvbench.report.kept import NAME, Kept, Layers, Planned, read
from kvbench.scenario import Scenario
from kvbench.workload.standard import Standard, standard

UNSEEN = "a server's layers show in a profiler only: the nsight collector and kvbench profile; the embedded engine models them"


def planned(scenario: Scenario, facts: Mapping[str, Any]) -> Planned | None:
    """For the manifest; None where the scenario names no baseline phase. `facts`: what the target said when it was opened."""
    if scenario.phases.baseline is None:
        return None
    prompts, target = standard(), fingerprint(scenario.target, facts)
    earlier, why = newest(Path(scenario.out), prompts, target)
    layers = modelled(scenario.target, prompts.median()) if isinstance(scenario.target, Sim) else Layers(reason=UNSEEN)
    return Planned(version=prompts.version, digest=prompts.digest, target=target, layers=layers, earlier=earlier, why=why)


def overlong(scenario: Scenario, facts: Mapping[str, Any]) -> list[str]:
    """A warning where prompts of the baseline may be longer than the model's context."""
    phase, context = scenario.phases.baseline, facts.get("max_context")
    beyond = standard().beyond(context, phase.prompts) if phase and context else 0
    if not phase or not beyond:
        return []
    return [f"{beyond} of the baseline's {phase.prompts} prompts may not fit into the model's context of {context:,}: those fail"]


def fingerprint(spec: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What makes two targets the same for a comparison. A server's address is no part of it; what answers there is."""
    if isinstance(spec, Sim):
        named = {key: facts[key] for key in ("kind", "model", "hardware", "devices", "engine", "blocks")}
        return named | spec.load_engine().model_dump(mode="json", exclude={"name", "source", "blocks"})
    if isinstance(spec, Http):
        softwares = {f"{one['software'] or 'not told'} {one['version'] or '(version not told)'}" for one in facts["servers"]}
        named = {"kind": "http", "model": facts["model"], "software": sorted(softwares)}
        return named | {"api": spec.api, "stream": spec.stream}
    return {"kind": facts["kind"]}


def modelled(spec: Sim, tokens: int) -> Layers:
    """Seconds per layer of a prefill of `tokens` and of a decode step after it, from the engine's cost: no head, no overhead."""
    model, engine = spec.load_model(), spec.load_engine()
    cost = Roofline(model, spec.load_hardware(), engine)
    chunks = [(min(engine.max_num_batched_tokens, tokens - at), at) for at in range(0, tokens, engine.max_num_batched_tokens)]
    prefill = [cost.terms(Step(prefill=(chunk,))) for chunk in chunks]
    decode = cost.terms(Step(decodes=1, context=tokens))
    return Layers(
        layers=model.layers,
        tokens=tokens,
        prefill=sum(step.total - step.overhead for step in prefill) / model.layers,
        decode=(decode.total - decode.overhead) / model.layers,
        how="modelled: (step time - overhead) / layers, the output head left out",
        reason=None,
    )


def newest(out: Path, prompts: Standard, target: Mapping[str, Any]) -> tuple[Kept | None, str]:
    """The newest baseline below `out` of the same prompts and target, or why there is none."""
    found = sorted((kept for path in out.glob(f"*/{NAME}") if (kept := read(path))), key=lambda kept: (kept.started, kept.run))
    if not found:
        return None, "no earlier run has a baseline here"
    for kept in reversed(found):
        if not _differences(kept, prompts, target):
            return kept, ""
    differ = "; ".join(_differences(found[-1], prompts, target))
    older = len(found) - 1
    others = {0: "", 1: " (so is an older one)"}.get(older, f" (so are {older} older ones)")
    return None, f"the baseline of {found[-1].run} is of something else{others}: {differ}"


def _differences(kept: Kept, prompts: Standard, target: Mapping[str, Any]) -> list[str]:
    """What keeps two baselines from being compared, there and here."""
    if kept.version != prompts.version:
        return [f"prompts {kept.version} there, {prompts.version} here"]
    if kept.digest != prompts.digest:
        return [f"the prompts' digest {kept.digest[:12]} there, {prompts.digest[:12]} here"]
    names = [*kept.target, *(name for name in target if name not in kept.target)]
    pairs = [(name, kept.target.get(name), target.get(name)) for name in names]
    return [f"{name} {_said(there)} there, {_said(here)} here" for name, there, here in pairs if there != here]


def _said(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "not known" if value is None else str(value)
