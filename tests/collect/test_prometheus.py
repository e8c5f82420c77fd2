"""The collector of server metrics on stubs, `kvbench serve` and a compiled server: what a run records, and what it costs."""

import asyncio
import json
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvbench.agent import page as agent_page
from kvbench.cli.metrics import _read as read_once
from kvbench.cli.metrics import _show, understood
from kvbench.clock import Clock
from kvbench.collect import CollectorError, Place
from kvbench.collect.prometheus import Prometheus, attempts, session
from kvbench.collect.scrape import Scrape
from kvbench.core import Event, Sample
from kvbench.report.cache import engine
from kvbench.scenario import ScenarioError
from tests.collect import pages
from tests.collect.pages import counting, page_reply, vllm
from tests.collect.pages import read as read_page
from tests.stub.stub import DONE, FIN, C, Reply, Seen, Stub, U, answer_json, stream
from tests.whole import ROOT, Whole, against, finished, instant, kvbench, play, served

ANSWER = stream(C("a") + C("b") + FIN + U(8, 2) + DONE)
QUICK = "{steady: {requests: 5}, drain: {for: 5s}}"
ABSENT = answer_json({}, 404)


def run(stub: Stub, folder: Path, also: str = "", phases: str = QUICK) -> Whole:
    return against(stub, served("{shape: constant, rate: 20/s}", phases, also=also), folder)


def manifest(found: Whole) -> Any:
    return json.loads((found.directory / "manifest.json").read_text())


def events(found: Whole) -> list[dict[str, Any]]:
    return [line["data"] for line in found.lines("events.jsonl") if line["kind"] == "collector"]


# ---- which page


def test_without_a_word_the_targets_own_page_is_read(tmp_path: Path) -> None:
    stub: Stub = Stub(ANSWER, gets=lambda seen: counting(stub, seen, (8, 2)))
    found = run(stub, tmp_path)
    (facts,) = manifest(found)["collectors"]
    assert (facts["source"], facts["pages"][0]["url"], facts["pages"][0]["kinds"]) == (
        "prometheus",
        f"{stub.url}/metrics",
        ["vllm"],
    )
    assert facts["pages"][0]["names"]["finished_total"] == ["vllm:request_success_total"]
    assert found.summary["server"]["metrics"]["finished_total"]["value"] == 5


def test_the_other_path_is_tried(tmp_path: Path) -> None:
    stub = Stub(
        ANSWER, gets=lambda seen: page_reply(pages.TRTLLM) if seen.path == "/prometheus/metrics" else answer_json([], 200)
    )
    found = run(stub, tmp_path)
    assert manifest(found)["collectors"][0]["pages"][0]["url"] == f"{stub.url}/prometheus/metrics"


def test_a_server_without_a_page_is_noted_and_not_warned_of(tmp_path: Path) -> None:
    found = run(Stub(ANSWER), tmp_path)
    (facts,) = manifest(found)["collectors"]
    assert facts["absent"].count("answers 404") == 2
    assert not [line for line in found.summary["warnings"] if "metrics" in line or "collector" in line]
    assert not events(found)


def test_an_empty_list_asks_nothing(tmp_path: Path) -> None:
    stub = Stub(ANSWER)
    found = run(stub, tmp_path, "collect: []")
    assert manifest(found)["collectors"] == []
    assert not [seen.path for seen in stub.log if "metrics" in seen.path]


def test_a_page_that_was_asked_for_and_is_not_there_is_warned_of(tmp_path: Path) -> None:
    found = run(Stub(ANSWER), tmp_path, "collect: [{kind: prometheus}]")
    assert "answers 404" in manifest(found)["collectors"][0]["error"]
    assert any("collector prometheus" in line for line in found.summary["target"]["warnings"])
    with pytest.raises(ScenarioError, match=r"the required collector prometheus cannot work: .* answers 404"):
        run(Stub(ANSWER), tmp_path, "collect: [{kind: prometheus, required: true}]")


def opened(spec: dict[str, Any], stub: Stub, place: dict[str, Any] | None = None) -> dict[str, Any]:
    async def work() -> dict[str, Any]:
        async with stub:
            urls = {"urls": [stub.url]} | (place or {})
            built = Prometheus.model_validate(spec).build(Place(Clock(asyncio.get_running_loop()), Path(), **urls))
            try:
                return await built.open()
            finally:
                await built.stop()

    return asyncio.run(work())


