"""Group F of the public cases, as whole runs: which requests and which seconds count. Times are a tenth of the cases'."""

from pathlib import Path

import pytest

from tests.stub.stub import DONE, FIN, C, Reply, Seen, Stub, U
from tests.whole import against, served

pytestmark = pytest.mark.alone
ANSWER = C("a") + FIN + U(8, 1) + DONE


def tokens(*at: float) -> Reply:
    """A token at each time (ms), and the end with the last."""
    return Reply([*((ms, C("x")) for ms in at[:-1]), (at[-1], C("x") + FIN + U(8, len(at)) + DONE)])


def test_f01_what_warm_up_began_counts_event_by_event(tmp_path: Path) -> None:
    """Warm-up ends at 1 s. A (due 0.8): tokens from 0.95 every 50 ms; B (due 0.9): from 1.05. Then one request due at 1.0.

    Throughput of steady counts A's tokens from its start on ([start, end): eight, and the one of 1.0 s where it came no earlier)
    and B's ten, each token once. Where the case gives B's ttft to the measured window, our headline latencies are of requests
    *due* in steady (METRICS section 2), so neither A nor B is in them: both were begun by the warm-up. The sliding windows hold
    each event at its own time, and so B's ttft.
    """

    def script(seen: Seen) -> Reply:
        first = {8: 150.0, 9: 150.0}.get(seen.number)
        return Reply([(0, ANSWER)]) if first is None else tokens(*(first + 50 * k for k in range(10)))

    steady = "{epochs: [{for: 1200ms, arrivals: {shape: constant, rate: 0.5/s}}]}"
    phases = f"{{warmup: {{policy: fixed, for: 1s}}, steady: {steady}, drain: {{for: 1s}}}}"
    run = against(Stub(script), served("{shape: constant, rate: 10/s}", phases), tmp_path)
    found = run.summary
    assert (found["headline"]["cohort"], found["headline"]["n"]) == ("requests due in steady", 1)
    assert found["latency"]["ttft"]["n"] == found["latency"]["e2e"]["n"] == 1
    warmup, steady_, drain = (phase["output_rate"]["n"] for phase in found["phases"])
    assert (warmup, steady_, drain) in ((8 + 1, 9 + 10 + 1, 0), (8 + 2, 8 + 10 + 1, 0))
    assert found["tokens"]["output_rate"]["n"] == steady_
    assert found["rates"]["ok"]["n"] == 3, "A, B and the measured one ended here"
    assert [r.measured for r in run.records] == [False] * 10 + [True]
    whole = run.lines("windows.jsonl")[-1]
    assert (whole["counts"]["tokens_out"], whole["n"]["ttft_p50"]) == (8 + 20 + 1, 11)


def test_f02_tokens_of_requests_cut_off_stay_in_the_throughput(tmp_path: Path) -> None:
    """4 users, 100 tokens evenly over 0.8 s, stop at 1 s: 500 tokens came, 400 of requests that ended; 4 are incomplete."""
    text = served("{shape: closed, concurrency: 4}", "{steady: {for: 1s}}")
    run = against(Stub(tokens(*(8.0 * (k + 1) for k in range(100)))), text, tmp_path)
    found = run.summary
    rate = found["tokens"]["output_rate"]
    assert rate["value"] * found["headline"]["seconds"] == pytest.approx(500, abs=20)
    assert rate["succeeded_only"] * found["headline"]["seconds"] == pytest.approx(400)
    assert (found["outcomes"]["ok"], found["outcomes"]["cancelled"]) == (4, 4)
    assert [found["latency"][name]["n"] for name in ("e2e", "ttft", "tpot")] == [4, 4, 4]
    assert found["outcomes"]["error_rate"] == 0, "what the end of the run cut off is no error"


def test_f05_timeouts_stay_out_of_the_latencies_and_have_their_own_table(tmp_path: Path) -> None:
    """100 requests of 100 ms, every tenth times out at 1 s after one token; the run's true length says what they cost."""
    stuck = Reply([(20, C("x"))], after="hang")
    fine = Reply([(20, C("x")), (100, C("y") + FIN + U(8, 2) + DONE)])
    text = served("{shape: constant, rate: 200/s}", "{steady: {requests: 100}}", target="timeouts: {total: 1s}")
    found = against(Stub(lambda seen: stuck if seen.number % 10 == 9 else fine), text, tmp_path).summary
    assert [found["latency"][name]["n"] for name in ("e2e", "ttft", "tpot", "response")] == [90] * 4
    assert found["latency"]["e2e"]["max"] < 0.5
    (failure,) = found["failures"]
    assert (failure["outcome"], failure["class"], failure["n"], failure["tokens"]) == ("timeout", "total", 10, 10)
    assert found["outcomes"]["error_rate"] == 0.1
    counted = found["latency"]["e2e"]["with_timeouts"]
    assert (counted["n"], counted["timeouts"]) == (100, 10)
    assert counted["p99"] == pytest.approx(1.0, abs=0.1)
    assert found["headline"]["seconds"] == pytest.approx(99 / 200 + 1.0, abs=0.15)
    assert found["rates"]["offered"]["value"] == pytest.approx(100 / found["headline"]["seconds"])


def test_f06_the_cohort_is_followed_to_its_last_answer(tmp_path: Path) -> None:
    """Steady of 0.5 s, answers take up to 0.9 s: nothing is cut at the stage's length, and both intervals stand in the report.

    The window of the server's own counters is in test_i_server_metrics.py.
    """
    text = served("{shape: constant, rate: 20/s}", "{steady: {for: 500ms}, drain: {for: 3s}}")
    found = against(Stub(lambda seen: Reply([(90.0 * (seen.number + 1), ANSWER)])), text, tmp_path).summary
    assert found["outcomes"]["ok"] == 10
    assert found["latency"]["e2e"]["max"] == pytest.approx(0.9, abs=0.05)
    assert found["headline"]["seconds"] == pytest.approx(0.5, abs=0.05)
    assert found["stop"]["seconds"] == pytest.approx(0.45 + 0.9, abs=0.15)
    assert [phase["name"] for phase in found["phases"]] == ["steady", "drain"]
