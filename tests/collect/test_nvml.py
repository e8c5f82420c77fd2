"""GPUs through the real nvidia-ml-py and a compiled fake of NVIDIA's library: what boards do, and what they refuse to do."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvbench.clock import Clock
from kvbench.collect import CollectorError, Place
from kvbench.collect.gpus import Gpus, joined
from kvbench.collect.nvml import Nvml
from kvbench.core import Event, Sample
from tests.collect.fake_nvml import Fake, library

pynvml = pytest.importorskip("pynvml")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setenv("KVBENCH_FAKE_NVML", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Fake(tmp_path / "state")


def read(times: int = 1, **asked: Any) -> tuple[Gpus, dict[str, dict[str, float]]]:
    """(the GPUs, the values of each by uuid) after so many readings, each with everything due."""
    found = Gpus(pynvml)
    try:
        found.choose(asked.get("gpus"), asked.get("visible"))
        for at in range(times):
            for gpu in found.gpus:
                for _ in found.read(gpu, at * 1000.0):
                    pass
            if at + 1 < times:
                threading.Event().wait(0.12)  # GPM wants 100 ms between two samples
    finally:
        found.close()
    return found, {gpu.uuid: gpu.values for gpu in found.gpus}


async def collect(spec: Nvml, seconds: float, fake: Fake | None = None, later: dict[str, float] | None = None) -> list[Any]:
    told: list[Any] = []
    clock = Clock(asyncio.get_running_loop())
    collector = spec.build(Place(clock, Path()))
    try:
        told.append(await collector.open())
        clock.start()
        collector.start(told.append)
        await asyncio.sleep(seconds)
        if fake is not None and later is not None:
            fake.say(later)
            await asyncio.sleep(seconds)
    finally:
        await collector.stop()
    return told


def test_every_number_is_in_base_units(fake: Fake) -> None:
    fake.say(count=1, power=250_000, temp=61, clock=1755, reasons=0x4 | 0x40)
    fake.say({"mem.total": 80e9, "mem.used": 72e9, "mem.reserved": 6e8, "energy.at": 5_000_000})
    _, values = read(times=2)
    found = values["GPU-00000000-fake"]
    expected = {
        "gpu_memory": (80e9 - (80e9 - 72e9 - 6e8)) / 80e9, "gpu_memory_used_bytes": 72e9, "gpu_memory_reserved_bytes": 6e8,
        "gpu_utilization": 0.5, "gpu_memory_utilization": 0.3, "gpu_power_w": 250.0, "gpu_energy_j_total": 5000.0,
        "gpu_temperature_c": 61, "gpu_memory_temperature_c": 61.0, "gpu_sm_clock_hz": 1.755e9, "gpu_memory_clock_hz": 2.619e9,
        "gpu_throttled": 1.0, "gpu_power_instant_w": 412.345, "gpu_power_average_w": 412.345,
        "gpu_nvlink_sent_bytes_total": 18 * 1024, "gpu_pcie_sent_per_s": 2e6, "gpu_pcie_received_per_s": 1e6, "gpu_processes": 2,
        "gpu_process_memory_bytes": 5e8, "gpu_ecc_corrected_total": 3, "gpu_ecc_uncorrected_total": 1,
        "gpu_remapped_rows_total": 3, "gpu_remap_pending": 1.0, "gpu_sm_occupancy": 0.3325, "gpu_dram_active": 0.715,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert "gpu_tensor_active" not in found  # this one metric of GPM is not supported, and the others are


def test_drivers_before_510_have_the_first_form_of_memory_only(fake: Fake) -> None:
    """v1 counts what is reserved as used; the share is the same."""
    fake.say({"mem2.ret": 25, "mem.used": 72e9, "mem.total": 80e9})
    found, values = read()
    assert values["GPU-00000000-fake"]["gpu_memory"] == pytest.approx((72e9 + 6e8) / 80e9)
    assert "gpu_memory_reserved_bytes" not in values["GPU-00000000-fake"]
    assert not found.gpus[0].off


@pytest.mark.parametrize(
    ("visible", "utilizations"),
    [("2,3", [0.3, 0.4]), ("3,2", [0.4, 0.3]), ("GPU-1", [0.2]), ("", []), ("-1", []), (None, [0.1, 0.2, 0.3, 0.4])],
)
def test_j01_cuda_visible_devices_says_which_gpus_are_meant(fake: Fake, visible: str | None, utilizations: list[float]) -> None:
    fake.say({"count": 4} | {f"gpu{index}.util": 10 * (index + 1) for index in range(4)})
    found, _ = read(visible=visible)
    assert [gpu.values["gpu_utilization"] for gpu in found.gpus] == utilizations
    assert all(gpu.uuid.startswith("GPU-") for gpu in found.gpus)


@pytest.mark.parametrize(
    ("visible", "why"), [("9", "no GPU"), ("2,2", "named twice"), ("GPU-", "more than one"), ("GPU-x", "no GPU")]
)
def test_j01_a_gpu_that_is_not_there_is_refused(fake: Fake, visible: str, why: str) -> None:
    fake.say(count=4)
    with pytest.raises(CollectorError, match=f"CUDA_VISIBLE_DEVICES={visible}.*{why}"):
        read(visible=visible)


def test_indices_of_the_scenario_are_nvmls_own(fake: Fake) -> None:
    fake.say(count=4)
    found, _ = read(gpus=[3, "GPU-0"], visible="1")
    assert [gpu.index for gpu in found.gpus] == [3, 0]


def test_j02_what_is_not_supported_is_null_with_its_reason_and_the_rest_goes_on(fake: Fake) -> None:
    fake.say({"count": 1, "util.ret": 3, "mem.used": 4e9, "gpm": 0})
    told = asyncio.run(collect(Nvml(every=0.05), 0.3))
    facts = told[0]["gpus"][0]
    assert facts["unsupported"]["utilization"] == "Not Supported"
    events = [item.data for item in told if isinstance(item, Event) and item.data.get("state") == "unsupported"]
    assert [event["metric"] for event in events].count("utilization of GPU 0") == 1
    nulls = [item for item in told if isinstance(item, Sample) and item.value is None]
    assert sorted((sample.name, sample.labels["gpu"]) for sample in nulls) == [("gpu_gpm", "0"), ("gpu_utilization", "0")]
    joins = {item.name for item in told if isinstance(item, Sample) and not item.labels}
    assert "gpu_memory" in joins
    assert "gpu_utilization" not in joins


@pytest.mark.parametrize(("code", "advice"), [(9, "driver is not loaded"), (18, "reboot"), (4, "/dev/nvidia")])
def test_j02_an_nvml_that_does_not_start_says_what_to_do(fake: Fake, code: int, advice: str) -> None:
    fake.say({"init.ret": code})
    with pytest.raises(CollectorError, match=advice):
        asyncio.run(collect(Nvml(), 0.0))


def test_j03_a_gpu_that_is_lost_is_told_with_its_last_time_and_the_others_go_on(fake: Fake) -> None:
    """Power reads 0, there is no energy counter, and GPU 1 falls off the bus while the run goes on."""
    fake.say({"count": 2, "power": 0, "energy.ret": 3})
    told = asyncio.run(collect(Nvml(every=0.05), 0.25, fake, {"gpu1.error": 15}))
    (lost,) = [item for item in told if isinstance(item, Event) and item.data.get("state") == "gpu_lost"]
    assert (lost.data["gpu"], lost.data["reason"]) == (1, "GPU is lost")
    samples = [item for item in told if isinstance(item, Sample)]
    last = {index: max(s.t for s in samples if s.labels.get("gpu") == index and s.value is not None) for index in ("0", "1")}
    assert last["1"] <= lost.t < last["0"]
    assert lost.data["last"] <= last["1"] < lost.data["last"] + 0.05, "when the reading began that was its last"
    assert {s.value for s in samples if s.name == "gpu_power_w"} == {0.0}
    assert not any(s.name == "gpu_energy_j_total" for s in samples)
    assert any(s.name == "gpu_memory" and not s.labels and s.t > lost.t for s in samples)


def test_a_sum_of_counters_does_not_fall_when_a_gpu_is_lost(fake: Fake) -> None:
    fake.say({"count": 2, "energy.at": 7_000_000})
    found = Gpus(pynvml)
    found.choose(None, None)
    for at in (0.0, 100.0):
        for gpu in found.gpus:
            list(found.read(gpu, at))
        assert dict(joined(found.gpus))["gpu_energy_j_total"] == 14_000
        fake.say({"gpu1.error": 15})
    assert found.gpus[1].lost
    assert dict(joined(found.gpus))["gpu_power_w"] == 300, "what it drew last, it does not draw now"
    found.close()


def test_an_integrated_gpu_is_judged_by_the_systems_memory_and_says_so(fake: Fake) -> None:
    import psutil

    fake.say({"mem.ret": 3, "integrated": 1})
    told = asyncio.run(collect(Nvml(every=0.05), 0.1))
    assert told[0]["memory_source"] == {"0": "system"}
    labelled = [item for item in told if isinstance(item, Sample) and item.labels.get("memory") == "system"]
    memory = psutil.virtual_memory()
    assert labelled[0].value == pytest.approx((memory.total - memory.available) / memory.total, abs=0.1)


def test_missing_memory_on_a_discrete_gpu_is_missing_not_zero(fake: Fake) -> None:
    fake.say({"mem.ret": 3})
    told = asyncio.run(collect(Nvml(every=0.05), 0.1))
    assert [s.value for s in told if isinstance(s, Sample) and s.name == "gpu_memory"] == [None]


def test_mig_instances_are_told_apart_and_the_parents_utilization_is_not_told(fake: Fake) -> None:
    fake.say({"mig": 2, "gpu0.util.ret": 3})
    found, values = read()
    assert [gpu.mig for gpu in found.gpus] == ["", "0", "1"]
    assert values["MIG-fake-1001"]["gpu_memory_total_bytes"] == 10e9
    assert found.gpus[0].off == {"utilization": "Not Supported"}
    assert dict(joined(found.gpus))["gpu_memory"] == values["GPU-00000000-fake"]["gpu_memory"]


def test_grace_hopper_tells_power_of_the_module(fake: Fake) -> None:
    fake.say({"power.scope": 1})
    _, values = read()
    assert values["GPU-00000000-fake"]["gpu_module_power_instant_w"] == pytest.approx(412.345)
    assert "gpu_power_instant_w" not in values["GPU-00000000-fake"]


def test_gpm_that_fails_at_its_first_sample_is_given_up(fake: Fake) -> None:
    """A fractional vGPU says that it supports it."""
    fake.say({"gpm.sample.ret": 3})
    found, _ = read(times=2)
    assert found.gpus[0].off["gpm"] == "Not Supported"


@pytest.mark.parametrize(("code", "readings"), [(3, 1), (4, 1), (13, 1), (10, 5), (999, 5)])
def test_what_fails_is_given_up_at_once_or_after_five_readings(fake: Fake, code: int, readings: int) -> None:
    """Not supported, no permission, no such function: for good. A timeout, an unknown error: perhaps not."""
    found = Gpus(pynvml)
    found.choose(None, None)
    gpu = found.gpus[0]
    list(found.read(gpu, 0.0))
    assert gpu.values["gpu_power_w"] == 300
    fake.say({"power.ret": code})
    for n in range(1, readings + 1):
        assert "power" not in gpu.off
        list(found.read(gpu, float(n)))
    assert gpu.off["power"]
    assert "gpu_power_w" not in gpu.values, "nor is the last value told on"
    assert gpu.values["gpu_temperature_c"] == 55
    found.close()


def test_a_transient_error_is_tried_again(fake: Fake) -> None:
    fake.say({"power.ret": 999})
    found = Gpus(pynvml)
    found.choose(None, None)
    gpu = found.gpus[0]
    list(found.read(gpu, 0.0))
    assert "gpu_power_w" not in gpu.values
    assert "power" not in gpu.off
    fake.say({"power.ret": 0})
    list(found.read(gpu, 1.0))
    assert gpu.values["gpu_power_w"] == 300
    found.close()


def test_throttling_is_an_event_when_it_begins_and_ends(fake: Fake) -> None:
    """Of the bits that are set at first five hold clocks down; idle, application clocks and sync boost do not."""
    fake.say(reasons=0x4 | 0x8 | 0x20 | 0x40 | 0x80 | 0x1 | 0x2 | 0x10)
    told = asyncio.run(collect(Nvml(every=0.05), 0.2, fake, {"reasons": 0x1 | 0x2 | 0x10}))
    throttled = [item.data["by"] for item in told if isinstance(item, Event) and item.kind == "gpu"]
    assert throttled == [["hw_slowdown", "hw_thermal", "power_brake", "power_cap", "sw_thermal"], []]
    shown = [item.value for item in told if isinstance(item, Sample) and item.name == "gpu_throttled"]
    assert (shown[0], shown[-1]) == (1.0, 0.0)


def test_rare_readings_are_rare_and_the_account_is_whole(fake: Fake) -> None:
    told = asyncio.run(collect(Nvml(every=0.1), 1.05))
    names = [item.name for item in told if isinstance(item, Sample) and item.labels]
    assert names.count("gpu_processes") == 1
    assert 8 <= names.count("gpu_power_w") <= 13
    account = next(item.data for item in told if isinstance(item, Event) and item.data.get("state") == "stopped")
    assert account["readings"] == names.count("gpu_power_w")
    assert 0 < account["cost_s"] <= account["in_calls_s"] + 0.5


def test_calls_that_take_long_are_made_more_rarely(fake: Fake) -> None:
    """Each call holds the driver's lock, which the server needs: 20 ms a call, at a period of 50 ms."""
    fake.say(sleep_us=20_000)
    told = asyncio.run(collect(Nvml(every=0.05), 1.5))
    slower = [item.data["every_s"] for item in told if isinstance(item, Event) and item.data.get("state") == "slower"]
    assert slower
    assert slower[-1] >= 0.2
    gaps = [item.data for item in told if isinstance(item, Event) and item.data.get("state") == "gap"]
    assert gaps, "the first readings alone took longer than three periods"
    assert all(gap["periods"] > 3 and gap["end"] > gap["start"] for gap in gaps)


