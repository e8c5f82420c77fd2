"""`kvbench serve`: the embedded engine as an OpenAI-compatible server. Parses and prints, decides nothing."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvbench.clock import Clock
    from kvbench.endpoint import Sim
    from kvbench.serve.app import Server

File = Annotated[Path | None, typer.Argument(metavar="[SCENARIO]", help="A scenario whose target section is served.")]
Model = Annotated[str, typer.Option("--model", help="A model profile, where no scenario is given.")]
Hardware = Annotated[str, typer.Option("--hardware", help='A hardware profile, with a count: "8 x h100".')]
Engine = Annotated[str, typer.Option("--engine", help="An engine profile.")]
Settings = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="A key of the target: settings.policy=arc.")]
Nodes = Annotated[int | None, typer.Option("--nodes", min=1, max=256, help="A cluster of so many replicas behind one port.")]
Speed = Annotated[str, typer.Option("--speed", metavar="FACTOR", help="How fast engine time runs: 10x.")]
Host = Annotated[str, typer.Option("--host", help="The address to listen on.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="0: one that is free.")]
Tokenizer = Annotated[Path | None, typer.Option("--tokenizer", help="A tokenizer.json; words and bytes where not given.")]
Events = Annotated[
    str | None,
    typer.Option(
        "--kv-events", metavar="ENDPOINT", help="Publish KV events: tcp://*:5557 waits for subscribers, tcp://HOST:5557 connects."
    ),
]
Replay = Annotated[str | None, typer.Option("--kv-replay", metavar="ENDPOINT", help="Answer who missed some of them.")]
CacheLog = Annotated[
    Path | None,
    typer.Option("--cache-log", metavar="FILE", help="Keep every look-up and change of the KV cache there, as a line."),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of what is drawn: refusals, some eviction policies.")]


def serve(
    scenario: File = None,
    model: Model = "llama-3.1-8b",
    hardware: Hardware = "rtx-4090",
    engine: Engine = "vllm",
    set_: Settings = [],  # noqa: B006
    nodes: Nodes = None,
    speed: Speed = "1x",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    tokenizer: Tokenizer = None,
    kv_events: Events = None,
    kv_replay: Replay = None,
    cache_log: CacheLog = None,
    seed: Seed = 0,
) -> None:
    """Serve the embedded engine over HTTP: OpenAI's API, vLLM's errors and metrics. Ends with 130 on SIGINT, 143 on SIGTERM.

    Paths: /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /health, /ping, /load, /version, /metrics,
    /reset_prefix_cache. Answers are made-up words of exactly max_tokens tokens.
    """
    import asyncio

    import uvloop

    try:
        spec = _target(scenario, {"model": model, "hardware": hardware, "engine": engine}, set_, nodes)
        factor = _factor(speed)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(_run(spec, seed, factor, host, port, tokenizer, (kv_events, kv_replay), cache_log))
    except (ValueError, OSError) as error:
        typer.echo(f"kvbench serve: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(code)


def _target(scenario: Path | None, parts: dict[str, str], sets: list[str], nodes: int | None) -> "Sim":
    """What to serve. ValueError where it is not the embedded engine, or something in it is wrong."""
    from pydantic import ValidationError

    from kvbench.endpoint import Sim
    from kvbench.scenario import load
    from kvbench.yaml_source import read_text

    if scenario is not None:
        found = load(scenario, [f"target.{one}" for one in sets] + ([f"target.cluster.replicas={nodes}"] if nodes else [])).target
        if not isinstance(found, Sim):
            raise ValueError(f"{scenario}: target.kind is not sim: only the embedded engine can be served")
        return found
    source = read_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in parts.items()), "--set", numbered=False)
    for one in [*sets, *([f"cluster.replicas={nodes}"] if nodes else [])]:
        source.set(one)
    try:
        return Sim.model_validate(source.data, context={"text": True})
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(
            f"{'.'.join(map(str, first['loc'])) or 'target'}: {first['msg'].removeprefix('Value error, ')}"
        ) from None


def _factor(speed: str) -> float:
    try:
        return float(speed.removesuffix("x"))
    except ValueError:
        raise ValueError(f"--speed {speed!r} is not a factor: write 10x") from None


async def _run(
    spec: "Sim",
    seed: int,
    speed: float,
    host: str,
    port: int,
    tokenizer: Path | None,
    events: tuple[str | None, str | None],
    cache_log: Path | None,
) -> int:
    """Serve until a signal comes. Returns its exit code."""
    import asyncio

    from kvbench.clock import Clock
    from kvbench.signals import CODES, listening

    loop = asyncio.get_running_loop()
    clock, done = Clock(loop), asyncio.Event()
    ear = listening(loop, lambda _: done.set())
    server = _build(spec, seed, speed, clock, tokenizer, events, cache_log)
    try:
        bound = await _listen(server, host, port)
        clock.start()
        shown = f"[{host}]" if ":" in host else host
        what = f"{_described(spec, server.machine.facts())}, {speed:g}x real time"
        typer.echo(f"serving {what}, at http://{shown}:{bound}/v1 (Ctrl-C ends it)")
        if spec.cache_log is not None and cache_log is None:
            typer.echo(
                "kvbench serve: target.cache_log says how much to keep, not where: nothing is kept without --cache-log FILE",
                err=True,
            )
        await done.wait()
    finally:
        server.close()
    return CODES[ear.number] if ear.number is not None else 0


async def _listen(server: "Server", host: str, port: int) -> int:
    """The port that is bound. ValueError, saying which other to take, where somebody has it."""
    import errno

    try:
        return await server.listen(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ValueError(f"port {port} of {host} is in use: name another with --port, or 0 for one that is free") from None


def _described(spec: "Sim", facts: dict[str, Any]) -> str:
    """Model, devices, who leaves the cache, and who chooses a node."""
    from kvbench.engine.router import ROUTERS
    from kvbench.report.sentences import devices

    routed = ""
    if spec.cluster is not None:
        routed = f", routed by {next(name for name, kind in ROUTERS.items() if isinstance(spec.cluster.router, kind))}"
    return f"{spec.model} on {devices(facts)}{routed}, cache policy {spec.load_engine().policy}"


def _build(
    spec: "Sim",
    seed: int,
    speed: float,
    clock: "Clock",
    tokenizer: Path | None,
    events: tuple[str | None, str | None],
    cache_log: Path | None,
) -> "Server":
    from kvbench.compose import build_machine
    from kvbench.engine.log import Log
    from kvbench.engine.tape import Access
    from kvbench.profile import layout
    from kvbench.serve.app import Feed, Server
    from kvbench.serve.events import Ledger, Publisher
    from kvbench.serve.kept import Kept
    from kvbench.serve.tokens import Plain, Real

    endpoint, replay = events
    if replay is not None and endpoint is None:
        raise ValueError("--kv-replay answers who missed KV events: give --kv-events too")
    feed, listeners = None, []
    if endpoint is not None and (
        spec.load_layers() is not None or len(layout(spec.load_model(), spec.load_engine().block).groups) > 1
    ):
        raise ValueError("--kv-events tells of one group of layers; this target has several. Leave one of the two out")
    if endpoint is not None:
        ledgers = [Ledger(spec.load_engine().block) for _ in range(len(spec.cluster.members()) if spec.cluster else 1)]

        def hear(access: Access) -> None:
            ledgers[access.node].hear(access)

        feed = Feed(ledgers, Publisher(endpoint, replay, "", clock.loop.add_reader, clock.loop.remove_reader))
        listeners = [hear]
    tokens = Real(tokenizer) if tokenizer is not None else Plain()
    log = Log(spec.cache_log or 1.0) if cache_log is not None else None
    machine = build_machine(spec, seed, [*listeners, log] if log is not None else listeners)
    kept = Kept(cache_log, log, clock) if cache_log is not None and log is not None else None
    return Server(machine, clock, tokens, spec.model, speed, feed, kept)
