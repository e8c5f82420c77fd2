"""The kernels by the name that a scenario gives the policy."""

from kvbench.plan.replay.adaptive import lecar, lirs
from kvbench.plan.replay.compiled import Kernel
from kvbench.plan.replay.frequency import gdsf, lfu
from kvbench.plan.replay.ghosts import arc, s3fifo, two_queue
from kvbench.plan.replay.offline import belady
from kvbench.plan.replay.order import clock, fifo, lru, sieve

KERNELS: dict[str, Kernel] = {
    "fifo": fifo,
    "lru": lru,
    "lfu": lfu,
    "clock": clock,
    "sieve": sieve,
    "arc": arc,
    "2q": two_queue,
    "lirs": lirs,
    "s3fifo": s3fifo,
    "gdsf": gdsf,
    "lecar": lecar,
    "belady": belady,
}
