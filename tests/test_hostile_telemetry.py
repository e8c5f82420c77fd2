"""What machines, servers and databases can say that no maker of a collector thinks of: no wrong number, no hang, no secret."""

import asyncio
import http.server
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from pydantic import ValidationError

from kvbench.cli.metrics import understood
from kvbench.clock import Clock, VirtualLoop, stopwatch
from kvbench.collect import CollectorError, Emit, Place
from kvbench.collect.allocator import Allocator
from kvbench.collect.beat import Beat
from kvbench.collect.exposition import NotAPageError, Reader
from kvbench.collect.exposition import Page as ReadPage
from kvbench.collect.fleet import Fleet
from kvbench.collect.gpus import Gpus, joined
from kvbench.collect.gputhread import GpuThread
from kvbench.collect.kvevents import KvEvents
from kvbench.collect.kvframes import read as read_batch
from kvbench.collect.logrules import LogRule
from kvbench.collect.peer import Peer
from kvbench.collect.prometheus import Prometheus, session
from kvbench.collect.residents import Asked, Residents
from kvbench.collect.scrape import Scrape
from kvbench.collect.serverlog import ServerLog
from kvbench.collect.settings import configured
from kvbench.core import CacheAccess, Event, Sample, Window
from kvbench.crew import Crew
from kvbench.evidence import Evidence
from kvbench.losses import collectors_lost, required_lost
from kvbench.replay import replay
from kvbench.report.energy import energy
from kvbench.sink import SinkError, SinkPlace
from kvbench.sink.influx import Influx
from kvbench.sink.spool import Spool
from tests.collect.fake_nvml import Fake
from tests.collect.pages import DCGM, DYNAMO, SGLANG, TGI, TRTLLM, read, take, vllm
from tests.stub.stub import DONE, FIN, C, Reply, Stub, U, answer_json, stream
from tests.whole import against, served, simulated

Item = Sample | Event | CacheAccess

# ---- pages of metrics

TTFT = "vllm:time_to_first_token_seconds"


def histogram(below: object, all_: object, total: object, edge: str = "0.1") -> str:
    return (
        vllm()
        + f'{TTFT}_bucket{{le="{edge}"}} {below}\n{TTFT}_bucket{{le="+Inf"}} {all_}\n'
        + f"{TTFT}_sum {total}\n{TTFT}_count {all_}\n"
    )


def totals(*texts: str) -> dict[str, Any]:
    return take(Fleet(["one"]), *texts).totals()


@pytest.mark.parametrize("more", ["# TYPE \n", "# TYPE\n", "#\n", "#  TYPE  vllm:x  counter\n", " \t\n", "  vllm:x 1\n"])
def test_odd_lines_of_the_format_are_lines_of_it(more: str) -> None:
    assert totals(vllm(), vllm(finished=5) + more)["finished_total"]["value"] == 5


@pytest.mark.parametrize("odd", ["NaN", "+Inf", "-3"])
def test_a_histogram_that_says_no_count_is_passed_over_and_its_others_are_not_lost(odd: str) -> None:
    found = totals(histogram(1, 2, 3.0), histogram(odd, odd, odd), histogram(2, 6, 9.0))
    assert (found["server_ttft"]["n"], found["server_ttft"]["mean"]) == (4, 1.5)
    assert found["finished_total"]["value"] == 0


def test_a_histogram_that_is_there_in_part_is_not_one_that_restarted() -> None:
    """A page cut at the end of a line: its edges that are missing have not fallen to 0."""
    part = vllm() + f'{TTFT}_bucket{{le="0.1"}} 1\n{TTFT}_count 2\n'
    cut = histogram(1, 2, 3.0).replace(f'{TTFT}_bucket{{le="0.1"}} 1\n', "")
    found = totals(histogram(1, 2, 3.0), part, cut, histogram(2, 4, 6.0))["server_ttft"]
    assert (found["n"], found["mean"], found["resets"]) == (2, 1.5, 0)


def test_an_edge_that_is_no_number_is_left_out() -> None:
    found = totals(histogram(0, 0, 0.0, edge="abc"), histogram(1, 2, 3.0, edge="abc"))["server_ttft"]
    assert (found["n"], found["p50"]) == (2, {"low": 0.0, "high": None})


def test_a_histogram_without_its_last_bucket_has_its_count() -> None:
    one, two = (vllm() + f'{TTFT}_bucket{{le="0.1"}} {below}\n{TTFT}_count {n}\n' for below, n in ((1, 2), (5, 7)))
    assert totals(one, two)["server_ttft"]["n"] == 5


