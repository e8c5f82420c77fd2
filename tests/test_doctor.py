"""What `kvbench doctor --target` says of a server."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbench.cli import app
from kvbench.cli.doctor import _gpus
from tests.collect.fake_nvml import Fake
from tests.stub.stub import Reply, Seen, Stub, answer_json


@contextmanager
def serving() -> Iterator[str]:
    """The address of a vLLM-like server on a thread of its own: doctor opens a loop itself."""

    def reply(seen: Seen) -> Reply:
        if seen.path == "/v1/models":
            return answer_json({"data": [{"id": "m", "max_model_len": 2048, "owned_by": "vllm"}]})
        return answer_json({"version": "0.32.0"}) if seen.path == "/version" else answer_json({}, 404)

    loop, ready, found = asyncio.new_event_loop(), threading.Event(), list[str]()
    over = asyncio.Event()

    async def serve() -> None:
        async with Stub(reply, gets=reply) as stub:
            found.append(stub.url)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait(5)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(5)
        loop.close()


def said(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_a_servers_version_is_not_that_of_its_http_library() -> None:
    with serving() as url:
        code, text = said("--target", url)
    assert code == 0
    assert "models owned by vllm, version 0.32.0" in text
    assert "m: 2,048 tokens" in text


def test_an_address_is_read_as_a_run_reads_it() -> None:
    """Clients of OpenAI's API are given .../v1: `kvbench run --target` takes that, so doctor does."""
    with serving() as url:
        code, text = said("--target", f"{url}/v1/")
    assert code == 0
    assert "2,048" in text
    assert said("--target", "127.0.0.1:8000")[0] == 2


def test_gpus_are_those_that_nvml_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pynvml")
    monkeypatch.setenv("KVBENCH_FAKE_NVML", "")
    Fake(tmp_path / "state").say(count=2)
    what, found, advice = _gpus()
    assert (what, advice) == ("GPU", "")
    assert found.startswith("1 Fake H200 0, 1 Fake H200 1, driver "), found
