"""The sink against databases that refuse, break, ask to wait and hang: what is sent again, what is not, what a person is told."""

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvbench.cli import app
from kvbench.clock import VirtualLoop
from kvbench.core import Event, Sample, Window
from kvbench.scribe import Scribe
from kvbench.sink import SinkError, SinkPlace
from kvbench.sink.database import Reply
from kvbench.sink.influx import Influx
from kvbench.sink.sender import Sender
from kvbench.sink.spool import Spool
from tests.sink.servers import Rude, free_port

TAKEN: tuple[int, dict[str, str], bytes] = (204, {}, b"")
MODES = ["v1", "v2"]
Script = Callable[[list[str], int], tuple[int, dict[str, str], bytes]]


def samples(count: int) -> list[Sample]:
    return [Sample(t=n / 100, name="x", value=float(n), source="s") for n in range(count)]


def deliver(rude: Rude, folder: Path, count: int = 20, mode: str = "v1", **spec: Any) -> dict[str, Any]:
    """What `told` says after `count` samples to a rude database."""
    sink = Influx.model_validate({"url": rude.url, "mode": mode, "drain": 3.0, **spec}).build(SinkPlace(folder, "run-1", 1.7e9))
    return deliver_to(sink, count)


def deliver_to(sink: Any, count: int) -> dict[str, Any]:
    for sample in samples(count):
        sink.write(sample)
    asyncio.run(sink.aclose())
    return dict(sink.told())


def values(lines: list[str]) -> list[float]:
    """Of the samples among the lines, in the order of arrival."""
    return [float(line.split(" x=")[1].split()[0]) for line in lines if " x=" in line]


def after_preflight(script: Script) -> Script:
    return lambda lines, n: TAKEN if n == 1 else script(lines, n - 1)


@pytest.mark.parametrize("mode", MODES)
def test_all_arrives_once_and_the_spool_is_gone(tmp_path: Path, mode: str) -> None:
    with Rude() as rude:
        told = deliver(rude, tmp_path, 3000, mode)
    assert values(rude.lines) == [float(n) for n in range(3000)]
    assert (told["points"], told["delivered"], told["remaining"], told["notes"]) == (3000, 3000, 0, [])
    assert not list(tmp_path.rglob("*.lp"))


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_is_too_long_is_split(tmp_path: Path, mode: str) -> None:
    def script(lines: list[str], n: int) -> tuple[int, dict[str, str], bytes]:
        return TAKEN if len(lines) <= 3 else (413, {}, b'{"error":"Request Entity Too Large"}')

    with Rude(after_preflight(script)) as rude:
        told = deliver(rude, tmp_path, 20, mode)
    assert values(rude.lines) == [float(n) for n in range(20)]
    assert (told["delivered"], told["refused"]) == (20, 0)


@pytest.mark.parametrize("mode", MODES)
def test_a_bad_line_is_found_and_the_others_arrive_once(tmp_path: Path, mode: str) -> None:
    def script(lines: list[str], n: int) -> tuple[int, dict[str, str], bytes]:
        bad = [line for line in lines if " x=13.0 " in line or " x=4.0 " in line]
        return (400, {}, b'{"code":"invalid","message":"unable to parse"}') if bad else TAKEN

    with Rude(after_preflight(script)) as rude:
        told = deliver(rude, tmp_path, 20, mode)
    assert values(rude.lines) == [float(n) for n in range(20) if n not in (4, 13)]
    assert (told["delivered"], told["refused"], told["remaining"]) == (18, 2, 0)
    dead = next(tmp_path.rglob("dead.lp")).read_text().splitlines()
    assert values(dead) == [4.0, 13.0]
    assert dead[0] == "# 400 (unable to parse)"
    assert any("dead.lp" in note for note in told["notes"])


