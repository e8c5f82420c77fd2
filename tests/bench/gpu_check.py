"""make gpu-check: the embedded engine's step cost against the same arithmetic run on this machine's GPU.

One table and results/gpu-check.json: what the driver says the board is, what it reads and multiplies per second beside its
profile, and steps of Llama-3.1-8B's shape (random weights, PyTorch, one CUDA graph a step) beside the roofline's figure for
the same step; and what NVML is like on it (gpu_driver.py), which needs no PyTorch. The engine's own overhead per step is left
out on both sides. Needs an NVIDIA GPU, of 24 GB or more for the steps; takes under 5 minutes.
"""

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from kvbench.collect import CollectorError  # noqa: E402 - after the path that makes it importable
from kvbench.engine import Step  # noqa: E402
from kvbench.engine.cost import Roofline  # noqa: E402
from kvbench.profile import load_engine, load_hardware, load_model, names  # noqa: E402
from tests.bench import gpu_driver  # noqa: E402

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCABULARY = 32, 4096, 32, 8, 128, 14336, 128256
DECODES = [(1, 1024), (16, 1024), (64, 1024), (128, 1024), (64, 4096)]  # (sequences, context of each)
PREFILLS = [512, 2048, 8192]  # tokens of one prompt
REPEATS = 20


def board() -> dict[str, Any]:
    """What the driver says."""
    query = "name,memory.total,driver_version,power.limit,clocks.max.sm"
    said = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True)
    fields = [field.strip() for field in said.stdout.splitlines()[0].split(",")] if said.returncode == 0 and said.stdout else []
    return dict(zip(query.split(","), fields, strict=False))


def profile_of(name: str) -> str | None:
    """The hardware profile whose name is in the board's name: "NVIDIA H200" -> h200."""
    plain = name.lower().replace(" ", "-")
    fitting = [known for known in names("hardware") if known.split("-")[0] in plain or known in plain]
    return max(fitting, key=len) if fitting else None


