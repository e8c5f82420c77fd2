"""The client's own machine and process, against /proc and against what this test does to them."""

import asyncio
import gc
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.clock import Clock
from kvbench.collect import Place
from kvbench.collect.host import Host
from kvbench.core import Event, Sample


def collect(between: Callable[[], Any] = lambda: None) -> tuple[dict[str, Any], list[Sample], list[Event]]:
    """(facts, samples, events) of two readings and more, `between` called after the first."""
    told: list[Any] = []

    async def play() -> dict[str, Any]:
        clock = Clock(asyncio.get_running_loop())
        collector = Host(every=0.1).build(Place(clock, Path()))
        facts = await collector.open()
        clock.start()
        collector.start(told.append)
        await asyncio.sleep(0.05)
        between()
        await asyncio.sleep(0.2)
        await collector.stop()
        return facts

    facts = asyncio.run(play())
    return facts, [each for each in told if isinstance(each, Sample)], [each for each in told if isinstance(each, Event)]


def values(samples: list[Sample], name: str) -> list[float]:
    return [sample.value for sample in samples if sample.name == name and sample.value is not None]


def meminfo(name: str) -> int:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux tells so")
def test_the_machine_is_what_proc_says() -> None:
    facts, samples, events = collect()
    assert (facts["cores"], facts["memory_bytes"]) == (os.cpu_count(), meminfo("MemTotal"))
    total, available = meminfo("MemTotal"), meminfo("MemAvailable")
    assert values(samples, "host_memory")[-1] == pytest.approx(1 - available / total, abs=0.1)
    assert values(samples, "host_memory_available_bytes")[-1] == pytest.approx(available, abs=0.1 * total)
    assert values(samples, "host_load_1m")[-1] == pytest.approx(os.getloadavg()[0], abs=1.0)
    assert values(samples, "host_net_errors_total")
    assert all(0 <= share <= 1 for share in values(samples, "host_cpu"))
    assert {sample.source for sample in samples} == {"host"}
    assert not any(sample.labels for sample in samples)
    account = next(event.data for event in events if event.data["state"] == "stopped")
    assert account["readings"] == len(values(samples, "host_memory")) >= 2
    for name in ("host_cpu", "client_cpu"):  # the first would be of the time before the run
        assert len(values(samples, name)) == account["readings"] - 1
    assert 0 < account["cost_s"] < 0.5


def test_what_goes_over_the_network_is_counted_in_bytes() -> None:
    """A megabyte through the loopback, which is sent and received here."""

    def send() -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as out,
            server.accept()[0] as into,
        ):
            for _ in range(100):
                out.sendall(b"x" * 10_000)
                got = 0
                while got < 10_000:
                    got += len(into.recv(1 << 20))

    _, samples, _ = collect(send)
    for name in ("host_net_sent_bytes_total", "host_net_received_bytes_total"):
        counted = values(samples, name)
        assert 1_000_000 <= counted[-1] - counted[0] < 7_900_000, name  # others' traffic is in it


def test_the_clients_own_files_memory_cpu_and_garbage_collections() -> None:
    held: list[Any] = []

    def busy() -> None:
        held.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(25))
        held.append(bytearray(b"x" * 64_000_000))
        for _ in range(3):
            gc.collect()
        end = os.times().user + 0.05
        while os.times().user < end:
            pass

    try:
        _, samples, _ = collect(busy)
    finally:
        for each in held[:25]:
            os.close(each)
    opened = values(samples, "client_open_files")
    assert opened[-1] - opened[0] == 25
    memory = values(samples, "client_memory_bytes")
    assert 60e6 < memory[-1] - memory[0] < 100e6
    assert sum(values(samples, "client_gc_pauses")) >= 3
    assert 0 < max(values(samples, "client_gc_pause_max")) < 1
    assert max(values(samples, "client_cpu")) > 0.2, "a share of one core"
    assert all(isinstance(threads, int) and threads >= 1 for threads in values(samples, "client_threads"))


def test_nothing_of_it_stays_behind() -> None:
    before = list(gc.callbacks)
    collect()
    assert gc.callbacks == before
