"""A load of the size and shape of the Mooncake conversation trace through scheduler, pool and cost."""

import random
import time

import pytest

from kvbench.engine import Job
from kvbench.engine.engine import Engine
from kvbench.profile import load_engine, load_hardware, load_model

REQUESTS = 12_031


def jobs(seed: int) -> list[tuple[float, Job]]:
    """12,000 prompt tokens in 512-token blocks, a third of them shared, and 343 answer tokens on average, within an hour."""
    rng = random.Random(seed)
    made = []
    for number in range(REQUESTS):
        tokens, shared = round(rng.expovariate(1 / 12_000)) + 1, rng.randrange(200)
        hashes = [(shared if at < tokens / 1536 else 1000 + number) * 1000 + at for at in range(-(-tokens // 512))]
        segments = tuple((key, min(512, tokens - 512 * at)) for at, key in enumerate(hashes))
        made.append((3600 * number / REQUESTS, Job(number, segments, min(2000, round(rng.expovariate(1 / 343)) + 1))))
    return made


@pytest.mark.slow
@pytest.mark.alone
def test_a_whole_trace_takes_at_most_a_minute_on_one_core() -> None:
    built = Engine(load_model("llama-3.1-70b"), load_hardware("8xh100"), load_engine("mooncake"))
    load = jobs(0)
    done, tokens = 0, 0
    start = time.process_time()
    for at, job in load:
        for span in built.advance(at):
            done, tokens = done + len(span.done), tokens + len(span.times) * len(span.tokens)
        assert built.submit(job, at) is None
    while built.wake() < float("inf"):
        for span in built.advance(built.wake()):
            done, tokens = done + len(span.done), tokens + len(span.times) * len(span.tokens)
    took = time.process_time() - start
    print(f"{sum(job.tokens for _, job in load) / 1e6:.0f} M prompt and {tokens / 1e6:.1f} M answer tokens in {took:.1f} CPU s")
    assert done == REQUESTS
    assert tokens == sum(job.max_tokens for _, job in load)
    assert took <= 60
