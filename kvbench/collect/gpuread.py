"""What one GPU says, group by group, through nvidia-ml-py, in base units. A group that fails raises NVML's own error.

Units and meanings are those of NVIDIA's nvml.h; each function yields (name, value). `m` is the module pynvml, `h` a device.
"""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from kvbench.clock import stopwatch
from kvbench.core import Nanos, Seconds

Reading = tuple[str, float]
MIB: Final = 1 << 20
ALL_LINKS: Final = 0xFFFFFFFF  # a scope of NVLink fields
THROTTLES: Final = {  # bits of clocks event reasons; the names of the header's constants differ by version, the numbers do not
    0x4: "power_cap", 0x8: "hw_slowdown", 0x20: "sw_thermal", 0x40: "hw_thermal", 0x80: "power_brake",
}  # fmt: skip
GPM: Final = {  # metric id -> (name, factor): Hopper and newer
    2: ("gpu_sm_active", 0.01), 3: ("gpu_sm_occupancy", 0.01), 5: ("gpu_tensor_active", 0.01), 10: ("gpu_dram_active", 0.01),
    60: ("gpu_nvlink_received_per_s", MIB), 61: ("gpu_nvlink_sent_per_s", MIB),
}  # fmt: skip


def memory(m: Any, h: Any) -> Iterator[Reading]:
    """The share is (total - free) / total: right whether or not `used` holds the reserved part, of which nvml.h says both."""
    try:
        found = m.nvmlDeviceGetMemoryInfo(h, version=m.nvmlMemory_v2)
        yield "gpu_memory_reserved_bytes", found.reserved
    except (m.NVMLError_FunctionNotFound, m.NVMLError_ArgumentVersionMismatch):  # drivers before 510
        found = m.nvmlDeviceGetMemoryInfo(h)
    yield "gpu_memory_total_bytes", found.total
    yield "gpu_memory_used_bytes", found.used
    yield "gpu_memory_free_bytes", found.free
    if found.total:
        yield "gpu_memory", (found.total - found.free) / found.total


def utilization(m: Any, h: Any) -> Iterator[Reading]:
    """Shares of the driver's last sample period (1/6 s to 1 s) in which a kernel ran, or memory was read or written."""
    found = m.nvmlDeviceGetUtilizationRates(h)
    yield "gpu_utilization", found.gpu / 100
    yield "gpu_memory_utilization", found.memory / 100


def power(m: Any, h: Any) -> Iterator[Reading]:
    """Averaged over 1 s on Ampere (but GA100) and newer, instantaneous before."""
    yield "gpu_power_w", m.nvmlDeviceGetPowerUsage(h) / 1000


def power_scopes(m: Any, h: Any) -> Iterator[Reading]:
    """The explicit ones: of the GPU, else of the module (Grace Hopper: CPU and GPU)."""
    kinds = {"instant": m.NVML_FI_DEV_POWER_INSTANT, "average": m.NVML_FI_DEV_POWER_AVERAGE}
    asked = [(field, scope) for field in kinds.values() for scope in (0, 1)]
    found = dict(zip(asked, _fields(m, h, asked), strict=True))
    some = False
    for kind, field in kinds.items():
        for scope, of in ((0, ""), (1, "module_")):
            if (value := found[(field, scope)]) is not None:
                yield f"gpu_{of}power_{kind}_w", value / 1000
                some = True
                break
    if not some:
        raise m.NVMLError(m.NVML_ERROR_NOT_SUPPORTED)


def energy(m: Any, h: Any) -> Iterator[Reading]:
    """Since the driver was loaded; Volta and newer. Steps about every 100 ms."""
    yield "gpu_energy_j_total", m.nvmlDeviceGetTotalEnergyConsumption(h) / 1000


def temperature(m: Any, h: Any) -> Iterator[Reading]:
    try:
        yield "gpu_temperature_c", m.nvmlDeviceGetTemperatureV(h, m.NVML_TEMPERATURE_GPU)
    except (m.NVMLError_FunctionNotFound, m.NVMLError_ArgumentVersionMismatch, AttributeError):  # drivers before 570
        yield "gpu_temperature_c", m.nvmlDeviceGetTemperature(h, m.NVML_TEMPERATURE_GPU)


def memory_temperature(m: Any, h: Any) -> Iterator[Reading]:
    (value,) = _fields(m, h, [(m.NVML_FI_DEV_MEMORY_TEMP, 0)])
    if value is None:
        raise m.NVMLError(m.NVML_ERROR_NOT_SUPPORTED)
    yield "gpu_memory_temperature_c", value


def clocks(m: Any, h: Any) -> Iterator[Reading]:
    yield "gpu_sm_clock_hz", m.nvmlDeviceGetClockInfo(h, m.NVML_CLOCK_SM) * 1e6
    yield "gpu_memory_clock_hz", m.nvmlDeviceGetClockInfo(h, m.NVML_CLOCK_MEM) * 1e6


def throttles(m: Any, h: Any) -> Iterator[Reading]:
    """1 where something that THROTTLES names holds the clocks down, and all bits as the driver has them."""
    try:
        bits = m.nvmlDeviceGetCurrentClocksEventReasons(h)
    except m.NVMLError_FunctionNotFound:  # drivers before 535
        bits = m.nvmlDeviceGetCurrentClocksThrottleReasons(h)
    yield "gpu_throttle_bits", bits
    yield "gpu_throttled", float(any(bits & bit for bit in THROTTLES))