def test_the_targets_headers_go_to_the_target_alone() -> None:
    stub = Stub(ANSWER, gets=lambda seen: page_reply(vllm()))
    opened({}, stub, {"headers": {"Authorization": "Bearer k"}})
    assert {seen.headers.get("authorization") for seen in stub.log} == {"Bearer k"}
    other = Stub(ANSWER, gets=lambda seen: page_reply(vllm()))

    async def work() -> None:
        async with other:
            place = Place(
                Clock(asyncio.get_running_loop()), Path(), ["http://127.0.0.1:1"], headers={"Authorization": "Bearer k"}
            )
            built = Prometheus.model_validate({"url": other.url}).build(place)
            await built.open()
            await built.stop()

    asyncio.run(work())
    assert {seen.headers.get("authorization") for seen in other.log} == {None}


@pytest.mark.parametrize(
    ("address", "shown"),
    [("http://h:80", True), ("http://h:80/metrics", True), ("http://h:8000", False), ("http://h:80.evil/metrics", False)],
)
def test_an_address_that_begins_like_the_targets_is_another(address: str, shown: bool) -> None:
    async def work() -> list[Scrape]:
        place = Place(Clock(asyncio.get_running_loop()), Path(), ["http://h:80/"], headers={"Authorization": "Bearer k"})
        async with session(None) as asking:
            return attempts(asking, address, place, 1.0)

    assert all(bool(scrape.headers) is shown for scrape in asyncio.run(work()))


def test_what_a_server_says_of_itself_is_kept_without_its_secrets() -> None:
    said = {"version": "0.5.23", "max_total_num_tokens": 50000, "context_length": 8192, "api_key": "k", "model_path": "/x"}

    def gets(seen: Seen) -> Reply:
        return page_reply(pages.SGLANG) if seen.path == "/metrics" else answer_json(said) if "info" in seen.path else ABSENT

    (page,) = opened({}, Stub(ANSWER, gets=gets))["pages"]
    assert page["settings"] == {"version": "0.5.23", "max_total_num_tokens": 50000, "context_length": 8192}
    assert page["engines"][0]["capacity_tokens"] == 50000


@pytest.mark.parametrize(
    ("spec", "reply", "text"),
    [
        ({}, page_reply("up 1\n"), "shows no metric that is known"),
        ({}, answer_json([{"iter": 1}]), "not of Prometheus' text format"),
        ({"url": "http://127.0.0.1:1"}, ABSENT, "connection refused"),
        ({"ca_file": "/nowhere"}, ABSENT, "ca_file: '/nowhere' cannot be used"),
    ],
)
def test_why_it_cannot_work(spec: dict[str, Any], reply: Reply, text: str) -> None:
    with pytest.raises(CollectorError, match=re.escape(text)):
        opened(spec, Stub(ANSWER, gets=reply))


def test_url_or_urls() -> None:
    with pytest.raises(ValueError, match="either url or urls"):
        Prometheus.model_validate({"url": "http://a", "urls": ["http://b"]})
    with pytest.raises(ValueError, match="pattern"):
        Prometheus.model_validate({"url": "ftp://a"})


# ---- readings


async def _collect(spec: dict[str, Any], urls: list[str], seconds: float) -> list[Sample | Event]:
    told: list[Any] = []
    clock = Clock(asyncio.get_running_loop())
    built = Prometheus.model_validate(spec).build(Place(clock, Path(), urls))
    await built.open()
    clock.start()
    built.start(told.append)
    await clock.sleep_until(seconds)
    await built.stop()
    return told


def test_a_reading_is_of_the_middle_and_the_lag_is_on_record() -> None:
    stub = Stub(ANSWER, gets=lambda seen: Reply([(80, vllm(usage=0.5).encode())], 200, pages.TEXT, "length"))

    async def work() -> list[Sample | Event]:
        async with stub:
            return await _collect({"every": 0.2}, [stub.url], 0.3)

    told = asyncio.run(work())
    lags = [s for s in told if isinstance(s, Sample) and s.name == "scrape_s"]
    usages = [s for s in told if isinstance(s, Sample) and s.name == "kv_usage" and not s.labels]
    assert all(0.08 <= lag.value < 0.2 for lag in lags)  # type: ignore[operator]
    assert usages[0].t == lags[0].t == pytest.approx(lags[0].value / 2, abs=0.02)  # type: ignore[operator]
    assert [s.value for s in usages] == [0.5] * len(usages)


