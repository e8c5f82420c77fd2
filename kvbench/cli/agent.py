"""`kvbench agent`: tells of the GPUs of this machine over HTTP. Parses and prints, decides nothing."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.export import Mode

if TYPE_CHECKING:
    from kvbench.clock import Clock
    from kvbench.collect.gpus import Gpus
    from kvbench.sink.influx import Influx, InfluxSink
    from kvbench.sink.standing import Standing

GpuIds = Annotated[
    str | None,
    typer.Option("--gpu-ids", metavar="IDS", help="NVML indices or UUIDs: 0,1,2,3. none: the machine alone. Else all visible."),
]
Rate = Annotated[str, typer.Option("--sampling-rate", metavar="EVERY", help="How often GPUs are read: 100ms, or 10/s.")]
Listen = Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="Where it answers. Port 0: one that is free.")]
Keep = Annotated[str, typer.Option("--keep", metavar="SPAN", help="For how long fine readings are kept in memory.")]
ToInflux = Annotated[str | None, typer.Option("--influx", metavar="URL", help="Send every reading there too.")]
InfluxMode = Annotated[Mode | None, typer.Option("--influx-mode", help="v2: bucket and org; v1: database.")]
Bucket = Annotated[str | None, typer.Option("--influx-bucket", help="Of mode v2.")]
Org = Annotated[str | None, typer.Option("--influx-org", help="Of mode v2.")]
Database = Annotated[str | None, typer.Option("--influx-database", help="Of mode v1.")]
TokenEnv = Annotated[str | None, typer.Option("--influx-token-env", metavar="NAME", help="Environment variable with the token.")]
SpoolAt = Annotated[Path | None, typer.Option("--influx-spool", metavar="DIR", help="Where points wait for the database.")]
Disk = Annotated[str, typer.Option("--influx-disk", metavar="SIZE", help="How much may wait there.")]

FASTEST, SLOWEST = 0.02, 60.0  # seconds between two readings
SHORTEST, LONGEST = 10.0, 86_400.0  # seconds that are kept


def agent(
    gpu_ids: GpuIds = None,
    sampling_rate: Rate = "100ms",
    listen: Listen = "127.0.0.1:9400",
    keep: Keep = "10m",
    influx: ToInflux = None,
    influx_mode: InfluxMode = None,
    influx_bucket: Bucket = None,
    influx_org: Org = None,
    influx_database: Database = None,
    influx_token_env: TokenEnv = None,
    influx_spool: SpoolAt = None,
    influx_disk: Disk = "1GiB",
) -> None:
    """Read this machine's GPUs and tell of them over HTTP, for runs on another machine (collector `agent`) and for Prometheus.

    Example: kvbench agent --gpu-ids 0,1,2,3 --sampling-rate 100ms

    Paths: /metrics, /samples?since=T&until=T (JSON lines), /time, /health. Ends with 130 on SIGINT, 143 on SIGTERM; 2: a wrong
    option, or no GPU can be read.
    """
    import asyncio

    import uvloop

    given = {"mode": influx_mode and influx_mode.value, "bucket": influx_bucket, "org": influx_org, "database": influx_database,
             "token_env": influx_token_env}  # fmt: skip
    try:
        every, kept = _every(sampling_rate), _kept(keep)
        host, port = _address(listen)
        spec = _influx(influx, {name: value for name, value in given.items() if value is not None}, influx_spool)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(_run(_ids(gpu_ids), every, kept, (host, port), spec, influx_spool or _state(), _bytes(influx_disk)))
    except (ValueError, OSError) as error:
        typer.echo(f"kvbench agent: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(code)


def _ids(text: str | None) -> list[int | str] | None:
    """[]: no GPU. None: those that CUDA_VISIBLE_DEVICES shows."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ValueError("--gpu-ids names no GPU: write 0,1,2,3, or none to tell of the machine alone")
    return [] if words == ["none"] else [int(word) if word.isdecimal() else word for word in words]


def _every(text: str) -> float:
    from kvbench import units

    if "/" in text:
        rate = units.parse(text, units.RATES, "a sampling rate", "10/s")
        every = 1 / rate if rate > 0 else 0.0
    else:
        every = units.parse(text, units.DURATIONS, "a sampling rate", "100ms or 10/s")
    if not FASTEST <= every <= SLOWEST:
        raise ValueError(f"--sampling-rate {text}: GPUs are read every {units.duration(FASTEST)} to {units.duration(SLOWEST)}")
    return every


def _kept(text: str) -> float:
    from kvbench import units

    keep = units.parse(text, units.DURATIONS, "a duration", "10m")
    if not SHORTEST <= keep <= LONGEST:
        raise ValueError(f"--keep {text}: write {units.duration(SHORTEST)} to 24h")
    return keep


def _bytes(text: str) -> int:
    from kvbench import units

    most = round(units.parse(text, {**units.SIZES}, "a size", "1GiB"))
    if most < 1 << 20:
        raise ValueError(f"--influx-disk {text}: write 1MiB or more")
    return most


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"--listen {text!r} is not an address: write HOST:PORT, such as 127.0.0.1:9400 or [::1]:9400")
    return host, int(port)


