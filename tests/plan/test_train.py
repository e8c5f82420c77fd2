"""Training: the same seed gives the same policy; episodes play what a run plays; what is trained holds on loads it never saw."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.control.law import Open
from kvbench.control.policy import read, write
from kvbench.plan.episode import Episode, offers
from kvbench.plan.train import ENOUGH, Effort, Trainer, spec
from kvbench.scenario import Scenario, load
from tests.whole import ROOT, kvbench, simulated

CHAOS = ROOT / "scenarios/chaos.yaml"
TINY = Effort(generations=1, pairs=1, judged=1, seconds=60.0)
HELD_OUT = (1, 2, 3, 4, 5)  # training starts at 1000


def chaos(seed: int, *sets: str) -> Scenario:
    return load(CHAOS, [f"seed={seed}", *sets])


def test_the_same_seed_gives_the_same_file() -> None:
    one, again, other = (write(Trainer(chaos, TINY).train(seed)) for seed in (0, 0, 1))
    assert one == again
    assert one != other


def test_a_policy_says_how_it_was_trained() -> None:
    heard: list[str] = []
    policy = Trainer(chaos, TINY, heard.append).train(3)
    how = policy.trained
    assert how["seed"] == 3
    assert how["episodes"] == 1 + 2 + 1  # the start judged, a pair, its generation judged
    assert how["load_seeds"] == [1000, 1001]
    assert how["scenario"] == "chaos"
    assert len(heard) == 2
    assert 0 <= how["after"]["goodput"] <= 1
    assert sum(policy.seen) == how["episodes"] * TINY.seconds  # a decision a second
    assert not all(count >= ENOUGH for count in policy.seen)  # what was not played is not known


def test_training_is_the_scenarios_own_control() -> None:
    control = chaos(1, "control={law: none, patience: 7s, over: 3s, inflight: 5}").control
    assert isinstance(control, Open)
    found = spec(control)
    assert (found.patience, found.over, found.inflight, found.every) == (7.0, 3.0, 5, 1.0)


@pytest.mark.parametrize("control", ["{law: none, inflight: 40, patience: 2s}", "{law: learned, patience: 2s}"])
def test_an_episode_counts_what_a_whole_run_counts(control: str, tmp_path: Path) -> None:
    """The bare loop against the run with its event loop, records, windows and report, on the same load under the same law."""
    sets = ("seed=4", f"control={control}", "phases={steady: {for: 3m}, drain: {for: 2m}}", "stop=[]")
    run = simulated(CHAOS.read_text(), tmp_path, *sets)
    scenario = load(CHAOS, sets)
    records = run.records
    score = Episode(scenario, offers(scenario, 180.0), 180.0, scenario.control.limits()).play(scenario.control.arm(None))
    assert score.offered == len(records)
    assert score.shed == pytest.approx(sum(record.outcome == "shed" for record in records) / len(records), abs=1e-12)
    assert score.goodput == pytest.approx(run.summary["goodput"]["value"], abs=1e-12)
    assert score.preemptions == sum(record.preempted for record in records)


def test_an_episode_plays_the_scenarios_own_machine(tmp_path: Path) -> None:
    """Two nodes of which one is slow for a while, a host below them, requests that fail where memory runs out, some refused."""
    faults = "[{kind: slow, node: 1, at: 20s, for: 20s, factor: 3}, {kind: refuse, at: 30s, for: 30s, share: 50%}]"
    sets = (
        "seed=4", "control={law: none}", "phases={steady: {for: 80s}, drain: {for: 2m}}", "stop=[]", f"target.faults={faults}",
        "target.cluster={replicas: 2}", "target.tiers={host: {capacity: 4GB}}",
        "target.settings={max_preemptions: 0, blocks: 400}",
    )  # fmt: skip
    run, scenario = simulated(CHAOS.read_text(), tmp_path, *sets), load(CHAOS, sets)
    episode = Episode(scenario, offers(scenario, 80.0), 80.0, scenario.control.limits())
    score = episode.play(None)
    causes = [record.cause for record in run.records]
    assert score.offered == len(causes)
    assert score.goodput == pytest.approx(run.summary["goodput"]["value"], abs=1e-12)
    assert causes.count("oom") == episode.engine.gauges()["oom"] > 0
    assert causes.count("http_503") > 0
    assert score.refused == "refused"


def test_an_episode_writes_no_files(tmp_path: Path) -> None:
    """What one play left on real drives would be found by the next."""
    drive = tmp_path / "drive"
    scenario = chaos(1, f"target.tiers={{ssd: {{capacity: 1GB, real: {drive}}}}}")
    assert Episode(scenario, offers(scenario, 5.0), 5.0, scenario.control.limits()).play(None).offered > 0
    assert not drive.exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("workload.arrivals={shape: closed, concurrency: 4}", "closed loop"),
        ("target={kind: null}", "embedded engine"),
    ],
)
def test_a_load_that_cannot_be_played_bare_is_refused(change: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        offers(chaos(1, change), 10.0)


def test_the_command_writes_a_policy(tmp_path: Path) -> None:
    out = tmp_path / "mine.yaml"
    short = ("--generations", "1", "--pairs", "1", "--seconds", "10")
    done = kvbench("laws", "train", CHAOS, "--seed", "2", "--out", out, *short)
    assert done.returncode == 0, done.stderr
    assert read(out).trained["seed"] == 2
    refused = kvbench("laws", "train", CHAOS, "--set", "target={kind: null}", "--out", out, *short)
    assert refused.returncode == 2
    assert "embedded engine" in refused.stderr


SHORT = ("--generations", "1", "--pairs", "1", "--seconds", "10")


def test_a_policy_goes_here_and_a_scenario_beside_it_names_it(tmp_path: Path) -> None:
    """Into the current directory, under the scenario's name; the same bytes again; and whole runs take it from anywhere."""
    command = (sys.executable, "-m", "kvbench", "laws", "train", str(CHAOS), "--set", "name=mine", *SHORT)
    texts = []
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert "policy: ./mine.yaml" in done.stdout
        texts.append((tmp_path / "mine.yaml").read_bytes())
    assert texts[0] == texts[1]
    sets = ("control={law: learned, policy: ./mine.yaml}", "phases={steady: {for: 20s}, drain: {for: 20s}}", "stop=[]")
    run = simulated(CHAOS.read_text(), tmp_path, *sets)
    assert run.lines("events.jsonl")[-1]["data"]["law"]["policy"] == "mine"