@pytest.mark.parametrize("odd", ["NaN", "0", "-32", "+Inf"])
def test_blocks_of_no_size_are_no_tokens(odd: str) -> None:
    more = TRTLLM.replace('reused_blocks_total{model_name="m"} 10', 'reused_blocks_total{model_name="m"} 20')
    found = totals(TRTLLM, more.replace("32.0", odd))["hit_tokens_total"]
    assert (found["value"], found["gone"]) == (None, 1)
    assert totals(TRTLLM, more.replace("32.0", odd), more)["hit_tokens_total"]["value"] == 320


def test_a_page_of_another_kind_has_not_counted_its_whole_life_in_this_run() -> None:
    """The server was replaced: what the new one had counted before the page was first read was not ours."""
    later = SGLANG.replace('num_requests_total{model_name="m"} 12.0', 'num_requests_total{model_name="m"} 15.0')
    found = totals(vllm(finished=5), vllm(finished=9), SGLANG, later)
    assert (found["finished_total"]["value"], found["finished_total"]["gone"]) == (4 + 3, 1)
    assert found["generation_tokens_total"]["value"] == 0


def test_counters_below_zero_or_beyond_all_reason_are_none() -> None:
    found = totals(vllm(finished=3), vllm(finished=-5), vllm(finished=1e308), vllm(finished=10))
    assert found["finished_total"]["value"] == 7
    waiting = [
        r.value
        for r in take(
            Fleet(["one"]),
            vllm()
            .replace("waiting{", 'waiting{x="-",')
            .replace('model_name="m"} 0.0\nvllm:num_pre', 'model_name="m"} -3\nvllm:num_pre'),
        ).readings()
        if r.name == "waiting"
    ]
    assert set(waiting) == {None}


def test_engines_of_two_servers_keep_apart_whatever_their_labels_say() -> None:
    fleet = take(Fleet(["a", "b"]), 'vllm:num_requests_running{server="x"} 1\n')
    take(fleet, 'vllm:num_requests_running{server="x"} 2\n', server=1)
    assert {r.labels["server"]: r.value for r in fleet.readings() if r.labels} == {"a": 1, "b": 2}


def test_two_thousand_engines_are_named_in_well_under_a_quadratic_time() -> None:
    fleet = take(Fleet(["one"]), "".join(f'vllm:num_requests_running{{engine="{n}"}} 1\n' for n in range(4000)))
    began = stopwatch()
    assert [r.value for r in fleet.readings() if not r.labels] == [4000]
    assert stopwatch() - began < 0.5e9  # 2 s when each was compared with all before it


def test_a_line_without_an_end_is_refused_before_it_is_joined() -> None:
    def endless() -> Iterator[bytes]:
        for sent in range(1 << 12):
            assert sent < 8
            yield b"x" * 16384

    with pytest.raises(NotAPageError, match="longer than 64 KiB"):
        list(Reader(None).reading(endless(), ReadPage()))


def scraped(stub: Stub) -> list[bytes]:
    async def work() -> list[bytes]:
        async with stub, session(None) as asking:
            return await Scrape(asking, f"{stub.url}/metrics", Clock(asyncio.get_running_loop()), 2.0, {}).fetch()

    return asyncio.run(work())


def test_a_page_that_ends_in_a_number_may_lack_digits_of_it() -> None:
    """1234 cut to 12 is a restart and a thousand requests too many; where the length is known it is a page."""
    body = vllm(finished=1234).encode()[:-3]
    assert body.endswith(b" 12")
    with pytest.raises(OSError, match="cut off"):
        scraped(Stub(answer_json({}), gets=lambda _: Reply([(0, body)], 200, (("Content-Type", "text/plain"),), "close")))
    whole = Reply([(0, body)], 200, (("Content-Type", "text/plain"),), "length")
    assert b"".join(scraped(Stub(answer_json({}), gets=lambda _: whole))) == body