@pytest.mark.parametrize("mode", MODES)
def test_a_partial_write_is_not_sent_again(tmp_path: Path, mode: str) -> None:
    answers = []

    def script(lines: list[str], n: int) -> tuple[int, dict[str, str], bytes]:
        answers.append(lines)
        return 400, {}, b'{"error":"partial write: field type conflict: input field \\"x\\" dropped=2"}'

    with Rude(after_preflight(script)) as rude:
        told = deliver(rude, tmp_path, 20, mode)
    assert values([line for lines in answers for line in lines]) == [float(n) for n in range(20)]
    assert (told["delivered"], told["refused"]) == (20 - 2 * len(answers), 2 * len(answers))


@pytest.mark.parametrize("mode", MODES)
def test_a_server_that_asks_to_wait_is_waited_for(tmp_path: Path, mode: str) -> None:
    def script(lines: list[str], n: int) -> tuple[int, dict[str, str], bytes]:
        return (503, {"Retry-After": "1"}, b"busy") if n == 1 else TAKEN

    with Rude(after_preflight(script)) as rude:
        told = deliver(rude, tmp_path, 20, mode)
    assert values(rude.lines) == [float(n) for n in range(20)]
    assert rude.posts[2][0] - rude.posts[1][0] >= 0.95
    assert told["complete"]


