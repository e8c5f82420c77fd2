"""The GPUs of this machine through nvidia-ml-py: which of them are meant, what each can tell, and what it told last.

Selection follows the CUDA environment, since NVML itself ignores it: a server that sees GPUs 2 and 3 is judged by those. NVML
orders by PCI bus; results name GPUs by UUID.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvbench.collect import CollectorError
from kvbench.collect.gpuread import GPM_EVERY, GROUPS, Gpm, Group
from kvbench.core import Seconds

INTEGRATED: Final = re.compile(r"GB10|Orin|Thor|Jetson|Tegra|Xavier|DGX Spark", re.IGNORECASE)  # share the system's memory
SLOWLY: Final = 5  # a transient error in a row of so many readings is for good


@dataclass
class Gpu:
    """One device, or one MIG instance. off: group -> why it is never read again. lost: why none is, "" while it lives. seen: when
    it last told anything."""

    index: int
    uuid: str
    name: str
    handle: Any
    mig: str = ""
    off: dict[str, str] = field(default_factory=dict)
    lost: str = ""
    seen: Seconds | None = None
    due: dict[str, Seconds] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)  # the latest of each name, of groups that are read
    names: dict[str, set[str]] = field(default_factory=dict)  # what each group told

    @property
    def labels(self) -> dict[str, str]:
        return {"gpu": str(self.index), "uuid": self.uuid, **({"mig": self.mig} if self.mig else {})}

    def told(self) -> dict[str, Any]:
        total = self.values.get("gpu_memory_total_bytes")
        return {**self.labels, "name": self.name, "memory_bytes": total, "unsupported": self.off, "lost": self.lost or None}


class Gpus:
    """The library, opened once. `read` is called by one thread at a time. CollectorError where there is no NVML to speak to."""

    def __init__(self, nvml: Any) -> None:
        self.m = nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise CollectorError(_why_not(nvml, error)) from None
        self.gpus: list[Gpu] = []

    def choose(self, asked: Sequence[int | str] | None, visible: str | None) -> None:
        """`asked`: NVML indices or UUIDs; None: those that CUDA_VISIBLE_DEVICES (`visible`) shows, all where it is not set."""
        every = list(self._all())
        wanted = list(asked) if asked is not None else _visible(visible)
        names = "gpus" if asked is not None else f"CUDA_VISIBLE_DEVICES={visible}"
        among = [part for gpu in every for part in self._instances(gpu)] if any(map(_mig, wanted or ())) else every
        found = every if wanted is None else [_pick(among if _mig(one) else every, one, names) for one in wanted]
        if len({gpu.uuid for gpu in found}) < len(found):
            raise CollectorError(f"{names}: a GPU is named twice")
        for gpu in found:
            self.gpus += [gpu] if gpu.mig else self._instances(gpu)

    def _all(self) -> Iterator[Gpu]:
        m = self.m
        for index in range(m.nvmlDeviceGetCount()):
            handle = m.nvmlDeviceGetHandleByIndex(index)
            yield Gpu(index, m.nvmlDeviceGetUUID(handle), m.nvmlDeviceGetName(handle), handle)

    def _instances(self, gpu: Gpu) -> list[Gpu]:
        """The GPU, and after it its MIG instances, whose memory is read apart; what only the whole can tell stays the whole's."""
        gpu.groups = dict(GROUPS) | {"gpm": Group(Gpm(), GPM_EVERY)}
        m, found = self.m, [gpu]
        try:
            if not m.nvmlDeviceGetMigMode(gpu.handle)[0]:
                return found
            count = m.nvmlDeviceGetMaxMigDeviceCount(gpu.handle)
        except m.NVMLError:
            return found  # most devices know no MIG
        for place in range(count):
            try:
                handle = m.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, place)
                uuid, name = m.nvmlDeviceGetUUID(handle), m.nvmlDeviceGetName(handle)
            except m.NVMLError:
                continue  # a place without an instance
            one = Gpu(gpu.index, uuid, name, handle, mig=str(place))
            one.groups = {"memory": GROUPS["memory"]}
            found.append(one)
        return found

    def read(self, gpu: Gpu, now: Seconds) -> Iterator[tuple[str, str, float]]:
        """(group, name, value) of every group that is due. What fails for good is taken out, and `off` says why."""
        for group, (ask, every) in list(gpu.groups.items()):
            if gpu.lost or now < gpu.due.get(group, -1.0):
                continue
            gpu.due[group] = now + every
            try:
                for name, value in ask(self.m, gpu.handle):
                    gpu.values[name], gpu.seen = value, now
                    gpu.names.setdefault(group, set()).add(name)
                    yield group, name, value
                gpu.failed.pop(group, None)
            except self.m.NVMLError as error:
                self._failed(gpu, group, error)
            except (AttributeError, ValueError, KeyError, TypeError) as error:  # an nvidia-ml-py that has no such call
                self._give_up(gpu, group, f"{type(error).__name__}: {error}")

    def _failed(self, gpu: Gpu, group: str, error: Any) -> None:
        m = self.m
        if error.value in (m.NVML_ERROR_GPU_IS_LOST, m.NVML_ERROR_RESET_REQUIRED):
            gpu.lost = str(error)
            return
        gpu.failed[group] = gpu.failed.get(group, 0) + 1
        transient = error.value in (m.NVML_ERROR_UNKNOWN, m.NVML_ERROR_TIMEOUT, m.NVML_ERROR_IN_USE, m.NVML_ERROR_MEMORY)
        if not transient or gpu.failed[group] >= SLOWLY:
            self._give_up(gpu, group, str(error))

    def _give_up(self, gpu: Gpu, group: str, why: str) -> None:
        gpu.off[group] = why
        del gpu.groups[group]
        for name in gpu.names.pop(group, ()):
            gpu.values.pop(name, None)  # what nobody reads any more is not what it is now

    def integrated(self, gpu: Gpu) -> bool:
        """A device without memory of its own: then the system's memory is what can run out."""
        return "memory" in gpu.off and "Not Supported" in gpu.off["memory"] and INTEGRATED.search(gpu.name) is not None

    def facts(self) -> dict[str, Any]:
        try:
            driver = self.m.nvmlSystemGetDriverVersion()
        except self.m.NVMLError as error:
            driver = f"not told: {error}"
        return {"driver": driver, "gpus": [gpu.told() for gpu in self.gpus]}

    def close(self) -> None:
        for gpu in self.gpus:
            gpm = gpu.groups.get("gpm")
            if gpm is not None and isinstance(gpm.read, Gpm):
                gpm.read.close(self.m)
        try:
            self.m.nvmlShutdown()
        except self.m.NVMLError:
            pass  # a driver that went away has nothing to close