def timed(torch: Any, work: Callable[[], Any]) -> float:
    """Median seconds of a captured graph of `work`."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


class Shape:
    """Llama-3.1-8B's matrix products and attention on random numbers; `step` is one forward pass."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        make: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        widths = [(HIDDEN, (HEADS + 2 * KV_HEADS) * DIM), (HEADS * DIM, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN)]
        self.layers = [[torch.randn(a, b, **make) * 0.01 for a, b in widths] for _ in range(LAYERS)]
        self.head = torch.randn(HIDDEN, VOCABULARY, **make) * 0.01
        self.make = make

    def step(self, x: Any, samples: int, attend: Callable[[int, Any, Any, Any], Any]) -> Any:
        """x: [tokens, HIDDEN]; attend(layer, q, k, v) -> [tokens, HEADS * DIM]."""
        functional = self.torch.nn.functional
        for number, (qkv, out, up, down) in enumerate(self.layers):
            y = functional.rms_norm(x, (HIDDEN,)) @ qkv
            q, k, v = y.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)
            x = x + attend(number, q, k, v) @ out
            gate, value = (functional.rms_norm(x, (HIDDEN,)) @ up).chunk(2, dim=1)
            x = x + (functional.silu(gate) * value) @ down
        return x[-samples:] @ self.head

    def decode(self, sequences: int, context: int) -> float:
        torch = self.torch
        shape = (sequences, KV_HEADS, context, DIM)
        one_layer = 4 * sequences * KV_HEADS * context * DIM  # bytes of its keys and values
        layers = range(max(1, min(LAYERS, 4 * 10**9 // one_layer)))  # used in turn: at most 4 GB, and beyond any cache
        cache = [(torch.randn(shape, **self.make), torch.randn(shape, **self.make)) for _ in layers]
        x = torch.randn(sequences, HIDDEN, **self.make)

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            keys, values = cache[layer % len(cache)]
            grouped = q.view(sequences, KV_HEADS, HEADS // KV_HEADS, DIM)  # heads of one group as rows: each key is read once
            done = torch.nn.functional.scaled_dot_product_attention(grouped, keys, values)
            return done.reshape(sequences, HEADS * DIM)

        return timed(torch, lambda: self.step(x, sequences, attend))

    def prefill(self, tokens: int) -> float:
        torch = self.torch
        x = torch.randn(tokens, HIDDEN, **self.make)

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            q, k, v = (part.view(1, tokens, -1, DIM).transpose(1, 2) for part in (q, k, v))
            done = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return done.transpose(1, 2).reshape(tokens, HEADS * DIM)

        return timed(torch, lambda: self.step(x, 1, attend))


def speeds(torch: Any) -> dict[str, float]:
    """Bytes read per second (a sum over 8 GB) and FLOPs per second (8192^3 in bf16)."""
    read = _read_speed(torch, torch.randn(2**32, dtype=torch.bfloat16, device="cuda"))
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return {"bytes_per_second": read, "flops": 2 * 8192**3 / timed(torch, lambda: a @ b)}


def _read_speed(torch: Any, data: Any) -> float:
    return float(data.numel() * 2 / timed(torch, data.sum))


def check(torch: Any) -> dict[str, Any]:
    said = board()
    name = profile_of(said.get("name", torch.cuda.get_device_name(0)))
    if name is None:
        raise SystemExit(f"no hardware profile for {said.get('name')!r}; there are {', '.join(names('hardware'))}")
    hardware, model = load_hardware(name), load_model("llama-3.1-8b")
    cost = Roofline(model, hardware, load_engine("vllm"))
    found = speeds(torch)
    shape = Shape(torch)
    steps = []
    for sequences, context in DECODES:
        terms = cost.terms(Step(prefill=(), decodes=sequences, context=sequences * context, samples=sequences))
        row = {"step": f"decode {sequences} x {context}", "measured": shape.decode(sequences, context)}
        steps.append(row | {"predicted": terms.total - terms.overhead})
        torch.cuda.empty_cache()
    for tokens in PREFILLS:
        terms = cost.terms(Step(prefill=((tokens, 0),), decodes=0, context=0, samples=1))
        steps.append({"step": f"prefill {tokens}", "measured": shape.prefill(tokens), "predicted": terms.total - terms.overhead})
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "board": said,
        "profile": name,
        "software": {"torch": torch.__version__, "python": platform.python_version()},
        "speeds": found | {"profile_bytes_per_second": hardware.bandwidth, "profile_flops": hardware.flops},
        "steps": [row | {"ratio": row["predicted"] / row["measured"]} for row in steps],
    }


def main() -> None:
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results/gpu-check.json"
    found: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat()}
    torch = _torch()
    if torch is not None:
        found |= check(torch)
        _print(found)
    else:
        print("no PyTorch that sees a GPU: the engine's steps are not measured (pip install torch)")
    try:
        found["nvml"] = gpu_driver.driver(_load(torch))
    except CollectorError as error:
        raise SystemExit(f"gpu-check needs an NVIDIA GPU: {error}") from None
    print("\n".join(gpu_driver.lines(found["nvml"])))
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
    print(f"written to {where}")


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _load(torch: Any) -> Callable[[], None] | None:
    """Keeps the GPU busy for some milliseconds a call."""
    if torch is None:
        return None
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")

    def busy() -> None:
        for _ in range(4):
            a @ a
        torch.cuda.synchronize()

    return busy


def _print(found: dict[str, Any]) -> None:
    speed = found["speeds"]
    print(f"{found['board'].get('name')}, profile {found['profile']}, {found['date']}")
    reads, flops = speed["bytes_per_second"], speed["flops"]
    print(f"reads     {reads / 1e12:6.2f} TB/s     of {speed['profile_bytes_per_second'] / 1e12:.2f} in the profile")
    print(f"multiplies {flops / 1e12:5.0f} TFLOP/s  of {speed['profile_flops'] / 1e12:.0f} in the profile")
    print(f"{'step of llama-3.1-8b':<22}{'measured':>12}{'roofline':>12}{'ratio':>8}")
    for row in found["steps"]:
        print(f"{row['step']:<22}{row['measured'] * 1e3:>9.2f} ms{row['predicted'] * 1e3:>9.2f} ms{row['ratio']:>8.2f}")


if __name__ == "__main__":
    main()