def test_what_is_no_policy_is_not_written_over(tmp_path: Path) -> None:
    own = tmp_path / "chaos.yaml"
    own.write_text(CHAOS.read_text())
    refused = kvbench("laws", "train", CHAOS, "--out", own, *SHORT)
    assert refused.returncode == 2
    assert "is no policy, so it is kept: say with --out" in refused.stderr
    assert own.read_text() == CHAOS.read_text()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("target.settings={max_model_len: 16}", "the engine refuses them"),
        ("workload.slo={ttft: 1us}", "see their limits"),
    ],
)
def test_a_load_that_is_never_served_is_refused(tmp_path: Path, change: str, said: str) -> None:
    """14 episodes: the start on 12 loads, and a pair. Nothing is written."""
    out = tmp_path / "mine.yaml"
    done = kvbench("laws", "train", CHAOS, "--set", change, "--out", out, *SHORT)
    assert done.returncode == 2, done.stdout
    assert "cannot be trained on: goodput is 0 in all 14 episodes so far" in done.stderr
    assert said in done.stderr
    assert not out.exists()


@pytest.mark.slow
def test_learned_beats_every_other_law_on_loads_it_was_not_trained_on(tmp_path: Path) -> None:
    laws = ("learned", "none", "bucket, rate: 3.5/s", "pid, setpoint: 80%, signal: kv_usage", "queue_feedback")
    phases = "phases={steady: {for: 8m}, drain: {for: 1m}}"
    goodput: dict[str, float] = {}
    for law in laws:
        total = 0.0
        for seed in HELD_OUT:
            folder = tmp_path / f"{law.split(',')[0]}-{seed}"
            folder.mkdir()
            run = simulated(CHAOS.read_text(), folder, f"seed={seed}", f"control={{law: {law}, patience: 2s}}", phases, "stop=[]")
            total += run.summary["goodput"]["value"]
        goodput[law] = total / len(HELD_OUT)
    print(goodput)
    learned = goodput.pop("learned")
    assert learned > max(goodput.values())