JOINS: Mapping[str, Callable[[list[float]], float]] = {
    "gpu_memory": max,
    "gpu_utilization": lambda values: sum(values) / len(values),
    "gpu_power_w": sum,
    "gpu_energy_j_total": sum,
    "gpu_temperature_c": max,
    "gpu_sm_clock_hz": lambda values: sum(values) / len(values),
}
"""How the values of several GPUs make the one of the target."""


def joined(gpus: Sequence[Gpu]) -> Iterator[tuple[str, float]]:
    """Of whole GPUs, of MIG instances where no whole one is meant; where all of them tell. Of one that was lost, sums keep the
    last value, so that a counter does not fall."""
    whole = [gpu for gpu in gpus if not gpu.mig] or list(gpus)
    for name, join in JOINS.items():
        counted = whole if name in ("gpu_energy_j_total",) else [gpu for gpu in whole if not gpu.lost]
        values = [gpu.values[name] for gpu in counted if name in gpu.values]
        if values and len(values) == len(counted):
            yield name, join(values)


def _visible(text: str | None) -> list[int | str] | None:
    """CUDA_VISIBLE_DEVICES as a list; None: it is not set, and all are meant."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words in (["NoDevFiles"], ["none"], ["void"]):
        return []
    found: list[int | str] = []
    for word in words:
        if word.startswith("-"):
            break  # CUDA sees what stands before the first that is none
        found.append(int(word) if word.isdecimal() else word)
    return found


def _mig(wanted: int | str) -> bool:
    """CUDA names an instance by its own UUID."""
    return isinstance(wanted, str) and wanted.upper().startswith("MIG-")


def _pick(every: Sequence[Gpu], wanted: int | str, names: str) -> Gpu:
    if isinstance(wanted, int):
        found = [gpu for gpu in every if gpu.index == wanted]
    else:
        found = [gpu for gpu in every if gpu.uuid.lower().startswith(wanted.lower())]
    if len(found) != 1:
        has = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in every) or "none"
        raise CollectorError(f"{names}: {wanted!r} is {'no' if not found else 'more than one'} GPU of this machine; it has {has}")
    return found[0]


def _why_not(nvml: Any, error: Any) -> str:
    advice = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "there is no libnvidia-ml.so.1: no NVIDIA driver here, or a container without --gpus",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
        nvml.NVML_ERROR_NO_PERMISSION: "this user may not talk to the driver: look at the permissions of /dev/nvidia*",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "library and kernel driver differ in version: reboot, or restart the container",
    }
    return advice.get(error.value, f"NVML answers {error}: nvidia-smi says more")
