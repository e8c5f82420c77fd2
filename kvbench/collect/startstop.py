"""The server's own profiler: POST /start_profile and /stop_profile, as vLLM and SGLang have them.

Sources: vLLM's and SGLang's API servers. vLLM takes no body; SGLang a JSON body, here with CUDA_PROFILER (cudaProfilerStart, for
which nsys --capture-range=cudaProfilerApi waits) and without num_steps, since it refuses /stop_profile then.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp

from kvbench.collect import CollectorError
from kvbench.collect.profiler import ProfilerError
from kvbench.core import Seconds
from kvbench.unanswered import why

START: Final[Seconds] = 10.0
STOP: Final[Seconds] = 60.0  # the server writes its trace before it answers
BODIES: Final[dict[str, dict[str, Any] | None]] = {"vllm": None, "sglang": {"activities": ["CUDA_PROFILER"]}}
ABSENT: Final = (
    "has no /start_profile: start vLLM with `--profiler-config.profiler cuda` (before 0.13: VLLM_TORCH_CUDA_PROFILE=1), under "
    "`nsys profile --capture-range=cudaProfilerApi --capture-range-end=repeat ...`; SGLang has it as it is"
)


class StartStop:
    """Asks every server behind `urls`. The files lie where their nsys writes them, and are not to be seen from here."""

    def __init__(self, urls: Sequence[str], headers: Mapping[str, str], body: dict[str, Any] | None) -> None:
        self.urls, self.headers, self.body = urls, headers, body
        self._begun: list[str] = []  # where a profile of ours may run: another's is not ended
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> dict[str, Any]:
        """OPTIONS tells: 404 where there is no such route. SGLang begins a profile on a GET as well."""
        if not self.urls:
            raise CollectorError("no server to ask: the target has no address")
        for url in self.urls:
            try:
                async with asyncio.timeout(START), self._http().options(f"{url}/start_profile", headers=self.headers) as answer:
                    status = answer.status
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise CollectorError(f"{url}/start_profile: {why(error)}") from None
            if status == 404:
                raise CollectorError(f"{url} {ABSENT}")
        return {"urls": list(self.urls), "body": self.body}

    async def begin(self, stem: Path) -> None:
        self._begun = list(self.urls)
        told = await self._all(self.urls, "start_profile", START, self.body)
        self._begun = [url for url, (_, refused) in zip(self.urls, told, strict=True) if not refused]
        _raise(told, bool(self._begun))

    async def end(self, stem: Path) -> Path | None:
        _raise(await self._all(self._begun, "stop_profile", STOP, None))
        self._begun = []
        return None

    async def abandon(self) -> None:
        await self._all(self._begun, "stop_profile", START, None)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=STOP))
        return self._session

    async def _all(
        self, urls: Sequence[str], what: str, patience: Seconds, body: dict[str, Any] | None
    ) -> list[tuple[str, bool]]:
        """All of them, also where one fails: as `_post` has it."""
        return await asyncio.gather(*(self._post(f"{url}/{what}", patience, body) for url in urls))

    async def _post(self, url: str, patience: Seconds, body: dict[str, Any] | None) -> tuple[str, bool]:
        """(why it failed, "" where it did not; whether the server itself said so: SGLang does, with a 500, while a profile of
        someone else runs)."""
        try:
            async with asyncio.timeout(patience), self._http().post(url, headers=self.headers, json=body) as answer:
                if answer.status == 404:
                    return f"{url.rpartition('/')[0]} {ABSENT}", True
                said = (await answer.content.read(300)).decode(errors="replace").strip()
                refused = answer.status >= 300
                return f"{url} answers {answer.status}: {said or 'nothing'}" if refused else "", refused
        except TimeoutError:
            return f"{url} did not answer within {patience:g} s", False
        except (aiohttp.ClientError, OSError) as error:
            return f"{url}: {why(error)}", False


def _raise(told: Sequence[tuple[str, bool]], begun: bool = True) -> None:
    if why := [text for text, _ in told if text]:
        raise ProfilerError("; ".join(why), begun)


def body(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the server found at the target takes: SGLang's where it names itself so, else none."""
    told = " ".join(str(server.get(key)) for server in facts.get("servers", ()) for key in ("owner", "software")).lower()
    return BODIES["sglang" if "sglang" in told else "vllm"]
