"""kvbench doctor: is this machine fit to generate load, and what is at the other end."""

from collections.abc import Iterator

import typer

Finding = tuple[str, str, str]  # what, value, advice ("" where all is well)


def doctor(
    target: str = typer.Option(
        None, "--target", "-t", help="Base URL of a server to look at, for example http://127.0.0.1:8000."
    ),
    key_env: str = typer.Option(None, "--key-env", help="Environment variable that holds the server's API key."),
) -> None:
    """Check this machine: versions, open files, event-loop speed, clock, ports, GPU and nsys, and a target if named.

    Example: kvbench doctor --target http://127.0.0.1:8000
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from kvbench.report.text import plain

    findings = [*_machine()]
    code = 0
    if target is not None:
        found, code = _target(target, key_env)
        findings += found
    table = Table("check", "found", "advice", box=None, pad_edge=False)
    for what, value, advice in findings:
        table.add_row(what, Text(plain(value)), Text(plain(advice)) if advice else Text("ok", style="green"))
    Console().print(table)
    raise typer.Exit(code)


def _machine() -> Iterator[Finding]:
    yield from _versions()
    yield _open_files()
    yield from _loop_speed()
    yield _clock()
    yield _ports()
    yield from _tools()


def _versions() -> Iterator[Finding]:
    import platform
    from importlib.metadata import version

    yield "kvbench", version("kvbench"), ""
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}", ""
    packages = ("uvloop", "httptools", "msgspec", "numpy", "aiohttp", "pydantic")
    yield "packages", ", ".join(f"{name} {version(name)}" for name in packages), ""


def _open_files() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = "" if soft >= 4096 else f"each request in flight needs one: ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
    return "open files", f"{soft} (hard limit {hard})", advice


def _loop_speed() -> Iterator[Finding]:
    """How late a timer fires and how many callbacks a second the loop takes, in half a second."""
    import asyncio

    import uvloop

    from kvbench.clock import Clock

    async def measure() -> tuple[list[float], float]:
        clock = Clock(asyncio.get_running_loop())
        late = []
        for k in range(1, 251):
            await clock.sleep_until(k * 1e-3)
            late.append(clock.now() - k * 1e-3)
        start, turns = clock.now(), 20000
        for _ in range(turns):
            await asyncio.sleep(0)
        return sorted(late), turns / (clock.now() - start)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        late, rate = runner.run(measure())
    p50, p99 = late[len(late) // 2] * 1e3, late[int(len(late) * 0.99)] * 1e3
    yield (
        "timer lateness",
        f"p50 {p50:.2f} ms, p99 {p99:.2f} ms at 1,000/s",
        "" if p99 < 5 else "a busy machine: sends will be late; free some CPU",
    )
    yield (
        "event loop",
        f"{rate:,.0f} turns/s",
        "" if rate > 50_000 else "slow CPU: expect a low request rate before the client is the limit",
    )


def _clock() -> Finding:
    import time

    resolution = time.get_clock_info("perf_counter").resolution
    return "clock", f"perf_counter, {resolution * 1e9:.0f} ns steps", "" if resolution <= 1e-6 else "too coarse for token gaps"


def _ports() -> Finding:
    """Ports free for outgoing connections to one address."""
    from pathlib import Path

    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not file.exists():
        return "ports", "unknown on this system", ""
    low, high = (int(part) for part in file.read_text().split())
    advice = "" if high - low > 10_000 else f"at most {high - low} connections to one server: widen net.ipv4.ip_local_port_range"
    return "ports", f"{high - low:,} for outgoing connections", advice


def _tools() -> Iterator[Finding]:
    import shutil

    yield _gpus()
    yield "nsys", shutil.which("nsys") or "not installed (only needed to profile a server on this machine)", ""


def _gpus() -> Finding:
    """Those that NVML shows, as the collector `nvml` sees them."""
    from collections import Counter

    from kvbench.collect import CollectorError
    from kvbench.collect.gpus import Gpus

    try:
        import pynvml

        found = Gpus(pynvml)
    except ImportError:
        return "GPU", "not looked for: nvidia-ml-py is not installed", "only needed for GPUs here: pip install nvidia-ml-py"
    except CollectorError as error:
        return "GPU", f"none here ({error}); the embedded engine and remote servers need none", ""
    try:
        found.choose(None, None)
        names = Counter(gpu.name for gpu in found.gpus if not gpu.mig)
        parts = sum(bool(gpu.mig) for gpu in found.gpus)
        driver = found.facts()["driver"]
    except (CollectorError, pynvml.NVMLError) as error:
        return "GPU", f"NVML does not tell: {error}", "nvidia-smi says more"
    finally:
        found.close()
    told = ", ".join(f"{n} {name}" for name, n in names.items()) or "none"
    return "GPU", told + (f" in {parts} MIG instances" if parts else "") + f", driver {driver}", ""


def _target(url: str, key_env: str | None) -> tuple[list[Finding], int]:
    """What answers at `url`, and the exit code: 6 where nothing does, 2 where the key is missing or `url` is no address."""
    import asyncio
    import os

    from kvbench.endpoint import Http
    from kvbench.target import TargetUnreachable
    from kvbench.target.discover import discover

    key = os.environ.get(key_env, "") if key_env else ""
    if key_env and not key:
        return [("target", url, f"the environment variable {key_env} is not set")], 2
    try:
        addresses = Http.model_validate({"url": url}).addresses()  # as a run reads it: without a trailing /v1
    except ValueError:
        return [("target", url, "not a server's address: write http://host:port")], 2
    try:
        facts = asyncio.run(discover(addresses, "", {"Authorization": f"Bearer {key}"} if key else {}, None))
    except TargetUnreachable as error:
        return [("target", url, str(error))], 6
    server = facts["servers"][0]
    models = ", ".join(server["models"]) or "none listed"
    told = (("models owned by", "owner"), ("version", "version"), ("HTTP by", "software"))  # uvicorn's version is none of ours
    software = ", ".join(f"{what} {server[key]}" for what, key in told if server[key]) or "does not say"
    advice = f"/v1/models answers {server['status']}" if server["status"] >= 400 else ""
    context = ", ".join(f"{name}: {length:,} tokens" for name, length in server["max_context"].items()) or "not told"
    return [("target", url, advice), ("server", software, ""), ("models", models, ""), ("context", context, "")], 0