def test_a_server_that_stops_answering_is_a_gap_and_no_value(tmp_path: Path) -> None:
    """Two servers; one fails for a while: what the other says goes on, and nothing is said of both."""
    bad = False
    one = Stub(ANSWER, gets=lambda seen: page_reply(vllm(usage=0.2, finished=1)))
    two = Stub(ANSWER, gets=lambda seen: ABSENT if bad else page_reply(vllm(usage=0.6, finished=2)))

    async def work() -> list[Sample | Event]:
        nonlocal bad
        async with one, two:
            task = asyncio.ensure_future(_collect({"every": 0.1}, [one.url, two.url], 1.0))
            await asyncio.sleep(0.25)
            bad = True
            await asyncio.sleep(0.5)
            bad = False
            return await task

    told = asyncio.run(work())
    states = [e.data["state"] for e in told if isinstance(e, Event)]
    assert [s for s in states if s in ("failing", "gap", "stopped", "totals")] == ["failing", "gap", "stopped", "totals"]
    usage = [s for s in told if isinstance(s, Sample) and s.name == "kv_usage"]
    together = [s for s in usage if not s.labels]
    alone = [s for s in usage if s.labels.get("server") == one.url.removeprefix("http://")]
    assert [s.value for s in together] == [pytest.approx(0.4)] * len(together)
    assert len(alone) >= len(together) + 3
    (totals,) = (e.data for e in told if isinstance(e, Event) and e.data["state"] == "totals")
    assert totals["metrics"]["finished_total"] | {"value": 0.0, "resets": 0, "gone": 0} == totals["metrics"]["finished_total"]


def test_counts_are_read_until_they_stand_still() -> None:
    """A server that counts an answer a while after it gave it."""
    left = [0, 0, 0, 3, 5, 5, 5, 5, 5]
    stub = Stub(ANSWER, gets=lambda seen: page_reply(vllm(finished=left.pop(0) if len(left) > 1 else left[0])))

    async def work() -> list[Sample | Event]:
        async with stub:
            return await _collect({"every": 10.0}, [stub.url], 0.05)

    told = asyncio.run(work())
    (totals,) = (e.data for e in told if isinstance(e, Event) and e.data["state"] == "totals")
    assert totals["metrics"]["finished_total"]["value"] == 5


def test_a_server_that_is_gone_at_the_end_is_said_to_be(tmp_path: Path) -> None:
    stub: Stub = Stub(ANSWER, gets=lambda seen: counting(stub, seen, (8, 2)) if len(stub.posts) < 5 else ABSENT)
    found = run(stub, tmp_path)
    assert found.summary["server"]["window"]["complete"] is False
    assert "so the end is missing" in found.summary["server"]["window"]["text"]
    rows = {row["check"]: row for row in found.summary["verdict"]["checks"]}
    assert rows["count_mismatch"]["value"] is None


def test_a_run_that_was_killed_has_what_was_read_until_then(tmp_path: Path) -> None:
    stub: Stub = Stub(ANSWER, gets=lambda seen: counting(stub, seen, (8, 2)))
    found = run(stub, tmp_path, "collect: [{kind: prometheus, every: 100ms}]")
    file = found.directory / "events.jsonl"
    file.write_text("".join(line for line in file.read_text().splitlines(True) if '"totals"' not in line))
    told = finished(found.directory).summary["server"]
    assert told["metrics"]["finished_total"]["value"] == 5
    assert told["window"]["complete"] is False


def test_a_stop_rule_reads_a_real_servers_page(tmp_path: Path) -> None:
    stub = Stub(ANSWER, gets=lambda seen: page_reply(vllm("0", usage=0.99) + vllm("1", usage=0.97)))
    found = run(stub, tmp_path, 'stop: [{kv_usage: ">= 95%", for: 1s}]', "{steady: {for: 20s}}")
    assert found.code == 5
    assert "kv_usage" in found.why
    usage = found.summary["engine"]["kv_usage"]
    assert usage["max"] == pytest.approx(0.98)
    assert {label.split(",")[1]: row["max"] for label, row in usage["engines"].items()} == {"engine=0": 0.99, "engine=1": 0.97}


