"""The collectors by the name that a scenario gives them."""

from typing import Any

from kvbench.collect.agent import Agent
from kvbench.collect.allocator import Allocator
from kvbench.collect.host import Host
from kvbench.collect.kvevents import KvEvents
from kvbench.collect.nsight import Nsight
from kvbench.collect.nvml import Nvml
from kvbench.collect.prometheus import Prometheus
from kvbench.collect.serverlog import ServerLog

COLLECTORS: dict[str, type[Any]] = {
    "agent": Agent,
    "allocator": Allocator,
    "host": Host,
    "kv_events": KvEvents,
    "nsight": Nsight,
    "nvml": Nvml,
    "prometheus": Prometheus,
    "server_log": ServerLog,
}
