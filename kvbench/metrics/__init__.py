"""Records into numbers. `request` holds the formula of each per-request number, `slots` the live history in one-second slots,
`window` reads intervals of it, `histogram` is the bucket arithmetic, `names` the table of metric names.

The run calls, each second, in this order: `slots.fold(ended)` (also whenever 256 have ended), `slots.peek(live, now_ns)`,
`slots.gauge(...)` for each reading, `slots.close(now)`, and then `window(...)` and each stop rule's `check(...)`. `live` is every
record that has not ended: in flight and, where the caller has them, waiting at the gate. The report calls
`request.columns(records)` and `histogram.order_statistic`, never the slots. Everything here is synchronous and has no clock.
"""

from typing import NamedTuple


class Stat(NamedTuple):
    """One statistic. `value` None means not measured, and `reason` says why.

    n: what it stands on (requests, tokens or readings). supported: n is enough for the quantile (n >= 10 / (1 - q)).
    lower_bound: the truth is at least `value`: too much is still in flight to say more.
    """

    value: float | None
    n: int = 0
    supported: bool = True
    lower_bound: bool = False
    reason: str = ""
