"""Open case J05: a capture window is tied to the measured phase, and is closed whatever happens."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from kvbench.run import Run
from tests.stub.stub import DONE, FIN, C, Reply, Seen, Stub, U, answer_json
from tests.whole import Whole, against, served

ANSWER = Reply([(0, C("hi") + FIN + U(8, 2) + DONE)])
COLLECT = "collect: [{kind: nsight, through: server, after: 500ms, for: FOR}]"
PHASES = "{warmup: {policy: fixed, requests: 20}, steady: {for: 4s}, drain: {for: 1s}}"


class Profiled(Stub):
    """A stub with /start_profile and /stop_profile, and one that takes `start` s for its first answer."""

    def __init__(self, start: float = 0.0, status: int = 200, owner: str = "vllm") -> None:
        models = answer_json({"data": [{"id": "m", "owned_by": owner}]})
        super().__init__(self.answer, gets=lambda seen: models if seen.path == "/v1/models" else answer_json({}, 404))
        self.scripts["OPTIONS"] = lambda seen: answer_json({}, 404 if status == 404 else 405)
        self.start, self.status = start, status
        self.begun = asyncio.Event()  # a window

    def answer(self, seen: Seen) -> Reply:
        if seen.path.endswith("_profile"):
            self.begun.set()
            return answer_json({}, self.status)
        return Reply([(self.start * 1e3, ANSWER.steps[0][1])]) if seen.number == 0 else ANSWER  # type: ignore[index]

    def profiles(self) -> list[Seen]:
        """What may have begun or ended one: on SGLang a GET does too."""
        return [seen for seen in self.log if seen.path.endswith("_profile") and seen.method != "OPTIONS"]


def ran(stub: Profiled, folder: Path, length: str = "1s", phases: str = PHASES, **options: Any) -> Whole:
    text = served("{shape: constant, rate: 20/s}", phases, also=COLLECT.replace("FOR", length))
    return against(stub, text, folder, **options)


def states(run: Whole) -> list[str]:
    return [event["data"]["state"] for event in run.lines("events.jsonl") if event["kind"] == "profile"]


def test_j05_a_window_opens_after_warm_up_and_closes_before_drain(tmp_path: Path) -> None:
    stub = Profiled(start=1.0)  # warm-up takes as long as the server needs: no guess of a delay is made
    run = ran(stub, tmp_path)
    start, stop = stub.profiles()
    assert (start.path, stop.path) == ("/start_profile", "/stop_profile")
    assert (start.body, stop.body) == (b"", b"")  # vLLM's form
    order = [seen for seen in stub.posts if not seen.path.endswith("_profile")]
    steady = [record for record in run.records if record.phase == "steady"]
    warm = [record for record in run.records if record.phase == "warmup"]
    assert all(seen.received < start.received for seen in order[: len(warm)])
    assert sum(start.received < seen.received < stop.received for seen in order) == pytest.approx(20, abs=3)
    assert stop.received < order[-1].received  # steady went on after it
    (closed,) = [event["data"] for event in run.lines("events.jsonl") if event["data"].get("state") == "closed"]
    assert closed["file"] is None
    assert "where the server's own nsys writes it" in closed["reason"]
    assert run.summary["headline"]["n"] == len(steady) - run.summary["captures"]["left_out"]["requests"] < len(steady)
    assert run.summary["captures"]["profiled"]


@pytest.mark.slow
def test_j05_sglang_is_asked_in_its_own_form(tmp_path: Path) -> None:
    stub = Profiled(owner="sglang")
    ran(stub, tmp_path, "500ms")
    start, stop = stub.profiles()
    assert start.json() == {"activities": ["CUDA_PROFILER"]}
    assert stop.body == b""


def test_j05_a_server_without_it_costs_the_capture_and_not_the_run(tmp_path: Path) -> None:
    stub = Profiled(status=404)
    run = ran(stub, tmp_path, phases="{steady: {for: 1s}, drain: {for: 1s}}")
    assert stub.profiles() == []  # nothing was begun to find out
    assert run.summary["outcomes"]["ok"] == 20
    (line,) = [line for line in run.summary["warnings"] if "collector nsight" in line]
    assert "has no /start_profile: start vLLM with `--profiler-config.profiler cuda`" in line


@pytest.mark.slow
def test_j05_a_server_that_refuses_is_stopped_all_the_same(tmp_path: Path) -> None:
    stub = Profiled(status=500)
    run = ran(stub, tmp_path, "200ms")
    assert states(run) == ["failed", "failed"]
    assert [seen.path for seen in stub.profiles()] == ["/start_profile", "/stop_profile"] * 2


def test_j05_ctrl_c_closes_the_window(tmp_path: Path) -> None:
    stub = Profiled()

    async def interrupt() -> None:
        await stub.begun.wait()
        await asyncio.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    began = time.monotonic()
    run = ran(stub, tmp_path, "1s", also=interrupt)
    assert run.code == 130
    assert [seen.path for seen in stub.profiles()] == ["/start_profile", "/stop_profile"]
    assert states(run) == ["opened", "closed"]
    assert time.monotonic() - began < 10


def test_j05_an_error_closes_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Profiled()

    def broken(self: Run, at: float, live: Any) -> None:
        if stub.profiles():
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Run, "_steer", broken)
    with pytest.raises(OSError, match="No space left"):
        ran(stub, tmp_path, "1s")
    assert [seen.path for seen in stub.profiles()] == ["/start_profile", "/stop_profile"]