def test_a_law_reads_a_real_servers_page_and_is_doubted_without(tmp_path: Path) -> None:
    """queue_feedback at 4 waiting: the page shows 20, so it slows down; without a page it holds still, and that is said."""
    law = "control: {law: queue_feedback, target_queue: 4, every: 1s}"
    crowded = vllm().replace("waiting{engine", "waiting_{engine") + 'vllm:num_requests_waiting{engine="0",model_name="m"} 20\n'
    for name, gets in (("sees", page_reply(crowded)), ("blind", ABSENT)):
        (tmp_path / name).mkdir()
        found = run(Stub(ANSWER, gets=lambda seen, gets=gets: gets), tmp_path / name, law, "{steady: {for: 2100ms}}")
        doubted = [line for line in found.summary["warnings"] if "holds still" in line]
        assert bool(doubted) == (name == "blind")
        told = found.lines("windows.jsonl")[-1]["values"]["waiting_mean"]
        assert told == (20 if name == "sees" else None)


def test_series_that_are_told_together_stand_for_their_engines() -> None:
    def row(t: float, value: float | None, **labels: str) -> Sample:
        return Sample(t=t, name="hit_tokens_total", value=value, source="prometheus", labels=labels)

    samples = [
        row(0, 10),
        row(0, 4, engine="0"),
        row(0, 6, engine="1"),
        row(1, 30),
        row(1, 14, engine="0"),
        row(1, 1, engine="1"),
    ]
    assert engine(samples, 0, 1)["hit_tokens_total"]["value"] == 20
    assert engine([*samples, row(1.5, None)], 0, 2)["hit_tokens_total"] == {
        "value": None, "n": 0, "resets": 0, "last": None, "reason": "it left the server's page before the end",
    }  # fmt: skip


# ---- kvbench serve


@contextmanager
def serving() -> Iterator[str]:
    command = [sys.executable, "-m", "kvbench", "serve", "--port", "0", "--speed", "20x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
            assert found
            yield found.group(0)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)


def test_a_served_engine_counts_what_we_count(tmp_path: Path) -> None:
    """Prompts that share a prefix: requests, tokens, look-ups and hits by the page are those of the answers."""
    text = served("{shape: closed, concurrency: 4}", "{steady: {requests: 40}, drain: {for: 10s}}")
    text = text.replace("model: m, ", "").replace(
        "prompt: 8, output: 2,", "prompt: 200, output: 12, prefixes: {groups: 2, tokens: 160},"
    )
    with serving() as url, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = finished(runner.run(play(text.replace("{url}", url), tmp_path)))
        seen = kvbench("metrics", url, "--json")
    ok = [record for record in found.records if record.outcome == "ok"]
    metrics = {name: row.get("value") for name, row in found.summary["server"]["metrics"].items()}
    assert len(ok) == metrics["finished_total"] == 40
    assert metrics["prompt_tokens_total"] == metrics["query_tokens_total"] == sum(record.n_in for record in ok)
    assert metrics["generation_tokens_total"] == sum(record.n_out for record in ok)
    assert metrics["hit_tokens_total"] == sum(record.cached for record in ok) > 0
    checks = {row["check"]: row["value"] for row in found.summary["verdict"]["checks"]}
    assert (checks["server_requests"], checks["count_mismatch"], checks["recompute_in_hits"]) == (0, 0, 0)
    assert found.summary["server"]["pages"][0]["engines"][0]["capacity"] == "told by the server"
    told = json.loads(seen.stdout)
    assert (seen.returncode, told["kinds"]) == (0, ["vllm"])
    assert told["known"]["finished_total"]["engines"] == [{"labels": {"engine": "0"}, "value": 40.0}]


# ---- kvbench metrics


def asked(stub: Stub, arguments: Callable[[str], Awaitable[Any]]) -> Any:
    async def work() -> Any:
        async with stub:
            return await arguments(stub.url)

    return asyncio.run(work())