def nvlink(m: Any, h: Any) -> Iterator[Reading]:
    """Bytes over all links since the driver was loaded."""
    asked = [(m.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS), (m.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS)]
    sent, received = _fields(m, h, asked)
    if sent is None or received is None:
        raise m.NVMLError(m.NVML_ERROR_NOT_SUPPORTED)
    yield "gpu_nvlink_sent_bytes_total", sent * 1024
    yield "gpu_nvlink_received_bytes_total", received * 1024


def pcie(m: Any, h: Any) -> Iterator[Reading]:
    """Over the 20 ms that each of the two calls takes: read rarely."""
    yield "gpu_pcie_sent_per_s", m.nvmlDeviceGetPcieThroughput(h, m.NVML_PCIE_UTIL_TX_BYTES) * 1000
    yield "gpu_pcie_received_per_s", m.nvmlDeviceGetPcieThroughput(h, m.NVML_PCIE_UTIL_RX_BYTES) * 1000


def ecc(m: Any, h: Any) -> Iterator[Reading]:
    for name, kind in (("corrected", m.NVML_MEMORY_ERROR_TYPE_CORRECTED), ("uncorrected", m.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)):
        yield f"gpu_ecc_{name}_total", m.nvmlDeviceGetTotalEccErrors(h, kind, m.NVML_VOLATILE_ECC)


def remapped(m: Any, h: Any) -> Iterator[Reading]:
    """Rows of memory that were replaced; pending: the next reset will, and until then memory is at risk."""
    corrected, uncorrected, pending, failed = m.nvmlDeviceGetRemappedRows(h)
    yield "gpu_remapped_rows_total", corrected + uncorrected
    yield "gpu_remap_pending", float(bool(pending))
    yield "gpu_remap_failed", float(bool(failed))


def processes(m: Any, h: Any) -> Iterator[Reading]:
    """Milliseconds a call on some drivers: read rarely."""
    found = m.nvmlDeviceGetComputeRunningProcesses(h)
    yield "gpu_processes", len(found)
    known = [each.usedGpuMemory for each in found if each.usedGpuMemory is not None]
    if known:
        yield "gpu_process_memory_bytes", sum(known)


class Gpm:
    """Occupancy, tensor and memory activity since the reading before, which has to be more than 100 ms ago (Hopper and newer)."""

    def __init__(self) -> None:
        self._samples: list[Any] = []
        self._at: Nanos = 0  # of the latest, by the stopwatch

    def __call__(self, m: Any, h: Any) -> Iterator[Reading]:
        if not self._samples:
            if not m.nvmlGpmQueryDeviceSupport(h).isSupportedDevice:
                raise m.NVMLError(m.NVML_ERROR_NOT_SUPPORTED)
            self._samples = [m.nvmlGpmSampleAlloc(), m.nvmlGpmSampleAlloc()]
            m.nvmlGpmSampleGet(h, self._samples[1])
            self._at = stopwatch()
            return
        if stopwatch() - self._at < GPM_LEAST:
            return  # too near to it, which NVML calls an invalid argument
        self._at = stopwatch()
        self._samples.reverse()
        before, after = self._samples
        m.nvmlGpmSampleGet(h, after)
        asked = m.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = m.NVML_GPM_METRICS_GET_VERSION, len(GPM)
        asked.sample1, asked.sample2 = before, after
        for place, metric in enumerate(GPM):
            asked.metrics[place].metricId = metric
        m.nvmlGpmMetricsGet(asked)
        for place, (name, factor) in enumerate(GPM.values()):
            one = asked.metrics[place]
            if one.nvmlReturn == m.NVML_SUCCESS and one.value == one.value:
                yield name, one.value * factor

    def close(self, m: Any) -> None:
        for sample in self._samples:
            m.nvmlGpmSampleFree(sample)
        self._samples = []


class Group(NamedTuple):
    """What is read by one call or two, and at most how often."""

    read: Callable[[Any, Any], Iterator[Reading]]
    every: Seconds = 0.0


GROUPS: dict[str, Group] = {
    "memory": Group(memory),
    "utilization": Group(utilization),
    "power": Group(power),
    "energy": Group(energy),
    "throttles": Group(throttles),
    "clocks": Group(clocks, 0.5),
    "temperature": Group(temperature, 0.5),
    "power_scopes": Group(power_scopes, 0.5),
    "memory_temperature": Group(memory_temperature, 1.0),
    "nvlink": Group(nvlink, 1.0),
    "pcie": Group(pcie, 10.0),
    "processes": Group(processes, 10.0),
    "ecc": Group(ecc, 10.0),
    "remapped_rows": Group(remapped, 60.0),
}
GPM_EVERY: Final[Seconds] = 1.0
GPM_LEAST: Final[Nanos] = 101_000_000


def _fields(m: Any, h: Any, asked: list[tuple[int, int]]) -> list[float | None]:
    """Field values; the call succeeds when any of them does, so each has a code of its own, and says which member it fills."""
    members = {
        m.NVML_VALUE_TYPE_DOUBLE: "dVal", m.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal", m.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
        m.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal", m.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
        m.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    }  # fmt: skip
    found = m.nvmlDeviceGetFieldValues(h, asked)
    return [
        None if ctypes.c_int(one.nvmlReturn).value != m.NVML_SUCCESS else float(getattr(one.value, members[one.valueType]))
        for one in found
    ]
