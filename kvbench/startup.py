"""Starts the server that a scenario launches: what is asked of its target first, under nsys where a collector wants that."""

import os
import re
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kvbench.clock import Clock
from kvbench.collect import CollectorError
from kvbench.collect.nsight import Nsight
from kvbench.collect.session import dismissed
from kvbench.launch import Launch, Server
from kvbench.problem import Problem
from kvbench.scenario import Scenario, ScenarioError
from kvbench.target import TargetUnreachable
from kvbench.target.http import HttpTarget

Answers = Callable[[], Awaitable[bool]]
HERE: Final = ("localhost", "127.0.0.1", "::1")  # hosts that are this machine
_VARIABLE = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*")


def secret(key: str, name: str) -> str:
    """The environment variable `name`, which the scenario's `key` asks for. Raises ScenarioError where there is none."""
    value = os.environ.get(name)
    if not value:
        raise ScenarioError([Problem("", key, f"the environment variable {name} is not set")])
    return value


async def launched(scenario: Scenario, launch: Launch, clock: Clock, target: HttpTarget) -> Server:
    """The server, started and answering. Under nsys where a collector wants that; plain, saying why, where it does not start so.

    Raises TargetUnreachable with its last lines where it ends or does not answer in time; nothing of it is left then.
    """
    answers, urls = partial(_answers, target), scenario.target.addresses()
    if await answers():
        raise TargetUnreachable("a server answers there already, before target.launch: stop it, or leave target.launch out")
    command = [_filled("target.launch.command", part) for part in launch.command]
    env = {name: _filled(f"target.launch.env.{name}", text) for name, text in launch.env.items()}
    pairs = zip((*command, *env.values()), (*launch.command, *launch.env.values()), strict=True)
    hidden = [given for given, written in pairs if given != written]
    log = launch.log or Path(scenario.out, f"{scenario.name}-server-{os.getpid()}.log")
    why = ""
    spec = next((one for one in scenario.collect or () if isinstance(one, Nsight)), None)
    if spec is not None and spec.launches:
        session = f"kvbench-{os.getpid()}"
        try:
            prefix = await spec.prefix(session)
            under = Server(clock, log, hidden, partial(dismissed, spec.nsys, session))
            await _begin(under, [*prefix, *command], env, answers, launch, urls)
            under.session = session
            return under
        except (CollectorError, TargetUnreachable) as error:
            why = str(error) if isinstance(error, CollectorError) else f"under nsys {error}"
    server = Server(clock, log, hidden)
    await _begin(server, command, env, answers, launch, urls)
    server.unprofiled = why
    return server


def _filled(key: str, text: str) -> str:
    return secret(key, text[1:]) if _VARIABLE.fullmatch(text) else text


async def _begin(
    server: Server, command: list[str], env: dict[str, str], answers: Answers, launch: Launch, urls: Iterable[str]
) -> None:
    """Start it and wait for it; whatever goes wrong, nothing of it is left. What answers may be another run's server, which was
    faster: both found the port free."""
    try:
        server.start(command, env)
        await server.ready(answers, launch.ready)
        if rival := server.rival({split.port or 80 for url in urls if (split := urlsplit(url)).hostname in HERE}):
            raise TargetUnreachable(f"the launched server is not what answers: {rival}. Give each run a port of its own")
    except BaseException:
        await server.end()
        raise


async def _answers(target: HttpTarget) -> bool:
    """Is every server of the target ready? One that is loading its model answers 503, if anything."""
    try:
        return all(server["status"] < 500 for server in (await target.open())["servers"])
    except TargetUnreachable:
        return False