def test_without_any_library_the_reason_is_said(tmp_path: Path) -> None:
    lines = ["import asyncio", "from tests.collect.test_nvml import collect", "from kvbench.collect.nvml import Nvml"]
    code = "\n".join([*lines, "asyncio.run(collect(Nvml(), 0))"])
    for folder, why in ((tmp_path, "no libnvidia-ml.so.1"), (Path(".venv/tools/nvml").absolute(), "driver is not loaded")):
        if folder.name == "nvml" and not (folder / "libnvidia-ml.so.1").exists():
            pytest.skip("the real libnvidia-ml1 of Debian is not here: .ci/nvml.sh fetches it")
        settings = os.environ | {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": "."}
        said = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True)
        assert why in said.stderr, said.stderr


@pytest.mark.alone
def test_eight_gpus_every_100_ms_cost_below_2_percent_of_a_core(fake: Fake) -> None:
    """The thread's own CPU; most of it is the fake reading its state file, which no driver does."""
    fake.say(count=8)
    told = asyncio.run(collect(Nvml(every=0.1), 5.0))
    account = next(item.data for item in told if isinstance(item, Event) and item.data.get("state") == "stopped")
    print(f"{account['cost_s'] / 5:.2%} of a core, {account['readings']} readings of 8 GPUs, library in {library()}")
    assert account["readings"] >= 45
    assert account["cost_s"] / 5 < 0.02


def test_gpu_checks_part_about_nvml_runs_on_the_fake(fake: Fake) -> None:
    """What make gpu-check measures, without a GPU to load: the fake steps its energy every 100 ms and agrees with its power."""
    from tests.bench import gpu_driver

    fake.say(count=1)
    told = gpu_driver.driver(None, seconds=1.0)
    assert told["calls"]["memory"]["median_us"] > 0
    assert told["memory"]["v1"]["used"] == told["memory"]["v2"]["used"] + told["memory"]["v2"]["reserved"]
    assert told["memory"]["v2_used_holds_reserved"] is False
    assert told["energy"]["step_s"] == pytest.approx(0.1, abs=0.03)
    assert told["energy"]["integral_over_counter"] == pytest.approx(1.0, abs=0.15)
    assert told["gpm"]["values"]["gpu_sm_occupancy"] == pytest.approx(0.3325)
    assert told["collector"]["readings"] >= 3
    assert any("energy counter steps every" in line for line in gpu_driver.lines(told))