def test_what_is_understood_and_what_is_not() -> None:
    help_ = "# HELP strange:thing What it is [sic]\n# TYPE strange:thing gauge\nstrange:thing 3\n"
    stub = Stub(ANSWER, gets=lambda seen: page_reply(pages.SGLANG + help_) if seen.path == "/metrics" else ABSENT)
    found = asked(stub, lambda url: asyncio.to_thread(kvbench, "metrics", url))
    assert found.returncode == 0
    assert re.search(r"kv_usage +28 % \(mean\) +28 % +sglang:token_usage", found.stdout)
    assert "hit_rate_now (of a moment)" in found.stdout
    assert "strange:thing (gauge, 1 series): What it is [sic]" in found.stdout
    code, told, why = asked(stub, lambda url: read_once(url, None))
    assert (code, why, told["known"]["hit_tokens_total"]["joined"]) == (0, "", 700)
    assert told["unknown"] == [{"name": "strange:thing", "type": "gauge", "help": "What it is [sic]", "series": 1}]
    assert next(iter(told["known"])) == "kv_usage"


def test_a_histogram_is_shown_since_the_servers_start() -> None:
    told = understood("x", (pages.DATA / "vllm-0.32-cpu.prom").read_bytes())
    count = read_page((pages.DATA / "vllm-0.32-cpu.prom").read_text()).rows["vllm:time_to_first_token_seconds_count"][0].value
    assert told["known"]["server_ttft"]["joined"]["n"] == count > 0


def test_a_page_of_our_agent_is_told_as_such_and_unfolded(capsys: pytest.CaptureFixture[str]) -> None:
    gpus = [{"gpu": str(n)} for n in range(8)]
    rows = [agent_page.Row(name, of if name.startswith("gpu_") else {}, 2.0) for name in agent_page.HELP for of in gpus]
    told = understood("x", agent_page.text([*rows, agent_page.Row("odd", {}, 1.0)]))
    assert [each["name"] for each in told["unknown"]] == ["kvbench_odd"]
    assert {each["name"] for each in told["agent"]} >= {"kvbench_host_cpu", "kvbench_gpu_ecc_corrected", "kvbench_agent_info"}
    _show(told)
    lines = capsys.readouterr().out.splitlines()
    values = ", ".join(["2 W"] * 8)
    assert any(line.rstrip().split("  ")[-1] == "kvbench_gpu_power_w" and values in line for line in lines), "folded"
    assert any("read by the collector `agent`" in line for line in lines)


def test_exit_codes_of_metrics() -> None:
    for reply, text in (
        (answer_json({"a": 1}), "not of Prometheus' text format"),
        (page_reply("up 1\n"), "nothing on this page is"),
    ):
        code, _, why = asked(Stub(ANSWER, gets=reply), lambda url: read_once(url, None))
        assert code == 2
        assert text in why
    assert asyncio.run(read_once("nonsense", None))[0] == 2
    assert asyncio.run(read_once("http://a", "NO_SUCH_VARIABLE"))[0] == 2
    found = kvbench("metrics", "http://127.0.0.1:1")
    assert (found.returncode, found.stdout, "Traceback" in found.stderr) == (6, "", False)


# ---- what it costs


@pytest.mark.alone
@pytest.mark.slow
def test_reading_a_page_every_second_does_not_delay_sends(tmp_path: Path) -> None:
    """500 requests/s for 5 s, six pairs of runs: with the page of a real vLLM read every second from another process, and not."""
    (tmp_path / "metrics").write_bytes((pages.DATA / "vllm-0.32-cpu.prom").read_bytes())
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    with instant(2) as url, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            port = re.findall(r"port (\d+)", process.stdout.readline())[0]
            lags: dict[str, list[float]] = {"off": [], "on": []}
            for turn in range(12):
                state = ("off", "on")[turn % 2]
                also = f"collect: [{{kind: prometheus, url: 'http://127.0.0.1:{port}'}}]" if state == "on" else "collect: []"
                text = served("{shape: constant, rate: 500/s}", "{steady: {for: 5s}, drain: {for: 5s}}", also=also)
                (tmp_path / str(turn)).mkdir()
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    found = finished(runner.run(play(text.replace("{url}", url), tmp_path / str(turn))))
                lags[state].append(found.summary["latency"]["lag"]["p99"])
                assert len(events(found)) == (0 if state == "off" else 3)
        finally:
            process.terminate()
            process.wait()
    off, on = (statistics.median(lags[state]) for state in ("off", "on"))
    print(f"\nlag p99: {1e6 * off:.0f} us without, {1e6 * on:.0f} us with, ratio {on / off:.2f}")
    assert on < 1.25 * off + 50e-6
