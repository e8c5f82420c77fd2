"""The agent's page of metrics: Prometheus' text format 0.0.4, every number in base units and with its help."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

TYPE = "text/plain; version=0.0.4; charset=utf-8"

HELP: dict[str, str] = {
    "gpu_up": "1 while the GPU answers, 0 once it is lost",
    "gpu_memory": "device memory in use / device memory, from 0 to 1; of GPUs without memory of their own, the system's",
    "gpu_memory_total_bytes": "device memory",
    "gpu_memory_used_bytes": "device memory that was allocated",
    "gpu_memory_free_bytes": "device memory that is free",
    "gpu_memory_reserved_bytes": "device memory that driver and firmware hold",
    "gpu_utilization": "share of the driver's last period (1/6 s to 1 s) in which a kernel ran",
    "gpu_memory_utilization": "share of it in which device memory was read or written",
    "gpu_power_w": "watts drawn, averaged over 1 s on Ampere (but GA100) and newer",
    "gpu_power_instant_w": "watts drawn at an instant",
    "gpu_power_average_w": "watts drawn, averaged",
    "gpu_module_power_instant_w": "watts that the module (CPU and GPU) drew at an instant",
    "gpu_module_power_average_w": "watts that the module drew, averaged",
    "gpu_energy_j_total": "joules drawn since the driver was loaded; moves about every 100 ms",
    "gpu_temperature_c": "degrees Celsius of the GPU",
    "gpu_memory_temperature_c": "degrees Celsius of its memory",
    "gpu_sm_clock_hz": "clock of the multiprocessors",
    "gpu_memory_clock_hz": "clock of the memory",
    "gpu_throttled": "1 while power or heat hold the clocks down",
    "gpu_throttle_bits": "the driver's clock event reasons, as a bit mask",
    "gpu_nvlink_sent_bytes_total": "bytes sent over all NVLinks since the driver was loaded",
    "gpu_nvlink_received_bytes_total": "bytes received over all NVLinks since the driver was loaded",
    "gpu_nvlink_sent_per_s": "bytes/s sent over NVLink",
    "gpu_nvlink_received_per_s": "bytes/s received over NVLink",
    "gpu_pcie_sent_per_s": "bytes/s sent over PCIe, for 20 ms every 10 s",
    "gpu_pcie_received_per_s": "bytes/s received over PCIe, for 20 ms every 10 s",
    "gpu_processes": "processes with a compute context on the GPU",
    "gpu_process_memory_bytes": "device memory of those that tell",
    "gpu_ecc_corrected_total": "memory errors corrected since the driver was loaded",
    "gpu_ecc_uncorrected_total": "memory errors that could not be corrected, since then",
    "gpu_remapped_rows_total": "rows of memory that were replaced",
    "gpu_remap_pending": "1 where the next reset will replace rows",
    "gpu_remap_failed": "1 where rows could not be replaced",
    "gpu_sm_active": "share of time in which a multiprocessor had work (GPM)",
    "gpu_sm_occupancy": "warps that were resident / those that fit (GPM)",
    "gpu_tensor_active": "share of time in which tensor cores worked (GPM)",
    "gpu_dram_active": "share of the memory's bandwidth that was used (GPM)",
    "host_cpu": "share of all cores that was busy since the reading before",
    "host_memory": "system memory in use / system memory",
    "host_memory_available_bytes": "system memory that a process could have",
    "host_load_1m": "runnable and waiting processes, averaged over a minute",
    "host_net_sent_bytes_total": "bytes sent over all networks since the start",
    "host_net_received_bytes_total": "bytes received over all networks since the start",
    "host_net_errors_total": "packets lost or damaged on all networks since the start",
    "agent_info": "this agent: a new instance after every start",
    "agent_start_timestamp_seconds": "when it was started, by its clock",
    "agent_reading_timestamp_seconds": "when the GPUs were last read, by its clock",
    "agent_clock_behind_seconds": "how far the machine's clock was set ahead since the agent started; its own never jumps",
    "agent_sampling_seconds": "how often GPUs are read: as asked, or more rarely where the driver answers slowly",
    "agent_readings_total": "readings of all GPUs",
    "agent_gaps_total": "readings that came more than three periods late",
    "agent_nvml_cpu_seconds_total": "CPU time of the thread that reads the GPUs",
    "agent_nvml_call_seconds_total": "time that it spent in calls to the driver",
    "agent_cpu_seconds_total": "CPU time of the agent",
    "agent_memory_bytes": "its resident memory",
    "agent_ring_lines_total": "lines of /samples so far",
    "agent_ring_bytes": "size of those that are kept",
    "agent_ring_seconds": "how far back they go",
    "agent_points_total": "points given to the database",
    "agent_points_waiting": "of them, those that wait on the disk",
    "agent_points_lost_total": "of them, those that the full disk did not take",
}


class Row(NamedTuple):
    """One series: a name of HELP, its labels, its value."""

    name: str
    labels: Mapping[str, str]
    value: float


def text(rows: Iterable[Row]) -> bytes:
    """The page. What ends in _total is a counter, everything else a gauge."""
    families: dict[str, list[str]] = {}
    for name, labels, value in rows:
        shown = ",".join(f'{key}="{_escaped(word)}"' for key, word in labels.items())
        families.setdefault(name, []).append(
            f"kvbench_{name}{{{shown}}} {float(value)!r}" if shown else f"kvbench_{name} {value!r}"
        )
    lines = []
    for name, series in families.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP kvbench_{name} {HELP.get(name, name)}", f"# TYPE kvbench_{name} {kind}", *series]
    return ("\n".join(lines) + "\n").encode()


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
