"""Resets of the prefix cache against imitations of each server, honest and lying; and the proof that the cache was cold."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import uvloop

from kvbench.endpoint import Http
from kvbench.scenario import ScenarioError, load
from kvbench.target import TargetUnreachable, counters
from kvbench.target.discover import opened
from kvbench.target.reset import RESETS, recognised, reset
from tests.stub.stub import DONE, FIN, JSON, C, Reply, Seen, Stub, answer_json, sse, stream, usage
from tests.target.wire import read
from tests.whole import Whole, against, instant, kvbench, served

Script = Callable[[Seen], Reply]
FLUSHED = "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, ...)\n"


def text(body: str | bytes, status: int = 200) -> Reply:
    return Reply([(0, body if isinstance(body, bytes) else body.encode())], status, JSON, "length")


def asked(script: Reply | Script, kind: str, gets: Reply | Script | None = None, patience: float = 0.2) -> tuple[Any, list[str]]:
    """(facts, or the text of the refusal; what was posted)."""

    async def main() -> tuple[Any, list[str]]:
        async with Stub(script, gets=gets or answer_json({}, 404)) as stub, opened({}, None) as session:
            server = {"url": stub.url, "owner": "", "software": None}
            try:
                found: Any = await asyncio.wait_for(reset(session, server, kind, patience), 20)
            except TargetUnreachable as error:
                found = str(error).replace(stub.url, "URL")
            return found, [seen.path for seen in stub.posts]

    return uvloop.run(main())


def in_turn(*replies: Reply) -> Script:
    """One reply after the other, the last for ever."""
    return lambda seen: replies[min(seen.number, len(replies) - 1)]


def paths(replies: dict[str, Reply]) -> Script:
    return lambda seen: replies.get(seen.path, answer_json({"detail": "Not Found"}, 404))


SLOTS = answer_json([{"id": 0, "is_processing": False}, {"id": 1, "is_processing": False}])
CLEARED = {"name": "dynamo/backend-instance-7", "status": "Successfully cleared kv blocks for instance"}
HONEST: dict[str, tuple[Reply | Script, Reply | None, list[str]]] = {
    "vllm": (answer_json({"success": True}), None, ["/reset_prefix_cache"]),
    "sglang": (text(FLUSHED), None, ["/flush_cache"]),
    "dynamo": (
        paths({"/engine/control/clear_kv_blocks": answer_json({"status": "success", "message": "KV cache cleared"})}),
        None,
        ["/engine/control/clear_kv_blocks"],
    ),
    "dynamo's frontend": (
        paths(
            {
                "/clear_kv_blocks": answer_json(
                    {"cleared_workers": [CLEARED | {"response": '{"status":"success"}'}], "failed_workers": []}
                )
            }
        ),
        None,
        ["/engine/control/clear_kv_blocks", "/clear_kv_blocks"],
    ),
    "llamacpp": (
        lambda seen: answer_json({"id_slot": seen.number, "n_erased": 40 + seen.number}),
        SLOTS,
        ["/slots/0?action=erase", "/slots/1?action=erase"],
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_server_is_believed(name: str) -> None:
    script, gets, posted = HONEST[name]
    facts, posts = asked(script, name.removesuffix("'s frontend"), gets)
    assert (facts["believed"], facts["status"], facts["tries"], facts["why"]) == (True, 200, 1, None)
    assert posts == posted
    if name == "llamacpp":
        assert facts["said"] == "81 tokens erased in 2 slots"


@pytest.mark.parametrize(
    ("kind", "script", "gets", "says"),
    [
        ("vllm", answer_json({"detail": "Not Found"}, 404), None, "answers 404: start vLLM with VLLM_SERVER_DEV_MODE=1"),
        ("vllm", answer_json({"success": False}), None, "blocks are still held: let the requests of others end (asked 2 times)"),
        ("vllm", answer_json({"error": "no such key"}, 401), None, "answers 401 (no such key"),
        ("vllm", answer_json({"error": "cache is read-only"}), None, "answers 200 but says"),
        ("sglang", text("there are 3 running requests", 400), None, "answers 400, which is busy"),
        ("sglang", answer_json({"success": False, "message": "Cache flushed? No."}), None, "answers 200 but says"),
        ("dynamo", answer_json({"status": "error", "message": "engine is gone"}), None, "answers 200 but says"),
        ("dynamo", answer_json({}, 404), None, "give the workers' system port (DYN_SYSTEM_PORT)"),
        ("dynamo", answer_json({"message": "No active worker groups found"}), None, "No active worker groups found"),
        ("dynamo", answer_json({"cleared_workers": [], "failed_workers": []}), None, "not every worker was cleared"),
        ("dynamo", answer_json({"cleared_workers": [CLEARED], "failed_workers": [CLEARED]}), None, "not every worker"),
        (
            "dynamo",  # "successfully cleared", and the worker itself said that it was not
            answer_json({"cleared_workers": [CLEARED | {"response": '{"status":"error"}'}], "failed_workers": []}),
            None,
            "not every worker was cleared",
        ),
        ("llamacpp", answer_json({}, 404), answer_json({"error": "off"}, 501), "start llama.cpp with --slots"),
        ("llamacpp", answer_json({}, 501), SLOTS, "start llama.cpp with --slot-save-path DIR"),
        ("llamacpp", answer_json({}), answer_json([{"id": 0, "is_processing": True}]), "meets busy slots"),
        ("llamacpp", answer_json({}), answer_json([]), "finds no slot to erase"),
    ],
)
def test_a_refusal_ends_it_with_what_to_do(kind: str, script: Reply, gets: Reply | None, says: str) -> None:
    told, _ = asked(script, kind, gets, patience=1.0 if "2 times" in says else 0.2)
    assert isinstance(told, str), told
    assert told.startswith(f"target.reset: URL: {RESETS[kind].endpoint}")
    assert says in told
    assert told.endswith("or leave target.reset out")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("vllm", b""), ("vllm", b"<html>OK</html>"), ("vllm", b"[]"), ("vllm", b"\xff\x00"), ("vllm", b"[" * 100_000),
        ("vllm", b'{"success": "yes"}'), ("vllm", b'{"success": 1}'), ("sglang", b"False"), ("sglang", b"OK"), ("dynamo", b"{}"),
    ],
)  # fmt: skip
def test_a_200_that_says_nothing_is_neither_believed_nor_a_refusal(kind: str, body: bytes) -> None:
    facts, _ = asked(text(body), kind)
    assert facts["believed"] is None
    assert "neither yes nor no" in facts["why"]
    assert len(facts["said"]) <= 200


@pytest.mark.parametrize(("kind", "busy"), [("vllm", answer_json({"success": False})), ("sglang", text("busy: 2 requests", 400))])
def test_a_busy_server_is_asked_again(kind: str, busy: Reply) -> None:
    facts, posts = asked(in_turn(busy, busy, HONEST[kind][0]), kind, patience=5.0)  # type: ignore[arg-type]  # both are replies
    assert (facts["believed"], facts["tries"], len(posts)) == (True, 3, 3)


@pytest.mark.parametrize(
    "silence", [Reply(after="hang"), Reply([(0, b'{"succ')], after="hang"), Reply([(20 * k, b" ") for k in range(500)])]
)
def test_a_server_that_hangs_costs_the_patience_and_no_more(silence: Reply) -> None:
    told, posts = asked(silence, "vllm")
    assert "gave no answer within 0.2 s" in told
    assert len(posts) == 1


def test_a_connection_that_breaks_is_told() -> None:
    told, _ = asked(Reply([(0, b"HTTP/1.1 nonsense")], framing="raw", after="close"), "sglang")
    assert told.startswith("target.reset: URL: POST /flush_cache: ")


def test_redirects_are_not_followed() -> None:
    told, posts = asked(Reply(status=307, headers=(("Location", "/elsewhere"),), framing="length"), "vllm")
    assert "answers 307" in told
    assert posts == ["/reset_prefix_cache"]


@pytest.mark.parametrize(
    ("owner", "software", "kind"),
    [
        ("vllm", "uvicorn", "vllm"), ("sglang", "uvicorn", "sglang"), ("nvidia", None, "dynamo"),
        ("llamacpp", "llama.cpp", "llamacpp"), (None, "llama.cpp", "llamacpp"),
    ],
)  # fmt: skip
def test_auto_goes_by_what_the_server_says_of_itself(owner: str | None, software: str | None, kind: str) -> None:
    assert recognised({"url": "http://x", "owner": owner, "software": software}) == kind


def test_auto_names_the_choices_where_it_does_not_know() -> None:
    with pytest.raises(TargetUnreachable, match="name one of vllm, sglang, dynamo, llamacpp"):
        recognised({"url": "http://x", "owner": "library", "software": "nginx"})


def test_the_scenario_knows_the_same_kinds() -> None:
    kinds = next(part for part in get_args(Http.model_fields["reset"].annotation) if get_args(part))
    assert set(get_args(kinds)) == {"auto", *RESETS}


# ---- counters


def test_counters_of_a_real_vllm() -> None:
    found = counters.read((Path(__file__).parent.parent / "data/metrics/vllm-0.32-cpu.prom").read_text())
    assert found == (1792, 3904, ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"))


@pytest.mark.parametrize(
    ("exposition", "found"),
    [
        ('vllm:prefix_cache_hits_total{engine="0"} 3\nvllm:prefix_cache_hits_total{engine="1"} 4\n'
         "vllm:prefix_cache_queries_total 20.0", (7, 20)),
        ("vllm:gpu_prefix_cache_hits_total 1\nvllm:gpu_prefix_cache_queries_total 2e1", (1, 20)),
        ('sglang:cached_tokens_total{cache_source="device"} 5\nsglang:cached_tokens_total{cache_source="host"} 2\n'
         "sglang:prompt_tokens_total 70\nsglang:prompt_tokens_histogram_bucket{le=\"1\"} 9", (7, 70)),
        ("# TYPE sglang:cached_tokens_total counter\nsglang:prompt_tokens_total 70", (0, 70)),  # declared, and not counted yet
        ("sglang:prompt_tokens_total 70", None),  # an older one that has no such counter: that is not zero hits
        ("dynamo_frontend_cached_tokens_sum 8\ndynamo_frontend_cached_tokens_count 2\n"
         "dynamo_frontend_input_sequence_tokens_sum 90", (8, 90)),
        ("vllm:prefix_cache_hits_total NaN\nvllm:prefix_cache_queries_total NaN", None),
        ("vllm:prefix_cache_hits_total{ 1\nvllm:prefix_cache_queries_total 5", None),
        ("", None), ("<html>", None), ('[{"kvCacheStats": {}}]', None), ("vllm:prefix_cache_hits_total", None),
    ],
)  # fmt: skip
def test_counters_are_read_by_their_names(exposition: str, found: tuple[float, float] | None) -> None:
    read = counters.read(exposition)
    assert (read[:2] if read is not None else None) == found


# ---- whole runs


class Server:
    """Like vLLM: a reset that says `says`, hit counters, and a share of each prompt that is found all the same."""

    def __init__(self, says: Reply, warm: float = 0.0, tells: bool = False, counts: bool = True) -> None:
        self.says, self.warm, self.tells, self.counts = says, warm, tells, counts
        self.hits = self.queries = 500.0  # of an earlier life
        self.stub = Stub(self.posted, gets=self.got)

    def posted(self, seen: Seen) -> Reply:
        if seen.path == "/reset_prefix_cache":
            return self.says
        self.queries += 100
        self.hits += round(100 * self.warm)
        told = usage(100, 2) | ({"prompt_tokens_details": {"cached_tokens": round(100 * self.warm)}} if self.tells else {})
        return stream(C("a"), C("b"), FIN, sse({"choices": [], "usage": told}), DONE)

    def got(self, seen: Seen) -> Reply:
        if seen.path == "/v1/models":
            return answer_json({"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 2048}]})
        if seen.path == "/metrics" and self.counts:
            lines = f"vllm:prefix_cache_hits_total {self.hits}\nvllm:prefix_cache_queries_total {self.queries}\n"
            return text(lines)
        return answer_json({}, 404)


TRUE = answer_json({"success": True})


def run(server: Server, folder: Path, *sets: str) -> Whole:
    scenario = served("{shape: constant, rate: 100/s}", "{steady: {requests: 30}, drain: {for: 5s}}", target="reset: auto")
    scenario = scenario.replace("prompt: 8,", "prompt: 100,")
    return against(server.stub, scenario, folder, *sets)


def check(whole: Whole, name: str) -> dict[str, Any]:
    return next(row for row in whole.summary["verdict"]["checks"] if row["check"] == name)


def test_a_cold_cache_is_proven_by_the_servers_counters(tmp_path: Path) -> None:
    whole = run(Server(TRUE), tmp_path)
    (server,) = json.loads((whole.directory / "manifest.json").read_text())["target"]["reset"]["servers"]
    assert (server["kind"], server["believed"], server["said"]) == ("vllm", True, '{"success": true}')
    assert (server["before"]["hits"], server["before"]["queries"]) == (500, 500)
    (event,) = [each for each in whole.lines("events.jsonl") if each["kind"] == "reset_check"]
    assert event["data"]["hits"] == 0
    assert event["data"]["queries"] >= 800
    row = check(whole, "prefix_hits")
    assert (row["value"], row["level"]) == (0, "OK")
    assert whole.summary["target"]["reset"]["check"]["hits"] == 0


@pytest.mark.parametrize(("warm", "level"), [(0.0, "OK"), (0.05, "DEGRADED"), (0.5, "INVALID")])
@pytest.mark.parametrize("tells", [True, False], ids=["by the answers", "by the counters"])
def test_a_server_that_lied_is_found_out(warm: float, level: str, tells: bool, tmp_path: Path) -> None:
    """It says that it emptied its cache; 5 % (50 %) of the first prompts' tokens are found all the same."""
    whole = run(Server(TRUE, warm, tells, counts=not tells), tmp_path)
    row = check(whole, "prefix_hits")
    assert row["value"] == pytest.approx(warm)
    assert row["level"] == level
    if level == "INVALID":
        assert whole.code == 4
        assert "target.reset" in row["advice"]


