"""GPUs, the client's machine and what broke in the server, in the report."""

from pathlib import Path
from typing import Any

import pytest

from kvbench.core import Event, Sample
from kvbench.metrics import names
from kvbench.report import budgets, chart
from kvbench.report.devices import devices, drawn, rows
from kvbench.report.files import load
from kvbench.report.html import page
from kvbench.report.summary import summarise
from kvbench.report.text import shortened, times
from kvbench.verdict import amount
from tests.report.build import record, write


def made(tmp_path: Path, samples: list[Sample], events: list[Event] | None = None, **more: Any) -> tuple[dict[str, Any], str]:
    files = load(write(tmp_path / "run", [record(k, k * 0.1) for k in range(100)], samples=samples, events=events, **more))
    summary = summarise(files)
    return summary, page(summary, files)


def gpu(number: int, source: str = "nvml", until: int = 11, **values: float) -> list[Sample]:
    labels = {"gpu": str(number), "uuid": f"GPU-{number}"}
    return [Sample(t=float(t), name=n, value=v, source=source, labels=labels) for t in range(until) for n, v in values.items()]


TWO = [
    *gpu(0, gpu_memory=0.5, gpu_utilization=0.9, gpu_power_w=300.0, gpu_temperature_c=61.0, gpu_throttled=0.0),
    *gpu(1, gpu_memory=0.8, gpu_utilization=0.5, gpu_power_w=200.0, gpu_temperature_c=71.0),
    *(Sample(t=float(t), name="gpu_throttled", value=float(t >= 5), source="nvml", labels={"gpu": "1", "uuid": "GPU-1"})
      for t in range(10)),
    *(Sample(t=float(t), name="gpu_power_w", value=500.0, source="nvml") for t in range(11)),
    *(Sample(t=float(t), name="gpu_memory", value=0.8, source="nvml") for t in range(11)),
    *(Sample(t=float(t), name="host_cpu", value=0.1 + 0.01 * t, source="host") for t in range(10)),
]  # fmt: skip


def test_each_gpu_has_a_row_and_all_have_one(tmp_path: Path) -> None:
    summary, html = made(tmp_path, TWO)
    told = dict(rows(summary["devices"]))
    assert told["GPU 0"] == (
        "memory max 50 %, a kernel ran 90 % of the time, 300 W in the mean, max 61 C, throttled 0 % of the time (nvml)"
    )
    assert "max 71 C, throttled 50 % of the time" in told["GPU 1"]
    assert told["all GPUs"] == "memory max 80 %, 500 W in the mean"
    assert told["machine"] == "CPU mean 14.5 % max 19 %"
    for text in ("GPU power", "GPU memory in use", "GPU utilization", "GPUs and machines", '<span class="k1">GPU 1</span>'):
        assert text in html


def test_a_gpu_that_two_collectors_read_has_one_row() -> None:
    samples = gpu(0, "prometheus", gpu_power_w=1.0) + gpu(0, "nvml", gpu_power_w=300.0) + gpu(0, "agent", gpu_power_w=2.0)
    (row,) = devices(samples, 0.0, 10.0, {})["gpus"]
    assert (row["gpu_power_w"]["mean"], row["source"]) == (300, "nvml")
    short = gpu(0, "prometheus", gpu_power_w=1.0) + gpu(0, "nvml", until=5, gpu_power_w=300.0)
    (row,) = devices(short, 0.0, 10.0, {})["gpus"]
    assert (row["gpu_power_w"]["mean"], row["source"]) == (1, "prometheus"), "nvml told half of the interval"


def test_many_gpus_are_one_line_of_a_chart() -> None:
    many = [s for n in range(8) for s in gpu(n, gpu_power_w=100.0)]
    whole = [Sample(t=float(t), name="gpu_power_w", value=800.0, source="nvml") for t in range(11)]
    assert list(drawn([*many, *whole], "gpu_power_w")) == ["all"]
    assert list(drawn(TWO, "gpu_power_w")) == ["GPU 0", "GPU 1"]
    assert drawn([], "gpu_power_w") == {}


def test_every_gauge_and_counter_can_be_a_budget(tmp_path: Path) -> None:
    of = {name: metric for name, metric in names.METRICS.items() if metric.kind in ("gauge", "counter")}
    samples = [
        Sample(t=t + 0.5, name=name, value=0.5 if metric.kind == "gauge" else 3.0 * t, source="prometheus")
        for name, metric in of.items()
        for t in range(10)
    ]
    summary, _ = made(tmp_path, samples)
    known = [name for name in map(names.parse, names.known()) if name.metric in of]
    assert len(known) > 60
    counters = {"": 27.0, "rate": 2.7, "last": 27.0}
    for name in known:
        expected = counters[name.statistic] if name.of.kind == "counter" else 0.5
        assert budgets.stat(name, summary).value == pytest.approx(expected), name