def test_pages_that_were_damaged_at_random_give_numbers_or_nothing() -> None:
    """Values, labels, lines and their order: no error but that it is no page, and no number that JSON does not have."""
    draw, whole_pages = random.Random(5), (histogram(1, 2, 3.0), SGLANG, TRTLLM, DYNAMO, DCGM, TGI)
    values = ("NaN", "+Inf", "-Inf", "-1", "1e308", "1e-320", "0", "", "abc", "1 2", '1 # {a="b"} 1')
    for _ in range(400):
        fleet = Fleet(["a", "b"])
        for _ in range(3):
            lines = draw.choice(whole_pages).splitlines()
            for _ in range(draw.randrange(6)):
                at, cut = draw.randrange(len(lines)), draw.randrange(40)
                lines[at] = draw.choice((
                    lines[at].rsplit(" ", 1)[0] + " " + draw.choice(values), "", draw.choice(lines), lines[at][:cut],
                    lines[at][:cut] + draw.choice('{}"\\,=# \t\0é') + lines[at][cut:],
                ))  # fmt: skip
            try:
                page = read("\n".join(lines) + "\n")
            except NotAPageError:
                continue
            for _ in fleet.take(draw.randrange(2), page):
                pass
            readings = [(each.value, each.labels) for each in fleet.readings()]
            json.dumps([readings, fleet.totals(), configured(page)], allow_nan=False)


@pytest.mark.parametrize("odd", ["NaN", "+Inf", "-Inf"])
def test_settings_that_are_no_numbers_are_none(odd: str) -> None:
    """`kvbench metrics --json` ended in a traceback."""
    page = SGLANG.replace(" 50000.0", f" {odd}") + f'vllm:cache_config_info{{block_size="{odd}",num_gpu_blocks="10"}} 1\n'
    told = understood("http://h/metrics", page.encode())
    assert json.loads(json.dumps(told, allow_nan=False))["engines"][0]["capacity_tokens"] is None


def test_servers_that_do_not_tell_their_settings_are_waited_for_once() -> None:
    """They were asked one after the other, each for as long as a page may take: then the collector did not open in time."""

    over = asyncio.Event()

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=SGLANG)

    async def hanging(_: web.Request) -> web.Response:
        await over.wait()
        return web.Response()

    async def work() -> float:
        app = web.Application()
        app.router.add_get("/{n}/metrics", page)
        app.router.add_get("/{n}/get_server_info", hanging)
        runner = web.AppRunner(app, shutdown_timeout=0.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        collector = Prometheus(urls=[f"{base}/{n}" for n in range(3)]).build(Place(Clock(asyncio.get_running_loop()), Path()))
        began = stopwatch()
        try:
            assert len((await collector.open())["pages"]) == 3
            return (stopwatch() - began) / 1e9
        finally:
            await collector.stop()
            over.set()
            await runner.cleanup()

    assert asyncio.run(work()) < 4


# ---- the crew: silence, several of one source, collectors that fail


@dataclass
class Double:
    """A collector that does what a test wants."""

    source: str = "double"
    required: bool = False
    says: Sequence[Item] = ()
    breaks: str = ""
    stopped: int = 0
    emit: Emit = field(default=lambda _: None)

    async def open(self) -> dict[str, Any]:
        return {}

    def start(self, emit: Emit) -> None:
        self.emit = emit
        for item in self.says:
            emit(item)
        if self.breaks == "start":
            raise KeyError("start")

    def tell(self, item: Event | Window) -> None:
        if self.breaks == "tell":
            raise KeyError("tell")

    async def stop(self) -> None:
        self.stopped += 1
        if self.breaks == "stop":
            raise CollectorError("the driver is gone")


def crewed(*collectors: Double) -> tuple[Crew, list[Item]]:
    told: list[Item] = []

    async def work() -> Crew:
        clock = Clock(asyncio.get_running_loop())
        crew = Crew(clock, collectors)
        await crew.open()
        clock.start()
        crew.start(told.append)
        crew.tell(Event(t=0.0, kind="x"))
        await crew.stop()
        await crew.stop()
        return crew

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work()), told


@pytest.mark.parametrize("where", ["start", "tell", "stop"])
def test_a_collector_that_fails_is_lost_and_stopped_once(where: str) -> None:
    """What it had opened (a profiler, a thread) is closed all the same."""
    double, other = Double(breaks=where), Double(source="other")
    _, told = crewed(double, other)
    lost = [item.data for item in told if isinstance(item, Event) and item.data.get("state") == "lost"]
    assert [(data["source"], data["reason"].startswith("internal")) for data in lost] == [("double", where != "stop")]
    assert (double.stopped, other.stopped) == (1, 1)