def test_the_check_holds_without_a_nonce_too(tmp_path: Path) -> None:
    """Without a nonce a warm cache may be wanted; who asks for an empty one wants none."""
    whole = run(Server(TRUE, 0.5), tmp_path, "workload.nonce=off")
    assert check(whole, "prefix_hits")["level"] == "INVALID"
    assert not any("nonce is off" in line for line in whole.summary["warnings"])


@pytest.mark.parametrize(("counts", "level"), [(True, "OK"), (False, "DEGRADED")])
def test_a_reset_that_nothing_confirms_degrades_the_run(counts: bool, level: str, tmp_path: Path) -> None:
    whole = run(Server(text(b""), counts=counts), tmp_path)
    row = check(whole, "resets_unconfirmed")
    assert (row["value"], row["n"], row["level"]) == (0 if counts else 1, 1, level)
    assert any("neither yes nor no; the first requests decide" in line for line in whole.summary["warnings"])


def test_what_may_share_a_prefix_is_no_proof_of_a_warm_cache(tmp_path: Path) -> None:
    """One prefix group: every request but the first may find it. The counters cannot tell, and so the check does not judge."""
    prefixes = "workload.prefixes={groups: 1, tokens: 50, share: 100%}"
    row = check(run(Server(TRUE, 0.5), tmp_path, prefixes), "prefix_hits")
    assert row["value"] in (None, 0)
    assert row["level"] in (None, "OK")


