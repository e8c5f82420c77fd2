"""How many streamed answers a second the HTTP target alone reads: 64 user coroutines against the instant stub.

usage: python tests/target/throughput.py REQUESTS USERS TOKENS PORT
Compare only with other clients run in turn on the same machine (wrk, a bare asyncio.Protocol): the ratio counts, not the figure.
"""

import asyncio
import gc
import sys
import time

import uvloop

from kvbench.clock import Clock
from kvbench.core import Message, Record, Request
from kvbench.target.http import HttpTarget


async def main(count: int, users: int, tokens: int, port: int) -> None:
    clock = Clock(asyncio.get_running_loop())

    def render(request: Request) -> dict[str, object]:
        return {"messages": [{"role": "user", "content": f"{request.id} {request.messages[0].text}"}]}

    target = HttpTarget(clock, urls=[f"http://127.0.0.1:{port}"], render=render, model="m")
    prompt = (Message(text="hello world, please tell me a story about it"),)
    records: list[Record] = []
    numbers = iter(range(count))

    async def user() -> None:
        for number in numbers:
            request = Request(id=number, messages=prompt, tokens=10, max_tokens=tokens)
            request.body = target.encode(request)
            record = Record(id=number)
            records.append(record)
            await target.send(request, record)

    gc.freeze()
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(user() for _ in range(users)))
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    events = sum(len(record.token_ns) for record in records)
    bad = sum(record.outcome != "ok" or record.n_out != tokens for record in records)
    print(f"{count / took:.0f} req/s {events / took:.0f} ev/s {cpu / events * 1e6:.2f} us/event; bad {bad}; {target.counts}")
    await target.aclose()


uvloop.run(main(*map(int, sys.argv[1:5])))