def test_the_loss_of_one_collector_is_not_that_of_another_with_its_source() -> None:
    """Two pages of metrics, one required: losing the other does not make the run invalid."""
    lost = Event(t=1.0, kind="collector", data={"source": "prometheus", "state": "lost", "reason": "gone"})
    crew, told = crewed(Double("prometheus", required=True), Double("prometheus", says=[lost]), Double("nvml"))
    events = [item for item in told if isinstance(item, Event)]
    evidence = Evidence([], [], events, {"collectors": crew.facts}, 0, *[None] * 3)  # type: ignore[arg-type]
    assert (required_lost(evidence).value, collectors_lost(evidence).value) == (0, 1)
    assert {item.data.get("collector") for item in events if item.data["source"] == "nvml"} == {None}


def test_readings_of_the_whole_target_come_from_one_collector() -> None:
    def said(value: float | None, **labels: str) -> Sample:
        return Sample(t=0.0, name="kv_usage", value=value, source="prometheus", labels=labels)

    crewed_ = crewed(
        Double("prometheus", says=[said(None)]), *[Double("prometheus", says=[said(v), said(v, gpu="0")]) for v in (0.2, 0.7)]
    )
    assert [(s.value, s.labels) for s in crewed_[1] if isinstance(s, Sample)] == [
        (None, {}), (0.2, {}), (0.2, {"gpu": "0", "collector": "1"}),
        (0.7, {"collector": "2"}), (0.7, {"gpu": "0", "collector": "2"}),
    ]  # fmt: skip


def drawn(*machines: tuple[str, str, float, float, dict[str, str]]) -> dict[str, Any]:
    """Energy over 20 s by readings of each (source, uuid, base, W, labels of the collector), at its own moments."""
    samples = []
    for at, (source, uuid, base, watts, labels) in enumerate(machines):
        for n in range(23):
            t = n - 1 + 0.25 * at
            for name, value in (("gpu_energy_j_total", base + watts * t), ("gpu_power_w", watts)):
                samples.append(Sample(t=t, name=name, value=value, source=source, labels=labels))
                samples.append(Sample(t=t, name=name, value=value, source=source, labels=labels | {"gpu": "0", "uuid": uuid}))
    return energy(sorted(samples, key=lambda s: s.t), 0.0, 20.0, 100, 10, {}, None)


def test_energy_of_two_machines_is_added_up_and_of_one_counted_once() -> None:
    """By hand: 100 W and 300 W for 20 s are 8000 J. Mixed in one series every reading was a restart, and they were 160,800."""
    two = drawn(("agent", "A", 1e3, 100, {}), ("agent", "B", 5e3, 300, {"collector": "1"}))
    assert (two["joules"], two["power"]) == (pytest.approx(8000), pytest.approx(400))
    same = drawn(("nvml", "A", 1e3, 100, {}), ("prometheus", "A", 1e3, 100, {"collector": "1"}))
    assert (same["joules"], same["power"]) == (pytest.approx(2000), pytest.approx(100))
    assert drawn(("nvml", "A", 1e3, 100, {}))["joules"] == pytest.approx(2000)


def test_a_source_that_falls_silent_for_good_has_a_gap_to_the_end() -> None:
    """No reading came after it that could have told of it."""
    told: list[Event] = []

    async def work() -> None:
        clock = Clock(asyncio.get_running_loop())

        async def reading() -> None:
            if clock.now() > 2.5:
                raise OSError("500")

        clock.start()
        beat = Beat("x", clock, 1.0, reading)
        beat.start(told.append)  # type: ignore[arg-type]
        await clock.sleep_until(60.5)
        await beat.stop()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work())
    gap, stopped = (event.data for event in told if event.data["state"] in ("gap", "stopped"))
    assert (gap["start"], gap["end"], gap["periods"], gap["reason"]) == (2.0, 60.5, 58.5, "500")
    assert (stopped["gaps"], stopped["longest_gap_s"], stopped["readings"]) == (1, 58.5, 3)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_no_instant_that_is_none_reaches_the_files(odd: float) -> None:
    """A line whose t is null makes its file unreadable."""
    says = [Sample(t=odd, name="x", value=1.0), Sample(t=0.0, name="y", value=odd), Event(t=odd, kind="e")]
    _, told = crewed(Double(says=says))
    assert [(item.t, getattr(item, "value", 0)) for item in told[:3]] == [(0.0, 1.0), (0.0, None), (0.0, 0)]


