"""`kvbench size`: what fits. Parses and prints, decides nothing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvbench.plan.mistakes import Mistake, Reading
    from kvbench.plan.size import Ask, Sized
    from kvbench.profile import EngineProfile, Hardware
    from kvbench.shape import Model

KV_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}
LARGE = 70 * 2**30  # vLLM's defaults differ from here on

Name = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model profile, or a Hugging Face config.json, or a folder with one.")
]
Devices = Annotated[str, typer.Argument(metavar="HARDWARE", help='A hardware profile, with a count: "8 x h100".')]
Engine = Annotated[str | None, typer.Option("--engine", help="An engine profile; vllm or vllm-large by the device's memory.")]
Length = Annotated[int | None, typer.Option("--len", min=1, help="Longest prompt + answer; the model's own where left out.")]
Used = Annotated[str | None, typer.Option("--utilization", metavar="SHARE", help="Share of device memory in use, as in 90%.")]
Precision = Annotated[str | None, typer.Option("--kv-dtype", help=f"Of the KV cache: {', '.join(KV_BYTES)}.")]
Settings = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override an engine setting: block=32.")]
InFlight = Annotated[int | None, typer.Option("--in-flight", min=1, help="Tokens of one request computed in one step, most.")]
Memory = Annotated[str | None, typer.Option("--kv-memory", metavar="SIZE", help="Bytes for KV blocks, as a server logged them.")]
AtOnce = Annotated[
    int | None, typer.Option("--concurrency", min=1, help="Do so many requests fit at once? With --prompt, --output.")
]
Prompt = Annotated[int | None, typer.Option("--prompt", min=1, help="Tokens of each prompt.")]
Output = Annotated[int | None, typer.Option("--output", min=1, help="Tokens of each answer.")]
Reported = Annotated[
    str | None, typer.Option("--reported", metavar="SIZE", help="A KV total somebody reports: what it means for each request.")
]
PerSecond = Annotated[str | None, typer.Option("--rate", metavar="RATE", help="With --reported, in place of --concurrency.")]
Explain = Annotated[
    bool, typer.Option("--explain", help="Every formula with its numbers, and what the usual mistakes would give.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Strict JSON on stdout.")]


def size(
    model: Name,
    hardware: Devices,
    engine: Engine = None,
    length: Length = None,
    utilization: Used = None,
    kv_dtype: Precision = None,
    set_: Settings = [],  # noqa: B006
    in_flight: InFlight = None,
    kv_memory: Memory = None,
    concurrency: AtOnce = None,
    prompt: Prompt = None,
    output: Output = None,
    reported: Reported = None,
    rate: PerSecond = None,
    explain: Explain = False,
    as_json: AsJson = False,
) -> None:
    """Does a model fit on devices, how many KV blocks are left, and how many requests do they hold?

    Example: kvbench size llama-3.1-70b "8 x h100" --explain

    Exit codes: 0 answered, whether it fits or not; 2 model, hardware, engine, option.
    """
    from pydantic import ValidationError

    from kvbench import units
    from kvbench.plan.mistakes import mistakes, readings
    from kvbench.plan.size import Sized

    try:
        shape, notes = _model(model, kv_dtype)
        devices, settings = _settings(hardware, engine, utilization, set_)
        ask = _ask(concurrency, prompt, output, reported)
        given = _positive("--kv-memory", units.parse(kv_memory, {**units.SIZES}, "a size", "40GiB")) if kv_memory else None
        sized = Sized(
            shape, devices, settings, length or settings.limit(shape), in_flight or settings.max_num_batched_tokens, given
        )
        if sized.length > shape.max_len:
            notes.append(f"{sized.length:,} tokens are more than the model's longest context, {shape.max_len:,}")
        if shape.heads % devices.count:
            notes.append(f"{shape.heads} attention heads cannot be split over {devices.count} devices: engines refuse that")
        implied = []
        if reported:
            total = _positive("--reported", units.parse(reported, {**units.SIZES}, "a size", "48GB"))
            many = units.parse(rate, units.RATES, "a rate", "1000/s") if rate else float(concurrency or 1)
            implied = readings(shape, total, _positive("--rate", many))
        elif rate:
            raise ValueError("--rate goes with --reported: tokens for each request of a total held at that rate")
    except ValidationError as error:
        first = error.errors()[0]
        typer.echo(
            f"error: {'.'.join(str(part) for part in first['loc'])}: {first['msg'].removeprefix('Value error, ')}", err=True
        )
        raise typer.Exit(2) from None
    except (ValueError, OSError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None
    wrong = mistakes(sized)
    if as_json:
        typer.echo(json.dumps(_json(sized, ask, wrong, implied, notes), indent=1, allow_nan=False))
        return
    typer.echo("\n".join(_text(sized, ask, wrong if explain else [], implied, notes, explain, bool(rate))))


def _positive(option: str, value: float) -> float:
    if value <= 0:
        raise ValueError(f"{option} must be more than 0")
    return value


def _model(name: str, kv_dtype: str | None) -> "tuple[Model, list[str]]":
    from kvbench.plan.config_json import read
    from kvbench.profile import load_model, names

    known = name.strip().lower() in names("models")
    shape, notes = read(Path(name)) if not known and (Path(name).exists() or name.endswith(".json")) else (load_model(name), [])
    if kv_dtype is None:
        return shape, notes
    if kv_dtype not in KV_BYTES:
        raise ValueError(f"--kv-dtype {kv_dtype}: known are {', '.join(KV_BYTES)}")
    return shape.model_copy(update={"kv_bytes": KV_BYTES[kv_dtype]}), notes


def _settings(hardware: str, engine: str | None, utilization: str | None, changed: list[str]) -> "tuple[Hardware, EngineProfile]":
    import yaml

    from kvbench import units
    from kvbench.profile import load_engine, load_hardware

    devices, overrides = load_hardware(hardware), {}
    for text in changed:
        key, sign, value = text.partition("=")
        if not sign:
            raise ValueError(f"--set {text}: write KEY=VALUE, as in --set block=32")
        try:
            overrides[key.strip()] = yaml.safe_load(value)
        except (yaml.YAMLError, RecursionError):
            raise ValueError(f"--set {text}: {value!r} is no value: write KEY=VALUE, as in --set block=32") from None
    if utilization is not None:
        try:
            units.parse(utilization, units.SHARES, "a share", "90%")
        except ValueError as error:
            raise ValueError(f"--utilization: {error}") from None
        overrides["gpu_memory_utilization"] = utilization
    return devices, load_engine(engine or ("vllm-large" if devices.memory >= LARGE else "vllm"), **overrides)


def _ask(concurrency: int | None, prompt: int | None, output: int | None, reported: str | None) -> "Ask | None":
    from kvbench.plan.size import Ask

    if prompt is not None and output is not None:
        return Ask(concurrency or 1, prompt, output)
    if prompt is not None or output is not None or (concurrency is not None and reported is None):
        raise ValueError("--concurrency, --prompt and --output go together: how many requests, of how many tokens each")
    return None


def _value(value: float, unit: str) -> str:
    from kvbench import units

    if unit.startswith("B"):
        return f"{value:,.0f} B" if abs(value) < 10**8 else units.size(value)
    return f"{value:,.2f}x" if unit == "x" else f"{value:,.0f} {unit}".rstrip()


def _text(
    sized: "Sized",
    ask: "Ask | None",
    wrong: "list[Mistake]",
    implied: "list[Reading]",
    notes: list[str],
    explain: bool,
    per_second: bool,
) -> Iterator[str]:
    from kvbench.plan.size import lines

    yield f"{sized.model.name} on {sized.hardware.count} x {sized.hardware.name}, engine profile {sized.engine.name}"
    section = ""
    for line in lines(sized):
        if line.section != section:
            section = line.section
            yield from ("", section)
        text = f"  {line.what:42} {_value(line.value, line.unit):>16}"
        yield f"{text}   {line.how}" if explain else text
    yield ""
    yield from _verdict(sized, ask)
    if wrong:
        yield from ("", "usual mistakes, and what they would give here")
        for one in wrong:
            per = one.unit[1:] if one.unit.startswith("B") else ""
            yield f"  {_value(one.wrong, one.unit):>14}{per} in place of {_value(one.right, one.unit)}{per}: {one.what}"
    if implied:
        yield from ("", "the reported total, for each request" + (" and second it stays" if per_second else ""))
        for reading in implied:
            over = "" if reading.each <= sized.model.max_len or per_second else f" (context ends at {sized.model.max_len:,})"
            yield f"  {reading.each:>12,.0f} tokens  at {reading.token_bytes:>12,.0f} B/token  {reading.what}{over}"
    for note in notes:
        yield f"note: {note}"


def _verdict(sized: "Sized", ask: "Ask | None") -> Iterator[str]:
    """Does it fit, and what would do."""
    if not sized.fits():
        advice = _enough(sized, None)
        alone = f"; a request of {sized.longest:,} tokens does" if sized.longest else ""
        yield f"does not fit: a request of {sized.length:,} tokens needs {sized.request_blocks:,} blocks, " + (
            f"{max(0, sized.blocks - 1):,} can be used{alone}{advice}"
        )
    if ask is None:
        if sized.fits():
            whole = min(max(0, sized.blocks - 1) // sized.request_blocks, sized.engine.max_num_seqs)
            many = f"{whole:,} request{'s' if whole != 1 else ''} of {sized.length:,} tokens at once"
            yield f"fits: {many} (vLLM's log says {sized.concurrency:,.2f}x)"
        return
    have, need, most = max(0, sized.blocks - 1), sized.need(ask), sized.holds(ask)
    what = f"{ask.requests:,} requests of {ask.prompt:,} + {ask.output:,} tokens"
    if most >= ask.requests:
        yield f"{what} fit: {need:,} of {have:,} blocks; {most:,} would"
        return
    limit = f" (max_num_seqs is {sized.engine.max_num_seqs:,})" if need <= have else ""
    room = f"they need {need:,} blocks and {have:,} can be used{limit}"
    yield f"{what} do not fit: {room}; {most:,} requests fit{_enough(sized, ask)}"


def _enough(sized: "Sized", ask: "Ask | None") -> str:
    """What would do, as the end of a sentence; nothing where memory was given and not computed."""
    if sized.given is not None or sized.engine.blocks is not None:
        return ""
    if count := sized.enough(ask):
        return f"; {count} x {sized.hardware.name} would do"
    return f"; no tensor-parallel group of {sized.hardware.name} would do"


def _json(
    sized: "Sized", ask: "Ask | None", wrong: "list[Mistake]", implied: "list[Reading]", notes: list[str]
) -> dict[str, Any]:
    from kvbench.plan.size import lines

    settings = sized.engine.model_dump(mode="json", exclude={"source"})
    asked = None
    if ask is not None:
        asked = ask._asdict() | {
            "need_blocks": sized.need(ask),
            "have_blocks": max(0, sized.blocks - 1),
            "holds": sized.holds(ask),
        }
    return {
        "model": sized.model.name, "hardware": sized.hardware.name, "count": sized.hardware.count, "engine": settings,
        "length": sized.length, "in_flight": sized.inflight, "fits": sized.fits(ask), "devices_enough": sized.enough(ask),
        "longest": sized.longest, "lines": [line._asdict() for line in lines(sized)], "asked": asked,
        "groups": [group._asdict() for group in sized.layout.groups], "mistakes": [one._asdict() for one in wrong],
        "readings": [one._asdict() for one in implied], "notes": notes,
    }  # fmt: skip
