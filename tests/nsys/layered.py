"""A process to capture: `layered.py STEPS` runs 32 layers with two parts each, in ranges; prints UTC around a marked one."""

import sys
import time

import nvtx

LAYERS = 32


def main() -> None:
    for _ in range(int(sys.argv[1])):
        with nvtx.annotate("execute_model", domain="kvbench"):
            for layer in range(LAYERS):
                with nvtx.annotate(f"DecoderLayer_{layer}"):
                    with nvtx.annotate("self_attn"):
                        time.sleep(0.0002)
                    with nvtx.annotate("mlp"):
                        time.sleep(0.0001)
    before = time.time_ns()
    with nvtx.annotate("marked"):
        pass
    print(before, time.time_ns(), flush=True)


if __name__ == "__main__":
    main()