def test_waits_double_up_to_5_s_and_begin_anew_after_a_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers by script, and waits that are noted and not made. Retry-After is followed where it asks for more."""
    said = [Reply(503)] * 8 + [Reply(204), Reply(None, "refused"), Reply(429, "", 30.0), Reply(204)]
    answers, waits, posted = iter(said), [], []

    class Scripted:
        where = "there"

        def post(self, lines: bytes) -> Reply:
            posted.append(lines)
            return next(answers)

        def close(self) -> None:
            return

    spool = Spool(tmp_path)
    sender = Sender(spool, Scripted())  # type: ignore[arg-type]
    monkeypatch.setattr(sender, "_wait", waits.append)
    for line in (b"a x=1 1\n", b"a x=2 2\n"):
        spool.append(line)
        while data := spool.read(1):
            sender._deliver(data)
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 0.1, 30.0])
    assert posted[-3:] == [b"a x=2 2\n", *[b"a x=1 1\na x=2 2\n"] * 2], (
        "after no answer at all, what was acknowledged just before too"
    )


def test_k06_a_queue_for_a_disk_that_hangs_is_bounded_and_its_drops_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.sink.sender.BACKLOG", 3)
    with Rude() as rude:
        sink = Influx(url=rude.url, mode="v1", drain=0.1).build(SinkPlace(tmp_path, "r", 1e9))
        monkeypatch.setattr(sink.sender, "_keep", lambda: None)  # type: ignore[attr-defined]
        told = deliver_to(sink, 10)
    assert (told["points"], told["delivered"], told["lost"], told["remaining"]) == (10, 0, 7, 3)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("mode", MODES)
def test_a_token_that_is_refused_ends_the_sending_and_is_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, status: int
) -> None:
    monkeypatch.setenv("TOKEN", "s3cr3t-t0ken")
    with Rude(after_preflight(lambda lines, n: (status, {}, b"the token s3cr3t-t0ken is unknown"))) as rude:
        told = deliver(rude, tmp_path, 20, mode, token_env="TOKEN")
    assert len(rude.posts) == 2
    assert "s3cr3t-t0ken" in rude.posts[1][2]["Authorization"]
    assert (told["delivered"], told["remaining"]) == (0, 20)
    assert f"answered {status} (the token *** is unknown): nothing more is sent" in told["notes"][0]
    assert f"kvbench export {tmp_path} --influx {rude.url} --resume" in told["notes"][1]
    assert "s3cr3t-t0ken" not in json.dumps(told)
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"s3cr3t" in path.read_bytes() for path in kept)
    assert values(next(tmp_path.rglob("000001.lp")).read_text().splitlines()) == [float(n) for n in range(20)]


def test_a_login_goes_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGIN", "ann:pw")
    with Rude() as rude:
        deliver(rude, tmp_path, 1, token_env="LOGIN")
    assert rude.posts[0][2]["Authorization"] == "Basic YW5uOnB3"  # base64 of ann:pw


@pytest.mark.parametrize("mode", MODES)
def test_the_end_is_bounded_when_the_database_hangs(tmp_path: Path, mode: str) -> None:
    with Rude() as rude:
        spec = Influx.model_validate({"url": rude.url, "mode": mode, "drain": 0.3, "timeout": 2.0})
        sink = spec.build(SinkPlace(tmp_path, "r", 1e9))
        rude.delay = 0.8
        for sample in samples(10):
            sink.write(sample)
        begin = time.perf_counter()
        asyncio.run(sink.aclose())
        assert time.perf_counter() - begin < 0.7
        told = sink.told()
        time.sleep(0.8)  # the write that is under way ends
    assert told["remaining"] == 10
    assert "10 of 10 points were not delivered" in told["notes"][-1]


def test_a_database_that_goes_away_is_told_with_its_last_answer(tmp_path: Path) -> None:
    with Rude() as rude:
        sink = Influx(url=rude.url, mode="v1", drain=0.3).build(SinkPlace(tmp_path, "r", 1e9))
    for sample in samples(10):
        sink.write(sample)
    asyncio.run(sink.aclose())
    assert "10 of 10 points" in sink.told()["notes"][-1]
    assert "Connection refused" in sink.told()["notes"][-1]


@pytest.mark.parametrize(
    ("mode", "answer", "said"),
    [
        (
            "v1",
            (401, {}, b'{"error":"unable to parse authentication credentials"}'),
            "no token, since token_env names no variable",
        ),
        ("v1", (404, {}, b'{"error":"database not found: \\"kvbench\\""}'), "CREATE DATABASE"),
        ("v2", (404, {}, b"404 page not found"), "InfluxDB before 1.8 needs mode: v1"),
        ("v2", (500, {}, b""), "answered 500. Nothing was stored"),
    ],
)
def test_the_write_before_the_run_says_what_to_do(tmp_path: Path, mode: Any, answer: Any, said: str) -> None:
    with Rude(lambda lines, n: answer) as rude, pytest.raises(SinkError) as caught:
        Influx(url=rude.url, mode=mode).build(SinkPlace(tmp_path, "r", 1e9))
    assert f"influx: writing one point to {rude.url}/" in str(caught.value)
    assert said in str(caught.value)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.parametrize("mode", MODES)
def test_no_answer_before_the_run_names_the_address(tmp_path: Path, mode: Any) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(SinkError, match=r"no answer \(.*Connection refused\). Is it running"):
        Influx(url=url, mode=mode).build(SinkPlace(tmp_path, "r", 1e9))


def test_a_token_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH", raising=False)
    with pytest.raises(SinkError, match="environment variable NO_SUCH"):
        Influx(url="http://127.0.0.1:1", token_env="NO_SUCH").build(SinkPlace(tmp_path, "r", 1e9))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"url": "localhost:8086"}, "write http://HOST:PORT"),
        ({"url": "http://ann:pw@h:1"}, "no password in the address"),
        ({"url": "http://h:1/write?db=x"}, "ends in a query"),
        ({"url": "http://h:1", "tags": {"run": "x"}}, "tag 'run'"),
        ({"url": "http://h:1", "tags": {"a b": "x"}}, "tag 'a b'"),
    ],
)
def test_a_spec_is_held_to_what_can_work(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Influx.model_validate(spec)


def test_two_sinks_for_one_database_are_one_too_many(tmp_path: Path) -> None:
    with Rude() as rude:
        spec = Influx(url=rude.url, mode="v1")
        sink = spec.build(SinkPlace(tmp_path, "r", 1e9))
        with pytest.raises(SinkError, match="is in use"):
            spec.build(SinkPlace(tmp_path, "r", 1e9))
        asyncio.run(sink.aclose())
        asyncio.run(spec.build(SinkPlace(tmp_path, "r", 1e9)).aclose())


def test_a_full_disk_costs_points_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def full(fd: int, data: bytes) -> int:
        if b" x=" in data:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    with Rude() as rude:
        monkeypatch.setattr(os, "write", full)
        told = deliver(rude, tmp_path, 20)
    assert (told["points"], told["delivered"], told["lost"], told["complete"]) == (20, 0, 20, False)
    assert "No space left on device" in told["notes"][0]


def test_odd_items_are_counted_and_end_nothing(tmp_path: Path) -> None:
    with Rude() as rude:
        sink = Influx(url=rude.url, mode="v1").build(SinkPlace(tmp_path, "r", 1e9))
        sink.write(Event(t=1.0, kind="stop", data={"x": object()}))
        sink.write(Sample(t=float("nan"), name="x", value=1.0))
        asyncio.run(sink.aclose())
    assert (sink.told()["odd"], sink.told()["points"]) == (2, 0)


def test_an_error_of_ours_is_told_and_ends_nothing(tmp_path: Path) -> None:
    with Rude() as rude:
        sink = Influx(url=rude.url, mode="v1").build(SinkPlace(tmp_path, "r", 1e9))
        sink.sender.database.post = lambda lines: 1 / 0  # type: ignore[attr-defined]
        told = deliver_to(sink, 5)
    assert told["notes"][0].endswith("internal error while sending to " + told["to"] + ": ZeroDivisionError: division by zero")
    assert (told["delivered"], told["remaining"]) == (0, 5)


def test_it_ends_in_virtual_time_too(tmp_path: Path) -> None:
    with Rude(delay=0.1) as rude, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        sink = Influx(url=rude.url, mode="v1").build(SinkPlace(tmp_path, "r", 1e9))
        for sample in samples(10):
            sink.write(sample)
        runner.run(sink.aclose())
    assert sink.told()["delivered"] == 10


def test_a_run_whose_sink_cannot_write_does_not_start(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    (tmp_path / "s.yaml").write_text(
        "name: refused\n"
        "target: {kind: sim, model: llama-3.1-8b, hardware: h100}\n"
        "workload: {arrivals: {shape: poisson, rate: 5/s}, prompt: 32, output: 8}\n"
        "phases: {steady: {for: 5s}}\n"
        f"sinks: [{{kind: influx, url: '{url}', mode: v1}}]\n"
    )
    found = CliRunner().invoke(app, ["run", str(tmp_path / "s.yaml"), "--quiet", "--out", str(tmp_path / "out")])
    assert found.exit_code == 2
    assert f"sinks[0]: influx: writing one point to {url}/write?db=kvbench: no answer" in found.output
    assert not list((tmp_path / "out").iterdir()), "no empty run directory is left behind"


def test_a_sink_that_is_behind_says_so_and_when_it_is_no_longer(tmp_path: Path) -> None:
    """The database is away for a while: one event as that begins, one as it ends, told with the windows."""
    away = [True]
    told: list[Any] = []

    def script(lines: list[str], n: int) -> tuple[int, dict[str, str], bytes]:
        return (503, {}, b"away") if away[0] and n > 1 else TAKEN

    def until(wanted: bool) -> None:
        end = time.monotonic() + 5
        while bool(sink.behind()) is not wanted and time.monotonic() < end:
            time.sleep(0.01)

    with Rude(script) as rude:
        sink = Influx.model_validate({"url": rude.url, "mode": "v1"}).build(SinkPlace(tmp_path, "run-1", 1.7e9))
        journal: Any = SimpleNamespace(write=told.append)
        scribe = Scribe(journal, None, [sink], None, None)  # type: ignore[arg-type]

        def tick(end: float) -> None:
            scribe.tell(Window(start=end - 1, end=end, counts={"ok": 1}, values={}))

        tick(1.0)
        until(True)
        tick(2.0)
        tick(3.0)
        away[0] = False
        until(False)
        tick(4.0)
        asyncio.run(sink.aclose())
    events = [(item.t, item.data["state"], item.data["to"]) for item in told if isinstance(item, Event)]
    assert [event[:2] for event in events] == [(2.0, "behind"), (4.0, "back")]
    assert "503" in next(item.data["reason"] for item in told if isinstance(item, Event))
