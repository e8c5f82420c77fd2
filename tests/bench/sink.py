"""Points a second: our sink beside influxdb-client's batching writer fed with `Point`, into one real influxd or VictoriaMetrics.

Both take the same readings (three tags of the run, two of the GPU, one field) and count as done when the database has them.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

from kvbench.core import Sample
from kvbench.sink import SinkPlace
from kvbench.sink.influx import Influx
from tests.sink.servers import Server, Victoria, running

FACTS = {"scenario": "wave", "model": "llama-3.1-8b", "engine": "vllm"}
WALL = time.time() - 3600
LABELS = [{"gpu": str(n), "uuid": f"GPU-{n:08d}-0000-0000-0000-000000000000"} for n in range(8)]


def readings(count: int) -> list[Sample]:
    return [Sample(t=n / 1000, name="power", value=300 + n % 97 / 7, source="nvml", labels=LABELS[n % 8]) for n in range(count)]


def ours(server: Server, given: list[Sample], name: str) -> float:
    """Points/s through the sink: from the first `write` until all is acknowledged."""
    with tempfile.TemporaryDirectory() as folder:
        sink = Influx(url=server.url, drain=120.0).build(SinkPlace(Path(folder), name, WALL, FACTS))
        begin = time.perf_counter()
        for sample in given:
            sink.write(sample)
        asyncio.run(sink.aclose())
        spent = time.perf_counter() - begin
        assert sink.told()["delivered"] == len(given), sink.told()
    return len(given) / spent


def theirs(server: Server, given: list[Sample], name: str) -> float:
    """Points/s through WriteApi with batches of 5,000 and `Point`s, the way its documentation shows for many points."""
    from influxdb_client import InfluxDBClient, Point, WriteOptions, WritePrecision

    zero = round(WALL * 1e9)
    begin = time.perf_counter()
    with (
        InfluxDBClient(server.url, token="x", org="x") as client,
        client.write_api(write_options=WriteOptions(batch_size=5000, flush_interval=1000)) as writer,
    ):
        for sample in given:
            point = Point("kvbench_gpu").tag("run", name).tag("source", sample.source)
            for key, value in (*FACTS.items(), *sample.labels.items()):
                point = point.tag(key, value)
            point = point.field(sample.name, sample.value).time(zero + round(sample.t * 1e9), WritePrecision.NS)
            writer.write(bucket="kvbench", record=point)
    return len(given) / (time.perf_counter() - begin)


def race(server: Server, rounds: int, count: int) -> dict[str, list[float]]:
    """Points/s of each, in alternating rounds; theirs with a quarter of the points, since it takes so long."""
    found: dict[str, list[float]] = {"kvbench sink": [], "batching writer with Point": []}
    for n in range(rounds):
        found["kvbench sink"].append(ours(server, readings(count), f"a{n}"))
        found["batching writer with Point"].append(theirs(server, readings(count // 4), f"b{n}"))
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, running(Victoria(Path(folder))) as database:
        for name, rates in race(database, 3, int(sys.argv[1]) if len(sys.argv) > 1 else 200_000).items():
            print(f"{name:<28} {statistics.median(rates):>10,.0f} points/s")