def test_a_refused_reset_ends_before_a_request_is_sent(tmp_path: Path) -> None:
    server = Server(answer_json({"detail": "Not Found"}, 404))
    with pytest.raises(TargetUnreachable, match="VLLM_SERVER_DEV_MODE=1"):
        run(server, tmp_path)
    assert [seen.path for seen in server.stub.posts if "completions" in seen.path] == []
    assert not (tmp_path / "results").exists()


def test_the_command_ends_with_6_and_names_the_choices(tmp_path: Path) -> None:
    """A server of no kind that is known, as the command line says it: one line, no traceback, no run directory."""
    with instant(2) as url:
        text = served("{shape: constant, rate: 10/s}", "{steady: {requests: 5}}", target="reset: auto").replace("{url}", url)
        (tmp_path / "s.yaml").write_text(text)
        done = kvbench("run", tmp_path / "s.yaml", "--out", tmp_path / "out")
    assert done.returncode == 6
    assert done.stderr.count("\n") == 1
    assert "name one of vllm, sglang, dynamo, llamacpp" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["kind: sim, model: llama-3.1-8b, hardware: h100", 'kind: "null"'])
def test_what_starts_empty_has_no_reset(target: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        f"target: {{{target}, reset: auto}}\nworkload: {{arrivals: {{shape: constant, rate: 1/s}}, prompt: 8, output: 1}}\n"
        "phases: {steady: {requests: 5}}\n"
    )
    with pytest.raises(ScenarioError, match=r"target\.reset"):
        load(tmp_path / "s.yaml", [])


