"""Exports made by hand: the columns that matter of the schema of 2022.4 (3.0.0), filled by a test. No capture, no NVIDIA code.

Run as a program it writes tests/data/nsys/tiny.sqlite; what is in it is worked out in tests/nsys/test_profile.py.
"""

import sqlite3
import sys
from collections.abc import Iterable
from pathlib import Path

PROCESS, THREAD = 0x1_0000_2A00_0000, 0x1_0000_2A00_002B  # pid 42 and its thread 43, packed as exports pack them
SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
CREATE TABLE EXPORT_META_DATA (name TEXT, value TEXT);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT, memoryBandwidth INTEGER, cuDevice INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER,
    textId INTEGER, domainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER,
    globalPid INTEGER, demangledName INTEGER, shortName INTEGER, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER,
    globalPid INTEGER, bytes INTEGER, copyKind INTEGER, graphNodeId INTEGER);
CREATE TABLE TARGET_INFO_GPU_METRICS (typeId INTEGER, metricId INTEGER, metricName TEXT);
CREATE TABLE GPU_METRICS (timestamp INTEGER, typeId INTEGER, metricId INTEGER, value INTEGER);
"""
UTC = 1_800_000_000_000_000_000
MICRO = 1_000  # ns


class Made:
    """An export under construction. Times are ns."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.path, self.db, self.calls = path, sqlite3.connect(path), 0
        self.db.execute("PRAGMA synchronous = OFF")
        self.db.executescript(SCHEMA)
        self.insert("EXPORT_META_DATA", name="EXPORT_PRODUCT_VERSION", value="made by hand")
        self.insert("EXPORT_META_DATA", name="EXPORT_SCHEMA_VERSION", value="3.0.0")

    def done(self) -> Path:
        self.db.commit()
        self.db.close()
        return self.path

    def insert(self, table: str, **row: object) -> None:
        names = ", ".join(f'"{name}"' for name in row)
        self.db.execute(f"INSERT INTO {table} ({names}) VALUES ({', '.join('?' * len(row))})", [*row.values()])

    def string(self, text: str) -> int:
        self.db.execute(
            "INSERT INTO StringIds (value) SELECT ? WHERE NOT EXISTS (SELECT 1 FROM StringIds WHERE value = ?)", (text, text)
        )
        return int(self.db.execute("SELECT id FROM StringIds WHERE value = ?", (text,)).fetchone()[0])

    def range(self, text: str | None, start: int | None, end: int | None, thread: int | None = THREAD, **more: object) -> None:
        self.insert(
            "NVTX_EVENTS",
            **{"start": start, "end": end, "eventType": 59, "text": text, "globalTid": thread, "domainId": 0, **more},
        )

    def ranges(self, spans: Iterable[tuple[str, int, int]]) -> "Made":
        for text, start, end in spans:
            self.range(text, start, end)
        return self

    def kernel(
        self, name: str, call: int, start: int, end: int, thread: int = THREAD, stream: int = 7, device: int = 0, **more: object
    ) -> None:
        """A kernel whose launch began at `call` and took 2 us."""
        launched = self.launch(call, thread)
        number = self.string(name)
        names = {"demangledName": number, "shortName": number}
        where = {"deviceId": device, "streamId": stream}
        self.insert("CUPTI_ACTIVITY_KIND_KERNEL", **{"start": start, "end": end, **where, **launched, **names, **more})

    def launch(self, call: int, thread: int = THREAD, name: str = "cudaLaunchKernel_v7000") -> dict[str, int]:
        self.calls += 1
        self.insert(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=call, end=call + 2 * MICRO, globalTid=thread, correlationId=self.calls, nameId=self.string(name),
        )  # fmt: skip
        return {"correlationId": self.calls, "globalPid": thread & ~0xFFFFFF}


def module(name: str, **tensors: list[list[int]]) -> str:
    """A range's text as servers write it."""
    return str({"Module": name, "TrainableParams": {"weight": [64]}, **tensors})


def tiny(path: Path) -> Path:
    """Three layers, two passes each, of 100 us on the CPU; layer 2 takes three times as long on the GPU as the others."""
    made = Made(path)
    made.insert("TARGET_INFO_SESSION_START_TIME", utcEpochNs=UTC)
    made.insert("TARGET_INFO_GPU", id=0, cuDevice=0, name="MADE UP GPU", memoryBandwidth=1_000_000_000_000)
    gpu = 0
    for step in range(2):
        for layer in range(3):
            at = (step * 400 + layer * 110) * MICRO
            made.range(module(f"model.layers.{layer}", Inputs=[[4, 64], [4, 64]]), at, at + 100 * MICRO)
            made.range(module(f"model.layers.{layer}.self_attn", Inputs=[[4, 64]]), at + MICRO, at + 50 * MICRO)
            made.range(module(f"model.layers.{layer}", Outputs=[[4, 64], [4, 64]]), at + 100 * MICRO, at + 101 * MICRO)
            for part, (name, length) in enumerate([("attention", 10), ("gemm", 30)]):
                gpu = max(gpu, at + (20 + 30 * part) * MICRO)
                length *= (3 if layer == 2 else 1) * MICRO
                made.kernel(name, at + (10 + 30 * part) * MICRO, gpu, gpu + length)
                gpu += length
        copied = made.launch(step * 400 * MICRO + 340 * MICRO)
        gpu = max(gpu, step * 400 * MICRO + 345 * MICRO)
        where = {"deviceId": 0, "streamId": 8, "bytes": 500_000, "copyKind": 2}
        made.insert("CUPTI_ACTIVITY_KIND_MEMCPY", start=gpu, end=gpu + 5 * MICRO, **where, **copied)
        gpu += 5 * MICRO
    for metric, (name, value) in enumerate(
        [("DRAM Read Bandwidth [Throughput %]", 40), ("DRAM Write Bandwidth [Throughput %]", 10)]
    ):
        made.insert("TARGET_INFO_GPU_METRICS", typeId=1 << 40, metricId=metric, metricName=name)
        for tick in range(80):
            made.insert("GPU_METRICS", timestamp=tick * 10 * MICRO, typeId=1 << 40, metricId=metric, value=value)
    return made.done()


if __name__ == "__main__":
    print(tiny(Path(sys.argv[1])))
