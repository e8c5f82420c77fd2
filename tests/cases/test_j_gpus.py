"""Open cases of group J on GPUs as whole runs against the compiled fake; tests/collect/test_nvml.py has their details."""

import asyncio
from pathlib import Path

import pytest

from kvbench.report.files import load as load_run
from tests.collect.fake_nvml import Fake
from tests.stub.stub import DONE, FIN, C, Reply, Stub, U
from tests.whole import Whole, against, served

pytest.importorskip("pynvml")
ANSWER = Reply([(0, C("hi") + FIN + U(8, 2) + DONE)])
GPUS = "collect: [{kind: nvml, every: 100ms, required: REQUIRED}]"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setenv("KVBENCH_FAKE_NVML", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Fake(tmp_path / "state")


def ran(folder: Path, required: str = "false") -> Whole:
    text = served(
        "{shape: constant, rate: 40/s}", "{steady: {for: 2s}, drain: {for: 2s}}", also=GPUS.replace("REQUIRED", required)
    )
    return against(Stub(ANSWER), text, folder)


def test_j01_results_name_the_uuid_of_the_gpu_that_cuda_shows(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.say({"count": 4} | {f"gpu{index}.util": 10 * (index + 1) for index in range(4)})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2")
    run = ran(tmp_path)
    told = run.summary["telemetry"]["collectors"][0]["facts"]["gpus"]
    assert [gpu["uuid"] for gpu in told] == ["GPU-30000000-fake", "GPU-20000000-fake"]
    used = {s.labels["uuid"]: s.value for s in load_run(run.directory).samples if s.name == "gpu_utilization" and s.labels}
    assert used == {"GPU-30000000-fake": 0.4, "GPU-20000000-fake": 0.3}


@pytest.mark.slow
def test_energy_of_a_whole_run_is_the_counters_with_the_integral_of_power_beside_it(fake: Fake, tmp_path: Path) -> None:
    """Two GPUs of 250 W for 12 s are 6,000 J, but for the counter's steps and the first reading; each answer has two tokens."""
    fake.say(count=2, power=250_000)
    text = served(
        "{shape: constant, rate: 20/s}",
        "{baseline: {idle_power: 2s}, steady: {for: 12s}, drain: {for: 2s}}",
        also=GPUS.replace("REQUIRED", "true"),
    )
    found = against(Stub(ANSWER), text, tmp_path).summary
    told = found["energy"]
    assert told["joules"] == pytest.approx(6000, rel=0.02)
    assert told["disagreement"] == pytest.approx(0, abs=0.02)
    assert told["joules_per_token"] == pytest.approx(6000 / (12 * 20 * 2), rel=0.03)
    assert told["requests_per_kwh"] == pytest.approx(12 * 20 * 3.6e6 / 6000, rel=0.03)
    assert told["idle_power"] == pytest.approx(500)
    assert told["joules_per_token_without_idle"] == pytest.approx(0, abs=0.02 * told["joules_per_token"])
    assert told["modelled"] is False


@pytest.mark.parametrize(("required", "code"), [("false", 0), ("true", 2)])
def test_j02_an_nvml_that_does_not_start_is_one_warning_unless_required(
    fake: Fake, tmp_path: Path, required: str, code: int
) -> None:
    from kvbench.scenario import ScenarioError

    fake.say({"init.ret": 18})
    if code:
        with pytest.raises(ScenarioError, match=r"required collector nvml cannot work: .*reboot"):
            ran(tmp_path, required)
        return
    run = ran(tmp_path)
    assert run.code == 0
    assert run.summary["telemetry"]["collectors"][0]["state"] == "not started"
    assert sum("collector nvml" in line for line in run.summary["warnings"]) == 1


def test_j03_a_gpu_lost_in_the_run_is_flagged_and_the_other_goes_on(fake: Fake, tmp_path: Path) -> None:
    """Memory is not supported, power reads 0, there is no energy counter: nulls with reasons, and 0 W is a reading."""
    fake.say({"count": 2, "power": 0, "energy.ret": 3, "mem.ret": 3})

    async def pull() -> None:
        await asyncio.sleep(1)
        fake.say({"gpu0.error": 15})

    text = served("{shape: constant, rate: 40/s}", "{steady: {for: 2s}, drain: {for: 2s}}", also=GPUS.replace("REQUIRED", "true"))
    run = against(Stub(ANSWER), text, tmp_path, also=pull)
    files = load_run(run.directory)
    (lost,) = [event for event in files.all("collector") if event.data["state"] == "gpu_lost"]
    assert lost.data["gpu"] == 0
    assert 0.5 < lost.data["last"] < lost.t, "its last time is on record"
    assert sum("GPU 0 was lost" in line for line in run.summary["warnings"]) == 1
    silent = run.summary["telemetry"]["collectors"][0]["unsupported"]
    for metric in ("memory of GPU 1", "energy of GPU 1"):
        assert silent[metric] == "Not Supported"
    told = {name: {s.value for s in files.samples if s.name == name} for name in ("gpu_memory", "gpu_energy", "gpu_power_w")}
    assert told == {"gpu_memory": {None}, "gpu_energy": {None}, "gpu_power_w": {0.0}}
    alive = [sample.t for sample in files.samples if sample.labels.get("gpu") == "1" and sample.value is not None]
    assert max(alive) > lost.t + 0.5
    assert run.code == 0
