"""Order x victim x reservation x prefill on one wave that overloads: the table of docs/engine/scheduling.md.

usage: python -m tests.bench.scheduling [PEAK]      PEAK: requests/s at the crest, 5.7 unless given. Virtual time, one core,
about a minute.
"""

import math
import random
import sys
from itertools import islice, product
from statistics import fmean, quantiles

from kvbench.engine import Job
from kvbench.engine.engine import Engine
from kvbench.engine.sequence import ORDERS, VICTIMS
from kvbench.profile import load_engine, load_hardware, load_model

SECONDS, PERIOD, FLOOR = 480, 120, 0.05  # the trough has 5 % of the crest's rate


def wave(peak: float, seed: int = 1) -> list[tuple[float, Job]]:
    """Due times and jobs. A quarter are long (prompt median 1,800 tokens, answer 500), the others chat (300, 200); lognormal."""
    draw, jobs, at = random.Random(seed), [], 0.0
    while (at := at + draw.expovariate(peak)) < SECONDS:
        if draw.random() > FLOOR + (1 - FLOOR) * (1 - math.cos(2 * math.pi * at / PERIOD)) / 2:
            continue
        long = draw.random() < 0.25
        prompt = min(6000, max(16, round(draw.lognormvariate(math.log(1800 if long else 300), 0.6))))
        answer = min(1500, max(4, round(draw.lognormvariate(math.log(500 if long else 200), 0.7))))
        number = len(jobs)
        jobs.append((at, Job(number, ((number + 1, prompt),), answer, priority=int(long), cls="long" if long else "chat")))
    return jobs


def measure(jobs: list[tuple[float, Job]], settings: dict[str, object]) -> str:
    """One row."""
    profile = load_engine("vllm", gpu_memory_utilization=0.9, **settings)
    built = Engine(load_model("llama-3.1-8b"), load_hardware("rtx-4090"), profile)
    first: dict[int, float] = {}
    end = tokens = 0.0
    running, reserved = [], []

    def take(until: float) -> None:
        nonlocal end, tokens
        for span in built.advance(until):
            for number, _ in span.tokens:
                first.setdefault(number, span.times[0] / 1e9)
            end, tokens = span.times[-1] / 1e9, tokens + sum(done.n_out for done in span.done)

    seconds = iter(range(SECONDS))
    for at, job in jobs:
        for second in islice(seconds, math.ceil(at) - len(running)):
            take(second)
            gauges = built.gauges()
            running.append(gauges["running"])
            reserved.append(gauges.get("reserved_share", 0.0))
        take(at)
        assert built.submit(job, at) is None
    while built.wake() < math.inf:
        take(built.wake())
    waits = [first[job.id] - at for at, job in jobs]
    last, cuts = built.gauges(), quantiles(waits, n=100, method="inclusive")
    twice = f"{last['preemptions']:,.0f} | {last['recompute_tokens']:,.0f}"
    return f"{twice} | {cuts[49]:.1f} | {cuts[98]:.0f} | {tokens / end:,.0f} | {fmean(running):.1f} | {fmean(reserved):.1%} |"


def main() -> None:
    jobs = wave(float(sys.argv[1]) if len(sys.argv) > 1 else 5.7)
    print(len(jobs), "requests,", sum(job.tokens for _, job in jobs), "+", sum(job.max_tokens for _, job in jobs), "tokens")
    for order, victim, share, prefill in product(ORDERS, VICTIMS, (None, 0.5, 0.9), ("chunked", "whole")):
        row = measure(jobs, {"order": order, "victim": victim, "preallocate": share, "prefill": prefill})
        print(f"| {order} | {victim} | {'on demand' if share is None else f'{share:.0%}'} | {prefill} | {row}", flush=True)


if __name__ == "__main__":
    main()