@pytest.mark.parametrize("missing", ["status", "keep_s", "every_s", "started", "gpus"])
def test_an_agent_that_lacks_what_one_tells_is_none(missing: str) -> None:
    told = {"instance": "a", "status": "ok", "keep_s": 60, "every_s": 0.1, "started": 1.7e9, "gpus": []}

    async def work(answer: dict[str, Any]) -> dict[str, Any]:
        async with Stub(answer_json({}), gets=lambda _: answer_json(answer)) as stub, aiohttp.ClientSession() as asking:
            return await Peer(asking, stub.url).health()

    assert asyncio.run(work(told)) == told
    for odd in ({k: v for k, v in told.items() if k != missing}, {**told, missing: None}, {**told, missing: -1}):
        with pytest.raises(OSError, match="lacks"):
            asyncio.run(work(odd))


# ---- KV events


def stored(at: float, key: int, rank: int = 0, **more: Any) -> bytes:
    import msgspec

    event = {"type": "BlockStored", "block_hashes": [key], "parent_block_hash": None, "token_ids": [key] * 4, "block_size": 4}
    return msgspec.msgpack.encode([at, [event | more], rank])


def streamed(*messages: tuple[bytes, int, Callable[[float], bytes]]) -> list[Item]:
    """(topic, number, payload by the time) every 0.1 s from 0.1 s on; the account is the last."""
    told: list[Item] = []

    async def work() -> None:
        clock = Clock(asyncio.get_running_loop())
        collector: Any = KvEvents(endpoint="tcp://127.0.0.1:1").build(Place(clock, Path()))
        collector.emit = told.append
        clock.start()
        for topic, number, payload in messages:
            await asyncio.sleep(0.1)
            collector._frame([topic, number.to_bytes(8, "big"), payload(clock.wall + clock.now())])
        collector._account()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work())
    return told


def account(told: Sequence[Item]) -> tuple[int, ...]:
    """(messages, lost, restarts, repeated)."""
    last = told[-1]
    assert isinstance(last, Event)
    return tuple(last.data[name] for name in ("messages", "lost", "restarts", "repeated"))


def times(told: Sequence[Item]) -> list[float]:
    return [round(item.t, 6) for item in told if isinstance(item, CacheAccess)]


def test_a_message_that_comes_twice_is_no_restart() -> None:
    told = streamed((b"", 0, lambda _: stored(1.0, 1)), (b"", 0, lambda _: stored(1.0, 1)), (b"", 1, lambda _: stored(1.1, 2)))
    assert account(told) == (2, 0, 0, 1)


