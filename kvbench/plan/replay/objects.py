"""A policy of the engine replayed over the references of a trace: blocks come and go one by one, and none is held."""

from itertools import pairwise

from kvbench.engine import BlockInfo, Key, Policy
from kvbench.plan.replay.compiled import Flags
from kvbench.plan.replay.references import References


def _unpinned(key: Key) -> bool:
    """No block is in use between two references."""
    return False


def replay(policy: Policy, refs: References, capacity: int, hits: Flags) -> None:
    """Sets hits (n,) as a kernel does, through a policy object: about a hundred times slower than one."""
    resident: set[int] = set()
    keys, tokens, starts = refs.keys.tolist(), refs.tokens.tolist(), refs.starts.tolist()
    for begin, end in pairwise(starts):
        parent = -1
        for i in range(begin, end):
            key = keys[i]
            if key in resident:
                hits[i] = True
                policy.hit(key)
            else:
                policy.miss(key)
                if len(resident) == capacity:
                    resident.remove(policy.evict(_unpinned, key))
                policy.insert(key, BlockInfo(parent, i - begin, tokens[i]))
                resident.add(key)
            policy.free(key)
            parent = key