def test_a_secret_that_the_reset_repeats_is_blotted_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_THE_TEST", "sk-do-not-show-this")
    server = Server(text(b"hello sk-do-not-show-this"))
    whole = run(server, tmp_path, "target.key_env=KEY_OF_THE_TEST")
    assert server.stub.log[0].headers["authorization"] == "Bearer sk-do-not-show-this"
    assert whole.summary["target"]["reset"]["servers"][0]["said"] == "hello ***"
    assert not any("sk-do-not" in file.read_text() for file in whole.directory.iterdir() if file.is_file())


def test_llamacpp_tells_its_cached_tokens_in_timings() -> None:
    end = sse({"choices": [], "usage": usage(120, 1), "timings": {"cache_n": 96, "prompt_n": 24, "predicted_ms": 3.5}})
    assert read([(1, C("a") + FIN + end + DONE)]).cached == 96
    for odd in (None, [], {"cache_n": "96"}, {"cache_n": -1}, {"cache_n": True}, "fast"):
        record = read([(1, C("a") + FIN + sse({"choices": [], "usage": usage(120, 1), "timings": odd}) + DONE)])
        assert (record.outcome, record.cached) == ("ok", None)
    whole = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "usage": usage(9, 1), "timings": {"cache_n": 4}}
    assert read([(1, json.dumps(whole).encode())], event_stream=False).cached == 4