def test_limits_of_power_heat_and_energy_have_their_units(tmp_path: Path) -> None:
    budget = {"gpu_power_w_max": "0.4kW", "gpu_temperature_c_max": "70C", "finished_total": ">= 1000000"}
    hottest = Sample(t=1.0, name="gpu_temperature_c", value=71.0, source="nvml")
    summary, _ = made(tmp_path, [*TWO, hottest], scenario={"budget": budget})
    texts = [row["text"] for row in summary["budgets"]]
    assert texts[0] == "gpu_power_w_max 500 W, limit <= 400 W (n 11)"
    assert texts[1] == "gpu_temperature_c_max 71 C, limit <= 70 C (n 1)"
    assert "(limit >= 1,000,000)" in texts[2]
    with pytest.raises(ValueError, match="gpu_power_w is a power in one of W, kW"):
        names.limit(300, names.parse("gpu_power_w"))


def test_what_broke_in_the_server_is_a_note_and_the_next_step(tmp_path: Path) -> None:
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB " + "and more words " * 20
    events = [
        Event(t=3.0, kind="server_log", data={"rule": "out_of_memory", "level": "harm", "line": line}),
        Event(t=4.0, kind="server_log", data={"rule": "out_of_memory", "more": 5}),
        Event(t=3.5, kind="server_log", data={"rule": "preemption", "level": "warning", "line": "x"}),
        Event(t=5.0, kind="allocator", data={"what": "num_ooms", "more": 1, "total": 1}),
    ]
    summary, _ = made(tmp_path, [], events)
    noted = [text for text in summary["warnings"] if "out_of_memory" in text]
    assert noted[0].startswith("the server's log tells of out_of_memory 6 times, first at 3 s: \"torch.OutOfMemoryError: CUDA")
    assert noted[0].endswith('..."')
    assert line.startswith(noted[0].split(': "', 1)[1].removesuffix('..."'))
    assert "PyTorch's allocator ran out of memory once, at 5 s" in summary["warnings"]
    assert sum(text.startswith("find out what broke in the server: ") for text in summary["next"]) == 2
    assert not any("preemption" in text for text in summary["warnings"])


def test_the_servers_own_latencies_stand_beside_ours(tmp_path: Path) -> None:
    row = {"n": 100, "mean": 0.09, "reason": None, "p50": {"low": 0.08, "high": 0.1}, "p99": {"low": 0.16, "high": None}}
    totals = {
        "source": "prometheus",
        "state": "totals",
        "start": -1.0,
        "end": 11.0,
        "complete": True,
        "metrics": {
            "server_ttft": row,
            "server_queue": row,
            "finished_total": {"value": 100, "n": 100, "resets": 0, "gone": 0, "reason": None},
        },
    }
    _, html = made(
        tmp_path, [], [Event(t=11.0, kind="collector", data=totals)], manifest={"collectors": [{"source": "prometheus"}]}
    )
    part = html.split("as the server measured it")[1]
    assert "<td>server_ttft</td><td>100</td><td>90 ms</td><td>80 ms to 100 ms</td><td>above 160 ms</td><td>100 ms</td>" in part
    assert "<td>server_queue</td>" in part


def test_preemptions_are_one_note_that_says_of_what_time(tmp_path: Path) -> None:
    counts = {"preemptions_total": 10.0, "hit_tokens_total": 50.0, "query_tokens_total": 100.0}
    metrics = {name: {"value": value, "n": 100, "resets": 0, "gone": 0, "reason": None} for name, value in counts.items()}
    totals = {"source": "prometheus", "state": "totals", "start": -1.0, "end": 11.0, "complete": True, "metrics": metrics}
    samples = [Sample(t=float(t), name="preemptions_total", value=min(4.0, t), source="prometheus") for t in range(10)]
    event = Event(t=11.0, kind="collector", data=totals)
    summary, _ = made(
        tmp_path, samples, [event], manifest={"collectors": [{"source": "prometheus"}]}, scenario={"target": {"kind": "http"}}
    )
    (told,) = [text for text in summary["warnings"] if "preempt" in text]
    assert told.startswith("the server preempted 10 times over the run, 4 of them in steady: its hit rate of 50 % may count")


def test_numbers_for_people(tmp_path: Path) -> None:
    assert (shortened("a longer text of words", 14), shortened("short", 14)) == ("a longer...", "short")
    assert shortened("x" * 30, 10) == "xxxxxxx..."
    assert (times(1), times(1200)) == ("once", "1,200 times")
    assert (amount(8.20709, "count"), amount(1580.0, "count"), amount(1234.56, "count")) == ("8.21", "1,580", "1,235")
    gap = {"source": "nvml", "state": "gap", "start": 1.0, "end": 2.0, "periods": 3.0004}
    summary, _ = made(tmp_path, [], [Event(t=1.0, kind="collector", data=gap)], manifest={"collectors": [{"source": "nvml"}]})
    row = next(row for row in summary["verdict"]["checks"] if row["check"] == "collector_gap")
    assert row["text"].startswith("longest gap of a collector, in periods: 3, just above 3; nvml")


def test_the_charts_axis_begins_at_zero_where_the_first_reading_came_a_moment_later() -> None:
    assert ">0 s</text>" in chart.lines("x", "", {"a": [(0.00576, 1.0), (12.1, 1.0)]})