@pytest.mark.parametrize("topics", [(b"a", b"b"), (b"", b"")])
def test_each_publisher_numbers_its_own(topics: tuple[bytes, bytes]) -> None:
    """By topic, or by rank."""
    both = [(topics[n % 2], (7, 900)[n % 2] + n // 2, lambda t, n=n: stored(t, n, rank=n % 2)) for n in range(6)]
    assert account(streamed(*both)) == (6, 0, 0, 0)


def test_a_clock_that_is_set_back_moves_no_event_into_the_past() -> None:
    told = streamed(*[(b"", n, lambda t, n=n: stored(t - (3600 if n else 0), n)) for n in range(4)])
    assert times(told) == [0.1, 0.2, 0.3, 0.4]


@pytest.mark.parametrize("odd", [1e300, -1e300, 0.0])
def test_one_time_that_is_none_spoils_no_other(odd: float) -> None:
    told = streamed(*[(b"", n, lambda t, n=n: stored(odd if n == 1 else t, n)) for n in range(4)])
    assert times(told) == [0.1, 0.2, 0.3, 0.4]


@pytest.mark.parametrize("ids", [[[1]] * 4, ["a"] * 4, [1.5] * 4, [None] * 4])
def test_token_ids_that_are_none_are_a_broken_message(ids: list[Any]) -> None:
    with pytest.raises(ValueError, match="no integers"):
        read_batch(stored(1.0, 1, token_ids=ids))


def test_nesting_without_end_is_a_broken_message() -> None:
    with pytest.raises(ValueError, match="recursion"):
        read_batch(b"\x91" * 100_000 + b"\xc0")


def test_a_block_that_follows_itself_ends_no_run() -> None:
    """It was walked round for ever, on the loop that sends."""
    residents = Residents()
    for parent in (1, None):
        for change in read_batch(stored(1.0, 1, parent_block_hash=parent)).changes:
            residents.change(1.0, 0, change)
    residents.asked(Asked(7, 0.5, 2.0, [1] * 9, 0))
    assert {line.op for line in residents.until(9.0)} == {"alloc", "miss", "free"}


def test_an_event_of_no_blocks_changes_no_block_size() -> None:
    residents = Residents()
    for batch in (stored(1.0, 1), stored(1.0, 2, block_hashes=[], token_ids=[], block_size=10**9)):
        for change in read_batch(batch).changes:
            residents.change(1.0, 0, change)
    assert residents.blocks == {0: 4}


# ---- allocator, GPUs


def asked_of(stats: Path | str, change: Callable[[], object] = lambda: None) -> list[Any]:
    told: list[Any] = []

    async def work() -> None:
        clock = Clock(asyncio.get_running_loop())
        collector = Allocator(stats=str(stats), every=0.1).build(Place(clock, Path()))
        try:
            told.append(await asyncio.wait_for(collector.open(), 2))
            clock.start()
            collector.start(told.append)
            await asyncio.sleep(0.05)
            change()
        finally:
            await collector.stop()

    asyncio.run(work())
    return told


STATS = {"allocated_bytes.all.current": 50, "reserved_bytes.all.current": 100, "num_ooms": 1}


def test_a_file_that_never_opens_does_not_keep_the_process(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(CollectorError, match="not a regular file"):
            asked_of(file)


def test_numbers_of_an_allocator_that_are_none_are_null(tmp_path: Path) -> None:
    file = tmp_path / "stats"
    file.write_text(json.dumps({**STATS, "reserved_bytes.all.current": 10**400, "num_ooms": -1}))
    values = {item.name: item.value for item in asked_of(file) if isinstance(item, Sample)}
    assert (values["torch_allocated_bytes"], values["torch_reserved_bytes"], values["torch_ooms_total"]) == (50, None, None)
    file.write_text(json.dumps({**STATS, "reserved_bytes.all.current": 40}))
    values = {item.name: item.value for item in asked_of(file) if isinstance(item, Sample)}
    assert values["torch_fragmentation"] is None
    file.write_text(json.dumps(STATS))
    states = [i.data["state"] for i in asked_of(file, lambda: file.write_text("[" * 100_000)) if isinstance(i, Event)]
    assert states == ["failing", "stopped"]


def test_no_password_in_the_address_of_an_allocator() -> None:
    with pytest.raises(ValidationError, match="no password"):
        Allocator(stats="http://user:hunter22@host/stats")


def test_a_driver_that_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    """asyncio.to_thread would: the interpreter waits for its threads."""
    code = (
        "import asyncio, sys; from functools import partial; import threading\n"
        "from kvbench.collect.aside import aside\n"
        "async def main():\n"
        "    try: await asyncio.wait_for(aside(threading.Event().wait), 0.05)\n"
        "    except TimeoutError: print('gave up')\n"
        "    print(await aside(lambda: 7))\n"
        "asyncio.run(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout.split("\n")[:2]) == (0, ["gave up", "7"])


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    pytest.importorskip("pynvml")
    monkeypatch.setenv("KVBENCH_FAKE_NVML", "")
    return Fake(tmp_path / "state")


def chosen(asked: Sequence[int | str] | None, visible: str | None) -> Gpus:
    import pynvml

    gpus = Gpus(pynvml)
    try:
        gpus.choose(asked, visible)
        for gpu in gpus.gpus:
            list(gpus.read(gpu, 0.0))
    finally:
        gpus.close()
    return gpus


@pytest.mark.parametrize(("visible", "seen"), [("1,-1,0", [1]), ("-1,0", []), ("0,1", [0, 1]), ("1,", [1])])
def test_cuda_sees_the_devices_before_the_first_that_is_none(fake: Fake, visible: str, seen: list[int]) -> None:
    fake.say(count=2)
    assert [gpu.index for gpu in chosen(None, visible).gpus] == seen


def test_an_instance_is_named_as_cuda_names_it(fake: Fake) -> None:
    fake.say({"count": 2, "mig": 1})
    gpus = chosen(None, "MIG-fake-2000").gpus
    assert [gpu.labels for gpu in gpus] == [{"gpu": "1", "uuid": "MIG-fake-2000", "mig": "0"}]
    assert [name for name, _ in joined(gpus)] == ["gpu_memory"]


def test_a_thread_of_readings_that_fails_says_that_it_is_lost(fake: Fake) -> None:
    gpus, told = chosen(None, None), []

    async def work() -> None:
        clock = Clock(asyncio.get_running_loop())
        clock.start()
        thread = GpuThread(gpus, "nvml", clock, 0.05, told.extend)
        gpus.read = lambda *_: 1 / 0  # type: ignore[method-assign,assignment]
        thread.start()
        await asyncio.sleep(0.1)
        await thread.stop()

    asyncio.run(work())
    assert [(item.data["state"], "ZeroDivisionError" in item.data["reason"]) for item in told] == [("lost", True)]


# ---- the log


@pytest.mark.parametrize("match", [r"(a+)+$", r"(?:\w*)*!", r"x([a-z]+)*y", r"(\d+)+"])
def test_a_rule_that_can_take_hours_over_a_line_is_refused(match: str) -> None:
    with pytest.raises(ValidationError, match="repeats a repetition"):
        LogRule(name="slow", match=match)


@pytest.mark.parametrize("match", [r"(?:\d+,)*\d+ MiB", r"took (\d+) ms", r"(a|b)+", r"\(x+\)+"])
def test_ordinary_rules_are_taken(match: str) -> None:
    assert LogRule(name="fine", match=match).found


def logged(file: Path, *steps: Callable[[], object], headers: dict[str, str] | None = None) -> list[Any]:
    told: list[Any] = []

    async def work() -> None:
        clock = Clock(asyncio.get_running_loop())
        spec = ServerLog(file=file, rules=[LogRule(name="seen", match="seen")], profiles=[])
        collector = spec.build(Place(clock, file.parent, headers=headers or {}))
        await collector.open()
        clock.start()
        collector.start(told.append)
        for step in steps:
            await asyncio.sleep(0.3)
            step()
        await asyncio.sleep(0.3)
        await collector.stop()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work())
    return told


def appended(file: Path, text: bytes) -> Callable[[], object]:
    def write() -> None:
        with file.open("ab") as opened:
            opened.write(text)

    return write


@pytest.mark.parametrize(
    "line",
    [
        "Authorization: Basic {}", "apikey%3D{}", "url=http://user:{}@host/", "SecretStr: 'api_key': SecretStr('{}')",
        "refused the key {}", "Authorization': b'Bearer {}'", "HF_TOKEN={}",
    ],
)  # fmt: skip
def test_no_key_of_a_log_is_kept(line: str, tmp_path: Path) -> None:
    key, file = "sk-Zq8xw77Kplm", tmp_path / "log"
    file.write_text("")
    headers = {"Authorization": f"Bearer {key}"} if "refused" in line else {}
    told = logged(file, appended(file, f"seen {line.format(key)}\n".encode()), headers=headers)
    kept = [item.data["line"] for item in told if isinstance(item, Event) and item.kind == "server_log"]
    assert len(kept) == 1
    assert key not in kept[0]


def test_blotting_out_takes_no_longer_over_a_hostile_line(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("")
    lines = b"".join(
        b"seen " + word * (4000 // len(word)) + b"\n" for word in (b"token" + b" " * 3000, b"secret", b"sk-", b"://")
    )
    began = stopwatch()
    logged(file, appended(file, lines * 5))
    assert stopwatch() - began < 0.5e9  # of one such line: 0.6 s


def test_the_last_line_of_a_rotated_log_needs_no_end(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("")

    def rotated() -> None:
        file.rename(tmp_path / "log.1")
        file.write_text("seen new\n")

    told = logged(file, appended(file, b"seen old"), rotated)
    kept = [item.data.get("line", "") for item in told if isinstance(item, Event) and item.kind == "server_log"]
    assert sorted(kept) == ["", "seen new", "seen old"]


def test_a_line_of_megabytes_is_known_by_its_beginning(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("")
    told = logged(file, appended(file, b"seen " + b"\xff\x00" * (3 << 19)), appended(file, b" seen\nx\n"))
    kept = [item.data for item in told if isinstance(item, Event) and item.kind == "server_log"]
    assert [data["number"] for data in kept] == [1]
    assert kept[0]["line"].startswith("seen ")


@pytest.mark.parametrize("what", ["directory", "fifo"])
def test_a_log_that_becomes_something_else_is_failing(what: str, tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("")

    def replaced() -> None:
        file.unlink()
        file.mkdir() if what == "directory" else os.mkfifo(file)

    told = logged(file, replaced)
    assert next(i.data["state"] for i in told if isinstance(i, Event) and i.kind == "collector") == "failing"


# ---- the sink


class _Echo(http.server.BaseHTTPRequestHandler):
    """Repeats what it was asked with, as a reverse proxy's error page may."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        login = self.headers.get("Authorization", "")
        body = json.dumps({"error": f"{login} is wrong; so is {login.split()[-1]}, and hunter22"}).encode()
        self.send_response(401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("mode", ["v1", "v2"])
@pytest.mark.parametrize("token", ["hunter22", "bob:hunter22", "hunter22\n", "hun\nter22", "hunter22\u20ac"])
def test_no_error_holds_a_token(mode: str, token: str, echo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line feed at its end, as a file of a secret has one, is no part of it; in the middle http.client repeats all of it."""
    if mode == "v2":
        pytest.importorskip("influxdb_client")
    monkeypatch.setenv("TOKEN", token)
    with pytest.raises(SinkError) as raised:
        Influx(url=echo, mode=mode, token_env="TOKEN", timeout=2.0).build(SinkPlace(tmp_path, "r", 1.7e9))  # type: ignore[arg-type]
    said = str(raised.value)
    assert not [part for part in ("hunter22", "Ym9iOmh1bnRlcjIy", "ter22") if part in said]


@pytest.mark.parametrize("ack", ["999 0", "1 999999", "1 3", "1 -1", "0 0", "1 2 3", "\0\0", "9" * 5000 + " 0"])
def test_a_damaged_acknowledgement_delivers_nothing(ack: str, tmp_path: Path) -> None:
    """An offset beyond the end said that everything was delivered: `export --resume` then sent nothing."""
    spool = Spool(tmp_path)
    spool.append(b"a\nb\nc\n")
    spool.close()
    (tmp_path / "ack").write_text(ack)
    damaged = Spool(tmp_path)
    assert (list(damaged.delivered()), damaged.read(100)) == ([], b"a\nb\nc\n")
    (tmp_path / "ack").write_text("1 4\n")
    assert list(Spool(tmp_path).delivered()) == [b"a", b"b"]


class _Refusing(http.server.BaseHTTPRequestHandler):
    """Takes the point before the run, and refuses everything else until it is mended."""

    mended = False

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204 if type(self).mended or b"kvbench_sink" in body else 400)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


def test_what_a_database_refused_is_sent_again_by_resume(tmp_path: Path) -> None:
    """It said that nothing was missing in a database that had taken nothing."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refusing)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        spec = Influx(url=f"http://127.0.0.1:{server.server_port}", mode="v1", drain=10.0)
        text = (
            "name: refused\ntarget: {kind: sim, model: llama-3.1-8b, hardware: rtx-4090}\n"
            "workload: {arrivals: {shape: constant, rate: 1/s}, prompt: 50, output: 2}\n"
            f"phases: {{steady: {{for: 3s}}}}\nsinks: [{{kind: influx, url: {spec.url!r}, mode: v1}}]\n"
        )
        directory = simulated(text, tmp_path).directory
        (told,) = (
            json.loads(line)["data"] for line in (directory / "events.jsonl").read_text().splitlines() if '"kind":"sink"' in line
        )
        assert (told["delivered"], told["refused"]) == (0, told["points"])
        _Refusing.mended = True
        account = replay(directory, spec, True, lambda *_: None)
        assert account["sent"] >= told["points"]
        assert (account["delivered"], account["refused"]) == (account["sent"], 0)
        assert replay(directory, spec, True, lambda *_: None)["sent"] == 0
    finally:
        server.shutdown()
        server.server_close()


# ---- whole runs


def test_no_key_in_any_file_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    key = "Kq77-never-on-disk"
    monkeypatch.setenv("KEY", key)
    answer = stream(C("a") + C("b") + FIN + U(8, 2) + DONE)

    def page(seen: Any) -> Reply:
        if seen.path != "/metrics":
            return answer_json({"error": f"no such page for {seen.headers}"}, 404)
        return Reply(
            [(0, (vllm() + f'vllm:cache_config_info{{api_key="{key}",block_size="16"}} 1\n').encode())], 200, (), "length"
        )

    log = tmp_path / "server.log"
    log.write_text("")
    tails = f"{{kind: server_log, file: {log}, rules: [{{name: r, match: key}}]}}"
    also = f"collect: [{{kind: prometheus, every: 100ms}}, {{kind: host}}, {tails}]"

    async def logging() -> None:
        while True:
            await asyncio.sleep(0.1)
            with log.open("a") as file:
                file.write(f"the key {key} is fine\n")

    text = served("{shape: constant, rate: 20/s}", "{steady: {requests: 10}, drain: {for: 2s}}", target="key_env: KEY", also=also)
    found = against(Stub(answer, gets=page), text, tmp_path, also=logging)
    assert [line for line in found.lines("events.jsonl") if line["kind"] == "server_log"]
    for file in found.directory.rglob("*"):
        assert file.is_dir() or key.encode() not in file.read_bytes(), file.name
    said = capsys.readouterr()
    assert key not in said.out + said.err