def _state() -> Path:
    """Where this user's programs keep what must survive them; systemd's StateDirectory where it gives one."""
    import os

    given = os.environ.get("STATE_DIRECTORY")
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(given.split(":")[0]) if given else Path(home) / "kvbench-agent"


def _influx(url: str | None, settings: dict[str, Any], spool: Path | None) -> "Influx | None":
    from pydantic import ValidationError

    from kvbench.sink.influx import Influx

    if url is None:
        if settings or spool is not None:
            raise ValueError("the options --influx-... go with --influx URL")
        return None
    try:
        return Influx.model_validate({"url": url, "drain": 3.0, **settings})
    except ValidationError as error:
        told = (f"--influx-{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors())
        raise ValueError("; ".join(told).replace("--influx-url", "--influx")) from None


async def _run(
    ids: list[int | str] | None,
    every: float,
    keep: float,
    address: tuple[str, int],
    influx: "Influx | None",
    state: Path,
    disk: int,
) -> int:
    """Tell until a signal comes. Returns its exit code."""
    import asyncio

    from kvbench.agent.agent import Agent
    from kvbench.agent.http import Server
    from kvbench.clock import Clock
    from kvbench.collect import CollectorError
    from kvbench.signals import CODES, listening

    loop = asyncio.get_running_loop()
    clock, done = Clock(loop), asyncio.Event()
    ear = listening(loop, lambda _: done.set())
    gpus = await _gpus(ids, clock)
    told = Agent(clock, gpus, every, keep, _sink(influx, state, disk, clock), _warn)
    server = Server(told)
    try:
        bound = await _listen(server, *address)
        told.start()
        typer.echo(f"{_described(gpus, every)} at {_shown(address[0], bound)}/metrics (Ctrl-C ends it)")
        await done.wait()
    finally:
        await server.close()
        try:
            await told.stop()
        except CollectorError as error:
            _warn(str(error))
    return CODES[ear.number] if ear.number is not None else 0


async def _gpus(ids: list[int | str] | None, clock: "Clock") -> "Gpus | None":
    """ValueError where GPUs are meant and cannot be read."""
    import asyncio

    from kvbench.collect import CollectorError
    from kvbench.collect.gputhread import open_gpus

    if ids == []:
        return None
    try:
        return await asyncio.to_thread(open_gpus, ids, clock.now())
    except CollectorError as error:
        raise ValueError(f"{str(error).replace('gpus:', '--gpu-ids:')} (--gpu-ids none tells of the machine alone)") from None


def _sink(spec: "Influx | None", state: Path, disk: int, clock: "Clock") -> "InfluxSink | None":
    """A database that is away may come: only one that refuses is an error."""
    import platform

    from kvbench.sink import SinkPlace
    from kvbench.sink.influx import InfluxSink, preflight
    from kvbench.sink.points import Points

    if spec is None:
        return None
    place = SinkPlace(state, f"agent-{platform.node()}", clock.wall, {})
    database = spec.connect()
    try:
        reply = database.post(Points(place.run, place.wall, {}).mark("preflight").encode() + b"\n")
        if reply.status is None or reply.status >= 500:
            _warn(f"{database.where} does not take points yet ({reply}): they wait in {spec.where(state)}")
        elif not reply.ok:
            preflight(spec, database, place.run, place.wall)  # says what to do
        return InfluxSink(spec, place, _spool(spec.where(state), disk), database)
    except BaseException:
        database.close()
        raise


def _spool(where: Path, disk: int) -> "Standing":
    from kvbench.sink.standing import Standing

    try:
        return Standing(where, disk)
    except BlockingIOError:
        raise ValueError(f"{where} is in use by another agent: give this one a --influx-spool of its own") from None
    except OSError as error:
        raise ValueError(f"points cannot wait in {where}: {error.strerror}; name a --influx-spool") from None


async def _listen(server: Any, host: str, port: int) -> int:
    """The port that is bound. ValueError where it cannot be."""
    from ipaddress import ip_address

    try:
        bound = int(await server.listen(host, port))
    except OSError as error:
        raise ValueError(f"--listen {host}:{port} cannot be had: {error.strerror or error}; name another") from None
    try:
        near = ip_address(host).is_loopback
    except ValueError:
        near = host == "localhost"
    if not near:
        _warn(f"nothing protects port {bound} of {host}: whoever reaches it reads what this machine does (docs/guides/agent.md)")
    return bound


def _described(gpus: "Gpus | None", every: float) -> str:
    from kvbench import units

    if gpus is None:
        return "telling of this machine, without GPUs,"
    count = len([gpu for gpu in gpus.gpus if not gpu.mig])
    return f"telling of {count} GPU{'s' if count > 1 else ''} every {units.duration(every)}"


def _shown(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _warn(text: str) -> None:
    typer.echo(f"! {text}", err=True)
